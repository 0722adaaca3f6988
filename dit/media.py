"""The only module that opens picture and video files, with a closed list of formats.

Pillow and FFmpeg choose a reader by the content of a file, not by its name. Some readers start programs
(PostScript), open network ports (SDP) or read other files (playlists), so only the formats below are accepted.
"""

import functools
from collections.abc import Sequence
from fractions import Fraction
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Literal

import numpy as np

from dit.errors import ConfigError

if TYPE_CHECKING:
    from PIL.Image import Image

IMAGE_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "AVIF")
"""Formats of Pillow. Its JPEG reader also reads MPO, the multi-picture format of phones."""
HEIC_IS_MISSING = "HEIC needs pillow-heif, which is not installed: pip install -e '.[heic]' in the repository's folder"
PYAV_IS_MISSING = "videos need PyAV, which is not installed: pip install -e '.[video]' in the repository's folder"
MAX_PIXELS = 1 << 28
"""Largest number of pixels of a picture, more than the 200 million of phones. Decoding needs 4 bytes per pixel (JPEG,
PNG), 8 to 10 (progressive, rotated or transparent ones, AVIF) or 16 (WebP, 4.3 GB for the largest)."""
MAX_SIDE = 32_768
CONTAINERS = "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,avi,gif"
"""Containers of FFmpeg; the first six names are the same reader."""


class PictureTooLargeError(ValueError):
    """A picture or frame has too many pixels."""


def check_size(width: int, height: int) -> None:
    """Raise an error for a picture or frame whose pixels exceed `MAX_PIXELS` or `MAX_SIDE`."""
    if width * height > MAX_PIXELS or max(width, height) > MAX_SIDE:
        raise PictureTooLargeError(
            f"{width} x {height} pixels; at most {MAX_PIXELS:,} in total and {MAX_SIDE:,} per side; scale it down"
        )


def open_image(file: Path | BinaryIO) -> "Image":
    """Open a picture; pixels are decoded on first use, after the size in the header is checked.

    Raises:
        PictureTooLargeError: see `check_size`.
        PIL.UnidentifiedImageError: the format is not one of `IMAGE_FORMATS`, or HEIC with `reads_heic()`.
    """
    from PIL import Image

    formats = (*IMAGE_FORMATS, "HEIF") if reads_heic() else IMAGE_FORMATS
    Image.MAX_IMAGE_PIXELS = None  # Pillow's limit of 179 million; `check_size` replaces it
    picture = Image.open(file, formats=formats)
    check_size(*picture.size)
    return picture


@functools.cache
def reads_heic() -> bool:
    """Return whether pillow-heif is installed, and register it with Pillow."""
    try:
        import pillow_heif
    except ImportError:
        return False
    pillow_heif.register_heif_opener()
    return True


def open_video(file: BinaryIO) -> Any:
    """Open a video as a PyAV container that can read only this file.

    Raises:
        ConfigError: PyAV is not installed.
        av.FFmpegError: the container is not one of `CONTAINERS`.
    """
    options = {"format_whitelist": CONTAINERS, "protocol_whitelist": "none"}
    av = _av(PYAV_IS_MISSING)
    # PyAV 19 always reads metadata that are no UTF-8; earlier versions only on request.
    lenient = {} if int(av.__version__.partition(".")[0]) >= 19 else {"metadata_errors": "ignore"}
    return av.open(file, container_options=options, **lenient)


def mp4_bytes(frames: Sequence["Image"], fps: float, *, pix_fmt: Literal["yuv420p", "yuv444p"], crf: int) -> bytes:
    """Encode an mp4 file: H.264, or MPEG-4 part 2 if PyAV lacks it.

    Args:
        frames: at least one frame, all of one size. Odd sides are padded for `yuv420p`, which subsamples chroma by two.
        crf: quality of H.264, from 0 (lossless) to 51.
    """
    av, buffer = _av(f"{PYAV_IS_MISSING}; samples can also be written as .gif"), BytesIO()
    codec = "libx264" if "libx264" in av.codecs_available else "mpeg4"
    width, height = frames[0].size
    even = 2 if pix_fmt == "yuv420p" else 1
    padding = [(0, -height % even), (0, -width % even), (0, 0)]
    with av.open(buffer, "w", format="mp4") as container:
        stream: Any = container.add_stream(codec, rate=Fraction(fps).limit_denominator(1001 * 60))
        stream.width, stream.height = width + -width % even, height + -height % even
        stream.pix_fmt = pix_fmt
        if codec == "libx264":
            stream.options = {"crf": str(crf), "threads": "1"}  # one thread: the same bytes on every machine
        for picture in frames:
            pixels = np.pad(np.asarray(picture.convert("RGB")), padding, mode="edge")
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(stream.encode())
    return buffer.getvalue()


def reads_videos() -> bool:
    """Return whether PyAV is installed."""
    try:
        import av  # noqa: F401
    except ImportError:
        return False
    return True


def _av(is_missing: str) -> Any:
    try:
        import av
    except ImportError as error:
        raise ConfigError(is_missing) from error
    return av
