"""Layers compiled by torch.compile.

Blocks of UNets (`training.compile`) are compiled for each input size. Transformer layers (`training.kernels=compile`)
are compiled to one graph that all layers of a stack share and that supports packs of any lengths.
"""

from collections.abc import Callable, Iterable
from typing import Any, Optional

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from dit.kernels.graph_layout import GraphLayout, graph_layout, mark_dynamic_sizes
from dit.layout import SequenceLayout

BACKEND: Any = "inductor"
"""Backend for transformer layers, read at their first run; tests that count graphs set `aot_eager`."""
EXPENSIVE = (
    {"mm", "addmm", "bmm", "baddbmm"}
    | {f"_scaled_dot_product_{kind}_attention" for kind in ("flash", "efficient", "cudnn", "fused")}
    | {"_scaled_dot_product_flash_attention_for_cpu"}
)
"""ATen operations whose outputs selective recompute saves: matrix products and attention."""
EXPENSIVE_NAMESPACES = {"dit", "_c10d_functional"}
"""Namespaces whose operations are all saved: attention to ragged packs, and communication."""
LARGEST_COUNT = 32
"""Limit of graphs per layer, which differ by kind of pack (one sample, dense, ragged), gradients and class of layer."""


def compile_layers(layers: Iterable[nn.Module]) -> None:
    """Compile the forward pass of layers for each of their input sizes.

    Layers of one class share a compiler cache. A UNet has blocks of more sizes than the compiler's default limit, after
    which it runs the remaining blocks eagerly, so the limit is raised for the process.
    """
    from torch._dynamo import config  # the compiler takes seconds to import

    blocks = list(layers)
    config.recompile_limit = max(config.recompile_limit, 2 * len(blocks))
    for layer in blocks:
        layer.forward = torch.compile(layer.forward, dynamic=False)


def compile_transformer_layers(layers: Iterable[nn.Module], *, selective: int = 0) -> None:
    """Compile the forward pass of each layer to one graph.

    A graph break is an error, and so are more graphs than kinds of packs.

    Args:
        selective: number of layers, from the first, with selective recompute, see `dit.kernels.recompute`.
    """
    from torch._dynamo import config  # the compiler takes seconds to import

    config.recompile_limit = max(config.recompile_limit, LARGEST_COUNT)
    for number, layer in enumerate(layers):
        layer.forward = CompiledLayer(layer.forward, selective=number < selective)


class CompiledLayer:
    """The compiled forward pass of a layer, with the signature of the layer.

    Args:
        forward: function of tensors, layouts, and dataclasses of tensors.
        selective: whether to use selective recompute.
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
            mark_dynamic_sizes(inputs)
        if self._compiled is None:
            self._compiled = torch.compile(self._forward, fullgraph=True, backend=BACKEND)
        return self._compiled(*inputs)


class _Selective:
    """A forward pass inside a graph that saves only the outputs of expensive operations and recomputes the others.

    By default, the compiler's partitioner minimises recompute time instead of memory, and saves as much as an eager
    layer.
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
