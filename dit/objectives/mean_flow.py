"""MeanFlow: the network predicts the average velocity over a time interval, so that a few solver steps suffice."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from dit.auxiliary import AuxiliaryNetworks
from dit.batch import PackedBatch
from dit.conditions import Condition
from dit.layout import SequenceLayout
from dit.objectives.addressed_noise import AddressedNoise
from dit.objectives.base import ConditionalNetwork, Network, Prepared, sample_weights, shared_level
from dit.objectives.flow_matching import FlowMatching
from dit.objectives.losses import Term
from dit.ranges import INSIDE_0_1, SHARE, Range, check_unused, ranged

SMALLEST_ERROR = 1e-3
"""c, which is added to the error of a sample, so that its adaptive weight is bounded."""


@dataclass(kw_only=True)
class MeanFlow(FlowMatching):
    """The network predicts u(z_t, r, t), the average of the velocity from time r to t, and receives t and t - r.

    The target has no gradient. With v = eps - x0 it is

        u = v - (t - r) du/dt,    du/dt = [u(z_t + h v, r, t + h) - u(z_t - h v, r, t - h)] / 2h

    Two forward passes without gradients compute the difference. They run under every layout except pipeline stages, and
    need fp32 without `training.fp8`, and a model without experts. At r = t the target is v, as in flow matching.

    With `guidance_scale` w, v is replaced by w v + (1 - w) u(z_t, t, t), where u is computed without conditions, in one
    more pass. The network then predicts guided velocities, so one-step samples are guided without a second pass.

    If the errors of a sample have the mean e, its loss is e / (e + c)**p, and the divisor has no gradient. For p > 0,
    `loss_raw` logs e. The held-out loss has no such weight.

    `sampling.solver=euler` steps from t to r with u(z_t, r, t); other solvers use the velocity u(z_t, t, t).

    Args:
        instant_share: share of samples with r = t.
        difference: h, below 1 / model.time_scale; a smaller one amplifies rounding errors and differences between
            layouts.
        guidance_scale: w; 1 for none. Samples are then drawn with `sampling.guidance_scale=1`.
        adaptive_power: p, 1 in the paper's final setting; 0 weighs all errors equally.

    Source: Geng et al. 2025, arXiv:2505.13447, Algorithms 1 and 2, Eq. 19 and 22. Deviations: a difference replaces the
    Jacobian-vector product; a sample with r = t draws one time, and not the larger of two; e is a mean and not a sum,
    so the effect of c does not depend on the size; v is also replaced for samples whose conditions are dropped, and
    keeps its expectation if u is exact.
    """

    takes_levels: ClassVar[bool] = False
    takes_intervals: ClassVar[bool] = True

    instant_share: float = ranged(0.75, SHARE)
    difference: float = ranged(1e-4, INSIDE_0_1)
    guidance_scale: float = ranged(1.0, Range(1, math.inf, open_high=True))
    adaptive_power: float = ranged(0.0, SHARE)

    def __post_init__(self) -> None:
        super().__post_init__()
        others = "prediction", "min_snr_gamma", "alignment", "teacher_token_weight"
        cure = "use objective=flow_matching"
        check_unused("objective", self, others, "with objective=mean_flow", cure, "is not supported")

    @property
    def auxiliary(self) -> AuxiliaryNetworks:
        passes = 2 * (self.instant_share < 1) + (self.guidance_scale > 1)
        return replace(super().auxiliary, extra_passes=passes)

    @property
    def logged(self) -> tuple[str, ...]:
        return (*super().logged, *(["raw"] if self.adaptive_power else []))

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
    def complete(
        self, network: ConditionalNetwork, prepared: Prepared, batch: PackedBatch, conditions: Sequence[Condition]
    ) -> Prepared:
        """Guide the velocity v, and subtract (t - r) du/dt, the derivative along v."""
        inputs_TC, time_S2, velocity_TC = prepared.inputs_TC, prepared.time_S, prepared.target_TC
        if (w := self.guidance_scale) > 1:
            instant_S2 = time_S2 * time_S2.new_tensor([1.0, 0.0])
            dropped = replace(batch, conditions=batch.conditions.unconditional(conditions, batch.layout))
            velocity_TC = w * velocity_TC + (1 - w) * network(inputs_TC, instant_S2, dropped).float()
        if self.instant_share == 1:
            return replace(prepared, target_TC=velocity_TC)
        ahead_TC, behind_TC = (
            network(inputs_TC + h * velocity_TC, time_S2 + h, batch) for h in (self.difference, -self.difference)
        )
        slope_TC = (ahead_TC - behind_TC) / (2 * self.difference)
        return replace(prepared, target_TC=velocity_TC - batch.layout.per_token(time_S2[:, 1]) * slope_TC)

    def loss_terms(self, prediction_TC: Tensor, prepared: Prepared, layout: SequenceLayout) -> dict[str, Term]:
        terms = super().loss_terms(prediction_TC, prepared, layout)
        return {**terms, "raw": replace(terms["error"], error_T=terms["error"].error_T.detach())}

    def weighted(self, terms: dict[str, Term], prepared: Prepared, layout: SequenceLayout) -> dict[str, Term]:
        """Divide the error of each sample by (e + c)**p."""
        if not self.adaptive_power:
            return terms
        error = terms["error"]
        sums_S = prepared.sum_over_ranks(layout.sum_per_sample(error.error_T.detach()))
        divisor_S = (sums_S / layout.lengths_S.clamp(min=1) + SMALLEST_ERROR) ** self.adaptive_power
        return {**terms, "error": replace(error, weight_L=error.weight_L / divisor_S)}

    def denoise_over(self, network: Network, x_TC: Tensor, u: Tensor, end: Tensor, layout: SequenceLayout) -> Tensor:
        """Return x - t U with t = `u`, r = `end` and the average velocity U; a straight step gives x - (t - r) U."""
        time_S2 = torch.stack([shared_level(u, layout), shared_level(u - end, layout)], -1).float()
        return x_TC - u * network(x_TC.float(), time_S2).to(x_TC.dtype)
