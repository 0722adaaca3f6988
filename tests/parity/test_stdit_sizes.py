"""Sizes of ST-DiT: the config says what the module has, and what it costs."""

from dataclasses import replace

import pytest
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from dit.layout import SequenceLayout
from dit.models.stdit.config import STDiTConfig
from dit.models.transformer_config import CONDITION_FEATURES
from dit.monitoring.flops import PackFlops
from dit.parallel.build import count_parameters
from tests.conftest import BuildModel
from tests.parity.costs import forward_flops, num_parameters
from tests.support.batches import DENSE, MIXED, STRETCH, Sample, draw, pack

BASE = STDiTConfig(
    hidden_size=48,
    num_layers=2,
    num_attention_heads=4,
    num_classes=5,
    context_size=10,
    position_embedding="rope_3d",
    rope_factors=STRETCH,
)


def published(pairs: int, hidden_size: int, heads: int, ffn_hidden_size: int | None = None) -> STDiTConfig:
    return STDiTConfig(
        hidden_size=hidden_size, num_layers=2 * pairs, num_attention_heads=heads, ffn_hidden_size=ffn_hidden_size
    )


# The counts of section names: pairs of a spatial and a temporal layer, 16 h^2 weights each.
NAMED = {
    "S": (published(12, 384, 6), 58_740_368, 57e6),
    "XL": (published(28, 1152, 16), 1_204_095_632, 1.2e9),
    "3B": (published(24, 2048, 16, 8192), 3_264_109_584, 3.2e9),
    "3B Open-Sora": (published(28, 1872, 26), 3_176_439_872, 3.1e9),
}


@pytest.mark.usefixtures("one_rank_world")
@pytest.mark.parametrize("name", NAMED)
def test_named_sizes_have_their_parameters(name: str):
    config, ours, stated = NAMED[name]
    assert count_parameters(config) == ours
    assert num_parameters(config) == ours
    assert ours == pytest.approx(stated, rel=0.05)


@pytest.mark.parametrize("samples", [DENSE, MIXED, [Sample((1, 2, 2))]], ids=["dense", "mixed", "no_text"])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"layer_pattern": ["spatial+full+temporal"], "num_query_groups": 2},
        {"layer_pattern": ["full"], "size_conditioning": True, "add_bias": False, "ffn_hidden_size": 100},
    ],
    ids=["alternating", "all_in_one", "pixart"],
)
def test_flops_are_those_of_torch(build_model: BuildModel, changes: dict, samples: list[Sample]):
    """The forward count is exact; training does not count the gradients of the inputs, which are not needed."""
    config = replace(BASE, **changes)
    model, batch = build_model(config, perturb=0.1), pack(samples, config, multiple_of=8)
    inputs, time = draw(batch)
    # The maths backend is made of matrix products that the counter sees; CPU flash attention is not.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        out = model(inputs, time, batch)
        forward = counter.get_total_flops()
        out.sum().backward()
    context = batch.conditions.layout("context")
    shape, flops = (batch.layout, batch.grids, context), PackFlops(config)
    assert forward == flops.forward(*shape, convention="hardware") == forward_flops(config, *shape, padding=True)
    numbers = 1 + config.fps_conditioning + 3 * config.size_conditioning
    unneeded = len(inputs) * config.token_channels + len(samples) * CONDITION_FEATURES * numbers
    exact = flops.training(*shape, convention="hardware") - 2 * unneeded * config.hidden_size
    assert counter.get_total_flops() == exact


def test_segments_save_what_they_do_not_visit():
    """A clip of t frames of n patches: full attention visits t n pairs per token, spatial n, temporal t."""
    t, h, w = grid = (24, 32, 32)
    tokens = t * h * w
    layout = SequenceLayout.from_lengths([tokens])

    def work(*pattern: str) -> float:
        return PackFlops(replace(BASE, layer_pattern=list(pattern))).forward(layout, [grid]) / tokens

    per_pair = 4 * BASE.hidden_size * BASE.num_layers
    full, spatial, temporal = (work(kind) for kind in ("full", "spatial", "temporal"))
    assert full - spatial == pytest.approx(per_pair * (tokens - h * w))
    assert full - temporal == pytest.approx(per_pair * (tokens - t))
    assert work("spatial", "temporal") == pytest.approx((spatial + temporal) / 2)


def test_the_convention_of_published_tables_knows_no_grids():
    layout = SequenceLayout.from_lengths([8])
    flops = PackFlops(BASE)
    clip, line = (flops.forward(layout, [grid], convention="nemo") for grid in ((2, 2, 2), (1, 1, 8)))
    assert clip == line
