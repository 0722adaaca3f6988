"""Every tiny recipe through the whole loop: made-up images and clips, a loss that falls, and is the same anywhere."""

from pathlib import Path
from statistics import mean

import pytest

from dit.errors import EXIT_OK, EXIT_PREEMPTED
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
}
FALLS = 0.95
SPREAD = {"tiny_dit_tp2sp": 2, "tiny_dit_cp2": 2, "tiny_dit_pp2": 2}
"""Recipes that are `tiny_dit` on another layout, with their ranks."""
ON_EIGHT = {"tiny_dit_tp2pp2cp2": 8}
SAME_STEPS = 3
ROUNDING = 1e-5  # relative, fp32: sums are taken in another order


def first_steps(folder: Path, ranks: dict[str, int]) -> dict[str, Job]:
    """Return jobs that train recipes for a few steps, each on its ranks."""
    jobs = {}
    for name, count in ranks.items():
        words = overrides(folder / name, logging__tensorboard=False, training__stop_at_step=SAME_STEPS)
        jobs[name] = Job(actions.train, {"arguments": ["--yes", "--factory", name, *words]}, count)
    return jobs


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, jobs = tmp_path_factory.mktemp("twins"), {}
    for name, settings in TWINS.items():
        words = overrides(folder / name, logging__tensorboard=False, training__log_interval=1, **settings)
        jobs[name] = Job(actions.train, {"arguments": ["--yes", "--factory", name, *words]}, ranks=2)
    jobs |= first_steps(folder, SPREAD)
    for name, ended in run_jobs(folder / "world", jobs).items():
        expected = EXIT_PREEMPTED if name in SPREAD else EXIT_OK
        assert {e.code for e in ended} == {expected}, (name, ended)
    return folder


def test_every_tiny_recipe_is_here() -> None:
    from recipes.registry import recipes

    assert {entry.name for entry in recipes() if entry.name.startswith("tiny_")} == {*TWINS, *SPREAD, *ON_EIGHT}


@pytest.mark.parametrize("name", TWINS)
def test_tiny_twin_trains_on_two_ranks(runs: Path, name: str) -> None:
    """The last steps fit the data better than the first ones did."""
    losses = loss_values(runs / name)
    assert len(losses) == 20
    assert mean(losses[-5:]) < FALLS * mean(losses[:5])


def test_a_run_traces_the_steps_it_was_asked_for(runs: Path) -> None:
    """By its first rank; the same steps as without a trace, for other tests compare their losses."""
    assert [path.name for path in (runs / "tiny_dit" / "profile").iterdir()] == ["rank_0.json.gz"]


@pytest.mark.parametrize("name", SPREAD)
def test_a_recipe_on_another_layout_has_the_same_losses(runs: Path, name: str) -> None:
    found = loss_values(runs / name)
    assert len(found) == SAME_STEPS
    assert found == pytest.approx(loss_values(runs / "tiny_dit")[:SAME_STEPS], rel=ROUNDING)


@pytest.mark.matrix
@pytest.mark.parametrize("name", ON_EIGHT)
def test_a_recipe_on_eight_ranks_has_the_same_losses(tmp_path: Path, name: str) -> None:
    run_jobs(tmp_path / "world", first_steps(tmp_path, {"tiny_dit": 1, **ON_EIGHT}))
    assert len(loss_values(tmp_path / name)) == SAME_STEPS
    assert loss_values(tmp_path / name) == pytest.approx(loss_values(tmp_path / "tiny_dit"), rel=ROUNDING)
