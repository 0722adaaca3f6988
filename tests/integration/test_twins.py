"""Every tiny recipe through the whole loop: made-up images and clips, a loss that falls, and is the same anywhere."""

from pathlib import Path
from statistics import mean

import pytest

from tests.integration import actions
from tests.integration.runs import Job, loss_values, overrides, run_jobs

TP2SP = {"parallel__tensor_model_parallel_size": 2, "parallel__sequence_parallel": True}
TWINS = {
    "tiny_dit": {"logging__profile_steps": "[2,3]"},
    "tiny_dit_pack": {"parallel__data_parallel": "distributed_optimizer"},
    "tiny_dit_cross": {"parallel__pipeline_model_parallel_size": 2},
    "tiny_moviegen": {"parallel__data_parallel": "fsdp"},
    "tiny_ecdit": {"parallel__expert_model_parallel_size": 2},
    "tiny_flux": {},
    "tiny_wan": TP2SP,
    "tiny_stdit": TP2SP,
    # Full attention on the ring, the others made local: the hybrid.
    "tiny_stdit_full": {"parallel__context_parallel_size": 2},
}
FALLS = 0.95
SPREAD = {"tiny_dit_tp2sp": 2, "tiny_dit_cp2": 2, "tiny_dit_pp2": 2, "tiny_dit_tp2pp2cp2": 8}
"""Recipes that are `tiny_dit` on another layout, with their ranks."""
SAME_STEPS = 3
ROUNDING = 1e-5  # relative, fp32: sums are taken in another order


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

    assert {entry.name for entry in recipes() if entry.name.startswith("tiny_")} == {*TWINS, *SPREAD}


@pytest.mark.parametrize("name", TWINS)
def test_tiny_twin_trains_on_two_ranks(runs: Path, name: str) -> None:
    """The last steps fit the data better than the first ones did."""
    losses = loss_values(runs / name)
    assert len(losses) == 20
    assert mean(losses[-5:]) < FALLS * mean(losses[:5])


def test_a_run_traces_the_steps_it_was_asked_for(runs: Path) -> None:
    assert [path.name for path in (runs / "tiny_dit" / "profile").iterdir()] == ["rank_0.json.gz"]


@pytest.mark.matrix
def test_recipes_on_other_layouts_have_the_same_losses(tmp_path: Path) -> None:
    jobs = {}
    for name, ranks in {"tiny_dit": 1, **SPREAD}.items():
        words = overrides(tmp_path / name, logging__tensorboard=False, training__stop_at_step=SAME_STEPS)
        jobs[name] = Job(actions.train, {"arguments": ["--yes", "--factory", name, *words]}, ranks)
    run_jobs(tmp_path / "world", jobs)
    expected = loss_values(tmp_path / "tiny_dit")
    assert len(expected) == SAME_STEPS
    for name in SPREAD:
        assert loss_values(tmp_path / name) == pytest.approx(expected, rel=ROUNDING), name
