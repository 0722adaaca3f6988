"""MeanFlow: the network predicts the average velocity over a time interval, for samples of one or a few steps."""

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from dit.auxiliary import AuxiliaryNetworks
from dit.batch import PackedBatch
from dit.errors import ConfigError
from dit.layout import SequenceLayout
from dit.objectives.addressed_noise import AddressedNoise
from dit.objectives.base import Network, Prepared, sample_weights, shared_time
from dit.objectives.flow_matching import FlowMatching
from dit.ranges import SHARE, Range, check_ranges


@dataclass(kw_only=True)
class MeanFlow(FlowMatching):
    """The network predicts u(z_t, r, t), the average of the velocity from time r to t, and receives t and t - r.

    The target has no gradient. With v = eps - x0 it is

        u = v - (t - r) du/dt,    du/dt = [u(z_t + h v, r, t + h) - u(z_t - h v, r, t - h)] / 2h

    Two forward passes without gradients compute the difference. They run under every layout except pipeline stages, and
    need fp32 and a model without experts. At r = t the target is that of flow matching.

    `sampling.solver=euler` steps from t to r with u(z_t, r, t); other solvers use the velocity u(z_t, t, t).

    Args:
        instant_share: share of the samples with r = t.
        difference: h, below 1 / model.time_scale, so that the phases of the time's sinusoid change by less than 1. A
            smaller h amplifies rounding errors, and with them the differences between layouts.

    Source: Geng et al. 2025, arXiv:2505.13447, Algorithms 1 and 2. Deviations: a difference replaces the
    Jacobian-vector product; samples have no adaptive weight (p = 0 in section 4.3); a sample with r = t draws one time,
    and not the larger of two; guidance is not part of training.
    """

    takes_levels: ClassVar[bool] = False
    takes_intervals: ClassVar[bool] = True

    instant_share: float = 0.75
    difference: float = 1e-4

    def __post_init__(self) -> None:
        super().__post_init__()
        step = Range(0, 1, open_low=True, open_high=True)
        check_ranges("objective", self, {"instant_share": SHARE, "difference": step})
        names = ("prediction", "min_snr_gamma", "alignment", "teacher_token_weight")
        others = {name: getattr(self, name) for name in names}
        if tuple(others.values()) != ("velocity", None, None, None):
            raise ConfigError(
                f"MeanFlow predicts a velocity and has no min-SNR weight, alignment or teacher's token, got {others}; "
                "use objective.prediction=velocity, objective.min_snr_gamma=null, objective.alignment=none and "
                "objective.teacher_token_weight=null"
            )

    @property
    def auxiliary(self) -> AuxiliaryNetworks:
        return replace(super().auxiliary, extra_passes=2 * (self.instant_share < 1))

    def prepare(self, batch: PackedBatch, noise: AddressedNoise) -> Prepared:
        """Corrupt a packed micro-batch; time_S has the columns t and t - r, and the target is the velocity."""
        shifts = self._shifts(batch)
        first_S, second_S = self.level(noise.level_S(), shifts), self.level(noise.uniform_S("interval"), shifts)
        second_S = torch.where(noise.uniform_S("instant") < self.instant_share, first_S, second_S)
        t_S, r_S = torch.maximum(first_S, second_S), torch.minimum(first_S, second_S)
        inputs_TC, target_TC = noise.mix(batch.latents_TC, (1 - t_S, t_S), (-1.0, 1.0))
        time_S2, weight_S = torch.stack([t_S, t_S - r_S], -1), sample_weights(batch)
        return Prepared(inputs_TC=inputs_TC, time_S=time_S2, target_TC=target_TC, weight_S=weight_S)

    @torch.no_grad()
    def complete(self, network: Network, prepared: Prepared, layout: SequenceLayout) -> Prepared:
        """Subtract (t - r) du/dt from the velocity."""
        if self.instant_share == 1:
            return prepared
        inputs_TC, time_S2, velocity_TC = prepared.inputs_TC, prepared.time_S, prepared.target_TC
        ahead_TC, behind_TC = (
            network(inputs_TC + h * velocity_TC, time_S2 + h) for h in (self.difference, -self.difference)
        )
        slope_TC = (ahead_TC - behind_TC) / (2 * self.difference)
        return replace(prepared, target_TC=velocity_TC - layout.per_token(time_S2[:, 1]) * slope_TC)

    def denoise_over(self, network: Network, x_TC: Tensor, u: Tensor, end: Tensor, layout: SequenceLayout) -> Tensor:
        """Return x - t U with t = `u`, r = `end` and the average velocity U; a straight step gives x - (t - r) U."""
        time_S2 = torch.stack([shared_time(u, layout), shared_time(u - end, layout)], -1)
        return x_TC - u * network(x_TC.float(), time_S2).to(x_TC.dtype)
