"""Pairs of letters before and after an edit, and the scores of edited letters."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor

from dit.errors import EXIT_DATA, DataError
from dit.models.dit.config import DiTConfig
from dit.objectives.flow_matching import FlowMatching
from dit.run_config import RunConfig
from energon_data.mock import MockData
from examples.letters import edit_score, edits
from examples.letters.edits import INSTRUCTIONS, Drawing, edited, ink_of, read_drawings
from launch import evaluate

TRAINED = ("DejaVuSans", "DejaVuSans-Bold", "DejaVuSans-Oblique", "STIXGeneral", "STIXGeneralBol", "STIXGeneralItalic")
HELD_OUT = ("DejaVuSerif", "DejaVuSerif-Bold")
"""The held-out family has no italics."""


@pytest.fixture(scope="module")
def fonts(tmp_path_factory: pytest.TempPathFactory, bundled_fonts: Path) -> Path:
    folder = tmp_path_factory.mktemp("fonts")
    for name in (*TRAINED, *HELD_OUT):
        (folder / f"{name}.ttf").symlink_to(bundled_fonts / f"{name}.ttf")
    return folder


@pytest.fixture(scope="module")
def folder(fonts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("edits") / "pairs"
    assert edits.main(["--out", str(out), "--fonts", str(fonts), "--variations", "2"]) == 0
    return out


def rows_of(folder: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in (folder / "train/edited/metadata.jsonl").read_text().splitlines()]


def ink(path: Path) -> Tensor:
    return ink_of(Image.open(path))


def test_a_pair_is_one_letter_in_two_styles_of_a_family(folder: Path) -> None:
    """The first variation of a letter is that of the font; the instruction names the change of style."""
    drawings = read_drawings(folder)
    of = {(Path(d.file).parent.name, d.letter): d for d in drawings}
    rows = rows_of(folder)
    assert len(rows) == 2 * 26 * 2 * 4  # variations, letters, families, changes
    for row in rows:
        *_, letter, variation = row["file_name"].removesuffix(".png").split("-")
        word = next(word for word, texts in INSTRUCTIONS.items() if row["text"] in texts)
        if variation != "0":
            continue
        before, after = (ink(folder / "train" / place / row["file_name"]) for place in ("originals", "edited"))
        [original] = [d for d in drawings if d.letter == letter and torch.equal(ink(folder / d.file), before)]
        truth = [d for d in drawings if d.letter == letter and d.family == original.family]
        truth = [d for d in truth if d.style == edited(original.style, word)]
        assert torch.equal(ink(folder / truth[0].file), after)
        assert not original.held_out
    assert {name for (name, _), drawing in of.items() if drawing.held_out} == set(HELD_OUT)


def test_both_pictures_of_a_pair_have_the_same_variation(folder: Path) -> None:
    """Shifts and rotations move the ink of both by the same amount; a change of style moves it less."""

    def centre(picture: Tensor) -> Tensor:
        dark = (picture[0] + 1) / 2
        side = torch.arange(len(dark)).float()
        return torch.stack([(dark.sum(1) * side).sum(), (dark.sum(0) * side).sum()]) / dark.sum()

    moved = [
        torch.stack([centre(ink(folder / "train" / place / row["file_name"])) for place in ("originals", "edited")])
        for row in rows_of(folder)
        if row["file_name"].endswith("-1.png")
    ]
    apart = torch.stack([a - b for a, b in moved]).square().mean().sqrt()
    spread = torch.stack([a for a, _ in moved]).std(0).mean()
    assert apart < 0.6 * spread


def test_the_ink_of_a_picture_is_black(tmp_path: Path) -> None:
    values = torch.linspace(-1, 1, 16).view(4, 4)
    edits.save(values, tmp_path / "x.png")
    torch.testing.assert_close(ink(tmp_path / "x.png")[0], values, rtol=0, atol=1 / 255)


def test_one_family_is_not_enough(tmp_path: Path, bundled_fonts: Path, capsys: pytest.CaptureFixture) -> None:
    (tmp_path / "fonts").mkdir()
    (tmp_path / "fonts" / "a.ttf").symlink_to(bundled_fonts / "DejaVuSans.ttf")
    assert edits.main(["--out", str(tmp_path / "out"), "--fonts", str(tmp_path / "fonts")]) == EXIT_DATA
    assert not (tmp_path / "out").exists()
    assert "have no pair of styles and another family to hold out; install fonts" in capsys.readouterr().err
    with pytest.raises(DataError, match=r"python -m examples\.letters\.edits --out"):
        read_drawings(tmp_path)


def test_requests_are_edits_that_training_has_seen(folder: Path) -> None:
    drawings = read_drawings(folder)
    requests, trained = edit_score.requested_edits(drawings)
    changes = {
        (d.style.weight, d.style.slant, request.word, request.truth is None)
        for request in requests
        if (d := drawings[request.original]).held_out
    }
    assert changes == {
        ("regular", "upright", "bold", False),
        ("bold", "upright", "regular", False),
        ("regular", "upright", "italic", True),
    }
    assert len(requests) == 26 * len(changes)
    assert all(not drawings[edit.original].held_out and edit.truth is not None for edit in trained)


Draw = Callable[[edit_score.Edit, Sequence[Drawing], Tensor], Tensor]


@pytest.fixture
def judge(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Return a function that scores a generator; the generator draws ink for a requested edit."""

    def run(draw: Draw, *arguments: str) -> int:
        drawings = read_drawings(folder)
        inks = torch.stack([ink(folder / d.file) for d in drawings])
        requests, _ = edit_score.requested_edits(drawings)

        def generate(*, conditions: dict, references: list[list[Tensor]], numbers: range, **settings: Any) -> Tensor:
            for n, (reference,) in zip(numbers, references, strict=True):
                torch.testing.assert_close(reference, -inks[requests[n].original].expand(3, -1, -1)[:, None])
            texts = [INSTRUCTIONS[requests[n].word] for n in numbers]
            assert all(text in wordings for text, wordings in zip(conditions["context"], texts, strict=True))
            drawn = torch.stack([draw(requests[n], drawings, inks) for n in numbers])
            return -drawn.expand(-1, 3, -1, -1)[:, :, None]

        generator = SimpleNamespace(
            config=RunConfig(model=DiTConfig(in_channels=3), data=MockData(), objective=FlowMatching()),
            generate=generate,
            batch_size=lambda *_: 50,
        )
        letters = [d.letter for d in drawings]

        def read(images: Tensor) -> Tensor:
            nearest = torch.cdist(images.flatten(1), inks.flatten(1)).argmin(1)
            return torch.tensor([ord(letters[i]) - ord("A") for i in nearest])

        reader = SimpleNamespace(read_letters=read, accuracy=1.0, class_names=[chr(65 + i) for i in range(26)])
        monkeypatch.setattr(evaluate, "open_generator", lambda args: generator)
        monkeypatch.setattr(edit_score, "load_reader", lambda data: reader)
        monkeypatch.setattr(edit_score, "encode_prompts", lambda generator, prompts: {"context": list(prompts)})
        return evaluate.main(["--checkpoint", "run", "--metric", "letter_edits", "--data", str(folder), *arguments])

    return run


MINIMUMS = ["--minimum", "0.9", "--minimum-style", "0.9", "--minimum-family", "0.9"]


def leaning(picture: Tensor, sign: int) -> Tensor:
    """Shift the upper rows to the right and the lower ones to the left, or the other way."""
    side = picture.shape[-1]
    return torch.stack([row.roll(sign * (side // 2 - i) // 3) for i, row in enumerate(picture[0])])[None]


def test_the_letters_of_the_font_pass(judge: Callable[..., int], capsys: pytest.CaptureFixture, tmp_path: Path) -> None:
    """If the family lacks the style, a sheared original counts as an italic letter."""

    def true(edit: edit_score.Edit, drawings: Sequence[Drawing], inks: Tensor) -> Tensor:
        return leaning(inks[edit.original], 1) if edit.truth is None else inks[edit.truth]

    assert judge(true, *MINIMUMS[2:], "--out", str(tmp_path / "grid.png")) == 0
    said = capsys.readouterr().out
    assert "italic letters have more slant than their originals: 100.0 % (26 of 26; " in said
    assert "nearest to the requested style, among those of the family: 100.0 % (52 of 52; RMS error 0.000" in said
    assert (
        "nearest to the font family of the original, in that style: 100.0 % (52 of 52; 3 families; of the originals"
        in said
    )
    assert Image.open(tmp_path / "grid.png").width > 0


def test_other_styles_and_other_families_fail(judge: Callable[..., int], capsys: pytest.CaptureFixture) -> None:
    def opposite(edit: edit_score.Edit, drawings: Sequence[Drawing], inks: Tensor) -> Tensor:
        before = inks[edit.original]
        changed = {"bold": 0.9 * before - 0.1, "regular": 0.9 * before + 0.1, "italic": leaning(before, -1)}
        return changed[edit.word]

    def foreign(edit: edit_score.Edit, drawings: Sequence[Drawing], inks: Tensor) -> Tensor:
        before = drawings[edit.original]
        wanted = ("DejaVu Sans", before.letter, edited(before.style, edit.word).all_words[:-1])
        found = [(d.family, d.letter, d.style.all_words[:-1]) for d in drawings]
        return inks[found.index(wanted)]

    assert judge(opposite, "--minimum-style", "0.1") == evaluate.EXIT_BELOW_MINIMUM
    assert capsys.readouterr().err.count("below the minimum of 10.0 %") == len(("bold", "regular", "italic", "nearest"))
    assert judge(foreign, "--minimum-family", "0.1") == evaluate.EXIT_BELOW_MINIMUM
    assert "10.0 %: nearest to the font family of the original, in that style, 0.0 %" in capsys.readouterr().err
