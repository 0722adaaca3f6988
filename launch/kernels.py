"""Print which implementation of each op this machine uses, and why not the others: `python -m launch.kernels`.

A run stores the same in its `env.json`.
"""

import argparse
import sys
from collections.abc import Sequence
from typing import Optional

from dit.errors import EXIT_OK, one_line_errors
from dit.terminal import echo
from launch import environment
from launch.argument_types import command_parser


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command."""
    parser = command_parser(
        "launch.kernels", "Print which implementation of each op this machine uses by itself, and why not the others."
    )
    parser.add_argument(
        "--precision", choices=("bf16", "fp16", "fp32"), default="bf16", help="of the run (%(default)s)"
    )
    parser.add_argument("--head-size", type=int, metavar="N", help="features of an attention head; kernels limit them")
    return parser


@one_line_errors
def main(argv: Optional[Sequence[str]] = None) -> int:
    """Run the command and return its exit code."""
    args = build_parser().parse_args(argv)
    environment.quiet_libraries()
    from dit.backends.device import describe, local_device
    from dit.backends.sharding import in_columns
    from dit.kernels.choice import Target, table
    from dit.parallel.implementations import DTYPES, OPS

    rows = [("op", "implementation", "")]
    target = Target(local_device(), DTYPES[args.precision], args.head_size)
    for op, selected in table(OPS, target, {}).items():
        rows.append((op, selected.name, "selected"))
        rows += [("", name, why) for name, why in selected.others.items()]
    echo(f"{describe()}, {args.precision}\n{in_columns(rows)}")
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(main())
