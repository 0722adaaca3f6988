"""The EDM2 UNet as plain functions of named weights, written from the paper, for pictures of one size.

    unit(w)        each output's filter divided by 1e-4 plus its root mean square, and by the root of its fan-in
    down(i, o)     2 x 2 means; 1 x 1 if i != o; x / (1e-4 + rms over channels); sum(x, branch); attention; clip to 256
    up(i, o)       nearest; branch of the input; 1 x 1 if i != o; sum(x, branch); attention; clip to 256
    branch         3 x 3 of silu / 0.596; times 1 + gain * unit(condition); 3 x 3 of silu / 0.596
    sum(a, b)      (0.7 a + 0.3 b) / sqrt(0.7^2 + 0.3^2); for the conditioning vector, both weights are 0.5
    cat(a, b)      both halves with the same sum of squares, and a mean square of 1 in total

Source: Karras et al. 2024, arXiv:2312.02696, config G (appendix B, algorithm 1 and figure 22).
"""

from collections.abc import Mapping
from math import pi, sqrt
from statistics import NormalDist

import torch
from torch import Tensor
from torch.nn.functional import conv2d, one_hot, silu

Weights = Mapping[str, Tensor]


def unit(weight: Tensor) -> Tensor:
    rows = weight.flatten(1)
    rows = rows / (1e-4 + rows.square().mean(1, keepdim=True).sqrt()) / sqrt(rows.shape[1])
    return rows.view(weight.shape)


def convolve(x: Tensor, weight: Tensor) -> Tensor:
    return conv2d(x, unit(weight), padding="same")


def weighted_sum(a: Tensor, b: Tensor, t: float) -> Tensor:
    return ((1 - t) * a + t * b) / sqrt((1 - t) ** 2 + t**2)


def joined(a: Tensor, b: Tensor) -> Tensor:
    total = a.shape[1] + b.shape[1]
    return torch.cat([a * sqrt(total / (2 * a.shape[1])), b * sqrt(total / (2 * b.shape[1]))], 1)


def rms_normed(x: Tensor, dim: int) -> Tensor:
    return x / (1e-4 + x.square().mean(dim, keepdim=True).sqrt())


def attention(x: Tensor, w: Weights, name: str, size: int) -> Tensor:
    n, channels, height, width = x.shape
    qkv = torch.einsum("nchw,oc->nohw", x, unit(w[f"{name}.to_qkv.weight"]))
    q, k, v = rms_normed(qkv.reshape(n, 3, channels // size, size, height * width), 3).unbind(1)
    shares = (torch.einsum("nadi,nadj->naij", q, k) / sqrt(size)).softmax(-1)
    mixed = torch.einsum("naij,nadj->nadi", shares, v).reshape(x.shape)
    return weighted_sum(x, torch.einsum("nchw,oc->nohw", mixed, unit(w[f"{name}.to_out.weight"])), 0.3)


def block(x: Tensor, condition: Tensor, w: Weights, name: str, way: str, resample: bool, size: int) -> Tensor:
    def shortcut(x: Tensor) -> Tensor:
        return convolve(x, w[f"{name}.shortcut.weight"]) if f"{name}.shortcut.weight" in w else x

    if resample and way == "down":
        x = (x[..., ::2, ::2] + x[..., 1::2, ::2] + x[..., ::2, 1::2] + x[..., 1::2, 1::2]) / 4
    elif resample:
        x = x.repeat_interleave(2, 2).repeat_interleave(2, 3)
    if way == "down":
        x = rms_normed(shortcut(x), 1)
    factor = 1 + w[f"{name}.gain"] * condition @ unit(w[f"{name}.condition.weight"]).T
    y = convolve(silu(x) / 0.596, w[f"{name}.convolution_1.weight"]) * factor[:, :, None, None]
    y = convolve(silu(y) / 0.596, w[f"{name}.convolution_2.weight"])
    x = weighted_sum(shortcut(x) if way == "up" else x, y, 0.3)
    if f"{name}.attention.to_out.weight" in w:
        x = attention(x, w, f"{name}.attention", size)
    return x.clamp(-256, 256)


def condition_of(time: Tensor, label: Tensor | None, w: Weights) -> Tensor:
    count = w["noise.weight"].shape[1]
    frequency = torch.tensor([NormalDist().inv_cdf((i + 0.5) / count) for i in range(count)]).to(time)
    phase = torch.arange(count, dtype=time.dtype) * (sqrt(5) - 1) / 2
    waves = sqrt(2) * torch.cos(2 * pi * (time[:, None] * frequency + phase))
    vector = waves @ unit(w["noise.weight"]).T
    if label is not None:
        classes = w["label.weight"].shape[1]
        vector = weighted_sum(vector, sqrt(classes) * one_hot(label, classes).to(time) @ unit(w["label.weight"]).T, 0.5)
    return silu(vector) / 0.596


def edm2_unet(x: Tensor, time: Tensor, label: Tensor | None, w: Weights, levels: int, blocks: int, size: int) -> Tensor:
    """Return the prediction for pictures `[N, C, H, W]`; `blocks` per level, attention heads of `size` channels."""
    condition = condition_of(time, label, w)
    x = convolve(torch.cat([x, torch.ones_like(x[:, :1])], 1), w["first.weight"])
    skips = [x]
    for i in range(levels * (blocks + 1) - 1):
        resample = i % (blocks + 1) == blocks  # after the blocks of a level
        x = block(x, condition, w, f"down.{i}", "down", resample, size)
        skips.append(x)
    for i in range(2):
        x = block(x, condition, w, f"middle.{i}", "up", False, size)
    for i in range(levels * (blocks + 2) - 1):
        resample = i % (blocks + 2) == blocks + 1
        x = block(x if resample else joined(x, skips.pop()), condition, w, f"up.{i}", "up", resample, size)
    assert not skips
    return convolve(x, w["last.weight"]) * w["gain"]
