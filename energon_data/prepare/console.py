"""Console output of preparation: progress and summary."""

import argparse
import re
import sys
import time
from pathlib import Path
from typing import Optional

from tqdm import tqdm

from dit.errors import ConfigError
from dit.terminal import counted, echo, printable
from energon_data.contents import Contents
from energon_data.prepare.build import SKIPPED, Ranks, UnitRecord
from energon_data.prepare.preparation import Preparation

LINES_WITH_A_FILE = {
    "animated": "first frame of an animation",
    "converted": "colours converted to sRGB",
    "bad_profile": "colour profile not readable, taken as sRGB",
    "not_converted": "HDR or wide-gamut clips, colours not converted",
}
"""Lines of the summary with the name of a file, by property of a sample."""


def make(preparation: Preparation, args: argparse.Namespace) -> None:
    """Make a data set; rank 0 prints."""
    first = Ranks().is_first
    began = time.monotonic()
    total = _run_with_progress(preparation, args, visible=first)
    if first:
        echo(_summary(preparation, total, time.monotonic() - began))
        if preparation.entry != "sample" and (command := training_command(args.out)):
            echo(f"  train on it: {command}")


def _run_with_progress(preparation: Preparation, args: argparse.Namespace, *, visible: bool) -> UnitRecord:
    """Make the data set with a progress bar in files (or archives) with rate and remaining time."""
    hidden = None if visible else True  # None: hidden only without a terminal
    partial, name = preparation.job.partial, f"preparing {args.out}"
    with tqdm(total=preparation.entries, unit=preparation.entry, desc=name, disable=hidden) as bar:

        def show(number: int, record: UnitRecord) -> None:
            work = preparation.units[number]
            bar.update(len(work) if isinstance(work, list) else 1)
            if record.skipped:
                bar.write(printable("; ".join(texts[0] for texts in record.examples.values())), file=sys.stderr)

        def resume(finished: int) -> None:
            if visible:
                units = f"{finished:,} of {len(preparation.units):,} parts"
                bar.write(f"{args.out}: continues after {units}, which are in {partial}", file=sys.stderr)

        try:
            return preparation.run(processes=args.processes, force=args.force, on_unit=show, on_resume=resume)
        except BaseException as error:
            if isinstance(error, OSError) and error.filename is None:  # a failed write does not name its file
                error.filename = str(partial)
            if visible and partial.exists() and not isinstance(error, ConfigError):
                command = "the same command without --force" if args.force else "the same command"
                bar.write(f"{command} continues from {partial}", file=sys.stderr)
            raise


def training_command(folder: Path) -> Optional[str]:
    """Return the command that trains `own_data` on a folder.

    Returns:
        None if the recipe has no model for the data, or a shell would change the path.
    """
    contents = Contents.read(folder)
    if contents is None or not re.fullmatch(r"[\w./ -]+", str(folder)):
        return None
    if contents.most_references and not (contents.captions or contents.context_size):
        return None
    text_encoder = ", text_encoder='all-minilm-l6-v2'" if contents.needs_text_encoder else ""
    flags = f"--yes --factory \"own_data(data='{folder}'{text_encoder})\""
    return f"python -m launch.train {flags}"


def _summary(preparation: Preparation, total: UnitRecord, seconds: float) -> str:
    """Describe a finished data set in a few lines."""
    out, noun = preparation.job.out, "row" if preparation.entry == "row" else "file"
    size, num_samples = sum(facts["bytes"] for facts in total.shards.values()), total.shapes.total()
    samples, shards = counted(num_samples, "sample"), counted(len(total.shards), "shard")
    lines = [f"{out}: {samples} in {shards}, {size:,} bytes, {seconds:.0f} s"]
    for split in ("train", "val"):
        of_split = sum(facts["samples"] for facts in total.of(split).values())
        hint = "" if of_split else " (own_data and finetune need none; other recipes: training.validation_interval=0)"
        reads = sum(facts["samples"] * facts.get("repeats", 1) for facts in total.of(split).values())
        repeats = f", read {reads:,} times in one pass (repeats)" if reads > of_split else ""
        lines.append(f"  {split}: {counted(of_split, 'sample')}{repeats}{hint}")
    shapes = ", ".join(f"{count:,} of {shape}" for shape, count in total.shapes.most_common(5))
    lines.append(f"  shapes (C x T x H x W): {shapes}" + (", ..." if len(total.shapes) > 5 else ""))
    if total.latents.number:
        lines.append(f"  latents: {total.latents.line()}")
    counts = total.counts
    if used := counts["files"] + counts["partly_used"]:
        partly = f", {counts['partly_used']:,} of them in part" if counts["partly_used"] else ""
        unlisted = len(preparation.skipped) if noun == "row" else 0  # files of the folder that no row names
        lines.append(f"  used: {used:,} of {counted(counts['files'] + len(total.skips) - unlisted, noun)}{partly}")
        lines.append(f"  turned according to the file: {counted(counts['turned'], 'sample')}")
        share, name = total.largest_cut
        lines.append(f"  cropped: {f'by at most {share:.0%} ({name})' if share else 'none'}")
        lines.append(f"  enlarged: {counted(counts['enlarged'], 'sample')}")
        for name, text in LINES_WITH_A_FILE.items():
            if counts[name]:
                lines.append(f"  {text}: {counted(counts[name], 'sample')} ({total.first_files[name]})")
        if counts["edited"]:
            lines.append(f"  with a reference picture: {counted(counts['edited'], 'sample')}")
    for reason, count in total.skipped.most_common():
        lines.append(f"  skipped, {reason}: {count:,}; {total.examples[reason][0]}")
    if total.skips:
        lines.append(f"  every skipped {'file' if preparation.skipped else noun} and its reason: {out / SKIPPED}")
    if counts["without_caption"]:
        lines.append(f"  without a caption: {counts['without_caption']:,} of {num_samples:,}")
    if 0 < counts["labelled"] < num_samples:
        lines.append(f"  without a class: {num_samples - counts['labelled']:,} of {num_samples:,}")
    return "\n".join(lines)
