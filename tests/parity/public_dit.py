"""The published class-conditional DiT as a function of a state dict with its public names, float64, dense images.

Written from the formulas of the paper and the layout of its weights: a convolution embeds patches, fused rows are all
of q, then k, then v, and a predicted patch has the order (row, column, channel).
"""

import math

import torch
from torch import Tensor

from tests.parity.reference_dit import gelu_tanh, normalise, silu, time_features
from tests.parity.reference_positions import position_features


def random_state(
    *,
    size: int,
    depth: int,
    inner: int,
    channels: int,
    out_channels: int,
    patch: int,
    classes: int,
    grid: int,
    seed: int = 0,
) -> dict[str, Tensor]:
    """Return random weights of such a model, float32, with its fixed position table."""
    shapes = {
        "x_embedder.proj.weight": (size, channels, patch, patch),
        "x_embedder.proj.bias": (size,),
        "y_embedder.embedding_table.weight": (classes + 1, size),
    }
    linears = {
        "t_embedder.mlp.0": (size, 256),
        "t_embedder.mlp.2": (size, size),
        "final_layer.linear": (patch * patch * out_channels, size),
        "final_layer.adaLN_modulation.1": (2 * size, size),
    }
    for i in range(depth):
        linears |= {
            f"blocks.{i}.attn.qkv": (3 * size, size),
            f"blocks.{i}.attn.proj": (size, size),
            f"blocks.{i}.mlp.fc1": (inner, size),
            f"blocks.{i}.mlp.fc2": (size, inner),
            f"blocks.{i}.adaLN_modulation.1": (6 * size, size),
        }
    for name, shape in linears.items():
        shapes |= {f"{name}.weight": shape, f"{name}.bias": shape[:1]}
    generator = torch.Generator().manual_seed(seed)
    state = {name: 0.1 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    return {**state, "pos_embed": position_features((1, grid, grid), size, "sincos_2d").float()[None]}


def public_forward(state: dict[str, Tensor], heads: int, images: Tensor, steps: Tensor, labels: Tensor) -> Tensor:
    """Run the network: images `[B, C, H, W]`, integer steps `[B]`, labels `[B]`; returns `[B, out_channels, H, W]`."""
    state = {name: x.double() for name, x in state.items()}

    def linear(name: str, x: Tensor) -> Tensor:
        return x @ state[f"{name}.weight"].T + state[f"{name}.bias"]

    patch = state["x_embedder.proj.weight"].shape[-1]
    x = torch.nn.functional.conv2d(
        images.double(), state["x_embedder.proj.weight"], state["x_embedder.proj.bias"], stride=patch
    )
    rows, columns = x.shape[-2:]
    x = x.flatten(2).transpose(1, 2) + state["pos_embed"]
    cond = linear("t_embedder.mlp.2", silu(linear("t_embedder.mlp.0", time_features(steps))))
    cond = cond + state["y_embedder.embedding_table.weight"][labels]
    size = x.shape[-1]
    for i in range(1 + max(int(name.split(".")[1]) for name in state if name.startswith("blocks."))):
        block = f"blocks.{i}"
        shift_1, scale_1, gate_1, shift_2, scale_2, gate_2 = linear(f"{block}.adaLN_modulation.1", silu(cond))[
            :, None
        ].split(size, dim=-1)
        qkv = linear(f"{block}.attn.qkv", normalise(x, 1e-6) * (1 + scale_1) + shift_1)
        q, k, v = (part.unflatten(-1, (heads, -1)).transpose(1, 2) for part in qkv.split(size, dim=-1))
        weights = torch.softmax(q @ k.transpose(-1, -2) / math.sqrt(size // heads), dim=-1)
        x = x + gate_1 * linear(f"{block}.attn.proj", (weights @ v).transpose(1, 2).flatten(2))
        hidden = gelu_tanh(linear(f"{block}.mlp.fc1", normalise(x, 1e-6) * (1 + scale_2) + shift_2))
        x = x + gate_2 * linear(f"{block}.mlp.fc2", hidden)
    shift, scale = linear("final_layer.adaLN_modulation.1", silu(cond))[:, None].split(size, dim=-1)
    x = linear("final_layer.linear", normalise(x, 1e-6) * (1 + scale) + shift)
    x = x.view(len(x), rows, columns, patch, patch, -1).permute(0, 5, 1, 3, 2, 4)
    return x.reshape(len(x), -1, rows * patch, columns * patch)
