"""Remove a learned variance, to fine-tune a network with an objective that predicts only the mean."""

from collections.abc import Mapping
from dataclasses import replace
from typing import TypeGuard

from torch import Tensor

from dit.convert.diffusers_format import TrainedModel
from dit.errors import ConfigError
from dit.models.base import ModelConfig
from dit.models.transformer_config import TransformerModelConfig
from dit.objectives.ddpm import DDPM


def predicts_variance(model: ModelConfig) -> TypeGuard[TransformerModelConfig]:
    """Return whether a network has a second output per channel, the variance of a reverse step."""
    return isinstance(model, TransformerModelConfig) and model.output_features == 2 * model.token_channels


def drop_variance(trained: TrainedModel, weights: Mapping[str, Tensor]) -> tuple[TrainedModel, dict[str, Tensor]]:
    """Remove the variance's rows of the head: the second half of the channels at every position of a patch.

    Returns:
        The model with settings for training and sampling without a learned variance, and its weights.
    """
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
