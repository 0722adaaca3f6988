"""Frechet distance between two sets of features (FID, for Inception features), from their means and covariances.

    d^2 = |m - n|^2 + tr(A) + tr(B) - 2 tr((A B)^(1/2))

Source: Heusel et al. 2017, arXiv:1706.08500, Eq. 6 (Dowson and Landau 1982).
"""

import math
from dataclasses import dataclass
from typing import Optional

import torch
import torch.distributed as dist
from torch import Tensor

from dit.backends.device import local_device
from dit.errors import ConfigError


@dataclass(frozen=True)
class Gaussian:
    """Mean and covariance of features.

    Attributes:
        mean: `[D]`, float64.
        covariance: `[D, D]`, float64, unbiased.
    """

    mean: Tensor
    covariance: Tensor
    count: Optional[int] = None

    @property
    def width(self) -> int:
        return len(self.mean)


class Moments:
    """Mean and covariance of batches of features; only sums are stored, in float64."""

    def __init__(self) -> None:
        self._sums = torch.zeros(0, dtype=torch.float64)  # count, sum, sum of outer products

    def add(self, features: Tensor) -> None:
        """Add feature vectors `[N, width]`."""
        x = features.detach().to("cpu", torch.float64)
        sums = torch.cat([torch.tensor([float(len(x))], dtype=torch.float64), x.sum(0), (x.T @ x).flatten()])
        self._sums = sums if not len(self._sums) else self._sums + sums

    def reduce(self) -> Gaussian:
        """Return mean and covariance over all ranks; every rank calls this once."""
        if dist.is_initialized() and dist.get_world_size() > 1:
            size = torch.tensor(len(self._sums), device=local_device())
            dist.all_reduce(size, dist.ReduceOp.MAX)  # a rank without pictures does not know it
            sums = (self._sums if len(self._sums) else torch.zeros(int(size), dtype=torch.float64)).to(local_device())
            dist.all_reduce(sums)
            self._sums = sums.cpu()
        count = int(self._sums[0]) if len(self._sums) else 0
        if count < 2:
            raise ConfigError(f"a covariance needs at least 2 pictures, got {count}; measure more of them")
        width = (math.isqrt(4 * len(self._sums) - 3) - 1) // 2  # of 1 + width + width^2 sums
        mean = self._sums[1 : 1 + width] / count
        outer = self._sums[1 + width :].view(width, width)
        return Gaussian(mean, (outer - count * torch.outer(mean, mean)) / (count - 1), count)


def frechet_distance(first: Gaussian, second: Gaussian) -> float:
    """Return the squared Frechet distance of two Gaussians.

    tr((A B)^(1/2)) is the sum of the roots of the eigenvalues of A^(1/2) B A^(1/2), which is symmetric.
    """
    values, vectors = torch.linalg.eigh(first.covariance)
    root = vectors * values.clamp(min=0).sqrt() @ vectors.T
    cross = torch.linalg.eigvalsh(root @ second.covariance @ root).clamp(min=0).sqrt().sum()
    trace = first.covariance.trace() + second.covariance.trace() - 2 * cross
    return float((first.mean - second.mean).square().sum() + trace)
