"""Text embeddings of captions as parts of samples, and their record in a data set."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Optional

from torch import Tensor

from dit.encoders.text_config import check_text_encoder
from energon_data.prepare.shards import npy_bytes
from energon_data.samples import numbered_stem

if TYPE_CHECKING:
    from PIL.Image import Image

    from dit.encoders.text import TextEncoders


def text_parts(encoded: Mapping[str, Sequence[Tensor]]) -> list[dict[str, bytes]]:
    """Return the parts of each text: `text.npy`, `pooled.npy`, ..., float16, or float32 if a value is too large for it.

    Middle layers of language models have such values.
    """
    entries = [[(f"{entry}.npy", row) for row in rows] for entry, rows in encoded.items()]
    return [{name: _array(row) for name, row in parts} for parts in zip(*entries, strict=True)]


def _array(row: Tensor) -> bytes:
    half = row.half()
    return npy_bytes((half if half.isfinite().all() else row).cpu().numpy())


def caption_parts(
    encoders: "TextEncoders", captions: Sequence[Sequence[str]], pictures: Optional[Sequence[Sequence["Image"]]] = None
) -> list[dict[str, bytes]]:
    """Return the parts of samples with one or more captions each: `text.npy` of the first, then `text-1.npy`, ...

    Args:
        pictures: the pictures to edit of each sample, for encoders that read them.
    """
    texts = [caption for several in captions for caption in several]
    if pictures is not None:
        pictures = [references for several, references in zip(captions, pictures, strict=True) for _ in several]
    rows = iter(text_parts(encoders.encode(texts, pictures)))
    return [
        {
            f"{numbered_stem(name.removesuffix('.npy'), i)}.npy": data
            for i in range(len(several))
            for name, data in next(rows).items()
        }
        for several in captions
    ]


def text_record(line: Optional[str]) -> dict[str, Any]:
    """Return the entries of `dataset.json` about texts: their encoders, and the width of `text.npy`."""
    encoders = None if line is None else check_text_encoder(line)
    return {
        "text_encoder": None if encoders is None else encoders.recorded,
        "context_size": None if encoders is None else encoders.widths.get("text"),
    }
