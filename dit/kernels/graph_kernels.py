"""The operations of a transformer layer that runs as one compiled graph.

The memory-bound operations are the formulas of `dit.kernels.modulation`, which the compiler fuses. Attention to a dense
batch is torch's; attention to a ragged pack is the operator `dit::packed_attention`, so that the graph does not depend
on the lengths of the samples.

Shape suffixes: T local tokens, K keys, N heads, H head size, S samples, D hidden size, F inner width of the MLP.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Optional

import torch
import torch.nn.functional as F
from torch import Tensor

from dit.kernels import modulation
from dit.kernels.attention import nothing_attends, segment_sdpa
from dit.kernels.attention_blocks import Attended, Block, BlockAttention
from dit.kernels.block_choice import ATTENTION_BLOCKS
from dit.kernels.choice import Target, choose
from dit.kernels.gelu import gelu_in_graph
from dit.kernels.graph_layout import GraphLayout, layout_of
from dit.kernels.grouped_sdpa import attended, gradients
from dit.kernels.modulation import NormModulation
from dit.kernels.segment_groups import Grouped, grouped
from dit.layout import SequenceLayout

Layout = SequenceLayout | GraphLayout
"""`GraphLayout` inside a compiled layer; `SequenceLayout` in eager modules such as the output layer."""


def norm_modulate(x_TD: Tensor, into: NormModulation, layout: Layout) -> tuple[Tensor, Tensor]:
    """See `dit.kernels.modulation.norm_modulate`."""
    if isinstance(layout, SequenceLayout):
        return modulation.norm_modulate(x_TD, into, layout)
    shift, shape = layout.broadcast(into.shift_SD)
    scale, _ = layout.broadcast(into.scale_SD)
    width = x_TD.shape[-1:]
    if into.weight_D is None:
        normed = F.layer_norm(x_TD, width, eps=into.eps)
    else:
        normed = F.rms_norm(x_TD, width, into.weight_D, into.eps)
    return x_TD, (normed.view(shape) * (1 + scale) + shift).view_as(x_TD)


def residual(x_TD: Tensor, y_TD: Tensor, gate_SD: Optional[Tensor], bias_D: Optional[Tensor], layout: Layout) -> Tensor:
    """See `dit.kernels.modulation.residual`."""
    if isinstance(layout, SequenceLayout):
        return modulation.residual(x_TD, y_TD, gate_SD, bias_D, layout)
    y_TD = y_TD if bias_D is None else y_TD + bias_D
    if gate_SD is None:
        return x_TD + y_TD
    gate, shape = layout.broadcast(gate_SD)
    return (x_TD.view(shape) + gate * y_TD.view(shape)).view_as(x_TD)


def residual_norm_modulate(
    x_TD: Tensor,
    y_TD: Tensor,
    gate_SD: Optional[Tensor],
    bias_D: Optional[Tensor],
    into: NormModulation,
    layout: Layout,
) -> tuple[Tensor, Tensor]:
    """See `dit.kernels.modulation.residual_norm_modulate`."""
    return norm_modulate(residual(x_TD, y_TD, gate_SD, bias_D, layout), into, layout)


def gelu_tanh(x_TF: Tensor, bias_F: Optional[Tensor] = None) -> Tensor:
    """See `dit.kernels.modulation.gelu_tanh`."""
    return gelu_in_graph(x_TF if bias_F is None else x_TF + bias_F)


def swiglu(x_TF: Tensor, bias_F: Optional[Tensor] = None) -> Tensor:
    """See `dit.kernels.modulation.swiglu`."""
    x_TF = x_TF if bias_F is None else x_TF + bias_F
    gate_TF, up_TF = x_TF.unflatten(-1, (-1, 2)).unbind(-1)
    return F.silu(gate_TF) * up_TF


def graph_attention(q_TNH: Tensor, k_KNH: Tensor, v_KNH: Tensor, of_q: Layout, of_k: Layout) -> Tensor:
    """Attend inside a compiled layer; see `dit.kernels.attention`."""
    if isinstance(of_q, SequenceLayout) or isinstance(of_k, SequenceLayout):
        assert isinstance(of_q, SequenceLayout)
        assert isinstance(of_k, SequenceLayout)
        return segment_sdpa(q_TNH, k_KNH, v_KNH, of_q, of_k)
    if of_q.dense and of_k.dense:
        samples = of_q.samples_S.shape[0]
        q, k, v = (x.unflatten(0, (samples, -1)).transpose(1, 2) for x in (q_TNH, k_KNH, v_KNH))
        out = F.scaled_dot_product_attention(q, k, v, enable_gqa=q.shape[1] != k.shape[1])
        return out.transpose(1, 2).flatten(0, 1)
    return packed_attention(q_TNH, k_KNH, v_KNH, of_q.lengths_S, of_q.padded_S, of_k.lengths_S, of_k.padded_S)[0]


class SdpaBlocks(BlockAttention):
    """Attention on CPU to all segments of a pack by `dit.kernels.grouped_sdpa`."""

    def forward(self, block: Block) -> Attended:
        q_TNH, k_KNH, v_KNH, layout_q, layout_k = block
        if nothing_attends(layout_q, layout_k):
            return Attended(torch.zeros_like(q_TNH), torch.full(q_TNH.shape[:2], -torch.inf))
        heads = q_TNH.shape[1]
        return Attended(*attended(q_TNH, _repeated(k_KNH, heads), _repeated(v_KNH, heads), _grouped(block)))

    def backward(self, grad_TNH: Tensor, block: Block, joined: Attended) -> tuple[Tensor, Tensor, Tensor]:
        q_TNH, k_KNH, v_KNH, layout_q, layout_k = block
        if nothing_attends(layout_q, layout_k):
            return torch.zeros_like(q_TNH), torch.zeros_like(k_KNH), torch.zeros_like(v_KNH)
        parts = q_TNH, *(_repeated(x, q_TNH.shape[1]) for x in (k_KNH, v_KNH))
        dq, *grads_kv = gradients(grad_TNH, parts, *joined, _grouped(block))
        dk, dv = (x.unflatten(1, (k_KNH.shape[1], -1)).sum(2) if x.shape != k_KNH.shape else x for x in grads_kv)
        return dq, dk, dv


def _grouped(block: Block) -> Grouped:
    return grouped(block.layout_q, block.layout_k, pads=True, dtype=block.q_TNH.dtype)


def _repeated(x_KNH: Tensor, heads: int) -> Tensor:
    """Repeat each key or value head for the query heads that share it."""
    return x_KNH if x_KNH.shape[1] == heads else x_KNH.repeat_interleave(heads // x_KNH.shape[1], 1)


@lru_cache
def _blocks(target: Target) -> BlockAttention:
    return SdpaBlocks() if target.device.type == "cpu" else choose(ATTENTION_BLOCKS, target).load()


def _block(q_TNH: Tensor, k_KNH: Tensor, v_KNH: Tensor, lengths: Sequence[Tensor]) -> Block:
    layouts = [
        layout_of(lengths[i], lengths[i + 1], len(x), x.device)  # lengths are on the host, so nothing is synchronised
        for i, x in ((0, q_TNH), (2, k_KNH))
    ]
    return Block(q_TNH, k_KNH, v_KNH, *layouts)


@torch.library.custom_op("dit::packed_attention", mutates_args=())
def packed_attention(
    q_TNH: Tensor,
    k_KNH: Tensor,
    v_KNH: Tensor,
    lengths_q_S: Tensor,
    padded_q_S: Tensor,
    lengths_k_S: Tensor,
    padded_k_S: Tensor,
) -> tuple[Tensor, Tensor]:
    """Attend inside the segments of a ragged pack.

    Args:
        lengths_q_S, padded_q_S, lengths_k_S, padded_k_S: real and padded lengths of the segments of queries and of
            keys, see `GraphLayout`.

    Returns:
        `out_TNH` in the dtype of the queries, and `lse_TN`, float32.
    """
    block = _block(q_TNH, k_KNH, v_KNH, (lengths_q_S, padded_q_S, lengths_k_S, padded_k_S))
    out, lse = _blocks(Target(q_TNH.device, q_TNH.dtype, q_TNH.shape[-1])).forward(block)
    return out.to(q_TNH.dtype).contiguous(), lse.contiguous()


@packed_attention.register_fake
def _(q, k, v, lengths_q, padded_q, lengths_k, padded_k):  # type: ignore[no-untyped-def]
    return q.new_empty(q.shape), q.new_empty(q.shape[:2], dtype=torch.float32)


@torch.library.custom_op("dit::packed_attention_backward", mutates_args=())
def packed_attention_backward(
    grad_TNH: Tensor,
    q_TNH: Tensor,
    k_KNH: Tensor,
    v_KNH: Tensor,
    out_TNH: Tensor,
    lse_TN: Tensor,
    lengths_q_S: Tensor,
    padded_q_S: Tensor,
    lengths_k_S: Tensor,
    padded_k_S: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of queries, keys and values; 0 for padding."""
    block = _block(q_TNH, k_KNH, v_KNH, (lengths_q_S, padded_q_S, lengths_k_S, padded_k_S))
    kernel = _blocks(Target(q_TNH.device, q_TNH.dtype, q_TNH.shape[-1]))
    grads = kernel.backward(grad_TNH.contiguous(), block, Attended(out_TNH, lse_TN))
    dq, dk, dv = (x.to(q_TNH.dtype).contiguous() for x in grads)
    return dq, dk, dv


@packed_attention_backward.register_fake
def _(grad, q, k, v, out, lse, *lengths):  # type: ignore[no-untyped-def]
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _save(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[:3], *output, *inputs[3:])


def _backward(ctx: Any, grad_TNH: Tensor, _: None) -> tuple[Optional[Tensor], ...]:
    return *packed_attention_backward(grad_TNH, *ctx.saved_tensors), None, None, None, None


packed_attention.register_autograd(_backward, setup_context=_save)
