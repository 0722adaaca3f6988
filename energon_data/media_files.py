"""Reading and writing of picture and video files, with limits on size and decoding time."""

import io
import time
from collections.abc import Iterator, Sequence
from fractions import Fraction
from itertools import chain
from typing import Any, Literal, Optional, TypeVar

import numpy as np
import torch
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor

from dit.errors import ConfigError
from dit.media import (
    HEIC_IS_MISSING,
    IMAGE_FORMATS,
    PictureTooLargeError,
    check_size,
    mp4_bytes,
    open_image,
    open_video,
    reads_heic,
)
from energon_data.colours import colours_of_frame, flattened, to_srgb
from energon_data.samples import SampleError

HEIC = frozenset({"heic", "heif"})
PICTURES = frozenset({"jpg", "jpeg", "png", "webp", "bmp", "tif", "tiff", "gif", "avif"}) | HEIC
VIDEOS = frozenset({"mp4", "webm", "mov", "mkv", "avi", "m4v"})
"""Extensions of supported files."""

Format = Literal["png", "webp", "jpg"]
MAX_FRAMES = 100_000
MAX_CLIP_PIXELS = 1 << 32
"""Largest number of pixels of all frames of a clip, which need 4 bytes each."""
MAX_SECONDS = 300
"""Limit of CPU seconds to decode a picture or clip; it restarts for each clip of a longer video."""
_ORIGINAL = {"PNG": "png", "JPEG": "jpg", "WEBP": "webp"}
_ANIMATED = ("PNG", "WEBP", "AVIF", "GIF")  # only the first frame of a picture is used
_HEIC_BRANDS = (b"ftypheic", b"ftypheix", b"ftypmif1")
_EMPTY = "the file is empty; copy it again"
_ROUNDING = 1e-6  # seconds; smallest tolerance when times of frames are compared
_LOST_SECONDS, _LOST_SHARE = 0.5, 0.05  # at the end of a video; more is an incomplete copy
_CRF = 16  # of H.264: visually lossless


class Deadline:
    """Limits of the decoding thread for one sample: CPU time, and pixels in memory."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        self._end, self._pixels = time.thread_time() + MAX_SECONDS, 0

    def check(self) -> None:
        """Raise `SampleError` if the time limit has passed."""
        if time.thread_time() > self._end:
            raise SampleError(
                "too_slow", f"decoding takes more than {MAX_SECONDS} s of processor time; shorten the file"
            )

    def keep(self, frame: Image.Image) -> Image.Image:
        """Return a frame that stays in memory; raise `SampleError` if the frames of the clip have too many pixels."""
        self._pixels += frame.width * frame.height
        if self._pixels > MAX_CLIP_PIXELS:
            raise SampleError(
                "too_large",
                f"the frames of a clip have more than {MAX_CLIP_PIXELS:,} pixels; cut the video into shorter clips "
                "(--frames), or scale it down (--size)",
            )
        return frame


class _TimedFile(io.BytesIO):
    """A picture file in memory that checks the deadline at each read, because Pillow reads while it decodes."""

    def __init__(self, data: bytes) -> None:
        super().__init__(data)
        self._deadline = Deadline()

    def read(self, size: Optional[int] = -1) -> bytes:
        self._deadline.check()
        return super().read(size)


def open_picture(data: bytes, paper: str = "white") -> Image.Image:
    """Decode a picture as upright RGB in sRGB.

    Returns:
        The picture; `info["size"]` is its size, `info["turned"]` is whether its EXIF orientation was applied,
        `info["colours"]` are its `Colours`, `info["animated"]` is whether it is the first frame of an animated PNG,
        WebP or AVIF, and `info["original"]` is the format of `data` if the pixels are unchanged.
    """
    try:
        with open_image(_TimedFile(data)) as opened:
            # Orientations 2 to 8 turn or mirror the pixels. The HEIC reader has done so and moved the value to `info`.
            turned = (opened.info.get("original_orientation") or _orientation(opened)) in range(2, 9)
            animated = opened.format in _ANIMATED and getattr(opened, "is_animated", False)
            changed = turned or animated or opened.mode != "RGB" or "transparency" in opened.info
            original = None if changed else _ORIGINAL.get(opened.format or "")
            opened.load()
            if turned:
                ImageOps.exif_transpose(opened, in_place=True)
            picture, colours = to_srgb(opened, paper)
    except SampleError:
        raise
    except PictureTooLargeError as error:
        raise SampleError("too_large", str(error)) from error
    except UnidentifiedImageError as error:  # Pillow's message contains a memory address, which differs in every run
        raise SampleError("bad_image", _why_unidentified(data)) from error
    except Exception as error:
        raise SampleError("bad_image", f"unreadable picture: {str(error).strip()}") from error
    original = None if colours == "converted" else original
    picture.info = {"original": original, "size": picture.size, "turned": turned, "colours": colours}
    picture.info["animated"] = animated
    return picture


def _orientation(picture: Image.Image) -> Optional[int]:
    """Return the EXIF orientation of a picture; None without one, or if the EXIF data are damaged."""
    if picture.format == "PNG":
        picture.load()  # or `getexif` loads it, and errors of the pixels would be taken for errors of EXIF
    try:
        return picture.getexif().get(0x0112)
    except Exception:  # Pillow raises several types of errors
        return None


def _why_unidentified(data: bytes) -> str:
    """Return why no reader recognizes a picture file."""
    if not data:
        return _EMPTY
    kind = "HEIC" if data[4:12] in _HEIC_BRANDS else "AVIF" if data[4:12] == b"ftypavif" else None
    if kind == "HEIC" and not reads_heic():
        return HEIC_IS_MISSING
    if kind is not None:
        return f"a {kind} file that is damaged or ends early, after {len(data)} bytes; copy it again"
    return f"{len(data)} bytes in none of the formats {', '.join(IMAGE_FORMATS)}, HEIC, or damaged at the start"


def is_animated(data: bytes) -> bool:
    """Return whether a picture file has several frames; False if it is damaged."""
    try:
        with open_image(_TimedFile(data)) as picture:
            return bool(getattr(picture, "is_animated", False))
    except Exception:  # as in `open_picture`, which reports the damage
        return False


def sampled_frames(
    data: bytes, fps: Optional[float], deadline: Deadline, span: Optional[tuple[float, Optional[float]]] = None
) -> Iterator[tuple[Image.Image, float, float]]:
    """Decode the frames of a video's first video stream as players display them: rotated, with square pixels.

    Args:
        data: a file in one of the containers of `dit.media`.
        fps: frames per second to yield; None for all.
        span: start and end in seconds from the first frame; None for all of the video.

    Yields:
        A frame as RGB, its time in seconds from the first frame of the video, and the frames per second of the output:
        `fps`, or what the file states. `info["turned"]` is whether the frame was rotated, mirrored or stretched,
        `info["colours"]` are its `Colours`, and `info["size"]` is its size.
    """
    # The header of an AVI file has its size; FFmpeg computes the duration of a truncated one from what is left.
    size = int.from_bytes(data[4:8], "little") + 8 if data.startswith(b"RIFF") else 0
    if len(data) < size < 1 << 32:  # a recorder that was stopped leaves 2**32 - 1 or 0 in the header
        raise SampleError("bad_video", f"it ends early, after {len(data)} of {size} bytes; copy it again")
    try:
        with open_video(io.BytesIO(data)) as container:
            if not container.streams.video:
                raise SampleError("no_video", "the file has no video stream")
            stream = container.streams.video[0]
            if stream.codec_context is None:
                raise SampleError("bad_video", "FFmpeg has no decoder for its video stream")
            check_size(stream.codec_context.width, stream.codec_context.height)
            native = float(stream.average_rate or stream.guessed_rate or 0)
            if not native > 0:
                raise SampleError("bad_video", "the video does not state its frame rate")
            aspect = stream.sample_aspect_ratio or Fraction(1)
            # Processes decode in parallel instead, and `Deadline` counts the time of one thread.
            stream.codec_context.thread_count = 1
            # Matroska rounds times to ticks of a millisecond: errors are up to half a tick, and 0.6 leaves a margin.
            rounding = max(_ROUNDING, min(0.6 * float(stream.time_base), 0.1 / native))
            decoded = _decoded(container, stream, deadline, native, 0.0 if span is None else span[0], rounding)
            displayed = _at_most_frames(_in_span(decoded, span, 1 / (fps or native), rounding))
            yield from _at_most_frames(_at_rate(displayed, fps, native, rounding, aspect))
    except (ConfigError, SampleError):
        raise
    except PictureTooLargeError as error:
        raise SampleError("too_large", str(error)) from error
    except Exception as error:  # PyAV raises many types of errors for damaged files
        raise SampleError("bad_video", _why_unreadable(data, error)) from error


def _why_unreadable(data: bytes, error: Exception) -> str:
    """Return why a video file cannot be decoded."""
    if not data:
        return _EMPTY
    if data[4:8] == b"ftyp" and b"moov" not in data:
        return f"it ends early, after {len(data)} bytes: its index (moov) is missing; copy it again"
    return f"unreadable video: {getattr(error, 'strerror', None) or error}"


def _decoded(
    container: Any, stream: Any, deadline: Deadline, native: float, start: float, rounding: float
) -> Iterator[tuple[Any, float]]:
    """Yield frames, from one at or before `start`, with their seconds from the first frame; then None, with the end."""
    end = 0.0

    def decode(since: Optional[float] = None) -> Iterator[Any]:
        """Yield the frames of the file, or those that a seek to a time gives."""
        nonlocal end
        if since is not None:
            container.seek(max(int(since / stream.time_base), stream.start_time or 0), stream=stream)
        for packet in container.demux():
            deadline.check()
            if (tick := packet.dts if packet.pts is None else packet.pts) is not None:
                end = max(end, float((tick + (packet.duration or 0)) * packet.time_base))
            if packet.stream.index != stream.index:
                continue
            for frame in packet.decode():
                check_size(frame.width, frame.height)  # may differ from the size in the header
                if start and frame.time is None:
                    raise SampleError("bad_video", "its frames have no times, which a start needs; convert it to mp4")
                yield frame

    frames = decode()
    first = next(frames, None)
    zero = 0.0 if first is None or first.time is None else first.time
    back = 0.0
    # A seek may end at a key frame after the start; the frames before it need an earlier one (B-frames, open GOPs).
    while start and first is not None and back <= 2 * start + 1:
        frames = decode(zero + start - back)
        first = next(frames, None)
        if first is not None and first.time - zero <= start + rounding:
            break
        back = 2 * back + 1
    instant = 0.0
    for number, frame in enumerate(frames if first is None else chain([first], frames)):
        instant = number / native if frame.time is None else frame.time - zero
        yield frame, instant
    length = (container.duration or 0) / 1e6
    if length - end > max(_LOST_SECONDS, _LOST_SHARE * length):
        raise SampleError("bad_video", f"its header says {length:.1f} s, and it ends at {end:.1f} s; copy it again")
    yield None, instant + 1 / native


def _in_span(
    frames: Iterator[tuple[Any, float]], span: Optional[tuple[float, Optional[float]]], interval: float, rounding: float
) -> Iterator[tuple[Any, float, float]]:
    """Yield the frames of a span, each with the times at which its display begins and ends.

    The frame displayed at the start is included if it began there, or is displayed for more than an `interval` after it
    or up to the end. A start that was rounded down would otherwise include the last frame of the previous scene.
    """
    start, end = (0.0, None) if span is None else span
    shown: Any = None
    since, is_empty = 0.0, True
    for frame, instant in frames:
        ends = end is not None and instant >= end - rounding
        shows = since >= start - rounding or instant - start > interval - rounding or (ends and is_empty)
        if shown is not None and shows:
            is_empty = False
            yield shown, max(since, start), instant if end is None else min(instant, end)
        if ends:
            return
        if frame is not None:
            shown, since = frame, instant
    if span is not None and is_empty:
        raise SampleError("too_short", f"its last frame is at {since:.2f} s, before the start at {start} s")


AnyFrame = TypeVar("AnyFrame")


def _at_most_frames(frames: Iterator[AnyFrame]) -> Iterator[AnyFrame]:
    for number, frame in enumerate(frames):
        if number == MAX_FRAMES:
            raise SampleError("too_long", f"more than {MAX_FRAMES} frames")
        yield frame


def _displayed(frame: Any, aspect: Fraction) -> Image.Image:
    """Return a frame as players display it.

    Args:
        frame: PyAV frame, possibly with a display matrix [[a, b], [c, d]]: x' = a x + c y, y' = b x + d y.
        aspect: ratio of a pixel's width to its height.
    """
    if any(component.is_alpha for component in frame.format.components):
        picture = flattened(Image.fromarray(frame.to_ndarray(format="rgba")))
    else:
        picture = frame.to_image()
    if aspect != 1:
        width = max(1, round(picture.width * aspect))
        check_size(width, picture.height)
        picture = picture.resize((width, picture.height), Image.Resampling.LANCZOS)
    side_data = frame.side_data.get("DISPLAYMATRIX")
    matrix = np.eye(3) if side_data is None else np.frombuffer(bytes(side_data), np.int32).reshape(3, 3)
    (a, b), (c, d) = np.round(matrix[:2, :2] / max(1, np.abs(matrix[:2, :2]).max()), 2)
    if (transposed := a == d == 0) == (b == c == 0):
        raise SampleError(
            "bad_video", "its display matrix is not a rotation by a multiple of 90 degrees; encode it upright"
        )
    if transposed:
        picture = picture.transpose(Image.Transpose.TRANSPOSE)
    if (c if transposed else a) < 0:
        picture = picture.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    if (b if transposed else d) < 0:
        picture = picture.transpose(Image.Transpose.FLIP_TOP_BOTTOM)
    picture.info["colours"] = colours_of_frame(frame)
    picture.info["turned"] = aspect != 1 or (a, b, c, d) != (1, 0, 0, 1)
    picture.info["size"] = picture.size
    return picture


def _at_rate(
    frames: Iterator[tuple[Any, float, float]], fps: Optional[float], native: float, rounding: float, aspect: Fraction
) -> Iterator[tuple[Image.Image, float, float]]:
    """Yield the displayed frame at each instant of a constant rate; all frames if `fps` is None."""
    start: Optional[float] = None
    count = 0
    for frame, since, end in frames:
        if fps is None:
            yield _displayed(frame, aspect), since, native
            continue
        start = since if start is None else start
        shown: Optional[Image.Image] = None
        while (instant := start + count / fps) < end - rounding:
            shown = shown or _displayed(frame, aspect)
            yield shown, instant, fps
            count += 1


def picture_bytes(picture: Image.Image, image_format: Format) -> bytes:
    """Encode a picture: `png` and `webp` lossless, `jpg` with full colour resolution."""
    buffer = io.BytesIO()
    if image_format == "jpg":
        picture.save(buffer, "JPEG", quality=95, subsampling=0)
    elif image_format == "webp":
        picture.save(buffer, "WEBP", lossless=True, quality=50, method=2)
    else:
        picture.save(buffer, "PNG", compress_level=4)
    return buffer.getvalue()


def video_bytes(frames: Sequence[Image.Image], fps: float) -> bytes:
    """Encode RGB frames as an mp4 file: H.264 with full colour resolution, visually lossless.

    Colours are stored as 4:4:4, because a model trained on 4:2:0 learns its blurred colours.
    """
    return mp4_bytes(frames, fps, pix_fmt="yuv444p", crf=_CRF)


def check_same_size(frames: Sequence[Image.Image]) -> None:
    """Raise `SampleError` if the size changes within a clip."""
    sizes = dict.fromkeys(f"{frame.width} x {frame.height}" for frame in frames)
    if len(sizes) > 1:
        raise SampleError("bad_video", f"its frames have several sizes: {', '.join(sizes)}")


def pixels_of(frames: Sequence[Image.Image]) -> Tensor:
    """Convert RGB frames to uint8 `[3, T, H, W]`."""
    pixels = np.stack([np.asarray(picture, np.uint8) for picture in frames])
    return torch.from_numpy(np.ascontiguousarray(pixels.transpose(3, 0, 1, 2)))


def read_pixels(data: bytes, extension: str) -> Tensor:
    """Decode a picture or video to `[3, T, H, W]`, uint8; a picture has one frame."""
    if extension in VIDEOS:
        deadline = Deadline()
        frames = [deadline.keep(frame) for frame, *_ in sampled_frames(data, None, deadline)]
        if not frames:
            raise SampleError("bad_video", "the video has no frame")
        check_same_size(frames)
        return pixels_of(frames)
    return pixels_of([open_picture(data)])
