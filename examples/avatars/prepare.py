"""The command `avatars` of `python -m energon_data.prepare`."""

import argparse
from pathlib import Path

from dit.terminal import echo
from energon_data.prepare.command import Command, add_text_encoder, add_work, text_encoder


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, required=True, help="folder to create")
    parser.add_argument("--count", type=int, default=5000, metavar="N", help="different avatars (%(default)s)")
    add_text_encoder(parser)
    add_work(parser, validation=0.0)


def _write(args: argparse.Namespace) -> None:
    from energon_data.prepare.console import make
    from examples.avatars.design import ATTRIBUTION
    from examples.avatars.drawings import prepare_avatars

    settings = {name: getattr(args, name) for name in ("count", "samples_per_shard", "validation")}
    make(prepare_avatars(args.out, text_encoder=text_encoder(args), **settings), args)
    echo(ATTRIBUTION)


AVATARS = Command(
    "pixel-art avatars with captions, without some combinations of attributes",
    _add_arguments,
    _write,
    folders={"avatars": "--text-encoder all-minilm-l6-v2"},
)
