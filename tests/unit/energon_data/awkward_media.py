"""Pictures and clips as phones, editors and downloads leave them in a folder, made by code."""

import io
import struct
from fractions import Fraction

import av
import numpy as np
from PIL import Image

RED, GREY = (200, 30, 30), (90, 90, 90)
WIDTH, HEIGHT = 96, 64
FIXED_POINT = 1 << 16
MATRICES = {  # how players display a clip: a, b, c, d of x' = a x + c y, y' = b x + d y
    "as stored": (1, 0, 0, 1),
    "90": (0, 1, -1, 0),
    "180": (-1, 0, 0, -1),
    "270": (0, -1, 1, 0),
    "mirrored": (-1, 0, 0, 1),
    "transposed": (0, 1, 1, 0),
}
EXIF_ORIENTATION = {"as stored": 1, "90": 6, "180": 3, "270": 8, "mirrored": 2, "transposed": 5}
"""The orientation of a picture that displays like a clip with this matrix."""


def marked(width: int = WIDTH, height: int = HEIGHT) -> Image.Image:
    """Return a grey picture with a red mark in its upper left corner."""
    picture = Image.new("RGB", (width, height), GREY)
    picture.paste(RED, (0, 0, width // 4, height // 4))
    return picture


def marked_corner(pixels: np.ndarray) -> str:
    """Return which corner of `[H, W, 3]` is red."""
    corners = {"top left": (0, 0), "top right": (0, -1), "bottom left": (-1, 0), "bottom right": (-1, -1)}
    redness = {name: int(pixels[place][0]) - int(pixels[place][1]) for name, place in corners.items()}
    return max(redness, key=redness.__getitem__)


def mp4(picture: Image.Image, count: int = 4, aspect: Fraction = Fraction(1), container: str = "mp4") -> bytes:
    """Return a clip that shows one picture, 8 frames per second; `aspect` is width by height of a pixel."""
    buffer = io.BytesIO()
    with av.open(buffer, "w", format=container) as file:
        stream = file.add_stream("libx264", rate=8)
        stream.width, stream.height, stream.pix_fmt = *picture.size, "yuv444p"
        stream.codec_context.sample_aspect_ratio = aspect
        for _ in range(count):
            file.mux(stream.encode(av.VideoFrame.from_image(picture)))
        file.mux(stream.encode())
    return buffer.getvalue()


def turned_mp4(data: bytes, matrix: tuple[float, float, float, float]) -> bytes:
    """Return an mp4 file with this display matrix in the header of its track."""
    a, b, c, d = (round(value * FIXED_POINT) for value in matrix)
    start = data.index(b"tkhd") + 4 + 40  # version and flags, times, number, duration, layer, group, volume
    return data[:start] + struct.pack(">9i", a, b, 0, c, d, 0, 0, 0, 1 << 30) + data[start + 36 :]


def jpeg(picture: Image.Image, orientation: int = 1) -> bytes:
    """Return a JPEG file with an EXIF orientation."""
    buffer, exif = io.BytesIO(), Image.Exif()
    exif[0x0112] = orientation
    picture.save(buffer, "JPEG", exif=exif, quality=95, subsampling=0)
    return buffer.getvalue()
