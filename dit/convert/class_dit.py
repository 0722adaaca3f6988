"""Limits of the paper's class-conditional DiT, and functions that its conversions share."""

from torch import Tensor

from dit.convert.rules import TRAIN_THAT_WAY, require
from dit.convert.variance import predicts_variance
from dit.layers.positions import sincos
from dit.models.base import ModelConfig
from dit.models.dit.config import DiTConfig
from dit.objectives.ddpm import DDPM, LearnedVariance
from dit.patchify import grid_positions

ONLY_THESE = {
    "context_size": None,
    "num_experts": None,
    "patch_temporal": 1,
    "qk_layernorm": False,
    "add_bias": True,
    "activation": "gelu_tanh",
    "rms_norm": False,
    "bottleneck_size": None,
    "class_tokens": None,
    "teacher_token_size": None,
    "value_residual": False,
    "wide_head": None,
    "interval_conditioning": False,
    "layernorm_epsilon": 1e-6,
    "time_scale": 1000.0,
    "position_embedding": "sincos_2d",
}
"""Our settings, with the only values that the paper's model supports."""


GUIDED_CHANNELS = 3
"""Channels of a latent, out of 4, that facebookresearch/DiT guides; diffusers' pipeline guides all."""


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


def check_expressible(model: DiTConfig, side: str, **also: int) -> None:
    """Check that a model is one of the paper's."""
    supported = {**ONLY_THESE, **also}
    fault = f"{side} does not support this model"
    require(fault, {name: getattr(model, name) for name in supported}, supported, TRAIN_THAT_WAY)
    if model.num_classes is None:
        require(fault, {"num_classes": None}, {"num_classes": "a number"}, "train with classes")
    if model.routing is not None:
        require(fault, {"routing.rejoin": model.routing.rejoin}, {"routing.rejoin": "unchanged"}, TRAIN_THAT_WAY)


def position_table(model: DiTConfig, side: int) -> Tensor:
    """Return the fixed positions of a square grid of `side * side` patches, `[1, side**2, D]`, row by row."""
    return sincos(grid_positions((1, side, side)), model.hidden_size, "sincos_2d")[None]
