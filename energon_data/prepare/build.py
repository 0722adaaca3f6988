"""Write shards from a listing: in parallel, restartable, with bit-identical results.

The listing is split into units of work. A unit writes at most one shard per split, `train-000012.tar`, and then a
record, `unit-000012.json`, that marks it as finished. An interrupted preparation leaves finished units in a folder next
to the output; the same command continues with them. The result does not depend on the number of processes. Under
torchrun, rank n modulo the number of ranks makes unit n; rank 0 opens the folder and publishes it.

    .OUT.partial/plan.json           everything that the result depends on; another command cannot use this folder
    .OUT.partial/unit-000012.json    a finished unit: its shards with their SHA-256, skipped files and reasons
    .OUT.partial/data/               renamed to OUT at the end; its skipped.jsonl lists skipped files
"""

import hashlib
import json
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field, fields
from datetime import timedelta
from itertools import chain
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple, Optional

from dit.data_api import sample_id
from dit.durable_files import fsync, write_atomic
from dit.errors import ConfigError, DataError
from dit.safe_files import parse_json, read_bytes
from energon_data.colours import OTHER_COLOURS, Colours
from energon_data.latent_scale import Moments
from energon_data.prepare.shards import (
    ShardWriter,
    check_replaceable,
    publish,
    write_dataset_file,
    write_energon_metadata,
)
from energon_data.prepare.sources import Source
from energon_data.prepare.walk import Skipped, reasons
from energon_data.samples import SampleError

TRAIN, VALIDATION = "train", "val"
PLAN = "plan.json"
SKIPPED = "skipped.jsonl"
LONGEST_WAIT = timedelta(days=30)  # for the units of the slowest rank
EXAMPLES = 3  # skipped samples that are listed per reason
LONGEST_PLAN = 64 << 30  # bytes; it has about 100 for each file
CAPTIONS = 16  # captions that a data set lists as examples


class Changes(NamedTuple):
    """Changes to the pixels of a sample.

    Attributes:
        turned: the orientation, or the pixel aspect ratio, in the file was applied.
        animated: it is the first frame of an animated picture.
    """

    turned: bool = False
    cut: float = 0.0
    enlarged: bool = False
    colours: Colours = "sRGB"
    animated: bool = False


@dataclass(frozen=True)
class Sample:
    """A sample to be written to a shard.

    Attributes:
        origin: name of its file; all samples of a file belong to one split.
        parts: bytes by part name.
        repeats: number of reads in one pass over the training data; equal for all samples of a unit.
        reference_shapes: (C, T, H, W) of the pictures that it is edited from.
    """

    key: str
    origin: str
    metadata: dict[str, Any]
    parts: dict[str, bytes]
    shape: tuple[int, ...]
    changes: Changes = field(default_factory=Changes)
    latent: Moments = field(default_factory=Moments)
    repeats: int = 1
    reference_shapes: tuple[tuple[int, ...], ...] = ()


Raw = Source | tuple[str, SampleError]
"""An undecoded sample, or the name and error of one that cannot be read."""
Work = Callable[[Iterable[Any], "UnitRecord"], Iterator[Sample]]
"""Converts sources (of pictures and videos: `Raw`) to samples in their order; adds skipped ones to the record."""


@dataclass
class UnitRecord:
    """Counts of a finished unit.

    Attributes:
        shards: samples, bytes and SHA-256 of each shard by name, and the repeats of its samples if not 1.
        counts: numbers by name: `files` that were read without an error; `partly_used`, videos of which
            some clips are not used; samples with each property of `properties_of`.
        first_files: the first file with each property, by name.
        captions: random examples: those with the smallest hashes of all different captions.
        num_classes: one more than the largest label; 0 without labels.
        most_references: number of pictures that a sample is edited from, of the sample with most.
        largest_cut: share of a picture, and the name of its file.
    """

    shards: dict[str, dict[str, Any]] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)
    first_files: dict[str, str] = field(default_factory=dict)
    skips: list[Skipped] = field(default_factory=list)
    shapes: Counter[str] = field(default_factory=Counter)
    reference_shapes: Counter[str] = field(default_factory=Counter)
    captions: list[str] = field(default_factory=list)
    num_classes: int = 0
    most_references: int = 0
    largest_cut: tuple[float, str] = (0.0, "")
    latents: Moments = field(default_factory=Moments)

    def count(self, sample: Sample) -> None:
        properties, caption = properties_of(sample), sample.metadata.get("caption")
        name = sample.metadata.get("source", sample.key)
        one = UnitRecord(
            counts=Counter(properties),
            first_files=dict.fromkeys(properties, name),
            shapes=Counter([_text_of(sample.shape)]),
            reference_shapes=Counter(map(_text_of, sample.reference_shapes)),
            captions=[caption] if isinstance(caption, str) else [],
            num_classes=sample.metadata.get("label", -1) + 1,
            most_references=len(sample.reference_shapes),
            largest_cut=(sample.changes.cut, name),
            latents=sample.latent,
        )
        self.add(one)

    def skip(self, name: str, error: SampleError) -> None:
        self.skips.append(Skipped(name, error.reason, error.detail))

    @property
    def skipped(self) -> Counter[str]:
        return Counter(skip.reason for skip in self.skips)

    @property
    def examples(self) -> dict[str, list[str]]:
        examples: dict[str, list[str]] = {}
        for name, reason, detail in self.skips:
            if len(texts := examples.setdefault(reason, [])) < EXAMPLES:
                texts.append(f"{name}: {detail}")
        return examples

    def of(self, split: str) -> dict[str, dict[str, Any]]:
        return {name: self.shards[name] for name in sorted(self.shards) if name.startswith(f"{split}-")}

    def add(self, other: "UnitRecord") -> None:
        self.shards |= other.shards
        for counter in ("counts", "shapes", "reference_shapes"):
            getattr(self, counter).update(getattr(other, counter))
        first = self.first_files
        first |= {name: min(file, first.get(name, file)) for name, file in other.first_files.items()}
        self.skips += other.skips
        different = {*self.captions, *other.captions}
        self.captions = sorted(different, key=lambda text: hashlib.sha256(text.encode()).digest())[:CAPTIONS]
        self.num_classes = max(self.num_classes, other.num_classes)
        self.most_references = max(self.most_references, other.most_references)
        if other.largest_cut[0] > self.largest_cut[0]:
            self.largest_cut = other.largest_cut
        self.latents = self.latents.plus(other.latents)


def properties_of(sample: Sample) -> list[str]:
    """Return the properties of a sample that are counted: changes to its pixels, and what it has or lacks."""
    changes = sample.changes
    properties = {
        "labelled": "label" in sample.metadata,
        "edited": bool(sample.reference_shapes),
        "without_caption": not isinstance(sample.metadata.get("caption"), str),
        "turned": changes.turned,
        "enlarged": changes.enlarged,
        "animated": changes.animated,
        changes.colours: changes.colours != "sRGB",
    }
    return [name for name, has in properties.items() if has]


def _text_of(shape: Iterable[int]) -> str:
    return "x".join(map(str, shape))


def is_held_out(origin: str, share: float) -> bool:
    """Return whether the samples of a file belong to the validation split; depends only on its name."""
    return sample_id(f"split/{origin}") % 1_000_000 < round(share * 1_000_000)


class Ranks:
    """Rank and number of the processes of a launcher, which write to the same folder; one process without a launcher.

    They synchronise after rank 0 has opened the folder, after all units are finished, and after all records are read.
    """

    def __init__(self) -> None:
        self.rank, self.count = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))

    @property
    def is_first(self) -> bool:
        """True for the process that opens the data set, publishes it and reports."""
        return self.rank == 0

    def wait(self) -> None:
        if self.count == 1:
            return
        import torch.distributed as dist

        if not dist.is_initialized():
            dist.init_process_group("gloo", timeout=LONGEST_WAIT)
        dist.barrier()


@dataclass(frozen=True)
class Job:
    """Functions and settings of a preparation; picklable, for other processes."""

    out: Path
    sources: Callable[[Any], Iterable[Any]]
    work: Work
    validation: float

    @property
    def partial(self) -> Path:
        """Folder for unfinished work."""
        return self.out.with_name(f".{self.out.name}.partial")

    @property
    def data(self) -> Path:
        return self.partial / "data"


def _make_unit(job: Job, number: int, unit: Any) -> UnitRecord:
    """Write the shards of one unit, then its record; possibly in a worker process."""
    record, repeats = UnitRecord(), dict[str, int]()
    writers = {split: ShardWriter(job.data, split, None, first=number) for split in (TRAIN, VALIDATION)}
    for sample in job.work(job.sources(unit), record):
        split = VALIDATION if is_held_out(sample.origin, job.validation) else TRAIN
        writers[split].add(sample.key, sample.metadata, sample.parts)
        record.count(sample)
        repeats = {"repeats": sample.repeats} if sample.repeats > 1 else {}
    for writer in writers.values():
        writer.close()
        for name in writer.shards:
            fsync(job.data / name)
        extra = repeats if writer.split == TRAIN else {}
        record.shards |= {name: facts | extra for name, facts in writer.shards.items()}
    write_atomic(_record_file(job, number), json.dumps(vars(record)))
    return record


def _record_file(job: Job, number: int) -> Path:
    return job.partial / f"unit-{number:06d}.json"


def _finished(job: Job, number: int) -> Optional[UnitRecord]:
    """Return the record of a unit if all its shards are complete, else None."""
    try:
        body = parse_json(read_bytes(_record_file(job, number)))
        body |= {name: Counter(body[name]) for name in ("counts", "shapes", "reference_shapes")}
        body |= {"skips": [Skipped(*skip) for skip in body["skips"]], "latents": Moments(*body["latents"])}
        record = UnitRecord(**{field.name: body[field.name] for field in fields(UnitRecord)})
        complete = all((job.data / name).stat().st_size == facts["bytes"] for name, facts in record.shards.items())
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return record if complete else None


def build(
    job: Job,
    units: Sequence[Any],
    plan: dict[str, Any],
    *,
    processes: int,
    force: bool,
    on_unit: Callable[[int, UnitRecord], None],
    on_resume: Callable[[int], None],
) -> UnitRecord:
    """Write all shards, starting with the finished units of an interrupted run of the same plan.

    After a failure `job.partial` is deleted unless it has finished units, with which the same call continues.

    Args:
        plan: everything that the result depends on, as plain values.
        force: replace an older data set, and discard unfinished work. Unfinished work that an earlier call began with
            `force` is continued without it.
        on_unit: called with the number and the record of every finished unit, earlier ones included.
        on_resume: called with the number of units that an interrupted run finished, unless it is 0.
    """
    ranks = Ranks()
    if ranks.is_first:
        _open_partial(job, plan, force)
    ranks.wait()
    numbers = range(len(units))
    try:
        records = {number: record for number in numbers if (record := _finished(job, number)) is not None}
        if records:
            on_resume(len(records))
        todo = [number for number in numbers[ranks.rank :: ranks.count] if number not in records]
        for number, record in chain(list(records.items()), _records(job, units, todo, processes)):
            records[number] = record
            on_unit(number, record)
        ranks.wait()
        for number in numbers:
            if number in records:
                continue
            if (record_of_other := _finished(job, number)) is None:
                raise DataError(
                    f"unit {number} of another rank is not in {job.partial}; all {ranks.count} ranks must see the same "
                    "folder: give --out on a file system that the nodes share"
                )
            records[number] = record_of_other
        ranks.wait()
    except BaseException:
        if ranks.count == 1 and not any(_finished(job, number) for number in numbers):
            shutil.rmtree(job.partial)
        raise
    total = UnitRecord()
    for number in numbers:
        total.add(records[number])
    if not total.of(TRAIN):
        if ranks.is_first:
            shutil.rmtree(job.partial)
        why = reasons(sorted(total.skips)) or "the input has none, or all are held out"
        raise DataError(f"no sample is left for training: {why}")
    return total


def _records(job: Job, units: Sequence[Any], todo: Sequence[int], processes: int) -> Iterator[tuple[int, UnitRecord]]:
    if processes <= 1 or len(todo) <= 1:
        for number in todo:
            yield number, _make_unit(job, number, units[number])
        return
    with ProcessPoolExecutor(min(processes, len(todo)), mp_context=get_context("spawn")) as pool:
        futures = {pool.submit(_make_unit, job, number, units[number]): number for number in todo}
        try:
            for future in as_completed(futures):
                yield futures[future], future.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _open_partial(job: Job, plan: dict[str, Any], force: bool) -> None:
    """Create the folder for unfinished work, or check that an existing one belongs to this plan."""
    plan = parse_json(json.dumps(plan))  # normalised, for the comparison with the file
    file = job.partial / PLAN
    try:
        old_plan = parse_json(read_bytes(file, LONGEST_PLAN))
    except (FileNotFoundError, NotADirectoryError, ValueError):
        old_plan = None
    continues = old_plan == plan and not force
    check_replaceable(job.out, force=force or continues)  # the call that began had permission to replace it
    if continues:
        job.data.mkdir(exist_ok=True)
        return
    if job.partial.exists():
        if not force and old_plan is not None:
            differing = sorted(k for k in {*plan, *old_plan} if old_plan.get(k) != plan.get(k))
            raise ConfigError(
                f"{job.partial} has unfinished work of another command (it differs in {', '.join(differing)}); "
                "finish that one, or start from the beginning with --force"
            )
        shutil.rmtree(job.partial)
    try:
        job.data.mkdir(parents=True)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise ConfigError(f"{job.partial} cannot be created: {error.strerror}; choose another --out") from error
    try:
        write_atomic(file, json.dumps(plan))
    except OSError:
        shutil.rmtree(job.partial)
        raise


def finish(job: Job, total: UnitRecord, description: dict[str, Any]) -> None:
    """Index the shards, write `dataset.json` and publish the data set."""
    by_split = {split: shards for split in (TRAIN, VALIDATION) if (shards := total.of(split))}
    shards = {name: facts for some in by_split.values() for name, facts in some.items()}
    for path in job.data.glob("*.tar"):
        if path.name not in shards:  # left by an interrupted unit of a longer listing
            path.unlink()
    lines = [json.dumps({"file": skip.name, "reason": skip.reason, "detail": skip.detail}) for skip in total.skips]
    (job.data / SKIPPED).write_text("".join(f"{line}\n" for line in lines))
    repeats = {name: facts["repeats"] for name, facts in shards.items() if "repeats" in facts}
    write_energon_metadata(job.data, shards, by_split, repeats)
    write_dataset_file(
        job.data,
        {
            "format": 1,
            **description,
            "samples": {split: sum(facts["samples"] for facts in some.values()) for split, some in by_split.items()},
            "shapes": dict(total.shapes.most_common()),
            "reference_shapes": dict(total.reference_shapes.most_common()),
            "captions": total.captions,
            "num_classes": total.num_classes,
            "most_references": total.most_references,
            **{name: total.counts[name] for name in ("labelled", "edited", "turned", "enlarged")},
            "colours": {name: total.counts[name] for name in OTHER_COLOURS if total.counts[name]},
            "largest_cut": total.largest_cut[0],
            **({"latent_mean": total.latents.mean, "latent_std": total.latents.std} if total.latents.number else {}),
            "skipped": dict(total.skipped),
            "skipped_examples": total.examples,
            "shards": shards,
        },
    )
    publish(job.data, job.out)
    shutil.rmtree(job.partial)
