"""Muon: the momentum of a matrix, orthogonalised, as the direction of its update.

    gradient --(clip)--> momentum (elementwise) --> direction (complete matrices) --> master weight (elementwise)

Source: Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks" (Nesterov's momentum and the
coefficients of the iteration); Liu et al. 2025, arXiv:2502.16982, section 2.2 (scale 0.2 sqrt(max(rows, columns)), so
that an update has the root mean square of AdamW's). As `torch.optim.Muon(adjust_lr_fn="match_rms_adamw")`.
"""

import math

import torch
from torch import Tensor

from dit.kernels.adamw import DECAY, RATE, Elements, Rates, clipped, store

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
STEPS = 5
EPS = 1e-7


def iteration_dtype(device: torch.device) -> torch.dtype:
    """Return the precision of directions: bf16 on CUDA, as in the published code, else fp32."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def direction(matrix_OI: Tensor) -> Tensor:
    """Return the direction of the update of a matrix, in the dtype of `matrix_OI`, the result of `momentum`.

    A Newton-Schulz iteration moves all singular values near 1.
    """
    a, b, c = COEFFICIENTS
    is_tall = matrix_OI.shape[0] > matrix_OI.shape[1]
    x = matrix_OI.mT if is_tall else matrix_OI
    x = x / x.norm().clamp(min=EPS)
    for _ in range(STEPS):
        gram = x @ x.mT
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.mT if is_tall else x) * (0.2 * math.sqrt(max(matrix_OI.shape)))


def momentum(p: Elements, rates: Rates, decay: float) -> Tensor:
    """Update the momentum `exp_avg`, and return Nesterov's update, flat and fp32, on the device of `main`."""
    gradient = clipped(p, rates)
    average = p.exp_avg.to(p.main.device, non_blocking=True)
    average.lerp_(gradient, rates.changes * (1 - decay))
    if average is not p.exp_avg:
        p.exp_avg.copy_(average, non_blocking=True)
    return gradient.lerp(average, decay).view(-1)


def apply(p: Elements, rates: Rates, direction: Tensor) -> None:
    """Update the master weights, their average and the model weights."""
    values = rates.changes * rates.on_device
    p.main.mul_(1 - values[DECAY])
    p.main.sub_(direction.view(p.main.shape).to(p.main.dtype) * values[RATE])
    store([p], rates)
