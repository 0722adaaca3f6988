"""Changes that the step makes to a micro-batch before the network gets it: dropped conditions, and how often."""

import math
from typing import Optional

import pytest
import torch

from dit.backends.provider import LayerProvider
from dit.batch import PackedBatch
from dit.conditions import Conditions, Entry
from dit.data_api import merge_states
from dit.layers.embeddings import VectorEmbedder
from dit.layers.text import TextTokens
from dit.layout import SequenceLayout
from dit.models.base import ModelConfig, Stage
from dit.models.dit.config import DiTConfig
from dit.models.flux.config import FluxConfig
from dit.objectives.addressed_noise import AddressedNoise
from dit.objectives.flow_matching import FlowMatching
from dit.step.forward_step import drop_conditions, training_forward_step
from energon_data.mock import MockData
from energon_data.streams import StreamGroup

NUM_CLASSES = 7
SAMPLES = 1 << 14


def batch_of(count: int, *, classes: bool = True, texts: bool = True) -> PackedBatch:
    """Return samples of one token, each with a label, a text of one token and a pooled text."""
    layout = SequenceLayout.from_lengths([1] * count)
    return PackedBatch(
        latents_TC=torch.zeros(count, 4),
        positions_T3=torch.zeros(count, 3, dtype=torch.int64),
        layout=layout,
        sample_ids_S=torch.arange(count),
        grids=((1, 1, 1),) * count,
        keys=("",) * count,
        conditions=Conditions(
            label=Entry("sample", torch.arange(count) % NUM_CLASSES) if classes else None,
            context=Entry("text", torch.ones(count, 6), layout) if texts else None,
            pooled=Entry("sample", torch.ones(count, 3)) if texts else None,
        ),
    )


def dropped(
    batch: PackedBatch, p: float, q: float, model: Optional[ModelConfig] = None
) -> tuple[PackedBatch, AddressedNoise]:
    model = model or DiTConfig(num_classes=NUM_CLASSES, class_dropout=p, context_size=6, context_dropout=q)
    noise = AddressedNoise(3, 11, batch.sample_ids_S, batch.layout)
    return drop_conditions(batch, noise, model), noise


def assert_share(flags_S: torch.Tensor, share: float) -> None:
    """Check the number of independent draws within four standard errors of the binomial law."""
    error = math.sqrt(share * (1 - share) / len(flags_S))
    assert flags_S.float().mean().item() == pytest.approx(share, abs=4 * error)


SHARES = [(0.1, 0.1), (0.1, 0.3), (0.3, 0.1), (0.0, 0.2), (0.2, 0.0), (1.0, 0.2), (0.2, 1.0)]


@pytest.mark.parametrize(("p", "q"), SHARES)
def test_class_and_text_are_dropped_in_their_shares_and_together(p: float, q: float) -> None:
    """Class on p of the samples, text on q, both on min(p, q): if p = q, they are always dropped together."""
    batch, noise = dropped(batch_of(SAMPLES), p, q)
    no_class_S, no_text_S = batch.conditions["label"].values == NUM_CLASSES, batch.conditions["context"].dropped_S
    assert_share(no_class_S, p)
    assert_share(no_text_S, q)
    assert int((no_class_S & no_text_S).sum()) == min(int(no_class_S.sum()), int(no_text_S.sum()))
    assert torch.equal(
        batch.conditions["label"].values[~no_class_S], (torch.arange(SAMPLES) % NUM_CLASSES)[~no_class_S]
    )
    either_S = no_class_S | no_text_S
    if 0 < max(p, q) < 1:  # independent of the noise level: the mean of n uniform draws has deviation sqrt(1 / 12 n)
        levels = noise.level_S()[either_S]
        assert levels.mean().item() == pytest.approx(0.5, abs=4 / math.sqrt(12 * len(levels)))


@pytest.mark.parametrize("share", [0.0, 0.1, 0.6, 1.0])
def test_a_single_condition_is_dropped_in_its_share(share: float) -> None:
    """The share of a condition that a model does not have does not matter."""
    only_class, _ = dropped(batch_of(SAMPLES, texts=False), share, 0.5)
    assert_share(only_class.conditions["label"].values == NUM_CLASSES, share)
    assert "context" not in only_class.conditions
    only_text, _ = dropped(batch_of(SAMPLES, classes=False), 0.5, share)
    assert_share(only_text.conditions["context"].dropped_S, share)
    assert "label" not in only_text.conditions


def test_a_text_is_dropped_with_its_pooled_embedding(provider: LayerProvider) -> None:
    """Samples with the null token as their text also have the null vector as their pooled embedding."""
    model = FluxConfig(context_size=6, pooled_size=3, context_dropout=0.4)
    batch, _ = dropped(batch_of(64), 0.0, 0.4, model)
    tokens, pooled = TextTokens(6, provider), VectorEmbedder("pooled", 3, 8, provider)
    for parameter in [*tokens.parameters(), *pooled.parameters()]:
        torch.nn.init.constant_(parameter, 0.5)
    context_KD, _ = tokens(batch)
    assert torch.equal((context_KD == tokens.null).all(1), batch.conditions["context"].dropped_S)
    vectors_SD = pooled(batch)
    without_text = vectors_SD[batch.conditions["context"].dropped_S.nonzero()[0, 0]]
    assert torch.equal((vectors_SD == without_text).all(1), batch.conditions["context"].dropped_S)
    assert 0 < int(batch.conditions["context"].dropped_S.sum()) < 64


class Seen:
    """A stand-in network that records key, time, noise and label of every sample, and predicts zeros."""

    stage = Stage(range(1))

    def __init__(self) -> None:
        self.samples: list[tuple[str, float, tuple[float, ...], int]] = []

    def __call__(self, inputs_TC: torch.Tensor, time_S: torch.Tensor, batch: PackedBatch) -> torch.Tensor:
        t_T1 = batch.layout.per_token(time_S)
        eps_TC = (inputs_TC - (1 - t_T1) * batch.latents_TC) / t_T1  # flow matching
        for i, (start, length) in enumerate(zip(batch.layout.starts, batch.layout.lengths)):
            eps = tuple(eps_TC[start : start + length].flatten().tolist())
            self.samples.append((batch.keys[i], float(time_S[i]), eps, int(batch.conditions["label"].values[i])))
        return torch.zeros_like(inputs_TC)

    def sum_over_context_ranks(self, x: torch.Tensor) -> torch.Tensor:
        return x


GLOBAL_BATCH, PICTURES, NUM_STEPS = 32, 5, 2
FEW = MockData(dataset_size=PICTURES, height=4, width=4)
PACKS = MockData(
    dataset_size=PICTURES, shapes=["1x4x4", "1x4x8"], num_streams=4, max_tokens_per_pack=24, pack_multiple_of=4
)


def trained_on(data: MockData, dp: int, micro_batch: int, resumed_on: Optional[int] = None) -> list[list[tuple]]:
    """Return the network's inputs of each step on `dp` ranks, sorted; the second half on `resumed_on` ranks if set."""
    model = DiTConfig(num_classes=NUM_CLASSES, class_dropout=0.5)
    spec = model.batch_spec(micro_batch_size=micro_batch)

    def ranks(count: int) -> list[StreamGroup]:
        return [data.build_train(spec, dp_rank=r, dp_size=count, seed=2, log_dir=None) for r in range(count)]

    streams, steps = ranks(dp), []
    for step in range(NUM_STEPS):
        if resumed_on is not None and step == NUM_STEPS // 2:
            state, streams = merge_states([stream.state_dict() for stream in streams]), ranks(resumed_on)
            for stream in streams:
                stream.load_state_dict(state)
        seen = Seen()
        forward_step = training_forward_step(FlowMatching(), model, 7, step)
        for stream in streams:
            for _ in range(GLOBAL_BATCH // micro_batch // len(streams)):
                forward_step(stream, seen)
        steps.append(sorted(seen.samples))
    return steps


def test_repetitions_of_a_picture_in_one_step_have_different_noise() -> None:
    """Five pictures, 32 samples a step: 32 noise levels, 32 noises, and copies with and without a class."""
    for samples in trained_on(FEW, 1, 8):
        assert len(samples) == GLOBAL_BATCH
        assert len({time for _, time, _, _ in samples}) == GLOBAL_BATCH
        eps = torch.tensor([eps for _, _, eps, _ in samples])
        assert (torch.corrcoef(eps) - torch.eye(GLOBAL_BATCH)).abs().max() < 0.7  # from 64 numbers each
        assert len({key for key, _, _, _ in samples}) == PICTURES
        assert len({(key, label) for key, _, _, label in samples}) > PICTURES


@pytest.mark.parametrize(
    ("data", "dp", "micro_batch", "resumed_on"),
    [
        (FEW, 2, 8, None),
        (FEW, 4, 2, None),
        (FEW, 1, 8, 1),
        (PACKS, 2, 1, None),
        (PACKS, 1, 1, 4),
        (PACKS, 4, 1, 2),
    ],
)
def test_noise_is_the_same_on_any_layout_and_after_resume(
    data: MockData, dp: int, micro_batch: int, resumed_on: Optional[int]
) -> None:
    """Data-parallel size, micro-batch size, and a stop between two steps only move samples to other ranks."""
    expected = trained_on(data, 1, 1 if data is PACKS else 32)
    assert trained_on(data, dp, micro_batch, resumed_on) == expected
    assert all(len(samples) == len({time for _, time, *_ in samples}) for samples in expected)
