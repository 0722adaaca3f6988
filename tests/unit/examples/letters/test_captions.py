"""Captions: every word agrees with the font file, which this test reads with another library."""

import json
import re
from functools import cache
from pathlib import Path

import pytest

from dit.errors import ConfigError
from examples.letters.captions import Style, choose_caption, wordings
from examples.letters.fonts import find_faces
from examples.letters.loading import load_clips
from examples.letters.stills import LettersReport, prepare_letters


@cache
def stated(path: Path) -> dict[str, bool]:
    """Return which words of captions apply to a font, according to its tables."""
    ttlib = pytest.importorskip("fontTools.ttLib")
    font = ttlib.TTFont(path)
    os2, panose = font["OS/2"], font["OS/2"].panose
    return {
        "bold": os2.usWeightClass >= 600,
        "light": os2.usWeightClass <= 300,
        "italic": font["post"].italicAngle != 0,
        "monospace": bool(font["post"].isFixedPitch),
        "sans": panose.bFamilyType == 2 and panose.bSerifStyle >= 11 and not font["post"].isFixedPitch,
        "serif": panose.bFamilyType == 2 and 2 <= panose.bSerifStyle < 11 and not font["post"].isFixedPitch,
    }


def test_captions_state_the_properties_in_the_font_file(letters: LettersReport, bundled_fonts: Path) -> None:
    """The plain wording has exactly the words of the tables; every word of other wordings is correct."""
    seen = set()
    for split in ("train", "val"):
        for _, meta in load_clips(letters.folder, split):
            # Computer Modern's tables are wrong; its styles are set by hand.
            if meta["font"].startswith("cm"):
                continue
            stated_words = stated(bundled_fonts / meta["font"])
            said = set(re.findall(r"[a-z]+", meta["caption"].replace(meta["family"], "")))
            true_words = {word for word, true in stated_words.items() if true}
            assert {word for word in stated_words if word in said} <= true_words, meta
            assert not {"upright"} & said or not stated_words["italic"]
            assert not {"regular"} & said or not (stated_words["bold"] or stated_words["light"])
            if meta["caption"].endswith("font"):
                assert true_words <= said
            assert re.search(rf"\b{meta['letter']}\b", meta["caption"])
            seen |= said & set(stated_words)
    assert seen >= {"bold", "italic", "monospace", "sans", "serif"}


def test_captions_omit_properties_that_the_tables_lack(bundled_fonts: Path) -> None:
    """STIX has an empty panose and no kind in its name, so its captions omit the serifs of its letters."""
    faces = {face.path.name: face for face in find_faces([bundled_fonts]).faces}
    stix = faces["STIXGeneralBol.ttf"]
    assert (stix.style_class, stix.kind) == ("serif", None)
    assert Style.of(stix).caption("Q") == "the letter Q in a bold font"
    assert Style.of(faces["DejaVuSansMono-Oblique.ttf"]).caption("A") == "the letter A in an italic monospace font"
    assert Style.of(faces["DejaVuSans.ttf"]).caption("A") == "the letter A in a sans font"


def test_wordings_differ_and_the_name_of_a_sample_addresses_one() -> None:
    style = Style(weight="light", condensed=True, kind="script")
    choices = wordings("Q", style, "Some Hand")
    assert len(set(choices)) == len(choices) == 6
    assert choices[0] == "the letter Q in a light condensed script font"
    assert choices[2] == "capital Q, light, condensed, upright, script"
    drawn = [choose_caption(f"key {i}", "Q", style, "Some Hand") for i in range(600)]
    assert drawn == [choose_caption(f"key {i}", "Q", style, "Some Hand") for i in range(600)]
    counts = [drawn.count(choice) for choice in choices]
    assert min(counts) > 60
    assert sum(counts) == 600


def test_a_missing_encoder_leaves_no_file(bundled_fonts: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="unknown"):
        prepare_letters(tmp_path / "out", fonts=[bundled_fonts], text_encoder="t5")
    assert list(tmp_path.iterdir()) == []


def test_faces_are_recorded_with_their_styles(letters: LettersReport) -> None:
    content = json.loads((letters.folder / "dataset.json").read_text())
    faces = {f["file"]: f for split in content["splits"].values() for f in split["faces"]}
    assert Style.from_record(faces["DejaVuSerif-BoldItalic.ttf"]) == Style(weight="bold", slant="italic", kind="serif")
    assert content["text_encoder"] is None
