"""What `generate` asks of the network and of the noise, step by step."""

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from dit.batch import PackedBatch
from dit.models.dit.config import DiTConfig
from dit.objectives.ddpm import DDPM
from dit.objectives.flow_matching import FlowMatching
from dit.sampling.generate import empty_pack, generate

SPEC = DiTConfig(patch_spatial=1, num_classes=3, context_size=2).batch_spec()
LABELS = [2, 0]
TEXTS, NEGATIVE = ([torch.full((length, 2), value) for length in (1, 3)] for value in (1.0, -1.0))


def pack(side: int = 2) -> PackedBatch:
    return empty_pack(SPEC, (1, side, side), 2, torch.device("cpu"), {"label": LABELS, "context": TEXTS})


def by_condition(inputs_TC: Tensor, time_S: Tensor, batch: PackedBatch) -> Tensor:
    """Predict, in every element, the class + 10 x the mean of the text; a dropped text counts as 5."""
    text = batch.conditions["context"]
    texts = text.layout.sum_per_sample(text.values).mean(-1) / torch.tensor(text.layout.lengths)
    if text.dropped_S is not None:
        texts = torch.where(text.dropped_S, 5.0, texts)
    return batch.layout.per_token(batch.conditions["label"].values + 10 * texts).expand_as(inputs_TC)


def drawn(negative: Sequence[Tensor] | None, scale: float) -> Tensor:
    given = None if negative is None else {"context": negative}
    settings = {"solver": "euler", "num_steps": 3, "guidance_scale": scale, "seed": 0}
    return generate(by_condition, FlowMatching(prediction="x0"), pack(), SPEC, negative=given, **settings)


def test_guidance_leads_away_from_no_class_and_from_no_text_or_the_negative_one():
    """uncond + g (cond - uncond), of a network that predicts a constant, which is then the sample."""
    for negative, uncond in ((None, 3 + 10 * 5.0), (NEGATIVE, 3 - 10 * 1.0)):
        for scale in (0.0, 2.5):
            samples = drawn(negative, scale)
            for sample, label in zip(samples, LABELS):
                cond = label + 10 * 1.0
                torch.testing.assert_close(sample, torch.full_like(sample, uncond + scale * (cond - uncond)))
    assert [float(sample.mean()) for sample in drawn(None, 1.0)] == [label + 10.0 for label in LABELS]


def test_every_step_of_a_stochastic_solver_draws_noise_of_its_own():
    """With 0 for the clean estimate a step is alpha s**2 / (alpha_s sigma**2) x + fresh noise, unlike any before it.

    Source: Ho et al. 2020, arXiv:2006.11239, Eq. 7, for any alpha and sigma and the next deviation s.
    """
    objective, states = DDPM(prediction="x0", schedule="cosine"), []

    def nothing(inputs_TC: Tensor, time_S: Tensor, batch: PackedBatch) -> Tensor:
        states.append(inputs_TC.double())
        return torch.zeros_like(inputs_TC)

    generate(nothing, objective, pack(side=16), SPEC, solver="ancestral", num_steps=4, guidance_scale=1.0, seed=0)
    levels = [objective.path.alpha_sigma(u) for u in objective.sampling_grid(4)[:-1]]
    drawn_by_step = [states[0]]
    for (before, after), ((alpha, sigma), (alpha_s, s)) in zip(pairwise(states), pairwise(levels)):
        drawn_by_step.append(after - alpha * s**2 / (alpha_s * sigma**2) * before)
    correlation = torch.corrcoef(torch.stack([x_TC.flatten() for x_TC in drawn_by_step]))
    assert (correlation - torch.eye(4)).abs().max() < 4 / math.sqrt(states[0].numel())
