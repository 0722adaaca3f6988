"""Our packed, parallel-ready DiT with cross-attention computes what the formulas say: outputs and every gradient."""

from dataclasses import replace

import pytest
import torch

from dit.conditions import per_sample
from dit.models.dit_cross.config import DiTCrossConfig
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
    "grouped": {"num_query_groups": 2, "num_classes": 5},
    "plain_heads": {"qk_layernorm": False, "add_bias": True, "fps_conditioning": False},
    "size": {"size_conditioning": True, "patch_temporal": 2, "out_channels": 5},
    "low_rank": {"adaln_lora_rank": 6, "add_bias": True, "ffn_hidden_size": 40},
    "sincos_2d": {"position_embedding": "sincos_2d"},
    "rope": {"position_embedding": "rope_3d", "num_query_groups": 1},
    "rope_ntk": {"position_embedding": "rope_3d", "rope_factors": [2.0, 1.5, 1.0], "rope_theta": 500.0},
    "rope_linear": {"position_embedding": "rope_3d", "rope_factors": [2.0, 1.5, 1.0], "rope_scaling": "linear"},
    "constants": {"layernorm_epsilon": 1e-2, "time_scale": 30.0},
}


def config(**changes: object) -> DiTCrossConfig:
    sizes = {"hidden_size": 48, "num_layers": 2, "num_attention_heads": 4, "in_channels": 3, "context_size": 10}
    made = DiTCrossConfig(**{**sizes, **changes})
    made.validate()
    return made


@pytest.mark.parametrize("name", VARIANTS)
def test_mixed_pack_is_the_formulas(build_model: BuildModel, name: str):
    """Images and clips of one pack differ in time, length, text, frame rate and class, and none feels another."""
    model_config = config(**VARIANTS[name])
    check_against_reference(build_model(model_config, perturb=0.1), model_config, MIXED)


@pytest.mark.parametrize(
    "padding", [{"multiple_of": 8}, {"multiple_of": 4, "tail": 12, "context_multiple_of": 4}], ids=["rows", "all"]
)
def test_padded_pack_is_the_formulas(build_model: BuildModel, padding: dict):
    model_config = config(num_query_groups=2)
    check_against_reference(build_model(model_config, perturb=0.1), model_config, MIXED, **padding)


def test_dense_batch_is_the_formulas(build_model: BuildModel):
    """Equal grids take the dense path of attention on the queries' side while the texts stay ragged; one is dropped."""
    model_config = config(num_query_groups=2, num_classes=5)
    samples = [*DENSE, Sample((2, 2, 3), None)]
    check_against_reference(build_model(model_config, perturb=0.1), model_config, samples)


@pytest.mark.parametrize("changes", [{}, {"adaln_lora_rank": 6}, {"position_embedding": "rope_3d"}], ids=str)
def test_blocks_start_as_the_identity(build_model: BuildModel, changes: dict):
    """At initialisation each block returns its input bit for bit, and the network predicts exactly zero."""
    model_config = config(**changes)
    model, batch = build_model(model_config), pack(MIXED, model_config, multiple_of=4)
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(batch.layout.total_tokens, 48, generator=generator)
    cond = torch.randn(len(MIXED), 48, generator=generator)
    for layer in model.layers.values():
        assert torch.equal(
            layer(x, cond, batch.conditions["context"].values, batch.layout, batch.conditions["context"].layout), x
        )
    out = model(*draw(batch), batch)
    assert torch.equal(out, torch.zeros_like(out))


@pytest.mark.parametrize("garbage", [float("nan"), float("inf"), 1e30])
def test_padding_never_reaches_real_tokens(build_model: BuildModel, garbage: float):
    check_padding_is_never_read(build_model, config(num_query_groups=2), garbage)


def test_missing_text_is_the_dropped_text(build_model: BuildModel):
    model_config = config()
    check_missing_text_is_dropped_text(build_model(model_config, perturb=0.1), model_config)


def test_every_text_token_counts_and_only_for_its_sample(build_model: BuildModel):
    """The derivative of one sample's output by the texts is zero for every other text, and for its own if dropped."""
    model_config = config()
    model, batch = build_model(model_config, perturb=0.1), pack(MIXED, model_config)
    context = batch.conditions["context"].values.clone().requires_grad_()
    leaf = replace(batch.conditions["context"], values=context)
    out = model(*draw(batch), replace(batch, conditions=batch.conditions | {"context": leaf}))
    for i, (start, length) in enumerate(zip(batch.layout.starts, batch.layout.lengths)):
        (grad,) = torch.autograd.grad(out[start : start + length].square().sum(), context, retain_graph=True)
        own = (batch.conditions["context"].layout.segment_ids_T == i) & (MIXED[i].text_tokens is not None)
        assert (grad[own].abs().sum(1) > 0).all()
        assert not grad[~own].any()


def test_missing_frame_rate_is_thirty(build_model: BuildModel):
    model_config = config(size_conditioning=True)
    model = build_model(model_config, perturb=0.1)
    named = pack([Sample((2, 2, 2), 3, fps=30.0)], model_config)
    inputs, time = draw(named)
    unnamed = replace(named, conditions=named.conditions.without("fps"))
    other = replace(named, conditions=named.conditions | {"fps": per_sample(torch.tensor([24.0]))})
    assert torch.equal(model(inputs, time, named), model(inputs, time, unnamed))
    assert not torch.allclose(model(inputs, time, named), model(inputs, time, other), rtol=1e-3)
