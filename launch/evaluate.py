"""Evaluate a trained model: `python -m launch.evaluate --checkpoint RUN --metric loss`.

Other packages add metrics (`dit.extensions`), such as `letters` of examples/.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Optional

from dit import extensions
from dit.errors import ConfigError, one_line_errors
from dit.terminal import echo
from launch import environment, held_out, picture_scores
from launch.argument_types import command_parser
from launch.cascade import Stage, stages_of
from launch.measurement import Measurement, Metric
from launch.sample import add_sampling_arguments, note_untrained_guidance, open_generator, sampling_settings

if TYPE_CHECKING:
    from dit.inference.generator import Generator

EXIT_BELOW_MINIMUM = 1
DESCRIPTION = "Measure the samples of a checkpoint, or its loss on held-out data."

_of_pictures = partial(Metric, add_arguments=picture_scores.add_arguments)

METRICS = {
    "loss": Metric(
        "loss on held-out data, as in training and at fixed times as in MLPerf's FLUX.1",
        held_out.measure_loss,
        held_out.add_arguments,
        more_is_better=False,
        draws=False,
    ),
    "fid": _of_pictures(
        "Frechet distance between held-out pictures, or those of --reference, and generated ones",
        picture_scores.fid,
        more_is_better=False,
        takes_reference=True,
    ),
    "kid": _of_pictures(
        "kernel distance between held-out and generated pictures, unbiased for few pictures",
        picture_scores.kid,
        more_is_better=False,
        takes_reference=True,
    ),
    "precision": _of_pictures(
        "share of generated pictures that are like held-out ones; recall, the reverse",
        picture_scores.precision_and_recall,
        takes_reference=True,
    ),
    "clip": _of_pictures(
        "similarity of generated pictures and their prompts by a CLIP model",
        picture_scores.clip,
        by_condition=True,
    ),
    "ocr": _of_pictures(
        "share of the quoted texts of prompts that RapidOCR reads exactly in their pictures, and edit distance",
        picture_scores.ocr,
        by_condition=True,
    ),
}


def metrics() -> dict[str, Metric]:
    """Return the metrics by name, with those of other packages."""
    return extensions.load("metrics", METRICS)


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command."""
    named = metrics()
    width = 2 + max(map(len, named))
    summaries = "\n".join(f"  {name:<{width}}{metric.summary}" for name, metric in named.items())
    parser = command_parser("launch.evaluate", DESCRIPTION, f"metrics\n{summaries}")
    parser.add_argument("--metric", choices=named, required=True, help="one of the list below")
    add_sampling_arguments(parser)
    parser.add_argument("--data", metavar="DIR", help="data set to compare with (default: the run's)")
    parser.add_argument(
        "--minimum",
        type=float,
        metavar="X",
        help="exit with 1 below this share, precision, score of CLIP, or dB above bicubic (sharpness)",
    )
    parser.add_argument("--json", action="store_true", help="print the result as one JSON object")
    parser.add_argument("--out", metavar="FILE", help="of some metrics: also write the samples as a PNG")
    for add_arguments in dict.fromkeys(metric.add_arguments for metric in named.values()):
        add_arguments(parser)
    return parser


@one_line_errors
def main(argv: Optional[Sequence[str]] = None) -> int:
    """Run the command and return its exit code."""
    args = build_parser().parse_args(argv)
    metric = metrics()[args.metric]
    if args.minimum is not None and not metric.more_is_better:
        raise ConfigError(f"--minimum {args.minimum} needs a metric that grows with quality, and {args.metric} falls")
    if args.cascade and not (metric.by_condition or (metric.takes_reference and args.reference)):
        cure = "give --reference with real pictures" if metric.takes_reference else "use --checkpoint"
        raise ConfigError(
            f"--metric {args.metric} reads held-out data, and a cascade draws samples of classes or texts; {cure}"
        )
    stages, missed = stages_of(args), False
    for name, result in (
        measure_stages(args, metric, stages) if stages else [("", result_of(args, metric, open_generator(args)))]
    ):
        missed |= bool(result.missed)
        if environment.rank() > 0:
            continue
        if args.json:
            echo(json.dumps({"stage": name} | result.record if name else result.record))
        else:
            echo(*([f"stage {name}"] if name else []), *result.lines, sep="\n")
        echo(*result.missed, sep="\n", end="\n" if result.missed else "", file=sys.stderr)
    return EXIT_BELOW_MINIMUM if missed else 0


def result_of(args: argparse.Namespace, metric: Metric, generator: "Generator") -> Measurement:
    """Return the result of a metric for a checkpoint; every rank calls this."""
    if metric.draws:
        note_untrained_guidance(args, generator)
    return metric.measure(args, generator)


def measure_stages(
    args: argparse.Namespace, metric: Metric, stages: Sequence[Stage]
) -> Iterator[tuple[str, Measurement]]:
    """Measure the samples of a cascade after each stage; yields the name of the stage and the result."""
    environment.prepare(quiet=True)
    from dit.inference.cascade import Cascade
    from dit.inference.generator import groups_to_sample

    folders = [folder for stage in stages for folder in (stage.folder, stage.settings.get("guide"))]
    groups, before = groups_to_sample(*filter(None, folders)), None
    for stage in stages:
        stage_args = stage.arguments(args)
        generator = open_generator(stage_args, groups)
        if before is not None:
            generator = Cascade(generator, *before, level=stage_args.augmentation)
        yield stage.name, result_of(stage_args, metric, generator)
        # All stages use the seed of `generate`.
        before = generator, {name: value for name, value in sampling_settings(stage_args).items() if name != "seed"}


if __name__ == "__main__":
    sys.exit(main())
