"""Samples: their parts inside a shard, the checksums of the parts, and the decoded clip.

A sample named `KEY` consists of `KEY.json` (metadata) and of parts such as `KEY.latent.npy` and `KEY.text.npy`. The
metadata names the CRC32 of every part, its own included, so every flipped bit is detected.
"""

import json
import re
import reprlib
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Optional

from torch import Tensor

from dit.conditions import Condition, Value
from dit.errors import DataError, page_of
from dit.safe_files import parse_json

try:
    from isal.isal_zlib import crc32  # the same numbers, up to thirty times as fast; not on every machine
except ImportError:
    from zlib import crc32

META_PART = "json"
LATENT, PIXELS = "latent", "pixels"
CAPTIONS = "captions"
_SELF = re.compile(rb'"json": "([0-9a-f]{8})"')
_BLANK = b'"json": "00000000"'


@dataclass(slots=True, kw_only=True)
class Clip:
    """A decoded sample; an image has one frame.

    Attributes:
        latent: `[C, T, H, W]` float32, dimensionless after VAE scale and shift.
        pixel_shape: (T, H, W) of the picture or video as it is stored; None if a latent is.
        parts: decoded array parts besides the latent, by part name; empty once encoded.
        conditions: those of the model, by name, without missing optional ones.
        pixels: `[3, T, H, W]` uint8, if the training device is to encode them; `latent` is then zeros of its shape.
        wording: which of its captions, and of their embeddings, is used; 0 is the first.
        caption: if the training device is to embed it.
        corrupt: changes the small picture that is made for a super-resolution model; None once encoded, or for nothing.
        id: 63-bit id of the sample, see `dit.data_api.sample_id`.
        grid: (t, h, w) in patches; (0, 0, 0) before encoding.
    """

    __key__: str
    __restore_key__: tuple[str | int, ...]
    __sources__: Optional[tuple[object, ...]] = None
    latent: Tensor
    pixel_shape: Optional[tuple[int, int, int]] = None
    metadata: dict[str, Any]
    parts: dict[str, Any] = field(default_factory=dict)
    conditions: dict[str, Value] = field(default_factory=dict)
    pixels: Optional[Tensor] = None
    wording: int = 0
    caption: Optional[str] = None
    corrupt: Optional[Callable[[Tensor], Tensor]] = None
    shard: str = ""
    id: int = 0
    loss_weight: float = 1.0
    grid: tuple[int, int, int] = (0, 0, 0)

    @property
    def num_tokens(self) -> int:
        t, h, w = self.grid
        return t * h * w

    def value(self, condition: Condition) -> Value:
        """Return a condition of the model, its default if the sample has none."""
        value = self.conditions.get(condition.name, condition.default)
        assert value is not None  # `encode_sample` refuses samples without it
        return value


class SampleError(Exception):
    """A sample cannot be used.

    Args:
        reason: the word under which such samples are counted.
        detail: what is wrong, with the numbers.
    """

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(reason, detail)
        self.reason, self.detail = reason, detail


def _no_checksum(what: str) -> SampleError:
    return SampleError(
        "no_checksum",
        f"{what}; set data.require_checksums=False to read such samples as they are, or write them with "
        f"energon_data.prepare.shards.ShardWriter, which adds the checksums ({page_of('energon_data')})",
    )


def checksum(data: bytes) -> str:
    """Return the CRC32 of `data` as eight hexadecimal digits."""
    return f"{crc32(data):08x}"


def seal(metadata: dict[str, Any], parts: dict[str, bytes]) -> bytes:
    """Serialise the metadata of a sample together with the checksums of all its parts.

    The metadata's own checksum is that of the JSON text with eight zeros in its place.

    Raises:
        DataError: the metadata has the reserved key `crc32`.
    """
    if "crc32" in metadata:
        raise DataError("sample metadata must not hold the key 'crc32', the writer adds it; rename the key")
    sums = {META_PART: "00000000"} | {name: checksum(data) for name, data in parts.items()}
    blank = json.dumps({"crc32": sums} | metadata).encode()
    return blank.replace(_BLANK, f'"json": "{checksum(blank)}"'.encode(), 1)


def unseal(raw: bytes) -> dict[str, Any]:
    """Parse metadata with or without checksums, and verify its own checksum if it has one.

    Raises:
        SampleError: the text is no JSON object, or its checksum differs.
    """
    try:
        metadata = parse_json(raw)
    except ValueError as error:
        raise SampleError("bad_json", f"the metadata is no JSON: {error}") from error
    if not isinstance(metadata, dict):
        raise SampleError("bad_json", f"the metadata is a {type(metadata).__name__}, not an object")
    sums = metadata.get("crc32")
    if isinstance(sums, dict) and META_PART in sums:
        match = _SELF.search(raw)
        if match is None or checksum(raw[: match.start()] + _BLANK + raw[match.end() :]) != match[1].decode():
            raise SampleError("checksum", "the metadata differs from what was written (CRC32)")
    return metadata


def stem_of_wording(stem: str, wording: int) -> str:
    """Return the name of the part `stem` that belongs to a caption: `text` of the first, then `text-1`, `text-2`."""
    return f"{stem}-{wording}" if wording else stem


def finite_number(metadata: dict[str, Any], name: str) -> float:
    """Return a number of the metadata.

    Raises:
        SampleError: the entry is no number (true and false are none), NaN, infinite, or too large for a float.
    """
    value = metadata.get(name)
    # A NaN fails the comparison; an integer of any size is compared exactly.
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) <= sys.float_info.max:
        raise SampleError("metadata", f"{name} is {reprlib.repr(value)}, not a finite number")
    return float(value)


def verify_parts(metadata: dict[str, Any], parts: dict[str, bytes], *, required: bool) -> None:
    """Compare every part with the checksum that the metadata names.

    Args:
        parts: raw bytes by part name, the metadata itself excluded.
        required: a part (or metadata) without a checksum also counts as damaged.

    Raises:
        SampleError: a part is missing, differs, or has no checksum.
    """
    sums = metadata.get("crc32")
    if not isinstance(sums, dict):
        if required:
            raise _no_checksum("the metadata names no checksums")
        return
    if required and META_PART not in sums:
        raise _no_checksum("the metadata has no checksum of its own")
    for name, data in parts.items():
        if name not in sums:
            if required:
                raise _no_checksum(f"part {name!r} has no checksum")
        elif checksum(data) != sums[name]:
            raise SampleError("checksum", f"part {name!r} has CRC32 {checksum(data)}, written as {sums[name]}")
    for name in sums:
        if name not in parts and name != META_PART:
            raise SampleError("missing_part", f"part {name!r} is named by the metadata but not in the shard")
