"""Pictures and videos of a user become samples: kept as pixels, or encoded by a VAE; captions embedded if asked for."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, Literal, Optional

import numpy as np
from PIL import Image

from dit.batch import pixel_values
from dit.condition_table import SIZE_AND_CROP
from dit.encoders.text import load_text_encoders
from dit.encoders.text_config import check_text_encoder
from dit.encoders.vae import Geometry, Precision, encode_together, load_vae
from dit.errors import ConfigError
from dit.media import HEIC_IS_MISSING, reads_heic
from energon_data.latent_scale import Moments
from energon_data.media_files import (
    HEIC,
    PICTURES,
    VIDEOS,
    Format,
    check_same_size,
    is_animated,
    open_picture,
    picture_bytes,
    pixels_of,
    video_bytes,
)
from energon_data.prepare.build import Changes, Job, Raw, Sample, UnitRecord, build, finish
from energon_data.prepare.listing import (
    Entry,
    Source,
    list_folder,
    list_stamp,
    list_tars,
    read_tar,
    tar_stamp,
)
from energon_data.prepare.pictures import Fit, Target
from energon_data.prepare.ranks import Ranks
from energon_data.prepare.shards import npy_bytes
from energon_data.prepare.texts import caption_parts, text_record
from energon_data.prepare.videos import Cut, clips_of
from energon_data.prepare.walk import Skipped
from energon_data.samples import SampleError

Command = Literal["images", "videos", "folder", "webdataset"]
EXTENSIONS = {
    "images": PICTURES,
    "videos": VIDEOS | {"gif"},
    "folder": PICTURES | VIDEOS,
    "webdataset": PICTURES | VIDEOS,
}
TRY_OUT = 8  # samples that a dry run makes


@dataclass(frozen=True, kw_only=True)
class Options:
    """How a picture or video becomes a sample.

    Attributes:
        fit: size of pictures and frames.
        cut: clips of videos.
        image_format, quality: how pixels are stored if they are not the file's own.
        vae: an autoencoder; samples then hold latents instead of pixels.
        precision, device: of the encoders.
        text_encoder: encoders as in `dit.encoders.text_config`; samples then hold what these make of their (first)
            caption, and need one.
        batch: samples decoded and encoded together.
        caption: of every file without one of its own.
    """

    fit: Fit = field(default_factory=Fit)
    cut: Cut = field(default_factory=Cut)
    image_format: Format = "png"
    quality: int = 95
    vae: Optional[str] = None
    precision: Precision = "fp32"
    device: str = "cpu"
    text_encoder: Optional[str] = None
    batch: int = 8
    caption: Optional[str] = None


@dataclass
class _Decoded:
    """A clip (a picture has one frame) on its way into a shard; `file` is what it was read from, if that may stay."""

    key: str
    source: Source
    frames: list[Image.Image]
    fps: Optional[float]
    file: Optional[tuple[str, bytes]]
    changes: Changes
    size_and_crop: list[int]

    @property
    def shape(self) -> tuple[int, ...]:
        width, height = self.frames[0].size
        return 3, len(self.frames), height, width


@dataclass(frozen=True)
class MakeSamples:
    """Turns sources into samples; a value, so that it can be sent to other processes.

    Attributes:
        gifs: those that become clips; others are pictures, of their first frame.
    """

    options: Options
    gifs: Literal["all", "animated", "none"] = "none"

    def __call__(self, sources: Iterable[Raw], record: UnitRecord) -> Iterator[Sample]:
        """Yield the samples of one unit in order, and count what is skipped."""
        waiting: list[_Decoded] = []
        for clip in self._decoded(sources, record):
            waiting.append(clip)
            if len(waiting) == self.options.batch:
                yield from self._samples(waiting)
                waiting = []
        yield from self._samples(waiting)

    def _decoded(self, sources: Iterable[Raw], record: UnitRecord) -> Iterator[_Decoded]:
        for source in sources:
            if isinstance(source, tuple):
                record.skip(*source)
                continue
            if self.options.caption is not None and not source.captions:
                source = replace(source, captions=(self.options.caption,))
            try:
                if self.options.text_encoder is not None and not source.captions:
                    raise SampleError("no_caption", "it has no caption, and --text-encoder needs one; see --caption")
                yield from self._clips(source)
                record.files += 1
            except SampleError as error:
                record.skip(source.name, error)

    def _clips(self, source: Source) -> Iterator[_Decoded]:
        fit, data = self.options.fit, source.read()
        if not self._is_clip(source, data):
            opened = open_picture(data)
            fitted, target = fit.apply(opened), fit.target(*opened.size)
            original = opened.info["original"] if fitted is opened else None
            file = None if original is None else (original, data)
            changes = Changes(opened.info["turned"], target.cut, target.enlarges(*opened.size))
            yield _Decoded(source.key, source, [fitted], None, file, changes, _lengths(opened.size, target))
            return
        cut = self.options.cut
        for number, (frames, fps) in enumerate(clips_of(data, cut)):
            fitted_frames = [fit.apply(frame) for frame in frames]
            check_same_size(fitted_frames)
            turned = frames[0].info["turned"]
            untouched = cut == Cut() and not turned and all(a is b for a, b in zip(frames, fitted_frames))
            file = ("mp4", data) if untouched and source.extension in ("mp4", "m4v") else None
            target = fit.target(*frames[0].size)
            changes = Changes(turned, target.cut, target.enlarges(*frames[0].size))
            lengths = _lengths(frames[0].size, target)
            yield _Decoded(f"{source.key}-{number:03d}", source, fitted_frames, fps, file, changes, lengths)

    def _is_clip(self, source: Source, data: bytes) -> bool:
        if source.extension != "gif":
            return source.extension in VIDEOS
        return self.gifs == "all" or (self.gifs == "animated" and is_animated(data))

    def _samples(self, clips: list[_Decoded]) -> Iterator[Sample]:
        if not clips:
            return
        media = self._latents(clips) if self.options.vae is not None else [self._pixels(clip) for clip in clips]
        texts = self._texts(clips)
        for clip, (shape, parts, moments), text in zip(clips, media, texts, strict=True):
            parts = {**parts, **text}
            yield Sample(clip.key, clip.source.key, _metadata(clip), parts, shape, clip.changes, moments)

    def _pixels(self, clip: _Decoded) -> tuple[tuple[int, ...], dict[str, bytes], Moments]:
        if clip.file is not None:
            extension, data = clip.file
        elif clip.fps is not None:
            extension, data = "mp4", video_bytes(clip.frames, clip.fps)
        else:
            extension = self.options.image_format
            data = picture_bytes(clip.frames[0], self.options.image_format, self.options.quality)
        return clip.shape, {f"pixels.{extension}": data}, Moments()

    def _latents(self, clips: list[_Decoded]) -> list[tuple[tuple[int, ...], dict[str, bytes], Moments]]:
        options = self.options
        assert options.vae is not None
        pixels = [pixel_values(pixels_of(clip.frames)) for clip in clips]
        encoded = encode_together(load_vae(options.vae, options.device, options.precision), pixels, options.batch)
        latents = [latent.numpy().astype(np.float16) for latent in encoded]
        return [(latent.shape, {"latent.npy": npy_bytes(latent)}, Moments.of(latent)) for latent in latents]

    def _texts(self, clips: list[_Decoded]) -> list[dict[str, bytes]]:
        if self.options.text_encoder is None:
            return [{} for _ in clips]
        encoders = load_text_encoders(self.options.text_encoder, self.options.device, self.options.precision)
        return caption_parts(encoders, [clip.source.captions for clip in clips])


def _lengths(size: tuple[int, int], target: Target) -> list[int]:
    """Return `SIZE_AND_CROP` of a picture: the crop is where the scaled picture is cut.

    Args:
        size: width and height of the original.
    """
    (width, height), (left, top) = size, target.corner
    return [height, width, top, left, target.cut_high, target.cut_wide]


def _metadata(clip: _Decoded) -> dict[str, Any]:
    """Return what the shard says of a sample: the user's own entries, and what was done."""
    source = clip.source
    _, frames, height, width = clip.shape
    captions = source.captions
    return {
        **source.metadata,
        "source": source.name,
        "height": height,
        "width": width,
        SIZE_AND_CROP.name: clip.size_and_crop,
        **({"num_frames": frames, "fps": clip.fps} if clip.fps is not None else {}),
        **({"caption": captions[0]} if captions else {}),
        **({"captions": list(captions)} if len(captions) > 1 else {}),
        **({"label": source.label} if source.label is not None else {}),
    }


def _sources_of_folder(folder: Path, follow_links: bool, unit: list[Entry]) -> Iterator[Raw]:
    for entry in unit:
        try:
            yield entry.source(folder, follow_links=follow_links)
        except SampleError as error:
            yield entry.name, error


def _sources_of_tar(extensions: frozenset[str], root: Path, unit: Path) -> Iterator[Raw]:
    return read_tar(unit, extensions, root)


@dataclass(frozen=True)
class Preparation:
    """A command on one input: what there is to do, before anything is done.

    Attributes:
        entries: files, or tar archives.
        classes: names of the classes; empty without labels.
        plan: what the result depends on.
        about: further entries of `dataset.json`.
        skipped: files of the input that are not read.
    """

    job: Job
    units: list[Any]
    entries: int
    classes: list[str]
    plan: dict[str, Any]
    options: Options
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
        follow_links: bool = False,
        samples_per_shard: int = 1000,
        validation: float = 0.02,
    ) -> "Preparation":
        """List the input and check the options.

        Args:
            source: the user's folder (or tar file).
            labels: the folders right below are classes.
            follow_links: also read files and folders outside of `source` to which links lead.
            samples_per_shard: files that are read for one shard.
            validation: share of the files that is held out.

        Raises:
            ConfigError: options do not fit each other or this machine.
            DataError: the input holds nothing to prepare, or its list of files is damaged.
        """
        _check(options, samples_per_shard, validation)
        extensions = EXTENSIONS[command]
        gifs: dict[Command, Literal["all", "animated", "none"]] = {"images": "none", "videos": "all"}
        work = MakeSamples(options, gifs.get(command, "animated"))
        classes: list[str] = []
        units: list[Any]
        if command == "webdataset":
            tars, skipped = list_tars(source, follow_links=follow_links)
            units, listed = list(tars), [tar_stamp(path) for path in tars]
            job = Job(out, partial(_sources_of_tar, extensions, source), work, validation)
        else:
            entries, classes, skipped = list_folder(source, extensions, labels=labels, follow_links=follow_links)
            _check_heic(entries)
            units = [entries[i : i + samples_per_shard] for i in range(0, len(entries), samples_per_shard)]
            listed = [entry.stamp for entry in entries]
            job = Job(out, partial(_sources_of_folder, source, follow_links), work, validation)
        plan = {
            "command": command,
            "in": str(source.resolve()),
            "options": asdict(options),
            "labels": labels,
            "follow_links": follow_links,
            "samples_per_shard": samples_per_shard,
            "validation": validation,
            "files": {"list": None if command == "webdataset" else list_stamp(source), "each": listed},
        }
        return cls(job, units, len(listed), classes, plan, options, skipped=skipped)

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
    ) -> "Preparation":
        """Describe a data set whose sources are made, not read from files.

        Args:
            sources: from some of the entries to their sources; picklable.
            plan: what else the result depends on.
            about: further entries of `dataset.json`.

        Raises:
            ConfigError: options do not fit each other or this machine.
        """
        _check(options, samples_per_shard, validation)
        units = [list(entries[i : i + samples_per_shard]) for i in range(0, len(entries), samples_per_shard)]
        job = Job(out, sources, MakeSamples(options), validation)
        plan = {
            "command": command,
            "options": asdict(options),
            **plan,
            "samples_per_shard": samples_per_shard,
            "validation": validation,
        }
        return cls(job, units, len(entries), [], plan, options, about)

    def run(
        self,
        *,
        processes: int,
        force: bool,
        on_unit: Callable[[int, UnitRecord], None] = lambda *_: None,
        on_resume: Callable[[int], None] = lambda _: None,
    ) -> UnitRecord:
        """Make the data set; of several ranks, all call this, and all get the counts.

        Args:
            processes, force, on_unit, on_resume: as in `build`.

        Raises:
            ConfigError: the folder exists, or unfinished work is of another command, and `force` is not set.
            DataError: no sample could be used.
        """
        ranks = Ranks()
        total = build(
            self.job,
            self.units,
            self.plan,
            processes=processes,
            force=force,
            ranks=ranks,
            on_unit=on_unit,
            on_resume=on_resume,
        )
        total.skips = [*self.skipped, *total.skips]
        if ranks.is_first:
            finish(self.job, total, self._description(total))
        return total

    def _description(self, total: UnitRecord) -> dict[str, Any]:
        options = self.options
        shape = [int(side) for side in total.shapes.most_common(1)[0][0].split("x")]
        made = {name: value for name, value in self.plan.items() if name != "files"}
        return {
            **self.about,
            "latent_shape": shape,
            **({"class_names": self.classes} if self.classes else {}),
            **({} if options.text_encoder is None else text_record(options.text_encoder)),
            **({} if options.vae is None else {"vae": options.vae}),
            "prepared": made,
        }

    def try_out(self) -> tuple[list[Sample], UnitRecord]:
        """Make a few samples in memory, for a dry run."""
        record, found = UnitRecord(skips=list(self.skipped)), []
        for unit in self.units:
            for sample in self.job.work(self.job.sources(unit), record):
                found.append(sample)
                if len(found) == TRY_OUT:
                    return found, record
        return found, record


def _check_heic(entries: Sequence[Entry]) -> None:
    """Raise `ConfigError` if there are HEIC files and no reader of them."""
    heic = [entry.name for entry in entries if PurePosixPath(entry.name).suffix[1:].lower() in HEIC]
    if heic and not reads_heic():
        raise ConfigError(f"{heic[0]} and {len(heic) - 1:,} other files: {HEIC_IS_MISSING}, or move them away")


def _check(options: Options, samples_per_shard: int, validation: float) -> None:
    """Check numbers and encoders.

    Raises:
        ConfigError: a number is out of range, or an encoder does not exist or does not fit.
    """
    if not 0 <= validation < 1:
        raise ConfigError(f"--validation {validation:g} is the share held out: 0 for none, below 1")
    if samples_per_shard < 1 or options.batch < 1:
        raise ConfigError("--samples-per-shard and --batch must be at least 1")
    if not 1 <= options.quality <= 100:
        raise ConfigError(f"--quality {options.quality} must lie between 1 and 100")
    _check_encoders(options)


def _check_encoders(options: Options) -> None:
    """Check that the encoders exist and that what is fed to them has sizes they take.

    Raises:
        ConfigError: one does not.
    """
    if options.text_encoder is not None:
        check_text_encoder(options.text_encoder)
    if options.vae is None:
        return
    geometry = Geometry.read(options.vae)
    if options.fit.multiple_of % geometry.space:
        raise ConfigError(
            f"--multiple-of {options.fit.multiple_of} must be a multiple of {geometry.space}, the compression of "
            f"{options.vae}; times the model's patch is best"
        )
