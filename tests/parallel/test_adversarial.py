"""The adversarial loss of autoencoders: every data-parallel layout computes the numbers of one rank."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dit.objectives.adversarial import Adversarial
from dit.parallel.dims import ParallelConfig
from dit.verify.laws import Check
from dit.verify.ranks import run_world
from dit.verify.report import Verdict
from launch.config_file import built
from launch.overrides import apply_overrides
from launch.train import call_recipe
from launch.verify import Pair, check_case, tiny_pair
from tests.support.ranks import compared, rows, selected

PART = Adversarial(start_step=0, num_layers=2, hidden_size=8, lr_factor=0.25)
LAYOUTS: dict[str, dict[str, Any]] = {
    "dp2": {"data_parallel": "ddp"},
    "distributed_optimizer2_overlap": {"overlap_grad_reduce": True, "overlap_param_gather": True},
    "fsdp2": {"data_parallel": "fsdp"},
}
RECIPES = ("pictogram_autoencoder", "pictogram_vq_autoencoder")
ROW = ("recipe", "layout")
QUICK = {("pictogram_autoencoder", "dp2"), ("pictogram_vq_autoencoder", "fsdp2")}


def pair_of(recipe: str, layout: dict[str, Any], *, start_step: int = 0) -> Pair:
    """Return the tiny form of a recipe with the loss, under a layout of two ranks and on one rank."""
    task = call_recipe(recipe)
    apply_overrides(task, ["objective.adversarial=adversarial"])
    config = built(task)
    objective = replace(config.objective, adversarial=replace(PART, start_step=start_step))
    return tiny_pair(replace(config, objective=objective, parallel=ParallelConfig(**layout)), 2)


@pytest.fixture(scope="module")
def verdicts(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[tuple[str, str], Verdict]:
    """Verdict of each selected row; each world size starts once."""
    pairs = {row: pair_of(row[0], LAYOUTS[row[1]]) for row in sorted(selected(request, ROW))}
    return compared(pairs, tmp_path_factory.mktemp("adversarial"))


@pytest.mark.parametrize(ROW, rows([(r, n) for r in RECIPES for n in LAYOUTS], lambda *case: case in QUICK))
def test_layout_equals_one_rank(verdicts: dict[tuple[str, str], Verdict], recipe: str, layout: str) -> None:
    """Gradients and weights of two steps, including the discriminator, which has another learning rate."""
    verdict = verdicts[recipe, layout]
    assert verdict.is_equal, verdict.text()
    assert not verdict.idle


def test_padding_packs_their_order_and_accumulation_change_nothing(tmp_path: Path) -> None:
    """The autoencoder's outputs also equal those of the public class."""
    trials = [pair_of(recipe, LAYOUTS["dp2"]).one for recipe in RECIPES]
    found: list[dict[str, Check]] = run_world(1, [check_case(trial) for trial in trials], tmp_path)
    for checks, public in zip(found, ("AutoencoderKL", "VQModel"), strict=True):
        for name in ("padding", "packed", "order", "accumulated", "diffusers"):
            assert checks[name].wrong == [], checks[name].line(name)
            assert len(checks[name].errors) > 20
        assert checks["diffusers"].note == public
        assert any(name.startswith("discriminator.") for name in checks["packed"].errors)
