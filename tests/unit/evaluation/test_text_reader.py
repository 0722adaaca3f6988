"""The reader of texts, on rendered words."""

import sys
from collections.abc import Sequence
from pathlib import Path

import matplotlib
import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from dit.errors import ConfigError
from dit.evaluation.text_reader import TextReader, count_read, quoted_words, words_of

FONT = Path(matplotlib.get_data_path()) / "fonts/ttf/DejaVuSans.ttf"


def picture_of(lines: Sequence[str], font_size: int = 20) -> Tensor:
    """Return lines of blue text on yellow paper, `[3, H, W]` in [-1, 1]."""
    paper = Image.new("RGB", (10 * font_size, 2 * font_size * len(lines)), (250, 240, 120))
    draw, font = ImageDraw.Draw(paper), ImageFont.truetype(FONT, font_size)
    for row, text in enumerate(lines):
        draw.text((5 * font_size, (2 * row + 1) * font_size), text, font=font, fill=(20, 20, 120), anchor="mm")
    return torch.from_numpy(np.array(paper)).permute(2, 0, 1) / 127.5 - 1


@pytest.fixture(scope="module")
def reader() -> TextReader:
    return TextReader("--metric ocr")


def test_lines_of_any_height_are_read(reader: TextReader):
    assert reader.lines(torch.stack([picture_of(["Bakery"]), picture_of(["2026"])])) == ["Bakery", "2026"]
    assert reader.lines(picture_of(["Coffee"], font_size=11)[None]) == ["Coffee"]


def test_a_picture_without_text_has_no_words(reader: TextReader):
    assert reader.texts(torch.zeros(1, 3, 64, 64)) == [[]]


def test_every_line_of_a_picture_is_read(reader: TextReader):
    (texts,) = reader.texts(picture_of(["Open daily", "closed Monday"], font_size=24)[None])
    assert words_of(texts) == ["open", "daily", "closed", "monday"]


def test_words_in_double_quotes_are_requested():
    assert quoted_words('a sign that says "Open daily", and a cat') == ["open", "daily"]
    assert quoted_words("„Guten Tag“ and “Bon-jour”") == ["guten", "tag", "bon", "jour"]
    assert quoted_words("it's a cat's sign") == []


def test_a_word_counts_as_often_as_it_is_requested():
    assert count_read(["open", "open", "daily"], ["open", "daily", "daily"]) == 2


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "rapidocr", None)
    with pytest.raises(ConfigError, match="rapidocr is missing: pip install 'megatron-dit\\[judge\\]'"):
        TextReader("--metric ocr")
