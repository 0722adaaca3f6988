"""Laws of conditions, for all axes: packing, moving, splitting, dropping, joining, replacing, checking."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from dit.batch import PackedBatch
from dit.condition_table import CONTEXT, CONTEXT_2, FPS, IMAGE_TOKENS, LABEL, POOLED, TABLE, match_conditions
from dit.conditions import Condition, Conditions, Entry
from dit.context_parallel.partition import context_partition
from dit.context_parallel.shard_batch import shard
from dit.data_api import BatchSpec
from dit.errors import BatchError, ConfigError
from dit.layout import SequenceLayout
from dit.patchify import patchify
from dit.sampling.generate import empty_pack, join, without_conditions
from energon_data.dataset import EnergonData
from energon_data.mock import MockData, MockSource
from energon_data.packing import collate
from energon_data.samples import Clip
from tests.unit.energon_data.small_data import npy, write_dataset

WIDTHS = {"context": 3, "context_2": 5, "pooled": 4, "low_resolution": 2, "control": 3, "first_frames": 2, "teacher": 7}
WIDTHS |= {"image_tokens": 2, "teacher_token": 6}


def sized(condition: Condition) -> Condition:
    """Add the settings of a model: width, number of classes, dropout; control has a separate draw."""
    changes: dict = {"dropout": None if condition in (FPS, IMAGE_TOKENS) else 0.4}
    if condition.name in WIDTHS:
        changes["shape"] = (WIDTHS[condition.name],)
    if condition == LABEL:
        changes["num_classes"] = 10
    if condition.name == "control":
        changes |= {"dropout": 0.7, "group": "control"}
    return replace(condition, **changes)


WANTED = tuple(map(sized, TABLE))
NAMES = [condition.name for condition in WANTED]
SPEC = BatchSpec(
    patch_temporal=1, patch_spatial=2, latent_channels=2, conditions=WANTED, micro_batch_size=6, multiple_of=8
)


def clips(count: int = 6) -> list[Clip]:
    data = MockData(shapes=["1x4x4", "2x4x8", "3x4x4"], text_tokens=5)
    source = MockSource(data, SPEC, seed=3, split="train", stream=0, num_streams=1)
    return [source.sample(i) for i in range(count)]


def make_batch() -> PackedBatch:
    return collate(clips(), SPEC).validate(WANTED, patch_volume=SPEC.patch_volume)


def assert_same(some: Conditions, others: Conditions) -> None:
    assert set(some) == set(others)
    for name, entry in some.items():
        other = others[name]
        assert torch.equal(entry.values, other.values), name
        assert (None if entry.layout is None else entry.layout.lengths) == (
            None if other.layout is None else other.layout.lengths
        ), name
        flags = [torch.zeros(1) if x.dropped_S is None else x.dropped_S.float() for x in (entry, other)]
        assert torch.equal(*torch.broadcast_tensors(*flags)), name


@pytest.mark.parametrize("condition", WANTED, ids=NAMES)
def test_a_packed_sample_equals_a_pack_of_one_sample(condition: Condition) -> None:
    """A sample has the same values in a pack as in a pack of one sample."""
    together, parts = make_batch(), clips()
    packed = together.conditions[condition.name]
    for i, clip in enumerate(parts):
        alone = collate([clip], replace(SPEC, multiple_of=1)).conditions[condition.name].values
        if condition.axis == "sample":
            assert torch.equal(packed.values[i : i + 1], alone)
        else:
            layout = together.layout if packed.layout is None else packed.layout
            start, length = layout.starts[i], layout.lengths[i]
            assert torch.equal(packed.values[start : start + length], alone)
            assert not packed.values[start + length : start + layout.padded_lengths[i]].any()
        if condition.axis == "token":
            assert torch.equal(alone, clip.conditions[condition.name].flatten(1).T)
        if condition.axis == "latent":
            assert torch.equal(alone, patchify(clip.conditions[condition.name], 1, 2)[0])


@pytest.mark.parametrize("split", ["contiguous", "load_balanced"])
def test_shards_of_two_ranks_equal_the_unsharded_values(split: str) -> None:
    """Values per token are split over the ranks like the latents; all other values are on both ranks."""
    source = make_batch()
    rows = context_partition(source.layout, 2, split)
    back = {name: torch.full_like(source.conditions[name].values, 1e9) for name in NAMES}
    for rank in range(2):
        part = shard(source, rank, 2, split)
        for condition in WANTED:
            values = part.conditions[condition.name].values
            if condition.is_per_token:
                assert len(values) == len(part.latents_TC) == len(source.latents_TC) // 2
                back[condition.name][rows.of_rank(rank)] = values
            else:
                back[condition.name] = values
    assert_same(
        Conditions({name: replace(entry, values=back[name]) for name, entry in source.conditions.items()}),
        source.conditions,
    )


def nulled(condition: Condition, batch: PackedBatch, dropped_S: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return values and flags, computed sample by sample."""
    entry = batch.conditions[condition.name]
    if condition.null == "learned":
        return entry.values, dropped_S
    values, layout = entry.values.clone(), batch.layout
    for i in dropped_S.nonzero().flatten().tolist():
        at = slice(i, i + 1)
        if condition.is_per_token:
            at = slice(layout.starts[i], layout.starts[i] + layout.padded_lengths[i])
        values[at] = 10 if condition.name == "label" else 0.0
    return values, None


def test_conditions_are_dropped_if_the_draw_of_their_group_is_below_their_share() -> None:
    batch, purposes = make_batch(), []
    draws = {"drop conditions": torch.tensor([0.1, 0.39, 0.4, 0.5, 0.8, 0.2]), "drop control": torch.rand(6)}

    def draw(purpose: str) -> Tensor:
        purposes.append(purpose)
        return draws[purpose]

    found = batch.conditions.drop(WANTED, draw, batch.layout)
    assert sorted(purposes) == ["drop conditions", "drop control"]
    for condition in WANTED:
        entry = found[condition.name]
        if condition.dropout is None:
            assert entry is batch.conditions[condition.name]
            continue
        values, flags = nulled(condition, batch, draws[f"drop {condition.group}"] < condition.dropout)
        assert torch.equal(entry.values, values), condition.name
        assert entry.dropped_S is None if flags is None else torch.equal(entry.dropped_S, flags), condition.name
    again = found.drop(WANTED, lambda purpose: 1 - draws[purpose], batch.layout)
    assert torch.equal(again["context"].dropped_S, torch.tensor([True, True, False, False, True, True]))


def test_the_unconditional_batch_drops_all_droppable_conditions_only() -> None:
    batch = make_batch()
    always = [replace(c, dropout=None if c.dropout is None else 1.0) for c in WANTED]
    everywhere = batch.conditions.drop(always, lambda purpose: torch.rand(6), batch.layout)
    assert_same(batch.conditions.unconditional(WANTED, batch.layout), everywhere)
    assert torch.equal(everywhere["fps"].values, batch.conditions["fps"].values)
    assert_same(without_conditions(batch, SPEC).conditions, everywhere)


def test_a_pair_is_the_conditional_and_the_unconditional_half() -> None:
    batch = make_batch()
    bare = without_conditions(batch, SPEC)
    pair = join(batch, bare).validate(replace_classes(11), patch_volume=SPEC.patch_volume)
    for half, (where, full) in enumerate(((0, batch), (1, bare))):
        for name, entry in pair.conditions.items():
            assert torch.equal(entry.values.chunk(2)[half], full.conditions[name].values), (where, name)
            if entry.dropped_S is not None:
                assert entry.dropped_S.chunk(2)[half].all() == (half == 1), name
            if entry.layout is not None:
                assert entry.layout.lengths[6 * half : 6 * half + 6] == full.conditions[name].layout.lengths
    with pytest.raises(BatchError, match="cannot be joined"):
        batch.conditions.followed_by(bare.conditions.without("mask"))


def replace_classes(count: int) -> list[Condition]:
    return [replace(c, num_classes=count) if c.name == "label" else c for c in WANTED]


def test_moving_moves_values_flags_and_layouts() -> None:
    moved = without_conditions(make_batch(), SPEC).to("meta").conditions
    assert {entry.values.device.type for entry in moved.values()} == {"meta"}
    assert moved["pooled"].dropped_S.device.type == moved["context_2"].layout.device.type == "meta"


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("mask", None, "the model takes the condition 'mask', the batch has"),
        ("control", lambda x: x[:-1], "'control' has .* rows, needs"),
        ("control", lambda x: x[:, :-1], r"'control' has values of shape \[11\], the model takes \[12\]"),
        ("size", lambda x: x[:, :1], r"'size' has values of shape \[1\], the model takes \[2\]"),
        ("context_2", lambda x: x[:, :2], r"'context_2' has values of shape \[2\], the model takes \[5\]"),
        ("label", lambda x: x + 10, r"has label 1.; the model has the classes 0 to 9"),
    ],
)
def test_conditions_that_do_not_fit_the_model_are_named(name: str, change, words: str) -> None:
    batch = make_batch()
    if change is None:
        batch.conditions = batch.conditions.without(name)
    else:
        batch.conditions |= {name: replace(batch.conditions[name], values=change(batch.conditions[name].values))}
    with pytest.raises(BatchError, match=words):
        batch.validate(WANTED, patch_volume=SPEC.patch_volume)


def test_another_axis_is_named_and_a_default_may_be_missing() -> None:
    batch = make_batch()
    batch.conditions = batch.conditions.without("fps")
    batch.validate(WANTED, patch_volume=SPEC.patch_volume)
    batch.conditions |= {"pooled": Entry("latent", torch.zeros(batch.layout.total_tokens, 4))}
    with pytest.raises(BatchError, match="'pooled' is per latent, the model takes it per sample"):
        batch.validate(WANTED, patch_volume=SPEC.patch_volume)


def test_sampling_checks_requested_conditions_and_uses_null_values_for_others() -> None:
    batch = empty_pack(SPEC, (1, 4, 4), 2, torch.device("cpu"), {"label": [3, 4]})
    batch.validate(without_texts(), patch_volume=SPEC.patch_volume)
    # Learned nulls, a condition computed from the size, features of training, and a token of the solver's state.
    models_own = {"context", "context_2", "pooled", "size_and_crop", "teacher", "teacher_token"}
    assert set(NAMES) - set(batch.conditions) == models_own
    assert batch.conditions["fps"].values.tolist() == [30.0, 30.0]
    assert not batch.conditions["control"].values.any()
    picture = torch.randn(3, 1, 4, 4)
    given = {
        "control": [picture, -picture],
        "augmentation": [0.5, 0.25],
        "low_resolution": [torch.ones(2, 1, 4, 4)] * 2,
    }
    drawn = empty_pack(SPEC, (1, 4, 4), 2, torch.device("cpu"), given).conditions
    assert torch.equal(drawn["control"].values[:4], patchify(picture, 1, 2)[0])
    assert drawn["augmentation"].values.tolist() == [0.5, 0.25]
    for wrong, words in [
        ({"mood": [1, 2]}, "takes no condition 'mood'"),
        ({"label": [3]}, "1 values of the condition 'label' for 2 samples"),
        ({"label": [3, 10]}, "label 10; the model has the classes"),
        ({**given, "augmentation": [0.5, 1.5]}, "augmentation 1.5, outside 0 to 1"),
        ({"fps": [24.0, math.nan]}, "fps nan, outside 0.001 to 1e\\+06"),
        ({"fps": [torch.ones(2), torch.ones(2)]}, r"fps has shape \[2\]; give one number for each sample"),
        ({"pooled": [0.5, 0.5]}, r"has shape \[\], must be \[width\]"),
        ({"context": [torch.ones(5, 9)] * 2}, "the text has width 9, the model takes width 3"),
        ({"control": [picture, picture[:, :, 1:]]}, "store it at the size of the latent"),
        ({"low_resolution": [torch.ones(2, 1, 4, 4)] * 2}, "'low_resolution' is given without 'augmentation'"),
    ]:
        with pytest.raises(ConfigError, match=words):
            empty_pack(SPEC, (1, 4, 4), 2, torch.device("cpu"), wrong)


def without_texts() -> list[Condition]:
    return [condition for condition in WANTED if condition.null != "learned"]


def test_negatives_replace_the_null() -> None:
    texts = {name: [torch.randn(n, WIDTHS[name]) for n in (1, 3)] for name in ("context", "context_2")}
    given = {**texts, "pooled": [torch.randn(4), torch.randn(4)]}
    batch = empty_pack(SPEC, (1, 4, 4), 2, torch.device("cpu"), given)
    away = {name: [-x for x in values] for name, values in given.items()}
    found = without_conditions(batch, SPEC, away).conditions
    for name in given:
        assert torch.equal(found[name].values, -batch.conditions[name].values)
        assert found[name].dropped_S is None
    with pytest.raises(ConfigError, match="'context' is given without 'context_2'"):
        without_conditions(batch, SPEC, {"context": texts["context"], "pooled": given["pooled"]})
    bare = empty_pack(SPEC, (1, 4, 4), 2, torch.device("cpu"))
    with pytest.raises(ConfigError, match=r"negatives of \['context', 'context_2', 'pooled'\]"):
        without_conditions(bare, SPEC, away)


def test_shards_have_every_condition_and_missing_or_unused_ones_are_named(tmp_path: Path) -> None:
    """Arrays are read from parts, numbers from metadata keys; arrays without a time axis are one frame."""
    rng, samples = np.random.default_rng(0), []
    shapes = {
        "sample": lambda c: (c.shape or ())[:1],
        "text": lambda c: (4, *c.shape),
        "latent": lambda c: (*c.shape, 4, 4),
        "token": lambda c: (*c.shape, 2, 2),
    }
    for i in range(6):
        meta, parts = (
            {"label": i, "fps": 12.0, "augmentation": 0.25},
            {"latent.npy": npy(np.ones((2, 4, 4), np.float32))},
        )
        for condition in WANTED:
            if not condition.is_number:
                array = rng.standard_normal(shapes[condition.axis](condition)).astype(np.float32)
                parts[f"{condition.stored_as[0]}.npy"] = npy(array)
        samples.append((f"clip{i}", meta, parts))
    data = EnergonData(path=str(write_dataset(tmp_path / "data", {"train": samples})), shuffle_buffer=0)
    stored = data.stored_conditions()
    assert match_conditions(WANTED, stored) == []
    stream = data.build_train(SPEC, dp_rank=0, dp_size=1, seed=0, log_dir=None)
    batch = next(stream).validate(WANTED, patch_volume=SPEC.patch_volume)
    stream.close()
    by_key = {f"train_{key}": (meta, parts) for key, meta, parts in samples}
    for i, key in enumerate(batch.keys):
        meta, parts = by_key[key]
        assert batch.conditions["label"].values[i] == meta["label"]
        mask = torch.from_numpy(np.frombuffer(parts["mask.npy"][-64:], np.float32).reshape(1, 1, 4, 4).copy())
        start = batch.layout.starts[i]
        assert torch.equal(batch.conditions["mask"].values[start : start + 4], patchify(mask, 1, 2)[0])
    assert batch.conditions["augmentation"].values.tolist() == [0.25] * 6

    (line,) = match_conditions([FPS, sized(LABEL)], stored)
    assert "text, text_2, pooled" in line
    assert "label" not in line
    mood = Condition(name="mood", axis="sample", description="mood", stored_as=("mood", "temper"))
    with pytest.raises(ConfigError, match=r"takes the condition 'mood'.*stores 'mood' or 'temper', only"):
        match_conditions([*WANTED, mood], stored)
    bare = {"label", "latent"}
    with pytest.raises(ConfigError, match=r"'context' \(text\).*model=dit_s or larger\): model\.context_size=null"):
        match_conditions([sized(CONTEXT)], bare)
    assert match_conditions([sized(POOLED)], None) == []


@pytest.mark.parametrize(("tokens", "lengths"), [(1, [2, 5, 1]), (2, [2, 4, 5]), (4, [4, 4, 4])])
def test_a_dropped_text_becomes_the_embedding_of_the_empty_text(tokens: int, lengths: list[int]) -> None:
    """The tokens of the empty text are repeated to the length of the text."""
    wanted = replace(CONTEXT, shape=(3,), null="empty text", dropout=0.5)
    texts, empty = [torch.randn(length, 3) for length in lengths], torch.randn(tokens, 3)
    texts_layout = SequenceLayout.from_lengths(lengths)
    conditions = Conditions(context=Entry("text", torch.cat(texts), texts_layout)).with_nulls({"context": empty})
    layout = SequenceLayout.from_lengths([1] * 3)
    dropped = conditions.to("cpu").drop([wanted], lambda _: torch.tensor([0.1, 0.9, 0.2]), layout)["context"]
    filled = [empty.repeat(length, 1)[:length] for length in lengths]
    assert dropped.dropped_S is None
    assert torch.equal(dropped.values, torch.cat([filled[0], texts[1], filled[2]]))
    assert conditions.problems([wanted], layout, ["a", "b", "c"], 1) == []


def test_texts_that_are_shorter_than_the_empty_text_are_refused_with_both() -> None:
    wanted = replace(CONTEXT, shape=(3,), null="empty text", dropout=0.5)
    entry = Entry("text", torch.ones(7, 3), SequenceLayout.from_lengths([2, 5]))
    conditions = Conditions(context=entry).with_nulls({"context": torch.ones(4, 3), "context_2": torch.ones(1, 3)})
    [fault] = conditions.problems([wanted], SequenceLayout.from_lengths([1, 1]), ["a", "b"], 1)
    assert "a text of 2 tokens" in fault
    assert "replaces dropped ones has 4" in fault
    assert ":padded" in fault


def test_sampling_and_guidance_need_the_embedding_of_the_empty_text() -> None:
    spec = replace(SPEC, conditions=(replace(CONTEXT, shape=(3,), null="empty text", dropout=0.5),))
    with pytest.raises(ConfigError, match="null of context is the embedding of the empty text"):
        empty_pack(spec, (1, 4, 4), 1, torch.device("cpu"))
    batch = empty_pack(spec, (1, 4, 4), 1, torch.device("cpu"), {"context": [torch.ones(2, 3)]})
    with pytest.raises(ConfigError, match="null of context is the embedding of the empty text"):
        without_conditions(batch, spec)
    away = without_conditions(batch, spec, {"context": [torch.zeros(4, 3)]}).conditions["context"]
    assert torch.equal(away.values, torch.zeros(4, 3))


OPTIONAL = replace(CONTEXT_2, shape=(5,), default=0.0, dropout=0.0)


def test_a_missing_optional_text_has_no_token() -> None:
    """Training does not drop its tokens, so that their number does not depend on a draw; guidance removes them."""
    spec = replace(SPEC, conditions=(OPTIONAL,))
    data = MockData(shapes=["1x4x4"], text_tokens=5)
    source = MockSource(data, spec, seed=3, split="train", stream=0, num_streams=1)
    batch = collate([source.sample(i) for i in range(6)], spec).validate((OPTIONAL,), patch_volume=4)
    lengths = batch.conditions["context_2"].layout.lengths
    assert min(lengths) == 0 < max(lengths)
    assert len(batch.conditions["context_2"].values) == sum(lengths)
    dropped = batch.conditions.drop((replace(OPTIONAL, dropout=1.0),), lambda _: torch.zeros(6), batch.layout)
    assert_same(dropped, batch.conditions)
    removed = batch.conditions.unconditional((OPTIONAL,), batch.layout)["context_2"]
    assert (len(removed.values), removed.layout.lengths) == (0, (0,) * 6)
    assert_same(Conditions(context_2=removed), Conditions(context_2=OPTIONAL.absent(batch.layout, (1, 2))))


def test_an_optional_text_is_missing_or_empty_when_samples_are_drawn() -> None:
    spec, texts = replace(SPEC, conditions=(OPTIONAL,)), [torch.zeros(0, 5), torch.ones(2, 5)]
    assert empty_pack(spec, (1, 4, 4), 2, torch.device("cpu")).conditions["context_2"].layout.lengths == (0, 0)
    cond = empty_pack(spec, (1, 4, 4), 2, torch.device("cpu"), values={"context_2": texts})
    uncond = without_conditions(cond, spec)
    assert cond.conditions["context_2"].layout.lengths == (0, 2)
    both = join(cond, uncond).conditions["context_2"]
    assert (both.layout.lengths, len(both.values)) == ((0, 2, 0, 0), 2)
    with pytest.raises(ConfigError, match="width 4, the model takes width 5"):
        empty_pack(spec, (1, 4, 4), 1, torch.device("cpu"), values={"context_2": [torch.zeros(0, 4)]})


def test_pictures_have_no_default() -> None:
    with pytest.raises(ConfigError, match=r"'depth' has default=0, axis='latent' .* use default=None"):
        Condition(name="depth", axis="latent", description="depth", shape=(1,), default=0.0, stored_as=("depth",))
