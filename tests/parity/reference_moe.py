"""The mixture of experts in plain PyTorch, token by token, written from the formulas of EC-DiT and Switch.

Source: Sun et al. 2024, arXiv:2410.02098; Zhou et al. 2022, arXiv:2202.09368; Fedus et al. 2021, arXiv:2101.03961.
"""

import math
from typing import Optional

import torch
from torch import Tensor, nn

from tests.parity.reference_dit import ReferenceBlock, gelu_tanh, normalise, silu


class ReferenceMoEBlock(ReferenceBlock):
    """A DiT block whose second sub-layer is a mixture of experts; `aux` is the last balancing loss, times tokens."""

    def __init__(
        self,
        size: int,
        heads: int,
        inner: int,
        *,
        bias: bool,
        qk_norm: bool,
        eps: float,
        experts: int,
        expert_choice: bool,
        factor: float,
    ) -> None:
        super().__init__(size, heads, inner, bias=bias, qk_norm=qk_norm, eps=eps)
        del self.up, self.down
        self.router = nn.Linear(size, experts, bias=False)
        self.ups = nn.ModuleList(nn.Linear(size, inner, bias=bias) for _ in range(experts))
        self.downs = nn.ModuleList(nn.Linear(inner, size, bias=bias) for _ in range(experts))
        self.expert_choice, self.factor = expert_choice, factor
        self.aux: list[Tensor] = []

    def route(self, score: Tensor) -> list[tuple[int, int]]:
        """List the (token, expert) pairs of one sample."""
        tokens, experts = range(len(score)), range(score.shape[1])
        if self.expert_choice:
            capacity = math.ceil(len(score) * self.factor / len(experts))
            return [(t, e) for e in experts for t in sorted(tokens, key=lambda t: -score[t, e].item())[:capacity]]
        return [(t, e) for t in tokens for e in sorted(experts, key=lambda e: -score[t, e].item())[: int(self.factor)]]

    def mixture(self, x: Tensor) -> Tensor:
        """Return sum_e score_te * Expert_e(x_t) for one sample `[n, D]`."""
        logits = self.router(x)
        score = torch.exp(logits - torch.logsumexp(logits, -1, keepdim=True))
        pairs = self.route(score)
        rows = [torch.zeros_like(x[0]) for _ in x]
        for t, e in pairs:
            rows[t] = rows[t] + score[t, e] * self.downs[e](gelu_tanh(self.ups[e](x[t])))
        n, experts = score.shape
        share = torch.tensor([sum(e == i for _, e in pairs) / (n * self.factor) for i in range(experts)])
        self.aux.append(n * experts * (share.to(x.dtype) * score.mean(0)).sum())
        return torch.stack(rows)

    def forward(self, x: Tensor, cond: Tensor, by: Optional[Tensor] = None) -> Tensor:
        shift_1, scale_1, gate_1, shift_2, scale_2, gate_2 = self.modulation(silu(cond))[:, None].chunk(6, dim=-1)
        x = x + gate_1 * self.attend(normalise(x, self.eps) * (1 + scale_1) + shift_1, by)
        inner = normalise(x, self.eps) * (1 + scale_2) + shift_2
        return x + gate_2 * torch.stack([self.mixture(sample) for sample in inner])
