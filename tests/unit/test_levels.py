"""Several noise levels in a sample: layout, noise and loss of each segment against formulas per token."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from dit.batch import PackedBatch
from dit.context_parallel.shard_batch import shard
from dit.errors import BatchError, ConfigError
from dit.joint_layout import joint_layout
from dit.layout import CLEAN, SequenceLayout
from dit.levels import at_text_level, with_levels, with_references_at_sample_time, with_text_level
from dit.objectives.addressed_noise import AddressedNoise
from dit.objectives.flow_matching import MIN_TIME, FlowMatching
from dit.objectives.losses import UncertaintyWeighting
from dit.objectives.mean_flow import MeanFlow
from dit.training.validate import NUM_BUCKETS, loss_sums
from tests.support.levels import leveled

SEGMENTS = [[(2, CLEAN), (3, 0)], [], [(1, 0), (2, CLEAN), (4, 2)]]
LEVEL_OF_TOKEN = [CLEAN, CLEAN, 0, 0, 0, None, 0, 0, 0, None, 0, CLEAN, CLEAN, 2, 2, 2, 2, None, None, None]
"""Number of the level of each token of `a_layout`; None for padding."""
SAMPLE_OF_TOKEN = [0] * 6 + [1] * 4 + [2] * 10


def a_layout() -> SequenceLayout:
    """Three samples of 5, 3 and 7 tokens, padded to even numbers, and a tail of two tokens."""
    return with_levels(SequenceLayout.from_lengths([5, 3, 7], multiple_of=2, total_tokens=20), SEGMENTS)


def a_pack(layout: SequenceLayout) -> PackedBatch:
    tokens, samples = layout.total_tokens, layout.num_samples
    return PackedBatch(
        latents_TC=torch.randn(tokens, 4, generator=torch.Generator().manual_seed(2)),
        positions_T3=torch.zeros(tokens, 3, dtype=torch.int64),
        layout=layout,
        sample_ids_S=torch.arange(samples) + 5,
        grids=tuple((1, 1, n) for n in layout.lengths),
        keys=tuple(map(str, range(samples))),
        loss_weight_S=torch.tensor([1.0, 2.0, 0.5]),
    ).validate()


def noise_of(batch: PackedBatch) -> AddressedNoise:
    return AddressedNoise(11, 4, batch.sample_ids_S, batch.layout)


def time_of_tokens(objective: FlowMatching, batch: PackedBatch) -> Tensor:
    """Return t of every token from its level, one token at a time."""
    noise, times = noise_of(batch), []
    for sample, number in zip(SAMPLE_OF_TOKEN, LEVEL_OF_TOKEN):
        if number == CLEAN:
            times.append(torch.tensor(0.0))
        else:
            purpose = f"level {number}" if number else "level"
            times.append(objective.level(noise.uniform_S(purpose))[sample])
    return torch.stack(times)


def test_a_layout_of_segments_has_the_tokens_of_the_samples() -> None:
    layout = a_layout()
    assert layout.levels is not None
    assert layout.level_layout.lengths == (2, 3, 3, 1, 2, 4)
    assert layout.level_layout.padded_lengths == (2, 4, 4, 1, 2, 5)
    assert layout.levels.numbers == (CLEAN, 0, 0, 0, CLEAN, 2)
    assert torch.equal(layout.level_layout.valid_T, layout.valid_T)
    assert layout.noised_T.tolist() == [number not in (CLEAN, None) for number in LEVEL_OF_TOKEN]
    assert layout.per_level(torch.tensor([1.0, 2.0, 3.0])).tolist() == [1.0, 1.0, 2.0, 3.0, 3.0, 3.0]
    assert layout.per_level(torch.eye(3)).tolist() == torch.eye(3)[[0, 0, 1, 2, 2, 2]].tolist()
    assert layout.sum_levels(torch.arange(6.0)).tolist() == [1.0, 2.0, 12.0]


def test_a_layout_without_segments_is_its_level_layout() -> None:
    layout = SequenceLayout.from_lengths([5, 3])
    assert with_levels(layout, [[], []]) is layout
    assert layout.level_layout is layout
    assert layout.noised_T is layout.valid_T
    x_S = torch.ones(2)
    assert layout.per_level(x_S) is x_S


@pytest.mark.parametrize(
    "segments", [[(2, CLEAN), (2, 0)], [(5, CLEAN)], [(5, 0), (0, CLEAN)]], ids=["too short", "clean", "empty"]
)
def test_segments_that_do_not_fit_are_refused(segments: list) -> None:
    with pytest.raises(BatchError, match="sample 1 has 5 tokens and segments"):
        with_levels(SequenceLayout.from_lengths([3, 5]), [[], segments])


@pytest.mark.parametrize("split", ["contiguous", "load_balanced"])
def test_ranks_have_the_segments_of_their_tokens(split: str) -> None:
    """The runs of segments in a rank's layout match the segment ids of its tokens."""
    lengths = [9, 8, 13]
    layout = SequenceLayout.from_lengths(lengths, multiple_of=4, total_tokens=40)
    layout = with_levels(layout, [[(5, CLEAN), (4, 0)], [], [(1, 0), (7, CLEAN), (5, 1)]])
    batch = a_pack(layout)
    for rank in range(2):
        local = shard(batch, rank, 2, split).layout.level_layout  # type: ignore[arg-type]
        indices = local.local_indices
        assert indices is not None
        assert torch.equal(local.segment_ids_T, layout.level_layout.segment_ids_T[indices])
        assert torch.equal(local.valid_T, layout.valid_T[indices])
        ids, counts = torch.unique_consecutive(local.segment_ids_T, return_counts=True)
        assert [(i, n) for i, _, n in local.segment_runs] == list(zip(ids.tolist(), counts.tolist()))
        assert local.local is not None
        real = torch.bincount(local.segment_ids_T[local.valid_T], minlength=6)
        assert local.local.lengths == tuple(real.tolist())


def test_two_packs_are_joined_with_their_segments() -> None:
    joined = a_layout().followed_by(a_layout())
    twice = [*LEVEL_OF_TOKEN, *LEVEL_OF_TOKEN]
    assert joined.levels is not None
    assert joined.levels.counts == (2, 1, 3) * 2
    assert joined.noised_T.tolist() == [number not in (CLEAN, None) for number in twice]
    assert torch.equal(joined.level_layout.valid_T, joined.valid_T)


def test_packs_that_differ_in_what_they_have_are_not_joined() -> None:
    """The joined layout would be that of full packs, or have one level for each sample."""
    layout = a_layout()
    for other in (replace(layout, levels=None), layout.select(torch.arange(3)), replace(layout, is_fixed=True)):
        for first, second in ((layout, other), (other, layout)):
            with pytest.raises(AssertionError, match=r"either both packs or none|shards and fixed packs"):
                first.followed_by(second)


def test_a_shard_needs_equal_parts() -> None:
    layout = SequenceLayout.from_lengths([3, 4])
    assert layout.shard(6, 7).num_local_tokens == 1
    with pytest.raises(AssertionError, match="7 tokens have no 2 equal parts"):
        layout.shard(0, 2)


@pytest.mark.parametrize("prediction", ["velocity", "x0"])
@pytest.mark.parametrize("gamma", [None, 5.0])
def test_flow_matching_mixes_every_token_at_its_level(prediction: str, gamma: float | None) -> None:
    """Input, target and loss follow the formulas for a single token; clean tokens do not count."""
    batch = a_pack(a_layout())
    objective = FlowMatching(prediction=prediction, time_distribution="logit_normal", min_snr_gamma=gamma)  # type: ignore[arg-type]
    prepared = objective.prepare(batch, noise_of(batch))
    t_T1 = time_of_tokens(objective, batch)[:, None]
    x0_TC, eps_TC = batch.latents_TC, noise_of(batch).normal_TC("eps", 4)
    real = batch.layout.valid_T
    torch.testing.assert_close(prepared.inputs_TC[real], ((1 - t_T1) * x0_TC + t_T1 * eps_TC)[real])
    target_TC = x0_TC if prediction == "x0" else eps_TC - x0_TC
    torch.testing.assert_close(prepared.target_TC[real], target_TC[real])
    assert prepared.time_S.tolist()[0] == prepared.time_S.tolist()[4] == 0.0

    prediction_TC = torch.randn(20, 4, generator=torch.Generator().manual_seed(3)).requires_grad_()
    total, count, _ = objective.loss(prediction_TC, prepared, batch.layout)
    expected, noised = 0.0, 0
    for token, (sample, number) in enumerate(zip(SAMPLE_OF_TOKEN, LEVEL_OF_TOKEN)):
        if number in (None, CLEAN):
            continue
        t, weight = float(t_T1[token]), (1.0, 2.0, 0.5)[sample]
        if gamma is not None:
            weight *= min(((1 - t) / t) ** 2, gamma) * (1.0 if prediction == "x0" else t**2)
        elif prediction == "x0":
            weight /= max(t, MIN_TIME) ** 2
        error = (prediction_TC[token].detach() - target_TC[token]).square().mean()
        expected, noised = expected + weight * float(error), noised + 1
    assert float(total) == pytest.approx(expected, rel=1e-5)
    assert int(count) == noised == 11
    total.backward()
    assert prediction_TC.grad is not None
    assert (prediction_TC.grad.abs().sum(1) > 0).tolist() == batch.layout.noised_T.tolist()


def test_levels_are_drawn_per_sample_and_number() -> None:
    batch = a_pack(a_layout())
    quantile_L = noise_of(batch).level_L()
    assert quantile_L[[0, 4]].tolist() == [0.0, 0.0]
    assert len(set(quantile_L.tolist())) == 5
    plain = SequenceLayout.from_lengths([5, 3, 7], multiple_of=2, total_tokens=20)
    own_S = AddressedNoise(11, 4, batch.sample_ids_S, plain).level_S()
    assert torch.equal(quantile_L[[1, 2, 3]], own_S)
    shared = with_levels(plain, [[(2, 1), (1, CLEAN), (2, 1)], [], []])
    first, _, third = AddressedNoise(11, 4, batch.sample_ids_S, shared).level_L()[:3].tolist()
    assert first == third


def test_uncertainty_is_weighed_at_the_level_of_a_token() -> None:
    """loss = error / e**u + u over noised tokens only."""
    batch = a_pack(a_layout())
    objective = FlowMatching()
    objective.weighting = UncertaintyWeighting()
    prepared = objective.prepare(batch, noise_of(batch))
    prediction_TC = torch.randn(20, 5, generator=torch.Generator().manual_seed(3))
    total, _, _ = objective.loss(prediction_TC, prepared, batch.layout)
    u_T, weight_T = prediction_TC[:, 4], torch.tensor([1.0, 2.0, 0.5])[SAMPLE_OF_TOKEN]
    error_T = (prediction_TC[:, :4] - prepared.target_TC).square().mean(1)
    expected = (weight_T * (error_T * torch.exp(-u_T) + u_T))[batch.layout.noised_T].sum()
    assert float(total) == pytest.approx(float(expected), rel=1e-5)


def test_an_objective_with_one_level_per_sample_refuses_several() -> None:
    batch = a_pack(a_layout())
    with pytest.raises(ConfigError, match="use objective=flow_matching, edm or ddpm"):
        MeanFlow().prepare(batch, noise_of(batch))


def test_validation_counts_tokens_at_their_own_level() -> None:
    batch, objective = a_pack(a_layout()), FlowMatching()
    model = type("Model", (), {"in_channels": 4, "token_channels": 4, "conditions": lambda self: ()})()

    def network(inputs_TC: Tensor, time_S: Tensor, batch: PackedBatch) -> Tensor:
        return torch.zeros_like(inputs_TC)

    sums = loss_sums(network, iter([batch]), objective, model, torch.device("cpu"))
    noise = AddressedNoise(0x5A11DA7E, 0, batch.sample_ids_S, batch.layout, latent_channels=4)
    buckets_T = (noise.level_L() * NUM_BUCKETS).long()[batch.layout.level_layout.segment_ids_T]
    tokens = torch.bincount(buckets_T[batch.layout.noised_T], minlength=NUM_BUCKETS)
    assert sums[:, -1].tolist() == tokens.tolist()
    weight_T = torch.tensor([1.0, 2.0, 0.5])[SAMPLE_OF_TOKEN]
    error_T = objective.prepare(batch, noise).target_TC.square().mean(1) * weight_T
    assert float(sums[:, 0].sum()) == pytest.approx(float(error_T[batch.layout.noised_T].sum()), rel=1e-5)


def test_synthetic_levels_cover_every_kind() -> None:
    pack = a_pack(SequenceLayout.from_lengths([5, 3, 7]))
    batch = leveled(replace(pack, sample_ids_S=torch.tensor([2, 3, 4])))
    assert batch.layout.levels is not None
    assert set(batch.layout.levels.numbers) == {CLEAN, 0, 1, 2}


TIMES_L = torch.tensor([0.0, 0.2, 0.3, 0.4, 0.0, 0.6])
"""Times of the segments of `a_layout`."""
TEXTS = SequenceLayout.from_lengths([3, 1, 2], multiple_of=2, total_tokens=10)


def test_texts_have_the_first_noised_level_of_their_sample() -> None:
    """Each token has the time of its segment, in the layouts of the text, of the image and of both."""
    text_S, time_M, batch = with_text_level(TIMES_L, a_pack(a_layout()))
    image, texts = batch.layout, at_text_level(TEXTS, batch.layout.levels)
    assert text_S.tolist() == pytest.approx([0.2, 0.3, 0.4])
    assert texts.levels is not None
    assert image.level_layout.lengths == (0, 2, 3, 0, 3, 0, 1, 2, 4)
    assert texts.level_layout.padded_lengths == (3, 0, 1, 1, 1, 2, 0, 0, 0)
    joint = joint_layout(texts, image)
    of_text, of_image, of_both = (x.level_layout.per_token(time_M)[:, 0] for x in (texts, image, joint))
    assert of_text[texts.valid_T].tolist() == pytest.approx([0.2] * 3 + [0.3] + [0.4] * 2)
    before = a_layout()
    assert torch.equal(of_image[before.valid_T], before.level_layout.per_token(TIMES_L)[before.valid_T, 0])
    assert torch.equal(of_both[joint.valid_T], joint.join(of_text, of_image)[joint.valid_T])
    assert torch.equal(joint.level_layout.valid_T, joint.valid_T)


@pytest.mark.parametrize("split", ["contiguous", "load_balanced"])
def test_ranks_have_the_text_and_the_segments_of_their_tokens(split: str) -> None:
    layout = SequenceLayout.from_lengths([9, 8, 13], multiple_of=4, total_tokens=40)
    layout = with_levels(layout, [[(5, CLEAN), (4, 0)], [], [(1, 0), (7, CLEAN), (5, 1)]])
    for rank in range(2):
        local = shard(a_pack(layout), rank, 2, split)  # type: ignore[arg-type]
        _, time_M, local = with_text_level(TIMES_L, local)
        joint = joint_layout(at_text_level(TEXTS, local.layout.levels), local.layout)
        indices = local.layout.local_indices
        assert indices is not None
        times_T = layout.level_layout.per_token(TIMES_L)[indices, 0]
        time_J = joint.level_layout.per_token(time_M)[:, 0]
        assert torch.equal(joint.split(time_J)[1][local.layout.valid_T], times_T[local.layout.valid_T])


def test_references_have_the_level_of_their_sample() -> None:
    """If all segments of each sample then have one level, so has the sample."""
    layout = SequenceLayout.from_lengths([5, 3, 7], multiple_of=2, total_tokens=20)
    references = (((1, 1, 2),), (), ((1, 1, 2), (1, 1, 1)))

    def changed(segments: list, times: list[float]) -> tuple[Tensor, PackedBatch]:
        batch = replace(a_pack(with_levels(layout, segments)), reference_grids=references)
        return with_references_at_sample_time(torch.tensor(times), batch)

    time_S, batch = changed([[(3, 0), (2, CLEAN)], [], [(4, 0), (3, CLEAN)]], [0.1, 0.0, 0.2, 0.3, 0.0])
    assert batch.layout.levels is None
    assert time_S.tolist() == pytest.approx([0.1, 0.2, 0.3])
    three = [[(3, 0), (2, CLEAN)], [], [(2, CLEAN), (2, 1), (3, CLEAN)]]
    time_L, batch = changed(three, [0.1, 0.0, 0.2, 0.0, 0.3, 0.0])
    assert batch.layout.levels is not None
    assert batch.layout.levels.numbers == (0, 0, 0, CLEAN, 1, 1)
    assert time_L.tolist() == pytest.approx([0.1, 0.1, 0.2, 0.0, 0.3, 0.3])
