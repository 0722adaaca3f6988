"""Recompute changes which tensors are saved, but no result."""

from dataclasses import replace

import pytest
import torch

from dit.backends.linears import RowLinear
from dit.conditions import Conditions, Entry
from dit.kernels.choice import Implementation
from dit.kernels.layer_kernels import EAGER, PendingResidual
from dit.kernels.recompute import first_run, recompute_activations
from dit.kernels.resolve import LAYERS
from dit.layers.adaln import SublayerModulation
from dit.layout import CLEAN, SequenceLayout
from dit.levels import with_levels
from dit.models.dit.config import DiTConfig
from dit.models.dit_cross.config import DiTCrossConfig
from dit.models.flux.config import FluxConfig
from dit.models.moviegen.config import MovieGenConfig
from dit.models.routing_config import RoutingConfig
from dit.models.wan.config import WanConfig
from dit.parallel.build import build_model as build_chunks
from dit.parallel.dims import ParallelConfig
from dit.settings import TrainingConfig
from tests.support.batches import pack_of
from tests.support.reference import LiveBytes, join_layers

DIT = DiTConfig(hidden_size=32, num_layers=3, num_attention_heads=4, num_classes=5)
EXPERTS = DiTConfig(
    hidden_size=32, num_layers=2, num_attention_heads=4, num_classes=5, num_experts=4, moe_ffn_hidden_size=48
)
VALUES = replace(DIT, value_residual=True)
TEXT = {"hidden_size": 32, "num_layers": 2, "num_attention_heads": 4, "in_channels": 4, "context_size": 12}
STREAMS = {**TEXT, "num_joint_layers": 1, "num_single_layers": 1, "pooled_size": 6, "rope_axes": [2, 4, 2]}
FLUX = FluxConfig(**{name: size for name, size in STREAMS.items() if name != "num_layers"}, ffn_hidden_size=48)
MODELS = [
    *(DIT, EXPERTS, DiTCrossConfig(**TEXT), MovieGenConfig(**TEXT, num_query_groups=2)),
    *(FLUX, WanConfig(**TEXT, ffn_hidden_size=48), VALUES),
]
JOINED = {
    "DiT": DIT,
    "experts": EXPERTS,
    "value residual": VALUES,
    "cross-attention": DiTCrossConfig(**TEXT),
    "class tokens": replace(DIT, class_tokens=[2, 1]),
    "routing": replace(DIT, routing=RoutingConfig(first_layers=1, last_layers=1)),
    "wide head": replace(DIT, wide_head=[2, 48, 4]),
}
"""Models whose layers can be joined."""
GRIDS = ((1, 4, 4), (2, 2, 4), (1, 2, 2))


def a_pack(config):
    generator = torch.Generator().manual_seed(1)
    layout = SequenceLayout.from_lengths([t * h * w for t, h, w in GRIDS], multiple_of=8)
    latents_TC = torch.randn(layout.total_tokens, config.token_channels, generator=generator)
    conditions = Conditions(label=Entry("sample", torch.tensor([1, 4, 0])))
    if config.context_size:
        texts, dropped = SequenceLayout.from_lengths([3, 5, 2]), torch.tensor([False, True, False])
        conditions |= {"context": Entry("text", torch.randn(10, 12, generator=generator), texts, dropped)}
    return pack_of(layout, latents_TC, GRIDS, conditions=conditions), torch.tensor([0.2, 0.5, 0.9])


def forward_and_backward(build_model, config, choice, layers=None):
    """Return loss, gradients, and the bytes allocated between the passes."""
    model = build_model(config, perturb=0.1)
    for layer in list(model.units())[:layers]:
        recompute_activations(layer, choice)
    batch, time_S = a_pack(config)
    with LiveBytes() as live:
        out_TC = model(batch.latents_TC, time_S, batch)
        loss = out_TC.square().sum()
        saved = live.total()
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters()}, saved


@pytest.mark.parametrize("choice", ["selective", "full"])
@pytest.mark.parametrize("config", MODELS, ids=lambda c: type(c).__name__ + ("+experts" if c is EXPERTS else ""))
def test_recompute_changes_no_number_and_saves_fewer_activations(build_model, config, choice):
    loss, gradients, saved = forward_and_backward(build_model, config, "none")
    again, others, less = forward_and_backward(build_model, config, choice)
    assert again == loss
    for name, expected in gradients.items():
        assert expected.norm() > 0, f"{name} has no gradient, so the comparison shows nothing"
        # Three gradients may be summed in another order.
        assert (others[name] - expected).norm() <= 1e-6 * expected.norm(), name
    assert less < saved


@pytest.mark.parametrize("choice", ["none", "selective"])
@pytest.mark.parametrize("config", JOINED, ids=str)
def test_joined_layers_change_no_number_and_save_no_more(build_model, config, choice):
    kinds = []

    def build(join):
        def build_network(*args, **kwargs):
            network = build_model(*args, **kwargs)
            for module in network.modules():
                if isinstance(module, RowLinear):
                    module.skip_bias_add = True  # as with fused kernels
            for layer in network.units():
                layer.register_forward_hook(
                    lambda _, args, out: kinds.append(type(out[0] if type(out) is tuple else out))
                )
            return join_layers(network) if join else network

        return build_network

    loss, gradients, saved = forward_and_backward(build(False), JOINED[config], choice)
    assert set(kinds) == {torch.Tensor}
    kinds.clear()
    again, others, as_much = forward_and_backward(build(True), JOINED[config], choice)
    assert set(kinds) == {PendingResidual}
    assert again == loss
    for name, expected in gradients.items():
        assert torch.equal(others[name], expected), name
    assert as_much <= saved


def test_a_pending_residual_of_another_layout_is_added_before_the_norm():
    kernels = replace(EAGER, joins_layers=True)
    a, b = SequenceLayout.from_lengths([4, 2]), SequenceLayout.from_lengths([2, 3, 1])
    x_TD, y_TD = torch.randn(2, 6, 8)
    first, following = (SublayerModulation(*torch.randn(3, s, 8), 1e-6, kernels) for s in (2, 3))
    pending = first.pending_residual(x_TD, y_TD, a)
    assert isinstance(pending, PendingResidual)
    expected = following.norm_modulate(first.gated_residual(x_TD, y_TD, a), b)
    assert all(map(torch.equal, following.norm_modulate(pending, b), expected))


def test_joined_layers_with_several_noise_levels_change_no_number(build_model):
    """The gate of a pending residual has a row for each level."""
    results = []
    for join in (False, True):
        network = build_model(DIT, perturb=0.1)
        network = join_layers(network) if join else network
        batch, _ = a_pack(DIT)
        segments = [[(4, CLEAN), (12, 0)], [], [(1, 0), (3, 1)]]
        batch = replace(batch, layout=with_levels(batch.layout, segments))
        out_TC = network(batch.latents_TC, torch.linspace(0.1, 0.9, 5), batch)
        out_TC.square().sum().backward()
        results.append([out_TC.detach(), *(p.grad for p in network.parameters())])
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize(
    ("recompute", "data_parallel", "joins"),
    [("none", "ddp", True), ("selective", "ddp", True), ("full", "ddp", False), ("none", "fsdp", False)],
)
def test_layers_join_unless_their_inputs_are_saved_or_their_parameters_freed(
    one_rank_world, monkeypatch, recompute, data_parallel, joins
):
    fused = Implementation("eager", lambda: replace(EAGER, joins_layers=True))
    monkeypatch.setattr("dit.parallel.build.LAYERS", replace(LAYERS, implementations=(fused,)))
    training, parallel = (
        TrainingConfig(precision="fp32", recompute=recompute),
        ParallelConfig(data_parallel=data_parallel),
    )
    (network,) = build_chunks(DIT, parallel, training, one_rank_world)
    assert [layer.modulation.kernels.joins_layers for layer in network.units()] == [joins] * DIT.num_layers


def test_selective_recompute_saves_neither_modulated_norms_nor_activations(build_model):
    _, _, saved = forward_and_backward(build_model, DIT, "none")
    _, _, less = forward_and_backward(build_model, DIT, "selective")
    rows, h, f = a_pack(DIT)[0].layout.total_tokens, DIT.hidden_size, DIT.ffn_size
    assert saved - less >= DIT.num_layers * 4 * rows * (2 * h + f)


def test_full_recompute_saves_only_the_input_of_a_layer(build_model):
    """Under full recompute, each further layer only costs its input and its modulation."""
    _, _, all_of_three = forward_and_backward(build_model, DIT, "full")
    _, _, two_of_three = forward_and_backward(build_model, DIT, "full", layers=2)
    _, _, none_of_three = forward_and_backward(build_model, DIT, "none")
    assert all_of_three < two_of_three < none_of_three
    per_layer = [(none_of_three - two_of_three) / 2, two_of_three - all_of_three]
    assert per_layer[0] == pytest.approx(per_layer[1], rel=0.1)
    rows = a_pack(DIT)[0].layout.total_tokens
    ends = none_of_three - 3 * per_layer[0]  # including the input of each layer
    assert ends < all_of_three + 4 * rows * DIT.hidden_size


def test_a_recomputation_is_detected(build_model):
    seen = []

    class Layer(torch.nn.Module):
        def forward(self, x):
            seen.append(first_run())
            return x.sin().exp()

    layer = Layer()
    recompute_activations(layer, "full")
    layer(torch.ones(3, requires_grad=True)).sum().backward()
    assert seen == [True, False]


@pytest.mark.parametrize("choice", ["none", "selective", "full"])
def test_experts_are_counted_once(build_model, choice):
    model = build_model(EXPERTS, perturb=0.1)
    for layer in model.units():
        recompute_activations(layer, choice)
    batch, time_S = a_pack(EXPERTS)
    model(batch.latents_TC, time_S, batch).sum().backward()
    tokens = [layer.mlp.load.take(torch.device("cpu"))[-3].item() for layer in model.units()]
    assert tokens == [batch.layout.valid_tokens] * EXPERTS.num_layers
