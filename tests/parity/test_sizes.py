"""Sizes of the backbones with texts: parameter and FLOP counts from the config, and errors for impossible sizes."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import fiddle
import pytest
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from dit.errors import ConfigError
from dit.layout import SequenceLayout
from dit.models.dit.config import DiTConfig
from dit.models.dit_cross.config import DiTCrossConfig
from dit.models.flux.config import FluxConfig
from dit.models.moviegen.config import MovieGenConfig
from dit.models.prx.config import PRXConfig
from dit.models.sana.config import SanaConfig
from dit.models.stdit.config import STDiTConfig
from dit.models.transformer_config import CONDITION_FEATURES
from dit.models.wan.config import WanConfig
from dit.monitoring.flops import PackFlops
from dit.parallel.build import count_parameters
from recipes.models import dit_dh_xl, dit_xl, lightningdit_xl, rit_xl, sr_dit_b1
from tests.conftest import BuildModel
from tests.parity.test_formulas import small
from tests.support.batches import DENSE, MIXED, STRETCH, Sample, draw, pack

SMALL: dict[str, Any] = {
    **{"hidden_size": 48, "num_layers": 2, "num_attention_heads": 4, "in_channels": 4, "num_classes": 5},
    **{"context_size": 10, "position_embedding": "rope_3d", "rope_factors": STRETCH},
}
BASES: dict[str, Any] = {
    "dit_cross": DiTCrossConfig(**SMALL),
    "moviegen": MovieGenConfig(**SMALL, num_query_groups=4, ffn_hidden_size=96),
    "stdit": STDiTConfig(**{**SMALL, "in_channels": STDiTConfig.in_channels}),
    "flux": small("flux"),
    "wan": small("wan"),
    "sana": small("sana"),
}


@pytest.mark.parametrize(
    ("changes", "tables"),
    [
        ({"position_embedding": "learned_3d", "max_grid": [7, 3, 2]}, [7, 3, 2]),
        ({"position_embedding": "sincos_3d"}, None),
    ],
    ids=str,
)
def test_position_tables_have_the_size_of_max_grid(build_model: BuildModel, changes: dict, tables: list | None) -> None:
    config = replace(BASES["moviegen"], rope_factors=None, **changes)
    config.validate()
    model = build_model(config)
    assert model.rotary is None
    axes = model.positions and [len(getattr(model.positions, axis)) for axis in "thw"]
    assert axes == tables


def cross(layers: int, heads: int, hidden_size: int, **changes: Any) -> DiTCrossConfig:
    return DiTCrossConfig(hidden_size=hidden_size, num_layers=layers, num_attention_heads=heads, **changes)


def movie(layers: int, heads: int, hidden_size: int, **changes: Any) -> MovieGenConfig:
    return MovieGenConfig(hidden_size=hidden_size, num_layers=layers, num_attention_heads=heads, **changes)


def segments(pairs: int, heads: int, hidden_size: int, **changes: Any) -> STDiTConfig:
    return STDiTConfig(hidden_size=hidden_size, num_layers=2 * pairs, num_attention_heads=heads, **changes)


EC_1B = {"num_experts": 64, "moe_ffn_hidden_size": 1024, "moe_capacity_factor": 8.0}
JIT_B16 = DiTConfig(
    **{"in_channels": 3, "patch_spatial": 16, "hidden_size": 768, "num_attention_heads": 12, "ffn_hidden_size": 2048},
    **{"bottleneck_size": 128, "class_tokens": [32, 4], "activation": "swiglu", "rms_norm": True, "qk_layernorm": True},
    num_classes=1000,
)
WAN_14B = WanConfig(hidden_size=5120, num_layers=40, num_attention_heads=40, ffn_hidden_size=13824)
T5, FLUX_NULLS, SANA_NULL = 4096, 4096 + 768, 2304
"""Elements of the null texts, used for guidance without a text encoder; public checkpoints do not have them."""
NAMED: dict[str, tuple[Any, int, float]] = {
    # Our count and the published one (weights of NeMo's configurations). Ours are larger by the modulated head (2 h^2)
    # and by a frame-rate embedder of the full width (h^2 more than NeMo's padded embedder).
    "DiT-S": (cross(12, 6, 384), 50_977_472, 50.6e6),
    "DiT-B": (cross(12, 12, 768), 184_526_144, 183.1e6),
    "DiT-L": (cross(24, 16, 1024), 634_009_664, 631.5e6),
    "DiT-XL": (cross(28, 16, 1152), 926_778_176, 923.7e6),
    "DiT-XL low rank": (cross(28, 16, 1152, adaln_lora_rank=256), 674_923_328, 671.8e6),
    "DiT-7B": (cross(32, 24, 3072), 7_186_847_808, 7166.5e6),
    "DiT-28B": (cross(32, 48, 6144), 28_340_710_464, 28.2e9),
    "MovieGen-1B": (MovieGenConfig(), 1_540_965_440, 1.54e9),
    "MovieGen-3B": (movie(28, 24, 3072), 5_022_135_360, 5.01e9),
    "MovieGen-5B": (movie(32, 24, 3072), 5_735_205_952, 5.72e9),
    "MovieGen-30B": (movie(48, 48, 6144, ffn_hidden_size=16384), 33_438_364_736, 33.4e9),
    "EC-DiT-1B": (MovieGenConfig(**EC_1B), 7_180_207_168, 7.18e9),
    # The published counts are of pairs of a spatial and a temporal layer, with 16 h^2 weights per layer.
    "ST-DiT-S": (segments(12, 6, 384), 58_740_368, 58.7e6),
    "ST-DiT-XL": (segments(28, 16, 1152), 1_204_095_632, 1.2e9),
    "ST-DiT-3B": (segments(24, 16, 2048, ffn_hidden_size=8192), 3_264_109_584, 3.25e9),
    "ST-DiT-3B Open-Sora": (segments(28, 26, 1872), 3_176_439_872, 3.17e9),
    "JiT-B/16": (JIT_B16, 131_123_712, 131e6),
    "SiT-XL/2": (fiddle.build(dit_xl()), 674_816_272, 675e6),
    "LightningDiT-XL": (fiddle.build(lightningdit_xl()), 674_961_824, 675e6),
    # The published 140 M include the projection of REPA, which has 7.3 M.
    "SR-DiT-B/1": (fiddle.build(sr_dit_b1()), 132_712_747, 140e6 - 7.3e6),
    "RiT-XL": (fiddle.build(rit_xl()), 676_702_656, 676e6),
    # The published head has narrower MLPs.
    "DiT-DH-XL": (fiddle.build(dit_dh_xl()), 838_614_272, 839e6),
    # Public checkpoints.
    "FLUX.1-dev": (FluxConfig(guidance=3.5), 11_901_408_320 + FLUX_NULLS, 11.9e9),
    "FLUX.1-schnell": (FluxConfig(), 11_891_178_560 + FLUX_NULLS, 11.9e9),
    "FLUX.1 of two blocks": (FluxConfig(num_joint_layers=1, num_single_layers=1), 535_323_200, 535e6),
    "Wan 1.3B": (WanConfig(), 1_418_996_800 + T5, 1.42e9),
    "Wan 14B": (WAN_14B, 14_288_491_584 + T5, 14.3e9),
    "PRX": (PRXConfig(null_text="empty"), 1_170_691_648, 1.17e9),
    "SANA 1.6B": (SanaConfig(), 1_604_462_752 + SANA_NULL, 1.6e9),
}


@pytest.mark.usefixtures("one_rank_world")
@pytest.mark.parametrize("name", NAMED)
def test_named_sizes_have_their_parameters(name: str) -> None:
    config, actual, published = NAMED[name]
    assert count_parameters(config) == actual
    assert actual == pytest.approx(published, rel=0.01)


COUNTED: dict[str, tuple[str, dict[str, Any]]] = {
    "dit_cross": ("dit_cross", {}),
    "low_rank": ("dit_cross", {"adaln_lora_rank": 6, "size_conditioning": True}),
    "moviegen": ("moviegen", {}),
    "grouped": ("moviegen", {"num_query_groups": 2}),
    "experts": ("moviegen", {"num_experts": 4, "moe_ffn_hidden_size": 24, "moe_capacity_factor": 1.5}),
    "alternating": ("stdit", {}),
    "all_in_one": ("stdit", {"layer_pattern": ["spatial+full+temporal"], "num_query_groups": 2}),
    "pixart": (
        "stdit",
        {"layer_pattern": ["full"], "size_conditioning": True, "add_bias": False, "ffn_hidden_size": 100},
    ),
    "flux": ("flux", {}),
    "guidance": ("flux", {"guidance": 3.5}),
    "wan": ("wan", {}),
    "wan_grouped": ("wan", {"num_query_groups": 2, "size_conditioning": True}),
    "sana": ("sana", {}),
    "sana_1.5": ("sana", {"qk_layernorm": True, "size_conditioning": True}),
}
PACKS = {"dense": DENSE, "mixed": MIXED, "no_text": [Sample((1, 2, 2))]}


@pytest.mark.parametrize("samples", PACKS)
@pytest.mark.parametrize("name", COUNTED)
def test_flops_equal_those_of_torch(build_model: BuildModel, name: str, samples: str) -> None:
    """Counts are exact; the training count excludes gradients of the inputs, which are not needed."""
    backbone, changes = COUNTED[name]
    config = replace(BASES[backbone], **changes)
    model, batch = build_model(config, perturb=0.1), pack(PACKS[samples], config, multiple_of=8)
    inputs, time = draw(batch)
    # The counter sees the matrix products of the math backend, but not CPU flash attention.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        out = model(inputs, time, batch)
        forward = counter.get_total_flops()
        out.sum().backward()
    shape, flops = (batch.layout, batch.grids, batch.conditions.layout("context")), PackFlops(config)
    assert forward == flops.forward(*shape, convention="hardware")
    if backbone == "sana":  # the backward pass of its convolution does not cost two forward passes
        return
    numbers = 1 + (getattr(config, "guidance", None) is not None) + getattr(config, "fps_conditioning", False)
    numbers += 3 * getattr(config, "size_conditioning", False)
    unneeded = len(inputs) * config.token_channels + batch.layout.num_samples * CONDITION_FEATURES * numbers
    exact = flops.training(*shape, convention="hardware") - 2 * unneeded * config.hidden_size
    assert counter.get_total_flops() == exact


def test_recompute_of_every_block_adds_the_blocks() -> None:
    """Recomputing every block adds exactly one forward pass of the blocks."""
    config, batch = BASES["flux"], pack(MIXED, BASES["flux"])
    shape, flops = (batch.layout, batch.grids, batch.conditions["context"].layout), PackFlops(config)
    more = replace(config, num_joint_layers=2 * config.num_joint_layers, num_single_layers=2 * config.num_single_layers)
    blocks = PackFlops(more).forward(*shape) - flops.forward(*shape)
    twice, once = (flops.training(*shape, convention="hardware", recomputed=share) for share in (1.0, 0.0))
    assert twice == once + blocks


def test_no_text_counts_as_one_null_token_per_sample() -> None:
    config, batch = BASES["dit_cross"], pack(MIXED, BASES["dit_cross"])
    one_each = replace(batch.conditions["context"].layout, lengths=(1,) * 4, padded_lengths=(1,) * 4, total_tokens=4)
    flops = PackFlops(config)
    assert flops.forward(batch.layout, batch.grids) == flops.forward(batch.layout, batch.grids, one_each)


def test_segments_save_the_tokens_that_they_do_not_visit() -> None:
    """With t frames of n patches, a token attends to t n tokens in full, n in spatial and t in temporal layers."""
    base, (t, h, w) = BASES["stdit"], (24, 32, 32)
    tokens = t * h * w
    layout = SequenceLayout.from_lengths([tokens])

    def work(*pattern: str) -> float:
        return PackFlops(replace(base, layer_pattern=list(pattern))).forward(layout, [(t, h, w)]) / tokens

    per_pair = 4 * base.hidden_size * base.num_layers
    full, spatial, temporal = (work(kind) for kind in ("full", "spatial", "temporal"))
    assert full - spatial == pytest.approx(per_pair * (tokens - h * w))
    assert full - temporal == pytest.approx(per_pair * (tokens - t))
    assert work("spatial", "temporal") == pytest.approx((spatial + temporal) / 2)


def test_work_of_linear_attention_is_linear_in_the_tokens() -> None:
    """Four times the tokens cost four times the FLOPs, except the constant cost of null text and time."""
    flops, grids = PackFlops(SanaConfig()), [(1, 32, 32), (1, 64, 64), (1, 128, 128)]
    few, some, many = (flops.forward(SequenceLayout.from_lengths([h * w]), [(t, h, w)]) for t, h, w in grids)
    assert many - some == 4 * (some - few)
    # Per token and layer: projections, two matrices of 32 x 33 for each of 70 heads, 9 taps of 11200 channels.
    layer = 2 * (6 * 2240**2 + 3 * 5600 * 2240 + 2 * 70 * 32 * 33 + 9 * 11200) + 4 * 2240
    assert some - few == 3072 * (20 * layer + 2 * 2 * 32 * 2240)


def test_the_convention_of_published_tables_ignores_grids() -> None:
    layout, flops = SequenceLayout.from_lengths([8]), PackFlops(BASES["stdit"])
    clip, line = (flops.forward(layout, [grid], convention="nemo") for grid in ((2, 2, 2), (1, 1, 8)))
    assert clip == line


CROSS: list[tuple[dict[str, Any], list[str]]] = [
    ({"hidden_size": 50}, ["hidden_size=50", "num_attention_heads=4"]),
    ({"num_query_groups": 3}, ["num_attention_heads=4", "num_query_groups=3", "[1, 2, 4]"]),
    ({"num_query_groups": 0}, ["num_query_groups=0"]),
    ({"context_size": None}, ["context_size=None"]),
    ({"context_dropout": 1.5}, ["context_dropout=1.5"]),
    ({"position_embedding": "rope"}, ["position_embedding='rope'"]),
    ({"num_attention_heads": 12}, ["4 features", "rope_3d"]),
    ({"rope_factors": [1.0, 2.0]}, ["rope_factors=[1.0, 2.0]"]),
    ({"rope_theta": 1.0}, ["rope_theta=1.0"]),
    ({"rope_scaling": "yarn"}, ["rope_scaling='yarn'"]),
    ({"rope_factors": [1.0, 1.0, 1.0], "rope_scaling": "linear"}, ["rope_scaling=linear has no effect without"]),
]
"""Changes of `dit_cross` and `moviegen`, and parts of the error message."""
FIXED_POSITIONS = {"position_embedding": "sincos_3d", "rope_factors": None}
REFUSED: dict[str, list[tuple[dict[str, Any], list[str]]]] = {
    "dit_cross": [({"adaln_lora_rank": 0}, ["adaln_lora_rank=0"])],
    "moviegen": [
        *(
            (
                {"position_embedding": kind, "rope_factors": None, "max_grid": [4, 5, 6]},
                ["max_grid=[4, 5, 6] has no effect", "leave model.max_grid=[128, 120, 120]"],
            )
            for kind in ("rope_3d", "sincos_3d")
        ),
        *(({"max_grid": grid}, ["max_grid"]) for grid in ([4, 4], [0, 4, 4])),
    ],
    "flux": [
        ({"hidden_size": 50}, ["hidden_size=50", "num_attention_heads=4"]),
        ({"ffn_hidden_size": 41}, ["ffn_hidden_size=41", "num_attention_heads=4", "use 40"]),
        ({"num_joint_layers": 0}, ["num_joint_layers=0"]),
        ({"context_size": None}, ["context_size=None"]),
        ({"rope_axes": [2, 4, 4]}, ["add up to 10", "12"]),
        ({"rope_axes": [3, 4, 5]}, ["[3, 4, 5]", "even"]),
        ({"rope_axes": [6, 6]}, ["[6, 6]", "3 even", "t, h, w"]),
        (
            {"position_embedding": "sincos_3d"},
            ["rope_axes=[2, 6, 4] has no effect", "leave model.rope_axes=[16, 56, 56]"],
        ),
        ({"position_embedding": "learned_3d"}, ["position_embedding='learned_3d'", "'rope_3d'", "'sincos_3d'"]),
        ({"context_dropout": 1.5}, ["context_dropout=1.5"]),
    ],
    "wan": [
        ({"hidden_size": 50}, ["hidden_size=50", "num_attention_heads=4"]),
        ({"num_attention_heads": 12}, ["4 features", "rope_3d"]),
        ({"context_size": None}, ["context_size=None"]),
        ({"rope_theta": 1.0}, ["rope_theta=1.0"]),
        ({"rope_theta": 50.0, "position_embedding": "sincos_3d"}, ["rope_theta=50.0 has no effect", "use 'rope_3d'"]),
        ({"position_embedding": "sincos_2d"}, ["position_embedding='sincos_2d'", "'rope_3d', 'sincos_3d'"]),
        ({"hidden_size": 42, "num_attention_heads": 6, "position_embedding": "sincos_3d"}, ["hidden_size=42"]),
    ],
    "sana": [
        ({"num_query_groups": 2}, ["num_query_groups=2", "use None"]),
        ({"num_cross_attention_heads": 5}, ["hidden_size=24", "num_cross_attention_heads=5", "1, 2, 3, 4, 6, 8, 12"]),
        ({"position_embedding": "rope_3d"}, ["position_embedding='rope_3d'", "'none', 'sincos_2d', 'sincos_3d'"]),
        ({"rope_theta": 50.0}, ["rope_theta=50.0 has no effect"]),
    ],
    "stdit": [
        ({"layer_pattern": []}, ["layer_pattern=[]"]),
        ({"num_layers": 3}, ["num_layers=3", "2 layers"]),
        ({"layer_pattern": ["spatial", "time"]}, ["'time'", "temporal"]),
        ({"layer_pattern": ["full+full"]}, ["'full+full'"]),
        ({"layer_pattern": ["spatial", "full+temporal"]}, ["[1, 2]", "same number"]),
        ({"position_span": 0.0}, ["position_span=0.0"]),
        ({"position_span": 8.0, "position_embedding": "rope_3d"}, ["position_span=8.0", "rope_3d"]),
        ({"num_attention_heads": 16}, ["3 features", "layer_pattern"]),
        ({"rope_theta": 50.0, "layer_pattern": ["full"]}, ["rope_theta=50.0 has no effect", "'sincos_2d'"]),
        ({"rope_factors": [2.0, 1.5, 1.0]}, ["rope_factors=[2.0, 1.5, 1.0] has no effect along h and w"]),
    ],
}


def refused() -> Iterator[tuple[str, dict[str, Any], list[str]]]:
    for name in ("dit_cross", "moviegen"):
        yield from ((name, *case) for case in CROSS)
        for setting, value in (("rope_theta", 50.0), ("rope_factors", [2.0, 1.0, 1.0]), ("rope_scaling", "linear")):
            yield name, {**FIXED_POSITIONS, setting: value}, [f"model.{setting}={value} has no effect with"]
    yield from ((name, *case) for name, cases in REFUSED.items() for case in cases)


@pytest.mark.parametrize(("name", "changes", "said"), refused(), ids=lambda value: ",".join(map(str, value))[:40])
def test_impossible_sizes_are_named_with_their_numbers(name: str, changes: dict, said: list[str]) -> None:
    base = small(name) if name == "stdit" else BASES[name]
    base.validate()
    with pytest.raises(ConfigError) as caught:
        replace(base, **changes).validate()
    assert all(text in str(caught.value) for text in said)


def test_settings_of_positions_that_are_used_are_valid() -> None:
    replace(small("stdit"), rope_theta=50.0, rope_scaling="linear", rope_factors=[2.0, 1.0, 1.0]).validate()
    for name in ("dit_cross", "moviegen"):
        replace(BASES[name], **FIXED_POSITIONS).validate()
