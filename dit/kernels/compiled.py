"""Layers compiled by torch.compile around their eager operations (`training.kernels=compile`).

The compiler fuses the memory-bound operations between two matrix products. Attention, experts and communication stay
eager, because their operations depend on the lengths of the samples or wait for other ranks. A DiT layer:

    | norm, modulate, linear, heads | attention | linear, residual, norm, modulate, linear, GELU, linear, residual |
      graph                           eager       graph

The layers of a stack share their graphs, and so do packs of any lengths: a graph reads the tensors and the `kind` of a
`SequenceLayout`, never its lengths.
"""

from collections.abc import Callable, Iterable
from typing import Any, Optional

import torch
from torch import Tensor, nn

from dit.layout import SequenceLayout
from dit.patches import patches

BACKEND: Any = "inductor"
"""Backend of the compiler, read at the first run of a layer; tests that count graphs set `aot_eager`."""
LARGEST_COUNT = 32
"""Limit of graphs per function, which differ by kind of pack, gradients and class of layer."""


@patches(
    "torch 2.11-2.14",
    "torch/_functorch/config.py: aggressive_recomputation; torch/_dynamo/config.py: recompile_limit",
    why="torch.compile has no argument for the two",
)
def compile_layers(
    layers: Iterable[nn.Module],
    *,
    one_size: bool = False,
    selective: bool = False,
) -> None:
    """Compile the forward pass of layers, except modules inside them whose attribute `compiles` is False.

    Args:
        one_size: compile for each input size, instead of one graph for all numbers of tokens and samples.
        selective: save only inputs of graphs and outputs of expensive operations, in all compiled layers. By default,
            the compiler minimises the recompute time instead of the memory, and saves as much as an eager layer.
    """
    from torch._dynamo import config  # the compiler takes seconds to import
    from torch._functorch import config as partitioner

    blocks = list(layers)
    # After this number of graphs of one function, torch runs it eagerly. A UNet has blocks of many sizes.
    config.recompile_limit = max(config.recompile_limit, LARGEST_COUNT, 2 * len(blocks))
    partitioner.aggressive_recomputation = selective
    for layer in blocks:
        for module in layer.modules():
            if not getattr(module, "compiles", True):
                module.forward = run_eagerly(module.forward)
        layer.forward = _CompiledLayer(layer.forward, dynamic=False if one_size else None)


def run_eagerly(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a function that is not compiled inside compiled layers."""
    from torch._dynamo import disable

    eager: Callable[..., Tensor] = disable(lambda *args, **kwargs: function(*args, **kwargs))
    return eager


class _CompiledLayer:
    """The compiled forward pass of a layer."""

    def __init__(self, forward: Callable[..., Any], *, dynamic: Optional[bool]) -> None:
        self._forward, self._dynamic = forward, dynamic
        self._compiled: Optional[Callable[..., Any]] = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        for layout in args:
            for part in (layout, layout.level_layout) if isinstance(layout, SequenceLayout) else ():
                if part.kind == "ragged":
                    _ = part.segment_ids_T, part.tokens_by_sample  # before the graph, which must not read lengths
        if self._compiled is None:
            self._compiled = torch.compile(self._forward, backend=BACKEND, dynamic=self._dynamic)
        return self._compiled(*args, **kwargs)
