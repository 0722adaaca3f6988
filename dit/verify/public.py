"""Compare a model with the class of diffusers that computes the same, where there is one: outputs and gradients."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dit.batch import PackedBatch
from dit.convert.diffusers_format import format_of_model
from dit.convert.rules import Copies, RuleBook
from dit.errors import ConfigError
from dit.models.base import ModelConfig
from dit.parallel.build import parameter_shapes
from dit.patchify import patchify, unpatchify
from dit.verify.compare import tensor_errors

STEP = 250
"""Step of 1000 of the published models; our time is a quarter."""

Call = Callable[[nn.Module, Tensor, Tensor, Mapping[str, Tensor]], Sequence[Tensor]]
"""From (module, latents `[1, C, T, H, W]`, step `[1]`, conditions by name) to predictions `[1, C, T, H, W]`."""


def _call_dit(module: nn.Module, latents: Tensor, step: Tensor, given: Mapping[str, Tensor]) -> Sequence[Tensor]:
    return [module(latents[:, :, 0], step, given["label"]).sample[:, :, None]]


def _call_pixart(module: nn.Module, latents: Tensor, step: Tensor, given: Mapping[str, Tensor]) -> Sequence[Tensor]:
    return [module(latents[:, :, 0], given["context"][None], step).sample[:, :, None]]


def _call_wan(module: nn.Module, latents: Tensor, step: Tensor, given: Mapping[str, Tensor]) -> Sequence[Tensor]:
    return [module(latents, step.float(), given["context"][None]).sample]


def call_flux(module: nn.Module, latents: Tensor, step: Tensor, given: Mapping[str, Tensor]) -> Sequence[Tensor]:
    """Cut patches of 2 x 2, number them, and put the prediction together, as FLUX's pipeline does."""
    count, channels, _, height, width = latents.shape
    h, w = height // 2, width // 2
    tokens = latents.view(count, channels, h, 2, w, 2).permute(0, 2, 4, 1, 3, 5).reshape(count, h * w, channels * 4)
    ids = torch.zeros(h, w, 3)
    ids[..., 1], ids[..., 2] = torch.arange(h)[:, None], torch.arange(w)[None]
    texts = given["context"].view(count, -1, given["context"].shape[-1])
    guidance = {"guidance": given["guidance"]} if "guidance" in given else {}
    out = module(
        tokens,
        texts,
        given["pooled"],
        step / 1000,
        img_ids=ids.reshape(-1, 3),
        txt_ids=torch.zeros(texts.shape[1], 3),
        **guidance,
    ).sample
    return [out.view(count, h, w, -1, 2, 2).permute(0, 3, 1, 4, 2, 5).reshape(count, -1, 1, height, width)]


def _call_unet(module: nn.Module, latents: Tensor, step: Tensor, given: Mapping[str, Tensor]) -> Sequence[Tensor]:
    added = {"text_embeds": given["pooled"], "time_ids": given["size_and_crop"]} if "pooled" in given else None
    return [module(latents[:, :, 0], step, given["context"][None], added_cond_kwargs=added).sample[:, :, None]]


def call_autoencoder(module: Any, latents: Tensor, step: Tensor, given: Mapping[str, Tensor]) -> Sequence[Tensor]:
    """Return the decoded mean, then mean and log variance of the posterior."""
    posterior = module.encode(latents[:, :, 0]).latent_dist
    return [x[:, :, None] for x in (module.decode(posterior.mean).sample, posterior.mean, posterior.logvar)]


CALLS: Mapping[str, Call] = {
    "AutoencoderKL": call_autoencoder,
    "DiTTransformer2DModel": _call_dit,
    "PixArtTransformer2DModel": _call_pixart,
    "WanTransformer3DModel": _call_wan,
    "FluxTransformer2DModel": call_flux,
    "UNet2DConditionModel": _call_unet,
}


def compare_public(network: nn.Module, model: ModelConfig, batch: PackedBatch) -> tuple[str, dict[str, float]]:
    """Compare the output and every gradient with those of the class of diffusers that has the same weights.

    Args:
        batch: one sample, square and of one frame, without padding.

    Returns:
        The name of the class, or why there is nothing to compare with; the relative errors.
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
        return f"{form.class_name} computes otherwise: {'; '.join(differences)}", {}
    shapes = parameter_shapes(model)
    rules = form.rules(model, shapes, size)
    weights = {name: parameter.detach() for name, parameter in network.named_parameters() if name in shapes}
    theirs = getattr(diffusers, form.class_name).from_config(settings).eval()
    theirs.load_state_dict(rules.to_theirs(weights), strict=not rules.stored_tables)

    given = {name: entry.values for name, entry in batch.conditions.items()}
    if (guidance := getattr(model, "guidance", None)) is not None:
        given["guidance"] = torch.tensor([guidance])
    latents = unpatchify(batch.latents_TC, grid, t, s)[None]
    predictions = CALLS[form.class_name](theirs, latents, torch.tensor([STEP]), given)
    cut = [patchify(x[0], x.shape[2] // grid[0], x.shape[4] // grid[2])[0] for x in predictions]
    exact_TC = torch.cat(cut, 1)
    network.zero_grad(set_to_none=True)
    output_TC = network(batch.latents_TC, torch.tensor([STEP / 1000]), batch)
    errors = tensor_errors({"output": exact_TC.detach()}, {"output": output_TC.detach()})
    cotangent_TC = torch.randn(exact_TC.shape, generator=torch.Generator().manual_seed(STEP))
    exact_TC.backward(cotangent_TC)
    output_TC.backward(cotangent_TC)
    ours = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in network.named_parameters()}
    return form.class_name, errors | _gradients(rules, ours, dict(theirs.named_parameters()))


def _gradients(rules: RuleBook, ours: Mapping[str, Tensor], theirs: Mapping[str, nn.Parameter]) -> dict[str, float]:
    """Return the relative error of each gradient that both have; the gradient of copies is their sum."""
    pairs: dict[str, tuple[Tensor, Tensor]] = {}
    for rule in rules.rules:
        parts = rule.form.to_theirs(ours[rule.ours])
        grads = [theirs[name].grad for name in rule.theirs]
        grads = [torch.zeros_like(part) if grad is None else grad for part, grad in zip(parts, grads, strict=True)]
        if isinstance(rule.form, Copies):
            pairs[rule.ours] = torch.stack(grads).sum(0), parts[0]
        else:
            pairs |= {f"{rule.ours} ({name})": pair for name, pair in zip(rule.theirs, zip(grads, parts))}
    return tensor_errors({n: grad for n, (grad, _) in pairs.items()}, {n: part for n, (_, part) in pairs.items()})
