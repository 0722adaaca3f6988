"""Every tiny recipe through the whole loop: made-up images and clips, twenty steps on two ranks, a loss that falls."""

from pathlib import Path
from statistics import mean

import pytest

from tests.integration import actions
from tests.integration.runs import Job, loss_values, overrides, run_jobs

TP2SP = {"parallel__tensor_model_parallel_size": 2, "parallel__sequence_parallel": True}
TWINS = {
    "tiny_dit": TP2SP,
    "tiny_dit_cross": {"parallel__pipeline_model_parallel_size": 2},
    "tiny_moviegen": {"parallel__data_parallel": "fsdp"},
    "tiny_ecdit": {"parallel__expert_model_parallel_size": 2},
    "tiny_flux": {},
    "tiny_wan": TP2SP,
    "tiny_stdit": TP2SP,
}
FALLS = 0.95


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, jobs = tmp_path_factory.mktemp("twins"), {}
    for name, settings in TWINS.items():
        words = overrides(folder / name, logging__tensorboard=False, training__log_interval=1, **settings)
        jobs[name] = Job(actions.train, {"arguments": ["--yes", "--factory", name, *words]}, ranks=2)
    for name, ended in run_jobs(folder / "world", jobs).items():
        assert [e.code for e in ended] == [0, 0], (name, ended)
    return folder


def test_every_tiny_recipe_is_here() -> None:
    from recipes.registry import recipes

    assert {entry.name for entry in recipes() if entry.name.startswith("tiny_")} == set(TWINS)


@pytest.mark.parametrize("name", TWINS)
def test_tiny_twin_trains_on_two_ranks(runs: Path, name: str) -> None:
    """The last steps fit the data better than the first ones did."""
    losses = loss_values(runs / name)
    assert len(losses) == 20
    assert mean(losses[-5:]) < FALLS * mean(losses[:5])
