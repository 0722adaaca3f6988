"""Data sources with random access: order, packs, held-out samples and positions, on any number of ranks."""

import errno
import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch

from dit.batch import PackedBatch
from dit.condition_table import LABEL
from dit.conditions import Condition
from dit.data_api import BatchSpec, check_resumed_streams, merge_states
from dit.errors import ConfigError, DataError
from energon_data.indexed import Sample, Samples

COUNT = 23
SPEC = BatchSpec(
    patch_temporal=1,
    patch_spatial=2,
    latent_channels=1,
    conditions=(replace(LABEL, num_classes=COUNT),),
    micro_batch_size=3,
)
SCORE = Condition(name="score", axis="sample", description="score", null=0.0, stored_as=("quality",))
PACKS = {"max_tokens_per_pack": 32, "pack_multiple_of": 4, "packing_buffer_size": 7}
PACK_SPEC = replace(SPEC, micro_batch_size=1)


@dataclass(kw_only=True)
class Numbers(Samples):
    """Sample i has the value and the class i; every third one is a larger picture, and some are `damaged`."""

    count: int = COUNT
    damaged: tuple[int, ...] = ()
    background: bool = False

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Sample:
        if index in self.damaged:
            raise ValueError(f"sample {index} is broken")
        side = 8 if index % 3 == 0 else 4
        return Sample(torch.full((1, side, 4), float(index)), {"label": index})


@pytest.mark.parametrize("shape", [(), (3,)])
def test_a_missing_value_is_the_default(shape: tuple[int, ...]) -> None:
    @dataclass(kw_only=True)
    class Scored(Numbers):
        def __getitem__(self, index: int) -> Sample:
            value = np.full(shape, 7.0, np.float32) if shape else 7.0
            return Sample(torch.zeros(1, 4, 4), {"label": 1} | ({} if index % 2 else {"quality": value}))

    data = Scored(count=8)
    spec = replace(SPEC, conditions=(*SPEC.conditions, replace(SCORE, shape=shape, default=-1.0)), micro_batch_size=8)
    streams = data.build_train(spec, dp_rank=0, dp_size=1, seed=0, log_dir=None)
    values = next(iter(streams)).conditions["score"].values
    assert values.shape == (8, *shape)
    assert sorted(values.unique().tolist()) == [-1.0, 7.0]
    required = replace(spec, conditions=(*SPEC.conditions, replace(SCORE, shape=shape)))
    with pytest.raises(DataError, match=r"no quality.* or declare the condition with a default"):
        Numbers().validate(required, 1, 1)


def test_values_of_undeclared_conditions_are_reported() -> None:
    """A condition of the table that the model does not take gets a line from `match_conditions`."""

    class Scored(Numbers):
        def __getitem__(self, index: int) -> Sample:
            return Sample(torch.zeros(1, 4, 4), {"label": 1, "quality": 5.5, "fps": 8.0})

    assert Scored().remarks(SPEC) == ["Scored gives quality, which the model does not take"]
    assert Scored().remarks(replace(SPEC, conditions=(*SPEC.conditions, SCORE))) == []


@dataclass(kw_only=True)
class Stored(Samples):
    """Pictures of one class and height in memory, which are counted when they are read."""

    values: list[float]
    label: int = 0
    side: int = 4
    reads: list[int] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, index: int) -> Sample:
        self.reads.append(index)
        if math.isnan(self.values[index]):
            raise ValueError("broken")
        return Sample(torch.full((1, self.side, 16 // self.side), self.values[index]), {"label": self.label})


def test_the_identity_changes_with_the_samples() -> None:
    """It depends on latents, their shapes, conditions, damage and the number of samples."""
    values = [float(i) for i in range(20)]
    ((name, text),) = Stored(values=values).identity()[""].items()
    assert name == "Stored"
    assert text.startswith("20 samples, digest ")
    assert Stored(values=[*values]).identity() == {"": {name: text}}
    others = [Stored(values=values, label=1), Stored(values=values, side=2), Stored(values=values[:-1])]
    for i in range(20):
        others += [Stored(values=[*values[:i], value, *values[i + 1 :]]) for value in (0.5, math.nan)]
    texts = {data.identity()[""][name] for data in others}
    assert len(texts | {text}) == len(others) + 1


@pytest.mark.parametrize("count", [1000, 100_000])
def test_the_identity_reads_a_few_samples(count: int) -> None:
    data = Stored(values=[1.0] * count)
    before = data.identity()
    assert len(set(data.reads)) == len(data.reads) <= 64
    assert max(data.reads) > 0.9 * count
    data.values = [2.0] * count
    assert data.identity() != before


@dataclass(kw_only=True)
class Unusual(Samples):
    """Two samples, of which the second is unusual, or an error when it is read."""

    second: Any
    first: Sample = field(default_factory=lambda: picture())

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> Sample:
        if index == 0:
            return self.first
        if isinstance(self.second, Exception):
            raise self.second
        return self.second


def picture(**conditions: Any) -> Sample:
    return Sample(torch.zeros(1, 4, 4), conditions)


@pytest.mark.parametrize("kind", [object, type(None)])
def test_the_identity_does_not_depend_on_addresses(kind: Callable[[], object]) -> None:
    """None has another address in this process than in the process that saved the checkpoint."""

    def samples() -> list[Any]:
        conditions = kind(), np.array(kind(), dtype=object), np.array([kind()], dtype=object)
        return [kind(), *(picture(text=text) for text in conditions)]

    kept = samples(), samples()  # so that no address is used twice
    before, after = ([Unusual(second=second).identity() for second in each] for each in kept)
    assert before == after


def test_a_disk_error_is_not_the_identity_of_a_sample() -> None:
    """A decoder's error or a missing file is part of the identity, because such a sample is damaged in every run."""
    with pytest.raises(OSError, match="Input/output error"):
        Unusual(second=OSError(errno.EIO, "Input/output error")).identity()
    damaged = [OSError("image file is truncated"), FileNotFoundError(errno.ENOENT, "no such file"), None, picture()]
    assert len({str(Unusual(second=second).identity()) for second in damaged}) == 4


def stream(data: Samples, spec: BatchSpec = SPEC, *, rank: int = 0, ranks: int = 1, seed: int = 5) -> Iterator:
    return data.build_train(spec, dp_rank=rank, dp_size=ranks, seed=seed, log_dir=None, micro_batches_per_step=4)


def labels(batch: PackedBatch) -> list[int]:
    found = batch.conditions["label"].values.tolist()
    ends = [int(batch.latents_TC[start, 0]) for start in batch.layout.cu_seqlens_padded[:-1].tolist()]
    assert found == ends  # values and conditions belong together
    return found


def test_a_run_that_validates_needs_held_out_samples() -> None:
    Numbers(validation_samples=1).validate_held_out()
    with pytest.raises(ConfigError, match=r"set data.validation_samples, or train with training.validation_interval=0"):
        Numbers().validate_held_out()


def test_every_epoch_has_every_sample_once_in_a_new_order() -> None:
    data = Numbers(validation_samples=5, num_streams=1)
    spec = replace(SPEC, micro_batch_size=18)
    epochs = [labels(batch) for batch in islice(stream(data, spec), 3)]
    held_out = [label for batch in data.build_validation(SPEC, dp_rank=0, dp_size=1) for label in labels(batch)]
    assert len(held_out) == len(set(held_out)) == 5
    assert held_out != sorted(held_out)
    assert all(sorted(epoch + held_out) == list(range(COUNT)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    assert labels(next(stream(data, spec, seed=6))) != epochs[0]


def test_the_streams_of_a_run_share_an_epoch() -> None:
    batches = list(islice(stream(Numbers(), replace(SPEC, micro_batch_size=1)), 2 * COUNT))
    seen = [label for batch in batches for label in labels(batch)]
    assert sorted(seen[:COUNT]) == sorted(seen[COUNT:]) == list(range(COUNT))


def test_packs_stay_below_their_limit_and_have_every_sample_once() -> None:
    data = Numbers(**PACKS, num_streams=1)
    batches = list(islice(stream(data, PACK_SPEC), 40))
    assert all(batch.layout.total_tokens <= 32 for batch in batches)
    assert max(len(labels(batch)) for batch in batches) > 2
    seen = [label for batch in batches for label in labels(batch)]
    counts = Counter(seen[: COUNT * (len(seen) // COUNT)])
    assert max(counts.values()) - min(counts.values()) <= 2  # buffers reach across the end of an epoch
    assert len(counts) == COUNT


@pytest.mark.parametrize(("settings", "spec"), [({}, SPEC), (PACKS, PACK_SPEC)], ids=["dense", "packs"])
@pytest.mark.parametrize("taken", [3, 4, 13])
def test_a_resumed_run_continues_on_another_number_of_ranks(settings: dict, spec: BatchSpec, taken: int) -> None:
    """This includes positions inside a packing buffer; draws of repeated samples keep their numbers."""
    data = Numbers(**settings)
    whole = list(islice(stream(data, spec), 4 * taken + 16))
    before = [stream(data, spec, rank=rank, ranks=4) for rank in range(4)]
    for rank in before:
        list(islice(rank, taken))
    state = merge_states([rank.state_dict() for rank in before])
    for ranks in (1, 2, 4, 8):
        resumed = [stream(data, spec, rank=rank, ranks=ranks) for rank in range(ranks)]
        for rank in resumed:
            rank.load_state_dict(state)
        check_resumed_streams(state, [rank.state_dict()["streams"] for rank in resumed])
        for number, expected in enumerate(whole[4 * taken :]):
            batch = next(resumed[number % ranks])
            assert labels(batch) == labels(expected)
            assert torch.equal(batch.draws_S, expected.draws_S)


def test_a_position_of_other_data_is_refused() -> None:
    first = stream(Numbers())
    next(first)
    state = first.state_dict()
    for data, seed in ((Numbers(count=24), 5), (Numbers(validation_samples=2), 5), (Numbers(), 6)):
        with pytest.raises(ConfigError, match=r"was saved with other settings \((size|validation_samples|seed) was"):
            stream(data, seed=seed).load_state_dict(state)


@pytest.mark.parametrize(("taken", "background"), [(1, False), (3, True), (8, False)])
@pytest.mark.parametrize(
    ("settings", "spec", "new_settings", "new_spec"),
    [
        (PACKS, PACK_SPEC, {"pack_multiple_of": 8}, replace(PACK_SPEC, multiple_of=8)),
        ({}, SPEC, {}, replace(SPEC, micro_batch_size=2)),
    ],
    ids=["packs", "dense"],
)
def test_a_resumed_run_may_change_the_grouping(
    settings: dict, spec: BatchSpec, new_settings: dict, new_spec: BatchSpec, taken: int, background: bool
) -> None:
    """No sample is repeated or lost, even after two changes within one buffer."""
    count = 499
    data = Numbers(**settings, num_streams=1, count=count, background=background)
    changed = replace(data, **new_settings)
    seen, state = list[int](), None
    for source, source_spec, items in ((data, spec, taken), (changed, new_spec, 1), (data, spec, 1), (data, spec, 20)):
        resumed = stream(source, replace(source_spec, conditions=(replace(LABEL, num_classes=count),)))
        if state is not None:
            resumed.load_state_dict(state)
        seen += [label for _ in range(items) for label in labels(next(resumed))]
        state = resumed.state_dict()
        resumed.close()
    single = replace(SPEC, micro_batch_size=1, conditions=(replace(LABEL, num_classes=count),))
    order = [labels(batch)[0] for batch in islice(stream(Numbers(num_streams=1, count=count), single), count)]
    draws = sorted(map(order.index, seen))
    assert len(set(draws)) == len(draws)
    assert set(range(max(draws) - 2 * 7)) <= set(draws)  # the last packs of a buffer are not delivered yet


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize(("settings", "spec"), [({}, SPEC), (PACKS, PACK_SPEC)], ids=["dense", "packs"])
def test_held_out_samples_are_the_same_on_any_number_of_ranks(settings: dict, spec: BatchSpec, ranks: int) -> None:
    data = Numbers(validation_samples=7, **settings)
    one = [labels(batch) for batch in data.build_validation(spec, dp_rank=0, dp_size=1)]
    assert sum(map(len, one)) == 7
    shared = [list(data.build_validation(spec, dp_rank=rank, dp_size=ranks)) for rank in range(ranks)]
    assert len({len(batches) for batches in shared}) == 1
    counted = [labels(batch) for batches in zip(*shared) for batch in batches if not batch.repeated]
    assert counted == one


def test_a_damaged_sample_is_dropped_within_the_budget() -> None:
    data = Numbers(damaged=(4, 9), max_lost_samples=4, num_streams=1)
    damaged = stream(data, replace(SPEC, micro_batch_size=7))
    seen = [label for batch in islice(damaged, 3) for label in labels(batch)]
    assert not {4, 9} & set(seen)
    assert damaged.sample_counts().by_reason() == {"error": 2}
    with pytest.raises(DataError, match=r"sample 4 is broken|sample 9 is broken"):
        list(islice(stream(Numbers(damaged=(4, 9)), replace(SPEC, micro_batch_size=7)), 9))


@pytest.mark.parametrize("budget", [0, COUNT])
def test_a_held_out_pass_drops_damaged_samples_within_the_budget(budget: int) -> None:
    data = Numbers(validation_samples=7, max_lost_samples=budget)
    (kept, *_), *_rest = [labels(batch) for batch in data.build_validation(SPEC, dp_rank=0, dp_size=1)]
    damaged = replace(data, damaged=tuple(set(range(COUNT)) - {kept}))
    if budget:
        assert [labels(batch) for batch in damaged.build_validation(SPEC, dp_rank=0, dp_size=1)] == [[kept]]
    else:
        with pytest.raises(DataError, match=r"dropped damaged sample .* is broken"):
            list(damaged.build_validation(SPEC, dp_rank=0, dp_size=1))


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (
            {"count": 5, "validation_samples": 5},
            "Numbers has 5 samples and data.validation_samples=5 leaves none",
        ),
        ({"max_tokens_per_pack": 32}, "micro_batch_size is 3; set micro_batch_size=1"),
        ({"packing_buffer_size": 3}, "data.packing_buffer_size=3 .* without data.max_tokens_per_pack"),
        ({"num_streams": 3}, "must be a multiple of data.num_streams=3"),
        ({"max_lost_samples": -1}, "max_lost_samples=-1"),
    ],
)
def test_impossible_settings_are_refused(settings: dict, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Numbers(**settings).validate(SPEC, 1, 4)


def test_a_first_sample_that_does_not_fit_the_model_is_refused() -> None:
    Numbers().validate(SPEC, 1, 4)
    with pytest.raises(DataError, match=r"the latent has 1 channels, the model 4; correct Numbers.__getitem__"):
        Numbers().validate(replace(SPEC, latent_channels=4), 1, 4)
    with pytest.raises(DataError, match="sample 0 is broken"):
        Numbers(damaged=(0,)).validate(SPEC, 1, 4)


@pytest.mark.parametrize("value", [[0.5, 1.0], "a drop", None])
def test_a_value_that_is_no_number_or_array_is_refused_by_name(value: Any) -> None:
    problem = f"quality is a {type(value).__name__}, not a number or an array; "
    with pytest.raises(DataError, match=rf"metadata: {problem}.*; correct Unusual\.__getitem__"):
        Unusual(first=picture(quality=value), second=None).validate(replace(SPEC, conditions=()), 1, 4)


def test_a_first_sample_may_be_damaged_within_the_budget_or_too_long() -> None:
    data = Numbers(damaged=(0, 1), max_lost_samples=2)
    data.validate(SPEC, 1, 4)
    assert data.stored_conditions() == {"label"}
    for damaged in ((0, 1, 2), range(COUNT)):
        with pytest.raises(DataError, match=r"sample 0 is broken; correct Numbers\.__getitem__"):
            replace(data, damaged=tuple(damaged)).validate(SPEC, 1, 4)
    Numbers(**PACKS | {"max_tokens_per_pack": 4}).validate(PACK_SPEC, 1, 4)
    with pytest.raises(DataError, match=r"too_long: 8 tokens, at most 4 fit; raise data\.max_tokens_per_pack, or"):
        Numbers(count=1, **PACKS | {"max_tokens_per_pack": 4}).validate(PACK_SPEC, 1, 4)


def test_an_array_may_be_a_mirrored_view() -> None:
    class Mirrored(Numbers):
        def __getitem__(self, index: int) -> Sample:
            return Sample(np.arange(16, dtype=np.float32).reshape(1, 4, 4)[:, :, ::-1], {"label": index})

    Mirrored().validate(SPEC, 1, 4)
    batch = next(iter(stream(Mirrored())))
    assert batch.latents_TC[0].tolist() == [3, 2, 7, 6]


def test_equal_sample_shapes_are_declared() -> None:
    assert Numbers().mixes_shapes(SPEC)
    data = Numbers(same_shape=True)
    assert not data.mixes_shapes(SPEC)
    with pytest.raises(DataError, match=r"the latent is .* but that of the first sample is .*; resize it"):
        list(islice(stream(data), 9))


@dataclass(kw_only=True)
class OneOdd(Numbers):
    """Pictures of one shape, except one."""

    odd: int = -1
    same_shape: bool = True
    num_streams: int = 1

    def __getitem__(self, index: int) -> Sample:
        sample = super().__getitem__(index)
        return replace(sample, latent=torch.full((1, 8 if index == self.odd else 4, 4), float(index)))


def test_the_shape_of_samples_does_not_depend_on_the_order_and_the_position() -> None:
    """The sample of another shape is dropped, also as the first one that a stream reads."""
    single = replace(SPEC, micro_batch_size=1)
    order = [label for batch in islice(stream(OneOdd(), single), COUNT) for label in labels(batch)]
    for place in (0, 6):
        data = OneOdd(odd=order[place], damaged=(0,), max_lost_samples=9)
        kept = [label for label in order if label not in (0, order[place])]
        started = stream(data, single)
        assert [label for batch in islice(started, 5) for label in labels(batch)] == kept[:5]
        resumed = stream(data, single)
        resumed.load_state_dict(started.state_dict())
        assert [label for batch in islice(resumed, 9) for label in labels(batch)] == kept[5:14]
