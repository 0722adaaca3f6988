"""The interface of objectives: corrupt a batch, define the target of the network, and turn its output into a denoiser.

Network, loss and solver meet only here: the training step, the backbones and the solvers run any objective.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Optional

import torch
from torch import Tensor

from dit.auxiliary import AuxiliaryNetworks
from dit.batch import PackedBatch
from dit.condition_table import CLEAN_TEACHER_TOKEN, TEACHER_TOKEN
from dit.conditions import Condition, Entry
from dit.errors import ConfigError
from dit.layout import SequenceLayout
from dit.objectives.addressed_noise import AddressedNoise
from dit.objectives.losses import Term, TokenLossKind, UncertaintyWeighting, token_error
from dit.ranges import check_ranges

Network = Callable[[Tensor, Tensor], Tensor]
"""Maps inputs_TC and time_S to the raw prediction_TC."""
ConditionalNetwork = Callable[[Tensor, Tensor, PackedBatch], Tensor]
"""Maps (inputs_TC, time_S, batch) to a prediction; a backbone."""


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A corrupted micro-batch, all float32.

    Attributes:
        time_S: conditioning value per sample: in [0, 1] for flow matching and DDPM (or DDPM's log SNR), log(sigma) / 4
            for EDM. If samples have several noise levels (`dit.levels`), one value per level.
            `[S, 2]` with the length of each sample's time interval (`mean_flow`).
        target_TC: correct output of the network.
        weight_S: weight of each sample's error, or of the errors at each of its noise levels.
        alignment_weight_S, adversarial_weight_S, bound_weight_S: the same for `objective.alignment`,
            `objective.adversarial`, and the bound of `objective.variance`; None without it.
        table_time_S: time of each noise level in the table of steps, float64; the variational bound reads it.
        teacher_token_SF: noised class token of the teacher, and `teacher_target_SF`, the correct output for it; None
            without `objective.teacher_token_weight`.
        negative_TC: target of another sample (`contrastive_flow_matching`); None without one.
        sum_over_ranks: sums a tensor over the ranks that have tokens of the same samples.
    """

    inputs_TC: Tensor
    time_S: Tensor
    target_TC: Tensor
    weight_S: Tensor
    alignment_weight_S: Optional[Tensor] = None
    adversarial_weight_S: Optional[Tensor] = None
    bound_weight_S: Optional[Tensor] = None
    table_time_S: Optional[Tensor] = None
    teacher_token_SF: Optional[Tensor] = None
    teacher_target_SF: Optional[Tensor] = None
    negative_TC: Optional[Tensor] = None
    sum_over_ranks: Callable[[Tensor], Tensor] = lambda x: x

    def noised(self, batch: PackedBatch) -> PackedBatch:
        """Return the network's batch: the class tokens of the teacher are noised, and clean under another name."""
        if self.teacher_token_SF is None:
            return batch
        clean, noised = batch.conditions[TEACHER_TOKEN.name], Entry("sample", self.teacher_token_SF)
        return replace(batch, conditions=batch.conditions | {TEACHER_TOKEN.name: noised, CLEAN_TEACHER_TOKEN: clean})


class Path(ABC):
    """The noising path x_u = alpha(u) x0 + sigma(u) eps (float64 scalars).

    u is the position on the path: the time of flow matching, the angle of DDPM, the sigma of EDM. sigma increases with
    u; alpha(0) = 1 and sigma(0) = 0.
    """

    @abstractmethod
    def alpha_sigma(self, u: Tensor) -> tuple[Tensor, Tensor]:
        """Return alpha(u) and sigma(u)."""

    @abstractmethod
    def derivatives(self, u: Tensor) -> tuple[Tensor, Tensor]:
        """Return d alpha / d u and d sigma / d u."""


class Objective(ABC):
    """A training objective. The arguments of its constructor are the recipe's settings.

    Attributes:
        path: noising path; objectives that reconstruct have none.
        loss_kind: absolute (`l1`), squared (`l2`) or Huber error, or squared plus 1 minus the cosine (`l2_cosine`).
        weighting: learned weights of the noise levels; None for the weights of `prepare`.
        takes_levels: whether a sample may have several noise levels and clean tokens (`dit.levels`).
        compares_pairs: whether the loss of a sample depends on another one of its micro-batch.
        takes_intervals: whether the network receives the length of a time interval.
        reconstructs: whether the network is an autoencoder, which also outputs a posterior and draws no samples.
        quantizes: whether its latents are entries of a codebook.
        augments: whether the objective adds noise to low-resolution pictures.
    """

    path: Path
    loss_kind: TokenLossKind = "l2"
    weighting: Optional[UncertaintyWeighting] = None
    takes_levels: ClassVar[bool] = False
    compares_pairs: ClassVar[bool] = False
    takes_intervals: ClassVar[bool] = False
    reconstructs: ClassVar[bool] = False
    quantizes: ClassVar[bool] = False
    augments: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_ranges("objective", self)  # type: ignore[arg-type]  # subclasses are dataclasses

    @property
    def trained_times(self) -> tuple[float, float]:
        """Lowest and highest time of training; a model that lacks some times draws no samples by itself."""
        return 0.0, 1.0

    @property
    def num_outputs(self) -> int:
        """Number of outputs of the network, each as wide as a latent."""
        return 1

    @property
    def terms(self) -> tuple[str, ...]:
        """Names of the summands of the loss, in the order of `loss_terms`."""
        return ("error",) if self.weighting is None else self.weighting.terms

    @property
    def logged(self) -> tuple[str, ...]:
        """Names of the summands, then of other logged terms."""
        return self.terms if self.weighting is None else self.weighting.logged

    @property
    def auxiliary(self) -> AuxiliaryNetworks:
        """Networks that the objective adds to the model."""
        return AuxiliaryNetworks(uncertainty=self.weighting is not None)

    @property
    def conditions(self) -> tuple[Condition, ...]:
        """Values of a sample that the loss reads in training, in addition to the conditions of the model."""
        return ()

    def augment(
        self, batch: PackedBatch, required: Sequence[Condition], noise: AddressedNoise, *, draw: bool
    ) -> PackedBatch:
        """Add noise to the low-resolution picture of each sample, for a model that is conditioned on the noise level.

        Args:
            required: conditions of the model; without `augmentation` among them the batch is returned unchanged.
            draw: draw the level of each sample, as in training; otherwise use the level in the batch.
        """
        return batch

    def of_full_pack(self, batch: PackedBatch) -> PackedBatch:
        """Add what a sample needs of the others, to a full pack of training, before its tokens are split over ranks."""
        return batch

    @abstractmethod
    def prepare(self, batch: PackedBatch, noise: AddressedNoise) -> Prepared:
        """Corrupt a packed micro-batch; noise levels increase with `noise.level_S()`, or `level_L()`."""

    def complete(
        self, network: ConditionalNetwork, prepared: Prepared, batch: PackedBatch, conditions: Sequence[Condition]
    ) -> Prepared:
        """Return `prepared` with targets that need further passes of the network, without gradients.

        Args:
            conditions: those of the model; passes without conditions drop them in `batch`.
        """
        return prepared

    def loss_terms(self, prediction_TC: Tensor, prepared: Prepared, layout: SequenceLayout) -> dict[str, Term]:
        """Compare a prediction with its target; returns the terms in `logged` by name.

        Every token weighs the same, packed or not: sums over micro-batches and ranks are divided by the number of all
        their noised tokens. Clean tokens have no error and are not counted, so a sample weighs the same with a
        reference picture as without one.

        Args:
            prediction_TC: prediction of the local tokens, `[T, num_outputs * token_channels]`, the outputs in order;
                with `weighting`, its log variance u(sigma) is one more column (not a path position).
        """
        if self.weighting is not None:
            target_TC, weight_S = prepared.target_TC, prepared.weight_S
            return self.weighting.loss_terms(prediction_TC, target_TC, weight_S, layout, self.loss_kind)
        error_T = token_error(prediction_TC, prepared.target_TC, layout, self.loss_kind)
        return {"error": Term(error_T, prepared.weight_S)}

    def weighted(self, terms: dict[str, Term], prepared: Prepared, layout: SequenceLayout) -> dict[str, Term]:
        """Return the terms of training, with weights that depend on the error of a sample."""
        return terms

    def loss(
        self, prediction_TC: Tensor, prepared: Prepared, layout: SequenceLayout
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Return the sum of the loss over the noised local tokens, their number, and the detached sums of `logged`.

        The mean loss is the sum over all ranks divided by the number over all ranks; both are float32.
        """
        terms = self.weighted(self.loss_terms(prediction_TC, prepared, layout), prepared, layout)
        sums = {name: terms[name].sum(layout) for name in self.logged}
        total = torch.stack([sums[name] for name in self.terms]).sum()
        return total, layout.noised_T.sum().float(), {name: value.detach() for name, value in sums.items()}

    @abstractmethod
    def denoise(self, network: Network, x_TC: Tensor, u: Tensor, layout: SequenceLayout) -> Tensor:
        """Estimate the clean latents from x_u, in the dtype of `x_TC`, the solver's precision."""

    def denoise_over(self, network: Network, x_TC: Tensor, u: Tensor, end: Tensor, layout: SequenceLayout) -> Tensor:
        """Estimate the clean latents for a straight step from path position `u` to `end`."""
        return self.denoise(network, x_TC, u, layout)

    def check_thresholding(self, solver: str, num_steps: int) -> None:
        """Check that every step of a solver has a clean estimate, which thresholding changes.

        With an average velocity U, a straight step from t to r uses x - t U, a clean estimate only for r = 0.
        """
        if self.takes_intervals and solver == "euler" and num_steps > 1:
            raise ConfigError(
                f"sampling.thresholding changes clean estimates, and of the {num_steps} Euler steps of "
                "objective=mean_flow only the last one has such an estimate; use sampling.num_steps=1, "
                "sampling.solver=heun, or sampling.thresholding=none"
            )

    def denoise_with_variance(
        self, network: Network, x_TC: Tensor, u: Tensor, layout: SequenceLayout
    ) -> tuple[Tensor, Tensor]:
        """Estimate the clean latents as `denoise`, and the learned variance of the reverse step.

        The variance is the position of its logarithm between that of the posterior (0) and log beta (1).
        """
        raise ConfigError(
            f"variance='learned' needs a network with a learned variance, and this one was trained by {self}; use "
            "variance='small' or 'large', or train with objective=ddpm_learned_variance"
        )

    def at_size(self, tokens: int, channels: int) -> "Objective":
        """Return the objective with the noise levels of samples of this many tokens of this many channels."""
        return self

    @abstractmethod
    def sampling_grid(self, num_steps: int) -> Tensor:
        """Return `num_steps + 1` decreasing path positions, float64, from pure noise to 0."""


def sample_weights(batch: PackedBatch) -> Tensor:
    """Return the batch's loss weight of each sample for its noise levels, float32 `[L]`; ones if the batch has none."""
    if batch.loss_weight_S is None:
        return torch.ones(batch.layout.level_layout.num_samples, device=batch.latents_TC.device)
    return batch.layout.per_level(batch.loss_weight_S.float())


def clean_at_0(u_L: Tensor, layout: SequenceLayout) -> Tensor:
    """Return the path position of each noise level, with 0 for clean segments."""
    return u_L if layout.levels is None else u_L.masked_fill(layout.levels.clean_L, 0.0)


def shared_level(u: Tensor, layout: SequenceLayout) -> Tensor:
    """Return one path position for every noise level, float64 `[L]` on the layout's device (`u` is on the host).

    A sample has one level, unless its layout has `levels`; clean segments are at 0.
    """
    count = layout.level_layout.num_samples
    return clean_at_0(torch.full((count,), float(u), dtype=torch.float64, device=layout.device), layout)
