"""Evaluate a trained model: `python -m launch.evaluate --checkpoint runs/letters_dit --metric letters`.

A metric is a row of `METRICS`.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Optional

from dit.errors import ConfigError, one_line_errors
from dit.terminal import echo
from launch import environment, held_out, letter_score, loss_score, pictograms, picture_scores, sharpness
from launch.cascade import read_stages
from launch.measurement import Measurement
from launch.sample import add_sampling_arguments, open_generator, sampling_settings

if TYPE_CHECKING:
    from dit.inference.generator import Generator

EXIT_BELOW_MINIMUM = 1
DESCRIPTION = "Measure the samples of a checkpoint, or its loss on held-out data."


@dataclass(frozen=True)
class Metric:
    """A row of the table.

    Attributes:
        summary: for the help.
        measure: measures the generator that the command line names.
        add_arguments: adds the flags that only this metric reads; rows may share one function.
        more_is_better: whether `--minimum` is of this metric.
        asks: whether samples are asked for by class or text, as a cascade can draw them; else held-out data are read.
        refers: whether they are asked for if `--reference` names pictures.
    """

    summary: str
    measure: Callable[[argparse.Namespace, "Generator"], Measurement]
    add_arguments: Callable[[argparse.ArgumentParser], None]
    more_is_better: bool = True
    asks: bool = False
    refers: bool = False


METRICS = {
    "letters": Metric(
        "how many generated letters does a classifier of real letters read correctly?",
        letter_score.measure,
        letter_score.add_arguments,
        asks=True,
    ),
    "pictograms": Metric(
        "how near do pictograms come to the drawings that were asked for by name?",
        pictograms.measure,
        pictograms.add_arguments,
        asks=True,
    ),
    "sharpness": Metric(
        "how near does a super-resolution model come to real pictures, beside bicubic interpolation?",
        sharpness.measure,
        held_out.add_arguments,
    ),
    "loss": Metric(
        "the loss on held-out data, as in training and at fixed times as MLPerf's FLUX.1",
        loss_score.measure,
        held_out.add_arguments,
        more_is_better=False,
    ),
    "fid": Metric(
        "Frechet distance between held-out pictures, or those of --reference, and generated ones",
        picture_scores.fid,
        picture_scores.add_arguments,
        more_is_better=False,
        refers=True,
    ),
    "kid": Metric(
        "kernel distance between them, unbiased for few pictures",
        picture_scores.kid,
        picture_scores.add_arguments,
        more_is_better=False,
        refers=True,
    ),
    "clip": Metric(
        "how well do generated pictures fit their prompts, by a CLIP model?",
        picture_scores.clip,
        picture_scores.add_arguments,
        asks=True,
    ),
}


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command."""
    summaries = "\n".join(f"  {name:<10}{metric.summary}" for name, metric in METRICS.items())
    parser = argparse.ArgumentParser(
        prog="python -m launch.evaluate",
        description=DESCRIPTION,
        epilog=f"metrics\n{summaries}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--metric", choices=METRICS, default="letters", help="what is measured (%(default)s)")
    add_sampling_arguments(parser)
    parser.add_argument("--data", metavar="DIR", help="data set to compare with (default: the run's)")
    parser.add_argument(
        "--minimum",
        type=float,
        metavar="X",
        help="exit with 1 below this; a share such as 0.9, of sharpness dB above bicubic",
    )
    parser.add_argument("--json", action="store_true", help="print the result as one JSON object")
    parser.add_argument("--out", metavar="FILE", help="of letters and pictograms: also write the samples as a PNG")
    for add_arguments in dict.fromkeys(metric.add_arguments for metric in METRICS.values()):
        add_arguments(parser)
    return parser


@one_line_errors
def main(argv: Optional[Sequence[str]] = None) -> int:
    """Run the command and return its exit code."""
    args = build_parser().parse_args(argv)
    metric = METRICS[args.metric]
    if args.minimum is not None and not metric.more_is_better:
        raise ConfigError(f"--minimum {args.minimum} is of metrics that grow with quality, and {args.metric} falls")
    if args.cascade and not (metric.asks or (metric.refers and args.reference)):
        cure = "give --reference with real pictures or their statistics" if metric.refers else "use --checkpoint"
        raise ConfigError(f"--metric {args.metric} reads held-out data, and a cascade draws from words; {cure}")
    missed = False
    for name, result in (
        measure_stages(args, metric) if args.cascade else [("", metric.measure(args, open_generator(args)))]
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


def measure_stages(args: argparse.Namespace, metric: Metric) -> Iterator[tuple[str, Measurement]]:
    """Measure what a cascade has drawn after each of its stages; yields the name of the stage, and the result."""
    environment.prepare()
    environment.quiet_libraries()
    from dit.inference.cascade import Cascade
    from dit.inference.generator import groups_to_sample

    groups, before = groups_to_sample(), None
    for stage in read_stages(args.cascade, args.stage):
        own = stage.arguments(args)
        generator = open_generator(own, groups)
        if before is not None:
            generator = Cascade(generator, *before, level=own.augmentation)
        yield stage.name, metric.measure(own, generator)
        # Each `generate` is given the seed of all stages.
        before = generator, {name: value for name, value in sampling_settings(own).items() if name != "seed"}


if __name__ == "__main__":
    sys.exit(main())
