"""Ranks of generated pictograms, for distances known by hand, and output and minimum of the command."""

from argparse import Namespace
from types import SimpleNamespace

import pytest
import torch

from dit.errors import ConfigError
from dit.evaluation.features import Features
from dit.evaluation.kernel_distance import kernel_distance
from examples.pictograms.score import FeatureScore, PictogramScore, Ranks, measure, texture


def flat(*levels: float) -> torch.Tensor:
    """Grey pictures of 2 x 2."""
    return torch.tensor(levels)[:, None, None, None].expand(-1, 3, 2, 2)


def test_the_rank_is_the_number_of_nearer_drawings():
    """The first picture is the requested drawing; 4 others are nearer to the second picture, 20 to the third."""
    drawings = flat(*(i / 30 for i in range(30)))
    ranks = Ranks.of(flat(3 / 30, 0.0, 0.0), drawings, [3, 4, 20])
    assert (ranks.first, ranks.first_5, ranks.first_20) == (1 / 3, 2 / 3, 2 / 3)
    assert ranks.error == pytest.approx(((4 / 30) ** 2 / 3 + (20 / 30) ** 2 / 3) ** 0.5)


def test_equally_near_drawings_do_not_lower_the_rank():
    assert Ranks.of(flat(0.0), flat(0.5, -0.5), [1]).first == 1.0


def test_texture_is_the_deviation_in_flat_regions():
    """A chessboard of +-3 steps covers the flat half of the drawing: 5 or 4 of 9 pixels differ by 6 steps."""
    drawing = torch.zeros(1, 3, 24, 24)
    drawing[..., 12:] = torch.linspace(-1, 1, 12)
    board = (torch.arange(24)[:, None] + torch.arange(24)) % 2 * 2.0 - 1
    assert texture(drawing + 3 / 127.5 * board, drawing) == pytest.approx(3 * (80 / 81) ** 0.5, rel=1e-4)
    shifted = drawing.roll(-1, -1)  # the edge is shifted by one pixel
    shifted[..., -1] = 1
    assert texture(shifted, drawing) == texture(drawing, drawing) == 0


def test_a_feature_network_ranks_drawings_and_measures_the_distance_of_both_sets():
    """Features are the absolute brightness, so a negative picture is nearest to its positive drawing."""
    drawings = flat(*(i / 30 for i in range(1, 31)))
    network = Features(lambda pictures: pictures.abs().flatten(1)[:, :2], "brightness")
    pictures = -drawings[[4, 8, 15]]
    score = FeatureScore.of(network, pictures, drawings, [4, 8, 15])
    assert (score.ranks.first, score.ranks.error, score.network) == (1.0, 0.0, "brightness")
    rows = drawings[[4, 8, 15]].flatten(1)[:, :2]
    assert score.kid == kernel_distance(rows, rows)


def score(share: float, features: FeatureScore | None = None) -> PictogramScore:
    samples = Ranks(0.1, 0.2, share, 0.5)
    return PictogramScore(200, 400, samples, 1.25, features, Ranks(1.0, 1.0, 1.0, 0.1), "by somebody")


@pytest.mark.parametrize(("share", "missed"), [(0.6, []), (0.59, ["below the minimum of 60.0 %"])])
def test_the_minimum_applies_to_the_twenty_nearest_drawings(share, missed):
    assert [line.partition(":")[0] for line in score(share).missed(0.6)] == missed
    assert score(share).missed(None) == []


def test_the_report_names_samples_features_upper_bound_and_authors():
    lines = score(0.6, FeatureScore(Ranks(0.9, 1.0, 1.0, 0.2), 0.0123, "a network")).lines()
    assert lines[1].startswith("samples:     the requested drawing is nearest 10.0 %, among 5 20.0 %, among 20 60.0 %;")
    assert "deviation of 1.25 of 255" in lines[2]
    assert lines[3].startswith("features:    the requested drawing is nearest 90.0 %")
    assert lines[3].endswith("among 20 100.0 %; KID 0.0123 (a network)")
    assert lines[4].startswith("autoencoder: the encoded drawing is nearest 100.0 %")
    assert lines[-1] == "by somebody"


def test_only_pictograms_are_judged_as_such(monkeypatch):
    """Other data are refused by name, before anything is loaded."""
    info = SimpleNamespace(description={"name": "letters", "vae": "v", "text_encoder": "t"})
    monkeypatch.setattr("energon_data.folder.check_dataset", lambda path, split: info)
    generator = SimpleNamespace(config=SimpleNamespace(data=SimpleNamespace(path="data/letters")))
    with pytest.raises(ConfigError, match="data/letters holds no pictograms"):
        measure(Namespace(data=None, minimum=None, out=None), generator)
