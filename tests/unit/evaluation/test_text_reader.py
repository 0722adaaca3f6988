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
from dit.evaluation.text_reader import TextReader, edit_distance, quoted_texts, words_of

FONTS = Path(matplotlib.get_data_path()) / "fonts/ttf"
FONT = FONTS / "DejaVuSans.ttf"


def picture_of(lines: Sequence[str], font_size: int = 20, font_file: Path = FONT) -> Tensor:
    """Return lines of blue text on yellow paper, `[3, H, W]` in [-1, 1]."""
    paper = Image.new("RGB", (10 * font_size, 2 * font_size * len(lines)), (250, 240, 120))
    draw, font = ImageDraw.Draw(paper), ImageFont.truetype(font_file, font_size)
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


def test_words_and_misspelt_words_of_64_pixels_are_read_in_several_fonts(reader: TextReader):
    """RapidOCR neither needs larger letters nor corrects what a model misspelt."""
    fonts = ("DejaVuSerif-Italic", "cmss10", "DejaVuSansMono-Bold", "STIXGeneral")
    words = ("Bakery", "bakary", "LIBRARY", "Libraly")
    pictures = [
        picture_of(["", word, ""], 12, FONTS / f"{font}.ttf")[:, 4:-4, 28:-28]
        for font, word in zip(fonts, words, strict=True)
    ]
    assert pictures[0].shape == (3, 64, 64)
    assert reader.texts(torch.stack(pictures)) == [[word] for word in words]


def test_texts_in_double_quotes_are_requested():
    assert quoted_texts('a sign that says "Open daily", and a cat, "Fish & chips!"') == ["opendaily", "fishchips"]
    assert quoted_texts("„Guten Tag“ and “Bon-jour”") == ["gutentag", "bonjour"]
    assert quoted_texts("it's a cat's sign, \"...\"") == []
    assert quoted_texts('"Open" and "open" and "OPEN."') == ["open"], "a text that a prompt repeats is one text"


@pytest.mark.parametrize(
    ("text", "lines", "distance"),
    [
        ("open", ["Open"], 0),
        ("opendaily", ["We", "OPEN", "dai ly.", "9-5"], 0),
        ("open", ["0pen"], 1),
        ("open", ["oppen"], 1),
        ("open", ["opn"], 1),
        ("open", ["reopened"], 4),
        ("opendaily", ["daily", "open"], 4),
        ("open", ["Bakery"], 4),
        ("open", [], 4),
    ],
)
def test_edits_are_counted_to_the_nearest_run_of_words(text: str, lines: list[str], distance: int):
    assert edit_distance(text, words_of(lines)) == distance


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "rapidocr", None)
    with pytest.raises(ConfigError, match="rapidocr is missing: pip install 'megatron-dit\\[judge\\]'"):
        TextReader("--metric ocr")
