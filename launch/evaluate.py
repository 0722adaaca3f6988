"""Evaluate a trained model: `python -m launch.evaluate --checkpoint runs/letters_dit --metric letters`.

A metric is a row of `METRICS`.
"""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Optional

from dit.errors import one_line_errors
from launch import letter_score
from launch.measurement import Measurement
from launch.sample import add_sampling_arguments, open_generator

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
    """

    summary: str
    measure: Callable[[argparse.Namespace, "Generator"], Measurement]
    add_arguments: Callable[[argparse.ArgumentParser], None]


METRICS = {
    "letters": Metric(
        "how many generated letters does a classifier of real letters read correctly?",
        letter_score.measure,
        letter_score.add_arguments,
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
    parser.add_argument("--minimum", type=float, metavar="X", help="exit with 1 below this; a share such as 0.9")
    parser.add_argument("--json", action="store_true", help="print the result as one JSON object")
    parser.add_argument("--out", metavar="FILE", help="also write the samples as a PNG")
    for add_arguments in dict.fromkeys(metric.add_arguments for metric in METRICS.values()):
        add_arguments(parser)
    return parser


@one_line_errors
def main(argv: Optional[Sequence[str]] = None) -> int:
    """Run the command and return its exit code."""
    args = build_parser().parse_args(argv)
    result = METRICS[args.metric].measure(args, open_generator(args))
    if args.json:
        print(json.dumps(result.record))
    else:
        print(*result.lines, sep="\n")
    print(*result.missed, sep="\n", end="\n" if result.missed else "", file=sys.stderr)
    return EXIT_BELOW_MINIMUM if result.missed else 0


if __name__ == "__main__":
    sys.exit(main())
