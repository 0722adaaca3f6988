"""Our packed, parallel-ready FLUX computes what its description says: outputs, every gradient, sizes and work."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from dit.conditions import per_sample
from dit.errors import BatchError, ConfigError
from dit.joint_layout import joint_layout
from dit.models.flux.config import FluxConfig
from dit.monitoring.flops import PackFlops
from dit.parallel.build import count_parameters
from tests.conftest import BuildModel
from tests.parity.costs import forward_flops, num_parameters
from tests.parity.cross_cases import check_against_reference
from tests.parity.reference_flux import DROPPED_TOKENS, FluxReference
from tests.support.batches import DENSE, MIXED, Sample, draw, pack
from tests.support.reference import relative_error

SIZES: dict[str, Any] = {
    **{"hidden_size": 48, "num_joint_layers": 2, "num_single_layers": 2, "num_attention_heads": 4, "in_channels": 3},
    **{"context_size": 10, "pooled_size": 7, "ffn_hidden_size": 40, "rope_axes": [2, 6, 4]},
}
VARIANTS: dict[str, dict] = {
    "default": {},
    "guidance": {"guidance": 3.5, "time_scale": 30.0},
    "sincos_3d": {"position_embedding": "sincos_3d", "rope_axes": [16, 56, 56]},
    "constants": {"layernorm_epsilon": 1e-2, "rope_theta": 50.0, "out_channels": 5, "patch_temporal": 2},
    "single": {"num_joint_layers": 1, "num_single_layers": 3, "rope_axes": [4, 4, 4]},
    "rope_ntk": {"rope_factors": [2.0, 1.5, 3.0]},
    "rope_linear": {"rope_factors": [2.0, 1.5, 3.0], "rope_scaling": "linear"},
}


def config(**changes: object) -> FluxConfig:
    made = FluxConfig(**{**SIZES, **changes})
    made.validate()
    return made


@pytest.mark.parametrize("name", VARIANTS)
def test_mixed_pack_is_the_formulas(build_model: BuildModel, name: str):
    """Images and clips of one pack differ in time, length and text, and none feels another."""
    model_config = config(**VARIANTS[name])
    model = build_model(model_config, perturb=0.1)
    check_against_reference(model, model_config, MIXED, kind=FluxReference)


@pytest.mark.parametrize(
    "padding", [{"multiple_of": 8}, {"multiple_of": 4, "tail": 12, "context_multiple_of": 4}], ids=["rows", "all"]
)
def test_padded_pack_is_the_formulas(build_model: BuildModel, padding: dict):
    model_config = config()
    model = build_model(model_config, perturb=0.1)
    check_against_reference(model, model_config, MIXED, kind=FluxReference, **padding)


@pytest.mark.parametrize("texts", [(3, None, 3), (2, None, 1)], ids=["equal", "ragged"])
def test_dense_batch_is_the_formulas(build_model: BuildModel, texts: tuple):
    """Images of one size are a dense batch, with texts of one length all the way through attention."""
    model_config = config()
    samples = [replace(sample, text_tokens=n) for sample, n in zip(DENSE, texts)]
    model = build_model(model_config, perturb=0.1)
    assert (pack(samples, model_config).conditions["context"].layout.uniform_length is None) == (texts == (2, None, 1))
    check_against_reference(model, model_config, samples, kind=FluxReference)


def test_joint_packs_hold_every_row_once():
    """Text first, image behind it, then padding, sample by sample; and the way back."""
    batch = pack(MIXED, config(), multiple_of=8, tail=8, context_multiple_of=4)
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


def test_blocks_start_as_the_identity(build_model: BuildModel):
    """At initialisation each block returns its rows bit for bit, and the network predicts exactly zero."""
    model_config = config()
    model, batch = build_model(model_config), pack(MIXED, model_config, multiple_of=4)
    joint = joint_layout(batch.conditions["context"].layout, batch.layout)
    generator = torch.Generator().manual_seed(2)
    text = torch.randn(batch.conditions["context"].layout.total_tokens, 48, generator=generator)
    image = torch.randn(batch.layout.total_tokens, 48, generator=generator)
    cond = torch.randn(len(MIXED), 48, generator=generator)
    rows = joint.join(text, image)
    rotation = model.rotary(torch.zeros(len(rows), 3))
    for i in (0, 1):
        after = model.layers[str(i)](
            text, image, cond, batch.conditions["context"].layout, batch.layout, joint, rotation
        )
        assert torch.equal(after[0], text)
        assert torch.equal(after[1], image)
    for i in (2, 3):
        assert torch.equal(model.layers[str(i)](rows, cond, joint, joint, rotation), rows)
    out = model(*draw(batch), batch)
    assert torch.equal(out, torch.zeros_like(out))


def test_missing_text_is_one_null_token(build_model: BuildModel):
    """A dropped text keeps its length, so joint attention distinguishes it from a missing one (one null token)."""
    model_config = config()
    model = build_model(model_config, perturb=0.1)
    dropped = pack([Sample((2, 2, 2)), Sample((1, 3, 3))], model_config)
    inputs, time = draw(dropped)
    assert dropped.conditions["context"].layout.lengths == (DROPPED_TOKENS,) * 2
    absent = replace(dropped, conditions=dropped.conditions.without("context", "pooled"))
    one = pack([Sample((2, 2, 2), 1), Sample((1, 3, 3), 1)], model_config)
    gone = {name: replace(one.conditions[name], dropped_S=torch.tensor([True, True])) for name in ("context", "pooled")}
    one = replace(one, conditions=one.conditions | gone)
    assert torch.equal(model(inputs, time, absent), model(inputs, time, one))
    assert relative_error(model(inputs, time, dropped), model(inputs, time, one)) > 1e-3


def test_pooled_texts_are_one_for_each_sample():
    batch = pack(MIXED, config())
    with pytest.raises(BatchError, match="'pooled' has 3 rows, needs 4"):
        replace(
            batch, conditions=batch.conditions | {"pooled": per_sample(batch.conditions["pooled"].values[:3])}
        ).validate()


NULLS = 4096 + 768  # a null text and a null pooled text, for guidance without a text encoder at hand
NAMED = {
    # FLUX.1-dev as published: 11.9 B, of which its checkpoint counts 11,901,408,320 with the guidance embedder.
    "FLUX.1-dev": (FluxConfig(guidance=3.5), 11_901_408_320 + NULLS, 11.9e9),
    "FLUX.1-schnell": (FluxConfig(), 11_891_178_560 + NULLS, 11.9e9),
    "535M": (FluxConfig(num_joint_layers=1, num_single_layers=1), 535_323_200, 535e6),
}


@pytest.mark.usefixtures("one_rank_world")
@pytest.mark.parametrize("name", NAMED)
def test_named_sizes_have_their_parameters(name: str):
    made, ours, published = NAMED[name]
    assert count_parameters(made) == ours
    assert num_parameters(made) == ours
    assert ours == pytest.approx(published, rel=0.01)


@pytest.mark.parametrize("samples", [DENSE, MIXED], ids=["dense", "mixed"])
@pytest.mark.parametrize("guidance", [None, 3.5])
def test_flops_are_those_of_torch(build_model: BuildModel, samples: list[Sample], guidance: float | None):
    """The forward count is exact; training does not count the gradients of the inputs, which are not needed."""
    made = config(guidance=guidance)
    model, batch = build_model(made, perturb=0.1), pack(samples, made, multiple_of=8)
    inputs, time = draw(batch)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        out = model(inputs, time, batch)
        forward = counter.get_total_flops()
        out.sum().backward()
    shape, flops = (batch.layout, batch.grids, batch.conditions["context"].layout), PackFlops(made)
    assert forward == flops.forward(*shape, convention="hardware") == forward_flops(made, *shape, padding=True)
    sinusoids = 256 * (1 + (guidance is not None))
    unneeded = len(inputs) * made.token_channels + len(samples) * sinusoids
    exact = flops.training(*shape, convention="hardware") - 2 * unneeded * made.hidden_size
    assert counter.get_total_flops() == exact


def test_recompute_of_every_block_adds_the_blocks():
    """Recomputing every block once adds their work, and that of nothing else."""
    made, batch = config(), pack(MIXED, config())
    shape, flops = (batch.layout, batch.grids, batch.conditions["context"].layout), PackFlops(made)
    more = replace(made, num_joint_layers=2 * made.num_joint_layers, num_single_layers=2 * made.num_single_layers)
    blocks = forward_flops(more, *shape) - forward_flops(made, *shape)
    again, once = (flops.training(*shape, convention="hardware", recomputed=share) for share in (1.0, 0.0))
    assert again == once + blocks


@pytest.mark.parametrize(
    ("changes", "said"),
    [
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
    ids=lambda value: ",".join(value) if isinstance(value, dict) else "",
)
def test_impossible_sizes_are_named_with_their_numbers(changes: dict, said: list[str]):
    with pytest.raises(ConfigError) as caught:
        config(**changes)
    assert all(text in str(caught.value) for text in said)
