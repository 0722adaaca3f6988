"""Division by the root mean square, without learned weights."""

import torch
from torch import Tensor

EPSILON = 1e-4
"""Added to the root mean square, so that zeros remain zeros."""


def unit_rms(x: Tensor, dim: int | tuple[int, ...]) -> Tensor:
    """Divide by `EPSILON` plus the root mean square over dimensions, computed in float32.

    Source: Karras et al. 2024 (EDM2), arXiv:2312.02696, Eq. 66 and algorithm 1.
    """
    norm = torch.linalg.vector_norm(x, dim=dim, keepdim=True, dtype=torch.promote_types(x.dtype, torch.float32))
    return x / (EPSILON + norm * (norm.numel() / x.numel()) ** 0.5).to(x.dtype)
