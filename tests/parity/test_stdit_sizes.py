"""Sizes of ST-DiT: the config says what the module has, and what it costs."""

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import pytest
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from dit.layout import SequenceLayout
from dit.models.cross_config import CONDITION_FEATURES
from dit.models.stdit.config import STDiTConfig
from dit.monitoring.flops import PackFlops
from dit.parallel.build import count_parameters
from tests.conftest import BuildModel
from tests.parity.costs import forward_flops, num_parameters
from tests.parity.cross_cases import DENSE, MIXED, ROPE_FIELDS, STRETCH, Sample, check_setting_acts, draw, pack

BASE = STDiTConfig(
    hidden_size=48,
    num_layers=2,
    num_attention_heads=4,
    num_classes=5,
    context_size=10,
    position_embedding="rope_3d",
    rope_factors=STRETCH,
)
# Read by the training step, which drops conditions; the network itself has nothing to build from them.
NOT_IN_THE_NETWORK = {"class_dropout", "context_dropout"}
LINEARS = (
    *("attentions.temporal.linear_qkv", "attentions.temporal.linear_proj", "cross_attention.linear_q"),
    *("cross_attention.linear_kv", "cross_attention.linear_proj", "mlp.linear_fc1", "mlp.linear_fc2"),
)


def names(model: nn.Module) -> set[str]:
    return {name for name, _ in model.named_parameters()}


def attentions(model: nn.Module) -> list[nn.Module]:
    return [model.layers["1"].attentions.temporal, model.layers["1"].cross_attention]


def temporal_pairs(model: nn.Module) -> int:
    """Return how many of a head's six pairs of features turn with t in temporal attention."""
    positions = pack([Sample((2, 1, 1), 1)], BASE).positions_T3
    return int((model.rotary_time.angles(positions)[1] != 0).sum())


# field: (another value, what shows it in the built model, how the shown value follows from the field's)
FIELDS: dict[str, tuple[Any, Callable[[nn.Module], Any], Callable[[Any], Any]]] = {
    "in_channels": (6, lambda m: m.embed.linear.weight.shape[1], lambda v: 4 * v),
    "patch_spatial": (3, lambda m: m.embed.linear.weight.shape[1], lambda v: 4 * v**2),
    "patch_temporal": (2, lambda m: m.embed.linear.weight.shape[1], lambda v: 16 * v),
    "num_classes": (9, lambda m: m.conditioner.label.weight.shape[0], lambda v: v + 1),
    "context_size": (20, lambda m: m.text_projection.linear_1.weight.shape[1], lambda v: v),
    "hidden_size": (96, lambda m: m.embed.linear.weight.shape[0], lambda v: v),
    "num_layers": (4, lambda m: len(m.layers), lambda v: v),
    "num_attention_heads": (8, lambda m: {a.local_heads for a in attentions(m)}, lambda v: {v}),
    "num_query_groups": (2, lambda m: {a.local_groups for a in attentions(m)}, lambda v: {v or 4}),
    "ffn_hidden_size": (100, lambda m: m.layers["1"].mlp.linear_fc1.weight.shape[0], lambda v: v or 4 * 48),
    "out_channels": (8, lambda m: m.head.linear.weight.shape[0], lambda v: 4 * (v or 4)),
    "qk_layernorm": (
        False,
        lambda m: {isinstance(norm, nn.Identity) for a in attentions(m) for norm in (a.q_layernorm, a.k_layernorm)},
        lambda v: {not v},
    ),
    "layernorm_epsilon": (1e-3, lambda m: {m.layers["1"].modulation.eps, m.head.eps}, lambda v: {v}),
    "fps_conditioning": (False, lambda m: m.conditioner.fps is not None, lambda v: v),
    "size_conditioning": (True, lambda m: m.conditioner.size is not None, lambda v: v),
    "time_scale": (7.0, lambda m: m.conditioner.time.time_scale, lambda v: v),
    "rope_theta": (50.0, lambda m: {m.rotary.theta, m.rotary_time.theta}, lambda v: {v}),
    "rope_scaling": ("linear", lambda m: {m.rotary.scaling, m.rotary_time.scaling}, lambda v: {v}),
    "rope_factors": ([4.0, 1.0, 1.0], lambda m: {m.rotary.factors, m.rotary_time.factors}, lambda v: {tuple(v)}),
    "layer_pattern": (
        ["temporal+full"],
        lambda m: [[*layer.attentions] for layer in m.layers.values()],
        lambda v: [layer.split("+") for layer in (v * 2)[:2]],
    ),
    "add_bias": (False, lambda m: {f"layers.1.{n}.bias" in names(m) for n in LINEARS}, lambda v: {v}),
    "position_embedding": ("sincos_2d", lambda m: m.rotary is None, lambda v: v != "rope_3d"),
    "temporal_rope": (False, temporal_pairs, lambda v: 6 if v else 2),
}


def test_every_field_has_a_row():
    """`position_span` scales what is added to the tokens; the comparison with the formulas shows it."""
    shown = set(FIELDS) | NOT_IN_THE_NETWORK | {"position_span"}
    assert shown == {field.name for field in fields(STDiTConfig)}


@pytest.mark.parametrize("name", FIELDS)
def test_field_reaches_the_model(build_model: BuildModel, name: str):
    """Both values of a field show in the model that is built from them, and the counted parameters follow."""
    other, show, follows = FIELDS[name]
    seen = []
    also = {"rope_factors": [2.0, 1.0, 1.0]} if name == "position_embedding" else {}
    for config in (BASE, replace(BASE, **{name: other}, **also)):
        config.validate()
        model = build_model(config)
        seen.append(show(model))
        assert seen[-1] == follows(getattr(config, name))
        assert num_parameters(config) == sum(p.numel() for p in model.parameters())
    assert seen[0] != seen[1]


@pytest.mark.parametrize("pattern", ["spatial", "temporal"])
@pytest.mark.parametrize("name", ROPE_FIELDS)
def test_rotary_settings_change_the_prediction(build_model: BuildModel, pattern: str, name: str):
    check_setting_acts(build_model, replace(BASE, layer_pattern=[pattern]), name, ROPE_FIELDS[name])


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
    """The forward count is exact; training differs by the gradients nobody needs, those of the network's inputs."""
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
