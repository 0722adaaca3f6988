"""Our packed, parallel-ready ST-DiT computes what the papers' formulas say: outputs and every gradient."""

from dataclasses import replace

import pytest
import torch

from dit.errors import ConfigError
from dit.layers.positions import sincos, spanning
from dit.models.stdit.config import STDiTConfig
from tests.conftest import BuildModel
from tests.parity.cross_cases import check_against_reference
from tests.parity.reference_stdit import STDiTReference
from tests.support.batches import DENSE, MIXED, Sample, draw, pack

ALL_IN_ONE = ["spatial+full+temporal"]
VARIANTS = {
    "alternating": {},
    "all_in_one": {"layer_pattern": ALL_IN_ONE, "num_classes": 5, "num_query_groups": 2},
    "pixart": {
        **{"layer_pattern": ["full"], "qk_layernorm": False, "fps_conditioning": False, "temporal_rope": False},
        **{"position_span": 8.0, "out_channels": 6},
    },
    "rope": {"layer_pattern": ALL_IN_ONE, "position_embedding": "rope_3d", "temporal_rope": False},
    "both_ropes": {"position_embedding": "rope_3d", "rope_factors": [2.0, 1.0, 1.0], "rope_theta": 500.0},
    "span_3d": {"position_embedding": "sincos_3d", "position_span": 3.5, "temporal_rope": False},
    "ropes_linear": {
        **{"position_embedding": "rope_3d", "rope_factors": [2.0, 1.5, 3.0], "rope_scaling": "linear"},
        **{"layer_pattern": ALL_IN_ONE},
    },
    "conditions": {
        "position_embedding": "sincos_3d",
        "size_conditioning": True,
        "patch_temporal": 2,
        "add_bias": False,
    },
    "constants": {"layernorm_epsilon": 1e-2, "time_scale": 30.0, "ffn_hidden_size": 56, "position_span": 3.5},
}


def config(**changes: object) -> STDiTConfig:
    sizes = {"hidden_size": 48, "num_layers": 2, "num_attention_heads": 4, "in_channels": 3, "context_size": 10}
    made = STDiTConfig(**{**sizes, **changes})
    made.validate()
    return made


@pytest.mark.parametrize("name", VARIANTS)
def test_mixed_pack_is_the_formulas(build_model: BuildModel, name: str):
    """Images and clips of one pack differ in time, size and text, and none feels another."""
    made = config(**VARIANTS[name])
    check_against_reference(build_model(made, perturb=0.1), made, MIXED, STDiTReference)


@pytest.mark.parametrize(
    "padding", [{"multiple_of": 8}, {"multiple_of": 4, "tail": 12, "context_multiple_of": 4}], ids=["rows", "all"]
)
def test_padded_pack_is_the_formulas(build_model: BuildModel, padding: dict):
    made = config(layer_pattern=ALL_IN_ONE)
    check_against_reference(build_model(made, perturb=0.1), made, MIXED, STDiTReference, **padding)


def test_dense_batch_is_the_formulas(build_model: BuildModel):
    made = config(layer_pattern=["temporal", "full"])
    samples = [*DENSE, Sample((2, 2, 3), None)]
    check_against_reference(build_model(made, perturb=0.1), made, samples, STDiTReference)


def test_blocks_start_as_the_identity(build_model: BuildModel):
    """At initialisation no sub-layer speaks: neither the gated ones nor the cross-attention, which has no gate."""
    made = config(layer_pattern=ALL_IN_ONE)
    model, batch = build_model(made), pack(MIXED, made, multiple_of=4)
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(batch.layout.total_tokens, 48, generator=generator)
    shared = model.modulation(torch.randn(len(MIXED), 48, generator=generator))
    text = torch.randn(len(batch.conditions["context"].values), 48, generator=generator)
    for layer in model.layers.values():
        after = layer(x, shared, text, batch.layout, batch.conditions["context"].layout, model._plans(batch))
        assert torch.equal(after, x)
    out = model(*draw(batch), batch)
    assert torch.equal(out, torch.zeros_like(out))


def test_spatial_attention_does_not_see_other_frames(build_model: BuildModel):
    """Nor temporal attention other columns: a token changes what the pattern says, and nothing else."""
    for kind, feels in (("spatial", lambda t, h, w: t == 1), ("temporal", lambda t, h, w: (h, w) == (0, 2))):
        made = config(layer_pattern=[kind], num_layers=1)
        model, batch = build_model(made, perturb=0.1), pack([Sample((3, 2, 3), 4)], made)
        inputs, time = draw(batch)
        changed = inputs.clone()
        changed[1 * 6 + 0 * 3 + 2] += 1.0  # (1, 0, 2)
        moved = (model(changed, time, batch) - model(inputs, time, batch)).abs().sum(1) > 0
        assert moved.tolist() == [feels(*index) for index in batch.positions_T3.tolist()]


def test_span_hides_the_resolution():
    """With a span, twice the grid puts every second patch where the small grid's patches are."""
    small, large = (pack([Sample(grid, 1)], config()) for grid in ((1, 2, 3), (1, 4, 6)))
    found = [sincos(spanning(b.positions_T3, b.layout, b.grid_sizes(), 8.0), 48, "sincos_2d") for b in (small, large)]
    torch.testing.assert_close(found[1].view(4, 6, 48)[::2, ::2].flatten(0, 1), found[0])


def test_attention_through_time_reads_the_rotary_settings():
    replace(config(), rope_theta=50.0, rope_scaling="linear", rope_factors=[2.0, 1.0, 1.0]).validate()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"layer_pattern": []}, ["layer_pattern=[]"]),
        ({"num_layers": 3}, ["num_layers=3", "2 layers"]),
        ({"layer_pattern": ["spatial", "time"]}, ["'time'", "temporal"]),
        ({"layer_pattern": ["full+full"]}, ["'full+full'"]),
        ({"layer_pattern": ["spatial", "full+temporal"]}, ["[1, 2]", "same number"]),
        ({"position_span": 0.0}, ["position_span=0.0"]),
        ({"position_span": 8.0, "position_embedding": "rope_3d"}, ["position_span=8.0", "rope_3d"]),
        ({"num_attention_heads": 16}, ["3 features", "temporal_rope"]),
        ({"rope_theta": 50.0, "temporal_rope": False}, ["rope_theta=50.0 has no effect", "'sincos_2d'"]),
        ({"rope_theta": 50.0, "layer_pattern": ["full"]}, ["rope_theta=50.0 has no effect"]),
        ({"rope_factors": [2.0, 1.5, 1.0]}, ["rope_factors=[2.0, 1.5, 1.0] has no effect along h and w"]),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else "",
)
def test_impossible_settings_are_named_with_their_numbers(changes: dict, said: list[str]):
    with pytest.raises(ConfigError) as caught:
        replace(config(), **changes).validate()
    assert all(text in str(caught.value) for text in said)
