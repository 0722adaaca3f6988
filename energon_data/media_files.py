"""Read and write picture and video files, with a limit on what a file may unpack to."""

import io
from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import Any, Literal, Optional

import numpy as np
import torch
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor

from dit.errors import ConfigError
from energon_data.samples import SampleError

PICTURES = frozenset({"jpg", "jpeg", "png", "webp", "bmp", "tif", "tiff", "gif"})
VIDEOS = frozenset({"mp4", "webm", "mov", "mkv", "avi", "m4v"})
"""Extensions of files that are read."""

Format = Literal["png", "webp", "jpg"]
MAX_PIXELS = 178_956_970
"""Most pixels of a picture: Pillow's own warning level, a quarter of a GiB as RGB."""
MAX_SIDE = 32_768
MAX_FRAMES = 100_000
_ORIGINAL = {"PNG": "png", "JPEG": "jpg", "WEBP": "webp"}
_WHITE = (255, 255, 255)
_CRF = 16  # of H.264: visually without loss


def open_picture(data: bytes) -> Image.Image:
    """Decode a picture as upright RGB; what is transparent becomes white.

    Args:
        data: a file in any format that Pillow reads.

    Returns:
        The picture; `info["original"]` names the format of `data` if its pixels were taken as they are.

    Raises:
        SampleError: it is damaged, no picture, or larger than `MAX_PIXELS` or `MAX_SIDE`. The header is looked at
            first, so that a file which unpacks to many GiB is refused before it does.
    """
    try:
        with Image.open(io.BytesIO(data)) as opened:
            width, height = opened.size
            if width * height > MAX_PIXELS or max(width, height) > MAX_SIDE:
                raise SampleError(
                    "too_large", f"{width} x {height} pixels; at most {MAX_PIXELS} in all and {MAX_SIDE} on a side"
                )
            turned = opened.getexif().get(0x0112, 1) != 1  # the camera was turned
            original = _ORIGINAL.get(opened.format or "") if opened.mode == "RGB" and not turned else None
            picture = _rgb(ImageOps.exif_transpose(opened))
    except SampleError:
        raise
    except UnidentifiedImageError as error:  # its own text has an address in memory, other in every run
        raise SampleError("bad_image", f"{len(data)} bytes in no format that is known") from error
    except Exception as error:
        raise SampleError("bad_image", f"unreadable picture: {error}") from error
    picture.info = {"original": original}
    return picture


def _rgb(picture: Image.Image) -> Image.Image:
    if picture.mode in ("I", "I;16", "I;16B", "I;16L", "F"):  # 16 bits of grey; Pillow's own conversion clips them
        values = np.asarray(picture, np.float64)
        if not np.isfinite(values).all():
            raise SampleError("bad_image", "it has values that are not finite")
        largest = values.max(initial=0)
        top = 65535 if largest > 255 else 1 if picture.mode == "F" and largest <= 1 else 255
        picture = Image.fromarray(np.uint8(np.round(values.clip(0, top) * (255 / top))))
    if picture.mode in ("RGBA", "LA", "PA") or "transparency" in picture.info:
        picture = picture.convert("RGBA")
        paper = Image.new("RGBA", picture.size, (*_WHITE, 255))
        picture = Image.alpha_composite(paper, picture)
    return picture.convert("RGB")


def _av() -> Any:
    try:
        import av
    except ImportError as error:
        raise ConfigError("videos need PyAV, which is not installed: pip install 'megatron-dit[video]'") from error
    return av


def sampled_frames(data: bytes, fps: Optional[float]) -> Iterator[tuple[Image.Image, float]]:
    """Decode the frames of a video's first video stream.

    Args:
        data: a file in any container that FFmpeg reads.
        fps: frames per second wanted; None for all.

    Yields:
        A frame as RGB, and the frames per second of what is yielded.

    Raises:
        SampleError: it is damaged, holds no video, or is beyond `MAX_FRAMES`, `MAX_PIXELS` or `MAX_SIDE`.
    """
    av = _av()
    try:
        with av.open(io.BytesIO(data), metadata_errors="ignore") as container:
            if not container.streams.video:
                raise SampleError("no_video", "the file has no video stream")
            stream = container.streams.video[0]
            width, height = stream.codec_context.width, stream.codec_context.height
            if width * height > MAX_PIXELS or max(width, height) > MAX_SIDE:
                raise SampleError("too_large", f"frames of {width} x {height}")
            native = float(stream.average_rate or stream.guessed_rate or 0)
            if not native > 0:
                raise SampleError("bad_video", "the video does not state its frame rate")
            stream.thread_type = "NONE"  # processes work side by side instead
            yield from _at_rate(container.decode(stream), fps, native)
    except SampleError:
        raise
    except (av.FFmpegError, ValueError, OSError) as error:
        raise SampleError("bad_video", f"unreadable video: {error}") from error


def _at_rate(frames: Iterator[Any], fps: Optional[float], native: float) -> Iterator[tuple[Image.Image, float]]:
    """Yield for each wanted instant the frame on display; all frames without a rate."""
    shown: Optional[Image.Image] = None
    wanted, start = 0, 0.0
    for number, frame in enumerate(frames):
        if number >= MAX_FRAMES:
            raise SampleError("too_long", f"more than {MAX_FRAMES} frames")
        if fps is None:
            yield frame.to_image(), native
            continue
        time = frame.time if frame.time is not None else number / native
        start = time if number == 0 else start
        while shown is not None and start + wanted / fps < time - 1e-6:
            yield shown, fps
            wanted += 1
        shown = frame.to_image()
    end = 0.0 if shown is None else time + 1 / native
    while fps is not None and shown is not None and start + wanted / fps < end - 1e-6:
        yield shown, fps
        wanted += 1


def picture_bytes(picture: Image.Image, image_format: Format, quality: int = 95) -> bytes:
    """Return a picture as a file: `png` and `webp` without loss, `jpg` with `quality` and full colour resolution."""
    buffer = io.BytesIO()
    if image_format == "jpg":
        picture.save(buffer, "JPEG", quality=quality, subsampling=0)
    elif image_format == "webp":
        picture.save(buffer, "WEBP", lossless=True, quality=50, method=2)
    else:
        picture.save(buffer, "PNG", compress_level=4)
    return buffer.getvalue()


def video_bytes(frames: Sequence[Image.Image], fps: float) -> bytes:
    """Return RGB frames as an mp4 file: H.264 with full colour resolution, visually without loss.

    The colours are stored as 4:4:4, because a model that learns from 4:2:0 learns its blurred colours.
    """
    av = _av()
    buffer = io.BytesIO()
    rate = Fraction(fps).limit_denominator(1001 * 60)
    with av.open(buffer, "w", format="mp4") as container:
        stream = container.add_stream("libx264", rate=rate)
        stream.width, stream.height = frames[0].size
        stream.pix_fmt = "yuv444p"
        stream.options = {"crf": str(_CRF), "preset": "medium", "threads": "1"}
        for picture in frames:
            for packet in stream.encode(av.VideoFrame.from_image(picture)):
                container.mux(packet)
        for packet in stream.encode():
            container.mux(packet)
    return buffer.getvalue()


def pixels_of(frames: Sequence[Image.Image]) -> Tensor:
    """Return RGB frames as uint8 `[3, T, H, W]`."""
    pixels = np.stack([np.asarray(picture, np.uint8) for picture in frames])
    return torch.from_numpy(np.ascontiguousarray(pixels.transpose(3, 0, 1, 2)))


def read_pixels(data: bytes, extension: str) -> Tensor:
    """Decode a picture or video.

    Args:
        extension: of the file's name; it tells which of the two it is.

    Returns:
        `[3, T, H, W]` uint8; a picture has one frame.

    Raises:
        SampleError: it is damaged.
    """
    if extension in VIDEOS:
        frames = [frame for frame, _ in sampled_frames(data, None)]
        if not frames:
            raise SampleError("bad_video", "the video has no frame")
        return pixels_of(frames)
    return pixels_of([open_picture(data)])
