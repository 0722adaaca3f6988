"""The command `avatars` of `python -m energon_data.prepare`."""

import argparse
from pathlib import Path

from dit.terminal import echo
from energon_data.prepare.command import Command, add_teacher, add_text_encoder, add_work, text_encoder


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, required=True, help="folder to create")
    parser.add_argument("--count", type=int, default=5000, metavar="N", help="different avatars (%(default)s)")
    parser.add_argument(
        "--size", type=int, default=16, metavar="N", help="side in pixels, a multiple of 16 (%(default)s)"
    )
    parser.add_argument("--vae", metavar="NAME", help="store latents of this autoencoder (a diffusers folder)")
    add_text_encoder(parser)
    add_teacher(parser)
    add_work(parser, validation=0.0)


def _write(args: argparse.Namespace) -> None:
    from energon_data.prepare.console import make
    from examples.avatars.design import ATTRIBUTION
    from examples.avatars.drawings import prepare_avatars

    names = ("count", "size", "vae", "teacher", "teacher_patch", "samples_per_shard", "validation")
    settings = {name: getattr(args, name) for name in names}
    make(prepare_avatars(args.out, text_encoder=text_encoder(args), **settings), args)
    echo(ATTRIBUTION)


AVATARS = Command(
    "pixel-art avatars with captions, without some combinations of attributes",
    _add_arguments,
    _write,
    folders={
        "avatars": "--text-encoder all-minilm-l6-v2",
        "avatars_64": "--size 64",
        "avatars_latent": "--size 64 --vae runs/avatar_vae --text-encoder all-minilm-l6-v2",
    },
)
