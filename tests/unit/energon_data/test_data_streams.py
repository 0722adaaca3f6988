"""Streams: the order does not depend on the number of ranks, and a resumed run continues bit for bit."""

import shutil
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_data import clips, damage, first_batch, npy, spec, write_dataset
from small_streams import PACKED, build, build_spec, same, take, through_disk

from dit.condition_table import IMAGE_TOKENS
from dit.data_api import DataConfig, merge_states, sample_id
from dit.errors import BatchError, ConfigError, DataError
from energon_data.dataset import EnergonData
from energon_data.mock import MockData
from energon_data.state_codec import from_plain, to_plain
from energon_data.streams import StreamGroup, check_streams

AUGMENTED: dict[str, Any] = {"resize_side": 10, "crop_size": [8, 6], "flip": 0.5, "shuffle_buffer": 10}
SHAPES = ["1x4x4", "2x6x4"]

CASES: dict[str, Callable[[Path, Path], tuple[DataConfig, int]]] = {
    "dense": lambda f, _: (EnergonData(path=str(f), num_streams=4, shuffle_buffer=10), 4),
    "packed": lambda f, _: (EnergonData(path=str(f), num_streams=4, shuffle_buffer=10, **PACKED), 1),
    "passes": lambda f, _: (EnergonData(path=str(f), num_streams=4), 4),
    "passes apart": lambda f, _: (EnergonData(path=str(f), num_streams=4, **PACKED | {"packing_buffer_size": None}), 1),
    "buckets": lambda f, _: (EnergonData(path=str(f), num_streams=4, bucket_by_shape=True, shuffle_buffer=5), 4),
    "augmented": lambda _, p: (EnergonData(path=str(p), num_streams=4, **AUGMENTED), 4),
    "augmented packed": lambda _, p: (EnergonData(path=str(p), num_streams=4, **AUGMENTED, **PACKED), 1),
    "mock": lambda *_: (MockData(shapes=SHAPES, num_streams=4, text_tokens=5), 4),
    "mock packed": lambda *_: (MockData(shapes=SHAPES, num_streams=4, max_tokens_per_pack=40, pack_multiple_of=8), 1),
}


FURTHER = ("dense", "augmented packed", "mock")
"""Cases that only `make test-long` runs."""


@pytest.fixture(params=[pytest.param(name, marks=[pytest.mark.long] * (name in FURTHER)) for name in CASES])
def case(request: pytest.FixtureRequest, mixed_folder: Path, picture_folder: Path) -> tuple[DataConfig, int]:
    return CASES[request.param](mixed_folder, picture_folder)


def test_every_draw_of_a_run_has_its_own_number(case: tuple[DataConfig, int]) -> None:
    """The k-th sample of stream s is draw k * 4 + s of four streams, in whatever micro-batch it comes."""
    data, mbs = case
    batches = take(build(data, mbs=mbs), 24)
    seen = [0] * 4
    for j, batch in enumerate(batches):
        stream, count = j % 4, batch.layout.num_samples
        assert batch.draws_S.tolist() == [(seen[stream] + i) * 4 + stream for i in range(count)]
        seen[stream] += count
    draws = [int(n) for batch in batches for n in batch.draws_S]
    assert len(set(draws)) == len(draws)


@pytest.mark.parametrize("streams", [1, 2])
@pytest.mark.parametrize(("count", "shuffled"), [(1, 1000), (20, 1000), (40, 6)])
def test_a_pass_reads_every_sample_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, streams: int, count: int, shuffled: int
) -> None:
    """Each pass has another order, also if a set is larger than the buffer; a small set is in memory once."""
    monkeypatch.setattr("energon_data.dataset._SHUFFLED", shuffled)
    read = Counter[str]()
    monkeypatch.setattr("energon_data.task_encoder.sample_id", lambda key: read.update([key]) or sample_id(key))
    folder = write_dataset(tmp_path / "data", {"train": clips(count * streams, sizes=[(1, 4, 4)])})
    data = EnergonData(path=str(folder), num_streams=streams, background=False)
    stream = build(data, mbs=1)
    keys = [next(stream).keys[0]]
    assert sum(read.values()) == (min(shuffled, count + 1) if count > 1 else 2)
    keys += [batch.keys[0] for batch in take(stream, 4 * count * streams - 1)]
    passes = [keys[i : i + count * streams] for i in range(0, len(keys), count * streams)]
    assert all(len(set(one)) == count * streams for one in passes)
    assert count == 1 or len({tuple(one) for one in passes}) == 4


@pytest.mark.parametrize("streams", [2, 8])
def test_streams_read_small_and_large_samples_equally_often(tmp_path: Path, streams: int) -> None:
    """Shards are sorted by size: if each stream read its own, its packs would hold few large or many small samples."""
    sides = [2 + 2 * (i // 64) for i in range(512)]
    folder = write_dataset(tmp_path / "data", {"train": clips(512, sizes=[(1, n, n) for n in sides])}, per_shard=64)
    packs = {"max_tokens_per_pack": 128, "pack_multiple_of": 1, "packing_buffer_size": 16}
    stream = build(EnergonData(path=str(folder), num_streams=streams, **packs), mbs=1)
    reads = Counter[int]()
    while reads.total() < 2 * 512:
        reads.update(sides[int(key[-5:])] for key in next(stream).keys)
    assert max(reads.values()) < 1.25 * min(reads.values())


@pytest.mark.parametrize("steps", [pytest.param(0, marks=pytest.mark.long), 8])
def test_a_resumed_stream_is_bitwise_equal(case: tuple[DataConfig, int], steps: int) -> None:
    data, mbs = case
    stream = build(data, mbs=mbs)
    take(stream, steps)
    state = through_disk(stream.state_dict())
    rest = take(stream, 13)
    assert not getattr(data, "bucket_by_shape", False) or all(len(set(batch.grids)) == 1 for batch in rest)
    resumed = build(data, mbs=mbs)
    resumed.load_state_dict(state)
    again = through_disk(resumed.state_dict())
    same(rest, take(resumed, 13))
    twice = build(data, mbs=mbs)
    twice.load_state_dict(again)
    same(rest, take(twice, 13))


def test_a_stream_resumes_on_other_numbers_of_ranks(case: tuple[DataConfig, int]) -> None:
    """A step has 12 micro-batches; four streams are read by more and by fewer ranks in turn, and all have one order."""
    data, mbs = case
    alone, state = build(data, mbs=mbs), None
    for dp in (6, 1, 3):
        ranks = [build(data, rank, dp, mbs) for rank in range(dp)]
        for rank in ranks:
            if state is not None:
                rank.load_state_dict(state)
        same(take(alone, 12), [next(ranks[j % dp]) for j in range(12)])
        states = [rank.state_dict() for rank in ranks]
        assert sorted(s for one in states for s in one["streams"]) == [0, 1, 2, 3], "one rank saves each position"
        state = through_disk(merge_states(states))


def test_a_step_has_the_same_samples_with_smaller_micro_batches(mixed_folder: Path) -> None:
    """More replicas may need smaller micro-batches; a resumed run continues with the next samples of each stream."""
    data = EnergonData(path=str(mixed_folder), num_streams=2, shuffle_buffer=10, background=False)
    large, small = build(data, mbs=4), build(data, mbs=2)
    take(large, 4)
    small.load_state_dict(through_disk(large.state_dict()))
    for _ in range(3):
        samples = [
            {(k, int(d)) for b in take(s, n) for k, d in zip(b.keys, b.draws_S)} for s, n in ((large, 2), (small, 4))
        ]
        assert samples[0] == samples[1]


@pytest.mark.parametrize("name", ["dense", "mock packed"])
def test_a_resumed_run_keeps_the_number_of_streams(name: str, mixed_folder: Path, picture_folder: Path) -> None:
    """The default depends on the micro-batches of a step, which may follow the number of ranks."""
    data, mbs = CASES[name](mixed_folder, picture_folder)
    data.num_streams = None

    def rank(r: int, dp: int, micro_batches: int, mbs: int = mbs) -> StreamGroup:
        settings = {"dp_rank": r, "dp_size": dp, "seed": 5, "log_dir": None, "micro_batches_per_step": micro_batches}
        return data.build_train(build_spec(data, mbs, 1), **settings)

    alone, state = rank(0, 1, 2), {}
    for dp, micro_batches in ((1, 2), (8, 8), (2, 4), (3, 6)):
        ranks = [rank(r, dp, micro_batches) for r in range(dp)]
        for one in ranks if state else ():
            one.load_state_dict(state)
        same(take(alone, 24), [next(ranks[j % dp]) for j in range(24)])
        state = through_disk(merge_states([one.state_dict() for one in ranks]))
        assert sorted(state["streams"]) == [0, 1]
    for micro_batches, size, cure in ((3, 4, "=6$"), (3, 1, " and global_batch_size to their previous values")):
        with pytest.raises(ConfigError, match=f"has 2 streams.*3 micro-batches.*set training.micro_batch_size{cure}"):
            rank(0, 1, micro_batches, size).load_state_dict(state)


@pytest.mark.parametrize(
    ("name", "pad_packs"),
    [*product(("packed", "augmented packed"), (False, True)), ("mock packed", False)],
)
def test_every_layout_trains_on_the_same_packs(
    name: str, pad_packs: bool, mixed_folder: Path, picture_folder: Path
) -> None:
    """A layout adds padding to the samples of a pack; it does not choose them."""
    data, mbs = CASES[name](mixed_folder, picture_folder)
    if isinstance(data, EnergonData):
        data.pad_packs = pad_packs
    packs = {m: take(build(data, mbs=mbs, multiple_of=m), 16) for m in (1, 2, 8)}
    held_out = {m: list(data.build_validation(build_spec(data, 1, m), dp_rank=0, dp_size=1)) for m in packs}
    for passes in (packs, held_out):
        for multiple, layout in passes.items():
            assert [pack.keys for pack in layout] == [pack.keys for pack in passes[1]]
            for pack, reference in zip(layout, passes[1]):
                assert all(n % multiple == 0 for n in pack.layout.padded_lengths)
                assert pack.layout.total_tokens <= 40
                x, y = (p.layout.without_padding(p.latents_TC) for p in (pack, reference))
                assert torch.equal(x, y)
    if name != "augmented packed":
        assert len({len(pack.keys) for pack in packs[1]}) > 1, "packs of several sizes"


@pytest.mark.parametrize(
    ("source", "background", "steps"),
    [("folder", True, 1), ("folder", False, 9), ("blend", False, 1), ("blend", True, 9)]
    + [("pass", False, steps) for steps in (1, 30)],
)
def test_packs_in_flight_are_selected_again_for_another_multiple(
    mixed_folder: Path, source: str, background: bool, steps: int
) -> None:
    """A resumed run may raise `pack_multiple_of`: every sample is used once, and no pack is above the limit."""
    data_set = {"blend": [{"path": str(mixed_folder)}]} if source == "blend" else {"path": str(mixed_folder)}
    order_of, buffer = ({"shuffle_buffer": None}, None) if source == "pass" else ({"shuffle_buffer": 0}, 24)
    # 12 is the longest sample, even if a pack has room for a longer one.
    limits = {"pad_packs": False, "max_tokens_per_sample": 12}
    one = {**data_set, **order_of, "num_streams": 1, **PACKED, **limits, "packing_buffer_size": buffer}
    before = EnergonData(**one | {"pack_multiple_of": 1}, background=background)
    after = EnergonData(**one | {"pack_multiple_of": 8}, background=background)
    stream, resumed = build(before, mbs=1), build(after, mbs=1, multiple_of=8)
    try:
        read = [key for pack in take(stream, steps) for key in pack.keys]
        resumed.load_state_dict(through_disk(stream.state_dict()))
        for pack in take(resumed, 25 if buffer else 50):
            assert pack.layout.total_tokens <= 40
            read += pack.keys
        third = build(after, mbs=1, multiple_of=8)
        third.load_state_dict(through_disk(resumed.state_dict()))
        same(take(resumed, 4), take(third, 4))
        third.close()
    finally:
        stream.close()
        resumed.close()
    dense, size = build(EnergonData(**data_set, **order_of, num_streams=1, background=False), mbs=1), buffer or 150
    order = [key for batch in take(dense, len(read) + size) for key in batch.keys]
    # All samples that were read from disk, except for those of a buffer, each once for every time that it was read.
    assert len(read) > size
    assert Counter(order[: len(read) - size]) <= Counter(read) <= Counter(order)


def test_packs_from_disk_have_the_same_properties(mixed_folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    data = EnergonData(path=str(mixed_folder), shuffle_buffer=0, **PACKED | {"pack_multiple_of": 1})
    lengths = {(1, 2, 2): 4, (2, 2, 2): 8, (1, 3, 4): 12}
    filled = []
    for batch in take(build(data, mbs=1), 20):
        batch.validate(spec().conditions)
        assert batch.layout.total_tokens == 40
        assert batch.layout.lengths == tuple(lengths[g] for g in batch.grids)
        filled.append(batch.layout.valid_tokens / 40)
        for row, key in zip(batch.latents_TC[batch.layout.cu_seqlens_padded[:-1].long()], batch.keys):
            assert row.unique().tolist() == [float(key[-5:])]
    assert sum(filled) / len(filled) > 0.9
    assert capfd.readouterr() == ("", ""), "no progress bars, no prints"


def test_order_depends_on_the_seed_and_not_on_global_random_state(mixed_folder: Path) -> None:
    data = EnergonData(path=str(mixed_folder), shuffle_buffer=10)
    torch.manual_seed(0)
    before = torch.get_rng_state()
    first = [b.keys for b in take(build(data), 6)]
    assert torch.equal(before, torch.get_rng_state())
    torch.manual_seed(1)
    assert first == [b.keys for b in take(build(data), 6)]
    other = data.build_train(spec(), dp_rank=0, dp_size=1, seed=6, log_dir=None)
    assert first != [next(other).keys for _ in range(6)]


def test_long_texts_are_truncated_to_their_first_tokens(mixed_folder: Path) -> None:
    full, truncated = (
        take(build(EnergonData(path=str(mixed_folder), max_text_tokens=limit, shuffle_buffer=0)), 5)
        for limit in (None, 3)
    )
    for before, after in zip(full, truncated, strict=True):
        assert before.keys == after.keys
        true = [1 + int(key[-5:]) % 8 for key in after.keys]
        assert after.conditions["context"].layout.lengths == tuple(min(3, length) for length in true)
        texts = before.conditions["context"].values.split(true)
        assert torch.equal(after.conditions["context"].values, torch.cat([text[:3] for text in texts]))


def test_tokens_of_a_picture_are_not_truncated(tmp_path: Path) -> None:
    """A CUDA graph whose packs have no room for them names the setting."""
    [(key, meta, parts)] = clips(1, sizes=[(1, 4, 4)])
    parts |= {"image_tokens.npy": npy(np.ones((9, 5), np.float32))}
    folder = write_dataset(tmp_path / "data", {"train": [(key, meta, parts)]})
    model = replace(spec(), conditions=(replace(IMAGE_TOKENS, shape=(5,)),), micro_batch_size=1)
    one_sample = {"max_tokens_per_pack": 4, "pack_multiple_of": 4, "packing_buffer_size": 1}
    for limit in (3, 9):
        data = EnergonData(path=str(folder), max_text_tokens=limit, shuffle_buffer=0, **one_sample)
        batch = first_batch(data, model)
        assert batch.conditions["image_tokens"].layout.lengths == (9,)
        with pytest.raises(BatchError, match=r"raise data\.max_text_tokens") if limit == 3 else nullcontext():
            data.pack_maxima().pad(batch)


@pytest.mark.parametrize("dp", [1, 4])
@pytest.mark.parametrize("packing", [{}, PACKED], ids=["dense", "packed"])
def test_validation_reads_the_same_samples_on_any_layout(mixed_folder: Path, dp: int, packing: dict[str, Any]) -> None:
    """Every sample is counted once; ranks without a last micro-batch get one that does not count."""
    data = EnergonData(path=str(mixed_folder), validation_samples=None, **packing)
    s = spec(micro_batch_size=1 if packing else 4)
    full = list(data.build_validation(s, dp_rank=0, dp_size=1))
    assert sorted(k for b in full for k in b.keys) == [f"val_clip{i:05d}" for i in range(21)]
    ranks = [list(data.build_validation(s, dp_rank=r, dp_size=dp)) for r in range(dp)]
    count = -(-len(full) // dp)
    assert [len(r) for r in ranks] == [count] * dp
    dealt = [ranks[j % dp][j // dp] for j in range(count * dp)]
    assert [b.repeated for b in dealt] == [j >= len(full) for j in range(count * dp)]
    same(full, dealt[: len(full)])
    same([full[-1]] * (count * dp - len(full)), dealt[len(full) :])
    same(dealt, [list(data.build_validation(s, dp_rank=j % dp, dp_size=dp))[j // dp] for j in range(count * dp)])


def test_a_position_that_cannot_be_read_again_is_not_converted(damaged_after: Callable[[int], Path]) -> None:
    """The deliveries between a position and its state are read again, and none of them may be missing."""
    folder = damaged_after(0)
    before, after = (
        EnergonData(
            path=str(folder), shuffle_buffer=0, num_streams=1, background=False, **PACKED | {"pack_multiple_of": m}
        )
        for m in (1, 8)
    )
    state = build(before, mbs=1).state_dict()
    state["streams"][0]["behind"] = 3
    with pytest.raises(DataError, match="cannot be read up to the saved position: too many"):
        build(after, mbs=1).load_state_dict(state)


@pytest.mark.parametrize("dp", [1, 2, 8])
def test_ranks_that_share_a_stream_report_its_samples_once(
    damaged_after: Callable[[int], Path], tmp_path: Path, dp: int
) -> None:
    """After resumes, too, the counts of all ranks and the lines of the file add up to those of one rank."""
    data = EnergonData(
        path=str(damaged_after(50)), shuffle_buffer=0, num_streams=2, max_lost_samples=100, background=False
    )
    state, used = None, 0
    for _ in range(3):
        ranks = [data.build_train(spec(), dp_rank=r, dp_size=dp, seed=5, log_dir=str(tmp_path)) for r in range(dp)]
        for rank in ranks:
            if state is not None:
                rank.load_state_dict(state)
        used += sum(next(ranks[j % dp]).layout.num_samples for j in range(8))
        state = through_disk(merge_states([rank.state_dict() for rank in ranks]))
    counts = [rank.sample_counts() for rank in ranks]
    assert sum(sum(c.used.values()) for c in counts) == used == 3 * 8 * 4
    dropped = sum(sum(c.by_reason().values()) for c in counts)
    assert dropped == len((tmp_path / "data_skipped.jsonl").read_text().splitlines()) > 10
    assert dropped == sum(n for s in state["streams"].values() for *_, n in s["skipped"]["dropped"])


@pytest.fixture
def damaged_after(mixed_folder: Path, tmp_path: Path) -> Callable[[int], Path]:
    """Copy a data set, and damage every second of its 75 training samples, starting at the sample with this number."""

    def copied(first: int) -> Path:
        folder = tmp_path / "damaged"
        shutil.copytree(mixed_folder, folder)
        for number in range(first, 75, 2):
            damage(folder, f"train_clip{number:05d}")
        return folder

    return copied


def held_out_numbers(data: EnergonData, micro_batch_size: int = 1, dp: int = 1) -> list[int]:
    """Return the numbers of the samples in a held-out pass, in the order of its micro-batches."""
    s = spec(micro_batch_size=micro_batch_size)
    ranks = [list(data.build_validation(s, dp_rank=rank, dp_size=dp)) for rank in range(dp)]
    batches = [batch for j in range(len(ranks[0])) for batch in (rank[j] for rank in ranks) if not batch.repeated]
    return [int(key.removeprefix("val_clip")) for batch in batches for key in batch.keys]


@pytest.mark.parametrize("limit", [2, 5, 10, 20])
def test_a_limited_held_out_pass_is_spread_evenly_over_the_split(mixed_folder: Path, limit: int) -> None:
    """Classes are in the order of the shards. No gap is twice as long as in equal parts, and its start is spread, too.

    Each larger pass contains the smaller ones.
    """
    numbers = held_out_numbers(EnergonData(path=str(mixed_folder), validation_samples=limit))
    assert len(numbers) == limit
    assert numbers[:2] == held_out_numbers(EnergonData(path=str(mixed_folder), validation_samples=2))
    for count in {limit // 2, limit} - {1, 2}:
        first = sorted(numbers[:count])
        gaps = [after - before for before, after in zip(first, [*first[1:], first[0] + 21])]
        assert min(gaps) > 0
        assert max(gaps) < 2 * 21 / count


def test_a_limited_held_out_pass_reads_other_samples_in_place_of_dropped_ones(
    mixed_folder: Path, tmp_path: Path
) -> None:
    """The pass reads no sample after its limit: damaging an unread one changes nothing."""
    folder = Path(shutil.copytree(mixed_folder, tmp_path / "data"))
    data = EnergonData(path=str(folder), validation_samples=5)
    first, longer = held_out_numbers(data), held_out_numbers(EnergonData(path=str(folder), validation_samples=7))
    damage(folder, f"val_clip{longer[5]:05d}")
    assert held_out_numbers(data) == first == longer[:5]
    damage(folder, f"val_clip{first[1]:05d}")
    with pytest.raises(DataError, match="dropped"):
        held_out_numbers(data)
    data.max_lost_samples = 2
    assert held_out_numbers(data) == [first[0], *first[2:], longer[6]]


@pytest.mark.parametrize("limit", [5, 100])
@pytest.mark.parametrize("options", [{}, {"bucket_by_shape": True}, PACKED], ids=["dense", "buckets", "packed"])
def test_held_out_samples_do_not_depend_on_micro_batches(
    mixed_folder: Path, limit: int, options: dict[str, Any]
) -> None:
    data = EnergonData(path=str(mixed_folder), validation_samples=limit, **options)
    expected = sorted(held_out_numbers(EnergonData(path=str(mixed_folder), validation_samples=limit)))
    assert len(set(expected)) == min(limit, 21)
    for size in (1,) if "max_tokens_per_pack" in options else (1, 3, 4):
        for dp in (1, 2):
            assert sorted(held_out_numbers(data, size, dp)) == expected


def test_validation_between_training_steps_changes_nothing(mixed_folder: Path) -> None:
    data = EnergonData(path=str(mixed_folder), num_streams=2, shuffle_buffer=10, validation_samples=12)
    quiet = take(build(data), 10)
    stream = build(data)
    mixed = take(stream, 4)
    validation = data.build_validation(spec(), dp_rank=0, dp_size=1)
    next(validation)
    mixed += take(stream, 3)
    assert len(list(validation)) == 2
    same(quiet, mixed + take(stream, 3))


def test_steps_take_equally_many_micro_batches_from_each_stream() -> None:
    with pytest.raises(ConfigError, match=r"use 4 or 8 micro-batches, or num_streams one of \[1, 2, 3, 6\]"):
        check_streams(4, 6)
    assert check_streams(6, 12) == 6
    assert [check_streams(None, m) for m in (1, 6, 7, 11, 12, 256)] == [1, 6, 7, 1, 6, 8]


def test_states_that_do_not_fit_are_refused(mixed_folder: Path) -> None:
    def data(**changes: Any) -> EnergonData:
        usual = {"num_streams": 4, "shuffle_buffer": 10}
        return EnergonData(**({"path": str(mixed_folder)} | usual | changes))

    stream = build(data(), 0, 2)
    next(stream)
    state = stream.state_dict()
    with pytest.raises(ConfigError, match=r"4 streams, this run reads 2.*data.num_streams=4"):
        build(data(num_streams=2), 0, 2).load_state_dict(state)
    with pytest.raises(DataError, match=r"lacks the streams \[1, 3\]"):
        build(data(), 1, 2).load_state_dict(state)
    with pytest.raises(DataError, match="saved inside a step on 2"):
        build(data(), 0, 4).load_state_dict(state)
    buckets = build(data(bucket_by_shape=True), 0, 2).state_dict()
    with pytest.raises(ConfigError, match=r"shuffle_buffer was 10 and is 11.*set them back.*start_from"):
        build(data(shuffle_buffer=11), 0, 2).load_state_dict(state)
    with pytest.raises(ConfigError, match="micro_batch_size was 4 and is 2"):
        build(data(bucket_by_shape=True), 0, 2, mbs=2).load_state_dict(buckets)
    with pytest.raises(DataError, match="not a data state"):
        build(data()).load_state_dict({})
    other = build(data(), 1, 2)
    with pytest.raises(DataError, match="differ in entries other than streams"):
        merge_states([state, other.state_dict()])


def test_states_survive_the_codec_and_other_types_are_refused() -> None:
    value = {"a": [1, 2.5, None, True, "x"], "t": (1, ("y", b"\x00\xff")), 3: torch.arange(3), "e": b"", "d": {}}
    back = from_plain(through_disk(to_plain(value)))
    assert str(back) == str(value)
    assert type(back["t"]) is tuple
    with pytest.raises(DataError, match="cannot save"):
        to_plain(Path("x"))
    for bad in ({"$": "os.system", "value": []}, {"no": "tag"}, object()):
        with pytest.raises(DataError):
            from_plain(bad)


def test_a_position_in_blocks_of_all_shards_is_refused_for_data_in_random_order(
    mixed_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = through_disk(build(EnergonData(path=str(mixed_folder), num_streams=2)).state_dict())
    monkeypatch.setattr("energon_data.task_encoder.is_mixed", lambda _: True)
    with pytest.raises(ConfigError, match=r"interleaved was \[True\] and is \[False\]"):
        build(EnergonData(path=str(mixed_folder), num_streams=2)).load_state_dict(state)
