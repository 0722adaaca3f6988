"""A network that predicts its variance too is sampled by its mean."""

import torch

from dit.patchify import patchify
from dit.sampling.generate import predicted_mean


def test_the_mean_is_the_first_half_of_the_channels_at_every_position():
    """Patches of (mean, variance) images become the patches of the mean image."""
    both = torch.randn(6, 1, 4, 8, generator=torch.Generator().manual_seed(0))
    prediction, _ = patchify(both, 1, 2)
    mean, _ = patchify(both[:3], 1, 2)
    assert torch.equal(predicted_mean(prediction, mean.shape[1], 3), mean)


def test_a_prediction_of_the_latents_width_is_taken_as_it_is():
    prediction = torch.randn(5, 12)
    assert predicted_mean(prediction, 12, 3) is prediction
