"""The backbone of Wan in plain PyTorch, from the formulas of its report, one sample at a time.

It reads our parameters by name, as float64 leaves, and splits fused projections by row; it shares no other code or
data with `dit`.

Source: Wan Team 2025, arXiv:2503.20314, section 4.2.1; the norms over the full width, the affine norm before
cross-attention and the table of the head follow its published code.
"""

from typing import Optional

import torch
from torch import Tensor

from tests.parity.reference_cross import SharedModulationReference, attend
from tests.parity.reference_dit import gelu_tanh, normalise, rms_normalise
from tests.parity.reference_positions import Grid, turn


class WanReference(SharedModulationReference):
    def width_norm(self, heads: list[Tensor], name: str) -> list[Tensor]:
        """Normalise all heads by the mean square over the full width."""
        weight = self.leaves.get(f"{name}.weight")
        if weight is None:
            return heads
        return list(
            rms_normalise(torch.cat(heads, -1), weight, self.config.layernorm_epsilon).split(self.head_size, -1)
        )

    def wan_self_attention(self, x: Tensor, name: str, by: Optional[Tensor]) -> Tensor:
        """Fused rows: for each group, the queries, the key and the value."""
        rows = list(self.leaves.linear(x, f"{name}.linear_qkv").split(self.head_size, -1))
        share = self.config.num_attention_heads // self.groups
        q: list[Tensor] = []
        for group in range(self.groups):
            q += rows[group * (share + 2) : group * (share + 2) + share]
        k, v = rows[share :: share + 2], rows[share + 1 :: share + 2]
        q, k = self.width_norm(q, f"{name}.q_layernorm"), self.width_norm(k, f"{name}.k_layernorm")
        attended = attend([turn(head, by) for head in q], [turn(head, by) for head in k], v)
        return self.leaves.linear(attended, f"{name}.linear_proj")

    def wan_cross_attention(self, x: Tensor, text: Tensor, name: str) -> Tensor:
        """Fused rows of the text: for each group, the key and the value."""
        q = list(self.leaves.linear(x, f"{name}.linear_q").split(self.head_size, -1))
        rows = list(self.leaves.linear(text, f"{name}.linear_kv").split(self.head_size, -1))
        q, k = self.width_norm(q, f"{name}.q_layernorm"), self.width_norm(rows[0::2], f"{name}.k_layernorm")
        return self.leaves.linear(attend(q, k, rows[1::2]), f"{name}.linear_proj")

    def block(self, x: Tensor, shared: Tensor, text: Tensor, index: int, grid: Grid, by: Optional[Tensor]) -> Tensor:
        leaves, eps, name = self.leaves, self.config.layernorm_epsilon, f"layers.{index}"
        rows = shared.unflatten(0, (6, -1)) + leaves[f"{name}.modulation.table"]
        shift_1, scale_1, gate_1, shift_2, scale_2, gate_2 = rows
        y = self.wan_self_attention(normalise(x, eps) * (1 + scale_1) + shift_1, f"{name}.attention", by)
        x = x + gate_1 * y
        y = normalise(x, eps) * leaves[f"{name}.cross_norm.weight"] + leaves[f"{name}.cross_norm.bias"]
        x = x + self.wan_cross_attention(y, text, f"{name}.cross_attention")
        y = leaves.linear(normalise(x, eps) * (1 + scale_2) + shift_2, f"{name}.mlp.linear_fc1")
        return x + gate_2 * leaves.linear(gelu_tanh(y), f"{name}.mlp.linear_fc2")
