"""The spatial-temporal DiT in plain PyTorch, one sample at a time, frame by frame and column by column.

It reads our parameters by name as float64 leaves, as `reference_cross` does.

Source: PixArt-alpha, Chen et al. 2023, arXiv:2310.00426, section 2.3 and figure 4; spatial and temporal layers as in
Open-Sora, Zheng et al. 2024, arXiv:2412.20404.
"""

import math
from typing import Optional

import torch
from torch import Tensor

from tests.parity.reference_cross import CrossReference, Grid, patch_indices, sincos_features, turns
from tests.parity.reference_dit import gelu_tanh, normalise, silu


def image_features(grid: Grid, size: int, span: Optional[float]) -> Tensor:
    """Return sines, then cosines, of w in the first half and of h in the second; both axes span `span` indices."""
    _, height, width = grid
    half, rows = size // 2, []
    for _, h, w in patch_indices(grid):
        row: list[float] = []
        for position, side in ((w, width), (h, height)):
            at = position if span is None else position * span / side
            angles = [at * 10000.0 ** (-2 * i / half) for i in range(half // 2)]
            row += [math.sin(a) for a in angles] + [math.cos(a) for a in angles]
        rows.append(row)
    return torch.tensor(rows, dtype=torch.float64)


def time_turns(frames: int, head_size: int, theta: float, stretch: float = 1.0) -> Tensor:
    """Return the unit complex numbers that turn a head's pairs with the frame; theta grows with the stretch (NTK)."""
    pairs = head_size // 2
    theta = theta * stretch ** (pairs / (pairs - 1))
    angles = [[t * theta ** (-i / pairs) for i in range(pairs)] for t in range(frames)]
    exact = torch.tensor(angles, dtype=torch.float64)
    return torch.complex(exact.cos(), exact.sin())


class STDiTReference(CrossReference):
    """ST-DiT on one sample; `run` gives the prediction `[n, output features]`."""

    def attend_by_kind(self, y: Tensor, kind: str, name: str, grid: Grid) -> Tensor:
        """Run self-attention on each frame, each column, or all tokens."""
        t, h, w = grid
        config = self.config
        turned = turns(grid, self.head_size, config) if config.position_embedding == "rope_3d" else None
        out = torch.zeros_like(y)
        groups = {
            "full": [list(range(t * h * w))],
            "spatial": [[frame * h * w + i for i in range(h * w)] for frame in range(t)],
            "temporal": [[frame * h * w + i for frame in range(t)] for i in range(h * w)],
        }[kind]
        for rows in groups:
            by = None if turned is None else turned[rows]
            if kind == "temporal" and config.temporal_rope:
                by = time_turns(t, self.head_size, config.rope_theta, (config.rope_factors or [1.0])[0])
            out = out.index_put((torch.tensor(rows),), self.self_attention(y[rows], name, by))
        return out

    def block(self, x: Tensor, shared: Tensor, text: Tensor, index: int, grid: Grid) -> Tensor:
        leaves, eps, name = self.leaves, self.config.layernorm_epsilon, f"layers.{index}"
        pattern = self.config.layer_pattern
        kinds = pattern[index % len(pattern)].split("+")
        rows = shared.view(-1, x.shape[1]) + leaves[f"{name}.modulation.table"]
        for i, kind in enumerate(kinds):
            shift, scale, gate = rows[3 * i : 3 * i + 3]
            y = normalise(x, eps) * (1 + scale) + shift
            x = x + gate * self.attend_by_kind(y, kind, f"{name}.attentions.{kind}", grid)
        x = x + self.cross_attention(x, text, f"{name}.cross_attention")
        shift, scale, gate = rows[-3:]
        y = normalise(x, eps) * (1 + scale) + shift
        y = leaves.linear(gelu_tanh(leaves.linear(y, f"{name}.mlp.linear_fc1")), f"{name}.mlp.linear_fc2")
        return x + gate * y

    def run(
        self,
        patches: Tensor,
        time: Tensor,
        grid: Grid,
        text: Optional[Tensor],
        *,
        fps: Optional[float] = None,
        label: Optional[int] = None,
    ) -> Tensor:
        config, leaves = self.config, self.leaves
        text = leaves["text.null"][None] if text is None else text.double()
        text = leaves.linear(text, "text_projection.linear_1")
        text = leaves.linear(gelu_tanh(text), "text_projection.linear_2")
        cond = self.condition(time, grid, fps, label)
        shared = leaves.linear(silu(cond), "modulation.linear")
        x = leaves.linear(patches.double(), "embed.linear")
        if config.position_embedding == "sincos_2d":
            x = x + image_features(grid, config.hidden_size, config.position_span)
        elif config.position_embedding == "sincos_3d":
            x = x + sincos_features(grid, config.hidden_size)
        for i in range(config.num_layers):
            x = self.block(x, shared, text, i, grid)
        shift, scale = leaves["head.table"] + cond
        return leaves.linear(normalise(x, config.layernorm_epsilon) * (1 + scale) + shift, "head.linear")
