"""Convert state dicts of facebookresearch/DiT to and from our DiT; functions that diffusers' DiT shares.

The order in a predicted patch is the same as ours: channels fastest, all means before all variances. The learned
variance is the second half of `out_channels`. Times are steps 0 to 999, so `time_scale` must be 1000. The fixed
position table is stored in their files; we compute it.

Source: Peebles and Xie 2023, arXiv:2212.09748; names of the public `models.py`.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Optional, TypeGuard

from torch import Tensor

from dit.convert.diffusers_format import LatentSize, TrainedModel, check_settings, patches
from dit.convert.rules import ONLY_SUPPORTED, ByHead, Form, RuleBook, Shape, layer_rules, require
from dit.errors import ConfigError
from dit.layers.positions import sincos
from dit.models.base import ModelConfig
from dit.models.dit.config import DiTConfig
from dit.models.transformer_config import TransformerModelConfig
from dit.objectives.ddpm import DDPM, LearnedVariance
from dit.patchify import grid_positions

PUBLISHED_HEADS = {384: 6, 768: 12, 1024: 16, 1152: 16}
"""Attention heads of the published sizes S, B, L and XL by width, because they do not follow from shapes."""
NAMES = {
    "embed": "x_embedder.proj",
    "conditioner.time.linear_(1|2)": "t_embedder.mlp.(0|2)",
    "conditioner.label": "y_embedder.embedding_table",
    "layers.#.attention.linear_(qkv|proj)": "blocks.#.attn.(qkv|proj)",
    "layers.#.mlp.linear_fc(1|2)": "blocks.#.mlp.fc(1|2)",
    "layers.#.modulation.linear": "blocks.#.adaLN_modulation.1",
    "head.(modulation|linear)": "final_layer.(adaLN_modulation.1|linear)",
}
FREE = (
    *("in_channels", "out_channels", "patch_spatial", "hidden_size", "ffn_hidden_size"),
    *("num_layers", "num_attention_heads", "num_classes", "routing"),
)
"""Our settings that the original model has, or that do not change the network."""
_NEEDED = ("x_embedder.proj.weight", "y_embedder.embedding_table.weight", "final_layer.linear.weight", "pos_embed")


GUIDED_CHANNELS = 3
"""Channels of a latent, out of 4, that facebookresearch/DiT guides; diffusers' pipeline guides all."""


def predicts_variance(model: ModelConfig) -> TypeGuard[TransformerModelConfig]:
    """Return whether a network has a second output per channel, the variance of a reverse step."""
    return isinstance(model, TransformerModelConfig) and model.output_features == 2 * model.token_channels


def trained_objective(model: ModelConfig) -> DDPM:
    """Return the objective of the published weights.

    Source: facebookresearch/DiT, `diffusion/__init__.py`: 1000 steps, linear betas; the network predicts the noise, and
    the variance in a second half of its channels.
    """
    variance = LearnedVariance() if predicts_variance(model) else None
    return DDPM(schedule="linear", discrete_steps=1000, prediction="noise", variance=variance)


def published_sampling(model: DiTConfig) -> dict[str, object]:
    """Return the authors' sampling settings.

    Source: facebookresearch/DiT, `sample.py`.
    """
    sampling: dict[str, object] = {"solver": "ancestral", "num_steps": 250, "guidance_scale": 4.0}
    return {**sampling, "variance": "learned"} if predicts_variance(model) else sampling


def check_class_dit(model: DiTConfig, side: str) -> None:
    """Check that a model has classes, and that its layers compute the same as without routing of tokens."""
    fault = f"{side} does not support this model"
    if model.num_classes is None:
        require(fault, {"num_classes": None}, {"num_classes": "a number"}, "train with classes")
    if model.routing is not None:
        require(fault, {"routing.rejoin": model.routing.rejoin}, {"routing.rejoin": "unchanged"}, ONLY_SUPPORTED)


def position_table(width: int, side: int, divisor: float = 1.0) -> Tensor:
    """Return fixed positions of a square grid, `[1, side**2, width]`, row by row; indices are divided by `divisor`."""
    return sincos(grid_positions((1, side, side)) / divisor, width, "sincos_2d")[None]


def read_sizes(tensors: Mapping[str, Tensor], num_attention_heads: Optional[int] = None) -> TrainedModel:
    """Infer a model's sizes from its tensors; without `num_attention_heads`, heads as in the published models."""
    absent = [name for name in _NEEDED if name not in tensors]
    if absent or tensors["x_embedder.proj.weight"].dim() != 4 or tensors["pos_embed"].dim() != 3:
        raise ConfigError(
            f"not a state dict of facebookresearch/DiT: it needs {', '.join(_NEEDED)}"
            + (f", and lacks {', '.join(absent)}" if absent else "")
            + f"; it has {len(tensors)} tensors such as {next(iter(tensors))}"
        )
    hidden_size, in_channels, patch, _ = tensors["x_embedder.proj.weight"].shape
    blocks = [int(m[1]) for name in tensors if (m := re.match(r"blocks\.(\d+)\.", name))]
    heads = num_attention_heads or PUBLISHED_HEADS.get(hidden_size)
    if heads is None:
        raise ConfigError(
            f"the heads of a model of width {hidden_size} are unknown (published widths: "
            f"{', '.join(map(str, PUBLISHED_HEADS))}); give --num-attention-heads"
        )
    grid = math.isqrt(tensors["pos_embed"].shape[1])
    fc1 = tensors.get("blocks.0.mlp.fc1.weight")
    out_channels = tensors["final_layer.linear.weight"].shape[0] // patch**2
    model = DiTConfig(
        hidden_size=hidden_size,
        num_layers=max(blocks, default=-1) + 1,
        num_attention_heads=heads,
        ffn_hidden_size=None if fc1 is None or fc1.shape[0] == 4 * hidden_size else fc1.shape[0],
        in_channels=in_channels,
        out_channels=None if out_channels == in_channels else out_channels,
        patch_spatial=patch,
        num_classes=tensors["y_embedder.embedding_table.weight"].shape[0] - 1,
    )
    sampling = published_sampling(model)
    if in_channels > GUIDED_CHANNELS:
        sampling["guidance_channels"] = GUIDED_CHANNELS
    return TrainedModel(model, trained_objective(model), (1, grid * patch, grid * patch), sampling)


def rules(model: DiTConfig, shapes: Mapping[str, Shape], latent_size: LatentSize) -> RuleBook:
    """Return the rules between the weights; the size of the stored position table follows from the latent size."""
    frames, height, width = latent_size
    check_settings("facebookresearch/DiT", model, DiTConfig(), FREE)
    check_class_dit(model, "facebookresearch/DiT")
    if frames != 1 or height != width:
        raise ConfigError(f"latents of {frames} x {height} x {width}: facebookresearch/DiT supports only square images")
    heads = model.num_attention_heads
    forms: dict[str, Form] = {
        "embed.weight": patches("d c ph pw -> d (ph pw c)", model),
        "layers.#.attention.linear_qkv": ByHead(heads, (model.hidden_size // heads,) * 3, fused=True),
    }
    tables = {"pos_embed": position_table(model.hidden_size, height // model.patch_spatial)}
    return RuleBook(shapes, layer_rules(shapes, NAMES, forms), tables, stored_tables=True)


def drop_variance(trained: TrainedModel, weights: Mapping[str, Tensor]) -> tuple[TrainedModel, dict[str, Tensor]]:
    """Remove a learned variance, the second half of the channels at every position of a patch, from the head."""
    model = trained.model
    positions = model.token_channels // model.in_channels
    if not predicts_variance(model):
        raise ConfigError(
            f"--drop-variance: the model predicts {model.output_features // positions} channels for latents of "
            f"{model.in_channels}, so there is no variance to drop; leave the flag out"
        )
    cut = {
        name: weights[name].unflatten(0, (positions, -1))[:, : model.in_channels].flatten(0, 1)
        for name in ("head.linear.weight", "head.linear.bias")
    }
    objective = trained.objective
    mean = replace(
        trained,
        model=replace(model, out_channels=None),
        objective=replace(objective, variance=None) if isinstance(objective, DDPM) else objective,
        sampling={name: value for name, value in trained.sampling.items() if name != "variance"},
    )
    return mean, {**weights, **cut}
