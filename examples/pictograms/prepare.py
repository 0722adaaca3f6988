"""The command `pictograms` of `python -m energon_data.prepare`."""

import argparse
from pathlib import Path

from dit.terminal import echo
from energon_data.prepare.command import Command, add_text_encoder, add_work, text_encoder


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, required=True, help="folder to create")
    parser.add_argument("--size", type=int, required=True, metavar="N", help="side of the pictures in pixels")
    parser.add_argument(
        "--blocks",
        nargs="+",
        metavar="NAME",
        help="of Unicode: symbols dingbats pictographs emoticons transport supplemental extended (all characters)",
    )
    parser.add_argument("--count", type=int, metavar="N", help="up to N, evenly spread over the code points (all)")
    parser.add_argument("--wordings", type=int, default=1, metavar="N", help="captions of each, 1 to 3 (%(default)s)")
    parser.add_argument("--vae", metavar="NAME", help="store latents of this autoencoder (a diffusers folder)")
    add_text_encoder(parser)
    add_work(parser, validation=0.0)


def _write(args: argparse.Namespace) -> None:
    from energon_data.prepare.console import make
    from examples.pictograms.drawings import ATTRIBUTION, prepare_pictograms

    names = ("size", "blocks", "count", "wordings", "vae", "samples_per_shard", "validation")
    settings = {name: getattr(args, name) for name in names}
    make(prepare_pictograms(args.out, text_encoder=text_encoder(args), **settings), args)
    echo(ATTRIBUTION)


PICTOGRAMS = Command(
    "colour pictograms of Unicode characters, with their names",
    _add_arguments,
    _write,
    folders={
        "pictograms": "--size 64",
        "pictograms_latent": "--size 64 --vae runs/pictogram_vae --text-encoder all-minilm-l6-v2",
        "pictograms_64": "--size 64 --text-encoder all-minilm-l6-v2",
        "all_pictograms_64": "--size 64 --text-encoder all-minilm-l6-v2 --validation 0.05",
    },
)
