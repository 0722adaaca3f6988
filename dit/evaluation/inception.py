"""Inception v3, the feature network of FID and KID, from a state dict with torchvision's names.

The network of 2015 with 1,008 classes, ported from TensorFlow's graph (pytorch-fid, torch-fidelity), with which papers
report FIDs. Average pools exclude padding from the mean, and the last block takes the maximum. torchvision's
`inception_v3`, of 1,000 classes, pools differently and is not read. Images are preprocessed as in the graph: bytes,
resized to 299 x 299 by TensorFlow 1's bilinear rule, (x - 128) / 128.

Source: Szegedy et al. 2015, arXiv:1512.00567, Table 1; Heusel et al. 2017, arXiv:1706.08500.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from dit.errors import ConfigError

FID_CLASSES = 1008
SIDE = 299
"""Side of training images in pixels."""

PROBE = "Mixed_7c.branch_pool.conv.weight"
"""A tensor that every file of Inception v3 with these names has."""


@dataclass(frozen=True)
class Conv:
    """Convolution without bias, batch norm and ReLU."""

    name: str
    channels: int
    kernel: tuple[int, int] = (1, 1)
    stride: int = 1
    padded: bool = True


@dataclass(frozen=True)
class Pool:
    """A 3 x 3 pool: padded with stride 1, or unpadded with stride 2."""

    kind: Literal["average", "max"]
    stride: int = 1


Step = Conv | Pool | tuple[Conv, ...]
"""One step of a branch; the elements of a tuple run in parallel, and their outputs are concatenated along channels."""
Branches = tuple[tuple[Step, ...], ...]


def _double(*, channels: int, last_stride: int) -> tuple[Step, ...]:
    """Return the branch of two 3 x 3 convolutions, which replaces a 5 x 5 convolution."""
    last = Conv("branch3x3dbl_3", 96, (3, 3), last_stride, last_stride == 1)
    return (Conv("branch3x3dbl_1", channels), Conv("branch3x3dbl_2", 96, (3, 3)), last)


def _block_a(pooled: int) -> Branches:
    return (
        (Conv("branch1x1", 64),),
        (Conv("branch5x5_1", 48), Conv("branch5x5_2", 64, (5, 5))),
        _double(channels=64, last_stride=1),
        (Pool("average"), Conv("branch_pool", pooled)),
    )


BLOCK_B: Branches = (
    (Conv("branch3x3", 384, (3, 3), 2, False),),
    _double(channels=64, last_stride=2),
    (Pool("max", 2),),
)


def _block_c(narrow: int) -> Branches:
    row, column = (1, 7), (7, 1)
    return (
        (Conv("branch1x1", 192),),
        (Conv("branch7x7_1", narrow), Conv("branch7x7_2", narrow, row), Conv("branch7x7_3", 192, column)),
        (
            Conv("branch7x7dbl_1", narrow),
            Conv("branch7x7dbl_2", narrow, column),
            Conv("branch7x7dbl_3", narrow, row),
            Conv("branch7x7dbl_4", narrow, column),
            Conv("branch7x7dbl_5", 192, row),
        ),
        (Pool("average"), Conv("branch_pool", 192)),
    )


BLOCK_D: Branches = (
    (Conv("branch3x3_1", 192), Conv("branch3x3_2", 320, (3, 3), 2, False)),
    (
        Conv("branch7x7x3_1", 192),
        Conv("branch7x7x3_2", 192, (1, 7)),
        Conv("branch7x7x3_3", 192, (7, 1)),
        Conv("branch7x7x3_4", 192, (3, 3), 2, False),
    ),
    (Pool("max", 2),),
)


def _block_e(pool: Literal["average", "max"]) -> Branches:
    def fork(name: str) -> tuple[Conv, ...]:
        return (Conv(f"{name}a", 384, (1, 3)), Conv(f"{name}b", 384, (3, 1)))

    return (
        (Conv("branch1x1", 320),),
        (Conv("branch3x3_1", 384), fork("branch3x3_2")),
        (Conv("branch3x3dbl_1", 448), Conv("branch3x3dbl_2", 384, (3, 3)), fork("branch3x3dbl_3")),
        (Pool(pool), Conv("branch_pool", 192)),
    )


STEM: tuple[Step, ...] = (
    Conv("Conv2d_1a_3x3", 32, (3, 3), 2, False),
    Conv("Conv2d_2a_3x3", 32, (3, 3), padded=False),
    Conv("Conv2d_2b_3x3", 64, (3, 3)),
    Pool("max", 2),
    Conv("Conv2d_3b_1x1", 80),
    Conv("Conv2d_4a_3x3", 192, (3, 3), padded=False),
    Pool("max", 2),
)
BLOCKS: dict[str, Branches] = {
    "Mixed_5b": _block_a(32),
    "Mixed_5c": _block_a(64),
    "Mixed_5d": _block_a(64),
    "Mixed_6a": BLOCK_B,
    "Mixed_6b": _block_c(128),
    "Mixed_6c": _block_c(160),
    "Mixed_6d": _block_c(160),
    "Mixed_6e": _block_c(192),
    "Mixed_7a": BLOCK_D,
    "Mixed_7b": _block_e("average"),
    "Mixed_7c": _block_e("max"),
}


class _Normalised(nn.Module):
    """A convolution, batch norm with running statistics, and ReLU."""

    def __init__(self, width: int, step: Conv) -> None:
        super().__init__()
        height, width_of_kernel = step.kernel
        padding = (height // 2, width_of_kernel // 2) if step.padded else (0, 0)
        self.conv = nn.Conv2d(width, step.channels, step.kernel, step.stride, padding, bias=False)
        self.bn = nn.BatchNorm2d(step.channels, eps=1e-3)

    def forward(self, x: Tensor) -> Tensor:
        return functional.relu(self.bn(self.conv(x)))


class _Block(nn.Module):
    """Parallel branches, concatenated along channels."""

    def __init__(self, width: int, branches: Branches) -> None:
        super().__init__()
        self.branches, self.width = branches, 0
        for steps in branches:
            channels = width
            for step in steps:
                if isinstance(step, Pool):
                    continue
                sides = step if isinstance(step, tuple) else (step,)
                for side in sides:
                    self.add_module(side.name, _Normalised(channels, side))
                channels = sum(side.channels for side in sides)
            self.width += channels

    def forward(self, x: Tensor) -> Tensor:
        outputs = []
        for steps in self.branches:
            y = x
            for step in steps:
                y = self._apply_step(step, y)
            outputs.append(y)
        return torch.cat(outputs, 1)

    def _apply_step(self, step: Step, x: Tensor) -> Tensor:
        if isinstance(step, tuple):
            return torch.cat([self.get_submodule(side.name)(x) for side in step], 1)
        if isinstance(step, Conv):
            return self.get_submodule(step.name)(x)
        padding = 1 if step.stride == 1 else 0
        if step.kind == "max":
            return functional.max_pool2d(x, 3, step.stride, padding)
        return functional.avg_pool2d(x, 3, step.stride, padding, count_include_pad=False)


class InceptionV3(_Block):
    """The trunk of Inception v3, frozen: maps uint8 images to the 2,048 channel means of the last block."""

    def __init__(self) -> None:
        super().__init__(3, (STEM,))
        for name, branches in BLOCKS.items():
            block = _Block(self.width, branches)
            self.add_module(name, block)
            self.width = block.width
        self.eval().requires_grad_(False)

    def forward(self, pictures: Tensor) -> Tensor:
        """Return the features `[N, 2048]`, float32, of pictures uint8 `[N, 3, H, W]`."""
        x = (resize(pictures.float(), SIDE) - 128) / 128
        x = super().forward(x)
        for name in BLOCKS:
            x = self.get_submodule(name)(x)
        return x.mean((2, 3))


def resize(images: Tensor, side: int) -> Tensor:
    """Resize pictures `[N, C, H, W]` to `[N, C, side, side]` by TensorFlow 1's bilinear rule.

    Pixel i of the result is read at i * H / side of the source, by linear interpolation without a filter. Today's
    convention reads at (i + 0.5) * H / side - 0.5.
    """
    down, right = (_weights(size, side, images.device) for size in images.shape[2:])
    return down @ images @ right.T


def _weights(size: int, side: int, device: torch.device) -> Tensor:
    """Return the interpolation matrix `[side, size]` along one axis."""
    at = torch.arange(side, dtype=torch.float64) * (size / side)
    low = at.floor().long().clamp(max=size - 1)
    share = (at - low)[:, None]
    matrix = torch.zeros(side, size, dtype=torch.float64)
    matrix.scatter_add_(1, low[:, None], 1 - share)
    matrix.scatter_add_(1, (low + 1).clamp(max=size - 1)[:, None], share)
    return matrix.float().to(device)


def load_inception(tensors: Mapping[str, Tensor], path: Path) -> InceptionV3:
    """Return the network of a state dict."""
    head = tensors.get("fc.weight")
    if head is None or len(head) != FID_CLASSES:
        classes = "no head" if head is None else f"a head of {len(head)} classes"
        raise ConfigError(
            f"--features {path} is an Inception v3 with {classes}; FID's network has {FID_CLASSES:,} classes: give the "
            "file of pytorch-fid or torch-fidelity with its head (fc.weight)"
        )
    network = InceptionV3()
    trunk = {name: x for name, x in tensors.items() if not name.startswith("fc.")}
    # Old files lack the counters of the batch norms.
    counters = {name: x for name, x in network.state_dict().items() if name.endswith(".num_batches_tracked")}
    try:
        network.load_state_dict(counters | trunk)
    except RuntimeError as error:
        raise ConfigError(
            f"--features {path} is not an Inception v3: {' '.join(str(error).split()):.300}; give the state dict of "
            "pytorch-fid's or torch-fidelity's file"
        ) from error
    return network
