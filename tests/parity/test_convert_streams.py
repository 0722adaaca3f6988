"""FLUX, PixArt, SANA, Wan, Chroma, Qwen-Image, Stable Diffusion 3, Lumina 2, Z-Image and PRX to and from diffusers.

Equal outputs and gradients, exact round trips.
"""

import math
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from diffusers import (
    ChromaTransformer2DModel,
    Flux2Pipeline,
    Flux2Transformer2DModel,
    FluxTransformer2DModel,
    Lumina2Transformer2DModel,
    PixArtTransformer2DModel,
    PRXTransformer2DModel,
    QwenImageTransformer2DModel,
    SanaTransformer2DModel,
    SD3Transformer2DModel,
    WanTransformer3DModel,
    ZImageTransformer2DModel,
)
from diffusers.models import embeddings
from torch import Tensor
from torch.nn.functional import pad

from dit.batch import PackedBatch
from dit.conditions import Entry
from dit.convert.diffusers_cross import DiffusersPixArt, DiffusersSana, DiffusersWan
from dit.convert.diffusers_flux import DiffusersChroma, DiffusersFlux, DiffusersFlux2, DiffusersQwenImage
from dit.convert.diffusers_format import DiffusersFormat
from dit.convert.diffusers_prx import DiffusersPRX
from dit.convert.diffusers_sampling import how_to_sample
from dit.convert.diffusers_sandwich import DiffusersLumina2, DiffusersZImage
from dit.convert.diffusers_sd3 import DiffusersSD3
from dit.objectives.base import shared_level
from dit.parallel.build import parameter_shapes
from dit.patchify import grid_positions, patchify, unpatchify
from dit.sampling.references import add_references
from dit.tracing.forward import ForwardCost
from dit.tracing.packs import PackShape
from dit.verify.public import CALLS, call_flux
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
GRIDS, TEXTS = ((5, 3), (3, 7)), (5, 3)
"""Patches along height and width of each latent, and number of text tokens."""


@dataclass(frozen=True)
class Family:
    form: DiffusersFormat[Any]
    external: Any
    settings: dict[str, Any]

    def small(self, **changes: Any) -> Any:
        return self.external(**{**self.settings, **changes}).eval()


COMMON = {"num_layers": 2, "attention_head_dim": 16, "num_attention_heads": 3, "joint_attention_dim": 20}
FLUX2: dict[str, Any] = {**COMMON, "in_channels": 16, "num_single_layers": 2, "axes_dims_rope": (4, 4, 4, 4)}
CHROMA: dict[str, Any] = {
    **{**COMMON, "in_channels": 16, "num_single_layers": 3, "axes_dims_rope": (4, 6, 6)},
    **{"approximator_num_channels": 16, "approximator_hidden_dim": 24, "approximator_layers": 2},
}
SD3: dict[str, Any] = {
    **{**COMMON, "num_layers": 3, "in_channels": 4, "out_channels": 4, "caption_projection_dim": 48},
    **{"pooled_projection_dim": 12, "sample_size": 16, "pos_embed_max_size": 24},
}
LUMINA2: dict[str, Any] = {
    **{"hidden_size": 64, "num_layers": 2, "num_refiner_layers": 2, "num_attention_heads": 4, "num_kv_heads": 2},
    **{"in_channels": 4, "axes_dim_rope": (4, 8, 4), "cap_feat_dim": 20},
}
Z_IMAGE: dict[str, Any] = {
    **{"dim": 48, "n_layers": 2, "n_refiner_layers": 2, "n_heads": 3, "n_kv_heads": 3, "in_channels": 4},
    **{"axes_dims": (4, 8, 4), "cap_feat_dim": 20, "t_scale": 10.0},
}
PRX: dict[str, Any] = {
    **{"hidden_size": 48, "depth": 2, "num_heads": 3, "mlp_ratio": 2.5, "axes_dim": [6, 10], "theta": 100.0},
    **{"in_channels": 4, "context_in_dim": 20, "time_factor": 100.0},
}
FLUX1: dict[str, Any] = {
    **{**COMMON, "in_channels": 16, "num_single_layers": 2, "pooled_projection_dim": 12, "axes_dims_rope": (4, 6, 6)}
}
PIXART: dict[str, Any] = {
    **{"num_attention_heads": 4, "attention_head_dim": 12, "num_layers": 2, "cross_attention_dim": 48},
    **{"sample_size": 8, "caption_channels": 20, "use_additional_conditions": False, "interpolation_scale": 1},
}
SANA: dict[str, Any] = {
    **{"num_attention_heads": 6, "attention_head_dim": 4, "num_cross_attention_heads": 3, "sample_size": 8},
    **{"cross_attention_head_dim": 8, "cross_attention_dim": 24, "in_channels": 4, "out_channels": 4},
    **{"caption_channels": 20, "num_layers": 2},
}
WAN: dict[str, Any] = {
    **{"num_attention_heads": 3, "attention_head_dim": 16, "in_channels": 4, "out_channels": 4, "text_dim": 20},
    **{"ffn_dim": 80, "num_layers": 2},
}
FAMILIES = {
    "flux_schnell": Family(DiffusersFlux(), FluxTransformer2DModel, {**FLUX1, "guidance_embeds": False}),
    "flux_dev": Family(DiffusersFlux(), FluxTransformer2DModel, {**FLUX1, "guidance_embeds": True}),
    "pixart": Family(DiffusersPixArt(), PixArtTransformer2DModel, PIXART),
    "pixart of interpolated positions": Family(
        DiffusersPixArt(), PixArtTransformer2DModel, {**PIXART, "interpolation_scale": 2, "out_channels": 4}
    ),
    "sana": Family(DiffusersSana(), SanaTransformer2DModel, SANA),
    "sana 1.5": Family(
        DiffusersSana(),
        SanaTransformer2DModel,
        {**SANA, "qk_norm": "rms_norm_across_heads", "mlp_ratio": 3.0, "patch_size": 2, "out_channels": 6},
    ),
    "wan": Family(DiffusersWan(), WanTransformer3DModel, {**WAN, "out_channels": 6, "eps": 1e-5}),
    "flux2_dev": Family(DiffusersFlux2(), Flux2Transformer2DModel, {**FLUX2, "mlp_ratio": 2.0}),
    "flux2_klein": Family(DiffusersFlux2(), Flux2Transformer2DModel, {**FLUX2, "guidance_embeds": False}),
    "chroma": Family(DiffusersChroma(), ChromaTransformer2DModel, CHROMA),
    "qwen_image": Family(
        DiffusersQwenImage(),
        QwenImageTransformer2DModel,
        {**COMMON, "in_channels": 16, "out_channels": 4, "axes_dims_rope": (4, 6, 6)},
    ),
    "qwen_image_edit_2511": Family(
        DiffusersQwenImage(),
        QwenImageTransformer2DModel,
        {**COMMON, "in_channels": 16, "out_channels": 4, "axes_dims_rope": (4, 6, 6), "zero_cond_t": True},
    ),
    "lumina2": Family(DiffusersLumina2(), Lumina2Transformer2DModel, LUMINA2),
    "z_image": Family(DiffusersZImage(), ZImageTransformer2DModel, Z_IMAGE),
    "prx": Family(DiffusersPRX(), PRXTransformer2DModel, PRX),
    "prx of single positions": Family(DiffusersPRX(), PRXTransformer2DModel, {**PRX, "patch_size": 1}),
    "sd3": Family(DiffusersSD3(), SD3Transformer2DModel, {**SD3, "patch_size": 1}),
    "sd3.5_medium": Family(
        DiffusersSD3(), SD3Transformer2DModel, {**SD3, "qk_norm": "rms_norm", "dual_attention_layers": (0, 1)}
    ),
}


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> Family:
    return FAMILIES[request.param]


def import_random(family: Family) -> tuple[Any, Any, dict[str, Tensor]]:
    """Return diffusers' module with random weights, our settings and the imported weights."""
    external = family.small()
    state = random_weights({name: tuple(x.shape) for name, x in external.named_parameters()}, seed=1)
    state |= {name: x.clone() for name, x in external.named_buffers() if name in external.state_dict()}
    external.load_state_dict(state)
    imported = family.form.read_settings(external.config)
    rules = family.form.rules(imported.model, parameter_shapes(imported.model), imported.latent_size)
    weights = rules.from_external(state)
    assert_same_bits(rules.to_external(weights), state)
    assert_round_trip(family.form, external.config)
    # At the usual guidance of 4, sinusoid angles reach 4000, and the float32 sinusoids of diffusers are off by 1e-4.
    model = imported.model
    if getattr(model, "guidance", None) is not None:
        model = replace(model, guidance=0.25)
    return external, model, weights


def latents_and_texts(model: Any) -> tuple[list[Tensor], list[Tensor]]:
    generator, size = torch.Generator().manual_seed(3), model.patch_spatial
    latents = [torch.randn(4, 1, h * size, w * size, generator=generator) for h, w in GRIDS]
    return latents, [torch.randn(n, 20, generator=generator) for n in TEXTS]


def pack_of(model: Any, samples: slice = slice(None)) -> PackedBatch:
    """Return a pack of some of the samples, with pooled texts if the model reads them."""
    latents, texts = latents_and_texts(model)
    batch = packed(model, latents[samples], texts[samples])
    if (pooled_size := getattr(model, "pooled_size", None)) is not None:
        pooled_SD = torch.randn(len(GRIDS), pooled_size, generator=torch.Generator().manual_seed(4))
        batch.conditions |= {"pooled": Entry("sample", pooled_SD[samples])}
    return batch


SINUSOID = embeddings.get_timestep_embedding


def exact_sinusoid(*arguments: Any, **named: Any) -> Tensor:
    """Return the float32 numbers of a sinusoid of diffusers that is computed in float64."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "float32", torch.float64)
        patch.setattr(torch.Tensor, "float", torch.Tensor.double)
        features = SINUSOID(*arguments, **named)
    return features.float()


def test_a_pack_of_two_sizes_equals_two_calls_of_diffusers(
    build_model: BuildModel, monkeypatch: pytest.MonkeyPatch, family: Family
) -> None:
    """Outputs and gradients are equal, so the positions of each image and each text start at zero.

    In float32, diffusers rounds the angles of the time's sinusoid by up to 6e-5. Small denominators of linear attention
    amplify this in gradients of SANA, up to 3e-4 (`attn1.to_q`), so its sinusoids are computed in float64.
    """
    if family.external is SanaTransformer2DModel:
        monkeypatch.setattr(embeddings, "get_timestep_embedding", exact_sinusoid)
    external, model, weights = import_random(family)
    latents, texts = latents_and_texts(model)
    batch, times = pack_of(model), torch.tensor([0.25, 0.75])
    network, exact = load(build_model(model), weights), []
    actual_TC = network(batch.latents_TC, times, batch)
    for i, out_TC in enumerate(actual_TC.split(list(batch.layout.lengths))):
        conditions = {"context": texts[i]}
        if getattr(model, "guidance", None) is not None:
            conditions |= {"guidance": torch.tensor([0.25])}
        if "pooled" in batch.conditions:
            conditions |= {"pooled": batch.conditions["pooled"].values[i : i + 1]}
        (latent,) = CALLS[family.form.class_name](external, latents[i][None], 1000 * times[i : i + 1], conditions)
        exact.append(patchify(latent[0], 1, model.patch_spatial)[0])
        assert relative_error(out_TC.detach(), exact[i].detach()) <= RTOL
    assert_same_gradients(family.form, model, network, actual_TC, external, torch.cat(exact))


EDITING = {"flux_schnell": 1, "flux2_dev": 10, "flux2_klein": 10, "qwen_image": 1, "qwen_image_edit_2511": 1}
"""Families that edit pictures (FLUX.1 Kontext, FLUX.2, Qwen-Image-Edit): spacing of pictures on the first axis."""
REFERENCES = (((4, 4), (6, 20)), ((10, 2),))
"""Height and width of the references of each sample (2 x 2 and 3 x 10 tokens, 5 x 1 tokens)."""


def channels_first(x_TC: Tensor) -> Tensor:
    """Return tokens of 2 x 2 patches of 4 channels with the features in the order of diffusers."""
    return x_TC.unflatten(1, (4, 4)).transpose(1, 2).flatten(1)


def edited_by_diffusers(external: Any, batch: PackedBatch, sample: int, text_KC: Tensor, spacing: int) -> Tensor:
    """Return the prediction for the picture of a sample, from the inputs of the pipeline."""
    begin, length, axes = batch.layout.starts[sample], batch.layout.lengths[sample], external.config.axes_dims_rope
    grids, x_TC = (batch.grids[sample], *batch.reference_grids[sample]), batch.latents_TC[begin : begin + length]
    others: dict[str, Any] = {"img_shapes": [list(grids)]}
    if not isinstance(external, QwenImageTransformer2DModel):
        references = [torch.zeros(1, 1, h, w) for _, h, w in grids[1:]]
        (reference_ids,) = Flux2Pipeline._prepare_image_ids(references, scale=spacing)
        ids, text_ids = pad(grid_positions(grids[0]), (0, 1)), torch.zeros(len(text_KC), len(axes))
        text_ids[:, 3:] = torch.arange(len(text_KC))[:, None]
        others = {"img_ids": torch.cat([ids, reference_ids])[:, : len(axes)], "txt_ids": text_ids}
    if getattr(external.config, "guidance_embeds", False):
        others["guidance"] = torch.tensor([0.25])
    if "pooled" in batch.conditions:
        others["pooled_projections"] = batch.conditions["pooled"].values[sample : sample + 1]
    exact = external(channels_first(x_TC)[None], text_KC[None], timestep=torch.tensor([0.25]), **others).sample
    return channels_first(exact[0, : math.prod(grids[0])])


@pytest.mark.parametrize("name", EDITING)
def test_edited_pictures_equal_those_of_the_diffusers_pipelines(build_model: BuildModel, name: str) -> None:
    """Compare a pack of two sizes with two calls; references follow the picture, each at another position."""
    external, model, weights = import_random(FAMILIES[name])
    _, texts = latents_and_texts(model)
    generator = torch.Generator().manual_seed(5)
    references = [[torch.randn(4, 1, h, w, generator=generator) for h, w in sizes] for sizes in REFERENCES]
    batch = add_references(pack_of(model), references, model.batch_spec(micro_batch_size=2, multiple_of=4))
    network = load(build_model(model), weights)
    predicted_TC = network(batch.latents_TC, shared_level(torch.tensor(0.25), batch.layout).float(), batch)
    actual_TC = predicted_TC[batch.layout.noised_T]
    exact_TC = torch.cat([edited_by_diffusers(external, batch, i, texts[i], EDITING[name]) for i in range(len(GRIDS))])
    assert relative_error(actual_TC.detach(), exact_TC.detach()) <= RTOL
    assert_same_gradients(FAMILIES[name].form, model, network, actual_TC, external, exact_TC)


@torch.no_grad()
def test_a_masked_text_of_chroma_equals_a_shorter_text(build_model: BuildModel) -> None:
    """Values in the padding have no effect. The mask is bool, because attention adds other types to its scores."""
    external, model, weights = import_random(FAMILIES["chroma"])
    latents, texts = latents_and_texts(model)
    batch = packed(model, latents[:1], texts[:1])
    actual = load(build_model(model), weights)(batch.latents_TC, torch.tensor([0.25]), batch)
    padded = torch.cat([texts[0], torch.randn(4, 20)])
    mask = torch.arange(len(padded) + batch.layout.total_tokens)[None]
    mask = (mask < TEXTS[0]) | (mask >= len(padded))
    external.register_forward_pre_hook(
        lambda _, words, named: (words, {**named, "attention_mask": mask}), with_kwargs=True
    )
    (exact,) = call_flux(external, latents[0][None], torch.tensor([250.0]), {"context": padded})
    assert relative_error(unpatchify(actual, batch.grids[0], 1, 2), exact[0]) <= RTOL


@torch.no_grad()
@pytest.mark.parametrize("sides", [((8, 16), (10, 6)), ((8, 16), (16, 8))], ids=["one", "none"])
def test_samples_of_a_pack_may_have_no_learned_tokens(build_model: BuildModel, sides: Any) -> None:
    """Pack an image of 32 tokens for Z-Image with one of 15 or 32; 32 tokens need no learned ones."""
    _, model, weights = import_random(FAMILIES["z_image"])
    latents, texts = [torch.randn(4, 1, h, w) for h, w in sides], [torch.randn(32, 20), torch.randn(3, 20)]
    network, times = load(build_model(model), weights), torch.tensor([0.25, 0.75])
    batch = packed(model, latents, texts)
    parts = network(batch.latents_TC, times, batch).split(list(batch.layout.lengths))
    for i, part_TC in enumerate(parts):
        single = packed(model, latents[i : i + 1], texts[i : i + 1])
        assert relative_error(part_TC, network(single.latents_TC, times[i : i + 1], single)) <= RTOL


def test_the_page_of_an_export_states_inputs_and_outputs_of_the_network() -> None:
    for name, line in {
        "sd3": "the network gets 1000 t as its timestep and predicts the velocity noise - x0",
        "z_image": "the network gets 1 - t as its timestep and predicts minus the velocity noise - x0",
    }.items():
        assert line in how_to_sample(FAMILIES[name].form.read_settings(FAMILIES[name].settings))


def test_flops_of_extended_samples_do_not_follow_from_shorter_ones() -> None:
    """Texts of 33 to 40 tokens cost the same; one of 65 tokens costs more."""
    cost = ForwardCost(DiffusersZImage().read_settings(Z_IMAGE).model)
    for grid, text in [((1, 8, 8), n) for n in range(33, 41)] + [((1, 8, 8), 65), ((1, 5, 7), 70)]:
        assert cost.of_sample(grid, text).total == cost.traced(PackShape((grid,), (text,))).total, (grid, text)
