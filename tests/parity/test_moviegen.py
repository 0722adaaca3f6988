"""Our packed, parallel-ready Movie Gen backbone computes what the paper's formulas say: outputs and every gradient."""

import pytest
import torch

from dit.errors import BatchError
from dit.models.moviegen.config import MovieGenConfig
from tests.conftest import BuildModel
from tests.parity.cross_cases import (
    DENSE,
    MIXED,
    Sample,
    check_against_reference,
    check_missing_text_is_dropped_text,
    check_padding_is_never_read,
    draw,
    pack,
)

VARIANTS = {
    "default": {},
    "plain_heads": {"qk_layernorm": False, "num_query_groups": None, "num_classes": 5},
    "conditions": {"fps_conditioning": True, "size_conditioning": True, "patch_temporal": 2},
    "rope": {"position_embedding": "rope_3d", "rope_factors": [2.0, 1.0, 1.0], "ffn_hidden_size": None},
    "sincos_3d": {"position_embedding": "sincos_3d"},
    "experts_choose": {"num_experts": 4, "moe_ffn_hidden_size": 24, "moe_capacity_factor": 1.5},
    "tokens_choose": {"num_experts": 3, "moe_router": "top_k", "moe_top_k": 2, "moe_aux_loss_coeff": 0.0},
    "constants": {"layernorm_epsilon": 1e-2, "time_scale": 30.0, "out_channels": 2},
}


def config(**changes: object) -> MovieGenConfig:
    sizes = {"hidden_size": 48, "num_layers": 2, "num_attention_heads": 4, "in_channels": 3, "context_size": 10}
    small = {"num_query_groups": 2, "ffn_hidden_size": 56, "max_grid": [4, 5, 6]}
    if changes.get("position_embedding", "learned_3d") != "learned_3d":
        del small["max_grid"]
    made = MovieGenConfig(**{**sizes, **small, **changes})
    made.validate()
    return made


@pytest.mark.parametrize("name", VARIANTS)
def test_mixed_pack_is_the_formulas(build_model: BuildModel, name: str):
    """Images and clips of one pack differ in time, length and text, and none feels another."""
    model_config = config(**VARIANTS[name])
    check_against_reference(build_model(model_config, perturb=0.1), model_config, MIXED)


@pytest.mark.parametrize(
    "padding", [{"multiple_of": 8}, {"multiple_of": 4, "tail": 12, "context_multiple_of": 4}], ids=["rows", "all"]
)
def test_padded_pack_is_the_formulas(build_model: BuildModel, padding: dict):
    model_config = config()
    check_against_reference(build_model(model_config, perturb=0.1), model_config, MIXED, **padding)


def test_dense_batch_is_the_formulas(build_model: BuildModel):
    model_config = config()
    samples = [*DENSE, Sample((2, 2, 3), None)]
    check_against_reference(build_model(model_config, perturb=0.1), model_config, samples)


def test_blocks_start_as_the_addition_of_positions(build_model: BuildModel):
    """At initialisation no sub-layer speaks: neither the gated ones nor the cross-attention, which has no gate."""
    model_config = config()
    model, batch = build_model(model_config), pack(MIXED, model_config, multiple_of=4)
    generator = torch.Generator().manual_seed(2)
    x, positions = torch.randn(2, batch.layout.total_tokens, 48, generator=generator)
    cond = torch.randn(len(MIXED), 48, generator=generator)
    for layer in model.layers.values():
        after = layer(
            x, positions, cond, batch.conditions["context"].values, batch.layout, batch.conditions["context"].layout
        )
        assert torch.equal(after, x + positions)
    out = model(*draw(batch), batch)
    assert torch.equal(out, torch.zeros_like(out))


@pytest.mark.parametrize("garbage", [float("nan"), float("inf"), 1e30])
def test_padding_never_reaches_real_tokens(build_model: BuildModel, garbage: float):
    check_padding_is_never_read(build_model, config(), garbage)


def test_missing_text_is_the_dropped_text(build_model: BuildModel):
    model_config = config()
    check_missing_text_is_dropped_text(build_model(model_config, perturb=0.1), model_config)


@pytest.mark.parametrize("grid", [(5, 2, 2), (1, 6, 2), (1, 2, 7)])
def test_samples_beyond_the_position_tables_are_refused(build_model: BuildModel, grid: tuple[int, int, int]):
    """Nothing aliases: the last row works, the next is an error that names the sample and both sizes."""
    model_config = config()
    model = build_model(model_config, perturb=0.1)
    fits = pack([Sample((4, 5, 6), 2)], model_config)
    assert model(*draw(fits), fits).isfinite().all()
    batch = pack([Sample((1, 2, 2), 2), Sample(grid, 3)], model_config)
    with pytest.raises(BatchError, match=rf"sample '1' has \({grid[0]}, {grid[1]}, {grid[2]}\).*\(4, 5, 6\)"):
        model(*draw(batch), batch)


def test_rotary_positions_have_no_end(build_model: BuildModel):
    model_config = config(position_embedding="rope_3d")
    model = build_model(model_config, perturb=0.1)
    batch = pack([Sample((9, 7, 8), 3)], model_config)
    assert model(*draw(batch), batch).isfinite().all()
