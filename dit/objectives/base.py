"""The objective contract: corrupt a batch, say what the network must output, and turn its output into a denoiser.

Network, loss and solver meet only here: the step, the backbones and the solvers never ask which objective runs.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Optional

import torch
from torch import Tensor

from dit.batch import PackedBatch
from dit.conditions import Condition
from dit.errors import ConfigError
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
        time_S: conditioning value per sample; in [0, 1] for flow matching and DDPM (or its log SNR), log(sigma) / 4 for
            EDM.
        target_TC: what the network must output.
        weight_S: weight of each sample's error.
        bound_weight_S: weight of each sample's variational bound; None where the loss has none.
    """

    inputs_TC: Tensor
    time_S: Tensor
    target_TC: Tensor
    weight_S: Tensor
    bound_weight_S: Optional[Tensor] = None


@dataclass(frozen=True)
class Term:
    """One summand of a loss: an error of each token, weighted by sample. All are float32.

    Attributes:
        error_T: of each local token, the mean over its channels; 0 in padding.
        weight_S: of each sample.
    """

    error_T: Tensor
    weight_S: Tensor

    def sum(self, layout: SequenceLayout) -> Tensor:
        """Return the weighted sum over the local tokens."""
        return (self.error_T * layout.per_token(self.weight_S)[:, 0]).sum()

    def sum_per_sample(self, layout: SequenceLayout) -> Tensor:
        """Return the weighted sum over the local tokens of each sample `[S]`."""
        return layout.sum_per_sample(self.error_T) * self.weight_S


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

    @property
    def num_outputs(self) -> int:
        """How many times the width of a latent the network predicts."""
        return 1

    @property
    def terms(self) -> tuple[str, ...]:
        """Names of the summands of the loss, in the order of `loss_terms`."""
        return ("error",)

    @property
    def measures(self) -> tuple[str, ...]:
        """Names of what `loss_terms` returns to be logged beside the summands."""
        return ()

    @property
    def logged(self) -> tuple[str, ...]:
        """Names of the summands, then of the measures."""
        return self.terms + self.measures

    @property
    def learns_uncertainty(self) -> bool:
        """Whether a head u(sigma) is trained with the network, whose predictions then have u as a last column."""
        return False

    @property
    def reconstructs(self) -> bool:
        """Whether the network is an autoencoder, which also outputs a posterior; nothing is sampled from it alone."""
        return False

    @property
    def augments(self) -> bool:
        """Whether `augment` noises low-resolution pictures."""
        return False

    def augment(
        self, batch: PackedBatch, wanted: Sequence[Condition], noise: AddressedNoise, *, draw: bool
    ) -> PackedBatch:
        """Noise the low-resolution picture of each sample, for a model that is conditioned on the level.

        Args:
            wanted: conditions of the model; without `augmentation` among them nothing is done.
            draw: draw the level of each sample, as in training; else take the one that is given.
        """
        return batch

    @abstractmethod
    def prepare(self, batch: PackedBatch, noise: AddressedNoise) -> Prepared:
        """Corrupt a packed micro-batch; every sample's noise level grows with its `noise.level_S()`."""

    def loss_terms(self, prediction_TC: Tensor, prepared: Prepared, layout: SequenceLayout) -> dict[str, Term]:
        """Compare a prediction with its target.

        Tokens weigh the same whether packed or not, so sums over micro-batches and ranks are divided by the count of
        all their tokens.

        Args:
            prediction_TC: of the local tokens, `[T, num_outputs * token_channels]`, one output behind another, and the
                uncertainty behind them where it is learned.

        Returns:
            The summands of the loss and the measures by name.
        """
        error_T = token_error(prediction_TC, prepared.target_TC, layout, self.loss_kind)
        return {"error": Term(error_T, prepared.weight_S)}

    def loss(
        self, prediction_TC: Tensor, prepared: Prepared, layout: SequenceLayout
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Sum the loss over the real local tokens; divide by the count after both were added up.

        Args:
            prediction_TC: as for `loss_terms`.

        Returns:
            Loss sum and number of real tokens (float32 scalars), and the sum of everything `logged`, by name, detached.
        """
        found = self.loss_terms(prediction_TC, prepared, layout)
        sums = {name: found[name].sum(layout) for name in self.logged}
        total = torch.stack([sums[name] for name in self.terms]).sum()
        return total, layout.valid_T.sum().float(), {name: value.detach() for name, value in sums.items()}

    @abstractmethod
    def denoise(self, network: Network, x_TC: Tensor, u: Tensor, layout: SequenceLayout) -> Tensor:
        """Estimate the clean latents from x_u.

        Args:
            x_TC: noised latents at path position `u`, in the solver's precision.
            u: position on the path, a scalar tensor shared by all samples.

        Returns:
            x0_TC in the dtype of `x_TC`.
        """

    def denoise_with_variance(
        self, network: Network, x_TC: Tensor, u: Tensor, layout: SequenceLayout
    ) -> tuple[Tensor, Tensor]:
        """Estimate the clean latents, and the variance of the reverse step that the network learned.

        Args:
            network: returns all outputs, one behind another; else as for `denoise`.

        Returns:
            x0_TC, and where the log variance is between that of the posterior (0) and log beta (1); both in the dtype
            of `x_TC`.

        Raises:
            ConfigError: the objective learns no variance.
        """
        raise ConfigError(
            f"variance='learned' needs a network that learned one, and this one was trained by {self}; use "
            "variance='small' or 'large', or train with objective=ddpm_learned_variance"
        )

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


def token_error(prediction_TC: Tensor, target_TC: Tensor, layout: SequenceLayout, kind: LossKind) -> Tensor:
    """Return the error of each local token, the mean over its channels, float32 `[T]`; 0 in padding."""
    valid_T1 = layout.valid_T[:, None]
    # Mask before the error, not after: a NaN in padding would come back as 0 * NaN in the gradient.
    prediction_TC, target_TC = (torch.where(valid_T1, x_TC.float(), 0.0) for x_TC in (prediction_TC, target_TC))
    return pointwise_error(prediction_TC, target_TC, kind).mean(-1)


def min_snr_weight(alpha: Tensor, sigma: Tensor, slope: Tensor, gamma: float) -> Tensor:
    """Return the weight of an output's squared error that makes it that of x0, weighted by min(SNR, gamma).

    Args:
        alpha, sigma: of the path; SNR = (alpha / sigma)**2.
        slope: d x0 / d output.
        gamma: largest weight of the error of x0; 5 in the paper.

    Source: Hang et al. 2023, arXiv:2303.09556, section 3.4.
    """
    return (alpha / sigma).square().clamp(max=gamma) * slope.square()
