"""Sizes of the backbones with cross-attention: the config says what the module has, and what it costs."""

import re
from dataclasses import replace
from typing import Any

import pytest
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from dit.errors import ConfigError
from dit.layout import SequenceLayout
from dit.models.dit_cross.config import DiTCrossConfig
from dit.models.moviegen.config import MovieGenConfig
from dit.models.transformer_config import CONDITION_FEATURES
from dit.monitoring.flops import PackFlops
from dit.parallel.build import count_parameters
from tests.conftest import BuildModel
from tests.parity.costs import forward_flops, num_parameters
from tests.support.batches import DENSE, MIXED, STRETCH, Sample, draw, pack

SMALL: dict[str, Any] = {
    **{"hidden_size": 48, "num_layers": 2, "num_attention_heads": 4, "in_channels": 4, "num_classes": 5},
    **{"context_size": 10, "position_embedding": "rope_3d", "rope_factors": STRETCH},
}
BASES = {
    "dit_cross": DiTCrossConfig(**SMALL),
    "moviegen": MovieGenConfig(**SMALL, num_query_groups=4, ffn_hidden_size=96),
}


def test_position_tables_have_the_size_of_max_grid(build_model: BuildModel):
    config = replace(BASES["moviegen"], position_embedding="learned_3d", rope_factors=None, max_grid=[7, 3, 2])
    config.validate()
    model = build_model(config)
    assert [len(table) for table in (model.positions.t, model.positions.h, model.positions.w)] == [7, 3, 2]
    assert num_parameters(config) == sum(p.numel() for p in model.parameters())


def test_fixed_positions_take_no_weights(build_model: BuildModel):
    config = replace(BASES["moviegen"], position_embedding="sincos_3d", rope_factors=None)
    config.validate()
    model = build_model(config)
    assert model.positions is None
    assert model.rotary is None
    assert num_parameters(config) == sum(p.numel() for p in model.parameters())


# The counts of the published sizes, next to what the reference counts (weights of NeMo's configurations). Ours are
# larger by the modulated head (2 h^2) and by a frame-rate embedder of the full width (h^2 more than NeMo's padded one).
EC_1B = {"num_experts": 64, "moe_ffn_hidden_size": 1024, "moe_capacity_factor": 8.0}
NAMED = {
    "DiT-S": (DiTCrossConfig(hidden_size=384, num_layers=12, num_attention_heads=6), 50_977_472, 50.6e6),
    "DiT-B": (DiTCrossConfig(hidden_size=768, num_layers=12, num_attention_heads=12), 184_526_144, 183.1e6),
    "DiT-L": (DiTCrossConfig(hidden_size=1024, num_layers=24, num_attention_heads=16), 634_009_664, 631.5e6),
    "DiT-XL": (DiTCrossConfig(hidden_size=1152, num_layers=28, num_attention_heads=16), 926_778_176, 923.7e6),
    "DiT-XL low rank": (
        DiTCrossConfig(hidden_size=1152, num_layers=28, num_attention_heads=16, adaln_lora_rank=256),
        674_923_328,
        671.8e6,
    ),
    "DiT-7B": (DiTCrossConfig(hidden_size=3072, num_layers=32, num_attention_heads=24), 7_186_847_808, 7166.5e6),
    "DiT-28B": (DiTCrossConfig(hidden_size=6144, num_layers=32, num_attention_heads=48), 28_340_710_464, 28.2e9),
    "MovieGen-1B": (MovieGenConfig(), 1_540_965_440, 1.54e9),
    "MovieGen-3B": (MovieGenConfig(hidden_size=3072, num_layers=28, num_attention_heads=24), 5_022_135_360, 5.01e9),
    "MovieGen-5B": (MovieGenConfig(hidden_size=3072, num_layers=32, num_attention_heads=24), 5_735_205_952, 5.72e9),
    "MovieGen-30B": (
        MovieGenConfig(hidden_size=6144, num_layers=48, num_attention_heads=48, ffn_hidden_size=16384),
        33_438_364_736,
        33.4e9,
    ),
    "EC-DiT-1B": (MovieGenConfig(**EC_1B), 7_180_207_168, 7.18e9),
}


@pytest.mark.usefixtures("one_rank_world")
@pytest.mark.parametrize("name", NAMED)
def test_named_sizes_have_their_parameters(name: str):
    config, ours, published = NAMED[name]
    assert count_parameters(config) == ours
    assert num_parameters(config) == ours
    assert ours == pytest.approx(published, rel=0.01)


def test_ec_dit_has_the_operations_of_its_dense_form():
    """64 experts of width 1024 at capacity factor 8 do the work of one feed-forward of 8192, and the router's."""
    pack = SequenceLayout.from_lengths([256]), [(1, 16, 16)]
    dense, experts = MovieGenConfig(), MovieGenConfig(**EC_1B)
    router = 2 * 256 * dense.hidden_size * 64 * dense.num_layers
    assert PackFlops(experts).forward(*pack) == PackFlops(dense).forward(*pack) + router


@pytest.mark.parametrize("samples", [DENSE, MIXED, [Sample((1, 2, 2))]], ids=["dense", "mixed", "no_text"])
@pytest.mark.parametrize("name", [*BASES, "low_rank", "grouped", "experts"])
def test_flops_are_those_of_torch(build_model: BuildModel, name: str, samples: list[Sample]):
    """The forward count is exact; training does not count the gradients of the inputs, which are not needed."""
    config = {
        **BASES,
        "low_rank": replace(BASES["dit_cross"], adaln_lora_rank=6, size_conditioning=True),
        "grouped": replace(BASES["moviegen"], num_query_groups=2),
        "experts": replace(BASES["moviegen"], num_experts=4, moe_ffn_hidden_size=24, moe_capacity_factor=1.5),
    }[name]
    model, batch = build_model(config, perturb=0.1), pack(samples, config, multiple_of=8)
    inputs, time = draw(batch)
    # The maths backend is made of matrix products that the counter sees; CPU flash attention is not.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        out = model(inputs, time, batch)
        forward = counter.get_total_flops()
        out.sum().backward()
    shape, flops = (batch.layout, batch.grids, batch.conditions["context"].layout), PackFlops(config)
    assert forward == flops.forward(*shape, convention="hardware") == forward_flops(config, *shape, padding=True)
    numbers = 1 + config.fps_conditioning + 3 * config.size_conditioning
    unneeded = len(inputs) * config.token_channels + len(samples) * CONDITION_FEATURES * numbers
    exact = flops.training(*shape, convention="hardware") - 2 * unneeded * config.hidden_size
    assert counter.get_total_flops() == exact


def test_no_text_counts_as_one_null_token_per_sample():
    config, batch = BASES["dit_cross"], pack(MIXED, BASES["dit_cross"])
    one_each = replace(batch.conditions["context"].layout, lengths=(1,) * 4, padded_lengths=(1,) * 4, total_tokens=4)
    flops = PackFlops(config)
    assert flops.forward(batch.layout, batch.grids) == flops.forward(batch.layout, batch.grids, one_each)


@pytest.mark.parametrize(
    ("name", "sequence_length", "tokens_per_s", "published_tflops", "executed_tflops"),
    [
        ("DiT-7B", 8192, 10052, 519, 359),
        ("DiT-7B", 73728, 3409, 439, 385),
        ("DiT-28B", 8192, 2510, 468, 307),
        ("DiT-28B", 65536, 1386, 445, 357),
    ],
)
def test_published_rows_follow_from_the_configs(
    name: str, sequence_length: int, tokens_per_s: float, published_tflops: float, executed_tflops: float
):
    """The published figures are met within 1 % by NeMo's convention; what the maths asks for is up to a third less."""
    flops, rate = PackFlops(NAMED[name][0]), tokens_per_s / sequence_length / 1e12
    layout, texts = SequenceLayout.from_lengths([sequence_length]), SequenceLayout.from_lengths([512])
    shape = layout, [(sequence_length // 1024, 32, 32)], texts
    assert flops.training(*shape, convention="nemo") * rate == pytest.approx(published_tflops, rel=0.01)
    assert flops.training(*shape) * rate == pytest.approx(executed_tflops, rel=0.01)


@pytest.mark.parametrize("backbone", BASES)
@pytest.mark.parametrize(
    ("changes", "said"),
    [
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
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else "",
)
def test_impossible_sizes_are_named_with_their_numbers(backbone: str, changes: dict, said: list[str]):
    with pytest.raises(ConfigError) as caught:
        replace(BASES[backbone], **changes).validate()
    assert all(text in str(caught.value) for text in said)


@pytest.mark.parametrize("backbone", BASES)
@pytest.mark.parametrize(
    "changes",
    [{"rope_theta": 50.0}, {"rope_factors": [2.0, 1.0, 1.0]}, {"rope_scaling": "linear"}],
    ids=lambda changes: next(iter(changes)),
)
def test_rotary_settings_without_rotation_are_refused(backbone: str, changes: dict):
    config = replace(BASES[backbone], position_embedding="sincos_3d", rope_factors=None)
    config.validate()
    name, value = next(iter(changes.items()))
    with pytest.raises(ConfigError, match=re.escape(f"model.{name}={value} has no effect with")):
        replace(config, **changes).validate()


@pytest.mark.parametrize("backbone", BASES)
def test_a_way_of_stretching_nothing_is_refused(backbone: str):
    with pytest.raises(ConfigError, match=r"rope_scaling=linear has no effect without model\.rope_factors"):
        replace(BASES[backbone], rope_factors=[1.0, 1.0, 1.0], rope_scaling="linear").validate()


@pytest.mark.parametrize("kind", ["rope_3d", "sincos_3d"])
def test_position_tables_that_nobody_reads_are_refused(kind: str):
    config = replace(BASES["moviegen"], position_embedding=kind, rope_factors=None)
    config.validate()
    with pytest.raises(
        ConfigError, match=r"max_grid=\[4, 5, 6\] has no effect.*leave model.max_grid=\[128, 120, 120\]"
    ):
        replace(config, max_grid=[4, 5, 6]).validate()


@pytest.mark.parametrize("max_grid", [[4, 4], [0, 4, 4]])
def test_position_tables_need_three_sizes(max_grid: list[int]):
    with pytest.raises(ConfigError, match="max_grid"):
        replace(BASES["moviegen"], max_grid=max_grid).validate()


def test_low_rank_needs_a_rank():
    with pytest.raises(ConfigError, match="adaln_lora_rank=0"):
        replace(BASES["dit_cross"], adaln_lora_rank=0).validate()
