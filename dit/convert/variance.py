"""Leave a learned variance behind: to go on training a network by an objective that predicts the mean alone."""

from collections.abc import Mapping
from dataclasses import replace

from torch import Tensor

from dit.errors import ConfigError
from dit.models.base import ModelConfig
from dit.models.transformer_config import TransformerModelConfig


def drop_variance(model: ModelConfig, weights: Mapping[str, Tensor]) -> tuple[ModelConfig, dict[str, Tensor]]:
    """Cut the variance's rows off the head: the second half of the channels at every position of a patch.

    Args:
        model: its configuration.
        weights: its parameters by global name.

    Raises:
        ConfigError: the model predicts no variance.
    """
    positions = model.token_channels // model.in_channels
    if not isinstance(model, TransformerModelConfig) or model.output_features != 2 * model.token_channels:
        raise ConfigError(
            f"--drop-variance: the model predicts {model.output_features // positions} channels for latents of "
            f"{model.in_channels}, so there is no variance to drop; leave the flag out"
        )
    cut = {
        name: weights[name].unflatten(0, (positions, -1))[:, : model.in_channels].flatten(0, 1)
        for name in ("head.linear.weight", "head.linear.bias")
    }
    return replace(model, out_channels=None), {**weights, **cut}
