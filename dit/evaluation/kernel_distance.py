"""Kernel distance between two sets of features (KID, for Inception features); unbiased for any number of pictures.

    k(x, y) = (x . y / D + 1)^3

    MMD^2 = mean over i != j of k(x_i, x_j) + mean over i != j of k(y_i, y_j) - 2 mean of k(x_i, y_j)

Source: Binkowski et al. 2018, arXiv:1801.01401, section 4; Gretton et al. 2012, Eq. 3. The papers average over random
subsets of 1,000; this function estimates over all pairs, which has the same expectation and less variance.
"""

from torch import Tensor

from dit.errors import ConfigError

BLOCK = 1024
"""Rows of the kernel matrix that are computed at a time."""


def kernel_distance(features: Tensor, other: Tensor) -> float:
    """Return the unbiased squared distance; it may be slightly negative if the sets are alike."""
    n, m = len(features), len(other)
    if min(n, m) < 2:
        raise ConfigError(f"a kernel distance needs at least 2 pictures of each kind, got {n} and {m}")
    x, y = features.double(), other.double()
    within = sum((_kernel_sum(z, z) - float(_diagonal(z).sum())) / (len(z) * (len(z) - 1)) for z in (x, y))
    return within - 2 * _kernel_sum(x, y) / (n * m)


def _kernel_sum(x: Tensor, y: Tensor) -> float:
    return sum(float((part @ y.T / x.shape[1] + 1).pow(3).sum()) for part in x.split(BLOCK))


def _diagonal(x: Tensor) -> Tensor:
    return (x.square().sum(1) / x.shape[1] + 1).pow(3)
