"""DDPM: variance-preserving diffusion, in continuous time or on a table of steps."""

import math
from dataclasses import dataclass
from typing import ClassVar, Literal, Optional

import torch
from torch import Tensor

from dit.batch import PackedBatch
from dit.errors import ConfigError
from dit.layout import SequenceLayout
from dit.objectives.addressed_noise import AddressedNoise, Mixture
from dit.objectives.base import Network, Objective, Path, Prepared, clean_at_0, sample_weights, shared_level
from dit.objectives.losses import LossKind, Term, min_snr_weight, token_error
from dit.objectives.noise_levels import ScheduleName, TableSchedule, make_schedule
from dit.objectives.variational_bound import VariationalBound
from dit.ranges import INSIDE_0_1, NOT_NEGATIVE, POSITIVE, SHARE, check_ranges, ranged, whole

Prediction = Literal["noise", "x0", "v"]
NetworkTime = Literal["time", "log_snr"]
MAX_LOG_SNR = 20.0
"""Largest absolute log SNR as a network's time; beyond it, x_t equals x0 or the noise in float32."""
MIN_ALPHA_FROM_NOISE = 5e-3
"""Alpha at which sampling from a noise prediction starts, because x0 = (x - sigma eps) / alpha multiplies its error.

The linear schedule ends at 0.0064, the cosine schedule at 0.
"""
TINY_ALPHA = 1e-8
"""Lower limit of alpha as a divisor, so that x0 is finite at alpha = 0."""


class AnglePath(Path):
    """x_u = cos(u) x0 + sin(u) eps; the position on the path is the angle between data and noise."""

    def alpha_sigma(self, u: Tensor) -> tuple[Tensor, Tensor]:
        return u.cos(), u.sin()

    def derivatives(self, u: Tensor) -> tuple[Tensor, Tensor]:
        return -u.sin(), u.cos()


@dataclass(kw_only=True)
class LearnedVariance:
    """A learned variance of the reverse steps, exp(w log beta + (1 - w) log beta~).

    The network has a second output v per channel, and w = (v + 1) / 2. v learns from the variational bound, which does
    not change the mean: loss = simple + vlb_weight * bound. `sampling.variance=learned` samples with it.

    Args:
        vlb_weight: weight of the variational bound (bits per dimension).

    Source: Nichol and Dhariwal 2021, arXiv:2102.09672, Eq. 15 and 16, in bits as in their published code.
    """

    vlb_weight: float = ranged(1e-3, NOT_NEGATIVE)

    def __post_init__(self) -> None:
        check_ranges("objective.variance", self)


@dataclass(kw_only=True)
class DDPM(Objective):
    """DDPM with the simple (unweighted) loss, one time per packed sample, or several (`dit.levels`).

    Clean tokens have alpha = 1 and the network's time 0, which is that of step 0 of a table, or the log SNR
    `MAX_LOG_SNR`.

    Args:
        schedule: noise schedule.
        prediction: output of the network: noise, clean latent (`x0`), v = alpha eps - sigma x0, or velocity. `x0` suits
            tokens that are at least as wide as the network.
        discrete_steps: length of the table of steps; None for continuous time.
        betas: variance of the first and the last of 1000 steps; None for published values.
        zero_terminal_snr: rescale the table to end at pure noise.
        noise_offset: standard deviation of added noise that is equal at all positions (SDXL: 0.05).
        network_time: input of the network: the time, or ln(alpha^2 / sigma^2), as in Imagen.
        min_snr_gamma: weight errors as errors of x0 with min(SNR, gamma).
        variance: learned variance of the reverse steps (`learned_variance`); requires `discrete_steps`.

    Source: Ho et al. 2020, arXiv:2006.11239, Eq. 4 and 14; v prediction, Salimans and Ho 2022, arXiv:2202.00512,
    Appendix D; min-SNR, Hang et al. 2023, arXiv:2303.09556; zero terminal SNR, Lin et al. 2023, arXiv:2305.08891,
    Algorithm 1; offset noise, Guttenberg 2023 (crosslabs.org, "Diffusion with Offset Noise").
    """

    takes_levels: ClassVar[bool] = True

    schedule: ScheduleName = "linear"
    prediction: Prediction = "noise"
    discrete_steps: Optional[int] = ranged(None, whole(1, 1_000_000))
    betas: Optional[list[float]] = ranged(None, INSIDE_0_1)
    zero_terminal_snr: bool = False
    noise_offset: float = ranged(0.0, SHARE)
    network_time: NetworkTime = "time"
    loss_kind: LossKind = "l2"
    min_snr_gamma: Optional[float] = ranged(None, POSITIVE)
    variance: Optional[LearnedVariance] = None

    def __post_init__(self) -> None:
        self.path = AnglePath()
        super().__post_init__()
        if self.zero_terminal_snr and (self.discrete_steps is None or self.prediction == "noise"):
            raise ConfigError(
                "objective.zero_terminal_snr ends a table of steps at pure noise, which a prediction of the noise "
                f"cannot leave, and objective.discrete_steps={self.discrete_steps}, objective.prediction="
                f"{self.prediction}; use discrete_steps=1000 and prediction=v, or zero_terminal_snr=false"
            )
        self.noise_schedule = make_schedule(self.schedule, self.discrete_steps, self.betas, self.zero_terminal_snr)
        self._bound: Optional[VariationalBound] = None
        if self.variance is not None:
            if not isinstance(self.noise_schedule, TableSchedule) or self.noise_schedule.num_steps < 2:
                raise ConfigError(
                    "objective.variance needs a table of at least 2 steps, and objective.discrete_steps is "
                    f"{self.discrete_steps}; use 1000, or variance=none"
                )
            self._bound = VariationalBound(self.noise_schedule)

    @property
    def num_outputs(self) -> int:
        return 1 if self.variance is None else 2

    @property
    def terms(self) -> tuple[str, ...]:
        return super().terms if self.variance is None else ("simple", "vlb")

    def level(self, quantile_S: Tensor) -> Tensor:
        """Return the angle at each quantile, float64."""
        return self.noise_schedule.angle(self.noise_schedule.training_time(quantile_S.double()))

    def prepare(self, batch: PackedBatch, noise: AddressedNoise) -> Prepared:
        """Return inputs alpha x0 + sigma eps, times, targets as in `prediction`, and the batch's loss weights.

        The weights are multiplied by `min_snr_weight` if `min_snr_gamma` is set.
        """
        # Coefficients are computed in float64, because alpha = cos(phi) loses digits near pure noise.
        t_L = self.noise_schedule.training_time(noise.level_L().double())
        angle_L = clean_at_0(self.noise_schedule.angle(t_L), batch.layout)
        alpha_L, sigma_L = self.path.alpha_sigma(angle_L)
        a_L, b_L = alpha_L.float(), sigma_L.float()
        targets: dict[Prediction, Mixture] = {"noise": (0.0, 1.0), "x0": (1.0, 0.0), "v": (-b_L, a_L)}
        offset_SC = None
        if self.noise_offset:
            offset_SC = self.noise_offset * noise.normal_SC("offset", batch.latents_TC.shape[-1])
        inputs_TC, target_TC = noise.mix(batch.latents_TC, (a_L, b_L), targets[self.prediction], offset_SC=offset_SC)
        weight_L = sample_weights(batch)
        if self.min_snr_gamma is not None:
            slope_L = self._slope(alpha_L, sigma_L)
            weight_L = weight_L * min_snr_weight(alpha_L, sigma_L, slope_L, self.min_snr_gamma).float()
        return Prepared(
            inputs_TC=inputs_TC,
            time_S=self._network_time(t_L, angle_L).float(),
            target_TC=target_TC,
            weight_S=weight_L,
            bound_weight_S=None if self.variance is None else self.variance.vlb_weight * sample_weights(batch),
            table_time_S=t_L,
        )

    def loss_terms(self, prediction_TC: Tensor, prepared: Prepared, layout: SequenceLayout) -> dict[str, Term]:
        """Compare the prediction with its target and, for a learned variance, the reverse step with the true one."""
        if self._bound is None:
            return super().loss_terms(prediction_TC, prepared, layout)
        t_L, bound_weight_L = prepared.table_time_S, prepared.bound_weight_S
        assert t_L is not None
        assert bound_weight_L is not None
        noised_T1, per_token = layout.noised_T[:, None], layout.level_layout.per_token
        output_TC, v_TC = prediction_TC.chunk(2, dim=-1)
        simple_T = token_error(output_TC, prepared.target_TC, layout, self.loss_kind)
        alpha_L, sigma_L = self.path.alpha_sigma(self.noise_schedule.angle(t_L))
        alpha_T1, sigma_T1, slope_T1 = (
            per_token(x_L.float()) for x_L in (alpha_L, sigma_L, self._slope(alpha_L, sigma_L))
        )
        x_TC, target_TC, output_TC, v_TC = (
            torch.where(noised_T1, part_TC.float(), 0.0)
            for part_TC in (prepared.inputs_TC, prepared.target_TC, output_TC.detach(), v_TC)
        )
        bound_T = self._bound.bits(
            step_T1=per_token(self._bound.table.step(t_L)),
            x0_TC=self._clean(x_TC, target_TC, alpha_T1, sigma_T1),
            difference_TC=slope_T1 * (target_TC - output_TC),
            v_TC=v_TC,
        )
        bound_T = torch.where(layout.noised_T, bound_T, 0.0)
        return {"simple": Term(simple_T, prepared.weight_S), "vlb": Term(bound_T, bound_weight_L)}

    def _clean(self, x_TC: Tensor, output_TC: Tensor, alpha: Tensor, sigma: Tensor) -> Tensor:
        """Return x0 from the noised latents and the predicted noise, x0 or v."""
        if self.prediction == "noise":
            return (x_TC - sigma * output_TC) / alpha.clamp(min=TINY_ALPHA)
        if self.prediction == "x0":
            return output_TC
        return alpha * x_TC - sigma * output_TC

    def _slope(self, alpha: Tensor, sigma: Tensor) -> Tensor:
        """Return d x0 / d output."""
        return self._clean(torch.zeros_like(sigma), torch.ones_like(sigma), alpha, sigma)

    def _output(self, network: Network, x_TC: Tensor, u: Tensor, layout: SequenceLayout) -> Tensor:
        """Run the network in float32 at one angle for all samples."""
        angle_L = shared_level(u, layout)
        time_L = self._network_time(self.noise_schedule.time(angle_L), angle_L)
        return network(x_TC.float(), time_L.float()).to(x_TC.dtype)

    def _network_time(self, t: Tensor, angle: Tensor) -> Tensor:
        """Return the network's input for time `t`, whose angle is `angle`."""
        if self.network_time == "time":
            return t
        return (-2 * angle.tan().log()).clamp(-MAX_LOG_SNR, MAX_LOG_SNR)

    def denoise(self, network: Network, x_TC: Tensor, u: Tensor, layout: SequenceLayout) -> Tensor:
        """Return x0 from the predicted noise, x0 or v at the angle `u`."""
        return self._clean(x_TC, self._output(network, x_TC, u, layout), *self.path.alpha_sigma(u))

    def denoise_with_variance(
        self, network: Network, x_TC: Tensor, u: Tensor, layout: SequenceLayout
    ) -> tuple[Tensor, Tensor]:
        """Return x0 as in `denoise`, and (v + 1) / 2 of the network's second output."""
        if self.variance is None:
            return super().denoise_with_variance(network, x_TC, u, layout)
        output_TC, v_TC = self._output(network, x_TC, u, layout).chunk(2, dim=-1)
        return self._clean(x_TC, output_TC, *self.path.alpha_sigma(u)), (v_TC + 1) / 2

    def sampling_grid(self, num_steps: int) -> Tensor:
        """Return angles evenly spaced in time, then 0; for a table, angles of its steps."""
        max_angle = math.acos(MIN_ALPHA_FROM_NOISE) if self.prediction == "noise" else math.pi / 2
        angles = self.noise_schedule.sampling_angles(num_steps, max_angle)
        return torch.cat([angles, torch.zeros(1, dtype=torch.float64)])
