"""Transformer Engine's attention, an option of `training.attention`.

This project has not run it yet: Transformer Engine has no CPU wheel, and no GPU result is committed.
"""

from typing import Any

from torch import Tensor

from dit.kernels.attention import nothing_attends, zeros_of
from dit.layout import SequenceLayout


class TEAttention:
    """Transformer Engine's THD attention, which selects cuDNN or flash attention itself."""

    def __init__(self) -> None:
        self._modules: dict[tuple[int, int, int], Any] = {}

    def __call__(
        self, q_TNH: Tensor, k_KNH: Tensor, v_KNH: Tensor, layout_q: SequenceLayout, layout_k: SequenceLayout
    ) -> Tensor:
        layout_q, layout_k = layout_q.gathered, layout_k.gathered
        if nothing_attends(layout_q, layout_k):
            return zeros_of(q_TNH, k_KNH, v_KNH)
        key = (q_TNH.shape[1], k_KNH.shape[1], q_TNH.shape[2])
        if key not in self._modules:
            from transformer_engine.pytorch import DotProductAttention

            self._modules[key] = DotProductAttention(
                key[0], key[2], num_gqa_groups=key[1], attention_dropout=0.0, qkv_format="thd", attn_mask_type="padding"
            )
        # The kernels do not write outputs and gradients of padding, and may multiply its values by 0.
        out_TD = self._modules[key](
            _without_padding(q_TNH, layout_q),
            _without_padding(k_KNH, layout_k),
            _without_padding(v_KNH, layout_k),
            qkv_format="thd",
            attn_mask_type="padding",
            cu_seqlens_q=layout_q.cu_seqlens,
            cu_seqlens_kv=layout_k.cu_seqlens,
            cu_seqlens_q_padded=layout_q.cu_seqlens_padded,
            cu_seqlens_kv_padded=layout_k.cu_seqlens_padded,
            max_seqlen_q=layout_q.max_seqlen,
            max_seqlen_kv=layout_k.max_seqlen,
            pad_between_seqs=_has_padding_between(layout_q) or _has_padding_between(layout_k),
        )
        return _without_padding(out_TD.view_as(q_TNH), layout_q)


def _without_padding(x_TNH: Tensor, layout: SequenceLayout) -> Tensor:
    """Replace padding by zeros, and its gradient too."""
    return x_TNH.masked_fill(~layout.valid_T[:, None, None], 0.0) if layout.has_padding else x_TNH


def _has_padding_between(layout: SequenceLayout) -> bool:
    """Return whether a token may follow the padding of a sample; Transformer Engine would compare tensors."""
    return layout.is_fixed or layout.lengths[:-1] != layout.padded_lengths[:-1]
