"""The metric `letters`, for generators that follow the conditions or ignore them."""

import json
from argparse import Namespace
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from dit.errors import ConfigError
from dit.models.dit.config import DiTConfig
from dit.objectives.flow_matching import FlowMatching
from dit.run_config import RunConfig
from examples.letters import score as letter_score
from examples.letters.fonts import draw_capitals
from examples.letters.moving import CLASS_NAMES, DIRECTIONS
from examples.letters.reader import LetterNetwork, LetterReader
from examples.letters.stills import vary
from launch import evaluate
from tests.unit.evaluation.test_text_reader import FONT
from tests.unit.examples.letters.test_checks import face, walk
from tests.unit.launch.test_sample import FakeGenerator

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
SIZE = 6


class PixelNetwork(nn.Module):
    """Reads the letter whose pixel has the most ink."""

    def forward(self, images):
        return images.flatten(1)[:, : len(LETTERS)]


class BrightnessNetwork(nn.Module):
    """Reads the brightest pixel of a picture as a number."""

    def forward(self, images):
        level = ((images.amax((1, 2, 3)) + 1) / 2 * 50 - 25).round().long().clamp(0, 25)
        return nn.functional.one_hot(level, 26).float()


def reader(network):
    return LetterReader(network, accuracy=0.97, num_held_out=100, class_names=tuple(LETTERS))


def styled(prompt: str) -> torch.Tensor:
    """Draw `the letter Q in a bold italic font`: Q's pixel; bold adds ink below, italic a pixel at the lower left."""
    words = prompt.split()
    image = torch.full((1, 1, SIZE, SIZE), -1.0)
    image.view(-1)[LETTERS.index(words[2])] = 1.0
    if "bold" in words:
        image[..., 5, 3:] = 0.9
    if "italic" in words:
        image[..., 5, 0] = 0.9
    return image


def moving(name: str, *, backwards: bool = False) -> torch.Tensor:
    """Draw `Q left`, or `the letter Q moving left slowly`: a moving dot with the brightness of the letter."""
    words = name.split()
    letter, direction = (words[2], words[4]) if "moving" in words else words
    step = walk(direction, -0.5 if backwards else 0.5)
    return (step + 1) * (0.5 + LETTERS.index(letter) / 50) - 1


@pytest.fixture
def judge(monkeypatch):
    """Return a function that runs the command on a generator and a description of its data."""

    def run(draw, network, description, *arguments, num_classes=None):
        def generate(*, conditions, **settings):
            words = conditions.get("context") or [CLASS_NAMES[label] for label in conditions["label"]]
            return torch.stack([draw(x) for x in words])

        model = DiTConfig(num_classes=num_classes, context_size=None if num_classes else 8)
        generator = SimpleNamespace(
            config=RunConfig(model=model, data=SimpleNamespace(path="here"), objective=FlowMatching()),
            class_names=CLASS_NAMES,
            text_encoder="words",
            generate=generate,
            batch_size=lambda *_: 50,
        )
        clips = [(walk(d, 0.5), {"direction": d, "font": "f"}) for d in DIRECTIONS]
        monkeypatch.setattr(evaluate, "open_generator", lambda args: generator)
        monkeypatch.setattr(letter_score, "load_reader", lambda folder: reader(network))
        monkeypatch.setattr(letter_score, "encode_prompts", lambda generator, prompts: {"context": list(prompts)})
        monkeypatch.setattr("examples.letters.loading.load_clips", lambda folder, split: clips)
        pictures = (torch.ones(2, 1, SIZE, SIZE), None, [{"font": "f"}] * 2)
        monkeypatch.setattr("examples.letters.loading.load_letters", lambda folder, split: pictures)
        monkeypatch.setattr(
            "energon_data.folder.check_folder", lambda folder, split: SimpleNamespace(description=description)
        )
        return evaluate.main(["--checkpoint", "run", "--metric", "letters", *arguments])

    return run


def letters_of(*faces: dict) -> dict:
    return {"text_encoder": "words", "splits": {"train": {"faces": [{**f, "file": "f"} for f in faces]}}}


ALL_STYLES = letters_of(face(), face(weight="bold"), face(slant="italic"))


def test_style_words_are_measured_letter_by_letter(judge, capsys):
    """Letters in the first column of the picture cannot lean, so they count as failures."""
    assert judge(styled, PixelNetwork(), ALL_STYLES, "--minimum", "1", "--minimum-style", "0.8") == 0
    out = capsys.readouterr().out
    assert "letters read correctly: 100.0 % (208 of 208" in out
    assert "bold letters have more ink than regular ones: 100.0 % (104 of 104; serif: " in out
    leaning = 26 - len(range(0, 26, SIZE))
    assert f"italic letters lean more than upright ones: {100 * leaning / 26:.1f} % ({4 * leaning} of 104" in out


def test_style_words_without_effect_are_below_every_minimum(judge, capsys):
    def deaf(prompt):
        return styled(prompt.replace("bold", "").replace("italic", ""))

    assert judge(deaf, PixelNetwork(), ALL_STYLES) == 0
    assert judge(deaf, PixelNetwork(), ALL_STYLES, "--minimum-style", "0.1") == evaluate.EXIT_BELOW_MINIMUM
    err = capsys.readouterr().err
    assert "below the minimum of 10.0 %: bold letters have more ink than regular ones, 0.0 %" in err
    assert judge(styled, PixelNetwork(), letters_of(face()), "--minimum-style", "0") == evaluate.EXIT_BELOW_MINIMUM
    assert "no style was measured" in capsys.readouterr().err


def test_letters_are_read_by_a_reader_that_was_trained_elsewhere(monkeypatch):
    """Rendered letters replace generated ones; two of them are not the requested letters."""
    glyphs = torch.from_numpy(draw_capitals(FONT))
    rendered = vary(glyphs, 1, 16, torch.Generator())
    metadata = [{"letter": letter} for letter in LETTERS]
    monkeypatch.setattr("examples.letters.loading.load_letters", lambda *_: (rendered, None, metadata))
    requested = "B" + LETTERS[1:-1] + "A"
    check = letter_score.judge_by_ocr(rendered[:, :, None], requested, "data")
    assert (check.passed, check.total, check.detail) == (24, 26, "real letters of held-out families 100.0 %")


@pytest.mark.parametrize("by_text", [False, True])
def test_frames_are_read_and_motion_is_measured(judge, capsys, by_text):
    description = {**letters_of(face()), "name": "moving_letters"}
    classes = None if by_text else len(CLASS_NAMES)
    asked = ("--minimum", "1", "--minimum-motion", "1")
    assert judge(moving, BrightnessNetwork(), description, *asked, num_classes=classes) == 0
    out = capsys.readouterr().out
    frames = 2 * len(CLASS_NAMES) * 5
    assert f"letters in single frames read correctly: 100.0 % ({frames} of {frames};" in out
    assert "frame by frame: 100.0 100.0 100.0 100.0 100.0 %" in out
    assert "clips that move as asked: 100.0 % (208 of 208; 0.50 pixels per frame, real clips 0.50)" in out


def test_motion_in_the_opposite_direction_is_reported(judge, capsys):
    def wrong(name):
        return moving(name, backwards=True)

    arguments = ("--minimum-motion", "0.5", "--json", "--samples-per-class", "1")
    assert judge(wrong, BrightnessNetwork(), {}, *arguments, num_classes=104) == evaluate.EXIT_BELOW_MINIMUM
    result = json.loads(capsys.readouterr().out)
    assert result["accuracy"] == 1
    assert [(c["kind"], c["share"]) for c in result["checks"]] == [("motion", 0), ("motion", 0)]


def test_one_bad_frame_is_detected(judge, capsys):
    def blinking(name):
        clip = moving(name)
        clip[:, 3] = -1
        return clip

    assert judge(blinking, BrightnessNetwork(), {}, "--minimum", "0.9", num_classes=104) == evaluate.EXIT_BELOW_MINIMUM
    out = capsys.readouterr().out
    # An empty frame is read as A.
    assert "frame by frame: 100.0 100.0 100.0 3.8 100.0 %" in out


def test_clips_of_a_model_of_pictures_are_refused(judge, capsys):
    assert judge(lambda prompt: walk("left", 0.5), PixelNetwork(), ALL_STYLES) == 2
    assert "5 frames" in capsys.readouterr().err
    assert judge(styled, PixelNetwork(), {"splits": {}}) == 2
    assert "has none" in capsys.readouterr().err
    assert judge(styled, PixelNetwork(), ALL_STYLES, "--minimum-motion", "90") == 2
    assert "--minimum-motion 90" in capsys.readouterr().err


@pytest.fixture
def generator(monkeypatch):
    fake = FakeGenerator()
    monkeypatch.setattr(evaluate, "open_generator", lambda args: fake)
    monkeypatch.setattr(letter_score, "load_reader", lambda folder: reader(PixelNetwork()))
    return fake


def judge_classes(*arguments):
    return evaluate.main(["--checkpoint", "run", "--metric", "letters", "--samples-per-class", "8", *arguments])


def test_the_score_counts_letters_read_as_requested(generator, capsys):
    generator.confused = (16,)
    assert judge_classes() == 0
    out = capsys.readouterr().out
    assert "letters read correctly: 96.2 % (200 of 208; reader's own accuracy on held-out families 97.0 %)" in out
    assert "misread: Q as A (8)" in out


def test_a_score_below_the_minimum_is_a_failure(generator, capsys):
    generator.confused = (16,)
    assert judge_classes("--minimum", "0.96") == 0
    assert judge_classes("--minimum", "0.97") == evaluate.EXIT_BELOW_MINIMUM
    assert judge_classes("--minimum", "97") == 2
    assert "0.9" in capsys.readouterr().err


def test_another_number_of_classes_than_letters_is_refused(generator, capsys):
    generator.class_names = list(LETTERS[:10])
    assert judge_classes() == 2
    assert "10 classes" in capsys.readouterr().err


def test_the_judged_samples_are_saved_as_pictures(generator, tmp_path):
    assert judge_classes("--out", str(tmp_path / "judged.png")) == 0
    assert (tmp_path / "judged.png").is_file()


def test_features_are_those_before_the_last_layer(monkeypatch):
    network = LetterNetwork(5).eval()
    monkeypatch.setattr(letter_score, "load_reader", lambda folder: reader(network))
    monkeypatch.setattr(letter_score, "data_folder", lambda args, generator: "")
    features = letter_score.reader_features(Namespace(), SimpleNamespace(config=config_of(channels=1)))
    images = torch.rand(4, 1, 8, 8) * 2 - 1
    found = features(images.expand(-1, 3, -1, -1))
    torch.testing.assert_close(network.head[-1](found), network(images))
    names = [features.network]
    for changed in (0.0, 1.0):
        network.head[2].weight.data[0, 0] += changed
        names.append(letter_score.reader_features(Namespace(), SimpleNamespace(config=config_of(channels=1))).network)
    assert names[0] == names[1] != names[2]
    with pytest.raises(ConfigError, match="features of grey letters, and the model has 3 channels"):
        letter_score.reader_features(Namespace(), SimpleNamespace(config=config_of(channels=3)))


def config_of(channels):
    return SimpleNamespace(model=SimpleNamespace(in_channels=channels))
