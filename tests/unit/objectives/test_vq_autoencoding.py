"""The objective of VQ autoencoders: its loss in float64 by the paper, its gradients, and the entropy of the codes."""

import math

import pytest
import torch

from dit.errors import ConfigError
from dit.layout import SequenceLayout
from dit.objectives.vq_autoencoding import VQAutoencoding, surprisal
from tests.unit.objectives.packs import noise_for, pack, run_config

CHANNELS, LATENT = 12, 3
RTOL = 1e-6  # float32


def test_the_loss_equals_that_of_the_paper_and_each_term_trains_one_side():
    """||sg(z) - e||^2 trains the entries, beta ||z - sg(e)||^2 the encoder; padding may have any values."""
    batch = pack([3, 5], CHANNELS, multiple_of=4)
    weights = torch.tensor([0.5, 2.0])
    batch.loss_weight_S = weights
    objective = VQAutoencoding(loss_kind="l2", beta=0.2)
    prepared = objective.prepare(batch, noise_for(batch))
    assert torch.equal(prepared.inputs_TC, batch.latents_TC)
    generator = torch.Generator().manual_seed(1)
    out_TC = torch.randn(batch.layout.total_tokens, CHANNELS + 2 * LATENT + 1, generator=generator)
    out_TC[~batch.layout.valid_T] = float("nan")
    out_TC.requires_grad_()
    total, count, logs = objective.loss(out_TC, prepared, batch.layout)
    total.backward()
    exact, gradient_TC = {"error": 0.0, "codebook": 0.0, "commitment": 0.0}, torch.zeros_like(out_TC).double()
    for token in batch.layout.valid_T.nonzero()[:, 0].tolist():
        x, out = batch.latents_TC[token].double(), out_TC[token].detach().double()
        weight = weights[batch.layout.segment_ids_T[token]].item()
        decoded, z, e = out[:CHANNELS], out[CHANNELS : CHANNELS + LATENT], out[CHANNELS + LATENT : -1]
        exact["error"] += weight * (decoded - x).square().mean().item()
        exact["codebook"] += weight * (z - e).square().mean().item()
        exact["commitment"] += weight * 0.2 * (z - e).square().mean().item()
        parts = (2 / CHANNELS * (decoded - x), 0.2 * 2 / LATENT * (z - e), 2 / LATENT * (e - z))
        gradient_TC[token, :-1] = weight * torch.cat(parts)
    assert count == 8
    assert {name: logs[name].item() for name in objective.terms} == pytest.approx(exact, rel=RTOL)
    assert total.item() == pytest.approx(sum(exact.values()), rel=RTOL)
    torch.testing.assert_close(out_TC.grad, gradient_TC.float())


def test_the_logged_entropy_is_that_of_the_codes_in_a_sample():
    """Codes 7, 2, 7 and 7, 7: shares 2/3 and 1/3, and 1; the loss weights do not matter."""
    layout = SequenceLayout.from_lengths([3, 2], multiple_of=4)
    code_T = torch.tensor([7.0, 2.0, 7.0, float("nan"), 7.0, 7.0, 7.0, 7.0])
    exact = -(2 * math.log(2 / 3) + math.log(1 / 3))
    assert surprisal(code_T, layout).sum().item() == pytest.approx(exact, rel=RTOL)
    assert not surprisal(code_T, layout)[~layout.valid_T].any()
    batch = pack([3, 5], CHANNELS)
    batch.loss_weight_S = torch.tensor([0.5, 2.0])
    objective = VQAutoencoding()
    out_TC = torch.zeros(8, CHANNELS + 2 * LATENT + 1)
    out_TC[:, -1] = torch.arange(8)
    _, _, logs = objective.loss(out_TC, objective.prepare(batch, noise_for(batch)), batch.layout)
    assert logs["code_entropy"].item() == pytest.approx(3 * math.log(3) + 5 * math.log(5), rel=RTOL)


def test_the_logged_entropy_does_not_depend_on_micro_batches():
    code_T = torch.randint(4, (12,), generator=torch.Generator().manual_seed(0)).float()
    together = surprisal(code_T, SequenceLayout.from_lengths([4, 5, 3]))
    separate = [surprisal(part, SequenceLayout.from_lengths([len(part)])) for part in code_T.split([4, 5, 3])]
    assert torch.equal(together, torch.cat(separate))


@pytest.mark.parametrize(
    ("recipe", "settings", "message"),
    [
        ("pictogram_vq_autoencoder", ["objective=autoencoding"], "do not go together: .*vq_autoencoding one with it"),
        ("pictogram_vq_autoencoder", ["model.codebook_size=none"], "VQAutoencoding.* do not go together"),
        ("pictogram_autoencoder", ["model.codebook_size=16"], "Autoencoding.* do not go together"),
        ("tiny_dit", ["objective=vq_autoencoding"], "DiTConfig do not go together"),
        ("pictogram_vq_autoencoder", ["model.shift_factor=0.5"], "shift_factor=0.5: .* without a shift"),
        ("pictogram_vq_autoencoder", ["training.sample_interval=5"], "an autoencoder draws no samples"),
    ],
)
def test_settings_that_do_not_fit_are_refused_by_name(recipe, settings, message):
    with pytest.raises(ConfigError, match=message):
        run_config(recipe, *settings).check()
