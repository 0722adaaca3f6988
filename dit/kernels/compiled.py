"""Layers compiled by torch.compile."""

from collections.abc import Iterable

import torch
from torch import nn


def compile_layers(layers: Iterable[nn.Module]) -> None:
    """Make layers run compiled, each for the sizes that it meets.

    Layers of one class share a cache in the compiler. A UNet has blocks of more sizes than it takes by default before
    it gives up and runs the rest as it is, so that its limit is raised, for the process.
    """
    from torch._dynamo import config  # the compiler takes seconds to import

    found = list(layers)
    config.recompile_limit = max(config.recompile_limit, 2 * len(found))
    for layer in found:
        layer.forward = torch.compile(layer.forward, dynamic=False)
