"""The networks of NeMo's Imagen in plain PyTorch, with NeMo's names of modules, dense batches and masked texts.

Only names, shapes and arithmetic are NeMo's (2.0, `nemo/collections/multimodal/modules/imagen/diffusionmodules`). The
keyword arguments are the keys of a document's section `model.unet`.
"""

import math
from collections.abc import Sequence
from typing import Any, Optional

import torch
import torch.nn.functional as F
from torch import Tensor, nn

GROUPS = 32


def norm(channels: int) -> nn.GroupNorm:
    return nn.GroupNorm(GROUPS, channels)


class Sinusoid(nn.Module):
    """Fixed frequencies, or learned ones where `learned` features are given."""

    def __init__(self, width: int, learned: int) -> None:
        super().__init__()
        self.width = width
        if learned:
            self.weights = nn.Parameter(torch.zeros(learned // 2))
        self.learned = bool(learned)

    def forward(self, time: Tensor) -> Tensor:
        if self.learned:
            angles = 2 * math.pi * time[:, None] * self.weights
            return torch.cat([time[:, None], angles.sin(), angles.cos()], 1)
        half = self.width // 2
        angles = time[:, None] * torch.exp(-math.log(10_000) / half * torch.arange(half, dtype=time.dtype))
        return torch.cat([angles.cos(), angles.sin()], 1)


class Pooling(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.W = nn.Linear(width, 1)

    def forward(self, text: Tensor) -> Tensor:
        return (torch.softmax(self.W(text), 1) * text).sum(1)


class Conditioned(nn.Module):
    """Time, level of noise and text, which both networks have; `condition` is the width of the projected text."""

    def __init__(
        self, *, embed: int, text: int, condition: int, learned: int, pooling: str, null: bool, noised: bool
    ) -> None:
        super().__init__()
        width = 4 * embed

        def clock() -> nn.Sequential:
            inputs = learned + 1 if learned else embed
            return nn.Sequential(Sinusoid(embed, learned), nn.Linear(inputs, width), nn.SiLU(), nn.Linear(width, width))

        self.time_embed = clock()
        if noised:
            self.lowres_time_embed = clock()
        if pooling == "attention":
            self.attention_pooling = nn.Sequential(Pooling(text), nn.LayerNorm(text), nn.Linear(text, condition))
        self.text_to_cond = nn.Linear(text, condition)
        self.to_text_non_attn_cond = nn.Sequential(
            nn.LayerNorm(condition), nn.Linear(condition, width), nn.SiLU(), nn.Linear(width, width)
        )
        if null:
            self.null_text_embedding = nn.Parameter(torch.zeros(1, 1, condition))
        self.pooling, self.null, self.noised = pooling, null, noised

    def conditions(
        self, time: Tensor, text: Tensor, mask: Tensor, low_time: Optional[Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        vector = self.time_embed(time)
        if low_time is not None:
            vector = vector + self.lowres_time_embed(low_time)
        tokens = self.text_to_cond(text)
        pooled = tokens.mean(1) if self.pooling == "mean" else self.attention_pooling(text)
        vector = vector + self.to_text_non_attn_cond(pooled)
        if self.null:
            tokens = torch.cat([tokens, self.null_text_embedding.expand(len(text), -1, -1)], 1)
            mask = torch.cat([mask, mask.new_ones(len(mask), 1)], 1)
        return vector, tokens, mask


class ResBlock(nn.Module):
    def __init__(
        self,
        inputs: int,
        outputs: int,
        vector: int,
        *,
        scale_shift: bool,
        efficient: bool,
        way: str = "",
        scale: float = 1,
    ) -> None:
        super().__init__()
        self.in_layers = nn.Sequential(norm(inputs), nn.SiLU(), nn.Conv2d(inputs, outputs, 3, padding=1))
        self.h_upd = self.x_upd = nn.Identity()
        if way == "up":
            self.h_upd, self.x_upd = Up(inputs), Up(inputs)
        elif way == "down":
            self.h_upd, self.x_upd = nn.AvgPool2d(2), nn.AvgPool2d(2)
        self.emb_layers = nn.Sequential(nn.SiLU(), nn.Linear(vector, 2 * outputs if scale_shift else outputs))
        dropout = [] if efficient else [nn.Dropout(0.0)]
        self.out_layers = nn.Sequential(norm(outputs), nn.SiLU(), *dropout, nn.Conv2d(outputs, outputs, 3, padding=1))
        if efficient:
            self.shortcut = nn.Conv2d(inputs, outputs, 1)
        else:
            self.skip_connection = nn.Identity() if inputs == outputs else nn.Conv2d(inputs, outputs, 1)
        self.scale_shift, self.efficient, self.scale = scale_shift, efficient, scale

    def forward(self, x: Tensor, vector: Tensor, text: Tensor, mask: Tensor) -> Tensor:
        h = self.in_layers[2](self.h_upd(self.in_layers[1](self.in_layers[0](x))))
        change = self.emb_layers(vector)[:, :, None, None]
        if self.scale_shift:
            scale, shift = change.chunk(2, 1)
            h = self.out_layers[1:](self.out_layers[0](h) * (1 + scale) + shift)
        else:
            h = self.out_layers(h + change)
        return h + (self.shortcut(x) * self.scale if self.efficient else self.skip_connection(self.x_upd(x)))


class Up(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.ConvTranspose2d(channels, channels, 4, 2, 1)

    def forward(self, x: Tensor, *_: Tensor) -> Tensor:
        return self.conv(x)


class Down(nn.Module):
    def __init__(self, channels: int, *, conv: bool) -> None:
        super().__init__()
        self.op = nn.Conv2d(channels, channels, 3, 2, 1) if conv else nn.AvgPool2d(2)

    def forward(self, x: Tensor, *_: Tensor) -> Tensor:
        return self.op(x)


class Attention(nn.Module):
    """Self-attention, cross-attention, or both with one softmax (`fused`)."""

    def __init__(self, kind: str, channels: int, text: int, heads: int) -> None:
        super().__init__()
        self.kind, self.heads = kind, heads
        self.norm = norm(channels)
        if kind == "self":
            self.qkv = nn.Conv1d(channels, 3 * channels, 1)
        else:
            self.norm_context = norm(text)
            self.q = nn.Conv1d(channels, channels, 1)
        if kind == "cross":
            self.kv = nn.Conv1d(text, 2 * channels, 1)
        if kind == "fused":
            self.norm_self = norm(channels)
            self.kv_self = nn.Conv1d(channels, 2 * channels, 1)
            self.kv_context = nn.Conv1d(text, 2 * channels, 1)
        self.proj_out = nn.Conv1d(channels, channels, 1)

    def forward(self, x: Tensor, vector: Tensor, text: Tensor, mask: Tensor) -> Tensor:
        flat = x.flatten(2)
        everywhere = torch.ones(len(x), flat.shape[2], dtype=torch.bool)
        if self.kind == "self":
            q, k, v = self.qkv(self.norm(flat)).chunk(3, 1)
            keep = everywhere
        else:
            q = self.q(self.norm(flat))
            words = self.norm_context(text.transpose(1, 2))
            k, v = (self.kv if self.kind == "cross" else self.kv_context)(words).chunk(2, 1)
            keep = mask.bool()
        if self.kind == "fused":
            own_k, own_v = self.kv_self(self.norm_self(flat)).chunk(2, 1)
            k, v, keep = torch.cat([own_k, k], 2), torch.cat([own_v, v], 2), torch.cat([everywhere, keep], 1)
        q, k, v = (part.unflatten(1, (self.heads, -1)) for part in (q, k, v))
        scores = torch.einsum("bhct,bhcs->bhts", q, k) / math.sqrt(q.shape[2])
        weights = scores.masked_fill(~keep[:, None, None], -math.inf).softmax(-1)
        out = torch.einsum("bhts,bhcs->bhct", weights, v).flatten(1, 2)
        return (flat + self.proj_out(out)).view_as(x)


class GEGLU(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.proj = nn.Linear(inputs, 2 * outputs)

    def forward(self, x: Tensor) -> Tensor:
        value, gate = self.proj(x).chunk(2, -1)
        return value * F.gelu(gate)


class FeedForward(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = norm(channels)
        self.net = nn.Sequential(GEGLU(channels, 4 * channels), nn.Dropout(0.0), nn.Linear(4 * channels, channels))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.net(self.norm(x).movedim(1, -1)).movedim(-1, 1)


class Stacked(nn.Module):
    def __init__(self, channels: int, text: int, heads: int) -> None:
        super().__init__()
        self.proj_in, self.norm = nn.Conv2d(channels, channels, 1), norm(channels)
        self.self_attention_block = Attention("self", channels, text, heads)
        self.cross_attention_block = Attention("cross", channels, text, heads)
        self.ff, self.proj_out = FeedForward(channels), nn.Conv2d(channels, channels, 1)

    def forward(self, x: Tensor, *given: Tensor) -> Tensor:
        y = self.self_attention_block(self.proj_in(self.norm(x)), *given)
        return x + self.proj_out(self.ff(self.cross_attention_block(y, *given)))


class Steps(nn.Sequential):
    def forward(self, x: Tensor, *given: Tensor) -> Tensor:
        for module in self:
            x = module(x) if isinstance(module, nn.Conv2d) else module(x, *given)
        return x


def attention(kind: str, channels: int, text: int, head: int, heads: int) -> nn.Module:
    heads = heads if head == -1 else channels // head
    return Stacked(channels, text, heads) if kind == "stacked" else Attention(kind, channels, text, heads)


class UNetModel(Conditioned):
    """The network of `unet_type` base and sr-unet."""

    def __init__(
        self,
        *,
        embed_dim: int,
        image_size: int,
        text_embed_dim: int,
        num_res_blocks: Any,
        channel_mult: Sequence[int],
        attention_resolutions: Sequence[int],
        per_head_channels: int = 64,
        num_attn_heads: int = 4,
        cond_dim: int = 512,
        attention_type: str = "fused",
        feature_pooling_type: str = "attention",
        learned_sinu_pos_emb_dim: int = 16,
        use_null_token: bool = False,
        init_conv_kernel_size: int = 3,
        scale_shift_norm: bool = True,
        resblock_updown: bool = False,
        resample_with_conv: bool = True,
        low_res_cond: bool = False,
        noise_cond_aug: bool = False,
    ) -> None:
        super().__init__(
            embed=embed_dim,
            text=text_embed_dim,
            condition=cond_dim,
            learned=learned_sinu_pos_emb_dim,
            pooling=feature_pooling_type,
            null=use_null_token,
            noised=noise_cond_aug,
        )
        levels, width = len(channel_mult), [embed_dim * factor for factor in channel_mult]
        blocks = [num_res_blocks] * levels if isinstance(num_res_blocks, int) else num_res_blocks
        attended = {image_size // side for side in attention_resolutions}
        edge = init_conv_kernel_size // 2

        def block(inputs: int, outputs: int, way: str = "") -> ResBlock:
            return ResBlock(inputs, outputs, 4 * embed_dim, scale_shift=scale_shift_norm, efficient=False, way=way)

        def attend(channels: int) -> nn.Module:
            return attention(attention_type, channels, cond_dim, per_head_channels, num_attn_heads)

        self.init_conv = Steps(nn.Conv2d(6 if low_res_cond else 3, width[0], init_conv_kernel_size, padding=edge))
        self.input_blocks, self.output_blocks = nn.ModuleList([self.init_conv]), nn.ModuleList()
        x, skips = width[0], [width[0]]
        for level, outputs in enumerate(width):
            for _ in range(blocks[level]):
                more = [attend(outputs)] if 2**level in attended else []
                self.input_blocks.append(Steps(block(x, outputs), *more))
                x = outputs
                skips.append(x)
            if level < levels - 1:
                self.input_blocks.append(
                    Steps(block(x, x, "down") if resblock_updown else Down(x, conv=resample_with_conv))
                )
                skips.append(x)
        self.middle_block = Steps(block(x, x), attend(x), block(x, x))
        for level in reversed(range(levels)):
            outputs = width[level]
            for i in range(blocks[level] + 1):
                parts: list[nn.Module] = [block(x + skips.pop(), outputs)]
                x = outputs
                if 2**level in attended:
                    parts.append(attend(x))
                if level and i == blocks[level]:
                    parts.append(block(x, x, "up") if resblock_updown else Up(x))
                self.output_blocks.append(Steps(*parts))
        self.out = nn.Sequential(norm(x), nn.SiLU(), nn.Conv2d(x, 3, init_conv_kernel_size, padding=edge))

    def forward(
        self,
        x: Tensor,
        time: Tensor,
        text: Tensor,
        mask: Tensor,
        low: Optional[Tensor] = None,
        low_time: Optional[Tensor] = None,
    ) -> Tensor:
        given = self.conditions(time, text, mask, low_time)
        x, outputs = (x if low is None else torch.cat([x, low], 1)), []
        for module in self.input_blocks:
            x = module(x, *given)
            outputs.append(x)
        x = self.middle_block(x, *given)
        for module in self.output_blocks:
            x = module(torch.cat([x, outputs.pop()], 1), *given)
        return self.out(x)


class Level(nn.Module):
    """One of `DBlocks` or `UBlocks`."""

    def __init__(
        self, blocks: list[ResBlock], attends: Optional[nn.Module], conv: Optional[nn.Module], way: str
    ) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        if attends is not None:
            self.attention_layer = attends
        if conv is not None:
            self.conv = conv
        self.way = way

    def forward(self, x: Tensor, *given: Tensor) -> Tensor:
        x = self.conv(x) if self.way == "down" and hasattr(self, "conv") else x
        for block in self.blocks:
            x = block(x, *given)
        x = self.attention_layer(x, *given) if hasattr(self, "attention_layer") else x
        return self.conv(x) if self.way == "up" and hasattr(self, "conv") else x


class EfficientUNetModel(Conditioned):
    """The network of `unet_type` sr."""

    def __init__(
        self,
        *,
        embed_dim: int,
        image_size: int,
        text_embed_dim: int,
        num_resblocks: Sequence[int],
        channel_mult: Sequence[int],
        atnn_enabled_at: Sequence[int],
        per_head_channels: int = 64,
        num_attn_heads: int = 8,
        attention_type: str = "fused",
        feature_pooling_type: str = "attention",
        learned_sinu_pos_emb_dim: int = 16,
        use_null_token: bool = False,
        init_conv_kernel_size: int = 3,
        scale_shift_norm: bool = True,
        skip_connection_scaling: bool = False,
        noise_cond_aug: bool = False,
    ) -> None:
        super().__init__(
            embed=embed_dim,
            text=text_embed_dim,
            condition=text_embed_dim,
            learned=learned_sinu_pos_emb_dim,
            pooling=feature_pooling_type,
            null=use_null_token,
            noised=noise_cond_aug,
        )
        first, scale = embed_dim * channel_mult[0], math.sqrt(0.5) if skip_connection_scaling else 1.0
        self.init_conv = nn.Conv2d(6, first, init_conv_kernel_size, padding=init_conv_kernel_size // 2)
        self.DBlocks, self.UBlocks, x = nn.ModuleDict(), nn.ModuleDict(), first
        for level, factor in enumerate(channel_mult):
            y, last = embed_dim * factor, level == len(channel_mult) - 1
            down = None if last else nn.Conv2d(x, x, 4, 2, 1)
            up = None if last else nn.ConvTranspose2d(x, x, 4, 2, 1)
            for way, table, inputs, outputs, conv in (
                ("down", self.DBlocks, x, y, down),
                ("up", self.UBlocks, y, x, up),
            ):
                blocks = [
                    ResBlock(
                        outputs if i else inputs,
                        outputs,
                        4 * embed_dim,
                        scale_shift=scale_shift_norm,
                        efficient=True,
                        scale=scale,
                    )
                    for i in range(num_resblocks[level])
                ]
                attends = None
                if atnn_enabled_at[level]:
                    attends = attention(attention_type, outputs, text_embed_dim, per_head_channels, num_attn_heads)
                table[str(level)] = Level(blocks, attends, conv, way)
            x = y
        self.out = nn.Conv2d(first, 3, 1)

    def forward(
        self,
        x: Tensor,
        time: Tensor,
        text: Tensor,
        mask: Tensor,
        low: Tensor,
        low_time: Optional[Tensor] = None,
    ) -> Tensor:
        given = self.conditions(time, text, mask, low_time)
        x, outputs = self.init_conv(torch.cat([x, low], 1)), []
        for level in self.DBlocks.values():
            x = level(x, *given)
            outputs.append(x)
        for i in reversed(range(len(self.UBlocks))):
            x = x if i == len(outputs) - 1 else x + outputs[i]
            x = self.UBlocks[str(i)](x, *given)
        return self.out(x)
