"""Convert pictures and videos to samples: stored as pixels or encoded by a VAE, with optional caption embeddings."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, Literal, NamedTuple, Optional

import numpy as np
from PIL import Image
from torch import Tensor

from dit.batch import pixel_values
from dit.condition_table import SIZE_AND_CROP, TEACHER, TEACHER_TOKEN
from dit.encoders.teacher import Teacher, load_teacher
from dit.encoders.text import load_text_encoders
from dit.encoders.text_config import check_text_encoder
from dit.encoders.vae import Precision, encode_together, load_vae
from dit.errors import ConfigError
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
from energon_data.prepare.pictures import Fit
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
    vae: Optional[str] = None
    precision: Precision = "fp32"
    device: str = "cpu"
    text_encoder: Optional[str] = None
    teacher: Optional[str] = None
    teacher_patch: int = 16
    batch: int = 8
    wording: Wording = field(default_factory=Wording)


class _Part(NamedTuple):
    """A part of a sample."""

    extension: str
    data: bytes
    shape: tuple[int, ...]
    moments: Moments = Moments()


@dataclass
class _Media:
    """A clip or a reference; a picture has one frame.

    Attributes:
        stored: extension and bytes to store: the original file if its pixels are unchanged; None with an autoencoder.
        original: the picture before fitting, if a text encoder reads references; else the first frame.
    """

    frames: list[Image.Image]
    stored: Optional[tuple[str, bytes]]
    original: Image.Image


@dataclass
class _Decoded:
    """A decoded sample, and the pictures that it is edited from, each fitted to its own size."""

    key: str
    source: Source
    media: _Media
    fps: Optional[float]
    changes: Changes
    size_and_crop: list[int]
    references: Sequence[_Media] = ()


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
        encodes = self.options.vae or self.options.text_encoder or self.options.teacher
        clips = self._decoded(sources, record)
        while batch := list(islice(clips, self.options.batch if encodes else 1)):
            yield from self._samples(batch)

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
        fit, cut, data = self.options.fit, self.options.cut, source.read()
        if not self._is_clip(source, data):
            media = self._picture(data)
            references = [self._reference(i, read()) for i, read in enumerate(source.references, 1)]
            yield self._decoded_clip(source.key, source, media, None, references)
            return
        for number, (frames, fps) in enumerate(clips_of(data, cut, source.span, fit.apply)):
            check_same_size(frames)
            untouched = (
                cut == Cut()
                and source.span is None
                and extension_of(source.name) in ("mp4", "m4v")
                and not frames[0].info["turned"]
                and all(frame.size == frame.info["size"] for frame in frames)
            )
            media = _Media(frames, self._stored(frames, fps, ("mp4", data) if untouched else None), frames[0])
            yield self._decoded_clip(f"{source.key}-{number:03d}", source, media, fps)

    def _decoded_clip(
        self, key: str, source: Source, media: _Media, fps: Optional[float], references: Sequence[_Media] = ()
    ) -> _Decoded:
        info = media.frames[0].info
        target = self.options.fit.target(*info["size"])
        enlarged, animated = target.enlarges(*info["size"]), info.get("animated", False)
        changes = Changes(info["turned"], target.cut, enlarged, info["colours"], animated)
        (width, height), (left, top) = info["size"], target.corner  # of the cut in the scaled picture
        lengths = [height, width, top, left, target.cut_high, target.cut_wide]
        return _Decoded(key, source, media, fps, changes, lengths, references)

    def _picture(self, data: bytes) -> _Media:
        original = open_picture(data)
        fitted, kind = self.options.fit.apply(original), original.info["original"]
        file = None if kind is None or fitted is not original else (kind, data)
        return _Media([fitted], self._stored([fitted], None, file), original if self._reads_pictures else fitted)

    def _stored(
        self, frames: list[Image.Image], fps: Optional[float], file: Optional[tuple[str, bytes]]
    ) -> Optional[tuple[str, bytes]]:
        """Return extension and bytes of pixels to store; None if an autoencoder encodes them."""
        if self.options.vae is not None:
            return None
        if file is not None:
            return file
        extension = self.options.image_format if fps is None else "mp4"
        try:
            if fps is not None:
                return extension, video_bytes(frames, fps)
            return extension, picture_bytes(frames[0], self.options.image_format)
        except (ConfigError, MemoryError):
            raise
        except Exception as error:  # such as a WebP of more than 16,383 pixels a side
            size = f"{frames[0].width} x {frames[0].height} pixels"
            why = getattr(error, "strerror", None) or error
            cure = "scale it down (--size)" + (", or use another --format" if fps is None else "")
            raise SampleError("not_stored", f"{size} cannot be stored as {extension}: {why}; {cure}") from error

    def _reference(self, number: int, data: bytes) -> _Media:
        try:
            return self._picture(data)
        except SampleError as error:
            name = "its reference" if number == 1 else f"its reference {number}"
            raise SampleError(error.reason, f"{name}: {error.detail}") from error

    def _is_clip(self, source: Source, data: bytes) -> bool:
        if (extension := extension_of(source.name)) != "gif":
            return extension in VIDEOS
        return self.gifs == "all" or (self.gifs == "animated" and is_animated(data))

    def _samples(self, clips: list[_Decoded]) -> Iterator[Sample]:
        stem = PIXELS if self.options.vae is None else LATENT
        reference_parts = iter(self._parts([reference for clip in clips for reference in clip.references]))
        media = self._parts([clip.media for clip in clips])
        for clip, main, text, features in zip(clips, media, self._texts(clips), self._features(clips), strict=True):
            references = [next(reference_parts) for _ in clip.references]
            named = [(stem, main), *((numbered_stem(REFERENCE, i), part) for i, part in enumerate(references))]
            yield Sample(
                key=clip.key,
                origin=clip.source.origin,
                metadata=_metadata(clip),
                parts={**{f"{name}.{part.extension}": part.data for name, part in named}, **text, **features},
                shape=main.shape,
                changes=clip.changes,
                latent=main.moments,
                repeats=clip.source.repeats,
                reference_shapes=tuple(part.shape for part in references),
            )

    def _parts(self, media: list[_Media]) -> list[_Part]:
        """Return latents, or the stored pixels without an autoencoder."""
        options = self.options
        if options.vae is None:
            stored = [(one, one.stored or ("", b"")) for one in media]  # never None without an autoencoder
            return [_Part(*part, (3, len(one.frames), *one.frames[0].size[::-1])) for one, part in stored]
        encoder = load_vae(options.vae, options.device, options.precision)
        pixels = [pixel_values(pixels_of(one.frames)) for one in media]
        latents = [x.numpy().astype(np.float16) for x in encode_together(encoder.encode, pixels, options.batch)]
        return [_Part("npy", npy_bytes(x), x.shape, Moments.of(x)) for x in latents]

    def _features(self, clips: list[_Decoded]) -> list[dict[str, bytes]]:
        """Return the parts `teacher`, features of each patch, and `teacher_token`, the mean over frames."""
        options = self.options
        if options.teacher is None:
            return [{} for _ in clips]
        teacher = load_teacher(options.teacher, options.teacher_patch, options.device, options.precision)
        return teacher_parts(teacher, [pixel_values(pixels_of(clip.media.frames)) for clip in clips], options.batch)

    def _texts(self, clips: list[_Decoded]) -> list[dict[str, bytes]]:
        if self.options.text_encoder is None:
            return [{} for _ in clips]
        encoders = load_text_encoders(self.options.text_encoder, self.options.device, self.options.precision)
        pictures = [[reference.original for reference in clip.references] for clip in clips]
        captions = [clip.source.captions for clip in clips]
        return caption_parts(encoders, captions, pictures if self._reads_pictures else None)


def teacher_parts(teacher: Teacher, clips: list[Tensor], batch: int = 64) -> list[dict[str, bytes]]:
    """Return the parts `teacher` and `teacher_token` of clips `[3, T, H, W]` in [-1, 1]."""
    parts = []
    for clip, tokens_DTN in zip(clips, encode_together(teacher.encode, clips, batch), strict=True):
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


def _metadata(clip: _Decoded) -> dict[str, Any]:
    """Return the metadata of a sample: the user's entries, and those of the conversion."""
    source = clip.source
    width, height = clip.media.frames[0].size
    captions = source.captions
    return {
        **source.metadata,
        "source": source.name,
        "height": height,
        "width": width,
        SIZE_AND_CROP.name: clip.size_and_crop,
        **({"num_frames": len(clip.media.frames), "fps": clip.fps} if clip.fps is not None else {}),
        **({"caption": captions[0]} if captions else {}),
        **({"captions": list(captions)} if len(captions) > 1 else {}),
        **({"label": source.label} if source.label is not None else {}),
    }
