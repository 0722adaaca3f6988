"""What the configs count as kept for the backward pass is what a forward pass leaves alive."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from megatron.core.transformer import TransformerConfig
from torch import Tensor, nn

from dit.backends.provider import LayerProvider
from dit.batch import PackedBatch
from dit.conditions import Conditions, per_sample, per_text_token
from dit.kernels.attention import segment_sdpa
from dit.kernels.recompute import recompute_activations
from dit.layout import SequenceLayout
from dit.models.activations import BatchForm, Kept
from dit.models.base import Stage
from dit.models.dit.config import DiTConfig
from dit.models.dit_cross.config import DiTCrossConfig
from dit.models.flux.config import FluxConfig
from dit.models.moviegen.config import MovieGenConfig
from dit.models.registry import build_backbone
from dit.models.stdit.config import STDiTConfig
from dit.models.wan.config import WanConfig
from dit.patchify import grid_positions
from tests.support.reference import LiveBytes

H = 128
NOT_COUNTED = 0.03  # log-sum-exp of softmax, mean and deviation of norms, a router's scores: some numbers per head
CLASSES: dict[str, Any] = {"hidden_size": H, "num_attention_heads": 4, "in_channels": 4, "num_classes": 5}
TEXT: dict[str, Any] = {"hidden_size": H, "num_attention_heads": 4, "in_channels": 4, "context_size": 16}
EXPERTS: dict[str, Any] = {"num_experts": 4, "moe_ffn_hidden_size": 64}
GROUPS: dict[str, Any] = {"num_query_groups": 2, "ffn_hidden_size": 192, "max_grid": [8, 4, 4]}
MODELS = {
    "dit": DiTConfig(**CLASSES, num_layers=1),
    "dit rotary": DiTConfig(**CLASSES, num_layers=1, position_embedding="rope_3d"),
    "dit qk norm": DiTConfig(**CLASSES, num_layers=1, qk_layernorm=True),
    "dit experts": DiTConfig(**CLASSES, num_layers=1, **EXPERTS),
    "dit_cross": DiTCrossConfig(**TEXT, num_layers=1),
    "dit_cross groups": DiTCrossConfig(**TEXT, num_layers=1, num_query_groups=2, qk_layernorm=False),
    "moviegen": MovieGenConfig(**TEXT, num_layers=1, **GROUPS),
    "moviegen experts": MovieGenConfig(**TEXT, num_layers=1, **GROUPS, **EXPERTS),
    "stdit": STDiTConfig(**TEXT, num_layers=2),
    "stdit in one": STDiTConfig(**TEXT, num_layers=1, layer_pattern=["spatial+full+temporal"], qk_layernorm=False),
    "wan": WanConfig(**TEXT, num_layers=1, ffn_hidden_size=192),
    "flux joint": FluxConfig(
        **TEXT, num_joint_layers=1, num_single_layers=1, pooled_size=8, ffn_hidden_size=192, rope_axes=[8, 12, 12]
    ),
}
MODELS["flux single"] = MODELS["flux joint"]


class FusedRMSNorm(torch.autograd.Function):
    """What CUDA's kernel keeps: the input. CPU has no such kernel and keeps the output before its weight, too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:  # type: ignore[override]
        rstd = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(x, rstd, weight)
        return (x * rstd * weight).to(x.dtype)


@pytest.fixture
def build(one_rank_world, monkeypatch):
    """Build a model of small random weights in a precision."""
    monkeypatch.setattr(nn.functional, "rms_norm", lambda x, shape, weight, eps: FusedRMSNorm.apply(x, weight, eps))

    def build(config, dtype):
        sizes = config.megatron_sizes()
        view = TransformerConfig(
            **sizes.arguments(), perform_initialization=False, gradient_accumulation_fusion=False, params_dtype=dtype
        )
        provider = LayerProvider(view, one_rank_world.collection)
        model = build_backbone(config, provider, segment_sdpa, Stage(range(sizes.num_layers)))
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_(0, 0.02, generator=generator)
        return model

    return build


def deeper(name, config):
    """Return the config with more layers, and those that were added."""
    if name == "flux single":
        return replace(config, num_single_layers=2), [1]
    if name == "flux joint":
        return replace(config, num_joint_layers=2), [0]
    return replace(config, num_layers=2 * config.num_layers), list(range(config.num_layers))


def a_batch(config, frames, text_tokens, samples, ragged):
    grid = (frames, 4, 4)
    layout = SequenceLayout.from_lengths([16 * frames] * samples)
    if ragged:
        # As on a rank of sequence parallelism, which holds some rows and gathers them for attention; here, all.
        layout = layout.select(torch.arange(layout.total_tokens), gathered=True)
    generator = torch.Generator().manual_seed(2)
    texts = config.context_size is not None
    return PackedBatch(
        latents_TC=torch.randn(layout.total_tokens, config.token_channels, generator=generator),
        positions_T3=grid_positions(grid).repeat(samples, 1),
        layout=layout,
        sample_ids_S=torch.arange(samples),
        grids=(grid,) * samples,
        keys=("a",) * samples,
        conditions=Conditions(
            label=per_sample(torch.zeros(samples, dtype=torch.int64)),
            context=per_text_token(
                torch.randn(samples * text_tokens, 16, generator=generator),
                SequenceLayout.from_lengths([text_tokens] * samples),
            )
            if texts
            else None,
            pooled=per_sample(torch.randn(samples, 8, generator=generator)),
        ),
    )


def measured(build, name, recompute="none", dtype=torch.float32, samples=1, ragged=False):
    """Return the numbers that the added layers keep for each token, and for each text token.

    By how they grow with the length, so that weights, modulations and the ends of the model do not count.
    """
    config, (more, added) = MODELS[name], deeper(name, MODELS[name])
    models = [build(c, dtype) for c in (config, more)]
    for model in models:
        for layer in model.units():
            recompute_activations(layer, recompute)

    def kept(frames, text_tokens):
        live = []
        for model in models:
            batch, time_S = a_batch(config, frames, text_tokens, samples, ragged), torch.full((samples,), 0.3)
            model(batch.latents_TC, time_S, batch)  # what is made once for all steps, such as layouts
            with LiveBytes() as alive:
                out_TC = model(batch.latents_TC, time_S, batch)
                live.append(alive.total())
            del out_TC
        return (live[1] - live[0]) / dtype.itemsize

    start = kept(2, 8)
    return (kept(6, 8) - start) / (4 * 16 * samples), (kept(2, 40) - start) / (32 * samples), added


def counted(config, layers, form, recompute="none"):
    """Return what the config says of them, on one rank."""

    def numbers(kept: Kept):
        everything = kept.whole + kept.split
        return {"none": everything, "selective": everything - kept.cheap_whole - kept.cheap_split, "full": kept.input}[
            recompute
        ]

    saved = [config.saved_activations(layer, form) for layer in layers]
    return sum(numbers(s.token) for s in saved), sum(numbers(s.text) for s in saved)


def close(value):
    return pytest.approx(value, rel=NOT_COUNTED, abs=0.15 * H)


@pytest.mark.parametrize("name", MODELS)
def test_a_layer_keeps_what_its_config_counts(build, name):
    token, text, layers = measured(build, name)
    expected = counted(MODELS[name], layers, BatchForm(half=False))
    assert (token, text) == (close(expected[0]), close(expected[1]))


@pytest.mark.parametrize("recompute", ["selective", "full"])
@pytest.mark.parametrize("name", MODELS)
def test_recompute_leaves_what_the_config_counts(build, name, recompute):
    token, text, layers = measured(build, name, recompute)
    expected = counted(MODELS[name], layers, BatchForm(half=False), recompute)
    assert (token, text) == (close(expected[0]), close(expected[1]))


@pytest.mark.parametrize("recompute", ["none", "selective"])
@pytest.mark.parametrize("name", ["dit experts", "wan", "moviegen"])
def test_float32_copies_count_twice_in_bf16(build, name, recompute):
    token, text, layers = measured(build, name, recompute, torch.bfloat16)
    expected = counted(MODELS[name], layers, BatchForm(half=True), recompute)
    assert (token, text) == (close(expected[0]), close(expected[1]))


@pytest.mark.parametrize("recompute", ["none", "selective"])
@pytest.mark.parametrize("name", ["dit", "dit_cross", "stdit", "wan"])
def test_rows_of_several_samples_have_their_own_scale_and_gate(build, name, recompute):
    token, _, layers = measured(build, name, recompute, samples=2, ragged=True)
    form = BatchForm(half=False, several=True, ragged=True)
    assert token == close(counted(MODELS[name], layers, form, recompute)[0])
    assert measured(build, name, recompute, samples=1, ragged=True)[0] < token, "one sample needs no copies"


def test_streams_of_several_samples_are_copied_apart(build):
    token, text, layers = measured(build, "flux joint", samples=2)
    expected = counted(MODELS["flux joint"], layers, BatchForm(half=False, several=True))
    assert (token, text) == (close(expected[0]), close(expected[1]))
