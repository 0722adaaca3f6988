"""The two UNets of Imagen for one sample, in float64, written from their description."""

import math
from typing import Any, Optional

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.parity.reference_cross import Leaves


class ImagenReference:
    """One UNet on one picture `[1, C, H, W]` with one text `[K, D]`.

    Args:
        config: config of the model.
        leaves: weights of the model.
    """

    def __init__(self, config: Any, leaves: Leaves) -> None:
        self.config, self.w = config, leaves

    def norm(self, x: Tensor, name: str) -> Tensor:
        return F.group_norm(x, self.config.norm_num_groups, self.w[f"{name}.weight"], self.w[f"{name}.bias"], 1e-5)

    def conv(self, x: Tensor, name: str, **options: int) -> Tensor:
        weight = self.w[f"{name}.weight"]
        options = {"padding": weight.shape[-1] // 2} | options
        return F.conv2d(x, weight, self.w[f"{name}.bias"], **options)  # type: ignore[arg-type]

    def twice(self, x: Tensor, name: str) -> Tensor:
        return F.conv_transpose2d(x, self.w[f"{name}.weight"], self.w[f"{name}.bias"], stride=2, padding=1)

    def one_by_one(self, x: Tensor, name: str) -> Tensor:
        """Apply a linear layer as a convolution of 1 x 1."""
        return F.conv2d(x, self.w[f"{name}.weight"][:, :, None, None], self.w[f"{name}.bias"])

    def time(self, value: float, name: str) -> Tensor:
        width = self.config.hidden_size
        angles = [value * 10_000 ** (-i / (width // 2)) for i in range(width // 2)]
        features = torch.tensor([*map(math.cos, angles), *map(math.sin, angles)], dtype=torch.float64)
        return self.w.linear(F.silu(self.w.linear(features, f"{name}.linear_1")), f"{name}.linear_2")

    def caption(self, text: Tensor) -> tuple[Tensor, Tensor]:
        """Return the text tokens for attention, before their norm, and the text part of the conditioning vector."""
        tokens = self.w.linear(text, "caption.to_tokens")
        score = self.w["caption.pooling.to_score"]
        weights = torch.softmax(text @ score[0, :-1] + score[0, -1], 0)
        pooled = self.layer_norm(weights @ text, "caption.pooling.norm")
        pooled = self.w.linear(pooled, "caption.pooling.to_out")
        vector = self.w.linear(self.layer_norm(pooled, "caption.norm"), "caption.linear_1")
        return tokens, self.w.linear(F.silu(vector), "caption.linear_2")

    def layer_norm(self, x: Tensor, name: str) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], self.w[f"{name}.weight"], self.w[f"{name}.bias"])

    def branch(self, x: Tensor, name: str) -> Tensor:
        y = self.conv(F.silu(self.norm(x, f"{name}.norm_1")), f"{name}.convolution_1")
        scale, shift = self.w.linear(F.silu(self.vector), f"{name}.vector")[None, :, None, None].chunk(2, 1)
        y = self.norm(y, f"{name}.norm_2") * (1 + scale) + shift
        return self.conv(F.silu(y), f"{name}.convolution_2")

    def softmax_attention(self, q: Tensor, keys: list[Tensor], values: list[Tensor]) -> Tensor:
        """Attend from positions `[1, C, H, W]` to keys `[n, C]`, head by head."""
        channels = q.shape[1]
        size = channels // self.config.num_attention_heads if self.config.head_size is None else self.config.head_size
        queries, k, v = q[0].flatten(1).T, torch.cat(keys), torch.cat(values)
        heads = []
        for start in range(0, channels, size):
            own = slice(start, start + size)
            scores = queries[:, own] @ k[:, own].T / math.sqrt(size)
            heads.append(torch.softmax(scores, -1) @ v[:, own])
        return torch.cat(heads, 1).T.reshape(q.shape)

    def attention(self, kind: str, x: Tensor, name: str) -> Tensor:
        if kind == "stacked":
            y = self.one_by_one(self.norm(x, f"{name}.norm"), f"{name}.to_inner")
            y = self.attention("self", y, f"{name}.self_attention")
            y = self.attention("cross", y, f"{name}.cross_attention")
            inner = self.one_by_one(self.norm(y, f"{name}.feed_forward.norm"), f"{name}.feed_forward.linear_1")
            value, gate = inner.chunk(2, 1)
            y = y + self.one_by_one(value * F.gelu(gate), f"{name}.feed_forward.linear_2")
            return x + self.one_by_one(y, f"{name}.to_out")
        normed, keys, values = self.norm(x, f"{name}.norm"), [], []
        if kind != "cross":
            source = normed if kind == "self" else self.norm(x, f"{name}.norm_kv")
            k, v = self.one_by_one(source, f"{name}.to_kv")[0].flatten(1).T.chunk(2, 1)
            keys, values = [k], [v]
        if kind != "self":
            text = self.norm(self.tokens.T[None], f"{name}.norm_context")[0].T
            k, v = self.w.linear(text, f"{name}.context_to_kv").chunk(2, 1)
            keys, values = [*keys, k], [*values, v]
        out = self.softmax_attention(self.one_by_one(normed, f"{name}.to_q"), keys, values)
        return x + self.one_by_one(out, f"{name}.to_out")

    def run(
        self, x: Tensor, time: float, text: Optional[Tensor], low: Optional[Tensor], level: Optional[float]
    ) -> Tensor:
        """Return the prediction for a noised picture, a low-resolution picture and the noise level of the latter."""
        self.vector = self.time(time, "time")
        if level is not None:
            self.vector = self.vector + self.time(math.log(level) / 4, "augmentation")
        if text is not None:
            self.tokens, of_text = self.caption(text.double())
            self.vector = self.vector + of_text
        x = (x if low is None else torch.cat([x, low], 1)).double()
        return self.network(self.conv(x, "first"))

    def network(self, x: Tensor) -> Tensor:
        raise NotImplementedError


class UNetReference(ImagenReference):
    """The regular UNet."""

    def block(self, x: Tensor, name: str) -> Tensor:
        y = self.branch(x, f"{name}.branch")
        return y + (x if self.w.get(f"{name}.shortcut.weight") is None else self.conv(x, f"{name}.shortcut"))

    def changed(self, x: Tensor, name: str, way: str) -> Tensor:
        if way == "down":
            return self.conv(x, f"{name}.convolution", stride=2, padding=1)
        return self.twice(x, f"{name}.convolution")

    def network(self, x: Tensor) -> Tensor:
        config, kind, skips, number = self.config, self.config.attention_type, [x], 0
        levels = len(config.num_res_blocks)
        for level in range(levels):
            for _ in range(config.num_res_blocks[level]):
                x = self.block(x, f"down.{number}.block")
                if level in config.attention_levels:
                    x = self.attention(kind, x, f"down.{number}.attention.inner")
                skips.append(x)
                number += 1
            if level != levels - 1:
                x = self.changed(x, f"down.{number}.resample", "down")
                skips.append(x)
                number += 1
        x = self.attention(kind, self.block(x, "middle.0.block"), "middle.0.attention.inner")
        x, number = self.block(x, "middle.1.block"), 0
        for level in range(levels - 1, -1, -1):
            for i in range(config.num_res_blocks[level] + 1):
                x = self.block(torch.cat([x, skips.pop()], 1), f"up.{number}.block")
                if level in config.attention_levels:
                    x = self.attention(kind, x, f"up.{number}.attention.inner")
                if level and i == config.num_res_blocks[level]:
                    x = self.changed(x, f"up.{number}.resample", "up")
                number += 1
        return self.conv(F.silu(self.norm(x, "norm")), "last")


class EfficientReference(ImagenReference):
    """The Efficient UNet."""

    def blocks(self, x: Tensor, name: str, level: int) -> Tensor:
        for i in range(self.config.num_res_blocks[level]):
            beside = self.conv(x, f"{name}.blocks.{i}.shortcut")
            x = self.branch(x, f"{name}.blocks.{i}.branch") + beside / math.sqrt(2)
        if level in self.config.attention_levels:
            x = self.attention(self.config.attention_type, x, f"{name}.attention.inner")
        return x

    def network(self, x: Tensor) -> Tensor:
        saved, last = [], len(self.config.num_res_blocks) - 1
        for level in range(last + 1):
            if level < last:
                x = self.conv(x, f"down.{level}.before", stride=2, padding=1)
            x = self.blocks(x, f"down.{level}", level)
            saved.append(x)
        for level in range(last, -1, -1):
            x = self.blocks(x if level == last else x + saved[level], f"up.{level}", level)
            if level < last:
                x = self.twice(x, f"up.{level}.after")
        return self.conv(x, "last")
