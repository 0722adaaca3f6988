"""Leave a learned variance behind: to go on training a network by an objective that predicts the mean alone."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from dit.errors import ConfigError


def drop_variance(model: Any, weights: Mapping[str, Tensor]) -> tuple[Any, dict[str, Tensor]]:
    """Cut the variance's rows off the head: the second half of the channels at every position of a patch.

    Args:
        model: a configuration with `out_channels`.
        weights: its parameters by global name.

    Raises:
        ConfigError: the model predicts no variance.
    """
    if model.out_channels != 2 * model.in_channels:
        raise ConfigError(
            f"--drop-variance: the model predicts {model.out_channels or model.in_channels} channels for latents of "
            f"{model.in_channels}, so there is no variance to drop; leave the flag out"
        )
    positions = model.token_channels // model.in_channels
    cut = {
        name: weights[name].unflatten(0, (positions, -1))[:, : model.in_channels].flatten(0, 1)
        for name in ("head.linear.weight", "head.linear.bias")
    }
    return replace(model, out_channels=None), {**weights, **cut}
