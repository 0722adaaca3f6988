"""Frechet distance between two sets of features (FID, for Inception features), from their means and covariances.

    d^2 = |m - n|^2 + tr(A) + tr(B) - 2 tr((A B)^(1/2))

Source: Heusel et al. 2017, arXiv:1706.08500, Eq. 6 (Dowson and Landau 1982).
"""

import torch
import torch.distributed as dist
from torch import Tensor

from dit.backends.device import local_device
from dit.errors import ConfigError


class Moments:
    """Mean and covariance of batches of features; only sums are stored, in float64.

    Args:
        width: size of a feature vector.
    """

    def __init__(self, width: int) -> None:
        self._sums = torch.zeros(1 + width + width**2, dtype=torch.float64)  # count, sum, sum of outer products
        self.width = width

    @property
    def count(self) -> int:
        """Number of feature vectors."""
        return int(self._sums[0])

    def add(self, features: Tensor) -> None:
        """Add feature vectors `[N, width]`."""
        x = features.detach().to("cpu", torch.float64)
        self._sums += torch.cat([torch.tensor([float(len(x))], dtype=torch.float64), x.sum(0), (x.T @ x).flatten()])

    def reduce(self) -> None:
        """Sum over all ranks; every rank calls this once."""
        if dist.is_initialized() and dist.get_world_size() > 1:
            sums = self._sums.to(local_device())
            dist.all_reduce(sums)
            self._sums = sums.cpu()

    def mean_and_covariance(self) -> tuple[Tensor, Tensor]:
        """Return the mean `[width]` and the unbiased covariance `[width, width]`, float64.

        Raises:
            ConfigError: there are fewer than two vectors.
        """
        if self.count < 2:
            raise ConfigError(f"a covariance needs at least 2 pictures, got {self.count}; measure more of them")
        mean = self._sums[1 : 1 + self.width] / self.count
        outer = self._sums[1 + self.width :].view(self.width, self.width)
        return mean, (outer - self.count * torch.outer(mean, mean)) / (self.count - 1)


def frechet_distance(mean: Tensor, covariance: Tensor, other_mean: Tensor, other_covariance: Tensor) -> float:
    """Return the squared Frechet distance of two Gaussians.

    tr((A B)^(1/2)) is the sum of the roots of the eigenvalues of A^(1/2) B A^(1/2), which is symmetric.

    Args:
        mean, other_mean: `[D]`, float64.
        covariance, other_covariance: `[D, D]`, float64.
    """
    values, vectors = torch.linalg.eigh(covariance)
    root = vectors * values.clamp(min=0).sqrt() @ vectors.T
    cross = torch.linalg.eigvalsh(root @ other_covariance @ root).clamp(min=0).sqrt().sum()
    trace = covariance.trace() + other_covariance.trace() - 2 * cross
    return float((mean - other_mean).square().sum() + trace)
