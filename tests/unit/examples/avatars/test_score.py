"""Scores of avatars: right attributes, distances, and the minimum, for drawings with known errors."""

from types import SimpleNamespace

import numpy as np
import pytest

from dit.errors import EXIT_DATA
from examples.avatars.drawings import choose, draw, enlarged
from examples.avatars.score import Score, distances, missed
from launch import evaluate
from tests.unit.launch.test_sample import FakeGenerator


@pytest.fixture(scope="module")
def score():
    """Ten requested avatars; two pictures have one wrong value, and one shows a training picture."""
    trained, requested = choose("trained", 20), choose("new pair", 10)
    shown = [list(avatar) for avatar in requested]
    shown[0][0] = (shown[0][0] + 1) % 4
    shown[1][4] = (shown[1][4] + 1) % 6
    shown[2] = trained[0]
    wrong = sum(a != b for a, b in zip(trained[0], requested[2]))
    return Score.of("new pair", draw(shown), requested, trained), wrong, shown, requested, trained


def test_the_attributes_that_are_read_as_requested_count(score):
    score, wrong, *_ = score
    assert score.attributes == pytest.approx(1 - (2 + wrong) / 90)
    assert score.avatars == 0.7
    assert score.by_attribute["skin"] <= 0.9
    assert sum(score.by_attribute.values()) / 9 == pytest.approx(score.attributes)


def test_distances_are_root_mean_squares_of_pixel_values(score):
    score, _, shown, requested, trained = score
    pictures, drawings, training = (draw(some).astype(float) for some in (shown, requested, trained))

    def rms(a, b):
        return np.sqrt(np.square(a - b).mean())

    assert score.to_requested == pytest.approx(np.mean([rms(a, b) for a, b in zip(pictures, drawings)]))
    assert score.to_trained == pytest.approx(np.mean([min(rms(a, b) for b in training) for a in pictures]))
    assert score.drawing_to_trained == pytest.approx(np.mean([min(rms(a, b) for b in training) for a in drawings]))
    assert distances(draw(shown), draw(trained))[2, 0] == 0


def test_larger_pictures_are_read_by_their_reduction_and_compared_in_full(score):
    expected, _, shown, requested, trained = score
    pictures = enlarged(draw(shown), 64)
    assert pictures.shape == (10, 64, 64, 3)
    exact = Score.of("new pair", pictures, requested, trained)
    assert exact.by_attribute == expected.by_attribute
    for name in ("to_requested", "to_trained", "drawing_to_trained"):
        assert getattr(exact, name) == pytest.approx(getattr(expected, name))
    checkered = pictures + 8.0 * np.where(np.indices((64, 64)).sum(0) % 2, 1, -1)[:, :, None]
    noisy = Score.of("new pair", checkered, requested, trained)
    assert noisy.by_attribute == expected.by_attribute
    assert noisy.to_requested > exact.to_requested


def test_the_minimum_is_that_of_new_avatars(score):
    score, *_ = score
    assert missed([score], None) == missed([score], score.attributes) == []
    (line,) = missed([score], 0.999)
    assert line.startswith("below the minimum of 99.9 %: attributes of a new pair, ")
    assert score.lines()[0].startswith(
        f"new pair: {100 * score.attributes:.1f} % of the attributes as requested (skin "
    )


def test_a_missing_default_folder_names_the_flag(tmp_path, monkeypatch, capsys):
    """A checkpoint of imported or averaged weights names no data."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(evaluate, "open_generator", lambda args: FakeGenerator(data=SimpleNamespace()))
    assert evaluate.main(["--checkpoint", "run", "--metric", "avatars"]) == EXIT_DATA
    assert "and data/avatars does not exist; give the folder with --data" in capsys.readouterr().err
