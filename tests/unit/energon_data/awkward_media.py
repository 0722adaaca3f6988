"""Pictures and clips, made by code, in the forms in which phones, editors and downloads leave them in a folder."""

import io
import struct
import zlib
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
from PIL import Image

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


def heic(picture: Image.Image, orientation: int) -> bytes:
    """Return a HEIC file with an EXIF orientation, which the encoder writes as a rotation of the container (`irot`)."""
    buffer, exif = io.BytesIO(), Image.Exif()
    exif[0x0112] = orientation
    picture.save(buffer, "HEIF", exif=exif.tobytes(), quality=95)
    return buffer.getvalue()


def animated_gif(count: int = 4) -> bytes:
    """Return a GIF of 0.1 s per frame, in which a dark square moves on a transparent ground."""
    frames = []
    for i in range(count):
        frame = Image.new("RGBA", (WIDTH, HEIGHT), (0, 0, 0, 0))
        frame.paste((*GREY, 255), (16 * i, 0, 16 * i + 16, 16))
        frames.append(frame)
    buffer = io.BytesIO()
    frames[0].save(buffer, "GIF", save_all=True, append_images=frames[1:], duration=100, disposal=2)
    return buffer.getvalue()


def encoded(picture: Image.Image, kind: str) -> bytes:
    """Return a picture as a file of a format."""
    buffer = io.BytesIO()
    picture.save(buffer, kind)
    return buffer.getvalue()


def awkward_folder(root: Path) -> Path:
    """Make `root/in` with links to files and folders in `root/elsewhere`; `AWKWARD` has the result for each file.

    Returns:
        The folder.
    """
    folder, elsewhere = root / "in", root / "elsewhere"
    files = {
        "upright.png": encoded(marked(), "PNG"),
        "turned.jpg": jpeg(marked(), 6),
        "turned.mp4": turned_mp4(mp4(marked()), MATRICES["90"]),
        "wide_pixels.mp4": mp4(marked(64, 64), aspect=Fraction(2)),
        "moving.gif": animated_gif(),
        "still.gif": encoded(marked(), "GIF"),
        "phone.avif": encoded(marked(), "AVIF"),
        "drawing.svg": b"<svg/>",
        "no_extension": encoded(marked(), "PNG"),
        "empty.png": b"",
        "sliver.png": encoded(marked(1, 5000), "PNG"),
        "bar.png": encoded(marked(2000, 20), "PNG"),
        "tiny.png": encoded(marked(8, 8), "PNG"),
        "lonely.txt": b"a caption without its picture",
        ".hidden.png": encoded(marked(), "PNG"),
        "upright.txt": b"a red mark",
    }
    folder.mkdir()
    for name, data in files.items():
        (folder / name).write_bytes(data)
    (elsewhere / "more").mkdir(parents=True)
    for name in ("linked.png", "more/one.png", "more/two.png"):
        (elsewhere / name).write_bytes(encoded(marked(), "PNG"))
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
