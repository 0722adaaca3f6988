"""Objectives on samples with several noise levels: EDM and DDPM against the papers, and every objective per token."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from dit.batch import PackedBatch
from dit.layout import CLEAN
from dit.levels import with_levels
from dit.objectives.addressed_noise import AddressedNoise
from dit.objectives.base import Objective
from dit.objectives.ddpm import DDPM, LearnedVariance
from dit.objectives.edm import EDM
from dit.objectives.flow_matching import FlowMatching
from tests.unit.objectives.packs import noise_for, pack

LENGTHS = [5, 3, 7]
SEGMENTS = [[(2, CLEAN), (3, 0)], [], [(1, 0), (2, CLEAN), (4, 2)]]
NUMBERS = [CLEAN, CLEAN, 0, 0, 0, None, 0, 0, 0, None, 0, CLEAN, CLEAN, 2, 2, 2, 2, None]
"""Number of the level of each token; None for padding."""
SAMPLES = [0] * 6 + [1] * 4 + [2] * 8
WEIGHTS = (1.0, 2.0, 0.5)
RTOL = 2e-5  # float32 against float64
VARIANCE = LearnedVariance(vlb_weight=0.01)
OBJECTIVES: list[Objective] = [
    EDM(),
    EDM(sigma_data=1.0, p_mean=0.0),
    *(
        DDPM(prediction=prediction, network_time=time, discrete_steps=steps)
        for prediction in ("noise", "x0", "v")
        for time in ("time", "log_snr")
        for steps in (None, 1000)
    ),
    *(DDPM(prediction=prediction, min_snr_gamma=5.0) for prediction in ("noise", "x0", "v")),
    DDPM(noise_offset=0.3),
]
OTHERS: list[Objective] = [
    FlowMatching(),
    FlowMatching(prediction="x0", time_shift=3.0, min_time=0.2),
    *(
        DDPM(prediction=prediction, schedule="cosine", discrete_steps=20, variance=VARIANCE)
        for prediction in ("noise", "x0", "v")
    ),
]


def leveled_pack() -> PackedBatch:
    """Three samples of 5, 3 and 7 tokens, padded to even numbers, with clean tokens and two levels in the last."""
    batch = pack(LENGTHS, multiple_of=2)
    batch.loss_weight_S = torch.tensor(WEIGHTS)
    return replace(batch, layout=with_levels(batch.layout, SEGMENTS))


class AtNumber(AddressedNoise):
    """The noise of samples that have one level, that of a number."""

    def __init__(self, batch: PackedBatch, number: int) -> None:
        plain = replace(batch.layout, levels=None)
        super().__init__(1234, 0, batch.sample_ids_S, plain)
        self.number = number

    def quantile_S(self, number: int) -> Tensor:
        return super().quantile_S(self.number)


def published(objective: EDM | DDPM, quantile: float, x0: Tensor, eps: Tensor) -> tuple[Tensor, float, Tensor, float]:
    """Return input, time, target and weight of one token in float64; at a quantile of 0 it is clean.

    The weighted squared error of the output has the value of the paper's loss.

    Source: Karras et al. 2022, Table 1: c_in x, log(sigma) / 4, and lambda (D - x0)**2 with D = c_skip x + c_out F, so
    F* = (x0 - c_skip x) / c_out and the weight is lambda c_out**2. Ho et al. 2020, Eq. 4 and 14, with their betas; the
    continuous schedule is Imagen's, log SNR = -log(expm1(1e-4 + 10 t**2)). Min-SNR: Hang et al. 2023, section 3.4.
    """
    if isinstance(objective, EDM):
        data = objective.sigma_data
        if not quantile:
            return x0 / data, math.log(0.002) / 4, x0, 0.0
        z = float(torch.special.ndtri(torch.tensor(quantile, dtype=torch.float64)))
        sigma = math.exp(objective.p_mean + objective.p_std * z)
        x, total = x0 + sigma * eps, sigma**2 + data**2
        c_skip, c_out, c_in = data**2 / total, sigma * data / math.sqrt(total), 1 / math.sqrt(total)
        return c_in * x, math.log(sigma) / 4, (x0 - c_skip * x) / c_out, total / (sigma * data) ** 2 * c_out**2
    if objective.discrete_steps is None:
        time, signal = quantile, math.exp(-(1e-4 + 10 * quantile**2))
    else:
        step = math.floor(quantile * 1000)
        betas = torch.linspace(1e-4, 0.02, 1000, dtype=torch.float64)
        time, signal = step / 1000, float((1 - betas).cumprod(0)[step])
    if not quantile:
        return x0, 0.0 if objective.network_time == "time" else 20.0, x0, 0.0
    alpha, sigma = math.sqrt(signal), math.sqrt(1 - signal)
    snr = signal / (1 - signal)
    target = {"noise": eps, "x0": x0, "v": alpha * eps - sigma * x0}[objective.prediction]
    weight = 1.0
    if objective.min_snr_gamma is not None:
        weight = min(snr, objective.min_snr_gamma) / {"noise": snr, "x0": 1.0, "v": snr + 1}[objective.prediction]
    time = time if objective.network_time == "time" else math.log(snr)
    return alpha * x0 + sigma * eps, time, target, weight


@pytest.mark.parametrize("objective", OBJECTIVES, ids=repr)
def test_every_token_has_the_published_formulas_of_its_level(objective: EDM | DDPM) -> None:
    """Input, time, target, loss and its gradient; clean tokens are inputs without noise, and do not count."""
    batch = leveled_pack()
    noise = noise_for(batch)
    prepared = objective.prepare(batch, noise)
    output_TC = torch.randn(len(NUMBERS), 4, generator=torch.Generator().manual_seed(3)).requires_grad_()
    total, count, _ = objective.loss(output_TC, prepared, batch.layout)
    x0_TC, eps_TC = batch.latents_TC.double(), noise.normal_TC("eps", 4).double()
    if isinstance(objective, DDPM) and objective.noise_offset:
        eps_TC = eps_TC + 0.3 * batch.layout.per_token(noise.normal_SC("offset", 4))
    times_T = batch.layout.level_layout.per_token(prepared.time_S)[:, 0]
    expected = torch.zeros((), dtype=torch.float64)
    for token, (sample, number) in enumerate(zip(SAMPLES, NUMBERS)):
        if number is None:
            continue
        quantile = 0.0 if number == CLEAN else float(noise.uniform_S(f"level {number}" if number else "level")[sample])
        inputs_C, time, target_C, weight = published(objective, quantile, x0_TC[token], eps_TC[token])
        torch.testing.assert_close(prepared.inputs_TC[token].double(), inputs_C, rtol=RTOL, atol=1e-5)
        assert float(times_T[token]) == pytest.approx(time, rel=RTOL, abs=1e-6)
        if number != CLEAN:
            torch.testing.assert_close(prepared.target_TC[token].double(), target_C, rtol=RTOL, atol=1e-5)
        error = (output_TC[token].double() - target_C).square().mean()
        expected = expected + weight * WEIGHTS[sample] * error
    assert float(total) == pytest.approx(float(expected), rel=RTOL)
    assert int(count) == 11
    gradients = (torch.autograd.grad(loss, output_TC)[0] for loss in (total, expected))
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("objective", [*OBJECTIVES, *OTHERS], ids=repr)
def test_a_token_counts_as_in_a_sample_of_its_level(objective: Objective) -> None:
    """Every term equals that of a pack whose samples have this level only; clean tokens have no term."""
    batch = leveled_pack()
    prepared = objective.prepare(batch, noise_for(batch))
    columns = 4 * objective.num_outputs
    output_TC = torch.randn(len(NUMBERS), columns, generator=torch.Generator().manual_seed(3))
    terms = objective.loss_terms(output_TC, prepared, batch.layout)
    own = {
        name: term.error_T * batch.layout.level_layout.per_token(term.weight_L)[:, 0] for name, term in terms.items()
    }
    for number in (0, 2):
        noise = AtNumber(batch, number)
        plain = replace(batch, layout=noise.layout)
        single = objective.prepare(plain, noise)
        rows = [token for token, other in enumerate(NUMBERS) if other == number]
        assert torch.equal(prepared.inputs_TC[rows], single.inputs_TC[rows])
        for name, term in objective.loss_terms(output_TC, single, noise.layout).items():
            expected_T = term.error_T * noise.layout.per_token(term.weight_L)[:, 0]
            torch.testing.assert_close(own[name][rows], expected_T[rows], rtol=1e-6, atol=0)
            assert expected_T[rows].all()
    assert not any(error_T[~batch.layout.noised_T].any() for error_T in own.values())
    assert all(error_T.isfinite().all() for error_T in own.values())
