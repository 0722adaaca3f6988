"""Mock data: a sample depends only on seed and number, and packs are full and valid."""

import math
from dataclasses import replace

import pytest
import torch
from small_data import spec

from dit.conditions import Condition
from dit.data_api import BatchSpec, sample_id
from dit.errors import ConfigError, DataError
from energon_data.mock import MockData, MockSource

MIXED = ["1x8x8", "1x4x8", "4x4x4"]


def source(data: MockData, s: BatchSpec, **where: int) -> MockSource:
    return MockSource(data, s, **({"seed": 1, "stream": 0, "num_streams": 1} | where), split="train")


def test_a_sample_is_a_function_of_its_number() -> None:
    data = MockData(shapes=MIXED, text_tokens=6)
    batches = [source(data, spec(), stream=s, num_streams=2) for s in range(2)]
    seen = {}
    for stream, reader in enumerate(batches):
        for step in range(5):
            batch = reader.next().batch.validate(spec().conditions)
            for i, key in enumerate(batch.keys):
                number = (4 * step + i) * 2 + stream
                assert key == f"mock-train-1-{number}"
                assert int(batch.sample_ids_S[i]) == sample_id(key)
                assert 3 <= batch.conditions["context"].layout.lengths[i] <= 6
                assert (batch.conditions["fps"].values[i] == 30) == (batch.grids[i][0] == 1)
                seen[key] = batch.latents_TC[batch.layout.segment_ids_T == i]
    assert len(seen) == 40
    alone = source(data, spec(micro_batch_size=40))
    batch = alone.next().batch
    for i, key in enumerate(batch.keys):
        assert torch.equal(seen[key], batch.latents_TC[batch.layout.segment_ids_T == i])
    assert len(set(batch.grids)) == 3


def test_a_still_is_repeated_to_one_patch_of_frames() -> None:
    """As in real data: with a temporal patch of 2, a still has the tokens of a clip without motion."""
    data = MockData(shapes=["1x8x8", "4x8x8"])
    batch = source(data, spec(patch_temporal=2)).next().batch.validate()
    assert set(batch.grids) == {(1, 4, 4), (2, 4, 4)}
    for i, grid in enumerate(batch.grids):
        tokens = batch.latents_TC[batch.layout.segment_ids_T == i].unflatten(-1, (4, 2, 2))  # (ph pw) pt C
        assert torch.equal(tokens[..., 0, :], tokens[..., 1, :]) == (grid[0] == 1)
    data.check_settings(spec(patch_temporal=2), 1, 4)
    with pytest.raises(ConfigError, match="3 x 8 x 8"):
        MockData(shapes=["3x8x8"]).check_settings(spec(patch_temporal=2), 1, 4)


@pytest.mark.parametrize(
    ("limits", "interval"), [((1.0, 10.0), (1, 10)), ((5.0, math.inf), (5, 6)), ((-math.inf, math.inf), (-1, 1))]
)
def test_numbers_are_drawn_between_their_limits_and_half_of_the_optional_ones_are_missing(limits, interval) -> None:
    score = Condition(name="score", axis="sample", description="score", stored_as=("score",), limits=limits)
    low, high = interval
    for condition, missing in ((score, 0), (replace(score, default=-9.0), 1)):
        reader = source(MockData(), replace(spec(), conditions=(condition,), micro_batch_size=200))
        values = reader.next().batch.conditions["score"].values
        stored = values[values != -9.0]
        assert (len(stored) < 150) == (200 - len(stored) > 50) == missing
        assert low <= stored.min() < low + 0.1 * (high - low) < high - 0.1 * (high - low) < stored.max() <= high


def test_pooled_texts_are_drawn_where_the_model_takes_them() -> None:
    """Pooled texts differ between samples and change nothing else."""
    plain, pooled = (source(MockData(), spec(pooled_size=size)).next() for size in (None, 6))
    assert "pooled" not in plain.batch.conditions
    assert pooled.batch.conditions["pooled"].values.shape == (4, 6)
    assert len(pooled.batch.conditions["pooled"].values.unique(dim=0)) == 4
    assert torch.equal(plain.batch.latents_TC, pooled.batch.latents_TC)
    assert torch.equal(plain.batch.conditions["context"].values, pooled.batch.conditions["context"].values)


def test_drawing_does_not_change_the_global_generator() -> None:
    before = torch.get_rng_state()
    source(MockData(), spec()).next()
    assert torch.equal(before, torch.get_rng_state())


def test_classes_differ_more_than_samples_of_one_class() -> None:
    data = MockData(height=8, width=8)
    reader = source(data, spec(context_size=None))
    samples = [reader.sample(i) for i in range(300)]
    means = {c: torch.stack([s.latent for s in samples if s.conditions["label"] == c]).mean(0) for c in range(10)}
    right = sum(
        min(means, key=lambda c: float((means[c] - s.latent).square().sum())) == s.conditions["label"]
        for s in samples[:100]
    )
    assert right > 95


@pytest.mark.parametrize("multiple_of", [1, 8])
def test_packs_are_full_valid_and_ordered(multiple_of: int) -> None:
    data = MockData(shapes=MIXED, max_tokens_per_pack=64, pack_multiple_of=8)
    s = spec(micro_batch_size=1, multiple_of=multiple_of)
    data.validate(s, 1, 1)
    reader = source(data, s)
    keys, filled = [], 0
    for _ in range(30):
        batch = reader.next().batch.validate(spec().conditions)
        assert batch.layout.total_tokens == 64
        assert all(n % multiple_of == 0 for n in batch.layout.padded_lengths)
        keys += batch.keys
        filled += sum(batch.layout.padded_lengths)
    assert keys == [f"mock-train-1-{i}" for i in range(len(keys))]
    assert filled / (30 * 64) > 0.85


def test_a_finite_data_set_repeats() -> None:
    data = MockData(dataset_size=6)
    reader = source(data, spec())
    batches = [reader.next().batch for _ in range(6)]
    assert [b.keys for b in batches[:3]] == [b.keys for b in batches[3:]]
    assert torch.equal(batches[0].latents_TC, batches[3].latents_TC)


@pytest.mark.parametrize("dp", [1, 3])
def test_validation_is_finite_repeatable_and_never_trained_on(dp: int) -> None:
    data = MockData(validation_samples=14)  # micro-batches of 4, 4, 4 and 2
    ranks = [list(data.build_validation(spec(), dp_rank=r, dp_size=dp)) for r in range(dp)]
    assert {len(r) for r in ranks} == {-(-4 // dp)}
    assert sum(b.layout.num_samples for rank in ranks for b in rank if not b.repeated) == 14
    again = list(data.build_validation(spec(), dp_rank=0, dp_size=dp))
    assert [b.keys for b in again] == [b.keys for b in ranks[0]]
    assert all(key.startswith("mock-val-") for rank in ranks for b in rank for key in b.keys)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (MockData(shapes=["8x8"]), "frames x height x width"),
        (MockData(shapes=[]), "is empty"),
        (MockData(height=5), "cannot be cut into patches of 1 x 2 x 2"),
        (MockData(max_tokens_per_pack=48), "too short for the longest sample: 64 tokens.*use 64"),
        (
            MockData(max_tokens_per_pack=72),
            "must be a multiple of data.pack_multiple_of=16; use 80, or data.pack_multiple_of=8",
        ),
        (MockData(max_tokens_per_pack=90, pack_multiple_of=6), "multiple of 4, to which the run pads .*of=12"),
        (MockData(dataset_size=0), "data.dataset_size=0"),
        (MockData(text_tokens=0), "data.text_tokens=0"),
        (MockData(num_streams=4), "a step of 6 micro-batches .* must be a multiple of data.num_streams=4"),
    ],
)
def test_impossible_settings_name_the_numbers(data: MockData, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        data.validate(spec(micro_batch_size=1, multiple_of=4), 2, 6)


def test_packs_require_micro_batches_of_one_and_resume_requires_the_seed() -> None:
    with pytest.raises(ConfigError, match="micro_batch_size is 4"):
        MockData(max_tokens_per_pack=64).validate(spec(), 1, 1)
    reader = source(MockData(), spec())
    with pytest.raises(DataError, match="seed 1, this run has 2"):
        source(MockData(), spec(), seed=2).load(reader.state().state)
    assert MockData().class_names() is None
