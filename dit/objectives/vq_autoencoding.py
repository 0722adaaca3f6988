"""Autoencoding with a codebook: reconstruct pixels from the nearest entries of a learned codebook (VQ autoencoder)."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from dit.layout import SequenceLayout
from dit.objectives.autoencoding import Reconstruction
from dit.objectives.base import Prepared
from dit.objectives.losses import Term, token_error
from dit.ranges import NOT_NEGATIVE, ranged


@dataclass(kw_only=True)
class VQAutoencoding(Reconstruction):
    """The loss of a VQ-VAE per pixel value, with the codebook terms of latent diffusion.

    With x of C values in a token, its latent z of D values, the nearest entry e of the codebook, and sg for a stopped
    gradient:

        loss = 1/C sum |x - decode(e)|**p  +  1/D (sum (sg(z) - e)**2 + beta sum (z - sg(e))**2)

    A token is one position of the latent: the patch of the model is the compression of the autoencoder. There is no
    perceptual term, which latent diffusion adds. `loss_code_entropy` logs the entropy of the codes
    of a sample, in nats, so that it does not depend on micro-batches and ranks; the exponential of the entropy is the
    perplexity, the number of entries that a sample uses.

    Args:
        beta: weight of the movement of z to its entry; that of the entry to z is 1.

    Source: van den Oord et al. 2017, arXiv:1711.00937, Eq. 3; Rombach et al. 2022, arXiv:2112.10752, section 3.1 and
    appendix G, "VQ-reg". Some public code multiplies the other term by beta.
    """

    quantizes: ClassVar[bool] = True
    base_terms: ClassVar[tuple[str, ...]] = ("error", "codebook", "commitment")
    base_logged: ClassVar[tuple[str, ...]] = ("code_entropy",)

    beta: float = ranged(0.25, NOT_NEGATIVE)

    def base_loss_terms(self, prediction_TC: Tensor, prepared: Prepared, layout: SequenceLayout) -> dict[str, Term]:
        """Compare the reconstruction with the pixels, and the latents with their entries.

        The prediction has the reconstruction of the local tokens, then z, e and the index of e.
        """
        channels = prepared.target_TC.shape[1]
        z_TC, e_TC = prediction_TC[:, channels:-1].chunk(2, 1)
        errors = {
            "error": token_error(prediction_TC[:, :channels], prepared.target_TC, layout, self.loss_kind),
            "codebook": token_error(e_TC, z_TC.detach(), layout, "l2"),
            "commitment": self.beta * token_error(z_TC, e_TC.detach(), layout, "l2"),
        }
        entropy = Term(surprisal(prediction_TC[:, -1], layout), torch.ones_like(prepared.weight_S))
        return {name: Term(error_T, prepared.weight_S) for name, error_T in errors.items()} | {"code_entropy": entropy}


@torch.no_grad()
def surprisal(code_T: Tensor, layout: SequenceLayout) -> Tensor:
    """Return -log of the share of a sample's tokens that have the code of each token, float32 `[T]`; 0 in padding.

    The mean over the tokens of a sample is the entropy of its codes.
    """
    code_T = torch.where(layout.valid_T, code_T, -1.0).long() + (layout.segment_ids_T.long() << 32)
    sorted_T = code_T.sort().values
    count_T = torch.searchsorted(sorted_T, code_T, right=True) - torch.searchsorted(sorted_T, code_T)
    return torch.where(layout.valid_T, -torch.log(count_T / layout.per_token(layout.lengths_S)[:, 0]), 0.0)
