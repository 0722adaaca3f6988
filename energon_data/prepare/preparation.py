"""A preparation command with its listed input, before any sample is made."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal, Optional

from dit.data_api import sample_id
from dit.encoders.pretrained import recorded_name
from dit.encoders.teacher import check_teacher
from dit.encoders.text_config import check_text_encoder
from dit.encoders.vae import Geometry
from dit.errors import ConfigError
from dit.media import HEIC_IS_MISSING, PYAV_IS_MISSING, reads_heic, reads_videos
from dit.terminal import counted
from energon_data.media_files import HEIC, PICTURES, VIDEOS
from energon_data.prepare.archives import list_tars, read_tar
from energon_data.prepare.build import Job, Ranks, Raw, UnitRecord, build, finish
from energon_data.prepare.folders import Entry, list_folder
from energon_data.prepare.lists import list_stamp
from energon_data.prepare.media import MakeSamples, Options
from energon_data.prepare.sources import Source
from energon_data.prepare.texts import text_record
from energon_data.prepare.walk import Skipped, extension_of, seen_file
from energon_data.samples import SampleError

Command = Literal["images", "videos", "folder", "webdataset"]
EXTENSIONS = {
    "images": PICTURES,
    "videos": VIDEOS | {"gif"},
    "folder": PICTURES | VIDEOS,
    "webdataset": PICTURES | VIDEOS,
}


def sources_of(source: Callable[[Any], Source], name: Callable[[Any], str], unit: Iterable[Any]) -> Iterator[Raw]:
    """Yield the source of each entry, or its name and the error if it has none."""
    for entry in unit:
        try:
            yield source(entry)
        except SampleError as error:
            yield name(entry), error


@dataclass(frozen=True)
class Preparation:
    """A preparation command with its listed input, before any sample is made.

    Attributes:
        entries: number of files, rows (of a list or table), archives or generated samples.
        entry: noun for one of them.
        classes: names of the classes; empty without labels.
        plan: everything that the result depends on.
    """

    job: Job
    units: list[Any]
    entries: int
    entry: str
    plan: dict[str, Any]
    options: Options
    classes: Sequence[str] = ()
    about: dict[str, Any] = field(default_factory=dict)
    skipped: Sequence[Skipped] = ()

    @classmethod
    def of(
        cls,
        command: Command,
        source: Path,
        out: Path,
        options: Options,
        *,
        labels: bool = False,
        repeats: bool = False,
        list_file: Optional[Path] = None,
        follow_links: bool = False,
        references: Sequence[Path] = (),
        samples_per_shard: int = 1000,
        validation: float = 0.02,
    ) -> "Preparation":
        """List the input and check the options."""
        plan = _plan(command, options, samples_per_shard, validation)
        extensions = EXTENSIONS[command]
        gifs: dict[Command, Literal["all", "animated", "none"]] = {"images": "none", "videos": "all"}
        classes, units, entry = list[str](), list[Any](), "archive"
        read: Callable[[Any], Iterable[Raw]]
        if command == "webdataset":
            units, skipped = list_tars(source, follow_links=follow_links)
            listed = [[str(path), *(seen_file(path) or ())[1:]] for path in units]
            read = partial(read_tar, extensions=extensions, root=source)
        else:
            entries, classes, skipped, list_file = list_folder(
                source,
                extensions,
                labels=labels,
                repeats=repeats,
                list_file=list_file,
                follow_links=follow_links,
                references=references,
            )
            _check_readers(entries)
            # A stream reads a contiguous part of the shards if `is_mixed`. Packs of large samples hold fewer, so each
            # part gets files of all subfolders, or the streams would repeat their samples at different rates.
            entries = sorted(entries, key=lambda entry: sample_id(f"order/{entry.name!a}"))
            units, entry = _units_of_equal_repeats(entries, samples_per_shard), "row" if list_file else "file"
            listed = [entry.stamp for entry in entries]
            source_of = partial(Entry.source, folder=source, follow_links=follow_links, references=references)
            read = partial(sources_of, source_of, attrgetter("name"))
        plan |= {
            "in": str(source.resolve()),
            "labels": labels,
            "repeats": repeats,
            "follow_links": follow_links,
            "references": [str(place.resolve()) for place in references],
            "files": {"list": list_stamp(list_file), "each": listed},
        }
        job = Job(out, read, MakeSamples(options, gifs.get(command, "animated")), validation)
        return cls(job, units, len(listed), entry, plan, options, classes, skipped=skipped)

    @classmethod
    def generated(
        cls,
        command: str,
        out: Path,
        options: Options,
        sources: Callable[[list[Any]], Iterable[Raw]],
        entries: Sequence[Any],
        *,
        plan: dict[str, Any],
        about: dict[str, Any],
        samples_per_shard: int,
        validation: float,
        entry: str = "sample",
    ) -> "Preparation":
        """Describe a data set whose sources are generated, not read from files."""
        plan = _plan(command, options, samples_per_shard, validation) | plan
        units = [list(entries[i : i + samples_per_shard]) for i in range(0, len(entries), samples_per_shard)]
        job = Job(out, sources, MakeSamples(options), validation)
        return cls(job, units, len(entries), entry, plan, options, about=about)

    def run(
        self,
        *,
        processes: int,
        force: bool,
        on_unit: Callable[[int, UnitRecord], None] = lambda *_: None,
        on_resume: Callable[[int], None] = lambda _: None,
    ) -> UnitRecord:
        """Make the data set (collective); all ranks get the counts."""
        total = build(
            self.job, self.units, self.plan, processes=processes, force=force, on_unit=on_unit, on_resume=on_resume
        )
        total.skips = sorted([*self.skipped, *total.skips])
        if Ranks().is_first:
            finish(self.job, total, self._description(total))
        return total

    def _description(self, total: UnitRecord) -> dict[str, Any]:
        options = self.options
        shape = [int(side) for side in total.shapes.most_common(1)[0][0].split("x")]
        prepared = {name: value for name, value in self.plan.items() if name not in ("files", "encoders")}
        return {
            **self.about,
            "latent_shape": shape,
            **({"class_names": self.classes} if self.classes else {}),
            **({} if options.text_encoder is None else text_record(options.text_encoder)),
            **({} if options.vae is None else {"vae": recorded_name(options.vae)}),
            "prepared": prepared,
        }


def _units_of_equal_repeats(entries: Sequence[Entry], samples_per_shard: int) -> list[list[Entry]]:
    """Split a listing into units of samples with the same repeats, because a shard is repeated as a unit."""
    by_repeats: dict[int, list[Entry]] = {}
    for entry in entries:
        by_repeats.setdefault(entry.repeats, []).append(entry)
    return [
        some[i : i + samples_per_shard] for some in by_repeats.values() for i in range(0, len(some), samples_per_shard)
    ]


def _check_readers(entries: Sequence[Entry]) -> None:
    """Raise `ConfigError` if there are HEIC files or videos but no reader for them."""
    for extensions, has_reader, problem in (
        (HEIC, reads_heic, HEIC_IS_MISSING),
        (VIDEOS, reads_videos, PYAV_IS_MISSING),
    ):
        names = [entry.name for entry in entries if extension_of(entry.name) in extensions]
        if names and not has_reader():
            raise ConfigError(f"{names[0]} and {counted(len(names) - 1, 'other file')}: {problem}, or move them away")


def _encoder_stamps(options: Options) -> list[Any]:
    """Return name, size and time of the files of encoders in folders, so that a resumed preparation detects others."""
    texts = check_text_encoder(options.text_encoder).encoders if options.text_encoder else ()
    names = {options.vae, options.teacher, *(encoder.name for encoder in texts)} - {None}
    paths = [path for name in names for path in Path(str(name)).expanduser().rglob("*")]
    files = {str(path): seen_file(path) for path in paths if path.suffix in (".json", ".safetensors")}
    return sorted([path, *file[1:]] for path, file in files.items() if file is not None)


def _plan(command: str, options: Options, samples_per_shard: int, validation: float) -> dict[str, Any]:
    """Check numbers and encoders, and return their entries of the plan."""
    if not 0 <= validation < 1:
        raise ConfigError(f"--validation {validation:g} must be a share: at least 0 and below 1")
    if samples_per_shard < 1 or options.batch < 1:
        raise ConfigError("--samples-per-shard and --batch must be at least 1")
    _check_encoders(options)
    return {
        "command": command,
        "options": asdict(options),
        "encoders": _encoder_stamps(options),
        "samples_per_shard": samples_per_shard,
        "validation": validation,
    }


def _check_encoders(options: Options) -> None:
    """Check that the encoders exist and that sizes are multiples of the autoencoder's compression."""
    if options.text_encoder is not None:
        check_text_encoder(options.text_encoder)
    if options.teacher is not None:
        check_teacher(options.teacher)
        if options.teacher_patch < 1 or options.fit.multiple_of % options.teacher_patch:
            raise ConfigError(
                f"--multiple-of {options.fit.multiple_of} must be a multiple of --teacher-patch {options.teacher_patch}"
            )
    if options.vae is None:
        return
    geometry = Geometry.read(options.vae)
    if options.fit.multiple_of % geometry.step:
        raise ConfigError(
            f"--multiple-of {options.fit.multiple_of} must be a multiple of {geometry.step}, the compression of "
            f"{options.vae}, best times the patch size of the model"
        )
