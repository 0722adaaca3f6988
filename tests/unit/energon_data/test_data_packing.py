"""Packing: every sample once, no pack over the limit, little padding; packs contain the values of the samples."""

from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any, Optional

import fiddle
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_data import clips, spec, write_dataset
from small_streams import take, through_disk

from benchmarks.packing import ATTENTION, MIXES, many_resolutions, measure
from dit.data_api import sample_id
from dit.errors import BatchError
from dit.patchify import grid_positions, patchify
from dit.sampling.pack_selection import select_samples
from dit.tracing.forward import ForwardCost
from energon_data.dataset import EnergonData
from energon_data.frame_levels import FrameLevels
from energon_data.indexed import Sample, Samples
from energon_data.packing import CostLimit, balanced_packs, collate, greedy_knapsack, padded_length
from energon_data.samples import Clip
from energon_data.skip_log import SkipCounter
from energon_data.task_encoder import DiffusionTaskEncoder, EncoderOptions
from recipes import models


@given(st.lists(st.integers(1, 100), max_size=200), st.integers(100, 300))
@settings(max_examples=100, deadline=None)
def test_every_item_is_in_one_bin_and_no_bin_exceeds_its_limit(lengths: list[int], capacity: int) -> None:
    bins = greedy_knapsack(lengths, capacity)
    assert sorted(i for items in bins for i in items) == list(range(len(lengths)))
    assert all(0 < sum(lengths[i] for i in items) <= capacity for items in bins)
    assert bins == greedy_knapsack(lengths, capacity)
    # No two bins could be merged: the greedy choice never leaves room for an item of a later bin.
    for first, second in pairwise(bins):
        assert sum(lengths[i] for i in first) + min(lengths[i] for i in second) > capacity


def test_waste_is_small_on_a_realistic_mix() -> None:
    rng = np.random.default_rng(0)
    lengths = [int(n) for n in np.clip(np.exp(rng.normal(6.5, 1.0, 1000)), 16, 8192)]
    bins = greedy_knapsack(lengths, 8192)
    assert sum(lengths) / (len(bins) * 8192) > 0.95


@given(st.lists(st.integers(1, 100), max_size=200), st.integers(100, 300), st.integers(1, 500), st.integers(100, 150))
@settings(max_examples=100, deadline=None)
def test_no_bin_exceeds_the_cost_limit_of_the_longest_sample(
    lengths: list[int], capacity: int, attention: int, longest: int
) -> None:
    """Costs are tokens, and n + n^2 / attention in exact fractions."""
    bins = balanced_packs(lengths, capacity, CostLimit(longest, attention))
    assert bins == balanced_packs(lengths, capacity, CostLimit(longest, attention))
    assert sorted(i for items in bins for i in items) == list(range(len(lengths)))

    def cost(items: list[int]) -> Fraction:
        return sum((lengths[i] + Fraction(lengths[i] ** 2, attention) for i in items), Fraction(0))

    budget = longest + Fraction(longest**2, attention)
    assert all(0 < sum(lengths[i] for i in items) <= capacity and cost(items) <= budget for items in bins)


def test_equal_items_are_distributed_equally() -> None:
    """24 items of 20 tokens and 60 of 10 make twelve packs, each with two of the long and five of the short items."""
    lengths = [20] * 24 + [10] * 60
    bins = balanced_packs(lengths, 100, CostLimit(100, 50))
    assert {tuple(sorted(lengths[i] for i in items)) for items in bins} == {(10,) * 5 + (20,) * 2}


def test_packs_have_at_most_six_percent_unused_tokens() -> None:
    """With pictures of many resolutions both limits matter; packs have at most 6 % more room than tokens."""
    for seed in range(4):
        lengths = many_resolutions(np.random.default_rng(seed), 1000)
        capacity = 20_480
        bins = balanced_packs(lengths, capacity, CostLimit(16_384, ATTENTION))
        assert len(bins) * capacity < 1.06 * sum(lengths)


def test_a_cost_limit_reduces_waiting_of_ranks() -> None:
    """Greedy packing pads less than 0.5 %; two budgets raise the throughput of 64 ranks by these factors."""
    for mix, bar in zip(MIXES, (1.05, 1.15, 1.15), strict=True):
        rows = {row["way"].partition(" (")[0]: row for row in measure(mix, 1000, 8, 64, ATTENTION)}
        assert rows["greedy"]["padding"] < 0.005
        assert rows["greedy"]["throughput"] == pytest.approx(1, abs=0.02)
        assert rows["two budgets"]["throughput"] > bar
        assert rows["two budgets"]["imbalance"] < rows["greedy"]["imbalance"]


def test_equal_work_tokens_match_the_traced_program() -> None:
    """A sample of n tokens costs a + b n + c n^2 in the layers, traced at three lengths; the model states b / c."""
    for component in (models.dit_s, models.dit_cross_s, models.moviegen_1b):
        model = fiddle.build(component())
        lengths = (64, 256, 1024)
        costs = [ForwardCost(model).of_sample((1, round(n**0.5), round(n**0.5))).layers for n in lengths]
        slopes = [(y - x) / (m - n) for (n, m), (x, y) in zip(pairwise(lengths), pairwise(costs))]
        c = (slopes[1] - slopes[0]) / (lengths[2] - lengths[0])
        b = slopes[0] - c * (lengths[0] + lengths[1])
        assert model.attention_tokens == pytest.approx(b / c, rel=0.4)


def test_an_item_that_cannot_fit_is_an_error_not_a_loop() -> None:
    with pytest.raises(ValueError, match="101 tokens does not fit into a pack of 100"):
        greedy_knapsack([5, 101], 100)


def _clip(number: int, size: tuple[int, int, int], text: int, fps: Optional[float] = None, **changes: Any) -> Clip:
    generator = torch.Generator().manual_seed(number)
    return Clip(
        __key__=f"k{number}",
        __restore_key__=(),
        latent=torch.randn(3, *size, generator=generator),
        metadata={},
        conditions={
            "context": torch.randn(text, 5, generator=generator),
            "pooled": torch.randn(7, generator=generator),
            "label": number % 10,
            **({} if fps is None else {"fps": fps}),
        },
        id=number,
        grid=(size[0], size[1] // 2, size[2] // 2),
        **changes,
    )


_SIZES = st.tuples(st.integers(1, 3), st.sampled_from([2, 4, 6]), st.sampled_from([2, 4]))


@given(
    st.lists(st.tuples(_SIZES, st.integers(1, 7)), min_size=1, max_size=6), st.sampled_from([1, 4, 8]), st.booleans()
)
@settings(max_examples=40, deadline=None)
def test_a_pack_contains_each_sample_at_its_position(
    samples: list[tuple[tuple[int, int, int], int]], multiple_of: int, tail: bool
) -> None:
    sizes = {"latent_channels": 3, "num_classes": 10, "context_size": 5, "pooled_size": 7}
    asked = spec(**sizes, micro_batch_size=1, multiple_of=multiple_of)
    clips = [_clip(i, size, text) for i, (size, text) in enumerate(samples)]
    needed = sum(padded_length(c.num_tokens, multiple_of) for c in clips)
    batch = collate(clips, asked, total_tokens=needed + 16 if tail else None)
    batch.validate(asked.conditions)
    assert batch.layout.total_tokens == needed + 16 * tail
    assert batch.layout.lengths == tuple(c.num_tokens for c in clips)
    at = 0
    for clip, padded in zip(clips, batch.layout.padded_lengths):
        tokens, grid = patchify(clip.latent, 1, 2)
        assert grid == clip.grid
        torch.testing.assert_close(batch.latents_TC[at : at + len(tokens)], tokens, atol=0, rtol=0)
        assert torch.equal(batch.positions_T3[at : at + len(tokens)], grid_positions(grid))
        assert not batch.latents_TC[at + len(tokens) : at + padded].any()
        at += padded
    assert not batch.latents_TC[at:].any()
    assert batch.conditions["context"].layout.lengths == tuple(text for _, text in samples)
    torch.testing.assert_close(
        batch.conditions["context"].values, torch.cat([c.conditions["context"] for c in clips]), atol=0, rtol=0
    )
    assert torch.equal(batch.conditions["pooled"].values, torch.stack([c.conditions["pooled"] for c in clips]))
    assert batch.loss_weight_S is None
    assert batch.conditions["fps"].values.tolist() == [30.0] * len(clips)


def test_conditions_without_use_in_the_model_are_omitted() -> None:
    asked = spec(latent_channels=3, num_classes=None, context_size=None, micro_batch_size=1)
    batch = collate([_clip(0, (1, 2, 2), 3, loss_weight=0.5), _clip(1, (2, 2, 2), 3, fps=12.0)], asked)
    assert set(batch.conditions) == {"fps"}
    assert batch.loss_weight_S.tolist() == [0.5, 1.0]
    assert batch.conditions["fps"].values.tolist() == [30.0, 12.0]
    with pytest.raises(BatchError, match="need 3 tokens"):
        collate([_clip(0, (1, 2, 2), 3), _clip(1, (2, 2, 2), 3)], asked, total_tokens=2)


def test_a_selection_of_a_pack_is_the_pack_of_these_samples() -> None:
    """With padding, loss weights, references and a noise level for each frame."""
    sizes = {"latent_channels": 3, "num_classes": 10, "context_size": 5, "pooled_size": 7}
    asked, levels = spec(**sizes, micro_batch_size=1, multiple_of=4), FrameLevels(own=1.0)
    edit = {"references": [torch.ones(3, 1, 4, 2)], "reference_grids": [(1, 2, 1)], "loss_weight": 0.5}
    clips = [_clip(0, (1, 2, 6), 2), _clip(1, (2, 2, 4), 4, **edit), _clip(2, (1, 4, 4), 1), _clip(3, (3, 2, 2), 3)]
    batch = levels(collate(clips, asked, total_tokens=40))
    for samples in ([2, 1], [3, 0, 1]):
        found = select_samples(replace(batch, draws_S=torch.arange(4)), samples)
        expected = levels(collate([clips[i] for i in samples], asked))
        assert found.validate(asked.conditions).draws_S.tolist() == samples
        for name in ("layout", "grids", "reference_grids", "keys"):
            assert getattr(found, name) == getattr(expected, name)
        for name in ("latents_TC", "positions_T3", "sample_ids_S", "loss_weight_S"):
            assert torch.equal(getattr(found, name), getattr(expected, name))
        for name, entry in expected.conditions.items():
            assert torch.equal(found.conditions[name].values, entry.values)
            assert found.conditions[name].layout == entry.layout


def test_the_order_of_packs_does_not_depend_on_their_lengths() -> None:
    """Every sample is longer than half a pack, so each pack has one; the order ignores which of them are long."""
    encoder = DiffusionTaskEncoder(spec(), EncoderOptions(max_tokens_per_pack=16), SkipCounter(budget=0))

    def order(lengths: list[int]) -> list[int]:
        clips = [_clip(i, (1, 4, 4), 1) for i in range(len(lengths))]
        for clip, length in zip(clips, lengths):
            clip.grid, clip.id = (1, 1, length), sample_id(clip.__key__)
        return [clips.index(clip) for (clip,) in encoder.select_samples_to_pack(clips)]

    lengths = [9 + i % 8 for i in range(64)]
    assert order(lengths) == order(lengths[::-1]) != list(range(64))


def test_repetitions_of_a_pack_are_separated_in_a_small_buffer() -> None:
    """Six samples, each forty times in the buffer and each filling a pack: no sample is repeated in a long run."""
    clips = [_clip(i % 6, (1, 4, 4), 1) for i in range(240)]
    for clip in clips:
        clip.grid, clip.id = (1, 4, 4), sample_id(clip.__key__)
    encoder = DiffusionTaskEncoder(spec(), EncoderOptions(max_tokens_per_pack=16), SkipCounter(budget=0))
    packs = encoder.select_samples_to_pack(clips)
    assert sorted(pack[0].__key__ for pack in packs) == sorted(clip.__key__ for clip in clips)
    runs = [len(list(group)) for _, group in groupby(pack[0].__key__ for pack in packs)]
    assert max(runs) <= 5  # at random: 240 / 6**5 = 0.03 runs of six are to be expected


@dataclass(kw_only=True)
class Squares(Samples):
    """Samples of four tokens; the first are damaged."""

    count: int
    damaged: int

    def __len__(self) -> int:
        return self.count + self.damaged

    def __getitem__(self, index: int) -> Sample:
        assert index >= self.damaged
        return Sample(torch.zeros(2, 4, 4))


@pytest.mark.parametrize("source", ["folder", "samples"])
@pytest.mark.parametrize(
    ("count", "packs"), [(5, [15]), (20, [16, 4]), (48, [16, 8] * 2), (60, [16, 4] * 3), (62, [16, 5, 16, 5, 16, 4])]
)
def test_packs_have_every_sample_once_per_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, count: int, packs: list[int]
) -> None:
    """A pack of 16 samples has several complete passes over 5; buffers are equal parts of up to 24 of a larger set."""
    monkeypatch.setattr("energon_data.packing.BUFFERED", 24)
    monkeypatch.setattr("energon_data.task_encoder.BUFFERED", 24)
    common: dict[str, Any] = {"max_tokens_per_pack": 64, "pack_multiple_of": 1, "background": False, "num_streams": 1}
    data: EnergonData | Squares = Squares(count=count, damaged=0, **common)
    if source != "samples":
        folder = write_dataset(tmp_path / "data", {"train": clips(count, sizes=[(1, 4, 4)])})
        data = EnergonData(path=str(folder), **common)
    asked = spec(num_classes=None, context_size=None, micro_batch_size=1, conditions=())

    def opened() -> Any:
        return data.build_train(asked, dp_rank=0, dp_size=1, seed=5, log_dir=None)

    stream = opened()
    read = [list(next(stream).keys) for _ in range(12)]  # complete passes, because 1, 2, 4 and 6 divide 12
    for start in range(0, len(read), len(packs)):
        of_pass = read[start : start + len(packs)]
        assert sorted(map(len, of_pass)) == sorted(packs)
        keys = [key for pack in of_pass for key in pack]
        assert len(set(keys)) == count
        assert len(keys) == sum(packs)
    for steps in (1, 2, 5):
        stopped, resumed = opened(), opened()
        take(stopped, steps)
        resumed.load_state_dict(through_disk(stopped.state_dict()))
        assert [list(batch.keys) for batch in take(resumed, 4)] == read[steps : steps + 4]


@pytest.mark.parametrize(("source", "streams"), [("folder", 1), ("folder", 2), ("samples", 1)])
def test_packs_of_streams_with_dropped_samples_have_every_sample_once_per_pass(
    tmp_path: Path, source: str, streams: int
) -> None:
    common: dict[str, Any] = {"max_tokens_per_pack": 64, "pack_multiple_of": 1, "background": False}
    data: EnergonData | Squares = Squares(count=36, damaged=4, max_lost_samples=99, num_streams=streams, **common)
    if source == "folder":
        folder = write_dataset(tmp_path / "data", {"train": clips(40, sizes=[(1, 4, 4)])})
        data = EnergonData(path=str(folder), min_aesthetic_score=0.1, num_streams=streams, **common)
    asked = spec(micro_batch_size=1, conditions=())
    stream = data.build_train(asked, dp_rank=0, dp_size=1, seed=5, log_dir=None, micro_batches_per_step=streams)
    packs = take(stream, 12 * streams)
    for number in range(streams):
        keys = [key for pack in packs[number::streams] for key in pack.keys]
        size = len(set(keys))
        assert 12 <= size <= 36
        assert all(len(set(keys[i : i + size])) == size for i in range(0, len(keys) - size, size))


@pytest.mark.parametrize("source", ["folder", "samples"])
def test_the_end_of_a_pass_is_not_packed_with_the_next_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    """Of 48 samples 31 are kept: one buffer of 24, and one of the other seven."""
    monkeypatch.setattr("energon_data.packing.BUFFERED", 24)
    monkeypatch.setattr("energon_data.task_encoder.BUFFERED", 24)
    common: dict[str, Any] = {"max_tokens_per_pack": 64, "pack_multiple_of": 1, "background": False, "num_streams": 1}
    data: EnergonData | Squares = Squares(count=31, damaged=17, max_lost_samples=999, **common)
    if source == "folder":
        folder = write_dataset(tmp_path / "data", {"train": clips(48, sizes=[(1, 4, 4)])})
        data = EnergonData(path=str(folder), min_aesthetic_score=17 / 48, **common)
    stream = data.build_train(spec(micro_batch_size=1, conditions=()), dp_rank=0, dp_size=1, seed=5, log_dir=None)
    for _ in range(6):
        packs = take(stream, 3)
        assert sorted(len(pack.keys) for pack in packs) == [7, 8, 16]
        assert len({key for pack in packs for key in pack.keys}) == 31
