"""A command of `python -m energon_data.prepare`, and flags that several commands have."""

import argparse
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Optional


@dataclass(frozen=True)
class Command:
    """A command that writes a data set.

    Attributes:
        summary: its line in the help.
        add_arguments: adds its flags, with `--out` for the folder. It runs for every `--help`, so it imports nothing
            heavy.
        folders: flags that write the data folders of recipes, by folder name; errors for missing folders show them.
    """

    summary: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], None]
    folders: Mapping[str, str] = field(default_factory=dict)


def add_text_encoder(parser: argparse.ArgumentParser) -> None:
    """Add the flag of encoders that embed captions."""
    parser.add_argument(
        "--text-encoder",
        action="append",
        metavar="[ENTRY=]NAME",
        help="store embeddings of the captions: the folder of a diffusers pipeline, for all its encoders, "
        "all-minilm-l6-v2, or a folder or hub name of an encoder; again for further entries, such as pooled=NAME",
    )


def text_encoder(args: argparse.Namespace) -> Optional[str]:
    """Return all `--text-encoder` flags as one line."""
    return ",".join(args.text_encoder) if args.text_encoder else None


def add_teacher(parser: argparse.ArgumentParser) -> None:
    """Add the flags of a teacher, whose features samples store."""
    parser.add_argument(
        "--teacher",
        metavar="NAME",
        help="store tokens of this DINOv2 (a folder or hub name), or of efficientnet_lite0, for objective.alignment",
    )
    parser.add_argument(
        "--teacher-patch", type=int, default=16, metavar="N", help="pixels per side of a model's token (%(default)s)"
    )


def add_work(parser: argparse.ArgumentParser, *, validation: float) -> None:
    """Add the flags of commands that write a data set in resumable units of work."""
    flag = parser.add_argument
    flag("--validation", type=float, default=validation, metavar="SHARE", help="held out (%(default)s)")
    flag("--samples-per-shard", type=int, default=1000, metavar="N", help="files of a shard (%(default)s)")
    flag("--processes", type=int, default=os.cpu_count() or 1, metavar="N", help="(%(default)s)")
    flag("--force", action="store_true", help="replace an older data set, and start over")
