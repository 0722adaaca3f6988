"""The objective contract: corrupt a batch, say what the network must output, and turn its output into a denoiser.

Network, loss and solver meet only here: the step, the backbones and the solvers never ask which objective runs.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from dit.batch import PackedBatch
from dit.layout import SequenceLayout
from dit.objectives.addressed_noise import AddressedNoise

LossKind = Literal["l2", "l1", "huber"]
Network = Callable[[Tensor, Tensor], Tensor]
"""Maps inputs_TC and time_S to the raw prediction_TC."""


@dataclass(frozen=True)
class Prepared:
    """A corrupted micro-batch, all float32.

    Attributes:
        inputs_TC: what the network sees.
        time_S: conditioning value per sample; in [0, 1] for flow matching and DDPM, log(sigma) / 4 for EDM.
        target_TC: what the network must output.
        weight_S: weight of each sample's squared error.
    """

    inputs_TC: Tensor
    time_S: Tensor
    target_TC: Tensor
    weight_S: Tensor


class Path(ABC):
    """The noising path x_u = alpha(u) x0 + sigma(u) eps (float64 scalars).

    sigma grows with u; alpha(0) = 1 and sigma(0) = 0.
    """

    @abstractmethod
    def alpha_sigma(self, u: Tensor) -> tuple[Tensor, Tensor]:
        """Return alpha(u) and sigma(u)."""

    @abstractmethod
    def derivatives(self, u: Tensor) -> tuple[Tensor, Tensor]:
        """Return d alpha / d u and d sigma / d u."""


class Objective(ABC):
    """A training objective. Constructors are flat; their arguments are the recipe's settings."""

    path: Path
    loss_kind: LossKind = "l2"

    @abstractmethod
    def prepare(self, batch: PackedBatch, noise: AddressedNoise) -> Prepared:
        """Corrupt a packed micro-batch; every sample's noise level grows with its `noise.level_S()`."""

    @abstractmethod
    def denoise(self, network: Network, x_TC: Tensor, u: Tensor, layout: SequenceLayout) -> Tensor:
        """Estimate the clean latents from x_u.

        Args:
            x_TC: noised latents at path position `u`, in the solver's precision.
            u: position on the path, a scalar tensor shared by all samples.

        Returns:
            x0_TC in the dtype of `x_TC`.
        """

    @abstractmethod
    def sampling_grid(self, num_steps: int) -> Tensor:
        """Return `num_steps + 1` falling path positions, float64, from pure noise to 0."""


def sample_weights(batch: PackedBatch) -> Tensor:
    """Return the batch's own loss weight of each sample, float32 `[S]`; ones if it has none."""
    if batch.loss_weight_S is None:
        return torch.ones(batch.layout.num_samples, device=batch.latents_TC.device)
    return batch.loss_weight_S.float()


def shared_time(time: Tensor, layout: SequenceLayout) -> Tensor:
    """Give every sample the same conditioning value, float32 `[S]` on the layout's device (`time` is a host scalar)."""
    return torch.full((layout.num_samples,), float(time), dtype=torch.float32, device=layout.device)


def pointwise_error(prediction: Tensor, target: Tensor, kind: LossKind) -> Tensor:
    """Return the elementwise error in float32; `huber` is the smooth l1 with unit threshold."""
    difference = prediction.float() - target.float()
    if kind == "l2":
        return difference.square()
    if kind == "l1":
        return difference.abs()
    return torch.nn.functional.huber_loss(prediction.float(), target.float(), reduction="none")


def masked_loss(
    prediction_TC: Tensor, prepared: Prepared, layout: SequenceLayout, kind: LossKind = "l2"
) -> tuple[Tensor, Tensor]:
    """Sum the weighted error over the real tokens held here.

    The mean over channels is taken per token; tokens weigh the same whether packed or not. Divide the sum by the count
    after both were added up over micro-batches and ranks.

    Returns:
        Weighted error sum (float32 scalar) and number of real tokens (float32 scalar).
    """
    valid_T = layout.valid_T
    # Mask before the error, not after: a NaN in a padding row would come back as 0 * NaN in the gradient.
    prediction_TC, target_TC = (
        torch.where(valid_T[:, None], x_TC.float(), 0.0) for x_TC in (prediction_TC, prepared.target_TC)
    )
    error_T = pointwise_error(prediction_TC, target_TC, kind).mean(-1)
    return (error_T * layout.per_token(prepared.weight_S)[:, 0]).sum(), valid_T.sum().float()
