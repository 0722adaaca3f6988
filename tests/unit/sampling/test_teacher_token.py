"""Sampling denoises the class token of a teacher together with the latent, as in a loop over single samples."""

from typing import Any

import pytest
import torch
from torch import Tensor

from dit.batch import PackedBatch
from dit.errors import ConfigError
from dit.models.dit.config import DiTConfig
from dit.objectives.addressed_noise import AddressedNoise
from dit.objectives.flow_matching import FlowMatching
from dit.sampling.generate import empty_pack
from dit.settings import SamplingConfig
from tests.support.batches import generate

WIDTH, CHANNELS, SEED = 5, 4, 3
SPEC = DiTConfig(patch_spatial=1, num_classes=3, teacher_token_size=WIDTH).batch_spec()
LABELS = [2, 0]
STEPS = 4


def velocities(x_TC: Tensor, token_F: Tensor, t: Tensor, label: int) -> tuple[Tensor, Tensor]:
    """Return velocities of latent and token that depend on each other, for one sample."""
    return torch.sin(x_TC) + t * token_F.mean() + label, torch.cos(token_F) + x_TC.mean() - 0.3 * label


def network(inputs_TC: Tensor, time_S: Tensor, batch: PackedBatch) -> Tensor:
    """Predict the velocities; an auxiliary column follows, which sampling must ignore."""
    assert inputs_TC.shape[1] == CHANNELS
    rows = []
    for i, (start, length) in enumerate(zip(batch.layout.starts, batch.layout.lengths)):
        token_F, label = batch.conditions["teacher_token"].values[i], int(batch.conditions["label"].values[i])
        v_TC, token_v_F = velocities(inputs_TC[start : start + length], token_F, time_S[i], label)
        rows.append(torch.cat([v_TC, token_v_F.expand(length, -1), torch.full((length, 1), torch.nan)], 1))
    return torch.cat(rows)


def pack(labels: list[int] = LABELS, side: int = 2) -> PackedBatch:
    numbers = [LABELS.index(label) for label in labels]
    return empty_pack(SPEC, (1, side, side), len(labels), torch.device("cpu"), {"label": labels}, numbers)


def drawn(batch: PackedBatch, **settings: Any) -> Tensor:
    defaults = {"solver": "euler", "num_steps": STEPS, "guidance_scale": 1.0, "seed": SEED}
    return generate(network, FlowMatching(), batch, SPEC, SamplingConfig(**{**defaults, **settings}))


def reference(sample: int, scale: float, heun: bool) -> Tensor:
    """Integrate one sample in float64, latent and token by the same steps from t = 1 to 0."""
    noise = AddressedNoise(SEED, 0, pack().sample_ids_S, pack().layout)
    x = noise.normal_TC("start", CHANNELS).double().view(2, 4, CHANNELS)[sample]
    token = noise.normal_SC("start teacher_token", WIDTH, repeated=False).double()[sample]

    def guided(x: Tensor, token: Tensor, t: float) -> tuple[Tensor, Tensor]:
        cond, uncond = (velocities(x, token, torch.tensor(t), label) for label in (LABELS[sample], 3))
        both = [u + scale * (c - u) for c, u in zip(cond, uncond)]
        return both[0], both[1]

    for step in range(STEPS):
        t, h = 1 - step / STEPS, 1 / STEPS
        v, token_v = guided(x, token, t)
        if heun and step < STEPS - 1:
            w, token_w = guided(x - h * v, token - h * token_v, t - h)
            v, token_v = (v + w) / 2, (token_v + token_w) / 2
        x, token = x - h * v, token - h * token_v
    return x


@pytest.mark.parametrize("scale", [1.0, 2.5])
@pytest.mark.parametrize("solver", ["euler", "heun"])
def test_samples_equal_those_of_a_loop(solver: str, scale: float) -> None:
    """Guidance applies to the velocity of the token, too."""
    samples = drawn(pack(), solver=solver, guidance_scale=scale)
    assert samples.shape == (2, CHANNELS, 1, 2, 2)
    for i, sample in enumerate(samples):
        exact = reference(i, scale, solver == "heun")
        torch.testing.assert_close(sample[:, 0].flatten(1).T.double(), exact, rtol=1e-5, atol=1e-5)


def test_guidance_options_and_thresholds_apply_to_the_latent_only() -> None:
    """The clean token is not clamped, and guidance of one channel does not leave out columns of the token."""
    tokens: list[Tensor] = []

    def recorded(inputs_TC: Tensor, time_S: Tensor, batch: PackedBatch) -> Tensor:
        tokens.append(batch.conditions["teacher_token"].values[:2])
        latents_TC = torch.full((len(inputs_TC), CHANNELS), 7.0)
        token_TF = batch.layout.per_token(9.0 + batch.conditions["label"].values).expand(-1, WIDTH)
        return torch.cat([latents_TC, token_TF], 1)

    settings = {"solver": "euler", "num_steps": 2, "guidance_scale": 3.0, "seed": 0, "guidance_channels": 1}
    for thresholding, largest in (("static", 1.0), ("none", 7.0)):
        sampling = SamplingConfig(**settings, thresholding=thresholding, guidance_rescale=0.0)
        tokens.clear()
        found = generate(recorded, FlowMatching(prediction="x0"), pack(), SPEC, sampling)
        torch.testing.assert_close(found, torch.full_like(found, largest))
        start, middle = tokens
        x0_S = torch.tensor([12.0 + 3 * (label - 3) for label in LABELS])[:, None]  # unconditional: class 3
        torch.testing.assert_close(middle, (start + x0_S) / 2)


def test_a_start_from_a_picture_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"strength=0\.5 .* class token of 5 features is unknown"):
        generate(network, FlowMatching(), pack(), SPEC, SamplingConfig(num_steps=4), strength=0.5)
