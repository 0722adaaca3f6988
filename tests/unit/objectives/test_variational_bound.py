"""The loss of a learned variance against the formulas of the paper, in float64 and with torch's distributions."""

import math

import pytest
import torch
from torch import Tensor
from torch.distributions import Normal, kl_divergence

from dit.objectives.ddpm import DDPM, LearnedVariance, NetworkTime, Prediction
from tests.unit.objectives.packs import noise_for, pack

NUM_STEPS, WEIGHT = 20, 0.01
RTOL = 1e-4  # float32 against float64
SAMPLES = list(range(3, 123))


def cosine_betas() -> Tensor:
    """Nichol and Dhariwal 2021, Eq. 17."""
    f = torch.cos((torch.linspace(0, 1, NUM_STEPS + 1).double() + 0.008) / 1.008 * math.pi / 2) ** 2
    return (1 - f[1:] / f[:-1]).clamp(max=0.999)


def bound(steps_T: Tensor, x0_TC: Tensor, eps_TC: Tensor, x0_hat_TC: Tensor, v_TC: Tensor) -> Tensor:
    """Return L_vlb of each token at its step, in bits per dimension and float64.

    L_t = KL(q(x_{t-1} | x_t, x_0) || p(x_{t-1} | x_t)) with the posterior of Eq. 10 and 11, the variance of Eq. 15, and
    L_0 the discretised decoder of Ho et al. 2020, Eq. 13; one drawn step estimates the sum over all steps.
    """
    betas = cosine_betas()
    bar = (1 - betas).cumprod(0)
    before = torch.cat([torch.ones(1).double(), bar[:-1]])
    tilde = (1 - before) / (1 - bar) * betas
    tilde[0] = tilde[1]  # "clipped", as in the published code: the first value is 0 and has no logarithm
    beta, bar_t, bar_before, tilde_t = (x[steps_T][:, None] for x in (betas, bar, before, tilde))
    x_t = bar_t.sqrt() * x0_TC + (1 - bar_t).sqrt() * eps_TC

    def posterior_mean(x0: Tensor) -> Tensor:
        of_x0 = bar_before.sqrt() * beta / (1 - bar_t)
        return of_x0 * x0 + (1 - beta).sqrt() * (1 - bar_before) / (1 - bar_t) * x_t

    share = (v_TC + 1) / 2
    p = Normal(posterior_mean(x0_hat_TC), torch.exp(share * beta.log() + (1 - share) * tilde_t.log()).sqrt())
    divergence = kl_divergence(Normal(posterior_mean(x0_TC), tilde_t.sqrt()), p)
    above = torch.where(x0_TC > 0.999, 1.0, p.cdf(x0_TC + 1 / 255))
    below = torch.where(x0_TC < -0.999, 0.0, p.cdf(x0_TC - 1 / 255))
    is_first_T1 = steps_T[:, None] == 0
    bin_TC = torch.where(is_first_T1, above - below, 1.0)  # in other steps it may be 0, whose logarithm has no gradient
    nats = torch.where(is_first_T1, -bin_TC.log(), divergence)
    return NUM_STEPS * nats.mean(-1) / math.log(2)


def case(prediction: Prediction, network_time: NetworkTime) -> dict[str, Tensor]:
    """Return samples at all steps, the outputs of a nearly perfect network, and the expected values of the paper."""
    ddpm = DDPM(
        **{"prediction": prediction, "network_time": network_time},
        **{"schedule": "cosine", "discrete_steps": NUM_STEPS, "variance": LearnedVariance(vlb_weight=WEIGHT)},
    )
    batch = pack(SAMPLES)
    batch.loss_weight_S = torch.rand(len(SAMPLES), generator=torch.Generator().manual_seed(2)) + 0.5
    noise = noise_for(batch)
    prepared = ddpm.prepare(batch, noise)
    generator = torch.Generator().manual_seed(1)
    output_TC, v_TC = (torch.randn(prepared.target_TC.shape, generator=generator) for _ in range(2))
    outputs_TC = torch.cat([prepared.target_TC + 0.05 * output_TC, v_TC], -1).requires_grad_()
    total, _, terms = ddpm.loss(outputs_TC, prepared, batch.layout)

    steps_T = batch.layout.per_token((noise.level_S().double() * NUM_STEPS).long())[:, 0]
    assert set(steps_T.tolist()) == set(range(NUM_STEPS))
    weight_T = batch.layout.per_token(batch.loss_weight_S)[:, 0].double()
    x0_TC, eps_TC = batch.latents_TC.double(), noise.normal_TC("eps", 4).double()
    expected_TC = outputs_TC.detach().double().requires_grad_()
    mean_TC, v_TC = expected_TC.chunk(2, -1)
    bar_T1 = (1 - cosine_betas()).cumprod(0)[steps_T][:, None]
    alpha_T1, sigma_T1 = bar_T1.sqrt(), (1 - bar_T1).sqrt()
    x_TC = alpha_T1 * x0_TC + sigma_T1 * eps_TC
    targets = {"noise": eps_TC, "x0": x0_TC, "v": alpha_T1 * eps_TC - sigma_T1 * x0_TC}
    estimates = {
        "noise": (x_TC - sigma_T1 * mean_TC) / alpha_T1,
        "x0": mean_TC,
        "v": alpha_T1 * x_TC - sigma_T1 * mean_TC,
    }
    simple = ((mean_TC - targets[prediction]).square().mean(-1) * weight_T).sum()
    vlb = (bound(steps_T, x0_TC, eps_TC, estimates[prediction].detach(), v_TC) * weight_T).sum()
    return {
        "total": total,
        "gradient": torch.autograd.grad(total, outputs_TC)[0],
        "terms": torch.stack([terms["simple"], terms["vlb"]]),
        "expected": simple + WEIGHT * vlb,
        "expected gradient": torch.autograd.grad(simple + WEIGHT * vlb, expected_TC)[0],
        "expected terms": torch.stack([simple, WEIGHT * vlb]),
    }


@pytest.mark.parametrize(("prediction", "network_time"), [("noise", "time"), ("x0", "time"), ("v", "log_snr")])
def test_the_hybrid_loss_equals_that_of_the_paper(prediction, network_time):
    """L_hybrid = L_simple + lambda L_vlb and its gradient at every step of a table; only L_simple trains the mean."""
    found = case(prediction, network_time)
    for name in ("total", "terms", "gradient"):
        given, expected = found[name].double(), found["expected" if name == "total" else f"expected {name}"]
        torch.testing.assert_close(given, expected.double(), rtol=RTOL, atol=1e-5)


def test_min_snr_weights_only_the_simple_loss():
    """The bound of each sample does not change; its simple loss is that of the noise times min(SNR, gamma) / SNR."""
    settings = {"schedule": "cosine", "discrete_steps": NUM_STEPS, "variance": LearnedVariance(vlb_weight=WEIGHT)}
    batch = pack(SAMPLES)
    batch.loss_weight_S = torch.rand(len(SAMPLES), generator=torch.Generator().manual_seed(2)) + 0.5
    losses = []
    for gamma in (None, 0.5):
        ddpm = DDPM(min_snr_gamma=gamma, **settings)
        prepared = ddpm.prepare(batch, noise_for(batch))
        outputs_TC = torch.zeros(len(prepared.target_TC), 2 * prepared.target_TC.shape[1])
        terms = ddpm.loss_terms(outputs_TC, prepared, batch.layout)
        losses.append({name: term.sum_per_level(batch.layout) for name, term in terms.items()})
    bar_S = (1 - cosine_betas()).cumprod(0)[(noise_for(batch).level_S().double() * NUM_STEPS).long()]
    snr_S = (bar_S / (1 - bar_S)).float()
    assert torch.equal(losses[0]["vlb"], losses[1]["vlb"])
    torch.testing.assert_close(losses[1]["simple"], losses[0]["simple"] * snr_S.clamp(max=0.5) / snr_S)
