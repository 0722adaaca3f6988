"""HunyuanVideo 1.5 against the class of diffusers: equal outputs and gradients, round trips, published size."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from diffusers import HunyuanVideo15ImageToVideoPipeline, HunyuanVideo15Transformer3DModel
from torch import Tensor

from dit.batch import PackedBatch
from dit.conditions import Conditions
from dit.convert.diffusers_hunyuan_video import DiffusersHunyuanVideo
from dit.models.hunyuan_video.config import HunyuanVideoConfig, first_frame_and_mask
from dit.parallel.build import parameter_shapes
from dit.patchify import patchify, unpatchify
from dit.verify.public import call_hunyuan_video
from tests.conftest import BuildModel
from tests.parity.convert_cases import (
    assert_round_trip,
    assert_same_bits,
    assert_same_gradients,
    load,
    packed,
    random_weights,
    relative_error,
)

RTOL = 1e-5
FORM = DiffusersHunyuanVideo()
SETTINGS: dict[str, Any] = {
    **{"in_channels": 9, "out_channels": 4, "num_attention_heads": 3, "attention_head_dim": 16, "num_layers": 2},
    **{"text_embed_dim": 20, "text_embed_2_dim": 12, "image_embed_dim": 6, "rope_axes_dim": [4, 6, 6]},
    **{"target_size": 64, "task_type": "t2v"},
}
SIZES = ((3, 5, 3), (2, 3, 7), (5, 1, 3))
"""Frames, height and width of each latent."""
TEXTS, GLYPHS, IMAGES = (5, 3, 4), (4, 0, 2), (0, 3, 7)
"""Number of tokens of the three conditions, for each sample."""


def small(**changes: Any) -> Any:
    return HunyuanVideo15Transformer3DModel(**{**SETTINGS, **changes}).eval()


def import_random(**changes: Any) -> tuple[Any, HunyuanVideoConfig, dict[str, Tensor]]:
    """Return diffusers' module with random weights, our settings and the imported weights."""
    external = small(**changes)
    state = random_weights({name: tuple(x.shape) for name, x in external.state_dict().items()}, seed=1)
    external.load_state_dict(state)
    imported = FORM.read_settings(external.config)
    rules = FORM.rules(imported.model, parameter_shapes(imported.model), imported.latent_size)
    weights = rules.from_external(state)
    assert_same_bits(rules.to_external(weights), state)
    assert_round_trip(FORM, external.config)
    return external, imported.model, weights


def pack_of(
    model: HunyuanVideoConfig, samples: slice = slice(None), sizes: Any = SIZES
) -> tuple[PackedBatch, list[Tensor]]:
    """Return a pack of some of the samples with all conditions of a model, and their latents."""
    generator = torch.Generator().manual_seed(3)
    latents = [torch.randn(4, *size, generator=generator) for size in sizes]
    values = {
        "context": [torch.randn(n, 20, generator=generator) for n in TEXTS],
        "context_2": [torch.randn(n, 12, generator=generator) for n in GLYPHS],
        "image_tokens": [torch.randn(n, 6, generator=generator) for n in IMAGES],
        "first_frames": [first_frame_and_mask(latent + 1) for latent in latents],
    }
    batch = packed(model, latents[samples])
    spec = model.batch_spec()
    entries = {
        c.name: c.pack(values[c.name][samples], batch.layout, spec.patch) for c in spec.conditions if c.name in values
    }
    batch.conditions = Conditions(entries)
    return batch, latents[samples]


@pytest.mark.parametrize("changes", [{}, {"task_type": "i2v"}, {"patch_size": 2, "patch_size_t": 3}], ids=str)
def test_a_pack_of_ragged_conditions_equals_one_call_of_diffusers_per_sample(
    build_model: BuildModel, changes: Any
) -> None:
    """Outputs and gradients of samples without a picture, without glyph text, and with both.

    diffusers pads each condition and moves valid tokens to the front; our pack has only valid tokens.
    """
    external, model, weights = import_random(**changes)
    t, s = model.patch_temporal, model.patch_spatial
    sizes = [(frames * t, height * s, width * s) for frames, height, width in SIZES]
    batch, latents = pack_of(model, sizes=sizes)
    times, network, exact = torch.tensor([0.25, 0.75, 0.5]), load(build_model(model), weights), []
    actual_TC = network(batch.latents_TC, times, batch)
    for i, out_TC in enumerate(actual_TC.split(list(batch.layout.lengths))):
        single, _ = pack_of(model, slice(i, i + 1), sizes)
        conditions = {name: entry.values for name, entry in single.conditions.items()}
        (latent,) = call_hunyuan_video(external, latents[i][None], 1000 * times[i : i + 1], conditions)
        exact.append(patchify(latent[0], t, s)[0])
        assert relative_error(out_TC.detach(), exact[i].detach()) <= RTOL
    assert_same_gradients(FORM, model, network, actual_TC, external, torch.cat(exact))


@torch.no_grad()
def test_a_padded_batch_of_diffusers_equals_a_pack(build_model: BuildModel) -> None:
    """Two clips of one size with texts of different lengths, with masked padding before and after each text."""
    external, model, weights = import_random(task_type="i2v")
    sizes = [SIZES[0]] * 3
    batch, latents = pack_of(model, slice(1, 3), sizes)
    images = torch.randn(2, 3, 6, generator=torch.Generator().manual_seed(5))
    required = {condition.name: condition for condition in model.conditions()}
    batch.conditions |= {"image_tokens": required["image_tokens"].pack(list(images), batch.layout, (1, 1))}
    times = torch.tensor([0.25, 0.75])
    padded, masks = {}, {}
    for name, longest in (("context", 7), ("context_2", 4)):
        entry = batch.conditions[name]
        padded[name], masks[name] = torch.randn(2, longest, entry.values.shape[1]), torch.zeros(2, longest)
        for i, text in enumerate(entry.values.split(list(entry.layout.lengths))):
            padded[name][i, 1 : 1 + len(text)], masks[name][i, 1 : 1 + len(text)] = text, 1
    inputs = torch.stack([torch.cat([x, first_frame_and_mask(x + 1)]) for x in latents])
    exact = external(
        inputs, 1000 * times, padded["context"], masks["context"], None, padded["context_2"], masks["context_2"], images
    ).sample
    actual = load(build_model(model), weights)(batch.latents_TC, times, batch)
    for i, out_TC in enumerate(actual.split(list(batch.layout.lengths))):
        assert relative_error(unpatchify(out_TC, batch.grids[i], 1, 1), exact[i]) <= RTOL


def test_the_first_frame_and_its_mask_equal_those_of_the_pipeline() -> None:
    latent = torch.randn(4, 3, 5, 2)
    pipeline = SimpleNamespace(_get_image_latents=lambda **_: latent[None, :, :1], vae=None, video_processor=None)
    prepare: Any = HunyuanVideo15ImageToVideoPipeline.prepare_cond_latents_and_mask
    exact = prepare(pipeline, latent[None], None, 1, 80, 32, torch.float32, torch.device("cpu"))
    assert torch.equal(first_frame_and_mask(latent), torch.cat(exact, 1)[0])
