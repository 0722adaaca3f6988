"""Pictograms: one sample for each drawing and wording, with a Unicode name as caption and the font's pixels."""

import re
import unicodedata

import numpy as np
import pytest
import torch

from dit.batch import pixel_values
from dit.encoders.text import load_text_encoders
from dit.errors import EXIT_CONFIG
from energon_data.folder import check_folder
from energon_data.media_files import pixels_of
from energon_data.prepare.__main__ import main
from examples.pictograms.drawings import (
    ATTRIBUTION,
    BLOCKS,
    all_pictograms,
    choose_pictograms,
    draw,
    prepare_pictograms,
)
from tests.unit.energon_data.preparations import samples

SIZE = 32
HALF = 1e-3  # two ulps of float16
EDGES = 8.0  # of 255, mean: baselines are rounded to an eighth of a pixel, which edges show


def make(out, **changes):
    options = {"size": SIZE, "blocks": ["emoticons"], "count": 6, "text_encoder": "all-minilm-l6-v2", "wordings": 2}
    return prepare_pictograms(out, **{**options, **changes}).run(processes=1, force=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    out = tmp_path_factory.mktemp("pictograms") / "data"
    make(out)
    return out


def test_every_drawing_occurs_once_and_none_is_empty():
    """The font draws all 80 emoticons; code points without a drawing, or with the same one as another, are left out."""
    found, emoticons = all_pictograms(), choose_pictograms(["emoticons"])
    assert len({p.code_point for p in found}) == len({p.name for p in found}) == len(found)
    assert len({draw(p.code_point, SIZE).tobytes() for p in emoticons}) == len(BLOCKS["emoticons"]) == 80
    known = {p.code_point for p in found}
    assert not known & {ord(" "), ord("7"), 0x200D, 0xFE0F}  # parts of sequences
    assert {0x1F600, 0x2764} <= known
    assert known & {0x20E3, 0x1F7E6} == {0x20E3}  # one blue square
    assert all(p.name == unicodedata.name(chr(p.code_point)).lower() for p in found)


def test_a_subset_is_evenly_spaced():
    some = choose_pictograms(["emoticons", "transport"], 16)
    both = choose_pictograms(["emoticons", "transport"])
    assert [p.code_point for p in some] == [both[i * len(both) // 16].code_point for i in range(16)]
    assert choose_pictograms(["emoticons"], 80) == choose_pictograms(["emoticons"])


@pytest.mark.parametrize("code_point", [0x1F600, 0x1F697, 0x1F98B])
def test_a_drawing_is_the_same_picture_at_any_size(code_point):
    """Each pixel is the mean of the same area in a larger drawing; the paper is white."""
    for size in (32, 64):
        small, large = draw(code_point, size), draw(code_point, 4 * size)
        assert small.size == (size, size)
        difference = np.abs(np.asarray(large.reduce(4), int) - np.asarray(small, int))
        assert difference.mean() < EDGES
        assert (np.asarray(small)[:, 0] == 255).all()
        assert np.asarray(small).std((0, 1)).max() > 20


def test_samples_are_the_drawings_with_their_captions_and_embeddings(folder):
    chosen, encoder = choose_pictograms(["emoticons"], 6), load_text_encoders("all-minilm-l6-v2")
    assert [chosen[0].caption(wording) for wording in range(2)] == ["grinning face", "a pictogram: grinning face"]
    wanted = [(pictogram, wording) for pictogram in chosen for wording in range(2)]
    for (pictogram, wording), (split, metadata, clip, _) in zip(wanted, samples(folder), strict=True):
        assert split == "train"
        assert metadata["code_point"] == pictogram.code_point
        assert metadata["caption"] == pictogram.caption(wording)
        assert torch.equal(clip.latent, pixel_values(pixels_of([draw(pictogram.code_point, SIZE)])))
        (embedded,) = encoder.encode([metadata["caption"]])["text"]
        assert np.allclose(clip.parts["text.npy"], embedded.numpy(), rtol=HALF, atol=HALF)


def test_the_description_names_the_authors_and_every_pictogram(folder):
    description = check_folder(folder, "train").description
    assert description["name"] == "pictograms"
    assert description["attribution"] == ATTRIBUTION
    assert "CC BY-SA 4.0" in ATTRIBUTION
    assert description["pictograms"][0] == {"code_point": 0x1F600, "name": "grinning face"}
    assert len(description["pictograms"]) == 6
    assert description["samples"] == {"train": 12}
    assert description["shapes"] == {f"3x1x{SIZE}x{SIZE}": 12}
    assert description["prepared"]["size"] == SIZE


def test_the_same_command_writes_the_same_bytes(folder, tmp_path):
    make(tmp_path / "again")
    for shard in folder.glob("*.tar"):
        assert shard.read_bytes() == (tmp_path / "again" / shard.name).read_bytes()


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--size", "4"], "--size 4 must be 8 to 2048"),
        (["--size", "32", "--count", "0"], r"--count 0: there are 1\d\d\d pictograms"),
        (["--size", "32", "--blocks", "emoticon"], "--blocks emoticon: unknown; use some of symbols, dingbats"),
        (["--size", "32", "--wordings", "4"], "--wordings 4: there are 3"),
        (["--size", "32", "--validation", "1"], "--validation 1 must be a share"),
    ],
)
def test_impossible_settings_are_refused_in_one_line(tmp_path, capsys, flags, says):
    assert main(["pictograms", *flags, "--out", str(tmp_path / "out")]) == EXIT_CONFIG
    assert re.search(rf"^error: {says}", capsys.readouterr().err, re.MULTILINE)
    assert not any(tmp_path.iterdir())
