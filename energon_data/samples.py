"""Samples: parts inside a shard, checksums of the parts, and the decoded clip.

A sample named `KEY` consists of `KEY.json` (metadata) and of parts such as `KEY.latent.npy` and `KEY.text.npy`. The
metadata lists the CRC32 of every part, including itself, so every flipped bit is detected.
"""

import json
import math
import re
import reprlib
import sys
from dataclasses import dataclass, field
from typing import Any, Optional

import torch
from torch import Tensor

from dit.conditions import Condition, Value
from dit.errors import DataError, page_of
from dit.safe_files import parse_json

try:
    from isal.isal_zlib import crc32  # same results, up to thirty times faster; not available on every machine
except ImportError:
    from zlib import crc32

META_PART = "json"
LATENT, PIXELS, REFERENCE = "latent", "pixels", "reference"
CAPTIONS = "captions"
_SELF = re.compile(rb'"json": "([0-9a-f]{8})"')
_BLANK = b'"json": "00000000"'


@dataclass(slots=True, kw_only=True)
class Clip:
    """A decoded sample; an image has one frame.

    Attributes:
        latent: `[C, T, H, W]` float32, dimensionless after VAE scale and shift.
        pixel_shape: (T, H, W) of the stored picture or video; None if a latent is stored.
        parts: decoded array parts except the latent, by part name; empty once encoded.
        conditions: conditions of the model, by name, without missing optional ones.
        pixels: `[3, T, H, W]` uint8 if the training device encodes them; `latent` is then zeros of the right shape.
        wording: index of the caption, and its embedding, in use.
        id: 63-bit id of the sample, see `dit.data_api.sample_id`.
        grid: (t, h, w) in patches; (0, 0, 0) before encoding.
        references: clean latents `[C, T, H, W]` that the sample is edited from.
        reference_grids: (t, h, w) of each in patches; empty before encoding.
    """

    __key__: str
    __restore_key__: tuple[str | int, ...]
    latent: Tensor
    pixel_shape: Optional[tuple[int, int, int]] = None
    metadata: dict[str, Any]
    parts: dict[str, Any] = field(default_factory=dict)
    conditions: dict[str, Value] = field(default_factory=dict)
    pixels: Optional[Tensor] = None
    wording: int = 0
    caption: Optional[str] = None
    id: int = 0
    loss_weight: float = 1.0
    grid: tuple[int, int, int] = (0, 0, 0)
    references: list[Tensor] = field(default_factory=list)
    reference_grids: tuple[tuple[int, int, int], ...] = ()

    @property
    def num_tokens(self) -> int:
        """Number of tokens, including those of the references."""
        return math.prod(self.grid) + sum(map(math.prod, self.reference_grids))

    def value(self, condition: Condition) -> Value:
        """Return a condition of the model, or its default if the sample has none."""
        if condition.name in self.conditions:
            return self.conditions[condition.name]
        assert condition.default is not None  # `encode_sample` refuses samples without it
        if condition.may_be_empty:
            return torch.zeros(0, *(condition.shape or ()))
        return condition.default if condition.is_number else torch.full(condition.shape or (), condition.default)


class DroppedError(Exception):
    """A sample is not used.

    Args:
        reason: category in which such samples are counted.
    """

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(reason, detail)
        self.reason, self.detail = reason, detail


class SampleError(DroppedError):
    """A sample cannot be used."""


class FilteredOutError(DroppedError):
    """A valid sample that the settings exclude."""


def _no_checksum(problem: str) -> SampleError:
    return SampleError(
        "no_checksum",
        f"{problem}; set data.require_checksums=False to read such samples anyway, or write them with "
        f"energon_data.prepare.shards.ShardWriter, which adds the checksums ({page_of('energon_data')})",
    )


def checksum(data: bytes) -> str:
    """Return the CRC32 of `data` as eight hexadecimal digits."""
    return f"{crc32(data):08x}"


def seal(metadata: dict[str, Any], parts: dict[str, bytes]) -> bytes:
    """Serialise the metadata of a sample together with the checksums of all its parts.

    The metadata's checksum is computed with eight zeros in its place.
    """
    if "crc32" in metadata:
        raise DataError("sample metadata must not have the key 'crc32', which the writer adds; rename the key")
    sums = {META_PART: "00000000"} | {name: checksum(data) for name, data in parts.items()}
    blank = json.dumps({"crc32": sums} | metadata).encode()
    return blank.replace(_BLANK, f'"json": "{checksum(blank)}"'.encode(), 1)


def read_object(data: bytes, name: str) -> dict[str, Any]:
    """Parse a JSON object; an error begins with `name`."""
    try:
        value = parse_json(data)
    except ValueError as error:
        raise SampleError("bad_json", f"{name} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise SampleError("bad_json", f"{name} is a {type(value).__name__}, not an object")
    return value


def unseal(raw: bytes) -> dict[str, Any]:
    """Parse metadata with or without checksums, and verify the metadata's checksum if it has one.

    Raises:
        SampleError: the text is not a JSON object, or its checksum differs.
    """
    metadata = read_object(raw, "the metadata")
    sums = metadata.get("crc32")
    if isinstance(sums, dict) and META_PART in sums:
        match = _SELF.search(raw)
        if match is None or checksum(raw[: match.start()] + _BLANK + raw[match.end() :]) != match[1].decode():
            raise SampleError("checksum", "the metadata differs from what was written (CRC32)")
    return metadata


def numbered_stem(stem: str, number: int) -> str:
    """Return the name of the part for a caption or of a reference: `text` for number 0, then `text-1`, `text-2`."""
    return f"{stem}-{number}" if number else stem


def finite_number(metadata: dict[str, Any], name: str) -> float:
    """Return a number of the metadata.

    Raises:
        SampleError: the entry is not a number (or is a boolean), is NaN, infinite, or too large for a float.
    """
    value = metadata.get(name)
    # A NaN fails the comparison; an integer of any size is compared exactly.
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) <= sys.float_info.max:
        raise SampleError("metadata", f"{name} is {reprlib.repr(value)}, not a finite number")
    return float(value)


def verify_parts(metadata: dict[str, Any], parts: dict[str, bytes], *, required: bool) -> None:
    """Compare every part with its checksum in the metadata.

    Args:
        parts: raw bytes by part name, without the metadata.
        required: parts (and metadata) without a checksum also count as damaged.

    Raises:
        SampleError: a part is missing, differs, or has no checksum.
    """
    sums = metadata.get("crc32")
    if not isinstance(sums, dict):
        if required:
            raise _no_checksum("the metadata has no checksums")
        return
    if required and META_PART not in sums:
        raise _no_checksum("the metadata has no checksum for itself")
    for name, data in parts.items():
        if name not in sums:
            if required:
                raise _no_checksum(f"part {name!r} has no checksum")
        elif (actual := checksum(data)) != sums[name]:
            raise SampleError("checksum", f"part {name!r} has CRC32 {actual}, written as {sums[name]}")
    if missing := [name for name in sums if name not in parts and name != META_PART]:
        raise SampleError("missing_part", f"part {missing[0]!r} is listed in the metadata but not in the shard")
