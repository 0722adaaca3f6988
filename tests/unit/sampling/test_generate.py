"""Calls of `generate` to the network, and its draws of noise, step by step."""

import math
from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from dit.batch import PackedBatch
from dit.errors import ConfigError
from dit.models.dit.config import DiTConfig
from dit.objectives.addressed_noise import AddressedNoise
from dit.objectives.base import Objective
from dit.objectives.ddpm import DDPM, LearnedVariance
from dit.objectives.flow_matching import FlowMatching
from dit.sampling.generate import empty_pack
from dit.settings import SamplingConfig
from tests.support.batches import generate

SPEC = DiTConfig(patch_spatial=1, num_classes=3, context_size=2).batch_spec()
LABELS = [2, 0]
TEXTS, NEGATIVE = ([torch.full((length, 2), value) for length in (1, 3)] for value in (1.0, -1.0))


def pack(side: int = 2) -> PackedBatch:
    return empty_pack(SPEC, (1, side, side), 2, torch.device("cpu"), {"label": LABELS, "context": TEXTS})


def by_condition(inputs_TC: Tensor, time_S: Tensor, batch: PackedBatch) -> Tensor:
    """Predict class + 10 x mean of the text in every element; a dropped text counts as 5."""
    text = batch.conditions["context"]
    texts = text.layout.sum_per_sample(text.values).mean(-1) / torch.tensor(text.layout.lengths)
    if text.dropped_S is not None:
        texts = torch.where(text.dropped_S, 5.0, texts)
    return batch.layout.per_token(batch.conditions["label"].values + 10 * texts).expand_as(inputs_TC)


def drawn(negative: Sequence[Tensor] | None, scale: float) -> Tensor:
    given = None if negative is None else {"context": negative}
    settings = {"solver": "euler", "num_steps": 3, "guidance_scale": scale, "seed": 0}
    return generate(
        by_condition, FlowMatching(prediction="x0"), pack(), SPEC, SamplingConfig(**settings), negative=given
    )


def test_the_unconditional_branch_has_no_class_and_no_text_or_the_negative_one():
    """uncond + g (cond - uncond), with a network that predicts a constant, which is then the sample."""
    for negative, uncond in ((None, 3 + 10 * 5.0), (NEGATIVE, 3 - 10 * 1.0)):
        for scale in (0.0, 2.5):
            samples = drawn(negative, scale)
            for sample, label in zip(samples, LABELS):
                cond = label + 10 * 1.0
                torch.testing.assert_close(sample, torch.full_like(sample, uncond + scale * (cond - uncond)))
    assert [float(sample.mean()) for sample in drawn(None, 1.0)] == [label + 10.0 for label in LABELS]


def test_every_step_of_a_stochastic_solver_draws_new_noise():
    """With a clean estimate of 0, a step is alpha s**2 / (alpha_s sigma**2) x plus noise that no earlier step used.

    Source: Ho et al. 2020, arXiv:2006.11239, Eq. 7, for any alpha and sigma and the next deviation s.
    """
    objective, states = DDPM(prediction="x0", schedule="cosine"), []

    def nothing(inputs_TC: Tensor, time_S: Tensor, batch: PackedBatch) -> Tensor:
        states.append(inputs_TC.double())
        return torch.zeros_like(inputs_TC)

    sampling = SamplingConfig(solver="ancestral", num_steps=4, guidance_scale=1.0, seed=0)
    generate(nothing, objective, pack(side=16), SPEC, sampling)
    levels = [objective.path.alpha_sigma(u) for u in objective.sampling_grid(4)[:-1]]
    drawn_by_step = [states[0]]
    for (before, after), ((alpha, sigma), (alpha_s, s)) in zip(pairwise(states), pairwise(levels)):
        drawn_by_step.append(after - alpha * s**2 / (alpha_s * sigma**2) * before)
    correlation = torch.corrcoef(torch.stack([x_TC.flatten() for x_TC in drawn_by_step]))
    assert (correlation - torch.eye(4)).abs().max() < 4 / math.sqrt(states[0].numel())


def test_guidance_applies_to_the_first_channels_of_the_mean_and_not_to_the_variance():
    """As in facebookresearch/DiT: by default, 3 of 4 channels of the mean are guided, and no channel of the variance.

    The first of two steps draws noise: x = mean + small**(1 - w) large**w z, with w of the conditional network.
    """
    spec = DiTConfig(patch_spatial=2, num_classes=3).batch_spec()
    objective = DDPM(prediction="x0", schedule="cosine", discrete_steps=100, variance=LearnedVariance())
    batch = empty_pack(spec, (1, 4, 4), 2, torch.device("cpu"), {"label": LABELS})
    states: list[Tensor] = []

    def network(inputs_TC: Tensor, time_S: Tensor, batch: PackedBatch) -> Tensor:
        """Predict the class as the mean; as the variance, -1 for class 0, 1 for class 2, and 5 without a class."""
        labels_T1 = batch.layout.per_token(batch.conditions["label"].values.float())
        v_T1 = torch.where(labels_T1 == 3, 5.0, labels_T1 - 1)
        states.append(inputs_TC[: batch.layout.num_local_tokens // 2])
        return torch.cat([labels_T1.expand(-1, 4), v_T1.expand(-1, 4)], 1).repeat(1, 4)

    settings = {"solver": "ancestral", "num_steps": 2, "guidance_scale": 4.0, "seed": 0, "variance": "learned"}
    samples = generate(network, objective, batch, spec, SamplingConfig(guidance_channels=3, **settings))
    for sample, label in zip(samples, LABELS):
        assert torch.equal(sample[:3], torch.full_like(sample[:3], 3 + 4.0 * (label - 3)))
        assert torch.equal(sample[3], torch.full_like(sample[3], label))
    u, u_next, _ = objective.sampling_grid(2)
    (alpha, sigma), (alpha_s, sigma_s) = (objective.path.alpha_sigma(p) for p in (u, u_next))
    beta = sigma**2 - (alpha / alpha_s * sigma_s) ** 2
    start_TC, second_TC = states
    noise = AddressedNoise(0, 1, batch.sample_ids_S, batch.layout).normal_TC("solver", 16)
    labels_T1 = batch.layout.per_token(torch.tensor(LABELS).float())
    guided_TC = (3 + 4.0 * (labels_T1 - 3)).expand(-1, 16).unflatten(1, (4, 4)).clone()
    guided_TC[..., 3] = labels_T1
    x0_weight, kept = alpha_s * beta / sigma**2, alpha / alpha_s * sigma_s**2 / sigma**2
    deviation_T1 = torch.where(labels_T1 == 0, sigma_s / sigma * beta.sqrt(), beta.sqrt())
    expected = x0_weight * guided_TC.flatten(1) + kept * start_TC + deviation_T1 * noise
    torch.testing.assert_close(second_TC.double(), expected, rtol=1e-5, atol=1e-5)


def test_a_variance_that_was_not_learned_is_refused():
    settings = {"solver": "ancestral", "num_steps": 2, "guidance_scale": 1.0, "seed": 0, "variance": "learned"}
    with pytest.raises(ConfigError, match="variance='learned' needs a network with a learned variance"):
        generate(by_condition, FlowMatching(prediction="x0"), pack(), SPEC, SamplingConfig(**settings))


@pytest.mark.parametrize("thresholding", ["none", "static", "dynamic"])
@pytest.mark.parametrize("solver", ["euler", "heun", "ddim", "dpmpp_2m"])
def test_thresholds_limit_the_clean_estimate(thresholding: str, solver: str) -> None:
    """The network predicts 4 for one element and 0.5 for the others; the quantile of a sample is 4 (Imagen, 2.3)."""

    def network(inputs_TC: Tensor, time_S: Tensor, batch: PackedBatch) -> Tensor:
        x0_TC = torch.full_like(inputs_TC, 0.5)
        x0_TC[:: len(x0_TC) // 2, 0] = 4.0
        return x0_TC

    settings = {"solver": solver, "num_steps": 3, "guidance_scale": 1.0, "seed": 0, "thresholding": thresholding}
    samples = generate(network, FlowMatching(prediction="x0"), pack(), SPEC, SamplingConfig(**settings))
    loud, quiet = {"none": (4.0, 0.5), "static": (1.0, 0.5), "dynamic": (1.0, 0.125)}[thresholding]
    for sample in samples:
        values = sample.flatten().sort().values
        torch.testing.assert_close(values[-1], torch.tensor(loud))
        torch.testing.assert_close(values[:-1], torch.full_like(values[:-1], quiet))


def test_a_threshold_applies_only_to_the_mean_with_a_learned_variance() -> None:
    def network(inputs_TC: Tensor, time_S: Tensor, batch: PackedBatch) -> Tensor:
        return torch.cat([torch.full_like(inputs_TC, 3.0), torch.full_like(inputs_TC, 0.9)], 1)

    objective = DDPM(prediction="x0", discrete_steps=10, schedule="cosine", variance=LearnedVariance())
    settings = {"solver": "ancestral", "variance": "learned", "num_steps": 3, "guidance_scale": 1.0, "seed": 0}
    assert (generate(network, objective, pack(), SPEC, SamplingConfig(thresholding="static", **settings)) == 1).all()
    assert (generate(network, objective, pack(), SPEC, SamplingConfig(**settings)) == 3).all()


@pytest.mark.parametrize("objective", [FlowMatching(prediction="x0"), DDPM(prediction="x0", schedule="cosine")])
def test_a_sample_starts_from_a_picture_with_the_noise_of_its_first_step(objective: Objective) -> None:
    """x_u = alpha x0 + sigma eps, with round(strength * steps) steps left and the noise of sampling from pure noise."""
    seen: list[Tensor] = []

    def nothing(inputs_TC: Tensor, time_S: Tensor, batch: PackedBatch) -> Tensor:
        seen.append(inputs_TC.double())
        return torch.zeros_like(inputs_TC)

    batch, picture_TC = pack(), torch.linspace(-1, 1, 8)[:, None].expand(-1, 4).contiguous()
    settings = {"solver": "euler", "num_steps": 10, "guidance_scale": 1.0, "seed": 0}
    grid = objective.sampling_grid(10)
    generate(nothing, objective, batch, SPEC, SamplingConfig(**settings))
    eps_TC = seen[0] / objective.path.alpha_sigma(grid[0])[1]
    batch.latents_TC = picture_TC
    for strength, steps in ((1.0, 10), (0.34, 3), (0.01, 1)):
        seen.clear()
        generate(nothing, objective, batch, SPEC, SamplingConfig(**settings), strength=strength)
        assert len(seen) == steps
        alpha, sigma = objective.path.alpha_sigma(grid[10 - steps])
        torch.testing.assert_close(seen[0], alpha * picture_TC.double() + sigma * eps_TC, rtol=1e-5, atol=1e-6)
