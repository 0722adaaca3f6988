"""FLUX in plain PyTorch, written from its published description, one sample at a time, with a time per token.

It reads our parameters by name, as float64 leaves, and splits fused projections by row; it shares no other code or
data with `dit`.

Source: MM-DiT: Esser et al. 2024, arXiv:2403.03206, figure 2; parallel layers: Dehghani et al. 2023, arXiv:2302.05442,
section 2; sizes, axes of the rotary positions and order of the conditions: black-forest-labs/flux.
"""

from typing import Any, Optional

import torch
from torch import Tensor

from tests.parity.reference_cross import Leaves, attend
from tests.parity.reference_dit import gelu_tanh, normalise, rms_normalise, silu, time_features
from tests.parity.reference_positions import Grid, patch_indices, position_features, turn, turns

DROPPED_TOKENS = 3
"""Number of tokens of a dropped text in the packs of the tests."""


class FluxReference:
    def __init__(self, config: Any, leaves: Leaves) -> None:
        self.config, self.leaves = config, leaves
        self.head_size = config.hidden_size // config.num_attention_heads

    def modulate(self, x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
        return normalise(x, self.config.layernorm_epsilon) * (1 + scale) + shift

    def head_norm(self, x: Tensor, name: str) -> Tensor:
        return rms_normalise(x, self.leaves[f"{name}.weight"], self.config.layernorm_epsilon)

    def condition(self, time: Tensor, pooled: Optional[Tensor]) -> Tensor:
        def embed(x: Tensor, name: str) -> Tensor:
            name = f"conditioner.{name}"
            return self.leaves.linear(silu(self.leaves.linear(x, f"{name}.linear_1")), f"{name}.linear_2")

        scale = self.config.time_scale
        pooled = self.leaves["conditioner.pooled.null"] if pooled is None else pooled.double()
        cond = embed(time_features(time.double() * scale), "time") + embed(pooled[None], "pooled")
        if self.config.guidance is not None:
            given = torch.tensor([self.config.guidance], dtype=torch.float64)
            cond = cond + embed(time_features(given * scale), "guidance")
        return cond

    def joint_block(
        self, text: Tensor, image: Tensor, conds: dict[str, Tensor], by: Optional[Tensor], name: str
    ) -> tuple[Tensor, Tensor]:
        leaves, streams = self.leaves, {"text": text, "image": image}
        chunks = {s: leaves.linear(silu(conds[s]), f"{name}.{s}.modulation.linear").chunk(6, -1) for s in streams}
        q: list[Tensor] = []
        k: list[Tensor] = []
        v: list[Tensor] = []
        rows = {}
        for s, x in streams.items():
            shift, scale = chunks[s][:2]
            rows[s] = leaves.linear(self.modulate(x, shift, scale), f"{name}.{s}.linear_qkv").split(self.head_size, -1)
        for head in range(self.config.num_attention_heads):
            parts = [rows[s][3 * head : 3 * head + 3] for s in streams]
            q.append(
                turn(torch.cat([self.head_norm(p[0], f"{name}.{s}.q_layernorm") for s, p in zip(rows, parts)]), by)
            )
            k.append(
                turn(torch.cat([self.head_norm(p[1], f"{name}.{s}.k_layernorm") for s, p in zip(rows, parts)]), by)
            )
            v.append(torch.cat([p[2] for p in parts]))
        attended = dict(zip(streams, attend(q, k, v).split([len(text), len(image)])))
        for s, x in streams.items():
            _, _, gate, shift, scale, mlp_gate = chunks[s]
            x = x + gate * leaves.linear(attended[s], f"{name}.{s}.linear_proj")
            y = gelu_tanh(leaves.linear(self.modulate(x, shift, scale), f"{name}.{s}.mlp.linear_fc1"))
            streams[s] = x + mlp_gate * leaves.linear(y, f"{name}.{s}.mlp.linear_fc2")
        return streams["text"], streams["image"]

    def single_block(self, x: Tensor, cond: Tensor, by: Optional[Tensor], name: str) -> Tensor:
        """Fused rows: for each head, query, key, value and a share of the MLP; the columns have the same order."""
        shift, scale, gate = self.leaves.linear(silu(cond), f"{name}.modulation.linear").chunk(3, -1)
        heads = self.config.num_attention_heads
        share = self.config.ffn_hidden_size // heads
        q, k, v, mlp = [], [], [], []
        inner = self.leaves.linear(self.modulate(x, shift, scale), f"{name}.linear_in")
        for own in inner.split(3 * self.head_size + share, -1):
            query, key, value, hidden = own.split([self.head_size] * 3 + [share], -1)
            q.append(turn(self.head_norm(query, f"{name}.q_layernorm"), by))
            k.append(turn(self.head_norm(key, f"{name}.k_layernorm"), by))
            v.append(value)
            mlp.append(gelu_tanh(hidden))
        attended = attend(q, k, v).split(self.head_size, -1)
        both = torch.cat([torch.cat(pair, -1) for pair in zip(attended, mlp)], -1)
        return x + gate * self.leaves.linear(both, f"{name}.linear_out")

    def run(
        self,
        patches: Tensor,
        time: Tensor,
        grid: Grid,
        text: Optional[Tensor],
        *,
        pooled: Optional[Tensor],
        **others: object,
    ) -> Tensor:
        """Predict one sample; the network ignores frame rate and class.

        Args:
            time: time of the sample `[1]`, or those of its text and of each image token `[1 + n]`.
        """
        config, leaves = self.config, self.leaves
        given = leaves["text.null"].expand(DROPPED_TOKENS, -1) if text is None else text.double()
        text, image = leaves.linear(given, "embed_text"), leaves.linear(patches.double(), "embed.linear")
        rows = self.condition(time, pooled)
        conds = {"text": rows[:1].expand(len(text), -1), "image": rows[-len(image) :].expand(len(image), -1)}
        by = None
        if config.position_embedding == "rope_3d":
            indices = [(0, 0, 0)] * len(given) + patch_indices(grid)
            by = turns(indices, self.head_size, config, config.rope_axes)
        else:
            kind, crop = config.position_embedding, config.position_crop
            image = image + position_features(grid, config.hidden_size, kind, crop=crop)
        for i in range(config.num_joint_layers):
            text, image = self.joint_block(text, image, conds, by, f"layers.{i}")
        x, cond = torch.cat([text, image]), torch.cat([conds["text"], conds["image"]])
        for i in range(config.num_joint_layers, config.num_joint_layers + config.num_single_layers):
            x = self.single_block(x, cond, by, f"layers.{i}")
        shift, scale = leaves.linear(silu(conds["image"]), "head.modulation").chunk(2, -1)
        return leaves.linear(self.modulate(x[len(text) :], shift, scale), "head.linear")
