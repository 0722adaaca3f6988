"""The commands `letters` and `moving_letters` of `python -m energon_data.prepare`."""

import argparse
from typing import Any

from dit.terminal import echo
from energon_data.prepare.command import Command, add_teacher, add_text_encoder, text_encoder


def _add_arguments(parser: argparse.ArgumentParser, variations: str) -> None:
    parser.add_argument("--out", required=True, help="folder to create")
    parser.add_argument("--size", type=int, default=16, help="side of the pictures in pixels (%(default)s)")
    parser.add_argument(
        "--fonts",
        nargs="+",
        metavar="DIR",
        help="look for fonts here instead of in matplotlib's and the system's folders",
    )
    parser.add_argument("--samples-per-shard", type=int, default=2000, metavar="N", help="(%(default)s)")
    parser.add_argument("--variations", type=int, default=16, metavar="N", help=f"{variations} (%(default)s)")
    add_text_encoder(parser)
    parser.add_argument("--seed", type=int, default=0, help="of variations and order (%(default)s)")
    parser.add_argument("--force", action="store_true", help="replace an older data set")


def _settings(args: argparse.Namespace) -> dict[str, Any]:
    names = ("size", "fonts", "samples_per_shard", "variations", "seed", "force")
    return {**{name: getattr(args, name) for name in names}, "text_encoder": text_encoder(args)}


def _add_stills(parser: argparse.ArgumentParser) -> None:
    _add_arguments(parser, "pictures per glyph and font face")
    add_teacher(parser)


def _write_stills(args: argparse.Namespace) -> None:
    from examples.letters.stills import prepare_letters

    echo(prepare_letters(args.out, teacher=args.teacher, teacher_patch=args.teacher_patch, **_settings(args)).summary())


def _add_clips(parser: argparse.ArgumentParser) -> None:
    _add_arguments(parser, "clips per glyph, font face and direction")
    parser.add_argument("--frames", type=int, default=8, metavar="N", help="frames of each clip (%(default)s)")
    parser.add_argument(
        "--stills", type=int, default=0, metavar="N", help="frames of each clip that are also samples (none)"
    )


def _write_clips(args: argparse.Namespace) -> None:
    from examples.letters.moving import prepare_moving_letters

    echo(prepare_moving_letters(args.out, frames=args.frames, stills=args.stills, **_settings(args)).summary())


LETTERS = Command(
    "capitals A-Z of every text font on this machine",
    _add_stills,
    _write_stills,
    folders={
        "letters": "",
        "letters_32": "--size 32",
        "letters_64": "--size 64",
        "letters_text": "--text-encoder all-minilm-l6-v2",
    },
)
MOVING_LETTERS = Command(
    "clips of these letters moving in four directions, and stills",
    _add_clips,
    _write_clips,
    folders={
        "moving_letters": "--text-encoder all-minilm-l6-v2",
        "moving_letters_mixed": "--stills 2 --text-encoder all-minilm-l6-v2",
    },
)
