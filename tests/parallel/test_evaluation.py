"""`launch.evaluate --cascade` on several ranks: each draws a share, and the pictures equal those of one rank."""

import pytest

from benchmarks.parallel_training import run_world
from tests.parallel.evaluation_worker import EACH, LETTERS

WORLDS = (1, 2)


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("evaluation")
    found = {}
    for world in WORLDS:
        case = {"task": "tests.parallel.evaluation_worker:run", "folder": folder / f"pictures of {world}"}
        (found[world],) = run_world(world, [case], folder / str(world))
    return found


def test_two_ranks_measure_the_scores_of_one_rank_and_one_prints_them(results):
    """Scores of each stage are equal, pictures are equal to the bit, and only rank 0 prints."""
    one, two = results[1], results[2]
    assert [score["stage"] for score in one["scores"]] == ["base", "sr"]
    assert one["scores"] == two["scores"]
    assert two["silent"] == [""]
    assert set(one["code"] + two["code"]) == {0}
    assert one["grids"].keys() == two["grids"].keys() == {"grid_base.png", "grid_sr.png"}
    assert one["grids"] == two["grids"]


def test_the_ranks_share_the_work(results):
    """Ranks take turns: batches of 64 in the first stage, of 16 in the second."""
    total = EACH * len(LETTERS)
    assert results[1]["drawn"] == [2 * total]
    assert results[2]["drawn"] == [64 + 48, total - 64 + total - 48]
