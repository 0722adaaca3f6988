"""The search for the first non-finite tensor, on one rank."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dit.backends.process_groups import ProcessGroups
from dit.objectives.edm import EDM
from dit.parallel.build import build_model
from dit.parallel.dims import ParallelConfig
from dit.settings import TrainingConfig
from dit.step.forward_step import training_forward_step
from dit.step_checks.first_bad_tensor import MicroBatch, Probe
from tests.laws.backbones import config_of, pack
from tests.support.reference import join_layers


def probe_of(network: Any, groups: ProcessGroups) -> Probe:
    """Return a search with its hooks in the network."""
    state: Any = SimpleNamespace(chunks=[network], groups=groups)
    probe = Probe(state, EDM(), (1, 1))
    list(probe._hooks(0, network))
    return probe


@pytest.mark.parametrize("layer", ["layers.0.attention.linear_proj", "layers.0.mlp.linear_fc2"])
def test_a_bias_that_the_residual_adds_belongs_to_the_output_of_its_linear(
    one_rank_world: ProcessGroups, layer: str
) -> None:
    model = replace(config_of("dit"), num_layers=1)
    settings = TrainingConfig(precision="fp32")
    (network,) = build_model(model, ParallelConfig(data_parallel="ddp"), settings, one_rank_world)
    linear: Any = network.get_submodule(layer)
    linear.skip_bias_add = True  # as with fused kernels
    with torch.no_grad():
        linear.bias[0] = torch.nan
    probe, batch = probe_of(network, one_rank_world), pack(model, [0, 1])
    probe._forward[0] = MicroBatch(0, batch)
    with torch.no_grad():
        training_forward_step(EDM(), model, 7, 0)(iter([batch]), network)
    assert probe.first is not None
    assert (probe.first.phase, probe.first.layer) == ("forward", layer)


@pytest.mark.parametrize("join", [False, True])
def test_the_tokens_between_two_layers_are_checked(one_rank_world: ProcessGroups, join: bool) -> None:
    """A joined layer returns its last residual as two summands."""
    model, settings = replace(config_of("dit"), num_layers=2), TrainingConfig(precision="fp32")
    (network,) = build_model(model, ParallelConfig(data_parallel="ddp"), settings, one_rank_world)
    if join:
        join_layers(network)
    probe, batch = probe_of(network, one_rank_world), pack(model, [0])
    probe._forward[0] = MicroBatch(0, batch)
    prediction_TC, loss_of = training_forward_step(EDM(), model, 7, 0)(iter([batch]), network)
    loss_of(prediction_TC)[0].backward()
    assert {"forward layers.0", "backward layers.1"} <= set(probe.layers)


@pytest.mark.parametrize("join", [False, True])
def test_a_residual_that_overflows_belongs_to_its_layer(one_rank_world: ProcessGroups, join: bool) -> None:
    model, settings = replace(config_of("dit"), num_layers=2), TrainingConfig(precision="fp32")
    (network,) = build_model(model, ParallelConfig(data_parallel="ddp"), settings, one_rank_world)
    if join:
        join_layers(network)
    linear, modulation = map(network.get_submodule, ("layers.0.mlp.linear_fc2", "layers.0.modulation.linear"))
    with torch.no_grad():
        linear.bias.fill_(3e38)  # type: ignore[union-attr, operator]
        modulation.bias[-model.hidden_size :] = 10.0  # type: ignore[index, operator]
    probe, batch = probe_of(network, one_rank_world), pack(model, [0])
    probe._forward[0] = MicroBatch(0, batch)
    with torch.no_grad():
        training_forward_step(EDM(), model, 7, 0)(iter([batch]), network)
    assert probe.first is not None
    assert (probe.first.phase, probe.first.layer) == ("forward", "layers.0")
