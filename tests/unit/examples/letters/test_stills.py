"""Pictures of letters: labels are correct, families are held out, and no folder remains half-written."""

import io
import json
import os
import socket
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from dit.encoders.teacher import Teacher
from dit.errors import ConfigError, DataError
from dit.models.dit.config import DiTConfig
from energon_data.dataset import EnergonData
from energon_data.prepare.__main__ import main
from examples.letters.fonts import LETTERS, Face, find_faces, held_out_families
from examples.letters.loading import load_letters
from examples.letters.stills import LettersReport, features_of, prepare_letters, vary

HALF = {"rtol": 2e-3, "atol": 2e-3}  # stored as float16
SPEC = DiTConfig(in_channels=1, patch_spatial=4, num_classes=26).batch_spec(micro_batch_size=26)


def test_labels_letters_and_captions_agree(letters: LettersReport) -> None:
    for split in ("train", "val"):
        images, labels, metadata = load_letters(letters.folder, split)
        assert images.shape == (letters.images[split], 1, 16, 16)
        assert images.min() >= -1
        assert images.max() <= 1
        assert sorted(set(labels.tolist())) == list(range(26))
        for label, meta in zip(labels.tolist(), metadata):
            assert meta["letter"] == LETTERS[label] == meta["key"].split("_")[1]
            assert meta["letter"] in meta["caption"]


def test_pictures_of_a_letter_are_similar(letters: LettersReport) -> None:
    """A nearest-mean classifier of the training families reads held-out families far above chance (1 in 26)."""
    images, labels, _ = load_letters(letters.folder, "train")
    held_out, truth, _ = load_letters(letters.folder, "val")
    means = torch.stack([images[labels == c].mean(0).flatten() for c in range(26)])
    means = torch.nn.functional.normalize(means - means.mean(0), dim=1)
    scores = (held_out.flatten(1) - images.flatten(1).mean(0)) @ means.T
    assert (scores.argmax(1) == truth).float().mean() > 0.6


def test_families_are_disjoint_and_each_split_has_several_styles(letters: LettersReport) -> None:
    assert letters.split_by == "family"
    _, _, train = load_letters(letters.folder, "train")
    _, _, val = load_letters(letters.folder, "val")
    assert not {m["family"] for m in train} & {m["family"] for m in val}
    for part in (train, val):
        assert len({tuple(m["styles"]) for m in part}) >= 3
    recorded = json.loads((letters.folder / "dataset.json").read_text())["splits"]
    assert set(recorded["train"]["families"]) == {m["family"] for m in train}
    assert set(recorded["val"]["families"]) == {m["family"] for m in val}


def test_symbol_fonts_and_duplicates_are_dropped(bundled_fonts: Path, tmp_path: Path) -> None:
    (tmp_path / "Again.ttf").write_bytes((bundled_fonts / "DejaVuSans.ttf").read_bytes())
    (tmp_path / "Garbage.ttf").write_bytes(b"no font")
    report = find_faces([bundled_fonts, tmp_path])
    used = {face.path.name for face in report.faces}
    dropped = {Path(path).name: why for path, why in report.dropped.items()}
    for name in ("cmsy10.ttf", "cmex10.ttf", "cmmi10.ttf", "LastResortHE-Regular.ttf", "STIXSizOneSymReg.ttf"):
        assert name in dropped
    assert {"DejaVuSerif.ttf", "STIXGeneralItalic.ttf", "cmr10.ttf", "cmtt10.ttf"} <= used
    assert dropped["DejaVuSans.ttf"] == "same capitals as Again.ttf"
    assert dropped["Garbage.ttf"].startswith("unreadable")
    styles = {face.path.name: face.description for face in report.faces}
    assert styles["DejaVuSerif-BoldItalic.ttf"] == "bold italic serif"
    assert styles["DejaVuSansMono.ttf"] == "mono"
    assert styles["cmb10.ttf"] == "bold serif"


def test_a_style_class_never_loses_its_only_family() -> None:
    def face(family: str, style_class: str) -> Face:
        return Face(Path(family), family, style_class, (), np.zeros(0))

    families = [("A", "serif"), ("B", "serif"), ("C", "sans"), ("D", "mono")]
    held_out = held_out_families([face(*f) for f in families])
    assert len(held_out) == 1
    assert held_out < {"A", "B"}
    assert held_out_families([face("A", "serif")] * 3) == set()
    assert len(held_out_families([face("A", "serif"), face("B", "sans")])) == 1


def test_the_first_variation_is_the_unchanged_glyph(bundled_fonts: Path) -> None:
    glyphs = torch.from_numpy(find_faces([bundled_fonts]).faces[0].glyphs)
    drawn = vary(glyphs, 3, 16, torch.Generator().manual_seed(0))
    plain = torch.nn.functional.avg_pool2d(glyphs[:, None], 4)[:, 0] * 2 - 1
    torch.testing.assert_close(drawn[:, 0], plain, atol=1e-4, rtol=0)
    assert (drawn[:, 1] - drawn[:, 0]).abs().mean() > 0.02


def test_equal_seeds_write_equal_bytes(letters: LettersReport, bundled_fonts: Path, tmp_path: Path) -> None:
    again = prepare_letters(tmp_path / "again", fonts=[bundled_fonts], variations=2, samples_per_shard=200)
    for shard in sorted(letters.folder.glob("*.tar")):
        assert shard.read_bytes() == (again.folder / shard.name).read_bytes()


def test_letters_have_the_tokens_of_a_teacher() -> None:
    """The teacher gets a grey picture; a token of the model has one feature vector."""
    latents = [np.full((1, 1, 8, 12), value, np.float16) for value in (-1, 0.5)]
    parts = features_of(latents, "efficientnet_lite0", 4)
    for latent, part in zip(latents, parts, strict=True):
        pixels = torch.from_numpy(latent).float().expand(1, 3, 1, 8, 12)
        exact = Teacher("efficientnet_lite0", 4).encode(pixels)[0].half().numpy()
        stored = {name: np.load(io.BytesIO(data)) for name, data in part.items()}
        assert stored.keys() == {"teacher.npy", "teacher_token.npy"}
        np.testing.assert_allclose(stored["teacher.npy"], exact[:, :, 1:].reshape(1280, 1, 2, 3), **HALF)
        np.testing.assert_allclose(stored["teacher_token.npy"], exact[:, 0, 0], **HALF)
    assert features_of(latents, None, 4) == [{}, {}]


def test_the_command_has_its_exit_codes(
    bundled_fonts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one_font = tmp_path / "fonts"
    one_font.mkdir()
    (one_font / "f.ttf").write_bytes((bundled_fonts / "cmr10.ttf").read_bytes())
    out = tmp_path / "out"
    args = ["letters", "--out", str(out), "--fonts", str(one_font), "--variations", "2"]
    assert main(args) == 0
    assert "only one font family" in capsys.readouterr().out
    assert main(args) == 2
    assert "--force" in capsys.readouterr().err
    start = f".out.tmp-{socket.gethostname()}-"
    for process in (999999999, 10**20, os.getppid(), "backup"):  # the first two processes do not exist
        (tmp_path / f"{start}{process}").mkdir()
    assert main([*args, "--force", "--size", "8"]) == 0
    images, _, _ = load_letters(out, "val")
    assert images.shape[-2:] == (8, 8)
    empty = tmp_path / "empty"
    empty.mkdir()
    assert main(["letters", "--out", str(tmp_path / "o2"), "--fonts", str(empty)]) == 3
    assert "no TrueType font" in capsys.readouterr().err
    assert main(["letters", "--out", str(tmp_path / "o2"), "--size", "2"]) == 2
    # --force deletes only an older data set.
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "thesis.txt").write_text("years of work")
    assert main(["letters", "--out", str(precious), "--fonts", str(one_font), "--force"]) == 2
    assert (precious / "thesis.txt").exists()
    kept = [f"{start}{process}" for process in (os.getppid(), "backup")]
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted([*kept, "empty", "fonts", "out", "precious"])


def test_a_failed_run_leaves_no_file(bundled_fonts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("examples.letters.stills.write_energon_metadata", fail)
    with pytest.raises(OSError, match="disk full"):
        prepare_letters(tmp_path / "out", fonts=[bundled_fonts], variations=1)
    assert list(tmp_path.iterdir()) == []


def test_missing_folder_and_wrong_settings_are_named(tmp_path: Path, letters: LettersReport) -> None:
    with pytest.raises(DataError, match="does not exist"):
        load_letters(tmp_path / "nowhere", "train")
    with pytest.raises(DataError, match="no split 'test'"):
        load_letters(letters.folder, "test")
    with pytest.raises(ConfigError, match=r"model\.in_channels is 4; set model\.in_channels=1"):
        EnergonData(path=str(letters.folder)).validate(replace(SPEC, latent_channels=4), 1, 1)
