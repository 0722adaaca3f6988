"""Losses of a step and of an evaluation: sums of errors over real tokens, weighted by sample."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, Optional

import pytest
import torch
from torch import Tensor

from dit.backends.process_groups import ProcessGroups
from dit.batch import PackedBatch
from dit.errors import ConfigError
from dit.layout import SequenceLayout
from dit.models.dit.config import DiTConfig
from dit.objective_checks import check_outputs
from dit.objectives.addressed_noise import AddressedNoise
from dit.objectives.base import Objective
from dit.objectives.ddpm import DDPM, LearnedVariance
from dit.objectives.flow_matching import FlowMatching
from dit.patchify import patchify, unpatchify
from dit.step.forward_step import training_forward_step
from dit.training.validate import NUM_BUCKETS, VALIDATION_SEED, held_out_loss, loss_at_times
from tests.conftest import BuildModel
from tests.support.batches import pack_of

MODEL = DiTConfig(hidden_size=16, num_layers=1, num_attention_heads=2, in_channels=2, patch_spatial=1, num_classes=None)
OBJECTIVE = FlowMatching()


def pack(first_id: int, sides: list[int], weights: list[float]) -> PackedBatch:
    """Return square images with different weights and padding after each."""
    layout = SequenceLayout.from_lengths([side**2 for side in sides], multiple_of=4, total_tokens=40)
    latents_TC = torch.randn(40, 2, generator=torch.Generator().manual_seed(first_id))
    own = {"sample_ids_S": first_id + torch.arange(len(sides)), "loss_weight_S": torch.tensor(weights)}
    return pack_of(layout, latents_TC, [(1, side, side) for side in sides], **own)


def by_hand(batch: PackedBatch, error_TC: Tensor) -> list[tuple[float, int]]:
    """Return (weighted sum, count) of each sample's real tokens: mean over channels, sum over tokens."""
    rows = [slice(start, start + n) for start, n in zip(batch.layout.starts, batch.layout.lengths)]
    return [
        (float(weight * error_TC[own].square().mean(-1).sum()), len(error_TC[own]))
        for own, weight in zip(rows, batch.loss_weight_S)
    ]


def test_a_step_reports_the_weighted_sum_and_the_real_tokens(build_model: BuildModel) -> None:
    """Megatron-Core divides the gradients by the count, which is the number of tokens in the sum."""
    batch, network = pack(7, [3, 5], [0.5, 2.0]), build_model(MODEL, perturb=0.1)
    prediction_TC, loss_function = training_forward_step(OBJECTIVE, MODEL, 3, 11)(iter([batch]), network)
    total, count, logs = loss_function(prediction_TC)
    prepared = OBJECTIVE.prepare(batch, AddressedNoise(3, 11, batch.sample_ids_S, batch.layout))
    expected = sum(weighted for weighted, _ in by_hand(batch, prediction_TC.detach() - prepared.target_TC))
    assert total.item() == pytest.approx(expected, rel=1e-5)
    assert int(count) == 9 + 25
    assert logs["sums"].tolist() == [total.item(), 34.0]


def test_a_learned_variance_is_the_second_half_of_the_channels_of_a_picture(build_model: BuildModel) -> None:
    """A step's loss is that of pictures of mean and variance; a token has both in the order of its patch."""
    model = replace(MODEL, patch_spatial=2, out_channels=4)
    objective = DDPM(schedule="cosine", discrete_steps=20, variance=LearnedVariance())
    layout = SequenceLayout.from_lengths([4, 9])
    latents_TC = torch.randn(13, 8, generator=torch.Generator().manual_seed(0))
    batch = pack_of(layout, latents_TC, [(1, 2, 2), (1, 3, 3)])
    network = build_model(model, perturb=0.1)
    prediction_TC, loss_function = training_forward_step(objective, model, 3, 11)(iter([batch]), network)
    total, _, logs = loss_function(prediction_TC)
    tokens = []
    for start, n, grid in zip(layout.starts, layout.lengths, batch.grids):
        picture = unpatchify(prediction_TC[start : start + n], grid, 1, 2)
        tokens.append(torch.cat([patchify(half, 1, 2)[0] for half in picture.chunk(2)], -1))
    prepared = objective.prepare(batch, AddressedNoise(3, 11, batch.sample_ids_S, layout))
    expected, count, terms = objective.loss(torch.cat(tokens), prepared, layout)
    assert torch.equal(total, expected)
    assert logs["sums"].tolist() == [terms["simple"].item(), terms["vlb"].item(), count.item()]
    assert total.item() == pytest.approx(logs["sums"][:-1].sum().item(), rel=1e-6)


class Recorder(torch.nn.Module):
    """A network of one pipeline stage that stores its inputs."""

    stage = SimpleNamespace(first=True, last=True)
    sum_over_context_ranks = staticmethod(lambda x: x)

    def forward(self, inputs_TC: Tensor, time_S: Tensor, batch: PackedBatch) -> Tensor:
        self.inputs_TC = inputs_TC
        return inputs_TC


def test_offset_noise_has_a_number_for_each_channel_of_a_latent(one_rank_world: ProcessGroups) -> None:
    """In a step and in an evaluation, a token of two positions of one channel has one number."""
    model, objective = replace(MODEL, in_channels=1, patch_temporal=2), DDPM(noise_offset=1.0)
    batch, network = pack(7, [3, 5], [1.0, 1.0]), Recorder()
    training_forward_step(objective, model, 3, 11)(iter([batch]), network)
    stepped_TC = network.inputs_TC
    held_out_loss(network, iter([batch]), objective, model, torch.device("cpu"), one_rank_world)
    for inputs_TC, address in ((stepped_TC, (3, 11)), (network.inputs_TC, (VALIDATION_SEED, 0))):
        noise = AddressedNoise(*address, batch.sample_ids_S, batch.layout, latent_channels=1)
        assert torch.equal(inputs_TC, objective.prepare(batch, noise).inputs_TC)


def test_held_out_loss_has_the_terms_of_a_learned_variance(one_rank_world: ProcessGroups) -> None:
    """Each term is its share of the loss, which is the sum of them, as in a step."""
    objective = DDPM(schedule="cosine", discrete_steps=20, variance=LearnedVariance())

    def network(inputs_TC: Tensor, time_S: Tensor, batch: PackedBatch) -> Tensor:
        return torch.cat([inputs_TC.sin(), inputs_TC.cos()], -1)

    batches = [pack(10 * i, [2, 3, 4], [1.0, 0.5, 3.0]) for i in range(4)]
    passed = iter([*batches, replace(batches[0], repeated=True)])
    found = held_out_loss(network, passed, objective, MODEL, torch.device("cpu"), one_rank_world)
    sums = torch.zeros(3)
    for batch in batches:
        prepared = objective.prepare(batch, AddressedNoise(VALIDATION_SEED, 0, batch.sample_ids_S, batch.layout))
        outputs_TC = network(prepared.inputs_TC, prepared.time_S, batch)
        _, count, terms = objective.loss(outputs_TC, prepared, batch.layout)
        sums += torch.stack([*terms.values(), count])
    simple, vlb = (sums[:-1] / sums[-1]).tolist()
    assert found["loss_simple"] == pytest.approx(simple, rel=1e-5)
    assert found["loss_vlb"] == pytest.approx(vlb, rel=1e-5)
    assert found["loss"] == pytest.approx(simple + vlb, rel=1e-5)


@pytest.mark.parametrize(
    ("out_channels", "objective", "channels"),
    [(4, FlowMatching(), 2), (4, DDPM(), 2), (None, DDPM(discrete_steps=100, variance=LearnedVariance()), 4)],
)
def test_model_and_objective_must_agree_on_the_outputs(
    out_channels: Optional[int], objective: Objective, channels: int
) -> None:
    """The error before the run, also in the dry run, has both numbers."""
    model = replace(MODEL, out_channels=out_channels)
    words = f"{out_channels or 2} numbers for a token of 2 .* trains {channels}; set model.out_channels={channels},"
    with pytest.raises(ConfigError, match=words):
        check_outputs(objective, model)
    check_outputs(objective, replace(model, out_channels=channels))


def test_held_out_loss_is_the_weighted_mean_over_real_tokens(one_rank_world: ProcessGroups) -> None:
    """Both in total and for each quarter of the noise levels; a repeated micro-batch does not count."""

    def nothing(inputs_TC: Tensor, time_S: Tensor, batch: PackedBatch) -> Tensor:
        return torch.zeros_like(inputs_TC)

    batches = [pack(10 * i, [2, 3, 4], [1.0, 0.5, 3.0]) for i in range(4)]
    passed = iter([*batches, replace(batches[0], repeated=True)])
    found = held_out_loss(nothing, passed, OBJECTIVE, MODEL, torch.device("cpu"), one_rank_world)
    by_level: dict[str, list[tuple[float, int]]] = {}
    for batch in batches:
        noise = AddressedNoise(VALIDATION_SEED, 0, batch.sample_ids_S, batch.layout)
        errors = by_hand(batch, OBJECTIVE.prepare(batch, noise).target_TC)
        for level, pair in zip(noise.level_S().tolist(), errors):
            for name in ("loss", f"loss_level_{int(NUM_BUCKETS * level)}"):
                by_level.setdefault(name, []).append(pair)
    assert len(by_level) == 1 + NUM_BUCKETS
    expected = {name: sum(e for e, _ in pairs) / sum(n for _, n in pairs) for name, pairs in by_level.items()}
    assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("prediction", ["velocity", "x0"])
def test_the_loss_at_fixed_times_does_not_depend_on_the_times_of_training(prediction: Any) -> None:
    """The mean squared error of the velocity, averaged over eight times; the id of a sample selects its time.

    Source: mlcommons/training, text_to_image/torchtitan/README.md, section 5.
    """

    def network(inputs_TC: Tensor, time_S: Tensor, batch: PackedBatch) -> Tensor:
        return 0.5 * inputs_TC + batch.layout.per_token(time_S)

    batches = [pack(10 * i, [2, 3, 4], [1.0, 0.5, 3.0]) for i in range(8)]
    plain = FlowMatching(prediction=prediction)
    other = replace(plain, time_distribution="logit_normal", logit_mean=0.3, time_shift=3.0, min_snr_gamma=5.0)
    found, same = (
        loss_at_times(network, iter(batches), objective, MODEL, torch.device("cpu")) for objective in (plain, other)
    )
    assert torch.equal(found, same)
    expected = torch.zeros(8, 2, dtype=torch.float64)
    for batch in batches:
        eps_TC = AddressedNoise(VALIDATION_SEED, 0, batch.sample_ids_S, batch.layout).normal_TC("eps", 2)
        for start, n, number in zip(batch.layout.starts, batch.layout.lengths, batch.sample_ids_S.tolist()):
            x0, eps = (x[start : start + n].double() for x in (batch.latents_TC, eps_TC))
            t = number % 8 / 8
            x_t = (1 - t) * x0 + t * eps
            output = 0.5 * x_t + t
            velocity = output if prediction == "velocity" else (x_t - output) / max(t, 0.05)
            target = eps - x0 if prediction == "velocity" else (x_t - x0) / max(t, 0.05)
            expected[number % 8] += torch.tensor([float((velocity - target).square().mean()), 1.0])
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    assert (expected[:, 1] > 0).sum() >= 4
