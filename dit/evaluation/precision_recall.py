"""Precision and recall of generated pictures by their features.

    region of a set   union of balls around its members; the radius of each is the distance to its k-th nearest member
    precision         share of generated pictures in the region of real ones
    recall            share of real pictures in the region of generated ones

Source: Kynkäänniemi et al. 2019, arXiv:1904.06991, Eq. 1 and 2, with k = 3.
"""

import torch
from torch import Tensor

from dit.errors import ConfigError

NEIGHBOURS = 3
BLOCK = 256
"""Rows of the matrix of distances that are computed at a time."""
ROUNDING = 1e-12
"""Squared distances below this share of the squared norms are rounding errors of float64."""


def precision_recall(real: Tensor, generated: Tensor) -> tuple[float, float]:
    """Return precision and recall of generated pictures; features `[N, D]` each."""
    if min(len(real), len(generated)) <= NEIGHBOURS:
        raise ConfigError(
            f"precision and recall need at least {NEIGHBOURS + 1} pictures of each kind, got {len(real)} and "
            f"{len(generated)}"
        )
    real, generated = real.double(), generated.double()
    return _share_in_region(generated, real), _share_in_region(real, generated)


def _share_in_region(points: Tensor, members: Tensor) -> float:
    # The nearest member of each member is itself.
    radii = torch.cat([_squares(part, members).kthvalue(NEIGHBOURS + 1).values for part in members.split(BLOCK)])
    inside = [(_squares(part, members) <= radii).any(1) for part in points.split(BLOCK)]
    return torch.cat(inside).double().mean().item()


def _squares(x: Tensor, y: Tensor) -> Tensor:
    """Return squared distances `[N, M]`, exactly 0 between equal rows, such as those of copied pictures."""
    norms = x.square().sum(1)[:, None] + y.square().sum(1)
    squares = norms - 2 * x @ y.T
    return squares.masked_fill_(squares < ROUNDING * norms, 0.0)
