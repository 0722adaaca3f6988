"""Pictures and clips, made by code, in the forms in which phones, editors and downloads leave them in a folder."""

import io
import struct
import zlib
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
from PIL import Image

from tests.unit.energon_data.preparations import as_file, folder_of

RED, GREY = (200, 30, 30), (90, 90, 90)
WIDTH, HEIGHT = 96, 64
FIXED_POINT = 1 << 16
MATRICES = {  # how players display a clip: the values a, b, c, d of x' = a x + c y, y' = b x + d y
    "as stored": (1, 0, 0, 1),
    "90": (0, 1, -1, 0),
    "180": (-1, 0, 0, -1),
    "270": (0, -1, 1, 0),
    "mirrored": (-1, 0, 0, 1),
    "transposed": (0, 1, 1, 0),
}
EXIF_ORIENTATION = {"as stored": 1, "90": 6, "180": 3, "270": 8, "mirrored": 2, "transposed": 5}
"""The EXIF orientation of a picture that displays like a clip with this matrix."""


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


def video(
    pictures: Sequence[Image.Image],
    container: str = "mp4",
    codec: str = "libx264",
    pixels: str = "yuv444p",
    rate: int = 8,
    aspect: Fraction = Fraction(1),
) -> bytes:
    """Return a clip of pictures; `aspect` is width by height of a pixel."""
    buffer = io.BytesIO()
    with av.open(buffer, "w", format=container) as file:
        stream = file.add_stream(codec, rate=rate)
        stream.width, stream.height, stream.pix_fmt = *pictures[0].size, pixels
        stream.codec_context.sample_aspect_ratio = aspect
        for picture in pictures:
            file.mux(stream.encode(av.VideoFrame.from_image(picture)))
        file.mux(stream.encode())
    return buffer.getvalue()


def mp4(picture: Image.Image, count: int = 4, **settings: Any) -> bytes:
    """Return a clip that shows one picture, 8 frames per second."""
    return video([picture] * count, **settings)


def turned_mp4(data: bytes, matrix: tuple[float, float, float, float]) -> bytes:
    """Return an mp4 file with this display matrix in the header of its track."""
    a, b, c, d = (round(value * FIXED_POINT) for value in matrix)
    start = data.index(b"tkhd") + 4 + 40  # version and flags, times, number, duration, layer, group, volume
    return data[:start] + struct.pack(">9i", a, b, 0, c, d, 0, 0, 0, 1 << 30) + data[start + 36 :]


def jpeg(picture: Image.Image, orientation: int = 1) -> bytes:
    """Return a JPEG file with an EXIF orientation."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    return as_file(picture, "JPEG", exif=exif, quality=95, subsampling=0)


def heic(picture: Image.Image, orientation: int) -> bytes:
    """Return a HEIC file with an EXIF orientation, which the encoder writes as a rotation of the container (`irot`)."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    return as_file(picture, "HEIF", exif=exif.tobytes(), quality=95)


def animated_gif(count: int = 4) -> bytes:
    """Return a GIF of 0.1 s per frame, in which a dark square moves on a transparent ground."""
    frames = []
    for i in range(count):
        frame = Image.new("RGBA", (WIDTH, HEIGHT), (0, 0, 0, 0))
        frame.paste((*GREY, 255), (16 * i, 0, 16 * i + 16, 16))
        frames.append(frame)
    return as_file(frames[0], "GIF", save_all=True, append_images=frames[1:], duration=100, disposal=2)


def awkward_folder(root: Path) -> Path:
    """Make `root/in` with links to files and folders in `root/elsewhere`; `AWKWARD` has the result for each file."""
    folder, elsewhere = root / "in", root / "elsewhere"
    files = {
        "upright.png": as_file(marked()),
        "turned.jpg": jpeg(marked(), 6),
        "turned.mp4": turned_mp4(mp4(marked()), MATRICES["90"]),
        "wide_pixels.mp4": mp4(marked(64, 64), aspect=Fraction(2)),
        "moving.gif": animated_gif(),
        "still.gif": as_file(marked(), "GIF"),
        "phone.avif": as_file(marked(), "AVIF"),
        "drawing.svg": b"<svg/>",
        "no_extension": as_file(marked()),
        "empty.png": b"",
        "sliver.png": as_file(marked(1, 5000)),
        "bar.png": as_file(marked(2000, 20)),
        "tiny.png": as_file(marked(8, 8)),
        "lonely.txt": b"a caption without its picture",
        ".hidden.png": as_file(marked()),
        "upright.txt": b"a red mark",
    }
    folder_of(folder, files)
    folder_of(elsewhere, dict.fromkeys(("linked.png", "more/one.png", "more/two.png"), as_file(marked())))
    (folder / "linked.png").symlink_to(elsewhere / "linked.png")
    (folder / "broken.png").symlink_to(elsewhere / "nothing.png")
    (folder / "more").symlink_to(elsewhere / "more")
    (elsewhere / "more" / "loop").symlink_to(folder)
    return folder


TAKEN = ""
AWKWARD = {
    "upright.png": TAKEN,
    "turned.jpg": TAKEN,
    "turned.mp4": TAKEN,
    "wide_pixels.mp4": TAKEN,
    "moving.gif": TAKEN,
    "still.gif": TAKEN,
    "phone.avif": TAKEN,
    "drawing.svg": "other_format",
    "no_extension": "other_format",
    "empty.png": "bad_image",
    "sliver.png": "too_small",
    "bar.png": "cut_too_much",
    "tiny.png": "too_small",
    "lonely.txt": "no_picture",
    "linked.png": "path_escape",
    "broken.png": "not_a_file",
    "more": "linked_folder",
}
"""The reason why `prepare folder --size 64` skips a file of `awkward_folder`, or `TAKEN`."""
FOLLOWED = {"linked.png": TAKEN, "more/one.png": TAKEN, "more/two.png": TAKEN, "more/loop": "linked_folder"}
"""Changes with `--follow-links`, which reads the folder `more`."""


def black(width: int, height: int, rows: int) -> bytes:
    """A PNG whose header has this size, with the pixels of `rows` rows."""
    packer = zlib.compressobj(1)
    pixels = b"".join(packer.compress(bytes(1 + 3 * width)) for _ in range(rows)) + packer.flush()
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = [(b"IHDR", header), (b"IDAT", pixels), (b"IEND", b"")]
    body = b"".join(struct.pack(">I", len(d)) + n + d + struct.pack(">I", zlib.crc32(n + d)) for n, d in chunks)
    return b"\x89PNG\r\n\x1a\n" + body
