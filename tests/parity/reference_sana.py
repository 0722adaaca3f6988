"""SANA in plain PyTorch, from the formulas of its paper, one sample at a time, pixel by pixel.

It reads our parameters by name, as float64 leaves, and splits fused projections by row; it shares no other code or
data with `dit`.

Source: Xie et al. 2024, arXiv:2410.10629, section 2.2, equation 2 and figure 5; order of the projections, epsilons and
norms over the full width follow its published code.
"""

from typing import Optional

import torch
from torch import Tensor

from tests.parity.reference_cross import SharedModulationReference, attend
from tests.parity.reference_dit import normalise, rms_normalise, silu
from tests.parity.reference_positions import Grid

EPSILON = 1e-5


class SanaReference(SharedModulationReference):
    def heads(self, x: Tensor, name: str, count: int) -> list[Tensor]:
        """Normalise over the full width, if the model has such a norm, and split into heads."""
        weight = self.leaves.get(f"{name}.weight")
        x = x if weight is None else rms_normalise(x, weight, EPSILON)
        return list(x.split(self.config.hidden_size // count, -1))

    def linear_self_attention(self, x: Tensor, name: str) -> Tensor:
        """Weight every value by relu(q) . relu(k), and divide by the sum of the weights, for each query."""
        count = self.config.num_attention_heads
        rows = list(self.leaves.linear(x, f"{name}.linear_qkv").split(self.head_size, -1))
        q = self.heads(torch.cat(rows[0::3], -1), f"{name}.q_layernorm", count)
        k = self.heads(torch.cat(rows[1::3], -1), f"{name}.k_layernorm", count)
        out = []
        for query, key, value in zip(q, k, rows[2::3]):
            weights = torch.relu(query) @ torch.relu(key).T
            out.append(weights @ value / (weights.sum(-1, keepdim=True) + 1e-15))
        return self.leaves.linear(torch.cat(out, -1), f"{name}.linear_proj")

    def text_attention(self, x: Tensor, text: Tensor, name: str) -> Tensor:
        count = self.config.num_cross_attention_heads
        rows = list(self.leaves.linear(text, f"{name}.linear_kv").split(self.config.hidden_size // count, -1))
        q = self.heads(self.leaves.linear(x, f"{name}.linear_q"), f"{name}.q_layernorm", count)
        k = self.heads(torch.cat(rows[0::2], -1), f"{name}.k_layernorm", count)
        return self.leaves.linear(attend(q, k, rows[1::2]), f"{name}.linear_proj")

    def mix(self, x: Tensor, name: str, grid: Grid) -> Tensor:
        """Expand, convolve each channel of each zero-padded frame, gate, and project back."""
        leaves, (frames, height, width) = self.leaves, grid
        wide = silu(leaves.linear(x, f"{name}.linear_fc1")).view(frames, height, width, -1)
        taps, bias = leaves[f"{name}.weight"][:, 0], leaves[f"{name}.bias"]
        rows = []
        for f in range(frames):
            for i in range(height):
                for j in range(width):
                    total = bias
                    for di in (-1, 0, 1):
                        for dj in (-1, 0, 1):
                            if 0 <= i + di < height and 0 <= j + dj < width:
                                total = total + taps[:, 1 + di, 1 + dj] * wide[f, i + di, j + dj]
                    rows.append(total)
        mixed = torch.stack(rows)
        return leaves.linear(silu(mixed[:, 0::2]) * mixed[:, 1::2], f"{name}.linear_fc2")  # gate, value, gate, ...

    def block(self, x: Tensor, shared: Tensor, text: Tensor, index: int, grid: Grid, by: Optional[Tensor]) -> Tensor:
        eps, name = self.config.layernorm_epsilon, f"layers.{index}"
        rows = shared.unflatten(0, (6, -1)) + self.leaves[f"{name}.modulation.table"]
        shift_1, scale_1, gate_1, shift_2, scale_2, gate_2 = rows
        y = normalise(x, eps) * (1 + scale_1) + shift_1
        x = x + gate_1 * self.linear_self_attention(y, f"{name}.attention")
        x = x + self.text_attention(x, text, f"{name}.cross_attention")
        return x + gate_2 * self.mix(normalise(x, eps) * (1 + scale_2) + shift_2, f"{name}.mlp", grid)
