"""The autoencoding objective: its loss in float64 by the textbook, its noise by address, and refused settings."""

import re

import pytest
import torch
from torch.distributions import Normal, kl_divergence

from dit.errors import ConfigError
from dit.objectives.autoencoding import Autoencoding
from dit.objectives.base import Prepared
from tests.unit.objectives.packs import noise_for, pack, run_config

CHANNELS, LATENT = 12, 3
RTOL = 1e-6  # float32


def outputs(tokens: int) -> torch.Tensor:
    """Return a reconstruction, a mean and a log variance; the log variance is not small."""
    values = torch.randn(tokens, CHANNELS + 2 * LATENT, generator=torch.Generator().manual_seed(1))
    values[:, -LATENT:] *= 3
    return values


@pytest.mark.parametrize(("kind", "power"), [("l1", 1), ("l2", 2)])
def test_the_loss_is_the_weighted_lower_bound_per_pixel_value(kind, power):
    """Compared with float64 and torch's KL; padding may have any values."""
    batch = pack([3, 5], CHANNELS, multiple_of=4)
    weights = torch.tensor([0.5, 2.0])
    batch.loss_weight_S = weights
    objective = Autoencoding(loss_kind=kind, kl_weight=0.3)
    prepared = objective.prepare(batch, noise_for(batch))
    out_TC = outputs(batch.layout.total_tokens)
    out_TC[~batch.layout.valid_T] = float("nan")
    total, count, logs = objective.loss(out_TC, prepared, batch.layout)
    exact = {"error": 0.0, "kl": 0.0}
    for token in batch.layout.valid_T.nonzero()[:, 0].tolist():
        x, out = batch.latents_TC[token].double(), out_TC[token].double()
        weight = weights[batch.layout.segment_ids_T[token]].item() / CHANNELS
        mean, log_variance = out[CHANNELS:].chunk(2)
        posterior = Normal(mean, log_variance.exp().sqrt())
        exact["error"] += weight * (out[:CHANNELS] - x).abs().pow(power).sum().item()
        exact["kl"] += weight * 0.3 * kl_divergence(posterior, Normal(0.0, 1.0)).sum().item()
    assert count == 8
    assert {name: value.item() for name, value in logs.items()} == pytest.approx(exact, rel=RTOL)
    assert total.item() == pytest.approx(sum(exact.values()), rel=RTOL)


def test_the_network_gets_the_pixels_and_noise_by_address():
    """A sample has the same noise in every pack; another step has other noise."""
    objective, batch, alone = Autoencoding(), pack([3, 5], CHANNELS), pack([5], CHANNELS)
    prepared: Prepared = objective.prepare(batch, noise_for(batch))
    assert torch.equal(prepared.inputs_TC[:, :CHANNELS], batch.latents_TC)
    assert torch.equal(prepared.target_TC, batch.latents_TC)
    noise_TC = prepared.inputs_TC[:, CHANNELS:]
    assert torch.equal(objective.prepare(alone, noise_for(alone)).inputs_TC[:, CHANNELS:], noise_TC[3:])
    assert not torch.isclose(objective.prepare(batch, noise_for(batch, 1)).inputs_TC[:, CHANNELS:], noise_TC).any()


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (["objective=flow_matching"], "AutoencoderConfig do not go together: objective=autoencoding trains"),
        (["model=dit_s"], "DiTConfig do not go together"),
        (["training.sample_interval=5"], "training.sample_interval=5: an autoencoder draws no samples; use 0"),
        (["model.patch_spatial=4"], "patch_spatial=4: 4 resolutions .* compress 8 times; set it to 8"),
        (["model.norm_num_groups=5"], r"block_out_channels=\[.*\] must be multiples of model.norm_num_groups=5"),
        (["model.latent_channels=96"], "latent_channels=96 .* 192 pixel values, .*; use at most 95"),
        (["model.patch_temporal=2"], "model.patch_temporal=2, but each frame is encoded separately"),
    ],
)
def test_settings_that_do_not_fit_are_refused_by_name(settings, says):
    with pytest.raises(ConfigError, match=says):
        run_config("pictogram_autoencoder", *settings).check()


def test_constants_out_of_range_and_sampling_are_refused():
    with pytest.raises(ConfigError, match="loss_kind='l3'"):
        Autoencoding(loss_kind="l3")
    with pytest.raises(ConfigError, match=re.escape("an autoencoder draws no samples: train a model on its latents")):
        Autoencoding().sampling_grid(10)
