"""EDM2's learned weighting of noise levels: loss = lambda(sigma) / e**u |D - x0|**2 + u, computed in float64."""

import math

import pytest
import torch
from torch import Tensor

from dit.backends.process_groups import ProcessGroups
from dit.batch import PackedBatch
from dit.layout import SequenceLayout
from dit.models.base import Backbone
from dit.models.dit.config import DiTConfig
from dit.objectives.addressed_noise import AddressedNoise
from dit.objectives.edm import EDM
from dit.objectives.losses import UncertaintyWeighting
from dit.sampling.generate import empty_pack
from dit.settings import SamplingConfig
from dit.step.forward_step import training_forward_step
from dit.training.validate import held_out_loss
from tests.conftest import BuildModel
from tests.support.batches import generate, pack_of

MODEL = DiTConfig(hidden_size=16, num_layers=1, num_attention_heads=2, in_channels=2, patch_spatial=1, num_classes=None)
OBJECTIVE = EDM(weighting=UncertaintyWeighting(), p_mean=-0.4, p_std=1.0)
SEED, STEP = 3, 11


def pack() -> PackedBatch:
    """Return two images of different sizes and weights, with padding after each."""
    layout = SequenceLayout.from_lengths([9, 25], multiple_of=4, total_tokens=44)
    latents_TC = torch.randn(44, 2, generator=torch.Generator().manual_seed(0))
    own = {"sample_ids_S": torch.tensor([7, 8]), "loss_weight_S": torch.tensor([0.5, 2.0])}
    return pack_of(layout, latents_TC, [(1, 3, 3), (1, 5, 5)], **own)


def networks(build_model: BuildModel) -> tuple[Backbone, Backbone]:
    """Return a network without a head for u, and the same network with a head whose weights are not 0."""
    plain, learning = (build_model(MODEL, perturb=0.1) for _ in range(2))
    learning.learn_uncertainty(learning.provider)  # type: ignore[arg-type]
    with torch.no_grad():
        learning.uncertainty.weight.copy_(torch.randn(128, generator=torch.Generator().manual_seed(1)) / 10)
    return plain, learning


def features(time_S: Tensor, count: int = 128) -> Tensor:
    """Return EDM2's sqrt(2) cos(2 pi (f t + phase)), at the quantiles of the normal distribution, float64."""
    i = torch.arange(count, dtype=torch.float64)
    frequency = math.sqrt(2) * torch.erfinv(2 * (i + 0.5) / count - 1)
    phase = i * (math.sqrt(5) - 1) / 2
    return math.sqrt(2) * torch.cos(2 * math.pi * (time_S.double()[:, None] * frequency + phase))


def by_hand(plain: Backbone, learning: Backbone, batch: PackedBatch) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return lambda |D - x0|**2 and u of every real token, their sample, and the prepared times; float64."""
    prepared = OBJECTIVE.prepare(batch, AddressedNoise(SEED, STEP, batch.sample_ids_S, batch.layout))
    output_TC = plain(prepared.inputs_TC, prepared.time_S, batch).detach().double()
    valid_T, sample_T = batch.layout.valid_T, batch.layout.segment_ids_T
    sigma_T1 = (4 * prepared.time_S.double()).exp()[sample_T][:, None]
    data = OBJECTIVE.sigma_data
    x_TC = prepared.inputs_TC.double() * (sigma_T1**2 + data**2).sqrt()
    clean_TC = data**2 / (sigma_T1**2 + data**2) * x_TC + sigma_T1 * data / (sigma_T1**2 + data**2).sqrt() * output_TC
    weight_T1 = (sigma_T1**2 + data**2) / (sigma_T1 * data) ** 2
    error_T = (weight_T1 * (clean_TC - batch.latents_TC.double()).square()).mean(-1)
    u_S = features(prepared.time_S) @ learning.uncertainty.weight.detach().double()  # type: ignore[operator]
    return error_T[valid_T], u_S[sample_T][valid_T], sample_T[valid_T], prepared.time_S


def test_loss_and_gradient_of_u_equal_those_of_the_paper(build_model: BuildModel) -> None:
    """The sum over real tokens of w (lambda / e**u |D - x0|**2 + u), whose derivative by u is w (1 - error / e**u)."""
    (plain, learning), batch = networks(build_model), pack()
    error, u, sample, time_S = by_hand(plain, learning, batch)
    weight = batch.loss_weight_S.double()[sample]  # type: ignore[index]
    prediction_TC, loss_function = training_forward_step(OBJECTIVE, MODEL, SEED, STEP)(iter([batch]), learning)
    total, count, logs = loss_function(prediction_TC)
    scaled, raw = (weight * error * (-u).exp()).sum(), (weight * error).sum()
    assert total.item() == pytest.approx((scaled + (weight * u).sum()).item(), rel=1e-4)
    expected = [scaled, (weight * u).sum(), raw, torch.tensor(9 + 25)]
    torch.testing.assert_close(logs["sums"].double(), torch.stack(expected).double(), rtol=1e-4, atol=1e-5)
    assert int(count) == 9 + 25
    total.backward()
    gradient = (weight * (1 - error * (-u).exp()))[:, None] * features(time_S)[sample]
    found = learning.uncertainty.weight.grad.double()  # type: ignore[union-attr]
    torch.testing.assert_close(found, gradient.sum(0), rtol=1e-4, atol=1e-4)


def test_samples_do_not_depend_on_u_and_validation_logs_the_plain_error(
    build_model: BuildModel, one_rank_world: ProcessGroups
) -> None:
    (plain, learning), batch, spec = networks(build_model), pack(), MODEL.batch_spec()
    empty = empty_pack(spec, (1, 4, 4), 2, torch.device("cpu"))
    settings = {"solver": "heun", "num_steps": 3, "guidance_scale": 1.0, "seed": 0}
    samples = [
        generate(n, o, empty, spec, SamplingConfig(**settings)) for n, o in ((plain, EDM()), (learning, OBJECTIVE))
    ]
    assert torch.equal(*samples)
    losses = [
        held_out_loss(network, iter([batch]), objective, MODEL, torch.device("cpu"), one_rank_world)
        for network, objective in ((plain, EDM(p_mean=-0.4, p_std=1.0)), (learning, OBJECTIVE))
    ]
    assert losses[1]["loss_raw"] == pytest.approx(losses[0]["loss"], rel=1e-6)
    assert losses[1]["loss"] == pytest.approx(losses[1]["loss_scaled"] + losses[1]["loss_uncertainty"], rel=1e-6)
    assert abs(losses[1]["loss"] - losses[0]["loss"]) > 1e-3
