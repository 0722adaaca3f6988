"""The layout of a pack for a layer that runs as one compiled graph: tensors without values that depend on the pack.

The compiler specialises a graph on the values of host integers, so a `SequenceLayout` would need a graph per pack. Here
lengths are tensor data, and the numbers of tokens and samples are dynamic sizes.

Shape suffixes: T local tokens, S samples, D any width.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, is_dataclass
from functools import lru_cache
from typing import Literal, Optional

import torch
from torch import Tensor

from dit.layout import SequenceLayout


@dataclass(frozen=True)
class GraphLayout:
    """The layout of a pack as tensors.

    Attributes:
        rows: kind of the local tokens: `one` sample, a `dense` batch of samples, or `ragged` for all others.
        samples_S: a tensor without values, whose length is the number of samples.
        ids_T: sample of each local token, int64; only if ragged.
        one_hot_ST: 1 where a token belongs to a sample, in the dtype of the model; only if ragged, not on CPU.
        order_T, starts_S: see `SequenceLayout.tokens_by_sample`; only if ragged, on CPU.
        dense: whether the gathered tokens in attention have samples of one length and no padding.
        lengths_S, padded_S: real and padded lengths of the samples in attention, int64 on the host.
    """

    rows: Literal["one", "dense", "ragged"]
    samples_S: Tensor
    ids_T: Optional[Tensor]
    one_hot_ST: Optional[Tensor]
    order_T: Optional[Tensor]
    starts_S: Optional[Tensor]
    dense: bool
    lengths_S: Tensor
    padded_S: Tensor

    def broadcast(self, x_SD: Tensor) -> tuple[Tensor, tuple[int, ...]]:
        """Return per-sample vectors in a shape that broadcasts over tokens, and the shape for the view of the tokens.

        See `dit.kernels.modulation.broadcast_per_sample`.
        """
        if self.rows == "one":
            return x_SD, (-1, x_SD.shape[-1])
        if self.rows == "dense":
            return x_SD[:, None], (self.samples_S.shape[0], -1, x_SD.shape[-1])
        assert self.ids_T is not None
        return _PerToken.apply(x_SD, self.ids_T, self.one_hot_ST, self.order_T, self.starts_S), (-1, x_SD.shape[-1])


class _PerToken(torch.autograd.Function):
    """Copy the vector of each sample to its tokens; the gradient is summed in a fixed order.

    The backward pass is a one-hot matrix product, or embedding_bag on CPU.
    """

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x_SD: Tensor, ids_T: Tensor, *of: Optional[Tensor]) -> Tensor:
        ctx.save_for_backward(*of)  # type: ignore[arg-type]
        return x_SD[ids_T]

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *grads: Tensor) -> tuple[Optional[Tensor], ...]:
        one_hot_ST, order_T, starts_S = ctx.saved_tensors  # type: ignore[attr-defined]
        if one_hot_ST is not None:
            return one_hot_ST @ grads[0], None, None, None, None
        return torch.embedding_bag(grads[0].contiguous(), order_T, starts_S)[0], None, None, None, None


def graph_layout(layout: SequenceLayout, dtype: torch.dtype) -> GraphLayout:
    """Return the `GraphLayout` of a layout, computed once per pack."""
    result = layout.tables.get(("graph", dtype))
    if result is None:
        result = layout.tables["graph", dtype] = _make(layout, dtype)
    assert isinstance(result, GraphLayout)
    return result


def _make(layout: SequenceLayout, dtype: torch.dtype) -> GraphLayout:
    gathered, count = layout.gathered, layout.num_samples
    dense = gathered.uniform_length is not None
    rows: Literal["one", "dense", "ragged"] = "ragged"
    if count == 1:
        rows = "one"
    elif dense and layout.local_indices is None:
        rows = "dense"
    ids_T = layout.segment_ids_T if rows == "ragged" else None
    one_hot_ST, order_T, starts_S = None, None, None
    if ids_T is not None and ids_T.device.type == "cpu":
        order_T, starts_S = layout.tokens_by_sample
    elif ids_T is not None:
        one_hot_ST = (ids_T == torch.arange(count, device=ids_T.device)[:, None]).to(dtype)
    lengths = [torch.tensor(x) for x in (gathered.lengths, gathered.padded_lengths)]
    samples_S = torch.empty(count, dtype=torch.uint8)
    return GraphLayout(rows, samples_S, ids_T, one_hot_ST, order_T, starts_S, dense, *lengths)


def layout_of(lengths_S: Tensor, padded_S: Tensor, tokens: int, device: torch.device) -> SequenceLayout:
    """Return the layout of the tokens in attention; cached, so that all layers share its tables."""
    return _layout_of(tuple(lengths_S.tolist()), tuple(padded_S.tolist()), tokens, device)


@lru_cache(maxsize=8)
def _layout_of(
    lengths: tuple[int, ...], padded_lengths: tuple[int, ...], tokens: int, device: torch.device
) -> SequenceLayout:
    return SequenceLayout(lengths, padded_lengths, tokens, device)


def mark_dynamic_sizes(inputs: Iterable[object]) -> None:
    """Mark the leading sizes of a ragged pack's tensors, and all sizes of its layouts, as dynamic for the compiler.

    A size of one stays static, because one sample has its own graph.
    """
    from torch._dynamo.decorators import mark_dynamic

    for value in inputs:
        for tensor in _tensors(value):
            dims = range(tensor.dim()) if isinstance(value, GraphLayout) else [0]
            for dim in dims:
                if tensor.shape[dim] > 1:
                    mark_dynamic(tensor, dim)


def _tensors(value: object) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif is_dataclass(value):
        for field in fields(value):
            yield from _tensors(getattr(value, field.name))
