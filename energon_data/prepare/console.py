"""What preparation prints: progress, the closing table, and the forecast of a dry run."""

import argparse
import sys
import time
from pathlib import Path
from typing import Optional

from tqdm import tqdm

from dit.errors import ConfigError
from dit.terminal import counted, echo, printable
from energon_data.prepare.build import SKIPPED, UnitRecord
from energon_data.prepare.preparation import EXTENSIONS, Preparation
from energon_data.prepare.ranks import Ranks


def make(preparation: Preparation, args: argparse.Namespace) -> Optional[UnitRecord]:
    """Make a data set, or with `--dry-run` describe it; of several ranks the first one prints.

    Args:
        args: flags of every command that has units of work.

    Returns:
        The counts; None of a dry run.
    """
    first = Ranks().is_first
    if args.dry_run:
        if first:
            echo(_forecast(preparation))
        return None
    began = time.monotonic()
    total = _run_with_progress(preparation, args, shown=first)
    if first:
        noun = "row" if _entry(preparation) == "row" else "file"
        echo(_summary(args.out, total, time.monotonic() - began, noun))
    return total


def make_captioned(preparation: Preparation, args: argparse.Namespace) -> None:
    """Make a data set of a user's files, as `make`, and count those without a caption or class."""
    total = make(preparation, args)
    if total is not None and Ranks().is_first:
        count = total.shapes.total()
        if total.without_caption:
            echo(f"  without a caption: {total.without_caption:,} of {count:,}")
        if 0 < total.labelled < count:
            echo(f"  without a class: {count - total.labelled:,} of {count:,}")


def _run_with_progress(preparation: Preparation, args: argparse.Namespace, *, shown: bool) -> UnitRecord:
    """Make the data set beside a progress bar in files (archives, of a WebDataset) with rate and time left."""
    hidden = None if shown else True  # None: where there is no terminal
    name = f"preparing {args.out}"
    with tqdm(total=preparation.entries, unit=_entry(preparation), desc=name, disable=hidden) as bar:

        def show(number: int, record: UnitRecord) -> None:
            work = preparation.units[number]
            bar.update(len(work) if isinstance(work, list) else 1)
            if record.skipped:
                bar.write(printable("; ".join(texts[0] for texts in record.examples.values())), file=sys.stderr)

        def resume(finished: int) -> None:
            if shown:
                units = f"{finished:,} of {len(preparation.units):,} parts"
                bar.write(f"{args.out}: goes on after {units}, which are in {preparation.job.partial}", file=sys.stderr)

        work = {"processes": args.processes, "force": args.force, "on_unit": show, "on_resume": resume}
        try:
            return preparation.run(**work)
        except BaseException as error:
            partial = preparation.job.partial
            if isinstance(error, OSError) and error.filename is None:  # a failed write does not name its file
                error.filename = str(partial)
            if shown and partial.exists() and not isinstance(error, ConfigError):
                bar.write(f"the same command goes on from {partial}", file=sys.stderr)
            raise


def _entry(preparation: Preparation) -> str:
    """Return the noun for a part of the input; generated data sets have samples."""
    command = preparation.plan["command"]
    nouns = {"webdataset": "archive", "tensors": "archive", "huggingface": "row"}
    return nouns.get(command, "file" if command in EXTENSIONS else "sample")


def _summary(out: Path, total: UnitRecord, seconds: float, noun: str) -> str:
    """Describe a finished data set in a few lines; `noun` is what a sample is made of."""
    size = sum(facts["bytes"] for facts in total.shards.values())
    samples, shards = counted(total.shapes.total(), "sample"), counted(len(total.shards), "shard")
    lines = [f"{out}: {samples} in {shards}, {size:,} bytes, {seconds:.0f} s"]
    for split in ("train", "val"):
        count = sum(facts["samples"] for facts in total.of(split).values())
        hint = "" if count else " (train with training.validation_interval=0, or raise --validation)"
        reads = sum(facts["samples"] * facts.get("repeats", 1) for facts in total.of(split).values())
        repeats = f", read {reads:,} times in one pass (repeats)" if reads > count else ""
        lines.append(f"  {split}: {counted(count, 'sample')}{repeats}{hint}")
    shapes = ", ".join(f"{count:,} of {shape}" for shape, count in total.shapes.most_common(5))
    lines.append(f"  shapes (C x T x H x W): {shapes}" + (", ..." if len(total.shapes) > 5 else ""))
    if total.latents.number:
        lines.append(f"  latents: {total.latents.line()}")
    if total.files:
        lines.append(f"  taken: {total.files:,} of {counted(total.files + len(total.skips), noun)}")
        lines.append(f"  turned as the file states: {counted(total.turned, 'sample')}")
        share, name = total.largest_cut
        lines.append(f"  cropped: {f'by at most {share:.0%} ({name})' if share else 'none'}")
        lines.append(f"  enlarged: {counted(total.enlarged, 'sample')}")
    for reason, count in total.skipped.most_common():
        lines.append(f"  skipped, {reason}: {count:,}; {total.examples[reason][0]}")
    if total.skips:
        lines.append(f"  every skipped {noun} and its reason: {out / SKIPPED}")
    return "\n".join(lines)


def _forecast(preparation: Preparation) -> str:
    """Say what would be made, from a few samples made in memory."""
    samples, record = preparation.try_out()
    entry = _entry(preparation)
    lines = [f"{preparation.job.out}: nothing is written; found {counted(preparation.entries, entry)}"]
    for sample in samples:
        size = sum(map(len, sample.parts.values()))
        named = sample.metadata.get("caption", "no caption")
        if (others := len(sample.metadata.get("captions", ())) - 1) > 0:
            named += f" (and {counted(others, 'other caption')})"
        lines.append(
            f"  {sample.key}: {'x'.join(map(str, sample.shape))}, {', '.join(sample.parts)}, {size:,} bytes; {named}"
        )
    for reason, texts in record.examples.items():
        lines.append(f"  skipped, {reason}: {texts[0]}")
    if samples and entry != "archive":
        tried = len(samples) + len(record.skips) - len(preparation.skipped)
        mean = sum(sum(map(len, sample.parts.values())) for sample in samples) / tried
        lines.append(
            f"  about {mean * preparation.entries / 2**20:,.1f} MiB in all, estimated from {counted(tried, 'sample')}"
        )
    return "\n".join(lines)
