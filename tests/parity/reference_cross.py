"""The backbones with text cross-attention in plain PyTorch, from the formulas of their papers, one sample at a time.

They read our parameters by name, as float64 leaves, and split fused projections by row; they share no other code or
data with `dit`. The gradients of the leaves are therefore the exact gradients of our parameters.

Source: adaLN-Zero: Peebles and Xie 2023, arXiv:2212.09748, section 3.2; Movie Gen: Polyak et al. 2024,
arXiv:2410.13720, section 3.1.2; SwiGLU: Shazeer 2020, Eq. 6; grouped queries: Ainslie et al. 2023, figure 2.
"""

import math
from typing import Any, Optional

import torch
from torch import Tensor, nn

from tests.parity.reference_dit import gelu_tanh, normalise, rms_normalise, silu, time_features
from tests.parity.reference_positions import Grid, patch_indices, position_features, turn, turns


class Leaves:
    """Float64 copies of a model's parameters, by name, that collect exact gradients."""

    def __init__(self, model: nn.Module) -> None:
        self.by_name = {n: p.detach().double().requires_grad_() for n, p in model.named_parameters()}

    def __getitem__(self, name: str) -> Tensor:
        return self.by_name[name]

    def get(self, name: str) -> Optional[Tensor]:
        return self.by_name.get(name)

    def linear(self, x: Tensor, name: str) -> Tensor:
        bias = self.get(f"{name}.bias")
        return x @ self[f"{name}.weight"].T + (0 if bias is None else bias)


def attend(q: list[Tensor], k: list[Tensor], v: list[Tensor]) -> Tensor:
    """Attend head by head; query head i reads the keys of group i // (heads / groups)."""
    share = len(q) // len(k)
    heads = []
    for i, query in enumerate(q):
        scores = query @ k[i // share].T / math.sqrt(query.shape[-1])
        heads.append(torch.exp(scores - torch.logsumexp(scores, -1, keepdim=True)) @ v[i // share])
    return torch.cat(heads, -1)


class CrossReference:
    """One of the two backbones on one sample; `run` returns the prediction `[n, output features]`."""

    def __init__(self, config: Any, leaves: Leaves) -> None:
        self.config, self.leaves = config, leaves
        self.head_size = config.hidden_size // config.num_attention_heads
        self.groups = config.num_query_groups or config.num_attention_heads

    def embed(self, patches: Tensor, grid: Grid, span: Optional[float] = None) -> tuple[Tensor, Optional[Tensor]]:
        """Return the embedded patches plus their positions, and the rotation of queries and keys."""
        x, kind = self.leaves.linear(patches.double(), "embed.linear"), self.config.position_embedding
        if kind in ("sincos_2d", "sincos_3d"):
            x = x + position_features(grid, self.config.hidden_size, kind, span)
        return x, turns(patch_indices(grid), self.head_size, self.config) if kind == "rope_3d" else None

    def head_norm(self, x: Tensor, name: str) -> Tensor:
        weight = self.leaves.get(f"{name}.weight")
        return x if weight is None else rms_normalise(x, weight, self.config.layernorm_epsilon)

    def self_attention(self, x: Tensor, name: str, by: Optional[Tensor]) -> Tensor:
        """Fused rows: for each group, the queries, the key and the value."""
        rows = list(self.leaves.linear(x, f"{name}.linear_qkv").split(self.head_size, -1))
        share = self.config.num_attention_heads // self.groups
        q, k, v = [], [], []
        for group in range(self.groups):
            own = rows[group * (share + 2) : (group + 1) * (share + 2)]
            q += [turn(self.head_norm(head, f"{name}.q_layernorm"), by) for head in own[:share]]
            k.append(turn(self.head_norm(own[share], f"{name}.k_layernorm"), by))
            v.append(own[share + 1])
        return self.leaves.linear(attend(q, k, v), f"{name}.linear_proj")

    def cross_attention(self, x: Tensor, text: Tensor, name: str) -> Tensor:
        """Fused rows of the text: for each group, the key and the value."""
        q = [
            self.head_norm(head, f"{name}.q_layernorm")
            for head in self.leaves.linear(x, f"{name}.linear_q").split(self.head_size, -1)
        ]
        rows = list(self.leaves.linear(text, f"{name}.linear_kv").split(self.head_size, -1))
        k = [self.head_norm(key, f"{name}.k_layernorm") for key in rows[0::2]]
        return self.leaves.linear(attend(q, k, rows[1::2]), f"{name}.linear_proj")

    def condition(self, time: Tensor, grid: Grid, fps: Optional[float], label: Optional[int]) -> Tensor:
        """Sum the embedded time, class (None for no class), frame rate (None for 30) and size."""
        config, leaves = self.config, self.leaves

        def embed(features: Tensor, name: str) -> Tensor:
            return leaves.linear(silu(leaves.linear(features, f"{name}.linear_1")), f"{name}.linear_2")

        cond = embed(time_features(time.double() * config.time_scale), "conditioner.time")[0]
        rate = 30.0 if fps is None else fps
        if config.num_classes is not None:
            cond = cond + leaves["conditioner.label.weight"][config.num_classes if label is None else label]
        if config.fps_conditioning:
            cond = cond + embed(time_features(torch.tensor([rate])), "conditioner.fps")[0]
        if config.size_conditioning:
            frames = grid[0] * config.patch_temporal
            sides = [grid[1] * config.patch_spatial, grid[2] * config.patch_spatial, frames / rate]
            features = torch.cat([time_features(torch.tensor([side], dtype=torch.float64)) for side in sides], 1)
            cond = cond + embed(features, "conditioner.size")[0]
        return cond

    def dit_block(self, x: Tensor, cond: Tensor, text: Tensor, name: str, by: Optional[Tensor]) -> Tensor:
        modulation, eps = silu(cond), self.config.layernorm_epsilon
        if self.config.adaln_lora_rank is not None:
            modulation = self.leaves.linear(modulation, f"{name}.modulation.down")
        chunks = self.leaves.linear(modulation, f"{name}.modulation.linear").chunk(9)
        for i, sublayer in enumerate(("attention", "cross_attention", "mlp")):
            shift, scale, gate = chunks[3 * i : 3 * i + 3]
            y = normalise(x, eps) * (1 + scale) + shift
            if sublayer == "attention":
                y = self.self_attention(y, f"{name}.attention", by)
            elif sublayer == "cross_attention":
                y = self.cross_attention(y, text, f"{name}.cross_attention")
            else:
                y = self.leaves.linear(
                    gelu_tanh(self.leaves.linear(y, f"{name}.mlp.linear_fc1")), f"{name}.mlp.linear_fc2"
                )
            x = x + gate * y
        return x

    def swiglu(self, x: Tensor, name: str) -> Tensor:
        hidden = self.leaves.linear(x, f"{name}.linear_fc1")
        return self.leaves.linear(silu(hidden[:, 0::2]) * hidden[:, 1::2], f"{name}.linear_fc2")  # gate, up, gate, ...

    def mixture(self, x: Tensor, name: str) -> Tensor:
        """Return sum_e score_te * Expert_e(x_t) over the pairs that experts, or tokens, select in this sample."""
        score = torch.softmax(self.leaves.linear(x, f"{name}.router"), -1)
        n, experts = score.shape
        if self.config.moe_router == "expert_choice":
            capacity = math.ceil(n * self.config.moe_capacity_factor / experts)
            pairs = [(t, e) for e in range(experts) for t in score[:, e].argsort(descending=True)[:capacity].tolist()]
        else:
            pairs = [
                (t, e) for t in range(n) for e in score[t].argsort(descending=True)[: self.config.moe_top_k].tolist()
            ]
        rows = [torch.zeros_like(x[0]) for _ in range(n)]
        for t, e in pairs:
            rows[t] = rows[t] + score[t, e] * self.swiglu(x[t : t + 1], f"{name}.experts.{e}")[0]
        return torch.stack(rows)

    def moviegen_block(self, x: Tensor, cond: Tensor, text: Tensor, name: str, by: Optional[Tensor]) -> Tensor:
        leaves, eps = self.leaves, self.config.layernorm_epsilon
        shift_1, scale_1, gate_1, shift_2, scale_2, gate_2 = leaves.linear(
            silu(cond), f"{name}.modulation.linear"
        ).chunk(6)
        y = rms_normalise(x, leaves[f"{name}.attention_norm.weight"], eps) * (1 + scale_1) + shift_1
        x = x + gate_1 * self.self_attention(y, f"{name}.attention", by)
        y = rms_normalise(x, leaves[f"{name}.cross_norm.weight"], eps)
        x = x + self.cross_attention(y, text, f"{name}.cross_attention")
        y = rms_normalise(x, leaves[f"{name}.mlp_norm.weight"], eps) * (1 + scale_2) + shift_2
        y = self.swiglu(y, f"{name}.mlp") if self.config.num_experts is None else self.mixture(y, f"{name}.mlp")
        return x + gate_2 * y

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
        """Predict one sample; without a text, attend to one null token."""
        config, leaves = self.config, self.leaves
        moviegen = "head.norm.weight" in leaves.by_name
        text = leaves["text.null"][None] if text is None else text.double()
        cond = self.condition(time, grid, fps, label)
        x, by = self.embed(patches, grid)
        for i in range(config.num_layers):
            if config.position_embedding == "learned_3d":
                index = torch.tensor(patch_indices(grid))
                x = x + sum(leaves[f"positions.{axis}"][index[:, j]] for j, axis in enumerate("thw"))
            block = self.moviegen_block if moviegen else self.dit_block
            x = block(x, cond, text, f"layers.{i}", by)
        shift, scale = leaves.linear(silu(cond), "head.modulation").chunk(2)
        eps = config.layernorm_epsilon
        normed = rms_normalise(x, leaves["head.norm.weight"], eps) if moviegen else normalise(x, eps)
        return leaves.linear(normed * (1 + scale) + shift, "head.linear")


class SharedModulationReference(CrossReference):
    """A backbone whose blocks share one modulation (adaLN-single) and project the text."""

    def block(self, x: Tensor, shared: Tensor, text: Tensor, index: int, grid: Grid, by: Optional[Tensor]) -> Tensor:
        raise NotImplementedError

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
        text = leaves.linear(gelu_tanh(leaves.linear(text, "text_projection.linear_1")), "text_projection.linear_2")
        if (weight := leaves.get("text_projection.norm.weight")) is not None:
            text = rms_normalise(text, weight, 1e-5)
        cond = self.condition(time, grid, fps, label)
        shared = leaves.linear(silu(cond), "modulation.linear")
        x, by = self.embed(patches, grid, getattr(config, "position_span", None))
        for i in range(config.num_layers):
            x = self.block(x, shared, text, i, grid, by)
        shift, scale = leaves["head.table"] + cond
        return leaves.linear(normalise(x, config.layernorm_epsilon) * (1 + scale) + shift, "head.linear")
