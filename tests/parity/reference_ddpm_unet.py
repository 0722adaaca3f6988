"""The conditional DDPM UNet from modules of torch, written from its description, for pictures of one size.

    double(i, o, m)  conv3(i -> m), group norm of 1 group, GELU, conv3(m -> o), group norm; no biases
    down(i, o)       max pool 2, GELU(x + double(i, i)), double(i, o), + Linear(SiLU(condition))
    up(i, o)         cat(skip, twice the size: bilinear, corners aligned); then as down, with double(i, o, i / 2)
    attention(c)     x + MHA(LN(x)), then x + Linear(GELU(Linear(LN(x)))); 4 heads, after every down and up
    condition        sinusoid of the step, plus a row of an embedding with (classes + 1) rows

Source: github.com/dome272/Diffusion-Models-pytorch (`UNet_conditional`), from its description.
"""

from itertools import pairwise

import torch
from torch import Tensor, nn


class Double(nn.Module):
    def __init__(self, inputs: int, outputs: int, middle: int, residual: bool = False) -> None:
        super().__init__()
        self.residual = residual
        self.body = nn.Sequential(
            nn.Conv2d(inputs, middle, 3, padding=1, bias=False),
            nn.GroupNorm(1, middle),
            nn.GELU(),
            nn.Conv2d(middle, outputs, 3, padding=1, bias=False),
            nn.GroupNorm(1, outputs),
        )

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.gelu(x + self.body(x)) if self.residual else self.body(x)


class Attention(nn.Module):
    def __init__(self, channels: int, heads: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(channels)
        self.heads = nn.MultiheadAttention(channels, heads, batch_first=True)
        self.mlp = nn.Sequential(
            nn.LayerNorm(channels), nn.Linear(channels, channels), nn.GELU(), nn.Linear(channels, channels)
        )

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(2).transpose(1, 2)
        normed = self.norm(rows)
        rows = rows + self.heads(normed, normed, normed)[0]
        return (rows + self.mlp(rows)).transpose(1, 2).reshape(x.shape)


class Block(nn.Module):
    def __init__(self, inputs: int, outputs: int, middle: int, condition: int, heads: int, resize: nn.Module) -> None:
        super().__init__()
        self.resize = resize
        self.residual, self.convolutions = (
            Double(inputs, inputs, inputs, residual=True),
            Double(inputs, outputs, middle),
        )
        self.condition = nn.Sequential(nn.SiLU(), nn.Linear(condition, outputs))
        self.attention = Attention(outputs, heads)

    def forward(self, x: Tensor, condition: Tensor, skip: Tensor | None = None) -> Tensor:
        x = self.resize(x)
        x = x if skip is None else torch.cat([skip, x], 1)
        return self.attention(self.convolutions(self.residual(x)) + self.condition(condition)[:, :, None, None])


class ReferenceDDPMUNet(nn.Module):
    def __init__(
        self, pixels: int, classes: int, condition: int, channels: list[int], middle: list[int], heads: int
    ) -> None:
        super().__init__()
        self.size = condition
        self.classes = nn.Embedding(classes + 1, condition)
        self.first = Double(pixels, channels[0], channels[0])
        self.down = nn.ModuleList(Block(i, o, o, condition, heads, nn.MaxPool2d(2)) for i, o in pairwise(channels))
        self.middle = nn.ModuleList(Double(i, o, o) for i, o in pairwise([channels[-1], *middle]))
        # Each block up has the width of the next skip; the last has the width of the first block.
        skips, wide = channels[-2::-1], [*channels[-3::-1], channels[0]]
        inputs = [skip + below for skip, below in zip(skips, [middle[-1], *wide])]
        self.up = nn.ModuleList(
            Block(i, o, i // 2, condition, heads, nn.Upsample(scale_factor=2, mode="bilinear", align_corners=True))
            for i, o in zip(inputs, wide)
        )
        self.last = nn.Conv2d(wide[-1], pixels, 1)

    def forward(self, x: Tensor, step: Tensor, label: Tensor) -> Tensor:
        powers = torch.arange(self.size // 2, dtype=x.dtype) * 2 / self.size
        angles = step[:, None] / 10000**powers
        condition = torch.cat([angles.cos(), angles.sin()], 1) + self.classes(label)
        x = self.first(x)
        skips = [x]
        for block in self.down:
            x = block(x, condition)
            skips.append(x)
        for double in self.middle:
            x = double(x)
        for block, skip in zip(self.up, skips[-2::-1]):
            x = block(x, condition, skip)
        return self.last(x)
