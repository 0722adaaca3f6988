"""The ends of a token stack: this rank's rows of the pack, the patch embedding, the hand-over between stages."""

from dataclasses import replace
from typing import Optional

import torch
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.utils import make_viewless_tensor
from torch import Tensor, nn

from dit.backends.init import xavier_uniform
from dit.backends.provider import LayerProvider
from dit.layout import SequenceLayout


def shard_rows(
    layout: SequenceLayout, provider: LayerProvider, *tensors_T: Tensor
) -> tuple[SequenceLayout, tuple[Tensor, ...]]:
    """Return this tensor-parallel rank's share of the rows held here, under sequence parallelism; else all of them.

    Args:
        tensors_T: tensors over the rows held here; the same share of each is returned.
    """
    if not provider.sequence_parallel:
        return layout, tensors_T
    share = layout.num_rows // provider.tp_size
    start = provider.tp_rank * share
    rows = torch.arange(start, start + share, device=layout.device)
    return layout.select(rows, gathered=True), tuple(x[start : start + share] for x in tensors_T)


def pad_rows(layout: SequenceLayout, provider: LayerProvider) -> SequenceLayout:
    """Return a layout with the tail pad that `shard_rows` needs."""
    if not provider.sequence_parallel:
        return layout
    return replace(layout, total_tokens=-(-layout.total_tokens // provider.tp_size) * provider.tp_size)


def unshard_rows(x_TD: Tensor, provider: LayerProvider) -> Tensor:
    """Undo `shard_rows` inside the network, where the ranks make different use of the rows: gradients are summed."""
    if not provider.sequence_parallel:
        return x_TD
    return gather_from_sequence_parallel_region(x_TD, tensor_parallel_output_grad=True, group=provider.tp_group)


def gather_rows(x_TD: Tensor, provider: LayerProvider) -> Tensor:
    """Undo `shard_rows` for the output: every tensor-parallel rank gets all rows and computes the same loss from them.

    The loss is the same on all ranks, so the backward pass keeps this rank's rows and sums nothing.
    """
    if not provider.sequence_parallel:
        return x_TD
    return gather_from_sequence_parallel_region(x_TD, tensor_parallel_output_grad=False, group=provider.tp_group)


def to_next_stage(x_TD: Tensor) -> Tensor:
    """Return the activations as Megatron-Core's schedules send them, `[T, 1, D]`; not a view, for they are freed."""
    return make_viewless_tensor(x_TD[:, None], x_TD.requires_grad, keep_graph=True)


def from_previous_stage(received_T1D: Optional[Tensor]) -> Tensor:
    """Undo `to_next_stage`."""
    assert received_T1D is not None
    return received_T1D.flatten(0, 1)


def embed_patches(linear: nn.Linear, inputs_TC: Tensor, layout: SequenceLayout) -> Tensor:
    """Apply a linear map to every patch, with zeros in place of padding: `[T, C]` becomes `[T, D]`."""
    if layout.valid_tokens < layout.total_tokens:
        # A padding row has no gradient, yet a NaN in it would reach the weights' gradients as 0 * NaN.
        inputs_TC = inputs_TC.masked_fill(~layout.valid_T[:, None], 0.0)
    return linear(inputs_TC.to(linear.weight.dtype))


class PatchEmbedding(nn.Module):
    """A linear map of every patch, the same on every tensor-parallel rank."""

    def __init__(self, token_channels: int, hidden_size: int, provider: LayerProvider) -> None:
        super().__init__()
        init = xavier_uniform(token_channels, hidden_size)
        self.linear = provider.replicated_linear(token_channels, hidden_size, bias=True, init=init)

    def forward(self, inputs_TC: Tensor, layout: SequenceLayout) -> Tensor:
        return embed_patches(self.linear, inputs_TC, layout)
