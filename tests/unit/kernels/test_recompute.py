"""Recompute changes which tensors are saved, but no result."""

from dataclasses import replace

import pytest
import torch

from dit.conditions import Conditions, per_sample, per_text_token
from dit.kernels.recompute import first_run, recompute_activations
from dit.layout import SequenceLayout
from dit.models.dit.config import DiTConfig
from dit.models.dit_cross.config import DiTCrossConfig
from dit.models.flux.config import FluxConfig
from dit.models.moviegen.config import MovieGenConfig
from dit.models.wan.config import WanConfig
from tests.support.batches import pack_of
from tests.support.reference import LiveBytes

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
GRIDS = ((1, 4, 4), (2, 2, 4), (1, 2, 2))


def a_pack(config):
    generator = torch.Generator().manual_seed(1)
    layout = SequenceLayout.from_lengths([t * h * w for t, h, w in GRIDS], multiple_of=8)
    latents_TC = torch.randn(layout.total_tokens, config.token_channels, generator=generator)
    conditions = Conditions(label=per_sample(torch.tensor([1, 4, 0])))
    if config.context_size:
        texts, dropped = SequenceLayout.from_lengths([3, 5, 2]), torch.tensor([False, True, False])
        conditions |= {"context": per_text_token(torch.randn(10, 12, generator=generator), texts, dropped)}
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
