"""Autoencoding: reconstruct pixels from a latent whose posterior stays close to a standard normal (KL autoencoder)."""

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar, NoReturn, Optional

import torch
from torch import Tensor

from dit.auxiliary import NO_NETWORKS, AuxiliaryNetworks
from dit.batch import PackedBatch
from dit.errors import ConfigError
from dit.layout import SequenceLayout
from dit.objectives.addressed_noise import LATENT_NOISE, AddressedNoise
from dit.objectives.adversarial import NUM_SCORES, Adversarial
from dit.objectives.base import Objective, Prepared, sample_weights
from dit.objectives.losses import LossKind, Term, token_error
from dit.ranges import NOT_NEGATIVE, ranged


@dataclass(kw_only=True)
class Reconstruction(Objective):
    """An objective of autoencoders: there is no noising path, and no samples are drawn.

    Attributes:
        adversarial: adversarial loss (`adversarial`).
        base_terms, base_logged: summands of the loss and other logged terms, without those of the adversarial loss.
    """

    reconstructs: ClassVar[bool] = True
    base_terms: ClassVar[tuple[str, ...]]
    base_logged: ClassVar[tuple[str, ...]] = ()

    loss_kind: LossKind = "l1"
    adversarial: Optional[Adversarial] = None

    @property
    def terms(self) -> tuple[str, ...]:
        return (*self.base_terms, *(() if self.adversarial is None else self.adversarial.terms))

    @property
    def logged(self) -> tuple[str, ...]:
        return (*self.terms, *self.base_logged, *(() if self.adversarial is None else self.adversarial.logged))

    @property
    def auxiliary(self) -> AuxiliaryNetworks:
        if self.adversarial is None:
            return NO_NETWORKS
        part = self.adversarial
        return AuxiliaryNetworks(discriminator=part, start_step=part.start_step, lr_factor=part.lr_factor)

    def prepare(self, batch: PackedBatch, noise: AddressedNoise) -> Prepared:
        """Return the pixels as inputs and target, times of zero, and the batch's loss weights."""
        x_TC, weight_S, part = batch.latents_TC.float(), sample_weights(batch), self.adversarial
        return Prepared(
            inputs_TC=self.inputs(x_TC, noise),
            time_S=torch.zeros_like(weight_S),
            target_TC=x_TC,
            weight_S=weight_S,
            adversarial_weight_S=None if part is None else part.weight_S(weight_S, noise.step_1),
        )

    def inputs(self, x_TC: Tensor, noise: AddressedNoise) -> Tensor:
        """Return the inputs of the network."""
        return x_TC

    def loss_terms(self, prediction_TC: Tensor, prepared: Prepared, layout: SequenceLayout) -> dict[str, Term]:
        """Compare the reconstruction with the pixels, and add the terms of the latents and of the discriminator.

        The prediction has the reconstruction of the local tokens, then the columns of their latents, then scores.
        """
        if self.adversarial is None:
            return self.base_loss_terms(prediction_TC, prepared, layout)
        prediction_TC, scores_TC = prediction_TC[:, :-NUM_SCORES], prediction_TC[:, -NUM_SCORES:]
        y_TC = prediction_TC[:, : prepared.target_TC.shape[1]]
        adversarial = self.adversarial.loss_terms(scores_TC, y_TC, prepared, layout, self.loss_kind)
        return self.base_loss_terms(prediction_TC, prepared, layout) | adversarial

    @abstractmethod
    def base_loss_terms(self, prediction_TC: Tensor, prepared: Prepared, layout: SequenceLayout) -> dict[str, Term]:
        """Return the terms without those of the discriminator."""

    def denoise(self, *_: object, **__: object) -> NoReturn:
        """Refuse: there is no noising path."""
        raise ConfigError(
            "an autoencoder draws no samples: train a model on its latents (python -m launch.export --format diffusers "
            "writes it, python -m energon_data.prepare ... --vae encodes with it)"
        )

    sampling_grid = denoise


@dataclass(kw_only=True)
class Autoencoding(Reconstruction):
    """The negative evidence lower bound of a Gaussian posterior per pixel value, with a weighted KL term.

    With x of C values in a token, posterior N(mean, exp(logvar)) of its latent, and z = mean + exp(logvar / 2) eps:

        loss = 1/C sum |x - decode(z)|**p  +  kl_weight/C * 1/2 sum (mean**2 + exp(logvar) - 1 - logvar)

    A token is one position of the latent: the patch of the model is the compression of the autoencoder. The network
    receives eps after the pixels; without eps it decodes the mean. There is no perceptual term.

    Args:
        kl_weight: weight of the KL term.

    Source: Kingma and Welling 2014, arXiv:1312.6114, Eq. 7, 10 and appendix B; Rombach et al. 2022, arXiv:2112.10752,
    section 3.1 and appendix G, "KL-reg".
    """

    base_terms: ClassVar[tuple[str, ...]] = ("error", "kl")

    kl_weight: float = ranged(1e-6, NOT_NEGATIVE)

    def inputs(self, x_TC: Tensor, noise: AddressedNoise) -> Tensor:
        """Return the pixels, then noise of the same width, of which the network reads the width of its latent."""
        return torch.cat([x_TC, noise.normal_TC(LATENT_NOISE, x_TC.shape[-1])], 1)

    def base_loss_terms(self, prediction_TC: Tensor, prepared: Prepared, layout: SequenceLayout) -> dict[str, Term]:
        """Compare the reconstruction with the pixels, and the posterior with a standard normal.

        The prediction has the reconstruction of the local tokens, then mean and log variance of their latent.
        """
        channels = prepared.target_TC.shape[1]
        reconstruction_TC, posterior_TC = prediction_TC[:, :channels], prediction_TC[:, channels:]
        error_T = token_error(reconstruction_TC, prepared.target_TC, layout, self.loss_kind)
        mean_TC, logvar_TC = torch.where(layout.valid_T[:, None], posterior_TC.float(), 0.0).chunk(2, 1)
        kl_T = self.kl_weight / channels * (0.5 * (mean_TC.square() + logvar_TC.exp() - 1 - logvar_TC).sum(1))
        return {"error": Term(error_T, prepared.weight_S), "kl": Term(kl_T, prepared.weight_S)}
