"""Transformer layers under `training.kernels=compile` equal eager layers and need few graphs.

Graphs are counted and run with `aot_eager`, because generating code takes minutes.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from shutil import which
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.autograd.graph import saved_tensors_hooks

from dit.backends.process_groups import ProcessGroups
from dit.batch import PackedBatch
from dit.kernels import compiled
from dit.models.base import Backbone, ModelConfig
from dit.models.lora_config import LoRAConfig
from dit.objectives.base import Objective
from dit.objectives.edm import EDM
from dit.objectives.flow_matching import FlowMatching
from dit.parallel.build import build_model
from dit.parallel.dims import ParallelConfig
from dit.settings import TrainingConfig
from dit.step.forward_step import training_forward_step
from dit.verify.trial import disturb_constants
from tests.laws.backbones import config_of, pack
from tests.support.levels import leveled
from tests.unit.launch import pages

RTOL = 2e-6  # fp32: operators are fused or split
BF16_RTOL = 8e-3  # one ulp
BACKBONES = ("dit", "dit_cross", "moviegen", "wan")
PACKS: dict[str, dict[str, Any]] = {
    "one": {"numbers": [1]},
    "dense": {"numbers": [0, 0, 0]},
    "ragged": {"numbers": [0, 1, 2]},
    "padded": {"numbers": [1, 0, 2, 1], "multiple_of": 5, "tail": 3},
}


@pytest.fixture
def counter(monkeypatch: pytest.MonkeyPatch) -> Iterator[CompileCounterWithBackend]:
    torch._dynamo.reset()
    counts = CompileCounterWithBackend("aot_eager")
    monkeypatch.setattr(compiled, "BACKEND", counts)
    yield counts
    torch._dynamo.reset()
    torch._functorch.config.aggressive_recomputation = False


def network_of(model: ModelConfig, groups: ProcessGroups, **training: Any) -> Backbone:
    settings = TrainingConfig(**{"precision": "fp32", **training})
    (network,) = build_model(model, ParallelConfig(data_parallel="ddp"), settings, groups)
    disturb_constants([network], groups)
    return network


def step(network: Backbone, model: ModelConfig, batch: PackedBatch, objective: Objective | None = None) -> Tensor:
    """Return the loss of a training step and all gradients in one row."""
    network.zero_grad()
    prediction_TC, loss_of = training_forward_step(objective or EDM(), model, 7, 0)(iter([batch]), network)
    loss = loss_of(prediction_TC)[0]
    loss.backward()
    gradients = [p.grad.float().flatten() for p in network.parameters() if p.grad is not None]
    return torch.cat([loss.detach().float()[None], *gradients])


def batch_of(model: ModelConfig, name: str) -> PackedBatch:
    arguments = dict(PACKS[name])
    return pack(model, arguments.pop("numbers"), **arguments)


def same(result: Tensor, expected: Tensor, rtol: float = RTOL) -> bool:
    return bool((result - expected).norm() <= rtol * expected.norm())


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("dit", ["dense"]),
        pytest.param("dit_cross", ["padded"], marks=pytest.mark.slow),
        *(pytest.param(name, ["padded"], marks=pytest.mark.long) for name in BACKBONES if "dit" not in name),
        pytest.param("dit", PACKS, marks=pytest.mark.slow),
        pytest.param("wan", PACKS, marks=pytest.mark.long),
    ],
)
def test_every_kind_of_pack_has_the_numbers_of_eager_layers(
    one_rank_world: ProcessGroups, counter: CompileCounterWithBackend, name: str, kinds: Sequence[str]
) -> None:
    """Packs of one sample, dense batches, ragged packs and packs with padding."""
    model = replace(config_of(name), num_layers=1)
    eager, network = (network_of(model, one_rank_world, kernels=kernels) for kernels in ("eager", "compile"))
    for kind in kinds:
        batch = batch_of(model, kind)
        assert same(step(network, model, batch), step(eager, model, batch)), kind
    assert counter.frame_count > 0


@pytest.mark.slow
def test_samples_with_several_levels_have_the_numbers_of_eager_layers(
    one_rank_world: ProcessGroups, counter: CompileCounterWithBackend
) -> None:
    """Packs with other lengths and numbers of levels need no further graph."""
    model = replace(config_of("wan"), num_layers=1)
    eager, network = (network_of(model, one_rank_world, kernels=kernels) for kernels in ("eager", "compile"))
    counts = []
    for numbers in ([0, 1, 2, 3], [2, 1, 3], [1, 2, 3, 4, 5], [4, 0, 3, 1]):
        batch = leveled(pack(model, numbers, tail=2))
        assert batch.layout.levels is not None
        assert same(step(network, model, batch, FlowMatching()), step(eager, model, batch, FlowMatching())), numbers
        counts.append(counter.frame_count)
    assert counts[-1] == counts[-2] > 0


def test_packs_of_other_lengths_and_more_layers_need_no_further_graph(
    one_rank_world: ProcessGroups, counter: CompileCounterWithBackend
) -> None:
    """After two ragged packs with different numbers of samples and tokens, sizes are dynamic."""
    counts = []
    for layers, packs in ((1, ([0, 1, 2], [2, 0], [1, 2, 3, 4, 5])), (2, ([0, 1, 1, 0],))):
        model = replace(config_of("dit"), num_layers=layers)
        network, eager = (network_of(model, one_rank_world, kernels=k) for k in ("compile", "eager"))
        for numbers in packs:
            batch = pack(model, numbers, tail=len(numbers))
            assert same(step(network, model, batch), step(eager, model, batch)), numbers
            counts.append(counter.frame_count)
    assert counts[1:] == [counts[1]] * 3, counts


class Saved:
    """Sums the bytes that autograd saves, without parameters, counting each storage once."""

    def __init__(self, network: Backbone) -> None:
        self._parameters = {p.untyped_storage().data_ptr() for p in network.parameters()}
        self._tensors: list[Tensor] = []
        self.nbytes = 0

    def __call__(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._parameters | {x.untyped_storage().data_ptr() for x in self._tensors}:
            self._tensors.append(tensor)  # keeps its address from being reused
            self.nbytes += storage.nbytes()
        return tensor


def saved_by_a_layer(model: ModelConfig, batch: PackedBatch, groups: ProcessGroups, recompute: str) -> float:
    """Return the numbers that a compiled layer saves, in tokens x hidden size."""
    nbytes = []
    for layers in (1, 2):
        torch._dynamo.reset()  # saved tensors are chosen for all layers of the process
        network = network_of(replace(model, num_layers=layers), groups, kernels="compile", recompute=recompute)
        saved = Saved(network)
        with saved_tensors_hooks(saved, lambda tensor: tensor):
            prediction_TC, loss_of = training_forward_step(EDM(), model, 7, 0)(iter([batch]), network)
            loss_of(prediction_TC)
        nbytes.append(saved.nbytes)
    return (nbytes[1] - nbytes[0]) / 4 / batch.layout.total_tokens / model.hidden_size


MOST_SAVED = {"dit": 14, "dit_cross": 24, "moviegen": 21, "wan": 20}
"""In tokens x hidden size, at the sizes of these models: inputs of graphs, outputs of products, inputs and outputs of
attention."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name == "dit" else pytest.mark.long) for name in BACKBONES]
)
def test_a_compiled_layer_saves_less_under_selective_recompute(
    one_rank_world: ProcessGroups, counter: CompileCounterWithBackend, name: str
) -> None:
    model = config_of(name)
    batch = batch_of(model, "dense")
    plain, less = (saved_by_a_layer(model, batch, one_rank_world, choice) for choice in ("none", "selective"))
    assert less <= MOST_SAVED[name] < plain


@pytest.mark.parametrize(
    ("name", "recompute"),
    [("dit", "selective"), *(pytest.param("dit_cross", r, marks=pytest.mark.slow) for r in ("selective", "full"))],
)
def test_recomputed_layers_have_the_numbers_of_eager_layers(
    one_rank_world: ProcessGroups, counter: CompileCounterWithBackend, name: str, recompute: str
) -> None:
    model = replace(config_of(name), num_layers=1)
    eager = network_of(model, one_rank_world)
    network = network_of(model, one_rank_world, kernels="compile", recompute=recompute)
    batch = batch_of(model, "padded")
    assert same(step(network, model, batch), step(eager, model, batch))


@pytest.mark.slow
def test_experts_bf16_and_adapters_have_the_numbers_of_eager_layers(
    one_rank_world: ProcessGroups, counter: CompileCounterWithBackend
) -> None:
    base = replace(config_of("dit"), num_layers=1)
    for model, precision, rtol in (
        (base, "bf16", BF16_RTOL),
        (replace(base, num_experts=4), "fp32", RTOL),
        (replace(base, lora=LoRAConfig(rank=2, targets=["*.linear_qkv", "*.linear_fc2"])), "fp32", RTOL),
    ):
        eager, network = (
            network_of(model, one_rank_world, kernels=kernels, precision=precision) for kernels in ("eager", "compile")
        )
        batch = batch_of(model, "padded")
        expected = step(eager, model, batch)
        assert len(expected) > 1
        assert same(step(network, model, batch), expected, rtol), precision


@pytest.mark.slow
@pytest.mark.skipif(which("g++") is None, reason="needs a C++ compiler")
def test_generated_code_has_the_numbers_of_eager_layers(one_rank_world: ProcessGroups) -> None:
    """With the default compiler of `training.kernels=compile`."""
    torch._dynamo.reset()
    model = replace(config_of("dit_cross"), num_layers=1)
    eager, network = (network_of(model, one_rank_world, kernels=kernels) for kernels in ("eager", "compile"))
    batch = batch_of(model, "padded")
    assert same(step(network, model, batch), step(eager, model, batch))


def test_the_backbone_of_the_page_has_the_numbers_of_eager_layers(
    one_rank_world: ProcessGroups, counter: CompileCounterWithBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """docs/adding-a-backbone.md: a backbone outside this repository inherits the setting from the base config."""
    page = pages.shown_files(Path("docs/adding-a-backbone.md"))
    (tmp_path / "page_backbone.py").write_text(page["side_by_side.py"])
    monkeypatch.syspath_prepend(tmp_path)
    model = import_module("page_backbone").SideBySideConfig(hidden_size=64, num_layers=1, num_attention_heads=4)
    eager, network = (network_of(model, one_rank_world, kernels=kernels) for kernels in ("eager", "compile"))
    batch = batch_of(model, "padded")
    assert same(step(network, model, batch), step(eager, model, batch))
    assert counter.frame_count > 0
