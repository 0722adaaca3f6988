"""Contrastive flow matching: the loss of the paper, with the same negatives on every layout."""

from dataclasses import replace

import pytest
import torch

from dit.batch import PackedBatch
from dit.context_parallel.shard_batch import shard
from dit.errors import ConfigError
from dit.fixed_packs import PackMaxima
from dit.layout import CLEAN
from dit.levels import with_levels
from dit.objectives.addressed_noise import AddressedNoise
from dit.objectives.contrastive import NEGATIVE, ContrastiveFlowMatching, negative_tokens
from dit.objectives.flow_matching import FlowMatching
from dit.step.cuda_graph import constants
from tests.unit.objectives.packs import noise_for, pack, run_config

WEIGHT = 0.3


def of_grids(*grids: tuple[int, int, int], multiple_of: int = 4) -> PackedBatch:
    """Return a pack of samples with different numbers of tokens."""
    batch = pack([t * h * w for t, h, w in grids], multiple_of=multiple_of)
    return replace(batch, grids=grids)


def resized(latent_thwC: torch.Tensor, grid: tuple[int, int, int]) -> torch.Tensor:
    """Return the nearest token of each position of the grid."""
    sides = latent_thwC.shape[:3]
    tokens = [
        latent_thwC[i * sides[0] // grid[0], j * sides[1] // grid[1], k * sides[2] // grid[2]]
        for i in range(grid[0])
        for j in range(grid[1])
        for k in range(grid[2])
    ]
    return torch.stack(tokens)


def latent(batch: PackedBatch, sample: int) -> torch.Tensor:
    start, length = batch.layout.starts[sample], batch.layout.lengths[sample]
    return batch.latents_TC[start : start + length].view(*batch.grids[sample], -1)


@pytest.mark.parametrize("prediction", ["velocity", "x0"])
def test_the_loss_equals_that_of_the_paper(prediction):
    """Per sample: the error against its velocity, minus the weighted error against the velocity of its negative."""
    settings = {"prediction": prediction, "time_distribution": "logit_normal"}
    objective = ContrastiveFlowMatching(contrast_weight=WEIGHT, **settings)
    batch = of_grids((1, 2, 3), (2, 2, 1), (1, 5, 2))
    noise = noise_for(batch)
    prepared = objective.prepare(objective.of_full_pack(batch), noise)
    output_TC = torch.sin(prepared.inputs_TC)
    loss, count, terms = objective.loss(output_TC, prepared, batch.layout)

    eps_TC = noise.normal_TC("eps", 4)
    other = AddressedNoise(1234 ^ 0x2F88E37E << 32, 0, batch.sample_ids_S, batch.layout)
    assert not torch.equal(other.normal_TC("eps", 4), eps_TC)
    near = far = torch.zeros(())
    for i, negative in enumerate((1, 0, 1)):
        rows = slice(batch.layout.starts[i], batch.layout.starts[i] + batch.layout.lengths[i])
        x0, eps, t = batch.latents_TC[rows], eps_TC[rows], prepared.time_S[i]
        x_t = (1 - t) * x0 + t * eps
        v = output_TC[rows] if prediction == "velocity" else (x_t - output_TC[rows]) / t
        v_negative = other.normal_TC("eps", 4)[rows] - resized(latent(batch, negative), batch.grids[i])
        near = near + (v - (eps - x0)).square().mean(1).sum()
        far = far + (v - v_negative).square().mean(1).sum()
    assert prepared.time_S.min() > 0.05  # below it, the weight of x0 is limited
    torch.testing.assert_close(loss, near - WEIGHT * far, rtol=1e-5, atol=0)
    torch.testing.assert_close(terms["error"], near, rtol=1e-5, atol=0)
    assert count == 20


def test_the_loss_without_negatives_equals_flow_matching():
    """In a pack of one sample, in held-out packs, and with a weight of 0."""
    plain, objective = FlowMatching(), ContrastiveFlowMatching()
    for batch, tried in (
        (objective.of_full_pack(of_grids((1, 2, 2))), objective),
        (of_grids((1, 2, 2), (1, 1, 3)), objective),
        (objective.of_full_pack(of_grids((1, 2, 2), (1, 1, 3))), ContrastiveFlowMatching(contrast_weight=0.0)),
    ):
        prepared, expected = (o.prepare(batch, noise_for(batch)) for o in (tried, plain))
        output_TC = torch.cos(prepared.inputs_TC)
        loss, *_ = tried.loss(output_TC, prepared, batch.layout)
        assert torch.equal(loss, plain.loss(output_TC, expected, batch.layout)[0])


def test_pairs_do_not_depend_on_the_size_of_micro_batches():
    """Eight samples in one, two or four dense micro-batches; both samples of a pair are in the same micro-batch."""
    grids = [(1, 2, n) for n in range(1, 9)]
    full = ContrastiveFlowMatching().of_full_pack(of_grids(*grids))
    for size in (2, 4):
        negatives = []
        for first in range(0, 8, size):
            part = of_grids(*grids[first : first + size])
            start = full.layout.starts[first]
            part.latents_TC = full.latents_TC[start : start + part.layout.total_tokens]
            negatives.append(ContrastiveFlowMatching().of_full_pack(part).conditions[NEGATIVE].values)
        assert torch.equal(torch.cat(negatives), full.conditions[NEGATIVE].values)


def test_fixed_packs_of_one_and_of_several_samples_share_a_cuda_graph():
    """A graph stores which entries a pack has."""
    packs = [PackMaxima(tokens=24, samples=6).pad(of_grids(*grids)) for grids in ([(1, 2, 3)], [(1, 2, 2)] * 3)]
    one, several = (constants(ContrastiveFlowMatching().of_full_pack(batch), []) for batch in packs)
    assert one == several


def test_empty_samples_of_fixed_packs_are_not_negatives():
    for grids in ([(1, 2, 3), (1, 2, 2), (1, 3, 1)], [(1, 2, 3)]):
        objective, losses = ContrastiveFlowMatching(shift_dimension=8, min_time=0.1), []
        for batch in (of_grids(*grids), PackMaxima(tokens=24, samples=6).pad(of_grids(*grids))):
            prepared = objective.prepare(objective.of_full_pack(batch), noise_for(batch))
            assert prepared.time_S.isfinite().all()
            losses.append(objective.loss(torch.sin(prepared.inputs_TC), prepared, batch.layout)[0])
        torch.testing.assert_close(losses[0], losses[1])


@pytest.mark.parametrize("split", ["contiguous", "load_balanced"])
def test_ranks_have_the_negatives_of_their_tokens(split):
    batch = ContrastiveFlowMatching().of_full_pack(of_grids((1, 2, 4), (1, 3, 4)))
    for rank in range(2):
        local = shard(batch, rank, 2, split)
        negatives_TC = batch.conditions[NEGATIVE].values
        assert torch.equal(local.conditions[NEGATIVE].values, negatives_TC[local.layout.local_indices])


def test_references_are_not_negatives_and_have_no_negatives():
    """Sample 0 has two tokens of a clean reference after its grid, which the loss does not count."""
    batch = pack([6, 4])
    batch = replace(batch, grids=((1, 2, 2), (1, 2, 2)), layout=with_levels(batch.layout, [[(4, 0), (2, CLEAN)], []]))
    assert negative_tokens(batch.layout, batch.grids).tolist() == [6, 7, 8, 9, 4, 5, 0, 1, 2, 3]
    objective = ContrastiveFlowMatching(prediction="x0")
    prepared = objective.prepare(objective.of_full_pack(batch), noise_for(batch))
    terms = objective.loss_terms(torch.ones(10, 4), prepared, batch.layout)
    assert (terms["contrast"].error_T != 0).tolist() == [True] * 4 + [False] * 2 + [True] * 4


def test_dense_micro_batches_have_an_even_number_of_samples():
    base = "tiny_dit", "objective=contrastive_flow_matching", "training.global_batch_size=4"
    even = run_config(*base, "training.micro_batch_size=2")
    even.check(1)
    run_config(*base, "training.micro_batch_size=1", "data.max_tokens_per_pack=256").check(1)
    with pytest.raises(ConfigError, match="pairs of samples, and a micro-batch has 1; set an even training"):
        even.check(4)
