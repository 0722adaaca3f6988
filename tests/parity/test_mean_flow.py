"""MeanFlow on our packed DiT has the target, loss and gradients of the paper, with an exact derivative."""

import pytest
import torch

from dit.objectives.addressed_noise import AddressedNoise
from dit.objectives.mean_flow import MeanFlow
from tests.conftest import BuildModel
from tests.parity.test_dit import config, rows_of
from tests.parity.weights import copy_weights, reference_gradients, reference_of
from tests.support.batches import Sample, pack
from tests.support.reference import relative_error

SAMPLES = [
    Sample((1, 4, 4), label=3),
    Sample((1, 2, 5)),
    Sample((1, 1, 3), label=0),
    Sample((1, 4, 4), label=5),
    Sample((1, 3, 2), label=1),
]
# h**2 times the third derivative, and float32 rounding divided by h; measured 2.6e-5 and 2.4e-3.
PLAIN, GUIDED = (1.0, 0.0), (2.5, 0.75)
BOUNDS = {(1.0, 3e-3, *PLAIN): 2e-4, (1000.0, 1e-4, *PLAIN): 6e-3, (1.0, 3e-3, *GUIDED): 2e-4}


@pytest.mark.parametrize(("time_scale", "difference", "guidance", "power"), BOUNDS)
def test_target_loss_and_gradients_equal_those_of_the_paper(
    build_model: BuildModel, time_scale, difference, guidance, power
):
    """In float64: target = v - (t - r) du/dt with an exact derivative along (v, 1, 0) in (z, t, r).

    With guidance w, v is w (eps - x0) + (1 - w) u(z, t, t) without the class. Errors have the adaptive weight.
    """
    bound = BOUNDS[time_scale, difference, guidance, power]
    model_config = config(interval_conditioning=True, time_scale=time_scale)
    model = build_model(model_config, perturb=0.1)
    reference = reference_of(model_config)
    copy_weights(model, reference, model_config.num_attention_heads)
    batch = pack(SAMPLES, model_config, multiple_of=4, tail=3)
    batch.latents_TC = torch.randn(batch.latents_TC.shape, generator=torch.Generator().manual_seed(3))
    noise = AddressedNoise(7, 0, batch.sample_ids_S, batch.layout)
    objective = MeanFlow(instant_share=0.3, difference=difference, guidance_scale=guidance, adaptive_power=power)
    prepared = objective.prepare(batch, noise)
    targets = objective.complete(model, prepared, batch, model_config.conditions())
    total, count, _ = objective.loss(model(prepared.inputs_TC, prepared.time_S, batch), targets, batch.layout)
    (total / count).backward()

    eps_TC = noise.normal_TC("eps", model_config.token_channels).double()
    exact_loss, intervals = torch.zeros((), dtype=torch.float64), []
    for i, (sample, rows) in enumerate(zip(SAMPLES, rows_of(batch.layout), strict=True)):
        t, interval = prepared.time_S[i].double()
        intervals.append(float(interval))
        x0, eps = batch.latents_TC[None, rows].double(), eps_TC[None, rows]
        z, v = (1 - t) * x0 + t * eps, eps - x0

        def u(z, t, r, sample=sample, label=sample.label):
            return reference(z, t[None], sample.grid, [label], None, (t - r)[None])

        with torch.no_grad():
            v = guidance * v + (1 - guidance) * u(z, t, t, label=None)
        one = torch.ones((), dtype=torch.float64)
        point, direction = (z, t, t - interval), (v, one, 0 * one)
        prediction, slope = torch.autograd.functional.jvp(u, point, direction, create_graph=True)
        target = (v - interval * slope).detach()
        assert relative_error(targets.target_TC[rows], target[0]) <= bound, f"sample {i}"
        error = ((prediction - target) ** 2).mean(-1)
        exact_loss = exact_loss + error.sum() / (error.mean().detach() + 1e-3) ** power
    assert 0 in intervals
    assert max(intervals) > 0.3
    exact_loss = exact_loss / batch.layout.valid_tokens
    exact_loss.backward()
    assert float(total / count) == pytest.approx(float(exact_loss), rel=bound)
    exact = reference_gradients(model, reference, model_config.num_attention_heads)
    errors = {name: relative_error(p.grad, exact[name]) for name, p in model.named_parameters()}
    assert {name: error for name, error in errors.items() if not error <= bound} == {}
