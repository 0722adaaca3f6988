"""Positions in plain Python, written from the formulas, token by token, in float64.

Source: sines and cosines: Vaswani et al. 2017, section 3.5, per axis as in DiT; rotary positions: Su et al. 2021, Eq.
13, as complex numbers, on each of three axes; their stretching: Chen et al. 2023, arXiv:2306.15595 (linear), bloc97
2023 (NTK).
"""

import math
from collections.abc import Sequence
from typing import Any, Optional

import torch
from torch import Tensor

Grid = tuple[int, int, int]


def patch_indices(grid: Grid) -> list[Grid]:
    """Return (t, h, w) of every patch, time slowest."""
    return [(t, h, w) for t in range(grid[0]) for h in range(grid[1]) for w in range(grid[2])]


def waves(position: float, width: int) -> list[float]:
    """Return `width / 2` sines, then cosines, of frequencies 10000 ** (-2 i / width)."""
    angles = [position * 10000.0 ** (-2 * i / width) for i in range(width // 2)]
    return [math.sin(a) for a in angles] + [math.cos(a) for a in angles]


def position_features(
    grid: Grid, size: int, kind: str, span: Optional[float] = None, crop: Optional[Sequence[int]] = None
) -> Tensor:
    """Return the position features added to the tokens of one sample, `[n, size]`.

    `sincos_2d`: w in the first half of the features, h in the second. `sincos_3d`: an even third for time (so that four
    divides the rest), then h and w, half of the rest each.

    Args:
        span: indices that the height and the width of the sample span; None for one per patch.
        crop: side of a square in patches and number of indices it spans; the sample is in its middle.
    """
    stretch = [1.0, 1.0, 1.0] if span is None else [1.0, span / grid[1], span / grid[2]]
    start = [0, 0, 0]
    if crop is not None:
        start = [0, (crop[0] - grid[1]) // 2, (crop[0] - grid[2]) // 2]
        stretch = [1.0, crop[1] / crop[0], crop[1] / crop[0]]
    time = 2 * (size // 6)
    while (size - time) % 4:
        time -= 1
    rows = []
    for index in patch_indices(grid):
        t, h, w = ((i + first) * factor for i, first, factor in zip(index, start, stretch))
        if kind == "sincos_2d":
            rows.append(waves(w, size // 2) + waves(h, size // 2))
        else:
            rest = (size - time) // 2
            rows.append(waves(t, time) + waves(h, rest) + waves(w, rest))
    return torch.tensor(rows, dtype=torch.float64)


def turns(indices: Sequence[Grid], head_size: int, settings: Any, axes: Optional[Sequence[int]] = None) -> Tensor:
    """Return the unit complex number that rotates each pair of features of a head, `[n, head_size / 2]`.

    Args:
        settings: has `rope_theta`, `rope_scaling` and `rope_factors`.
        axes: features of t, h and w; None for a third of the pairs for h and w each, rounded down, the rest for t.
    """
    pairs = head_size // 2
    counts = (pairs - 2 * (pairs // 3), pairs // 3, pairs // 3) if axes is None else [size // 2 for size in axes]
    factors = settings.rope_factors or [1.0, 1.0, 1.0]
    rows = []
    for index in indices:
        row = []
        for position, count, factor in zip(index, counts, factors):
            for i in range(count):
                theta, at = settings.rope_theta, float(position)
                if settings.rope_scaling == "linear":
                    at /= factor
                elif count > 1:
                    theta *= factor ** (count / (count - 1))
                angle = at * theta ** (-i / count)
                row.append(complex(math.cos(angle), math.sin(angle)))
        rows.append(row)
    return torch.tensor(rows, dtype=torch.complex128)


def turn(x: Tensor, by: Optional[Tensor]) -> Tensor:
    """Multiply the pairs (i, i + H / 2) of heads `[..., n, H]` as complex numbers; None does not rotate."""
    if by is None:
        return x
    half = x.shape[-1] // 2
    turned = torch.complex(x[..., :half], x[..., half:]) * by
    return torch.cat([turned.real, turned.imag], -1)
