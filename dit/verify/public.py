"""Comparison of a model's outputs and gradients with the equivalent class of diffusers, if there is one."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn

from dit.batch import PackedBatch
from dit.convert.diffusers_format import format_of_model
from dit.convert.rules import Copies, RuleBook
from dit.errors import ConfigError
from dit.models.base import ModelConfig
from dit.parallel.build import parameter_shapes
from dit.patchify import patchify, unpatchify
from dit.verify.compare import tensor_errors

STEP = 875
"""Timestep out of 1000, as published models count it; it equals time 0.875 in this project.

The time is exact in fp32, and the step is not exact in bf16, which has 8 bits: a rounded step changes the output.
"""

Tensors = Mapping[str, Tensor]
Call = Callable[[nn.Module, Tensor, Tensor, Tensors], Sequence[Tensor]]
"""From (module, latents `[1, C, T, H, W]`, step `[1]`, conditions by name) to predictions `[1, C, T, H, W]`."""


def _of_pictures(call: Callable[[nn.Module, Tensor, Tensor, Tensors], Any]) -> Call:
    """Return the call of a module of pictures, whose latents have no time axis."""

    def called(module: nn.Module, latents: Tensor, step: Tensor, given: Tensors) -> Sequence[Tensor]:
        return [call(module, latents[:, :, 0], step, given).sample[:, :, None]]

    return called


def _texts(latents: Tensor, conditions: Tensors) -> Tensor:
    """Return the embeddings of the texts, which have equal lengths: `[1, text tokens, width]`."""
    return conditions["context"].view(len(latents), -1, conditions["context"].shape[-1])


def _tokens(latents: Tensor) -> tuple[Tensor, tuple[int, int]]:
    """Split latents into patches of 2 x 2, channels slowest; return also the numbers of patches along h and w."""
    tokens = rearrange(latents, "n c 1 (h i) (w j) -> n (h w) (c i j)", i=2, j=2)
    return tokens, (latents.shape[3] // 2, latents.shape[4] // 2)


def _latents(tokens: Tensor, grid: tuple[int, int]) -> Tensor:
    """Invert `_tokens`."""
    return rearrange(tokens, "n (h w) (c i j) -> n c 1 (h i) (w j)", h=grid[0], i=2, j=2)


def _position_ids(grid: tuple[int, int], num_texts: int, axes: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return positions of patches and texts: h and w, and the index of the text on the fourth axis if there is one."""
    ids = torch.zeros(*grid, axes, device=device)
    ids[..., 1] = torch.arange(grid[0], device=device)[:, None]
    ids[..., 2] = torch.arange(grid[1], device=device)[None]
    text_ids = torch.zeros(num_texts, axes, device=device)
    text_ids[:, 3:] = torch.arange(num_texts, device=device)[:, None]
    return ids.flatten(0, 1), text_ids


def call_flux(module: Any, latents: Tensor, step: Tensor, conditions: Tensors) -> Sequence[Tensor]:
    """Call FLUX.1, FLUX.2 or Chroma as the pipelines do."""
    tokens, grid = _tokens(latents)
    texts = _texts(latents, conditions)
    ids, text_ids = _position_ids(grid, texts.shape[1], len(module.config["axes_dims_rope"]), latents.device)
    others = {"pooled_projections": conditions["pooled"]} if "pooled" in conditions else {}
    others |= {"guidance": conditions["guidance"]} if "guidance" in conditions else {}
    return [_latents(module(tokens, texts, timestep=step / 1000, img_ids=ids, txt_ids=text_ids, **others).sample, grid)]


def call_qwen_image(module: nn.Module, latents: Tensor, step: Tensor, conditions: Tensors) -> Sequence[Tensor]:
    """Call Qwen-Image as the pipeline does."""
    tokens, grid = _tokens(latents)
    texts = _texts(latents, conditions)
    shapes = [[(1, *grid)]] * len(latents)
    return [_latents(module(tokens, texts, timestep=step / 1000, img_shapes=shapes).sample, grid)]


def call_lumina2(module: nn.Module, latents: Tensor, step: Tensor, conditions: Tensors) -> Sequence[Tensor]:
    """Call Lumina 2 as the pipeline does: from the time of the data, with a negated output."""
    texts = _texts(latents, conditions)
    mask = torch.ones(texts.shape[:2], dtype=torch.int64, device=texts.device)
    return [-module(latents[:, :, 0], 1 - step / 1000, texts, mask).sample[:, :, None]]


def call_z_image(module: nn.Module, latents: Tensor, step: Tensor, conditions: Tensors) -> Sequence[Tensor]:
    """Call Z-Image as the pipeline does: from the time of the data, with a negated output."""
    return [-torch.stack(module(list(latents), 1 - step / 1000, [conditions["context"]]).sample)]


def call_hunyuan_video(module: Any, latents: Tensor, step: Tensor, conditions: Tensors) -> Sequence[Tensor]:
    """Call HunyuanVideo 1.5 as the pipelines do; zeros, masked out, are a missing picture or shown text."""
    config = module.config
    first = torch.cat([torch.zeros_like(latents), torch.zeros_like(latents[:, :1])], 1)
    if "first_frames" in conditions:
        t, s = config.patch_size_t, config.patch_size
        grid = (latents.shape[2] // t, latents.shape[3] // s, latents.shape[4] // s)
        first = unpatchify(conditions["first_frames"], grid, t, s)[None].to(latents.dtype)
    texts = conditions["context"][None]
    none = {
        "context_2": texts.new_zeros(0, config.text_embed_2_dim),
        "image_tokens": texts.new_zeros(0, config.image_embed_dim),
    }
    glyphs, images = ({**none, **conditions}[name][None] for name in none)
    masks = [torch.ones(x.shape[:2], dtype=torch.int64, device=x.device) for x in (texts, glyphs)]
    if not glyphs.shape[1]:
        glyphs, masks[1] = texts.new_zeros(1, 2, glyphs.shape[2]), masks[0].new_zeros(1, 2)
    if not images.shape[1]:
        images = texts.new_zeros(1, 2, images.shape[2])
    inputs = torch.cat([latents, first], 1)
    return [module(inputs, step.float(), texts, masks[0], None, glyphs, masks[1], images).sample]


def _unet(module: nn.Module, latents: Tensor, step: Tensor, given: Tensors) -> Any:
    added = {"text_embeds": given["pooled"], "time_ids": given["size_and_crop"]} if "pooled" in given else None
    return module(latents, step, given["context"][None], added_cond_kwargs=added)


def call_autoencoder(module: Any, latents: Tensor, step: Tensor, conditions: Tensors) -> Sequence[Tensor]:
    """Return the decoded mean, then mean and log variance of the posterior."""
    posterior = module.encode(latents[:, :, 0]).latent_dist
    return [x[:, :, None] for x in (module.decode(posterior.mean).sample, posterior.mean, posterior.logvar)]


def call_vq(module: Any, latents: Tensor, step: Tensor, conditions: Tensors) -> Sequence[Tensor]:
    """Return the decoded entries, then the latent, its entries and their indices."""
    z = module.encode(latents[:, :, 0]).latents
    code = module.quantize(z)[2][2].view(len(z), *z.shape[2:])
    entries = module.quantize.embedding(code).permute(0, 3, 1, 2)
    return [x[:, :, None] for x in (module.decode(z).sample, z, entries, code[:, None])]


_PIXART = _of_pictures(lambda module, x, step, given: module(x, given["context"][None], step))
CALLS: Mapping[str, Call] = {
    "AutoencoderKL": call_autoencoder,
    "VQModel": call_vq,
    "DiTTransformer2DModel": _of_pictures(lambda module, x, step, given: module(x, step, given["label"])),
    "PRXTransformer2DModel": _of_pictures(
        lambda module, x, step, given: module(x, step / 1000, given["context"][None])
    ),
    "PixArtTransformer2DModel": _PIXART,
    "SanaTransformer2DModel": _PIXART,
    "HunyuanVideo15Transformer3DModel": call_hunyuan_video,
    "WanTransformer3DModel": lambda module, x, step, given: [module(x, step.float(), given["context"][None]).sample],
    "ChromaTransformer2DModel": call_flux,
    "FluxTransformer2DModel": call_flux,
    "Flux2Transformer2DModel": call_flux,
    "Lumina2Transformer2DModel": call_lumina2,
    "QwenImageTransformer2DModel": call_qwen_image,
    "ZImageTransformer2DModel": call_z_image,
    "SD3Transformer2DModel": _of_pictures(
        lambda module, x, step, given: module(x, _texts(x, given), given["pooled"], step)
    ),
    "UNet2DConditionModel": _of_pictures(_unet),
}


def compare_public(network: nn.Module, model: ModelConfig, batch: PackedBatch) -> tuple[str, dict[str, float]]:
    """Compare the output and every gradient with those of the equivalent diffusers class, loaded with the same weights.

    Args:
        batch: one square sample of one frame, without padding.

    Returns:
        The class name, or the reason why there is no comparison; and the relative errors.
    """
    try:
        import diffusers
    except ImportError:
        return "diffusers is not installed", {}
    if model.adapters is not None:
        return "diffusers has no model with these adapters", {}
    t, s = model.patch_temporal, model.patch_spatial
    (grid,) = batch.grids
    size = (grid[0] * t, grid[1] * s, grid[2] * s)
    try:
        form = format_of_model(model)
        settings, differences = form.write_settings(model, size)
    except ConfigError as error:
        return f"no class of diffusers: {error}", {}
    if differences:
        return f"{form.class_name} computes a different function: {'; '.join(differences)}", {}
    shapes = parameter_shapes(model)
    rules = form.rules(model, shapes, size)
    weights = {name: parameter.detach() for name, parameter in network.named_parameters() if name in shapes}
    device = batch.latents_TC.device
    reference = getattr(diffusers, form.class_name).from_config(settings).eval().to(device)
    reference.load_state_dict(rules.to_external(weights), strict=not rules.stored_tables)

    conditions = {name: entry.values for name, entry in batch.conditions.items()}
    if (guidance := getattr(model, "guidance", None)) is not None:
        conditions["guidance"] = torch.tensor([guidance], device=device)
    latents = unpatchify(batch.latents_TC, grid, t, s)[None]
    if (control_TC := conditions.get("control")) is not None:
        latents = torch.cat([latents, unpatchify(control_TC, grid, t, s)[None]], 1)
    predictions = CALLS[form.class_name](reference, latents, torch.tensor([STEP], device=device), conditions)
    cut = [patchify(x[0], x.shape[2] // grid[0], x.shape[4] // grid[2])[0] for x in predictions]
    exact_TC = torch.cat(cut, 1)
    network.zero_grad(set_to_none=True)
    output_TC = network(batch.latents_TC, torch.tensor([STEP / 1000], device=device), batch)
    output_TC = output_TC[:, : exact_TC.shape[1]]  # without the outputs of auxiliary networks
    errors = tensor_errors({"output": exact_TC.detach()}, {"output": output_TC.detach()})
    cotangent_TC = torch.randn(exact_TC.shape, generator=torch.Generator().manual_seed(STEP)).to(device)
    exact_TC.backward(cotangent_TC)
    output_TC.backward(cotangent_TC)
    gradients = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in network.named_parameters()}
    return form.class_name, errors | gradient_errors(rules, gradients, dict(reference.named_parameters()))


def gradient_errors(
    rules: RuleBook, ours: Mapping[str, Tensor], theirs: Mapping[str, nn.Parameter]
) -> dict[str, float]:
    """Return the relative error of each gradient that both models have; gradients of copies are summed."""
    pairs: dict[str, tuple[Tensor, Tensor]] = {}
    for rule in rules.rules:
        parts = rule.form.to_external(ours[rule.name])
        stored = [theirs[name].grad for name in rule.external_names]
        grads = [torch.zeros_like(part) if grad is None else grad for part, grad in zip(parts, stored, strict=True)]
        if isinstance(rule.form, Copies):
            pairs[rule.name] = torch.stack(grads).sum(0), parts[0]
        else:
            pairs |= {f"{rule.name} ({name})": pair for name, pair in zip(rule.external_names, zip(grads, parts))}
    return tensor_errors({n: grad for n, (grad, _) in pairs.items()}, {n: part for n, (_, part) in pairs.items()})
