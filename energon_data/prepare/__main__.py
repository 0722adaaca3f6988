"""Command line: `python -m energon_data.prepare letters --out DIR`."""

import argparse
import sys
from collections.abc import Sequence
from typing import Any, Optional

from dit.errors import one_line_errors


def _common(args: argparse.Namespace) -> dict[str, Any]:
    names = ("size", "fonts", "samples_per_shard", "variations", "text_encoder", "seed", "force")
    return {name: getattr(args, name) for name in names}


def _letters(args: argparse.Namespace) -> None:
    from energon_data.prepare.letters import prepare_letters

    print(prepare_letters(args.out, **_common(args)).summary())


def _moving_letters(args: argparse.Namespace) -> None:
    from energon_data.prepare.moving_letters import prepare_moving_letters

    print(prepare_moving_letters(args.out, frames=args.frames, stills=args.stills, **_common(args)).summary())


def _add_common(parser: argparse.ArgumentParser, *, variations: int, what: str) -> None:
    parser.add_argument("--out", required=True, help="folder to create")
    parser.add_argument("--size", type=int, default=16, help="side of the pictures in pixels (%(default)s)")
    parser.add_argument(
        "--fonts",
        nargs="+",
        metavar="DIR",
        help="look for fonts here instead of in matplotlib's and the system's folders",
    )
    parser.add_argument("--samples-per-shard", type=int, default=2000, metavar="N", help="(%(default)s)")
    parser.add_argument("--variations", type=int, default=variations, metavar="N", help=f"{what} (%(default)s)")
    parser.add_argument(
        "--text-encoder", metavar="NAME", help="also store caption embeddings, such as all-minilm-l6-v2's"
    )
    parser.add_argument("--seed", type=int, default=0, help="of variations and order (%(default)s)")
    parser.add_argument("--force", action="store_true", help="replace an older data set")


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command."""
    parser = argparse.ArgumentParser(prog="python -m energon_data.prepare", description="Write a data set.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    letters = commands.add_parser("letters", help="capitals A-Z of every text font on this machine")
    _add_common(letters, variations=16, what="pictures per glyph and font face")
    letters.set_defaults(run=_letters)
    moving = commands.add_parser("moving_letters", help="clips of these letters moving in four directions, and stills")
    _add_common(moving, variations=16, what="clips per glyph, font face and direction")
    moving.add_argument("--frames", type=int, default=8, metavar="N", help="frames of each clip (%(default)s)")
    moving.add_argument(
        "--stills", type=int, default=0, metavar="N", help="frames of each that are also samples (none)"
    )
    moving.set_defaults(run=_moving_letters)
    return parser


@one_line_errors
def main(argv: Optional[Sequence[str]] = None) -> int:
    """Run the command and return its exit code."""
    args = build_parser().parse_args(argv)
    args.run(args)
    return 0


if __name__ == "__main__":
    sys.exit(main())
