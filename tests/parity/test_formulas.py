"""Packed backbones have the outputs and gradients of the formulas of their papers."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import conv2d

from dit.batch import PackedBatch
from dit.conditions import Entry
from dit.context_parallel.pictures import Pictures
from dit.errors import BatchError
from dit.joint_layout import joint_layout
from dit.kernels.linear_attention import linear_attention
from dit.layers.positions import RotaryPositions
from dit.layout import SequenceLayout
from dit.models.base import ModelConfig
from dit.models.dit_cross.config import DiTCrossConfig
from dit.models.flux.config import FluxConfig
from dit.models.moviegen.config import MovieGenConfig
from dit.models.sana.config import SanaConfig
from dit.models.stdit.config import STDiTConfig
from dit.models.wan.config import WanConfig
from tests.conftest import BuildModel
from tests.parity.reference_cross import CrossReference, Leaves
from tests.parity.reference_flux import DROPPED_TOKENS, FluxReference
from tests.parity.reference_stdit import STDiTReference
from tests.support.batches import MIXED, Sample, draw, pack, pooled_size
from tests.support.levels import leveled
from tests.support.reference import RTOL, relative_error

SIZES: dict[str, Any] = {
    **{"hidden_size": 48, "num_layers": 2, "num_attention_heads": 4, "in_channels": 3, "context_size": 10}
}
ALL_IN_ONE = ["spatial+full+temporal"]
CONSTANTS = {"layernorm_epsilon": 1e-2, "time_scale": 30.0}


@dataclass(frozen=True)
class Family:
    """A backbone, its reference, and the compared settings; SANA and Wan are compared with diffusers.

    Attributes:
        sizes: changes of `SIZES`; `...` removes a size.
    """

    config: type[ModelConfig]
    sizes: dict[str, Any]
    variants: dict[str, dict[str, Any]] = field(default_factory=dict)
    reference: Callable[[Any, Leaves], Any] = CrossReference

    def small(self, **changes: Any) -> Any:
        sizes = {**SIZES, **self.sizes, **changes}
        made = self.config(**{name: size for name, size in sizes.items() if size is not ...})
        made.validate()
        return made


FAMILIES = {
    "dit_cross": Family(
        DiTCrossConfig,
        {},
        {
            "default": {},
            "grouped": {"num_query_groups": 2, "num_classes": 5},
            "plain_heads": {"qk_layernorm": False, "add_bias": True, "fps_conditioning": False},
            "size": {"size_conditioning": True, "patch_temporal": 2, "out_channels": 5},
            "low_rank": {"adaln_lora_rank": 6, "add_bias": True, "ffn_hidden_size": 40},
            "sincos_2d": {"position_embedding": "sincos_2d"},
            "rope": {"position_embedding": "rope_3d", "num_query_groups": 1},
            "rope_ntk": {"position_embedding": "rope_3d", "rope_factors": [2.0, 1.5, 1.0], "rope_theta": 500.0},
            "rope_linear": {
                **{"position_embedding": "rope_3d", "rope_factors": [2.0, 1.5, 1.0], "rope_scaling": "linear"}
            },
            "constants": CONSTANTS,
        },
    ),
    "moviegen": Family(
        MovieGenConfig,
        {"num_query_groups": 2, "ffn_hidden_size": 56, "max_grid": [4, 5, 6]},
        {
            "default": {},
            "plain_heads": {"qk_layernorm": False, "num_query_groups": None, "num_classes": 5},
            "conditions": {"fps_conditioning": True, "size_conditioning": True, "patch_temporal": 2},
            "rope": {
                **{"position_embedding": "rope_3d", "rope_factors": [2.0, 1.0, 1.0], "ffn_hidden_size": None},
                "max_grid": ...,
            },
            "sincos_3d": {"position_embedding": "sincos_3d", "max_grid": ...},
            "experts_choose": {"num_experts": 4, "moe_ffn_hidden_size": 24, "moe_capacity_factor": 1.5},
            "tokens_choose": {"num_experts": 3, "moe_router": "top_k", "moe_top_k": 2, "moe_aux_loss_coeff": 0.0},
            "constants": {**CONSTANTS, "out_channels": 2},
        },
    ),
    "flux": Family(
        FluxConfig,
        {
            **{"num_layers": ..., "num_joint_layers": 2, "num_single_layers": 2, "pooled_size": 7},
            **{"ffn_hidden_size": 40, "rope_axes": [2, 6, 4]},
        },
        {
            "default": {},
            "guidance": {"guidance": 3.5, "time_scale": 30.0},
            "sincos_3d": {"position_embedding": "sincos_3d", "rope_axes": [16, 56, 56]},
            "crop": {"position_embedding": "sincos_3d", "rope_axes": [16, 56, 56], "position_crop": [12, 4]},
            "constants": {"layernorm_epsilon": 1e-2, "rope_theta": 50.0, "out_channels": 5, "patch_temporal": 2},
            "single": {"num_joint_layers": 1, "num_single_layers": 3, "rope_axes": [4, 4, 4]},
            "rope_ntk": {"rope_factors": [2.0, 1.5, 3.0]},
            "rope_linear": {"rope_factors": [2.0, 1.5, 3.0], "rope_scaling": "linear"},
        },
        FluxReference,
    ),
    "wan": Family(WanConfig, {"ffn_hidden_size": 56}),
    "sana": Family(
        SanaConfig, {"hidden_size": 24, "num_attention_heads": 2, "num_cross_attention_heads": 3, "ffn_hidden_size": 28}
    ),
    "stdit": Family(
        STDiTConfig,
        {},
        {
            "alternating": {},
            "all_in_one": {"layer_pattern": ALL_IN_ONE, "num_classes": 5, "num_query_groups": 2},
            "pixart": {
                **{"layer_pattern": ["full"], "qk_layernorm": False, "fps_conditioning": False},
                **{"position_span": 8.0, "out_channels": 6},
            },
            "rope": {"layer_pattern": ALL_IN_ONE, "position_embedding": "rope_3d"},
            "both_ropes": {"position_embedding": "rope_3d", "rope_factors": [2.0, 1.0, 1.0], "rope_theta": 500.0},
            "span_3d": {"position_embedding": "sincos_3d", "position_span": 3.5},
            "ropes_linear": {
                **{"position_embedding": "rope_3d", "rope_factors": [2.0, 1.5, 3.0], "rope_scaling": "linear"},
                "layer_pattern": ALL_IN_ONE,
            },
            "conditions": {
                **{"position_embedding": "sincos_3d", "size_conditioning": True, "patch_temporal": 2},
                "add_bias": False,
            },
            "constants": {**CONSTANTS, "ffn_hidden_size": 56, "position_span": 3.5},
        },
        STDiTReference,
    ),
}
VARIANTS = [(name, variant) for name, family in FAMILIES.items() for variant in family.variants]


def small(name: str, **changes: Any) -> Any:
    return FAMILIES[name].small(**changes)


def check(
    build_model: BuildModel, name: str, config: Any, samples: list[Sample], *, levels: bool = False, **padding: int
) -> nn.Module:
    """Run the pack through our model and each sample through the reference; compare outputs and all gradients.

    Args:
        levels: give samples several noise levels; the text has the first one of its sample that is not clean.
    """
    model = build_model(config, perturb=0.1)
    batch, leaves = pack(samples, config, **padding), Leaves(model)
    reference = FAMILIES[name].reference(config, leaves)
    inputs, time = draw(batch)
    times = list(time.split(1))
    if levels:
        batch = leveled(batch)
        time, times = times_of_tokens(batch)
    out = model(inputs, time, batch)
    cotangent = torch.randn(out.shape, generator=torch.Generator().manual_seed(6))
    loss = torch.zeros((), dtype=torch.float64)
    for i, (sample, start, length) in enumerate(zip(samples, batch.layout.starts, batch.layout.lengths)):
        rows = slice(start, start + length)
        conditions: dict[str, Any] = {"fps": sample.fps, "label": sample.label}
        if (size := pooled_size(config)) is not None:
            conditions["pooled"] = sample.pooled(size)
        text = sample.text(config.context_size)
        exact = reference.run(inputs[rows], times[i], sample.grid, text, **conditions)
        assert relative_error(out[rows], exact) <= RTOL, f"sample {i}"
        loss = loss + (exact * cotangent[rows].double()).sum()
    loss.backward()
    valid = batch.layout.valid_T
    (out[valid] * cotangent[valid]).sum().backward()
    errors = {}
    for parameter_name, parameter in model.named_parameters():
        exact = leaves[parameter_name].grad
        assert exact is not None, f"the reference does not use {parameter_name}"
        assert exact.norm() > 0, f"{parameter_name} has no gradient, so the comparison shows nothing"
        errors[parameter_name] = relative_error(parameter.grad, exact)
    wrong = {parameter: error for parameter, error in errors.items() if not error <= RTOL}
    assert not wrong, wrong
    return model


def times_of_tokens(batch: PackedBatch) -> tuple[Tensor, list[Tensor]]:
    """Draw the time of each level, and return for each sample that of its text and those of its tokens."""
    levels = batch.layout.levels
    assert levels is not None
    time_L = torch.rand(len(levels.numbers), generator=torch.Generator().manual_seed(7)).masked_fill(levels.clean_L, 0)
    time_T = levels.layout.per_token(time_L)[:, 0]
    samples = [time_T[start : start + n] for start, n in zip(batch.layout.starts, batch.layout.lengths)]
    return time_L, [torch.cat([time_n[time_n > 0][:1], time_n]) for time_n in samples]


@pytest.mark.parametrize("padding", [{}, {"multiple_of": 4, "tail": 12, "context_multiple_of": 4}], ids=str)
@pytest.mark.parametrize("variant", ["default", "guidance", "sincos_3d", "single"])
def test_segments_of_a_sample_have_their_own_modulation(
    build_model: BuildModel, variant: str, padding: dict[str, int]
) -> None:
    """In joint blocks, single blocks and the head of FLUX; a sample has clean tokens, one level or several."""
    config = small("flux", **FAMILIES["flux"].variants[variant])
    check(build_model, "flux", config, MIXED, levels=True, **padding)


@pytest.mark.parametrize(("name", "variant"), VARIANTS)
def test_mixed_pack_equals_the_formulas(build_model: BuildModel, name: str, variant: str) -> None:
    """Images and clips of one pack differ in time, length, text, frame rate and class; none affects another."""
    check(build_model, name, small(name, **FAMILIES[name].variants[variant]), MIXED)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        *((name, {}) for name in FAMILIES),
        ("dit_cross", {"adaln_lora_rank": 6}),
        ("stdit", {"layer_pattern": ALL_IN_ONE}),
    ],
    ids=str,
)
def test_blocks_start_as_the_identity(build_model: BuildModel, name: str, changes: dict) -> None:
    """At initialisation each block returns its input bit for bit (plus positions in Movie Gen); the output is zero."""
    config = small(name, **changes)
    model, batch = build_model(config), pack(MIXED, config, multiple_of=4)
    seen = []

    def compare(layer: nn.Module, inputs: tuple, outputs: Any) -> None:
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        expected = (inputs[0] + inputs[1],) if name == "moviegen" else inputs[: len(outputs)]
        assert all(map(torch.equal, outputs, expected))
        assert all(x.any() for x in outputs)
        seen.append(layer)

    for layer in model.layers.values():
        layer.register_forward_hook(compare)
    out = model(*draw(batch), batch)
    assert seen == list(model.layers.values())
    assert torch.equal(out, torch.zeros_like(out))


def test_texts_of_sana_start_at_a_hundredth(build_model: BuildModel) -> None:
    """Source: NVlabs/Sana, `y_norm_scale_factor: 0.01` of its configurations; weights of the norm after the texts."""
    weight = build_model(small("sana")).text_projection.norm.weight
    assert torch.equal(weight, torch.full_like(weight, 0.01))


def test_pooled_texts_of_flux_start_with_weights_of_deviation_0_02(build_model: BuildModel) -> None:
    """Source: pytorch/torchtitan at 9603aa83, `vector_in.init_weights(init_std=0.02)` in experiments/flux/model."""
    embedder = build_model(small("flux")).conditioner.pooled
    for weight in (embedder.linear_1.weight, embedder.linear_2.weight):
        assert weight.pow(2).mean().sqrt().item() == pytest.approx(0.02, rel=0.3)


def test_missing_frame_rate_is_thirty(build_model: BuildModel) -> None:
    config = small("dit_cross", size_conditioning=True)
    model = build_model(config, perturb=0.1)
    named = pack([Sample((2, 2, 2), 3, fps=30.0)], config)
    inputs, time = draw(named)
    unnamed = replace(named, conditions=named.conditions.without("fps"))
    other = replace(named, conditions=named.conditions | {"fps": Entry("sample", torch.tensor([24.0]))})
    assert torch.equal(model(inputs, time, named), model(inputs, time, unnamed))
    assert not torch.allclose(model(inputs, time, named), model(inputs, time, other), rtol=1e-3)


@pytest.mark.parametrize("grid", [(5, 2, 2), (1, 6, 2), (1, 2, 7)])
def test_samples_beyond_the_position_tables_are_refused(build_model: BuildModel, grid: tuple[int, int, int]) -> None:
    """The last row of a table works; a sample beyond it is named in the error; rotary positions have no limit."""
    config = small("moviegen")
    model = build_model(config, perturb=0.1)
    fits = pack([Sample((4, 5, 6), 2)], config)
    assert model(*draw(fits), fits).isfinite().all()
    batch = pack([Sample((1, 2, 2), 2), Sample(grid, 3)], config)
    with pytest.raises(BatchError, match=rf"sample '1' has \({grid[0]}, {grid[1]}, {grid[2]}\).*\(4, 5, 6\)"):
        config.batch_spec(micro_batch_size=2).check(batch)
    rotary = build_model(small("moviegen", **FAMILIES["moviegen"].variants["rope"]), perturb=0.1)
    assert rotary(*draw(batch), batch).isfinite().all()


def test_joint_packs_contain_every_row_once() -> None:
    """For each sample: text, image, padding; `split` undoes `join`."""
    batch = pack(MIXED, small("flux"), multiple_of=8, tail=8, context_multiple_of=4)
    texts, layout = batch.conditions["context"].layout, batch.layout
    joint = joint_layout(texts, layout)
    text, image = torch.arange(texts.total_tokens), 1000 + torch.arange(layout.total_tokens)
    rows = joint.join(text, image)
    for i, start in enumerate(joint.starts):
        own = [*range(texts.starts[i], texts.starts[i] + texts.lengths[i])]
        own += [1000 + n for n in range(layout.starts[i], layout.starts[i] + layout.lengths[i])]
        assert rows[start : start + joint.lengths[i]].tolist() == own
    assert sorted(rows.tolist()) == text.tolist() + image.tolist()
    assert all(torch.equal(a, b) for a, b in zip(joint.split(rows), (text, image)))


def test_missing_text_is_one_null_token(build_model: BuildModel) -> None:
    """A dropped text keeps its length, so joint attention distinguishes it from a missing one (one null token)."""
    config = small("flux")
    model = build_model(config, perturb=0.1)
    dropped = pack([Sample((2, 2, 2)), Sample((1, 3, 3))], config)
    inputs, time = draw(dropped)
    assert dropped.conditions["context"].layout.lengths == (DROPPED_TOKENS,) * 2
    absent = replace(dropped, conditions=dropped.conditions.without("context", "pooled"))
    one = pack([Sample((2, 2, 2), 1), Sample((1, 3, 3), 1)], config)
    gone = {name: replace(one.conditions[name], dropped_S=torch.tensor([True, True])) for name in ("context", "pooled")}
    one = replace(one, conditions=one.conditions | gone)
    assert torch.equal(model(inputs, time, absent), model(inputs, time, one))
    assert relative_error(model(inputs, time, dropped), model(inputs, time, one)) > 1e-3


def test_each_sample_has_one_pooled_text() -> None:
    batch = pack(MIXED, small("flux"))
    three = {"pooled": Entry("sample", batch.conditions["pooled"].values[:3])}
    with pytest.raises(BatchError, match="'pooled' has 3 rows, needs 4"):
        replace(batch, conditions=batch.conditions | three).validate()


@pytest.mark.parametrize("size", [128, 96, 20])
def test_the_head_is_split_as_in_wan(size: int) -> None:
    """Features of t, h, w: d - 4 (d // 6), 2 (d // 6), 2 (d // 6)."""
    third = 2 * (size // 6)
    assert tuple(2 * pairs for pairs in RotaryPositions(size).pairs()) == (size - 2 * third, third, third)


@torch.no_grad()
def test_grouped_queries_of_wan_equal_copied_keys_and_values(build_model: BuildModel) -> None:
    """Also their norm, which is the mean square over all groups."""
    model, exact = (build_model(small("wan", num_query_groups=n), perturb=0.1) for n in (2, None))
    grouped = dict(model.named_parameters())
    for name, parameter in exact.named_parameters():
        x = grouped[name]
        if "linear_qkv" in name:  # two queries, the key and the value of each group
            q, k, v = x.unflatten(0, (2, 4, -1)).split([2, 1, 1], 1)
            x = torch.stack([q, k.expand_as(q), v.expand_as(q)], 2).flatten(0, 3)
        elif "linear_kv" in name or "k_layernorm" in name:
            x = x.unflatten(0, (2, -1)).repeat_interleave(2, 0).flatten(0, 1)
        parameter.copy_(x)
    batch = pack(MIXED, small("wan"))
    assert relative_error(model(*draw(batch), batch), exact(*draw(batch), batch)) <= RTOL


def test_every_frame_of_a_pack_is_convolved_separately() -> None:
    """Frames of clips, and consecutive pictures of one size or of different widths."""
    grids = [(2, 3, 4), (1, 3, 4), (1, 3, 3), (1, 3, 2)]
    layout, generator = SequenceLayout.from_lengths([math.prod(g) for g in grids], multiple_of=2), torch.Generator()
    x_TC, weight, bias = (torch.randn(n, generator=generator) for n in ((layout.total_tokens, 6), (6, 1, 3, 3), (6,)))
    actual_TC = Pictures(layout, grids).convolve(x_TC, weight, bias)
    for start, (frames, height, width) in zip(layout.starts, grids):
        for first in range(start, start + frames * height * width, height * width):
            rows = slice(first, first + height * width)
            exact = conv2d(x_TC[rows].T.view(1, 6, height, width), weight, bias, padding=1, groups=6)[0]
            torch.testing.assert_close(actual_TC[rows], exact.flatten(1).T)


def with_gradients(compute: Callable[..., Tensor], layout: SequenceLayout, *inputs: Tensor) -> list[Tensor]:
    """Return the output of the real tokens, and the gradients of the inputs for random gradients of it."""
    inputs = tuple(x.detach().requires_grad_() for x in inputs)
    out = compute(*inputs)[layout.valid_T]
    random = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out)
    return [out, *torch.autograd.grad(out, inputs, random)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_table_of_neighbours_gives_the_convolution_and_its_gradients(dtype: torch.dtype) -> None:
    """In a pack of fixed size, whose last sample is empty."""
    grids = [(2, 3, 4), (1, 1, 3), (1, 5, 2), (0, 0, 0)]
    lengths = [math.prod(grid) for grid in grids]
    layout = SequenceLayout.from_lengths(lengths, multiple_of=2, total_tokens=45, may_be_empty=True)
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(n, generator=generator).to(dtype) for n in ((45, 6), (6, 1, 3, 3), (6,))]
    pictures = Pictures(layout, grids[:3]), Pictures(replace(layout, is_fixed=True), grids, torch.tensor(grids))
    exact, actual = (with_gradients(x.convolve, layout, *inputs) for x in pictures)
    tolerances = {"rtol": 8e-3, "atol": 0.03} if dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(actual, exact, **tolerances)


def test_linear_attention_by_blocks_has_the_sums_of_samples() -> None:
    """Samples of several blocks and of parts of one, with padding, and an empty one, to which the tail pad belongs."""
    layout = SequenceLayout.from_lengths([150, 3, 64, 0], multiple_of=4, total_tokens=300, may_be_empty=True)
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(300, 2, 4, generator=generator) for _ in range(3)]
    layouts = layout, replace(layout, is_fixed=True)
    exact, actual = (with_gradients(lambda *qkv, x=x: linear_attention(*qkv, x), layout, *inputs) for x in layouts)
    torch.testing.assert_close(actual, exact)


@pytest.mark.parametrize("is_fixed", [False, True])
def test_sums_are_float32_in_half_precision_and_an_empty_sample_has_none(is_fixed: bool) -> None:
    """A bf16 sum over 4096 equal keys would stop at 256; the output of padding is zero, even for NaN."""
    layout = SequenceLayout((0, 4096), (0, 4096), 4100, is_fixed=is_fixed)
    x = torch.ones(4100, 1, 2, dtype=torch.bfloat16)
    x[4096:] = torch.nan
    seen: list[Tensor] = []
    out = linear_attention(x, x, 3 * x, layout, lambda sums: seen.append(sums) or sums)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, torch.where(layout.valid_T[:, None, None], 3.0, 0.0).expand(-1, 1, 2).bfloat16())
    assert torch.equal(seen[0][0], torch.zeros(1, 2, 3))
    assert torch.equal(seen[0][1, 0], torch.tensor([[12288.0, 12288.0, 4096.0]] * 2))
