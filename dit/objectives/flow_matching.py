"""Flow matching on the straight path from data to noise (rectified flow)."""

import math
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, Optional

import torch
from torch import Tensor

from dit.auxiliary import AuxiliaryNetworks
from dit.batch import PackedBatch
from dit.condition_table import TEACHER, TEACHER_TOKEN
from dit.conditions import Condition
from dit.errors import ConfigError
from dit.layout import SequenceLayout
from dit.objectives.addressed_noise import AddressedNoise
from dit.objectives.alignment import Alignment
from dit.objectives.base import Network, Objective, Path, Prepared, clean_at_0, sample_weights, shared_level
from dit.objectives.losses import Term, TokenLossKind, min_snr_weight, token_error
from dit.objectives.noise_levels import logit_normal, shift_time
from dit.ranges import FINITE, INSIDE_0_1, POSITIVE, WIDTH, ranged

TimeDistribution = Literal["uniform", "logit_normal"]
Prediction = Literal["velocity", "x0"]
MIN_TIME = 0.05
"""Lower limit of the time that divides errors of x0 (Li and He 2025)."""


class StraightPath(Path):
    """x_u = (1 - u) x0 + u eps; the position on the path is flow time."""

    def alpha_sigma(self, u: Tensor) -> tuple[Tensor, Tensor]:
        return 1 - u, u

    def derivatives(self, u: Tensor) -> tuple[Tensor, Tensor]:
        return -torch.ones_like(u), torch.ones_like(u)


@dataclass(kw_only=True)
class FlowMatching(Objective):
    """Flow matching: the loss is the error of the velocity v = eps - x0, with one time t per packed sample.

    Time increases from 0 (data) to 1 (noise), and the network receives t. A sample may have several times, and clean
    tokens with t = 0 (`dit.levels`).

    Args:
        prediction: output of the network: noise, clean latent (`x0`), v = alpha eps - sigma x0, or velocity. `x0` suits
            tokens that are at least as wide as the network.
        time_distribution: distribution of t in training, before the shift.
        logit_mean, logit_std: mean and standard deviation of logit(t).
        time_shift: shift of t towards noise, in training and sampling; larger for samples with more tokens.
        shift_dimension: n0 of a shift of time_shift * sqrt(n / n0) for latents of n numbers (4096 with time_shift=1).
        shift_by_tokens: `[low, high, fewest, most]`: the logarithm of the shift is `low` for `fewest` tokens, `high`
            for `most`, linear between; None for `time_shift`.
        last_time: smallest time of a solver step, to which sampling times are stretched (Qwen-Image: 0.02).
        min_snr_gamma: weight errors as errors of x0 with min(SNR, gamma).
        min_time, max_time: train only on these times, for one of two models (Wan 2.2 A14B).
        alignment: alignment of hidden states with features of a teacher (`repa`).
        teacher_token_weight: weight of the squared error of the teacher's class token (REG: 0.03), for
            `model.teacher_token_size`.

    Source: Lipman et al. 2023, arXiv:2210.02747; Liu et al. 2023, arXiv:2209.03003; time distribution and shift,
    Esser et al. 2024, arXiv:2403.03206, Eq. 19 and 23; shift by dimension, Zheng et al. 2025, arXiv:2510.11690;
    shift by tokens and last time, `calculate_shift` and `FlowMatchEulerDiscreteScheduler` of diffusers 0.38; prediction
    of x0, Li and He 2025, arXiv:2511.13720; min-SNR, Hang et al. 2023, arXiv:2303.09556, on this path; teacher's token,
    Wu et al. 2025, arXiv:2507.01467, Eq. 8.
    """

    takes_levels: ClassVar[bool] = True

    prediction: Prediction = "velocity"
    time_distribution: TimeDistribution = "uniform"
    logit_mean: float = ranged(0.0, FINITE)
    logit_std: float = ranged(1.0, POSITIVE)
    time_shift: float = ranged(1.0, POSITIVE)
    shift_dimension: Optional[int] = ranged(None, WIDTH)
    shift_by_tokens: Optional[list[float]] = None
    last_time: Optional[float] = ranged(None, INSIDE_0_1)
    loss_kind: TokenLossKind = "l2"
    min_snr_gamma: Optional[float] = ranged(None, POSITIVE)
    min_time: float = 0.0
    max_time: float = 1.0
    alignment: Optional[Alignment] = None
    teacher_token_weight: Optional[float] = ranged(None, POSITIVE)

    def __post_init__(self) -> None:
        self.path = StraightPath()
        super().__post_init__()
        self._check_shift()
        if (self.loss_kind, self.prediction) == ("l2_cosine", "x0"):
            raise ConfigError(
                "objective.loss_kind=l2_cosine compares velocities, but objective.prediction=x0; use "
                "prediction=velocity, or loss_kind=l2"
            )
        if not 0 <= self.min_time < self.max_time <= 1:
            raise ConfigError(
                f"objective.min_time={self.min_time} and max_time={self.max_time} must be times between 0 and 1, the "
                "first below the second; 0 and 1 train on all times"
            )

    @property
    def trained_times(self) -> tuple[float, float]:
        return self.min_time, self.max_time

    @property
    def terms(self) -> tuple[str, ...]:
        parts = {"alignment": self.alignment, "teacher_token": self.teacher_token_weight}
        return (*super().terms, *(name for name, part in parts.items() if part is not None))

    @property
    def auxiliary(self) -> AuxiliaryNetworks:
        return replace(super().auxiliary, projection=self.alignment)

    @property
    def conditions(self) -> tuple[Condition, ...]:
        return () if self.alignment is None else (replace(TEACHER, shape=(self.alignment.features,)),)

    def _check_shift(self) -> None:
        points = self.shift_by_tokens
        if points is None:
            return
        if len(points) != 4 or not 0 < points[2] < points[3]:
            raise ConfigError(
                f"objective.shift_by_tokens={points} must be two logarithms of the shift and their tokens, such as "
                "[0.5,1.15,256,4096]"
            )
        if self.shift_dimension is not None:
            raise ConfigError(
                f"objective.shift_by_tokens={points} and shift_dimension={self.shift_dimension} both set the shift; "
                "set one of them to null"
            )
        if (self.time_shift, self.min_time, self.max_time) != (1, 0, 1):
            raise ConfigError(
                f"objective.time_shift={self.time_shift}, min_time={self.min_time} and max_time={self.max_time} do not "
                "go with objective.shift_by_tokens; use 1, 0 and 1, or shift_by_tokens=null"
            )

    def at_size(self, tokens: int, channels: int) -> "FlowMatching":
        if self.shift_dimension is None and self.shift_by_tokens is None:
            return self
        shift = float(self._shift(torch.tensor(tokens, dtype=torch.float64), channels))
        return replace(self, time_shift=shift, shift_dimension=None, shift_by_tokens=None)

    def _shift(self, tokens: Tensor, channels: int) -> Tensor:
        """Return the shift for numbers of tokens."""
        if self.shift_dimension is not None:
            return self.time_shift * (tokens * (channels / self.shift_dimension)).sqrt()
        assert self.shift_by_tokens is not None
        low, high, fewest, most = self.shift_by_tokens
        return torch.exp(low + (tokens - fewest) * ((high - low) / (most - fewest)))

    def _shifts(self, batch: PackedBatch) -> Tensor | float:
        """Return the shift of each noise level, float32 `[L]`; one number if it does not depend on the size."""
        if self.shift_dimension is None and self.shift_by_tokens is None:
            return self.time_shift
        layout = batch.layout
        # Only samples with several levels have tokens outside their grid; empty samples of fixed packs have none.
        tokens_S = (
            layout.lengths_S.clamp(min=1) if layout.levels is None else layout.tensor(list(map(math.prod, batch.grids)))
        )
        return layout.per_level(self._shift(tokens_S.float(), batch.latents_TC.shape[1]))

    def _quantile(self, t: float, shift: Tensor | float) -> Tensor:
        """Return the quantile of a shifted time in the distribution over all times, float64."""
        t_L = shift_time(torch.tensor(t, dtype=torch.float64), 1 / shift).clamp(0, 1)
        if self.time_distribution == "logit_normal":
            t_L = torch.special.ndtr((t_L.logit() - self.logit_mean) / self.logit_std)
        return t_L

    def level(self, quantile: Tensor, shift: Optional[float | Tensor] = None) -> Tensor:
        """Return the shifted time at each quantile, within `min_time` and `max_time`; `shift` replaces `time_shift`."""
        shift = self.time_shift if shift is None else shift
        if (self.min_time, self.max_time) != (0, 1):
            precise = shift.double() if isinstance(shift, Tensor) else shift
            low, high = self._quantile(self.min_time, precise), self._quantile(self.max_time, precise)
            quantile = (low + quantile.double() * (high - low)).to(quantile.dtype)
        if self.time_distribution == "logit_normal":
            quantile = logit_normal(quantile, self.logit_mean, self.logit_std)
        return shift_time(quantile, shift)

    def prepare(self, batch: PackedBatch, noise: AddressedNoise) -> Prepared:
        """Return inputs (1 - t) x0 + t eps, times t, targets eps - x0 or x0, and the batch's loss weights.

        The weights are multiplied by `min_snr_weight` if `min_snr_gamma` is set. Otherwise those of `x0` are divided by
        t**2, because the error of x0 divided by t is the error of the velocity.
        """
        t_L = clean_at_0(self.level(noise.level_L(), self._shifts(batch)), batch.layout)
        weight_L = sample_weights(batch)
        aligned_L = None if self.alignment is None else self.alignment.weight_L(weight_L, noise.step_1)
        target = (1.0, 0.0) if self.prediction == "x0" else (-1.0, 1.0)
        inputs_TC, target_TC = noise.mix(batch.latents_TC, (1 - t_L, t_L), target)
        token_SF = token_target_SF = None
        if self.teacher_token_weight is not None:
            x0_SF, t_S1 = batch.conditions[TEACHER_TOKEN.name].values.float(), t_L[:, None]
            eps_SF = noise.normal_SC(TEACHER_TOKEN.name, x0_SF.shape[1], repeated=False)
            token_SF, token_target_SF = (1 - t_S1) * x0_SF + t_S1 * eps_SF, target[0] * x0_SF + target[1] * eps_SF
        if self.min_snr_gamma is not None:
            slope_L = torch.ones_like(t_L) if self.prediction == "x0" else -t_L
            weight_L = weight_L * min_snr_weight(1 - t_L, t_L, slope_L, self.min_snr_gamma)
        elif self.prediction == "x0":
            weight_L = weight_L / t_L.clamp(min=MIN_TIME) ** 2
        return Prepared(
            inputs_TC=inputs_TC,
            time_S=t_L,
            target_TC=target_TC,
            weight_S=weight_L,
            alignment_weight_S=aligned_L,
            teacher_token_SF=token_SF,
            teacher_target_SF=token_target_SF,
        )

    def loss_terms(self, prediction_TC: Tensor, prepared: Prepared, layout: SequenceLayout) -> dict[str, Term]:
        if self.alignment is None and self.teacher_token_weight is None:
            return super().loss_terms(prediction_TC, prepared, layout)
        start, token_SF = prepared.target_TC.shape[1], prepared.teacher_target_SF
        terms = super().loss_terms(prediction_TC[:, :start], prepared, layout)
        if token_SF is not None and self.teacher_token_weight is not None:
            stop = start + token_SF.shape[1]
            error_T = token_error(prediction_TC[:, start:stop], layout.per_token(token_SF), layout, "l2")
            terms["teacher_token"], start = Term(error_T, self.teacher_token_weight * prepared.weight_S), stop
        if self.alignment is not None and prepared.alignment_weight_S is not None:
            terms["alignment"] = self.alignment.term(prediction_TC[:, start:], prepared.alignment_weight_S, layout)
        return terms

    def denoise(self, network: Network, x_TC: Tensor, u: Tensor, layout: SequenceLayout) -> Tensor:
        """Return the network's x0, or x0 = x - t v of its velocity, with t = `u`."""
        output_TC = network(x_TC.float(), shared_level(u, layout).float()).to(x_TC.dtype)
        return output_TC if self.prediction == "x0" else x_TC - u * output_TC

    def sampling_grid(self, num_steps: int) -> Tensor:
        """Return times from 1 to 0, evenly spaced before the shift."""
        assert self.shift_dimension is None  # `at_size`
        assert self.shift_by_tokens is None
        grid = shift_time(torch.linspace(1, 0, num_steps + 1, dtype=torch.float64), self.time_shift)
        if self.last_time is not None and num_steps > 1:
            grid[:-1] = 1 - (1 - grid[:-1]) * ((1 - self.last_time) / (1 - grid[-2]))
        return grid
