"""Zero terminal SNR and offset noise of DDPM, against their formulas and diffusers."""

import math
from dataclasses import replace

import pytest
import torch
from diffusers.schedulers.scheduling_ddim import rescale_zero_terminal_snr

from dit.batch import PackedBatch
from dit.errors import ConfigError
from dit.layout import SequenceLayout
from dit.objectives.addressed_noise import AddressedNoise
from dit.objectives.ddpm import DDPM
from dit.objectives.noise_levels import TableSchedule, discrete_betas, zero_terminal_snr
from dit.patchify import unpatchify
from tests.support.batches import pack_of

TABLES = [("linear", 1000), ("scaled_linear", 1000), ("cosine", 100), ("linear", 50)]
ROUNDING = 1e-12  # float64
CHANNELS, PATCH, GRID = 3, 2, (1, 4, 6)
TOKENS = 24
STRENGTH = 0.25


@pytest.mark.parametrize(("name", "steps"), TABLES)
def test_zero_terminal_snr_changes_the_last_step_and_keeps_the_first(name, steps):
    """The new alpha is an affine function of the old one; the betas are those of diffusers."""
    betas = discrete_betas(name, steps)
    before, after = (TableSchedule(x).angles(torch.device("cpu")).cos() for x in (betas, zero_terminal_snr(betas)))
    assert after[-1] < ROUNDING
    assert float(after[0]) == pytest.approx(float(before[0]), abs=ROUNDING)
    line = (before - before[-1]) / (before[0] - before[-1])
    torch.testing.assert_close(after / after[0], line, rtol=0, atol=1e-9)
    torch.testing.assert_close(zero_terminal_snr(betas), rescale_zero_terminal_snr(betas), rtol=0, atol=ROUNDING)


def test_sampling_starts_at_the_last_step_as_pure_noise():
    """The network gets the time of that step, and the start is noise of standard deviation 1, without x0."""
    objective = DDPM(schedule="scaled_linear", discrete_steps=1000, prediction="v", zero_terminal_snr=True)
    plain = DDPM(schedule="scaled_linear", discrete_steps=1000, prediction="v")
    for steps in (1, 4, 50):
        start = objective.sampling_grid(steps)[0]
        assert [float(x) for x in objective.path.alpha_sigma(start)] == pytest.approx([0, 1], abs=ROUNDING)
        assert float(objective.noise_schedule.time(start)) == 0.999
    assert plain.path.alpha_sigma(plain.sampling_grid(4)[0])[0] > 0.06
    layout = SequenceLayout.from_lengths([5])
    times = []

    def network(inputs_TC, time_S):
        times.append(float(time_S[0]))
        return -7 * torch.ones_like(inputs_TC)

    x0 = objective.denoise(network, torch.randn(5, 2), objective.sampling_grid(4)[0], layout)
    torch.testing.assert_close(x0, 7 * torch.ones(5, 2))  # v = -x0 where alpha is 0
    assert times == pytest.approx([0.999])


@pytest.mark.parametrize("settings", [{"prediction": "noise", "discrete_steps": 1000}, {"prediction": "v"}])
def test_zero_terminal_snr_needs_a_table_and_a_prediction_that_leaves_pure_noise(settings):
    with pytest.raises(ConfigError, match="use discrete_steps=1000 and prediction=v"):
        DDPM(zero_terminal_snr=True, **settings)


def pack(count: int) -> PackedBatch:
    layout = SequenceLayout.from_lengths([math.prod(GRID)] * count)
    latents_TC = torch.randn(layout.total_tokens, CHANNELS * PATCH**2, generator=torch.Generator().manual_seed(0))
    return pack_of(layout, latents_TC, [GRID] * count, sample_ids_S=torch.arange(count) + 2**40)


def noise_of(batch: PackedBatch, seed=3) -> AddressedNoise:
    return AddressedNoise(seed, 5, batch.sample_ids_S, batch.layout, latent_channels=CHANNELS)


def test_offset_noise_is_a_constant_for_each_channel_of_each_sample():
    """The noise is the noise without an offset, plus strength times a standard normal number."""
    batch = pack(600)
    plain, offset = (
        DDPM(prediction="noise", noise_offset=strength).prepare(batch, noise_of(batch)).target_TC
        for strength in (0.0, STRENGTH)
    )
    added_TC = (offset - plain) / STRENGTH
    pictures = torch.stack([unpatchify(x, GRID, 1, PATCH) for x in added_TC.split(TOKENS)])
    assert pictures.shape[1:] == (CHANNELS, 1, GRID[1] * PATCH, GRID[2] * PATCH)
    numbers = pictures.mean((2, 3, 4))
    torch.testing.assert_close(pictures, numbers[:, :, None, None, None].expand_as(pictures), rtol=0, atol=1e-5)
    assert abs(numbers.mean()) < 4 / math.sqrt(numbers.numel())
    assert float(numbers.var()) == pytest.approx(1, abs=4 * math.sqrt(2 / numbers.numel()))
    assert (numbers.T @ numbers / len(numbers)).tril(-1).abs().max() < 4 / math.sqrt(len(numbers))
    alike = (numbers[:, :, None] * plain.view(600, TOKENS, -1).mean(1)[:, None]).mean(0) * math.sqrt(TOKENS)
    assert alike.abs().max() < 4.5 / math.sqrt(600)


@pytest.mark.parametrize("prediction", ["noise", "x0", "v"])
@pytest.mark.parametrize("seed", [3, torch.tensor([2**40 + 1, 2**62, 5])], ids=["one seed", "a seed each"])
def test_offset_noise_is_the_same_on_every_layout(prediction, seed):
    """The tokens of a context-parallel rank get the offsets of the full pack; so does a sample in another pack."""
    batch, objective = pack(3), DDPM(prediction=prediction, noise_offset=STRENGTH)
    full = objective.prepare(batch, noise_of(batch, seed=seed))
    rows = torch.tensor([70, 3, 24, 25, 11, 50])
    tokens = {"latents_TC": batch.latents_TC[rows], "positions_T3": batch.positions_T3[rows]}
    part = replace(batch, layout=batch.layout.select(rows), **tokens)
    local = objective.prepare(part, noise_of(part, seed=seed))
    for name in ("inputs_TC", "target_TC"):
        assert torch.equal(getattr(local, name), getattr(full, name)[rows])
    one = pack(1)
    one.latents_TC, one.sample_ids_S = batch.latents_TC[TOKENS : 2 * TOKENS], batch.sample_ids_S[1:2]
    alone = objective.prepare(one, noise_of(one, seed=seed if isinstance(seed, int) else seed[1:2]))
    assert torch.equal(alone.inputs_TC, full.inputs_TC[TOKENS : 2 * TOKENS])
