"""Alignment with a teacher and its class token: every layout computes gradients, losses and weights of one rank."""

from dataclasses import replace
from typing import Any

import pytest

from dit.objectives.alignment import Alignment
from dit.objectives.contrastive import ContrastiveFlowMatching
from dit.objectives.flow_matching import FlowMatching
from dit.parallel.dims import ParallelConfig
from dit.verify.ranks import run_world
from launch.verify import Pair, check_case
from tests.laws.backbones import run_of
from tests.support.ranks import compared, one_step, rows, selected

TP2SP = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
PP2 = {"pipeline_model_parallel_size": 2}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "dp2": (2, {"data_parallel": "distributed_optimizer", "overlap_grad_reduce": True, "overlap_param_gather": True}),
    "tp2": (2, {"tensor_model_parallel_size": 2}),
    "tp2_sp": (2, TP2SP),
    "cp2": (2, {"context_parallel_size": 2}),
    "cp2_balanced": (2, {"context_parallel_size": 2, "context_split": "load_balanced"}),
    "pp2": (2, PP2),
    "pp2_vpp2": (2, {**PP2, "virtual_pipeline_model_parallel_size": 2}),
    "fsdp2": (2, {"data_parallel": "fsdp"}),
    "pp2_tp2_sp": (4, {**PP2, **TP2SP}),
    "tp2_sp_cp2": (4, {**TP2SP, "context_parallel_size": 2}),
    "cp2_a2a": (2, {"context_parallel_size": 2, "context_comm": "a2a"}),
    "tp2_fsdp2": (4, {"tensor_model_parallel_size": 2, "data_parallel": "fsdp"}),
}
OBJECTIVES = {
    "dit": FlowMatching(alignment=Alignment(layer=1), min_snr_gamma=5.0),
    "tread": ContrastiveFlowMatching(alignment=Alignment(layer=1)),
    "wan": FlowMatching(prediction="x0", alignment=Alignment(layer=1)),
    "reg": FlowMatching(alignment=Alignment(layer=1), teacher_token_weight=0.2),
    "rit": FlowMatching(prediction="x0", teacher_token_weight=0.2),
    "sr_dit": ContrastiveFlowMatching(alignment=Alignment(layer=1), teacher_token_weight=0.2),
}
"""By backbone; packs have samples of several sizes, and the middle layers of `tread` skip some tokens.

`reg`, `rit` and `sr_dit` predict the class token of the teacher; `rit` has class tokens from layer 1 on, and `sr_dit` a
value residual, which pipelines refuse.
"""
ROW = ("name", "layout")
CASES = [(name, layout) for name in OBJECTIVES for layout in LAYOUTS if name != "sr_dit" or "pp2" not in layout]
QUICK = {("dit", layout) for layout in ("pp2", "tp2_sp", "fsdp2")} | {("reg", "pp2"), ("reg", "cp2_balanced")}
QUICK |= {("rit", "cp2"), ("rit", "tp2_sp"), ("sr_dit", "tp2")}
SLOW = {(name, layout) for name in ("dit", "reg") for layout in LAYOUTS}
SLOW |= {(name, "pp2_tp2_sp") for name in ("tread", "wan", "rit")} | {("wan", "pp2_vpp2"), ("tread", "cp2")}
SLOW |= {("sr_dit", layout) for layout in ("tp2_sp_cp2", "cp2_a2a", "tp2_fsdp2")}


def pair_of(name: str, layout: str) -> Pair:
    ranks, parallel = LAYOUTS[layout]
    config = replace(run_of(name), objective=OBJECTIVES[name], parallel=ParallelConfig(**parallel))
    return one_step(config, ranks)


@pytest.fixture(scope="module")
def verdicts(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[tuple, Any]:
    """Verdict of each selected case; each world size starts once."""
    pairs = {row: pair_of(*row) for row in sorted(selected(request, ROW))}
    return compared(pairs, tmp_path_factory.mktemp("alignment"))


@pytest.mark.parametrize(ROW, rows(CASES, lambda *row: row in QUICK, lambda *row: row not in SLOW))
def test_layouts_equal_one_rank(verdicts: dict[tuple, Any], name: str, layout: str) -> None:
    """Every parameter has a gradient, too.

    Of two pipeline stages, the first has the aligned layer and the embedding of the teacher's token, the last the loss.
    """
    verdict = verdicts[name, layout]
    assert verdict.is_equal, verdict.text()
    assert not verdict.idle


def test_padding_packs_their_order_and_accumulation_change_nothing(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Gradients are summed over micro-batches: each noised token has the same weight in both terms of the loss."""
    trials = [pair_of(name, "tp2").one for name in OBJECTIVES]
    for checks in run_world(1, [check_case(trial) for trial in trials], tmp_path_factory.mktemp("checks")):
        for check in ("padding", "packed", "order", "accumulated"):
            assert checks[check].wrong == [], checks[check].line(check)
            assert len(checks[check].errors) > 20
        assert any("alignment" in name or "teacher_token" in name for name in checks["packed"].errors)
