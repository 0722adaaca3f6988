"""The DiT of the paper in plain PyTorch, written from its formulas: dense `[B, n, D]`, one device, no packing.

It shares no code with `dit`, has separate query, key and value projections, and runs in any precision; in float64 it
is the exact result.

Source: Peebles and Xie 2023, arXiv:2212.09748, section 3.2 and figure 3; layer norm without affine parameters, tanh
GELU and cosine-first time features follow the published class-conditional models.
"""

import math
from typing import Any, Optional

import torch
from torch import Tensor, nn

from tests.parity.reference_positions import Grid, patch_indices, position_features, turn, turns


def time_features(time_B: Tensor, width: int = 256) -> Tensor:
    """Return [cos(w_i t), sin(w_i t)] with w_i = 10000 ** (-2 i / width), float64."""
    columns = []
    for trig in (torch.cos, torch.sin):
        for i in range(width // 2):
            columns.append(trig(time_B.double() * 10000.0 ** (-2 * i / width)))
    return torch.stack(columns, dim=1)


def normalise(x: Tensor, eps: float, weight: Optional[Tensor] = None) -> Tensor:
    """Return layer norm without affine parameters, from mean and biased variance; with a weight, RMSNorm."""
    if weight is not None:
        return rms_normalise(x, weight, eps)
    mean = x.mean(-1, keepdim=True)
    variance = ((x - mean) ** 2).mean(-1, keepdim=True)
    return (x - mean) / torch.sqrt(variance + eps)


def rms_normalise(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return x / rms(x) * weight over the last axis."""
    return x / torch.sqrt((x**2).mean(-1, keepdim=True) + eps) * weight


def gelu_tanh(x: Tensor) -> Tensor:
    """Return the tanh form of GELU (Hendrycks and Gimpel 2016, section 2)."""
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def silu(x: Tensor) -> Tensor:
    return x / (1 + torch.exp(-x))


class ReferenceBlock(nn.Module):
    """DiT block with adaLN-Zero: two sub-layers, six vectors from one linear map of SiLU(c), c per sample or per token.

    Args:
        swiglu: the MLP is down(SiLU(gate(x)) * value(x)); the rows of `up` are gate 0, value 0, gate 1, value 1, ...
        rms: the norms before the modulations are RMSNorms with weights.
    """

    def __init__(
        self,
        size: int,
        heads: int,
        inner: int,
        *,
        bias: bool,
        qk_norm: bool,
        eps: float,
        swiglu: bool = False,
        rms: bool = False,
    ) -> None:
        super().__init__()
        self.heads, self.eps = heads, eps
        self.query, self.key, self.value, self.out = (nn.Linear(size, size, bias=bias) for _ in range(4))
        self.swiglu = swiglu
        self.up, self.down = nn.Linear(size, inner * (1 + swiglu), bias=bias), nn.Linear(inner, size, bias=bias)
        self.norm_1, self.norm_2 = (nn.Parameter(torch.ones(size)) if rms else None for _ in range(2))
        self.modulation = nn.Linear(size, 6 * size, bias=bias)
        self.query_norm = nn.Parameter(torch.ones(size // heads)) if qk_norm else None
        self.key_norm = nn.Parameter(torch.ones(size // heads)) if qk_norm else None

    def attend(self, x: Tensor, by: Optional[Tensor], first: Optional[tuple[Tensor, Tensor]] = None) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (self.heads, -1)) for f in (self.query, self.key, self.value))
        if self.query_norm is not None and self.key_norm is not None:
            q, k = rms_normalise(q, self.query_norm, self.eps), rms_normalise(k, self.key_norm, self.eps)
        q, k = (turn(heads.transpose(1, 2), by).transpose(1, 2) for heads in (q, k))
        self.values = v
        if first is not None:
            v = first[0] * first[1] + (1 - first[0]) * v
        scores = torch.einsum("bihd,bjhd->bhij", q, k) / math.sqrt(q.shape[-1])
        weights = torch.exp(scores - torch.logsumexp(scores, -1, keepdim=True))
        return self.out(torch.einsum("bhij,bjhd->bihd", weights, v).flatten(2))

    def forward(self, x: Tensor, cond: Tensor, by: Optional[Tensor] = None, first: Optional[Tensor] = None) -> Tensor:
        vectors = self.modulation(silu(cond if cond.dim() == 3 else cond[:, None]))
        shift_1, scale_1, gate_1, shift_2, scale_2, gate_2 = vectors.chunk(6, dim=-1)
        x = x + gate_1 * self.attend(normalise(x, self.eps, self.norm_1) * (1 + scale_1) + shift_1, by, first)
        hidden = self.up(normalise(x, self.eps, self.norm_2) * (1 + scale_2) + shift_2)
        hidden = silu(hidden[..., 0::2]) * hidden[..., 1::2] if self.swiglu else gelu_tanh(hidden)
        return x + gate_2 * self.down(hidden)


class ReferenceDiT(nn.Module):
    """The full network on patches `[B, n, patch features]` of one grid size.

    `null_label` stands for "no class" and `null_text` for "no text"; a text is the mean of its tokens.

    Args:
        positions: `sincos_2d`, `sincos_3d` or `rope_3d`.
        rope: has `rope_theta`, `rope_scaling`, `rope_factors` and `rope_axes`, for `rope_3d`.
        class_tokens: number of class tokens, and the first block that sees them.
        token: width of a vector that all blocks see as one more token, and that is predicted (Wu et al. 2025,
            arXiv:2507.01467, and its published code).
        intervals: add an embedding of the length of a time interval.
        value_residual: the values of block l are w_l v_1 + (1 - w_l) v_l, except of the first (Bhanded 2025,
            arXiv:2512.12386).
        wide_head: layers, width, heads and inner width of blocks that read the patches again; SiLU(tokens + embedded
            time) conditions each of their tokens (Zheng et al. 2025, arXiv:2510.11690, and its published code).
    """

    def __init__(
        self,
        *,
        size: int,
        depth: int,
        heads: int,
        inner: int,
        patch_in: int,
        patch_out: int,
        classes: Optional[int] = None,
        text_size: Optional[int] = None,
        bias: bool = True,
        qk_norm: bool = False,
        eps: float = 1e-6,
        time_scale: float = 1000.0,
        positions: str = "sincos_2d",
        rope: Any = None,
        bottleneck: Optional[int] = None,
        swiglu: bool = False,
        rms: bool = False,
        class_tokens: Optional[list[int]] = None,
        token: Optional[int] = None,
        intervals: bool = False,
        value_residual: bool = False,
        wide_head: Optional[tuple[int, int, int, int]] = None,
    ) -> None:
        super().__init__()
        self.size, self.eps, self.time_scale = size, eps, time_scale
        self.head_size, self.positions, self.rope = size // heads, positions, rope
        self.bottleneck = None if bottleneck is None else nn.Linear(patch_in, bottleneck, bias=False)
        self.patch = nn.Linear(bottleneck or patch_in, size)
        self.time_1, self.time_2 = nn.Linear(256, size), nn.Linear(size, size)
        if intervals:
            self.interval_1, self.interval_2 = nn.Linear(256, size), nn.Linear(size, size)
        self.intervals = intervals
        if classes is not None:
            self.labels, self.null_label = nn.Parameter(torch.zeros(classes, size)), nn.Parameter(torch.zeros(size))
        if text_size is not None:
            self.null_text = nn.Parameter(torch.zeros(text_size))
            self.text_1, self.text_2 = nn.Linear(text_size, size), nn.Linear(size, size)
        kind: Any = {"bias": bias, "qk_norm": qk_norm, "eps": eps, "swiglu": swiglu, "rms": rms}
        self.blocks = nn.ModuleList(ReferenceBlock(size, heads, inner, **kind) for _ in range(depth))
        self.first_shares = nn.Parameter(torch.zeros(depth - 1)) if value_residual else None
        self.wide_layers, self.wide_head_size = 0, 0
        if wide_head is not None:
            self.wide_layers, wide, wide_heads, wide_inner = wide_head
            self.wide_head_size = wide // wide_heads
            self.wide_condition, self.wide_patch = nn.Linear(size, wide), nn.Linear(patch_in, wide)
            self.wide_blocks = nn.ModuleList(
                ReferenceBlock(wide, wide_heads, wide_inner, **kind) for _ in range(self.wide_layers)
            )
            size = wide
        self.final_norm = nn.Parameter(torch.ones(size)) if rms else None
        self.count, self.first = class_tokens or (0, depth)
        self.class_vectors = nn.Parameter(torch.zeros(self.count, size)) if self.count else None
        if token is not None:
            self.token, self.token_norm = nn.Linear(token, size), nn.LayerNorm(size, eps=1e-6)
        self.patch_out = patch_out
        self.final_modulation, self.final = nn.Linear(size, 2 * size), nn.Linear(size, patch_out + (token or 0))

    def first_values(self, i: int) -> list[tuple[Tensor, Tensor]]:
        """Return the weight and the values of the first block for block `i`, if it mixes them into its values."""
        return [] if self.first_shares is None or not i else [(self.first_shares[i - 1], self.blocks[0].values)]

    def time_vector(self, time_B: Tensor) -> Tensor:
        features = time_features(time_B.double() * self.time_scale).to(self.time_1.weight.dtype)
        return self.time_2(silu(self.time_1(features)))

    def condition(
        self,
        time_B: Tensor,
        labels: Optional[list[Optional[int]]],
        texts: Optional[list[Optional[Tensor]]],
        interval_B: Optional[Tensor] = None,
    ) -> Tensor:
        """Sum the embedded time, interval (None for 0), labels (None for no class) and texts (None for no text)."""
        cond = self.time_vector(time_B)
        if self.intervals:
            interval_B = torch.zeros_like(time_B) if interval_B is None else interval_B
            features = time_features(interval_B.double() * self.time_scale).to(self.time_1.weight.dtype)
            cond = cond + self.interval_2(silu(self.interval_1(features)))
        if labels is not None:
            cond = cond + torch.stack([self.null_label if i is None else self.labels[i] for i in labels])
        if texts is not None:
            pooled = torch.stack([self.null_text if text is None else text.mean(0) for text in texts])
            cond = cond + self.text_2(silu(self.text_1(pooled)))
        return cond

    def forward(
        self,
        patches: Tensor,
        time_B: Tensor,
        grid: Grid,
        labels: Optional[list[Optional[int]]] = None,
        texts: Optional[list[Optional[Tensor]]] = None,
        interval_B: Optional[Tensor] = None,
        token_BF: Optional[Tensor] = None,
    ) -> Tensor:
        """Return the prediction of each patch, followed by that of the token of its sample."""
        cond = self.condition(time_B, labels, texts, interval_B)
        x, by = self.patch(patches if self.bottleneck is None else self.bottleneck(patches)), None
        if self.positions == "rope_3d":
            by = turns(patch_indices(grid), self.head_size, self.rope, self.rope.rope_axes)
        else:
            x = x + position_features(grid, self.size, self.positions).to(patches.dtype)
        if token_BF is not None:
            x = torch.cat([x, self.token_norm(self.token(token_BF))[:, None]], 1)
            by = None if by is None else torch.cat([by, torch.ones_like(by[:1])])
        for i, block in enumerate(self.blocks):
            if i == self.first and self.class_vectors is not None and labels is not None:
                rows = [self.null_label if label is None else self.labels[label] for label in labels]
                x = torch.cat([torch.stack(rows)[:, None] + self.class_vectors, x], 1)
                if by is not None:  # class tokens are not rotated
                    by = torch.cat([torch.ones_like(by[:1]).expand(self.count, -1), by])
            x = block(x, cond, by, *self.first_values(i))
        x, cond = x if self.class_vectors is None else x[:, self.count :], cond[:, None]
        if self.wide_layers:
            cond = self.wide_condition(silu(x + self.time_vector(time_B)[:, None]))
            x = self.wide_patch(patches)
            if by is not None:
                axes = [n * self.wide_head_size // self.head_size for n in self.rope.rope_axes]
                by = turns(patch_indices(grid), self.wide_head_size, self.rope, axes)
            for block in self.wide_blocks:
                x = block(x, cond, by)
        shift, scale = self.final_modulation(silu(cond)).chunk(2, dim=-1)
        out = self.final(normalise(x, self.eps, self.final_norm) * (1 + scale) + shift)
        if token_BF is None:
            return out
        predicted = out[:, -1:, self.patch_out :].expand(-1, len(out[0]) - 1, -1)
        return torch.cat([out[:, :-1, : self.patch_out], predicted], 2)
