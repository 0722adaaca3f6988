"""Transformer layers under `training.kernels=compile`: one graph for a stack and for all lengths, eager's numbers.

Graphs are counted, and run as torch's own operators (`aot_eager`); one row in the matrix generates code, too.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from dit.backends.process_groups import ProcessGroups
from dit.batch import PackedBatch
from dit.kernels import compiled
from dit.models.base import Backbone, ModelConfig
from dit.models.lora_config import LoRAConfig
from dit.objectives.edm import EDM
from dit.parallel.build import build_model
from dit.parallel.dims import ParallelConfig
from dit.settings import TrainingConfig
from dit.training.step import training_forward_step
from dit.verify.trial import disturb_constants
from tests.laws.backbones import config_of, pack

RTOL = 2e-6  # fp32: operators are fused or split, and per-sample gradients are one matrix product
BF16_RTOL = 8e-3  # one ulp: gradients per sample are rounded once, not per token
BACKBONES = ("dit", "dit_cross", "moviegen", "wan")
PACKS: dict[str, dict[str, Any]] = {
    "one": {"numbers": [1]},
    "dense": {"numbers": [0, 0, 0]},
    "ragged": {"numbers": [0, 1, 2]},
    "padded": {"numbers": [1, 0, 2, 1], "multiple_of": 4, "tail": 3},
}


@pytest.fixture(params=["aot_eager"])
def counter(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[CompileCounterWithBackend]:
    torch._dynamo.reset()
    counts = CompileCounterWithBackend(request.param)
    monkeypatch.setattr(compiled, "BACKEND", counts)
    yield counts
    torch._dynamo.reset()


def network_of(model: ModelConfig, groups: ProcessGroups, **training: Any) -> Backbone:
    settings = TrainingConfig(**{"precision": "fp32", **training})
    (network,) = build_model(model, ParallelConfig(data_parallel="ddp"), settings, groups)
    disturb_constants([network], groups)
    return network


def step(network: Backbone, model: ModelConfig, batch: PackedBatch) -> Tensor:
    """Return the loss of a training step and every gradient, in one row."""
    network.zero_grad()
    prediction_TC, loss_of = training_forward_step(EDM(), model, 7, 0)(iter([batch]), network)
    loss = loss_of(prediction_TC)[0]
    loss.backward()
    found = [p.grad.float().flatten() for p in network.parameters() if p.grad is not None]
    return torch.cat([loss.detach().float()[None], *found])


def batch_of(model: ModelConfig, name: str) -> PackedBatch:
    given = dict(PACKS[name])
    return pack(model, given.pop("numbers"), **given)


@pytest.mark.parametrize("name", BACKBONES)
def test_a_stack_is_one_graph_for_packs_of_any_lengths_and_has_eagers_numbers(
    one_rank_world: ProcessGroups, counter: CompileCounterWithBackend, name: str
) -> None:
    model = replace(config_of(name), num_layers=3)
    eager = network_of(model, one_rank_world)
    ours = network_of(model, one_rank_world, kernels="compile")
    for numbers in ([0, 1, 2], [2, 0], [1, 2, 3, 4, 5], [0, 1, 1, 0]):
        batch = pack(model, numbers, tail=len(numbers))
        expected, found = step(eager, model, batch), step(ours, model, batch)
        assert (found - expected).norm() <= RTOL * expected.norm()
        assert counter.frame_count == 1, numbers


@pytest.mark.parametrize("name", BACKBONES)
def test_every_kind_of_pack_has_eagers_numbers(
    one_rank_world: ProcessGroups, counter: CompileCounterWithBackend, name: str
) -> None:
    """A pack of one sample, a dense batch, a ragged pack and one with padding; under full recompute, too."""
    model = replace(config_of(name), num_layers=1)
    eager = network_of(model, one_rank_world)
    for recompute in ("none", "full"):
        ours = network_of(model, one_rank_world, kernels="compile", recompute=recompute)
        for kind in PACKS:
            batch = batch_of(model, kind)
            expected, found = step(eager, model, batch), step(ours, model, batch)
            assert (found - expected).norm() <= RTOL * expected.norm(), (recompute, kind)
    assert counter.frame_count == 3  # of one sample, dense, ragged; recomputed from the same


def test_dense_batches_of_other_sizes_are_a_second_graph_and_no_third(
    one_rank_world: ProcessGroups, counter: CompileCounterWithBackend
) -> None:
    model = config_of("dit")
    ours = network_of(model, one_rank_world, kernels="compile")
    counts = []
    for numbers in ([0, 0], [0, 0, 0], [1, 1, 1, 1], [2, 2]):
        step(ours, model, pack(model, numbers))
        counts.append(counter.frame_count)
    assert counts == [1, 2, 2, 2]
    with torch.no_grad():
        for numbers in ([0, 0], [1, 1, 1]):
            training_forward_step(EDM(), model, 7, 0)(iter([pack(model, numbers)]), ours)
    assert counter.frame_count == 3  # without gradients


def test_in_bf16_and_with_adapters_the_numbers_are_eagers(
    one_rank_world: ProcessGroups, counter: CompileCounterWithBackend
) -> None:
    base = replace(config_of("dit"), num_layers=2)
    for model, precision, rtol in (
        (base, "bf16", BF16_RTOL),
        (replace(base, lora=LoRAConfig(rank=2, targets=["*.linear_qkv", "*.linear_fc2"])), "fp32", RTOL),
    ):
        networks = [
            network_of(model, one_rank_world, kernels=kernels, precision=precision) for kernels in ("eager", "compile")
        ]
        for kind in ("padded", "dense"):
            expected, found = (step(network, model, batch_of(model, kind)) for network in networks)
            assert len(found) == len(expected) > 1
            assert (found - expected).norm() <= rtol * expected.norm(), kind
