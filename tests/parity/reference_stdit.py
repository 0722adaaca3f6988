"""The spatial-temporal DiT in plain PyTorch, one sample at a time, frame by frame and column by column.

It reads our parameters by name as float64 leaves, like `reference_cross`.

Source: PixArt-alpha, Chen et al. 2023, arXiv:2310.00426, section 2.3 and figure 4; spatial and temporal layers as in
Open-Sora, Zheng et al. 2024, arXiv:2412.20404.
"""

from typing import Optional

import torch
from torch import Tensor

from tests.parity.reference_cross import SharedModulationReference
from tests.parity.reference_dit import gelu_tanh, normalise
from tests.parity.reference_positions import Grid, turns


class STDiTReference(SharedModulationReference):
    """ST-DiT on one sample; `run` returns the prediction `[n, output features]`."""

    def attend_by_kind(self, y: Tensor, kind: str, name: str, grid: Grid, turned: Optional[Tensor]) -> Tensor:
        """Run self-attention on each frame, each column, or all tokens."""
        t, h, w = grid
        out = torch.zeros_like(y)
        groups = {
            "full": [list(range(t * h * w))],
            "spatial": [[frame * h * w + i for i in range(h * w)] for frame in range(t)],
            "temporal": [[frame * h * w + i for frame in range(t)] for i in range(h * w)],
        }[kind]
        for rows in groups:
            by = None if turned is None else turned[rows]
            if kind == "temporal":
                frames = [(frame, 0, 0) for frame in range(t)]
                by = turns(frames, self.head_size, self.config, axes=[self.head_size, 0, 0])
            out = out.index_put((torch.tensor(rows),), self.self_attention(y[rows], name, by))
        return out

    def block(
        self, x: Tensor, shared: Tensor, text: Tensor, index: int, grid: Grid, turned: Optional[Tensor]
    ) -> Tensor:
        leaves, eps, name = self.leaves, self.config.layernorm_epsilon, f"layers.{index}"
        pattern = self.config.layer_pattern
        kinds = pattern[index % len(pattern)].split("+")
        rows = shared.view(-1, x.shape[1]) + leaves[f"{name}.modulation.table"]
        for i, kind in enumerate(kinds):
            shift, scale, gate = rows[3 * i : 3 * i + 3]
            y = normalise(x, eps) * (1 + scale) + shift
            x = x + gate * self.attend_by_kind(y, kind, f"{name}.attentions.{kind}", grid, turned)
        x = x + self.cross_attention(x, text, f"{name}.cross_attention")
        shift, scale, gate = rows[-3:]
        y = normalise(x, eps) * (1 + scale) + shift
        y = leaves.linear(gelu_tanh(leaves.linear(y, f"{name}.mlp.linear_fc1")), f"{name}.mlp.linear_fc2")
        return x + gate * y
