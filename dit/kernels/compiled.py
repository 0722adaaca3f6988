"""Layers compiled by torch.compile.

Blocks of pictures (`training.compile`) are compiled for the sizes that they meet. Transformer layers
(`training.kernels=compile`) become one graph each, which all layers of a stack share, for packs of any lengths.
"""

from collections.abc import Callable, Iterable
from typing import Any, Optional

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from dit.kernels.graph_layout import GraphLayout, graph_layout, take_sizes_as_unknown
from dit.layout import SequenceLayout

BACKEND: Any = "inductor"
"""Of transformer layers, when they first run; tests that count graphs take `aot_eager`, which generates no code."""
EXPENSIVE = (
    {"mm", "addmm", "bmm", "baddbmm"}
    | {f"_scaled_dot_product_{kind}_attention" for kind in ("flash", "efficient", "cudnn", "fused")}
    | {"_scaled_dot_product_flash_attention_for_cpu"}
)
"""Operations of aten whose outputs a layer saves under selective recompute: matrix products and attention."""
EXPENSIVE_NAMESPACES = {"dit", "_c10d_functional"}
"""Of these, all: attention to ragged packs, and what is sent to other ranks."""
LARGEST_COUNT = 32
"""Graphs of a layer: by kind of pack (one sample, dense, ragged), with and without gradients, by class of layer."""


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


def compile_transformer_layers(layers: Iterable[nn.Module], *, selective: int = 0) -> None:
    """Make each layer run as one compiled graph.

    A graph break, or more graphs than there are kinds of packs, is an error.

    Args:
        selective: the first so many layers save what is expensive alone, see `dit.kernels.recompute`.
    """
    from torch._dynamo import config  # the compiler takes seconds to import

    config.recompile_limit = max(config.recompile_limit, LARGEST_COUNT)
    for number, layer in enumerate(layers):
        layer.forward = CompiledLayer(layer.forward, selective=number < selective)


class CompiledLayer:
    """The compiled forward pass of a layer, which takes layouts as every layer does.

    Args:
        forward: takes tensors, layouts, and dataclasses of tensors.
        selective: save what is expensive alone.
    """

    def __init__(self, forward: Callable[..., Tensor], *, selective: bool = False) -> None:
        self._forward = _Selective(forward) if selective else forward
        self._compiled: Optional[Callable[..., Tensor]] = None

    def __call__(self, x_TD: Tensor, *others: Any) -> Tensor:
        inputs = (
            x_TD,
            *(graph_layout(x, x_TD.dtype) if isinstance(x, SequenceLayout) else x for x in others),
        )
        layouts = [x for x in inputs if isinstance(x, GraphLayout)]
        if any(x.rows == "ragged" or not x.dense for x in layouts):
            take_sizes_as_unknown(inputs)
        if self._compiled is None:
            self._compiled = torch.compile(self._forward, fullgraph=True, backend=BACKEND)
        return self._compiled(*inputs)


class _Selective:
    """A forward pass inside a graph that saves the outputs of expensive operations, and computes all others again.

    Left to itself, the compiler saves what is cheap to keep in time, not in memory: as much as an eager layer.
    """

    def __init__(self, forward: Callable[..., Tensor]) -> None:
        self._forward = forward

    def __call__(self, x_TD: Tensor, *others: Any) -> Tensor:
        def of_tokens(x_TD: Tensor) -> Tensor:
            return self._forward(x_TD, *others)

        out: Tensor = checkpoint(of_tokens, x_TD, use_reentrant=False, preserve_rng_state=False, context_fn=_contexts)
        return out


def _contexts() -> Any:
    return create_selective_checkpoint_contexts(_policy)


def _policy(ctx: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    expensive = operation.namespace in EXPENSIVE_NAMESPACES or operation.overloadpacket.__name__ in EXPENSIVE
    return CheckpointPolicy.MUST_SAVE if expensive else CheckpointPolicy.PREFER_RECOMPUTE
