"""Convert pictures and videos to samples: stored as pixels or encoded by a VAE, with optional caption embeddings."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Optional

import numpy as np
from PIL import Image
from torch import Tensor

from dit.batch import pixel_values
from dit.condition_table import SIZE_AND_CROP, TEACHER, TEACHER_TOKEN
from dit.encoders.teacher import Teacher, load_teacher
from dit.encoders.text import load_text_encoders
from dit.encoders.text_config import check_text_encoder
from dit.encoders.vae import Precision, encode_together, load_vae
from dit.terminal import counted
from energon_data.latent_scale import Moments
from energon_data.media_files import (
    VIDEOS,
    Format,
    check_same_size,
    is_animated,
    open_picture,
    picture_bytes,
    pixels_of,
    video_bytes,
)
from energon_data.prepare.build import Changes, Raw, Sample, UnitRecord
from energon_data.prepare.pictures import Fit, Target
from energon_data.prepare.shards import npy_bytes
from energon_data.prepare.sources import Source
from energon_data.prepare.texts import caption_parts
from energon_data.prepare.videos import Cut, clips_of
from energon_data.prepare.walk import extension_of
from energon_data.prepare.wording import Wording
from energon_data.samples import LATENT, PIXELS, REFERENCE, SampleError, numbered_stem


@dataclass(frozen=True, kw_only=True)
class Options:
    """Settings for the conversion of pictures and videos.

    Attributes:
        vae: an autoencoder; samples then have latents instead of pixels.
        text_encoder: encoders as in `dit.encoders.text_config`; samples then need a caption, and have its embeddings.
        teacher: teacher as in `dit.encoders.teacher`; samples then have its tokens.
        teacher_patch: pixels per side of a token of the model.
    """

    fit: Fit = field(default_factory=Fit)
    cut: Cut = field(default_factory=Cut)
    image_format: Format = "png"
    quality: int = 95
    vae: Optional[str] = None
    precision: Precision = "fp32"
    device: str = "cpu"
    text_encoder: Optional[str] = None
    teacher: Optional[str] = None
    teacher_patch: int = 16
    batch: int = 8
    wording: Wording = field(default_factory=Wording)


@dataclass
class _Decoded:
    """A decoded clip (a picture has one frame); `file` is its original file if the pixels are unchanged.

    `references` are the pictures that it is edited from, each fitted to its own size, and before fitting.
    """

    key: str
    source: Source
    frames: list[Image.Image]
    fps: Optional[float]
    file: Optional[tuple[str, bytes]]
    changes: Changes
    size_and_crop: list[int]
    references: Sequence[tuple[Image.Image, Image.Image]] = ()

    @property
    def shape(self) -> tuple[int, ...]:
        width, height = self.frames[0].size
        return 3, len(self.frames), height, width


@dataclass(frozen=True)
class MakeSamples:
    """Converts sources to samples; picklable, for other processes.

    Attributes:
        gifs: which GIFs become clips; the others become pictures of their first frame.
    """

    options: Options
    gifs: Literal["all", "animated", "none"] = "none"

    def __call__(self, sources: Iterable[Raw], record: UnitRecord) -> Iterator[Sample]:
        """Yield the samples of one unit in order, and count skipped sources."""
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
            clips = 0
            try:
                _check_unicode(source)
                source = replace(source, captions=self.options.wording.apply(source.captions, source.address))
                for clip in self._clips(source):
                    self._check_complete(source)  # after the file, whose errors come first
                    yield clip
                    clips += 1
                record.counts["files"] += 1
            except SampleError as error:
                if clips:
                    record.counts["partly_used"] += 1
                    error = SampleError(error.reason, f"after {counted(clips, 'clip')}, which are used: {error.detail}")
                record.skip(source.address, error)

    @property
    def _reads_pictures(self) -> bool:
        """True if a text encoder reads the reference pictures."""
        line = self.options.text_encoder
        return line is not None and check_text_encoder(line).reads_pictures

    def _check_complete(self, source: Source) -> None:
        """Check that a source has what the text encoder reads."""
        if self.options.text_encoder is not None and not source.captions:
            raise SampleError(
                "no_caption", "the caption is missing or empty, and --text-encoder needs one; see --caption"
            )
        if self._reads_pictures and not source.references:
            raise SampleError(
                "no_reference", "the text encoder reads the pictures that it is edited from; see --reference"
            )

    def _clips(self, source: Source) -> Iterator[_Decoded]:
        fit, data = self.options.fit, source.read()
        if not self._is_clip(source, data):
            opened = open_picture(data)
            fitted, target = fit.apply(opened), fit.target(*opened.size)
            original = opened.info["original"] if fitted is opened else None
            file = None if original is None else (original, data)
            changes, lengths = _changes(opened, target), _lengths(opened.size, target)
            references = [self._reference(i, read()) for i, read in enumerate(source.references, 1)]
            yield _Decoded(source.key, source, [fitted], None, file, changes, lengths, references)
            return
        cut = self.options.cut
        for number, (frames, fps) in enumerate(clips_of(data, cut, source.span, fit.apply)):
            check_same_size(frames)
            size = frames[0].info["size"]
            untouched = (
                cut == Cut()
                and source.span is None
                and not frames[0].info["turned"]
                and all(frame.size == frame.info["size"] for frame in frames)
            )
            file = ("mp4", data) if untouched and extension_of(source.name) in ("mp4", "m4v") else None
            target = fit.target(*size)
            changes, lengths = _changes(frames[0], target), _lengths(size, target)
            yield _Decoded(f"{source.key}-{number:03d}", source, frames, fps, file, changes, lengths)

    def _reference(self, number: int, data: bytes) -> tuple[Image.Image, Image.Image]:
        try:
            original = open_picture(data)
            return self.options.fit.apply(original), original
        except SampleError as error:
            name = "its reference" if number == 1 else f"its reference {number}"
            raise SampleError(error.reason, f"{name}: {error.detail}") from error

    def _is_clip(self, source: Source, data: bytes) -> bool:
        if (extension := extension_of(source.name)) != "gif":
            return extension in VIDEOS
        return self.gifs == "all" or (self.gifs == "animated" and is_animated(data))

    def _samples(self, clips: list[_Decoded]) -> Iterator[Sample]:
        if not clips:
            return
        media = self._latents(clips) if self.options.vae is not None else [self._pixels(clip) for clip in clips]
        others = zip(self._texts(clips), self._references(clips), self._features(clips), strict=True)
        for clip, (shape, parts, moments), (text, references, features) in zip(clips, media, others, strict=True):
            source = clip.source
            yield Sample(
                key=clip.key,
                origin=source.origin,
                metadata=_metadata(clip),
                parts={**parts, **text, **{name: data for name, data, _ in references}, **features},
                shape=shape,
                changes=clip.changes,
                latent=moments,
                repeats=source.repeats,
                reference_shapes=tuple(shape for _, _, shape in references),
            )

    def _pixels(self, clip: _Decoded) -> tuple[tuple[int, ...], dict[str, bytes], Moments]:
        if clip.file is not None:
            extension, data = clip.file
        elif clip.fps is not None:
            extension, data = "mp4", video_bytes(clip.frames, clip.fps)
        else:
            extension, data = self.options.image_format, self._picture(clip.frames[0])
        return clip.shape, {f"{PIXELS}.{extension}": data}, Moments()

    def _latents(self, clips: list[_Decoded]) -> list[tuple[tuple[int, ...], dict[str, bytes], Moments]]:
        latents = self._encoded([clip.frames for clip in clips])
        return [(latent.shape, {f"{LATENT}.npy": npy_bytes(latent)}, Moments.of(latent)) for latent in latents]

    def _references(self, clips: list[_Decoded]) -> list[list[tuple[str, bytes, tuple[int, ...]]]]:
        """Return name, data and shape of the references of each sample: latents, or pictures without an autoencoder."""
        pictures = [fitted for clip in clips for fitted, _ in clip.references]
        if self.options.vae is not None:
            stored = [(npy_bytes(x), x.shape) for x in self._encoded([[picture] for picture in pictures])]
        else:
            stored = [(self._picture(picture), (3, 1, picture.height, picture.width)) for picture in pictures]
        ending, parts = "npy" if self.options.vae else self.options.image_format, iter(stored)
        return [
            [(f"{numbered_stem(REFERENCE, i)}.{ending}", *next(parts)) for i in range(len(clip.references))]
            for clip in clips
        ]

    def _picture(self, picture: Image.Image) -> bytes:
        return picture_bytes(picture, self.options.image_format, self.options.quality)

    def _features(self, clips: list[_Decoded]) -> list[dict[str, bytes]]:
        """Return the parts `teacher`, features of each patch, and `teacher_token`, the mean over frames."""
        options = self.options
        if options.teacher is None:
            return [{} for _ in clips]
        teacher = load_teacher(options.teacher, options.teacher_patch, options.device, options.precision)
        return teacher_parts(teacher, [pixel_values(pixels_of(clip.frames)) for clip in clips], options.batch)

    def _encoded(self, clips: list[list[Image.Image]]) -> list[np.ndarray]:
        """Return the float16 latent of each clip."""
        options = self.options
        assert options.vae is not None
        encoder = load_vae(options.vae, options.device, options.precision)
        pixels = [pixel_values(pixels_of(frames)) for frames in clips]
        return [x.numpy().astype(np.float16) for x in encode_together(encoder, pixels, options.batch)]

    def _texts(self, clips: list[_Decoded]) -> list[dict[str, bytes]]:
        if self.options.text_encoder is None:
            return [{} for _ in clips]
        encoders = load_text_encoders(self.options.text_encoder, self.options.device, self.options.precision)
        pictures = [[original for _, original in clip.references] for clip in clips]
        captions = [clip.source.captions for clip in clips]
        return caption_parts(encoders, captions, pictures if self._reads_pictures else None)


def teacher_parts(teacher: Teacher, clips: list[Tensor], batch: int = 64) -> list[dict[str, bytes]]:
    """Return the parts `teacher` and `teacher_token` of clips `[3, T, H, W]` in [-1, 1]."""
    parts = []
    for clip, tokens_DTN in zip(clips, encode_together(teacher, clips, batch), strict=True):
        features = tokens_DTN[:, :, 1:].unflatten(2, (clip.shape[2] // teacher.patch, -1))
        named = {TEACHER: features, TEACHER_TOKEN: tokens_DTN[:, :, 0].mean(1)}
        parts.append({f"{part.stored_as[0]}.npy": npy_bytes(x.half().numpy()) for part, x in named.items()})
    return parts


def _check_unicode(source: Source) -> None:
    """Refuse a name of other bytes than UTF-8, and captions with half of a character, as JSON can have them."""
    if _has_surrogate(source.name):
        raise SampleError("bad_name", "the name is not UTF-8; rename it")
    if any(map(_has_surrogate, source.captions)):
        raise SampleError("bad_caption", "the caption has a surrogate, which is half of a character; correct it")


def _has_surrogate(text: str) -> bool:
    return any("\ud800" <= character <= "\udfff" for character in text)


def _changes(picture: Image.Image, target: Target) -> Changes:
    """Return the changes to a decoded picture or first frame that is fitted to `target`."""
    info = picture.info
    return Changes(
        info["turned"], target.cut, target.enlarges(*info["size"]), info["colours"], info.get("animated", False)
    )


def _lengths(size: tuple[int, int], target: Target) -> list[int]:
    """Return `SIZE_AND_CROP` of a picture; the crop is the corner of the cut in the scaled picture."""
    (width, height), (left, top) = size, target.corner
    return [height, width, top, left, target.cut_high, target.cut_wide]


def _metadata(clip: _Decoded) -> dict[str, Any]:
    """Return the metadata of a sample: the user's entries, and those of the conversion."""
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
