"""How generated pictograms are ranked: by hand-made distances, and the lines and minimum of the command."""

from argparse import Namespace
from types import SimpleNamespace

import pytest
import torch

from dit.errors import ConfigError
from examples.pictograms.score import PictogramScore, Ranks, measure


def flat(*levels: float) -> torch.Tensor:
    """Grey pictures of 2 x 2."""
    return torch.tensor(levels)[:, None, None, None].expand(-1, 3, 2, 2)


def test_ranks_count_the_drawings_that_are_nearer():
    """Of 30 drawings: the first picture is the one asked for, nearest to the second picture are 4 others, to the third
    20 others."""
    drawings = flat(*(i / 30 for i in range(30)))
    ranks = Ranks.of(flat(3 / 30, 0.0, 0.0), drawings, [3, 4, 20])
    assert (ranks.first, ranks.first_5, ranks.first_20) == (1 / 3, 2 / 3, 2 / 3)
    assert ranks.error == pytest.approx(((4 / 30) ** 2 / 3 + (20 / 30) ** 2 / 3) ** 0.5)


def test_equally_near_drawings_do_not_push_each_other_back():
    assert Ranks.of(flat(0.0), flat(0.5, -0.5), [1]).first == 1.0


def score(share: float) -> PictogramScore:
    return PictogramScore(200, 400, Ranks(0.1, 0.2, share, 0.5), Ranks(1.0, 1.0, 1.0, 0.1), "by somebody")


@pytest.mark.parametrize(("share", "missed"), [(0.6, []), (0.59, ["below the minimum of 60.0 %"])])
def test_the_minimum_is_that_of_the_twenty_nearest(share, missed):
    assert [line.partition(":")[0] for line in score(share).missed(0.6)] == missed
    assert score(share).missed(None) == []


def test_lines_have_the_samples_the_ceiling_and_the_authors():
    lines = score(0.6).lines()
    assert lines[1].startswith("samples:     the requested drawing is nearest 10.0 %, among 5 20.0 %, among 20 60.0 %;")
    assert lines[2].startswith("autoencoder: the encoded drawing is nearest 100.0 %")
    assert lines[-1] == "by somebody"


def test_only_pictograms_are_judged_as_such(monkeypatch):
    """Other data are refused by name, before anything is loaded."""
    members = [SimpleNamespace(description={"name": "letters", "vae": "v", "text_encoder": "t"})]
    monkeypatch.setattr("energon_data.folder.check_dataset", lambda path, split: members)
    generator = SimpleNamespace(config=SimpleNamespace(data=SimpleNamespace(path="data/letters")))
    with pytest.raises(ConfigError, match="data/letters holds no pictograms"):
        measure(Namespace(data=None, minimum=None, out=None), generator)
