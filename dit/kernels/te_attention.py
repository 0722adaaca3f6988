"""Transformer Engine's attention, an option of `training.attention`.

This project has not run it yet: Transformer Engine has no CPU wheel, and no GPU result is committed.
"""

from typing import Any

import torch
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
        out_TD = self._modules[key](
            q_TNH,
            k_KNH,
            v_KNH,
            qkv_format="thd",
            attn_mask_type="padding",
            cu_seqlens_q=layout_q.cu_seqlens,
            cu_seqlens_kv=layout_k.cu_seqlens,
            cu_seqlens_q_padded=layout_q.cu_seqlens_padded,
            cu_seqlens_kv_padded=layout_k.cu_seqlens_padded,
            max_seqlen_q=layout_q.max_seqlen,
            max_seqlen_kv=layout_k.max_seqlen,
        )
        # The kernel does not write the outputs of padding.
        out_TNH = out_TD.view_as(q_TNH)
        return torch.where(layout_q.valid_T[:, None, None], out_TNH, torch.zeros_like(out_TNH))
