"""The tiny ST-DiT trains from the command line on one rank, and on two that split the frames of every clip."""

from pathlib import Path

import pytest

from tests.integration import actions
from tests.integration.runs import loss_values, overrides
from tests.support.ranks import Job, run_jobs

pytestmark = pytest.mark.slow

NUM_STEPS = 20
ROUNDING = 1e-5  # relative, fp32: sums in another order
FULL_STEPS = 3
CP2 = {"parallel__context_parallel_size": 2}
FULL = {"training__num_steps": FULL_STEPS, "schedule__warmup_steps": 1}
RUNS: dict[str, tuple[str, int, dict]] = {
    "one": ("tiny_stdit", 1, {}),
    "hybrid": ("tiny_stdit", 2, CP2),
    "ring": ("tiny_stdit", 2, {**CP2, "parallel__spatial_temporal_comm": "context"}),
    "full_one": ("tiny_stdit_full", 1, FULL),
    "full_hybrid": ("tiny_stdit_full", 2, {**FULL, **CP2}),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, jobs = tmp_path_factory.mktemp("stdit"), {}
    for name, (factory, ranks, settings) in RUNS.items():
        words = overrides(folder / name, training__log_interval=1, logging__tensorboard=False, **settings)
        jobs[name] = Job(actions.train, {"arguments": ["--yes", "--factory", factory, *words]}, ranks)
    for name, ended in run_jobs(folder / "world", jobs).items():
        assert {e.code for e in (ended if isinstance(ended, list) else [ended])} == {0}, (name, ended)
    return folder


@pytest.mark.parametrize("name", ["hybrid", "ring"])
def test_two_ranks_equal_one_rank_in_training(runs: Path, name: str) -> None:
    """20 steps on mixed packs of images and clips have the same losses."""
    one, two = loss_values(runs / "one"), loss_values(runs / name)
    assert len(one) == NUM_STEPS
    assert two == pytest.approx(one, rel=ROUNDING)
    assert sum(one[-5:]) < 0.95 * sum(one[:5])


def test_two_ranks_with_full_attention_equal_one_rank(runs: Path) -> None:
    """Layers with ring attention over all tokens and local spatial and temporal attention have the same losses."""
    one, two = loss_values(runs / "full_one"), loss_values(runs / "full_hybrid")
    assert len(one) == FULL_STEPS
    assert two == pytest.approx(one, rel=ROUNDING)
