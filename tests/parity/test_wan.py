"""Our packed, parallel-ready Wan computes what its report says: outputs, every gradient, sizes and work."""

from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from dit.errors import ConfigError
from dit.layers.positions import RotaryPositions
from dit.layout import SequenceLayout
from dit.models.transformer_config import CONDITION_FEATURES
from dit.models.wan.config import WanConfig
from dit.monitoring.flops import PackFlops
from dit.parallel.build import count_parameters
from tests.conftest import BuildModel
from tests.parity.costs import forward_flops, num_parameters
from tests.parity.cross_cases import check_against_reference
from tests.parity.reference_wan import WanReference
from tests.support.batches import DENSE, MIXED, Sample, draw, pack

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


@pytest.mark.parametrize("size", [128, 96, 20])
def test_the_head_is_split_as_in_wan(size: int):
    """Features of t, h, w: d - 4 (d // 6), 2 (d // 6), 2 (d // 6)."""
    assert tuple(2 * pairs for pairs in RotaryPositions(size).pairs()) == (
        size - 4 * (size // 6),
        2 * (size // 6),
        2 * (size // 6),
    )


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
    """The forward count is exact; training does not count the gradients of the inputs, which are not needed."""
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
