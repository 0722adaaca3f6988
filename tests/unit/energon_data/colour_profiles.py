"""ICC profiles made by code, and the colours that they mean, computed without a colour library.

Source: ICC.1:2022, sections 7 (header, tag table), 10.6 (curveType), 10.10 (lut8Type), 10.31 (XYZType).
"""

import struct

import numpy as np
from PIL import Image

D50 = (0.9642, 1.0, 0.8249)
SRGB = ((0.4360, 0.3851, 0.1431), (0.2225, 0.7169, 0.0606), (0.0139, 0.0971, 0.7142))
"""XYZ under D50 of the primaries, one per column."""
DISPLAY_P3 = ((0.5151, 0.2920, 0.1571), (0.2412, 0.6922, 0.0666), (-0.0011, 0.0419, 0.7841))
ADOBE_RGB = ((0.6097, 0.2053, 0.1492), (0.3111, 0.6257, 0.0632), (0.0195, 0.0609, 0.7446))
GAMMA = 2.2


def _fixed(*values: float) -> bytes:
    return struct.pack(f">{len(values)}i", *(round(value * 65536) for value in values))


def _xyz(*values: float) -> bytes:
    return b"XYZ \0\0\0\0" + _fixed(*values)


def _gamma(gamma: float) -> bytes:
    return b"curv\0\0\0\0" + struct.pack(">IH", 1, round(gamma * 256)) + b"\0\0"


def _profile(kind: bytes, space: bytes, between: bytes, tags: dict[bytes, bytes]) -> bytes:
    """Return an ICC profile of version 2.4."""
    text = b"made by code\0"
    tags = {
        b"desc": b"desc\0\0\0\0" + struct.pack(">I", len(text)) + text + bytes(78),
        b"cprt": b"text\0\0\0\0" + text,
        b"wtpt": _xyz(*D50),
        **tags,
    }
    table, body = struct.pack(">I", len(tags)), b""
    for name, data in tags.items():
        data += bytes(-len(data) % 4)
        table += name + struct.pack(">II", 128 + 4 + 12 * len(tags) + len(body), len(data))
        body += data
    size = 128 + len(table) + len(body)
    header = struct.pack(">I4xI", size, 0x02400000) + kind + space + between + bytes(12) + b"acsp"
    return header.ljust(68, b"\0") + _fixed(*D50) + bytes(48) + table + body


def rgb_profile(primaries: tuple[tuple[float, ...], ...], gamma: float = GAMMA) -> bytes:
    """Return the profile of a display with these primaries."""
    columns = zip((b"rXYZ", b"gXYZ", b"bXYZ"), zip(*primaries), strict=True)
    curves = {name: _gamma(gamma) for name in (b"rTRC", b"gTRC", b"bTRC")}
    return _profile(b"mntr", b"RGB ", b"XYZ ", {name: _xyz(*xyz) for name, xyz in columns} | curves)


def grey_profile(gamma: float = GAMMA) -> bytes:
    """Return the profile of a grey display."""
    return _profile(b"mntr", b"GRAY", b"XYZ ", {b"kTRC": _gamma(gamma)})


def cmyk_profile(lightness: float) -> bytes:
    """Return the profile of a printer whose paper is white, and every ink a grey of this CIE L*, from 0 to 100."""
    identity = bytes(range(256))
    colours = [(255 if ink == 0 else round(lightness * 2.55), 128, 128) for ink in range(16)]
    table = b"mft1\0\0\0\0" + bytes((4, 3, 2, 0)) + _fixed(1, 0, 0, 0, 1, 0, 0, 0, 1)
    table += 4 * identity + bytes(value for colour in colours for value in colour) + 3 * identity
    return _profile(b"prtr", b"CMYK", b"Lab ", {b"A2B0": table})


def srgb_curve(linear: np.ndarray) -> np.ndarray:
    """Return sRGB values of 0 to 255 of linear light. Source: IEC 61966-2-1."""
    linear = linear.clip(0, 1)
    return 255 * np.where(linear <= 0.0031308, 12.92 * linear, 1.055 * linear ** (1 / 2.4) - 0.055)


def in_srgb(rgb: np.ndarray, primaries: tuple[tuple[float, ...], ...], gamma: float = GAMMA) -> np.ndarray:
    """Return colours `[..., 3]` of `rgb_profile` in sRGB, not rounded."""
    linear = (np.asarray(rgb) / 255) ** gamma
    return srgb_curve(linear @ np.array(primaries).T @ np.linalg.inv(np.array(SRGB)).T)


def colour_chart(low: int = 100, high: int = 150) -> Image.Image:
    """Return 48 x 32 colours of low saturation, which sRGB also has."""
    values = np.random.default_rng(0).integers(low, high, (32, 48, 3), np.uint8)
    return Image.fromarray(values)
