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
from torch.autograd.graph import saved_tensors_hooks
from torch.profiler import ProfilerActivity, profile

from dit.backends.process_groups import ProcessGroups
from dit.batch import PackedBatch
from dit.kernels import compiled
from dit.kernels.graph_layout import graph_layout
from dit.layout import SequenceLayout
from dit.models.base import Backbone, ModelConfig
from dit.models.lora_config import LoRAConfig
from dit.objectives.edm import EDM
from dit.parallel.build import build_model
from dit.parallel.dims import ParallelConfig
from dit.settings import TrainingConfig
from dit.step.forward_step import training_forward_step
from dit.verify.trial import disturb_constants
from tests.laws.backbones import config_of, pack

RTOL = 2e-6  # fp32: operators are fused or split, and per-sample gradients are one matrix product
BF16_RTOL = 8e-3  # one ulp: gradients per sample are rounded once, not per token
BACKBONES = ("dit", "dit_cross", "moviegen", "wan")
PACKS: dict[str, dict[str, Any]] = {
    "one": {"numbers": [1]},
    "dense": {"numbers": [0, 0, 0]},
    "ragged": {"numbers": [0, 1, 2]},
    "padded": {"numbers": [1, 0, 2, 1], "multiple_of": 5, "tail": 3},
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
    """A pack of one sample, a dense batch, a ragged pack and one with padding; under each recompute, too."""
    model = replace(config_of(name), num_layers=1)
    eager = network_of(model, one_rank_world)
    for recompute in ("none", "full", "selective"):
        ours = network_of(model, one_rank_world, kernels="compile", recompute=recompute)
        for kind in PACKS:
            batch = batch_of(model, kind)
            expected, found = step(eager, model, batch), step(ours, model, batch)
            assert (found - expected).norm() <= RTOL * expected.norm(), (recompute, kind)
    assert (
        counter.frame_count == 6
    )  # of one sample, dense, ragged, recomputed from the same; and selective ones of each


class Saved:
    """Sums the bytes that autograd saves, parameters left out, each storage once."""

    def __init__(self, network: Backbone) -> None:
        self._parameters = {p.untyped_storage().data_ptr() for p in network.parameters()}
        self._tensors: list[Tensor] = []
        self.nbytes = 0

    def __call__(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._parameters | {x.untyped_storage().data_ptr() for x in self._tensors}:
            self._tensors.append(tensor)  # so that no other storage gets its address
            self.nbytes += storage.nbytes()
        return tensor


def saved_by_a_layer(model: ModelConfig, batch: PackedBatch, groups: ProcessGroups, recompute: str) -> float:
    """Return the saved numbers of a compiled layer, in tokens x hidden size."""
    found = []
    for layers in (1, 3):
        network = network_of(replace(model, num_layers=layers), groups, kernels="compile", recompute=recompute)
        saved = Saved(network)
        with saved_tensors_hooks(saved, lambda tensor: tensor):
            prediction_TC, loss_of = training_forward_step(EDM(), model, 7, 0)(iter([batch]), network)
            loss_of(prediction_TC)
        found.append(saved.nbytes)
    return (found[1] - found[0]) / 2 / 4 / batch.layout.total_tokens / model.hidden_size


MOST_SAVED = {"dit": 13, "dit_cross": 18, "moviegen": 14, "wan": 16}
"""Of tokens x hidden size, at the sizes of these models: outputs of products and of attention, and the input."""


@pytest.mark.parametrize("name", BACKBONES)
def test_a_compiled_layer_saves_less_under_selective_recompute(
    one_rank_world: ProcessGroups, counter: CompileCounterWithBackend, name: str
) -> None:
    model = config_of(name)
    for kind in ("dense", "padded"):
        batch = batch_of(model, kind)
        plain, less = (saved_by_a_layer(model, batch, one_rank_world, choice) for choice in ("none", "selective"))
        assert less <= MOST_SAVED[name] < plain, kind


@pytest.mark.parametrize("rows", [None, [7, 0, 3, 8, 5, 9]], ids=["all", "some"])
def test_both_sums_over_the_tokens_of_samples_are_the_gradient_of_their_copies(rows: Any) -> None:
    """One matrix product, as on GPUs, and the sum of CPUs; also of a rank that has some tokens in any order."""
    layout = SequenceLayout.from_lengths([3, 1, 4], multiple_of=2, total_tokens=12)
    layout = layout if rows is None else layout.select(torch.tensor(rows))
    of_cpu = graph_layout(layout, torch.float64)
    one_hot_ST = (layout.segment_ids_T == torch.arange(3)[:, None]).double()
    of_gpu = replace(of_cpu, one_hot_ST=one_hot_ST, order_T=None, starts_S=None)
    x_SD = torch.randn(3, 5, dtype=torch.float64).requires_grad_()
    weights_TD = torch.randn(layout.num_local_tokens, 5, dtype=torch.float64)
    expected = torch.zeros(3, 5, dtype=torch.float64).index_add(0, layout.segment_ids_T, weights_TD)
    for of in (of_cpu, of_gpu):
        copies_TD, _ = of.broadcast(x_SD)
        assert torch.equal(copies_TD, x_SD[layout.segment_ids_T])
        (grad_SD,) = torch.autograd.grad(copies_TD, x_SD, weights_TD)
        torch.testing.assert_close(grad_SD, expected)


def test_selective_recompute_of_a_compiled_layer_repeats_no_product(
    one_rank_world: ProcessGroups, counter: CompileCounterWithBackend
) -> None:
    """Nor attention; norms and activations (GELU is a sigmoid here) run twice. Two of three layers: two graphs."""
    model = replace(config_of("dit"), num_layers=3)
    counts = []
    for training in ({}, {"recompute": "selective"}, {"recompute": "selective", "recompute_layers": 2}):
        before = counter.frame_count
        network = network_of(model, one_rank_world, kernels="compile", **training)
        step(network, model, batch_of(model, "padded"))
        with profile(activities=[ProfilerActivity.CPU]) as run:
            step(network, model, batch_of(model, "padded"))
        calls = {event.key: event.count for event in run.key_averages()}
        products = sum(calls.get(f"aten::{name}", 0) for name in ("mm", "addmm", "bmm"))
        attention = calls["aten::_softmax"], calls["aten::_softmax_backward_data"]  # torch 2.15 does not name our ops
        counts.append((products, attention, calls["aten::sigmoid"], counter.frame_count - before))
    products, attention, *_ = counts[0]
    assert attention == (6, 6)  # two groups of segments in each layer
    assert counts == [
        (products, attention, 3, 1),
        (products, attention, 6, 1),
        (products, attention, 5, 0),
    ]


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
