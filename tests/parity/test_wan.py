"""Our packed, parallel-ready Wan computes what its report says: outputs, every gradient, sizes and work."""

from dataclasses import fields
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from dit.errors import ConfigError
from dit.layers.positions import RotaryPositions
from dit.layout import SequenceLayout
from dit.models.cross_config import CONDITION_FEATURES
from dit.models.wan.config import WanConfig
from dit.monitoring.flops import PackFlops
from dit.parallel.build import count_parameters
from tests.conftest import BuildModel
from tests.parity.costs import forward_flops, num_parameters
from tests.parity.cross_cases import (
    DENSE,
    MIXED,
    ROPE_FIELDS,
    STRETCH,
    Sample,
    check_against_reference,
    check_missing_text_is_dropped_text,
    check_padding_is_never_read,
    check_setting_acts,
    draw,
    pack,
)
from tests.parity.reference_wan import WanReference

SIZES: dict[str, Any] = {
    **{"hidden_size": 48, "num_layers": 2, "num_attention_heads": 4, "in_channels": 3},
    **{"context_size": 10, "ffn_hidden_size": 56},
}
VARIANTS: dict[str, dict] = {
    "default": {},
    "grouped": {"num_query_groups": 2, "num_classes": 5, "fps_conditioning": True, "size_conditioning": True},
    "sincos_3d": {"position_embedding": "sincos_3d"},
    "plain_heads": {"qk_layernorm": False, "out_channels": 5, "patch_temporal": 2},
    "constants": {"layernorm_epsilon": 1e-2, "time_scale": 30.0, "rope_theta": 500.0, "rope_factors": [2.0, 1.5, 1.0]},
    "rope_linear": {"rope_factors": [2.0, 1.5, 3.0], "rope_scaling": "linear"},
}


def config(**changes: object) -> WanConfig:
    made = WanConfig(**{**SIZES, **changes})
    made.validate()
    return made


@pytest.mark.parametrize("name", VARIANTS)
def test_mixed_pack_is_the_formulas(build_model: BuildModel, name: str):
    """Images and clips of one pack differ in time, length and text, and none feels another."""
    model_config = config(**VARIANTS[name])
    model = build_model(model_config, perturb=0.1)
    check_against_reference(model, model_config, MIXED, kind=WanReference)


@pytest.mark.parametrize(
    "padding", [{"multiple_of": 8}, {"multiple_of": 4, "tail": 12, "context_multiple_of": 4}], ids=["rows", "all"]
)
def test_padded_pack_is_the_formulas(build_model: BuildModel, padding: dict):
    model_config = config()
    model = build_model(model_config, perturb=0.1)
    check_against_reference(model, model_config, MIXED, kind=WanReference, **padding)


def test_dense_batch_is_the_formulas(build_model: BuildModel):
    model_config, samples = config(), [*DENSE, Sample((2, 2, 3), None)]
    model = build_model(model_config, perturb=0.1)
    check_against_reference(model, model_config, samples, kind=WanReference)


def test_blocks_start_as_the_identity(build_model: BuildModel):
    """At initialisation no sub-layer speaks: neither the gated ones nor the cross-attention, which has no gate."""
    model_config = config()
    model, batch = build_model(model_config), pack(MIXED, model_config, multiple_of=4)
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(batch.layout.total_tokens, 48, generator=generator)
    shared = model.modulation(torch.randn(len(MIXED), 48, generator=generator))
    context = torch.randn(batch.conditions["context"].layout.total_tokens, 48, generator=generator)
    rotation = model.rotary(batch.positions_T3)
    for layer in model.layers.values():
        assert torch.equal(layer(x, shared, context, batch.layout, batch.conditions["context"].layout, rotation), x)
    out = model(*draw(batch), batch)
    assert torch.equal(out, torch.zeros_like(out))


@pytest.mark.parametrize("garbage", [float("nan"), float("inf"), 1e30])
def test_padding_rows_never_reach_real_ones(build_model: BuildModel, garbage: float):
    check_padding_is_never_read(build_model, config(), garbage)


def test_missing_text_is_the_dropped_text(build_model: BuildModel):
    model_config = config()
    check_missing_text_is_dropped_text(build_model(model_config, perturb=0.1), model_config)


@pytest.mark.parametrize("size", [128, 96, 20])
def test_the_head_is_split_as_in_wan(size: int):
    """Features of t, h, w: d - 4 (d // 6), 2 (d // 6), 2 (d // 6)."""
    assert tuple(2 * pairs for pairs in RotaryPositions(size).pairs()) == (
        size - 4 * (size // 6),
        2 * (size // 6),
        2 * (size // 6),
    )


OTHER: dict[str, tuple[Any, Any]] = {
    # field: (another value, what shows it in the built model)
    "in_channels": (6, lambda m: m.embed.linear.weight.shape[1]),
    "patch_spatial": (3, lambda m: m.embed.linear.weight.shape[1]),
    "patch_temporal": (2, lambda m: m.embed.linear.weight.shape[1]),
    "num_classes": (9, lambda m: m.conditioner.label is None),
    "context_size": (20, lambda m: m.text_projection.linear_1.weight.shape[1]),
    "hidden_size": (96, lambda m: m.embed.linear.weight.shape[0]),
    "num_layers": (3, lambda m: len(m.layers)),
    "num_attention_heads": (8, lambda m: m.layers["1"].attention.local_heads),
    "num_query_groups": (
        2,
        lambda m: (m.layers["1"].attention.k_layernorm.width, m.layers["1"].cross_attention.local_groups),
    ),
    "ffn_hidden_size": (80, lambda m: m.layers["1"].mlp.linear_fc1.weight.shape[0]),
    "out_channels": (8, lambda m: m.head.linear.weight.shape[0]),
    "qk_layernorm": (False, lambda m: [hasattr(m.layers["1"].attention.q_layernorm, "weight")]),
    "layernorm_epsilon": (
        1e-3,
        lambda m: {m.layers["1"].modulation.eps, m.layers["1"].cross_norm.eps, m.head.eps},
    ),
    "fps_conditioning": (True, lambda m: m.conditioner.fps is None),
    "size_conditioning": (True, lambda m: m.conditioner.size is None),
    "rope_theta": (50.0, lambda m: m.rotary.theta),
    "rope_scaling": ("linear", lambda m: m.rotary.scaling),
    "rope_factors": ([2.0, 1.0, 1.0], lambda m: m.rotary.factors),
    "position_embedding": ("sincos_3d", lambda m: m.rotary is None),
    "time_scale": (7.0, lambda m: m.conditioner.time.time_scale),
}


def test_every_field_has_a_row():
    """The training step alone reads the shares of dropped conditions."""
    assert set(OTHER) | {"class_dropout", "context_dropout"} == {field.name for field in fields(WanConfig)}


@pytest.mark.parametrize("name", OTHER)
def test_field_reaches_the_model(build_model: BuildModel, name: str):
    """Another value shows in the model that is built from it, and the counted parameters follow."""
    value, show = OTHER[name]
    base = {"rope_factors": STRETCH} if name == "rope_scaling" else {}
    seen = []
    for made in (config(**base), config(**{**base, name: value})):
        model = build_model(made)
        seen.append(show(model))
        assert num_parameters(made) == sum(p.numel() for p in model.parameters())
    assert seen[0] != seen[1]


@pytest.mark.parametrize("name", ROPE_FIELDS)
def test_rotary_settings_change_the_prediction(build_model: BuildModel, name: str):
    check_setting_acts(build_model, config(rope_factors=STRETCH), name, ROPE_FIELDS[name])


NULL = 4096  # the null text
WAN_14B = WanConfig(hidden_size=5120, num_layers=40, num_attention_heads=40, ffn_hidden_size=13824)
NAMED = {
    # As published: 1.3B and 14B, of which the checkpoints count 1,418,996,800 and 14,288,491,584.
    "1.3B": (WanConfig(), 1_418_996_800 + NULL),
    "14B": (WAN_14B, 14_288_491_584 + NULL),
}


@pytest.mark.usefixtures("one_rank_world")
@pytest.mark.parametrize("name", NAMED)
def test_named_sizes_have_their_parameters(name: str):
    made, ours = NAMED[name]
    assert count_parameters(made) == ours
    assert num_parameters(made) == ours


def test_the_published_row_follows_from_the_config():
    """37,440 tokens with 512 of text: 165.0 GFLOP per token, so 325.8 TFLOP/s are 1974 tokens/s."""
    layouts = (SequenceLayout.from_lengths([tokens]) for tokens in (37_440, 512))
    work = 3 * forward_flops(WAN_14B, next(layouts), (), next(layouts)) / 37_440
    assert work == pytest.approx(165.0e9, rel=0.005)
    assert 325.8e12 / work == pytest.approx(1974, rel=0.005)


@pytest.mark.parametrize("samples", [DENSE, MIXED], ids=["dense", "mixed"])
@pytest.mark.parametrize("changes", [{}, {"num_query_groups": 2, "size_conditioning": True}], ids=["wan", "grouped"])
def test_flops_are_those_of_torch(build_model: BuildModel, samples: list[Sample], changes: dict):
    """The forward count is exact; training differs by the gradients nobody needs, those of the network's inputs."""
    made = config(**changes)
    model, batch = build_model(made, perturb=0.1), pack(samples, made, multiple_of=8)
    inputs, time = draw(batch)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        out = model(inputs, time, batch)
        forward = counter.get_total_flops()
        out.sum().backward()
    shape, flops = (batch.layout, batch.grids, batch.conditions["context"].layout), PackFlops(made)
    assert forward == flops.forward(*shape, convention="hardware") == forward_flops(made, *shape, padding=True)
    numbers = 1 + 3 * made.size_conditioning
    unneeded = len(inputs) * made.token_channels + len(samples) * CONDITION_FEATURES * numbers
    exact = flops.training(*shape, convention="hardware") - 2 * unneeded * made.hidden_size
    assert counter.get_total_flops() == exact


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"hidden_size": 50}, ["hidden_size=50", "num_attention_heads=4"]),
        ({"num_attention_heads": 12}, ["4 features", "rope_3d"]),
        ({"context_size": None}, ["context_size=None"]),
        ({"rope_theta": 1.0}, ["rope_theta=1.0"]),
        ({"rope_theta": 50.0, "position_embedding": "sincos_3d"}, ["rope_theta=50.0 has no effect", "use 'rope_3d'"]),
        ({"position_embedding": "sincos_2d"}, ["position_embedding='sincos_2d'", "'rope_3d', 'sincos_3d'"]),
        ({"hidden_size": 42, "num_attention_heads": 6, "position_embedding": "sincos_3d"}, ["hidden_size=42"]),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else "",
)
def test_impossible_sizes_are_named_with_their_numbers(changes: dict, said: list[str]):
    with pytest.raises(ConfigError) as caught:
        config(**changes)
    assert all(text in str(caught.value) for text in said)
