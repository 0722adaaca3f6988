"""A reader of texts in pictures whose weights come with a package: PP-OCRv6 by RapidOCR (Apache-2.0)."""

import re
from collections.abc import Iterable, Iterator
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from dit.batch import pixel_bytes
from dit.errors import ConfigError

LINE_HEIGHT = 48
"""Height in pixels of the lines that the recogniser was trained on; smaller pictures are enlarged to it."""

SHORTEST_SIDE = 320
"""Smaller pictures are enlarged to this side in pixels to find lines: a quarter of the time of the default of 736."""


class TextReader:
    """Reads texts; `option` is the option that asks for it, for error messages."""

    def __init__(self, option: str) -> None:
        try:
            package = import_module("rapidocr")
            import_module("onnxruntime")
        except ImportError as error:
            raise ConfigError(
                f"{option} needs RapidOCR, and {error.name} is missing: pip install 'megatron-dit[judge]'"
            ) from error
        options = {
            "Global.log_level": "error",
            "Det.limit_side_len": SHORTEST_SIDE,
            "EngineConfig.onnxruntime.intra_op_num_threads": torch.get_num_threads(),
        }
        self._read: Any = package.RapidOCR(params=options)

    def lines(self, images: Tensor) -> list[str]:
        """Read each picture as one line of text; images `[N, 3, H, W]` in [-1, 1]."""
        results = (self._read(image, use_det=False, use_cls=False) for image in _pixels(images))
        return [(result.txts or ("",))[0] for result in results]

    def texts(self, images: Tensor) -> list[list[str]]:
        """Find the lines of text in each picture, and read them; arguments as of `lines`."""
        results = (self._read(image, use_det=True, use_cls=False) for image in _pixels(images))
        return [list(result.txts or ()) for result in results]


def quoted_texts(prompt: str) -> list[str]:
    """Return the different texts in double quotes of a prompt: letters and digits in lower case, without spaces."""
    texts = ("".join(words_of([text])) for text in re.findall(r'["“„]([^"“”„]+)["”“]', prompt))
    return list(dict.fromkeys(text for text in texts if text))


def words_of(texts: Iterable[str]) -> list[str]:
    """Return the words of texts: runs of letters and digits, in lower case."""
    return [word for text in texts for word in re.findall(r"[^\W_]+", text.casefold())]


def edit_distance(text: str, words: Iterable[str]) -> int:
    """Return the lowest edit distance between a text and any run of consecutive words, joined without spaces.

    It is at most the length of the text, which is also the distance from no words.

    Source: Sellers 1980, doi:10.1016/0196-6774(80)90016-4; here, the similar part starts and ends with whole words.
    """
    lowest = len(text)
    edits = list(range(len(text) + 1))  # edits[i]: fewest between text[:i] and words that end with the last one read
    for word in words:
        edits = [min(pair) for pair in enumerate(edits)]  # the similar part may start with this word
        for character in word:
            before, edits = edits, [edits[0] + 1]
            for i, expected in enumerate(text):
                edits.append(min(before[i] + (character != expected), before[i + 1] + 1, edits[i] + 1))
        lowest = min(lowest, edits[-1])
    return lowest


def _pixels(images: Tensor) -> Iterator[Any]:
    """Yield pictures as arrays `[H, W, 3]`, uint8, in the order blue, green, red."""
    if images.shape[2] < LINE_HEIGHT:
        images = nn.functional.interpolate(images, scale_factor=LINE_HEIGHT / images.shape[2], mode="bicubic")
    yield from pixel_bytes(images).flip(1).permute(0, 2, 3, 1).contiguous().cpu().numpy()
