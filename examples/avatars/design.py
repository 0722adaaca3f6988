"""The design `Pixel Art` of DiceBear: parts of avatars as pixels of a grid of 16 x 16, from the npm package.

A part, such as `short16` of `hair`, is a line of JavaScript with SVG paths. Their edges are horizontal or vertical and
lie on the grid, so a part is a few sets of pixels, each with a colour and an opacity.
"""

import base64
import hashlib
import io
import os
import re
import tarfile
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Optional
from urllib.request import urlopen

import numpy as np

from dit.durable_files import write_atomic
from dit.errors import ConfigError
from dit.safe_files import read_bytes

ATTRIBUTION = "avatars drawn with the design Pixel Art by DiceBear (dicebear.com), CC0 1.0"
RELEASE = "@dicebear/pixel-art 9.4.3"
ARCHIVE = "pixel-art-9.4.3.tgz"
SHA512 = "sGoG6MEs9ZWD+5+7OObVjp7IrF3E/UEKTg7T4kou9UXl2YXLVy8u8hHnAgTqWhiVZuyYozAVsK2E/oYvMigYBw=="
"""Checksum of the archive, which the npm registry names as its integrity."""
LARGEST = 1 << 20  # bytes of the archive, also uncompressed
SIZE = 16  # pixels


@dataclass(frozen=True)
class Shape:
    """Pixels of a part that are painted with one colour.

    Attributes:
        pixels: indices into the flattened grid.
        colour: red, green and blue, 0 to 255; None for the colour that the avatar selects.
        opacity: weight of the colour.
    """

    pixels: np.ndarray
    colour: Optional[tuple[int, ...]]
    opacity: float


def colour(digits: str) -> tuple[int, ...]:
    """Return the red, green and blue of a hexadecimal colour of three or six digits."""
    width = len(digits) // 3
    return tuple(int((digits[i : i + width] * 2)[:2], 16) for i in range(0, len(digits), width))


@lru_cache
def parts() -> Mapping[str, Mapping[str, tuple[Shape, ...]]]:
    """Return the shapes of each part by kind and name, such as `hair` and `short16`, in the order of painting.

    Raises:
        ConfigError: the package is neither in the user's cache nor available from the npm registry.
    """
    texts = _texts()
    kinds = {"head": {"head": tuple(_shapes(texts["package/lib/index.js"]))}}
    for file, text in texts.items():
        drawings = re.findall(r"^ +(\w+): .*?`(.*)`,$", text, re.MULTILINE) if "/components/" in file else []
        kinds |= {Path(file).stem: {name: tuple(_shapes(drawing)) for name, drawing in drawings}}
    return kinds


def _shapes(drawing: str) -> Iterator[Shape]:
    """Yield the shapes of a drawing; a beard is the path of its mask, so that dark hair gives an opaque beard."""
    group: dict[str, str] = {}
    for tag, text in re.findall(r"<(\w+)([^>]*)>", drawing.partition("</mask>")[0]):
        attributes = dict(re.findall(r'([\w-]+)="([^"]*)"', text))
        if tag == "g":
            group = attributes
        elif tag == "path":
            attributes = group | attributes
            fill = attributes["fill"]
            opacity = float(attributes.get("fill-opacity", attributes.get("opacity", 1)))
            pixels = _pixels(attributes["d"], attributes.get("fill-rule") == "evenodd")
            yield Shape(pixels, colour(fill[1:]) if fill.startswith("#") else None, opacity)


def _pixels(path: str, even_odd: bool) -> np.ndarray:
    """Return the pixels inside a path: those with edges to their left that do not cancel."""
    winding = np.zeros((SIZE, SIZE), int)
    x = y = 0
    start = x, y
    for command, text in re.findall(r"([HhMmVvZz])([^A-Za-z]*)", path):
        numbers, before = [int(number) for number in re.findall(r"-?\d+", text)], y
        if command in "HhMm":
            x = numbers[0] + x * command.islower()
        if command in "VvMm":
            y = numbers[-1] + y * command.islower()
        if command in "Zz":
            x, y = start
        if command in "Mm":
            start = x, y
        else:
            winding[min(before, y) : max(before, y), x:] += 1 if y > before else -1
    return np.flatnonzero(winding % 2 if even_odd else winding)


def _texts() -> dict[str, str]:
    """Return the JavaScript files of the package by their names in the archive; nothing is extracted."""
    decompressor = zlib.decompressobj(wbits=31)  # gzip
    with tarfile.open(fileobj=io.BytesIO(decompressor.decompress(_archive(), LARGEST))) as archive:
        files = {member.name: archive.extractfile(member) for member in archive if member.name.endswith(".js")}
        return {name: file.read().decode() for name, file in files.items() if file is not None}


def _archive() -> bytes:
    """Return the archive of the package from the user's cache, or download it.

    Raises:
        ConfigError: the registry cannot be reached, or returns another archive.
    """
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "megatron-dit"
    if (folder / ARCHIVE).is_file() and _is_complete(archive := read_bytes(folder / ARCHIVE, LARGEST)):
        return archive
    registries = (os.environ.get(name) for name in ("NPM_CONFIG_REGISTRY", "npm_config_registry"))
    registry = next(filter(None, registries), "https://registry.npmjs.org").rstrip("/")
    address = f"{registry}/{RELEASE.partition(' ')[0]}/-/{ARCHIVE}"
    try:
        with urlopen(address, timeout=30) as response:
            archive = response.read(LARGEST)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{address} cannot be downloaded ({error}); connect to the network, set NPM_CONFIG_REGISTRY to another "
            f"registry, or copy the file to {folder}"
        ) from error
    if not _is_complete(archive):
        raise ConfigError(
            f"{address} has {len(archive):,} bytes with another SHA-512 than {RELEASE}; set NPM_CONFIG_REGISTRY to a "
            "registry with the original, or unset it"
        )
    folder.mkdir(parents=True, exist_ok=True)
    write_atomic(folder / ARCHIVE, archive)
    return archive


def _is_complete(archive: bytes) -> bool:
    return base64.b64encode(hashlib.sha512(archive).digest()).decode() == SHA512
