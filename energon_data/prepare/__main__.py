"""Command line: `python -m energon_data.prepare letters --out DIR`."""

import argparse
import sys
from collections.abc import Sequence
from typing import Optional

from dit.errors import UserError, exit_code


def _letters(args: argparse.Namespace) -> None:
    from energon_data.prepare.letters import prepare_letters

    report = prepare_letters(
        args.out,
        size=args.size,
        fonts=args.fonts,
        samples_per_shard=args.samples_per_shard,
        variations=args.variations,
        seed=args.seed,
        force=args.force,
    )
    print(report.summary())


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command."""
    parser = argparse.ArgumentParser(prog="python -m energon_data.prepare", description="Make a data set.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    letters = commands.add_parser(
        "letters", help="capitals A-Z of every text font on this machine", description=_letters.__doc__
    )
    letters.add_argument("--out", required=True, help="folder to make")
    letters.add_argument("--size", type=int, default=16, help="side of the pictures in pixels (%(default)s)")
    letters.add_argument(
        "--fonts",
        nargs="+",
        metavar="DIR",
        help="look for fonts here instead of in matplotlib's and the system's folders",
    )
    letters.add_argument("--samples-per-shard", type=int, default=2000, metavar="N", help="(%(default)s)")
    letters.add_argument(
        "--variations", type=int, default=16, metavar="N", help="pictures per glyph and font face (%(default)s)"
    )
    letters.add_argument("--seed", type=int, default=0, help="addresses variations and order (%(default)s)")
    letters.add_argument("--force", action="store_true", help="replace an older data set")
    letters.set_defaults(run=_letters)
    return parser


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Run the command and return its exit code; errors with a known cure print one line."""
    args = build_parser().parse_args(argv)
    try:
        args.run(args)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return exit_code(error)
    return 0


if __name__ == "__main__":
    sys.exit(main())
