"""Command line: `python -m energon_data.prepare images --in DIR --out DIR`.

Other packages add commands (`dit.extensions`), such as `letters` of examples/.
"""

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Optional

from dit import extensions
from dit.command_line import Parser
from dit.errors import one_line_errors
from dit.ranges import ASPECTS
from dit.terminal import announce
from energon_data.prepare.command import Command, add_teacher, add_text_encoder, add_work, text_encoder

if TYPE_CHECKING:
    from energon_data.prepare.media import Options

OF_FOLDERS = ("images", "videos", "folder")
WITH_VIDEOS = ("videos", "folder", "webdataset")


def _flags(args: argparse.Namespace, *names: str) -> dict[str, Any]:
    """Return the values of flags by name."""
    return {name: getattr(args, name) for name in names}


def _options(args: argparse.Namespace) -> "Options":
    from dit.encoders.vae import Geometry
    from energon_data.prepare.media import Options
    from energon_data.prepare.pictures import Fit
    from energon_data.prepare.videos import Cut
    from energon_data.prepare.wording import Wording

    cut = Cut()
    if args.command in WITH_VIDEOS:
        time = 1 if args.vae is None else Geometry.read(args.vae).time
        cut = Cut(**_flags(args, "fps", "frames"), multiple_of=time, after_first=time > 1)
    return Options(
        **_flags(args, "vae", "precision", "device", "teacher", "teacher_patch", "batch", "image_format"),
        fit=Fit(**_flags(args, "size", "aspect", "multiple_of", "enlarge", "max_cut")),
        cut=cut,
        text_encoder=text_encoder(args),
        wording=Wording(default=args.caption, **_flags(args, "prefix", "tag_orders", "keep_tags")),
    )


def _run(args: argparse.Namespace) -> None:
    from energon_data.prepare.console import make
    from energon_data.prepare.huggingface import Table, prepare_huggingface
    from energon_data.prepare.preparation import Preparation

    common = _flags(args, "follow_links", "samples_per_shard", "validation")
    if args.command == "huggingface":
        columns = ("image_column", "caption_column", "label_column", "reference_column")
        table = Table(**_flags(args, "split", "config", *columns))
        make(prepare_huggingface(args.source, args.out, _options(args), table, **common), args)
        return
    folder = ("labels", "repeats", "list_file") if args.command in OF_FOLDERS else ()
    pictures = ("references",) if args.command == "images" else ()
    more = _flags(args, *folder, *pictures)
    make(Preparation.of(args.command, args.source, args.out, _options(args), **more, **common), args)


def _add_media(command: str, parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--in", dest="source", type=Path, required=True, metavar="PATH", help="folder to read")
    if command in OF_FOLDERS:
        _add_folder(parser)
    if command == "images":
        originals = partial(parser.add_argument, "--reference", dest="references", nargs="+", type=Path, default=())
        originals(
            metavar="DIR",
            help="also store the pictures that each one is edited from (data.references): those of its name, or that "
            "`reference` of its row names; it may lack those of the last folders",
        )
    _add_samples(parser, command)


def _add_huggingface(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--in",
        dest="source",
        required=True,
        metavar="NAME",
        help="data set on the Hugging Face hub, folder of parquet files or of save_to_disk, or a parquet file",
    )
    parser.add_argument("--split", default="train", metavar="NAME", help="(%(default)s)")
    parser.add_argument("--config", metavar="NAME", help="of a data set with several configurations")
    parser.add_argument("--image-column", metavar="NAME", help="files of pictures (the only such column, or image)")
    parser.add_argument("--caption-column", metavar="NAME", help="a text or list of them (caption, text, prompt, txt)")
    parser.add_argument("--label-column", metavar="NAME", help="class numbers (label)")
    parser.add_argument(
        "--reference-column",
        nargs="+",
        default=[],
        metavar="NAME",
        help="pictures that those of --image-column are edited from; a row may lack those of the last columns",
    )
    _add_samples(parser, "huggingface")


def _add_folder(parser: argparse.ArgumentParser) -> None:
    groups = parser.add_mutually_exclusive_group()
    groups.add_argument("--labels", action="store_true", help="the folders directly below --in are classes")
    groups.add_argument(
        "--repeats",
        action="store_true",
        help="the folders directly below --in are named N_NAME: read N times as often, with caption NAME by default",
    )
    parser.add_argument(
        "--list",
        dest="list_file",
        type=Path,
        metavar="FILE",
        help=".jsonl, .csv or .parquet with file_name and text (that of --in: metadata.jsonl, .csv or .parquet)",
    )


def _add_samples(parser: argparse.ArgumentParser, command: str) -> None:
    flag = parser.add_argument
    flag("--out", type=Path, required=True, help="folder to create")
    flag("--size", type=int, metavar="N", help="largest area, N x N pixels (native sizes)")
    flag(
        "--aspect",
        choices=ASPECTS,
        default="keep",
        help="the nearest size with at most this area, squares of N x N, or the nearest aspect bucket (%(default)s)",
    )
    flag("--enlarge", action="store_true", help="scale smaller pictures up to --size")
    flag("--max-cut", type=float, default=0.5, metavar="SHARE", help="skip pictures that would lose more (%(default)s)")
    flag("--multiple-of", type=int, default=16, metavar="N", help="of both sides, in pixels (%(default)s)")
    if command in WITH_VIDEOS:
        flag("--fps", type=float, help="frames per second to take (all)")
        flag("--frames", type=int, metavar="N", help="cut videos into clips of N frames (one clip)")
    flag("--follow-links", action="store_true", help="also read files and folders outside of --in to which links lead")
    flag("--caption", metavar="TEXT", help="of every file without a caption")
    flag("--caption-prefix", dest="prefix", default="", metavar="TEXT", help="before every caption")
    flag(
        "--shuffle-tags",
        dest="tag_orders",
        type=int,
        default=1,
        metavar="N",
        help="store N orders of the comma-separated tags of a caption; training draws one at each reading",
    )
    flag("--keep-tags", type=int, default=0, metavar="N", help="first tags that are not shuffled")
    formats = ("png", "webp", "jpg")
    flag("--format", dest="image_format", choices=formats, default="png", help="of stored pixels (%(default)s)")
    flag("--vae", metavar="NAME", help="store latents of this autoencoder (a diffusers folder or hub name)")
    add_text_encoder(parser)
    add_teacher(parser)
    flag("--precision", choices=("fp32", "bf16"), default="fp32", help="of the encoders (%(default)s)")
    flag("--device", default="cpu", help="of the encoders (%(default)s)")
    flag("--batch", type=int, default=8, metavar="N", help="samples encoded together (%(default)s)")
    add_work(parser, validation=0.02)


COMMANDS = {
    "images": Command("a folder of pictures with captions or classes", partial(_add_media, "images"), _run),
    "videos": Command("a folder of videos with captions or classes", partial(_add_media, "videos"), _run),
    "folder": Command("a folder of both", partial(_add_media, "folder"), _run),
    "webdataset": Command("tar files of pictures or videos with captions", partial(_add_media, "webdataset"), _run),
    "huggingface": Command(
        "a data set of the Hugging Face hub, or parquet files with pictures", _add_huggingface, _run
    ),
}


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command."""
    parser = Parser(prog="python -m energon_data.prepare", description="Write a data set.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, command in extensions.load("preparations", COMMANDS).items():
        subparser = commands.add_parser(name, help=command.summary)
        command.add_arguments(subparser)
        subparser.set_defaults(run=command.run, command=name)
    return parser


@one_line_errors
def main(argv: Optional[Sequence[str]] = None) -> int:
    """Run the command and return its exit code."""
    args = build_parser().parse_args(argv)
    announce(f"preparing {args.out}" + (f" from {args.source}" if "source" in args else ""))
    args.run(args)
    return 0


if __name__ == "__main__":
    sys.exit(main())
