"""The variational bound of a reverse chain with a learned variance, one step at a time."""

import math

import torch
from torch import Tensor

from dit.objectives.noise_levels import TableSchedule

HALF_BIN = 1 / 255
"""Half of the distance between two pixel values in [-1, 1]."""
OPEN_FROM = 0.999
"""Absolute pixel value beyond which the first and the last bin extend to infinity."""
MIN_PROBABILITY = 1e-12


class VariationalBound:
    """L_vlb of a table of N steps: N times the expected KL divergence of a step; for step 0, a negative log likelihood.

    Source: Nichol and Dhariwal 2021, arXiv:2102.09672, Eq. 4 to 7, 10, 11 and 15; Ho et al. 2020, arXiv:2006.11239,
    Eq. 13 for the decoder. Its bins are those of pixels in [-1, 1], also for latents, as in the original DiT.
    """

    def __init__(self, table: TableSchedule) -> None:
        self.table = table
        signal = (1 - table.betas).cumprod(0)
        before = torch.cat([torch.ones_like(signal[:1]), signal[:-1]])
        posterior = table.betas * (1 - before) / (1 - signal)
        posterior[0] = posterior[1]  # the variance of the first step is 0, and its logarithm infinite
        x0_weight = table.betas * before.sqrt() / (1 - signal)
        self._steps_N3 = torch.stack([table.betas.log(), posterior.log(), x0_weight], -1).float()

    def bits(self, *, step_T1: Tensor, x0_TC: Tensor, difference_TC: Tensor, v_TC: Tensor) -> Tensor:
        """Return N times the bits per dimension of one step, for each token, float32 `[T]`.

        Args:
            difference_TC: clean latents minus the network's estimate of them.
            v_TC: position of the log variance between that of the posterior (-1) and log beta (1).
        """
        steps_T3 = self._steps_N3.to(v_TC.device)[step_T1[:, 0]]
        log_beta_T1, log_posterior_T1, x0_weight_T1 = steps_T3.split(1, dim=-1)
        part_TC = (v_TC + 1) / 2
        log_variance_TC = part_TC * log_beta_T1 + (1 - part_TC) * log_posterior_T1
        mean_TC = x0_weight_T1 * difference_TC  # difference of the means
        nats_TC = torch.where(
            step_T1 == 0,
            decoder_nats(x0_TC, mean_TC, log_variance_TC),
            kl_nats(mean_TC, log_posterior_T1, log_variance_TC),
        )
        return self.table.num_steps / math.log(2) * nats_TC.mean(-1)


def kl_nats(difference: Tensor, log_variance_p: Tensor, log_variance_q: Tensor) -> Tensor:
    """Return the elementwise KL divergence of q from p, Gaussians whose means differ by `difference`."""
    ratio = log_variance_p - log_variance_q
    return (torch.exp(ratio) - 1 - ratio + difference.square() * torch.exp(-log_variance_q)) / 2


def decoder_nats(x0: Tensor, difference: Tensor, log_variance: Tensor) -> Tensor:
    """Return the negative log probability of the bin of `x0` under a Gaussian with mean `x0 - difference`."""
    scale = torch.exp(-log_variance / 2)
    # Symmetry moves the bin to the lower tail; in the upper tail, both probabilities would be close to 1.
    away = -difference.abs()
    inside = torch.special.ndtr(scale * (away + HALF_BIN)) - torch.special.ndtr(scale * (away - HALF_BIN))
    first = torch.special.ndtr(scale * (difference + HALF_BIN))
    last = torch.special.ndtr(scale * (HALF_BIN - difference))
    probability = torch.where(x0 < -OPEN_FROM, first, torch.where(x0 > OPEN_FROM, last, inside))
    return -probability.clamp(min=MIN_PROBABILITY).log()
