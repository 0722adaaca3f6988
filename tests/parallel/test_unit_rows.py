"""Rows of the weights of EDM2 have unit mean square after updates, on every data-parallel layout and precision."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from dit.backends.init import UNIT_ROWS, init_of
from dit.parallel.build import build_on_meta
from dit.parallel.dims import ParallelConfig
from dit.verify.ranks import run_world
from dit.verify.trial import Trial
from launch.config_file import built
from launch.train import call_recipe
from launch.verify import tiny_pair
from tests.support.ranks import rows, selected

KINDS: dict[str, dict[str, Any]] = {
    "ddp": {"data_parallel": "ddp"},
    "distributed": {"data_parallel": "distributed_optimizer"},
    "fsdp": {"data_parallel": "fsdp"},
    "fsdp_optim": {"data_parallel": "fsdp", "fsdp_sharding": "optim"},
}
ROW = ("kind", "precision")
QUICK = (("distributed", "fp32"), ("fsdp", "bf16"))
ROUNDING = {"fp32": 1e-5, "bf16": 2**-7}
EPSILON = 1e-4  # added to the root mean square


def trial(kind: str, precision: str) -> Trial:
    run = replace(built(call_recipe("tiny_edm2")), parallel=ParallelConfig(**KINDS[kind]))
    many = tiny_pair(run, 2).many
    return replace(many, training=replace(many.training, precision=precision))


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[tuple, dict[str, Any]]:
    """Report of each selected case."""
    wanted = sorted(selected(request, ROW))
    cases = [{"task": "dit.verify.trial:run_case", "trial": trial(*row)} for row in wanted]
    return dict(zip(wanted, run_world(2, cases, tmp_path_factory.mktemp("unit_rows")), strict=True))


@pytest.mark.parametrize(ROW, rows([(kind, p) for kind in KINDS for p in ROUNDING], lambda *row: row in QUICK))
def test_rows_have_unit_mean_square_after_updates(found: Any, kind: str, precision: str) -> None:
    """The model's weights are the rounded main weights, and averages are those of the scaled weights."""
    run = found[kind, precision]
    assert run["inexact"] == run["drifted"] == []
    model = trial(kind, precision).model
    names = [n for n, p in build_on_meta(model).named_parameters() if init_of(p, n) == UNIT_ROWS]
    assert len(names) > 20
    for name in names:
        rms = run["parameters"][name].flatten(1).square().mean(1).sqrt()
        torch.testing.assert_close(rms, torch.full_like(rms, 1 - EPSILON), rtol=ROUNDING[precision], atol=0, msg=name)
