"""Laws of packs and layouts."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dit.batch import PackedBatch
from dit.condition_table import LABEL
from dit.conditions import Conditions, Entry
from dit.errors import BatchError
from dit.layout import SequenceLayout, to_device
from dit.patchify import grid_positions, patchify

layouts = st.builds(
    lambda lengths, multiple, tail: SequenceLayout.from_lengths(
        lengths, multiple_of=multiple, total_tokens=sum(-(-n // multiple) * multiple for n in lengths) + tail
    ),
    st.lists(st.integers(1, 9), min_size=1, max_size=5),
    st.integers(1, 4),
    st.integers(0, 5),
)


def make_batch(grids: list[tuple[int, int, int]], **options) -> PackedBatch:
    """Pack latents of distinct numbers, with patch size 1 x 2 x 2 and two channels."""
    tokens = []
    for i, (t, h, w) in enumerate(grids):
        latent = torch.arange(2 * t * h * w * 4, dtype=torch.float32).view(2, t, 2 * h, 2 * w) + 1000 * i
        tokens.append(patchify(latent, 1, 2)[0])
    return PackedBatch(
        latents_TC=torch.cat(tokens),
        positions_T3=torch.cat([grid_positions(g) for g in grids]),
        layout=SequenceLayout.from_lengths([len(x) for x in tokens]),
        sample_ids_S=torch.arange(len(grids)),
        grids=tuple(grids),
        keys=tuple(f"sample{i}" for i in range(len(grids))),
        **options,
    )


@given(layouts)
@settings(max_examples=60, deadline=None)
def test_layout_counts_every_row_once(layout):
    """Each sample has `length` real rows in order from its start; all other rows are padding."""
    real = [(s, i) for s, n in enumerate(layout.lengths) for i in range(n)]
    valid = layout.valid_T
    pairs = torch.stack([layout.segment_ids_T, layout.token_index_T], 1)[valid]
    assert [tuple(p) for p in pairs.tolist()] == real
    assert layout.valid_tokens == len(real) == int(valid.sum())
    assert len(valid) == layout.total_tokens
    for s, start in enumerate(layout.starts):
        assert layout.segment_ids_T[start] == s
        assert layout.token_index_T[start] == 0
    assert layout.cu_seqlens.diff().tolist() == list(layout.lengths)
    assert layout.cu_seqlens_padded.diff().tolist() == list(layout.padded_lengths)
    assert layout.cu_seqlens.dtype == layout.cu_seqlens_padded.dtype == torch.int32


@given(layouts, st.randoms(use_true_random=False))
@settings(max_examples=60, deadline=None)
def test_select_commutes_with_every_per_row_property(layout, random):
    """The layout of local tokens agrees with that of the global pack, also after a second selection."""
    rows = list(range(layout.total_tokens))
    random.shuffle(rows)
    rows = torch.tensor(rows[: 1 + len(rows) // 2])
    part = layout.select(rows)
    again = part.select(torch.arange(len(rows)).flip(0))
    x_S = torch.randn(layout.num_samples, 3)
    for name in ("segment_ids_T", "token_index_T", "valid_T"):
        assert torch.equal(getattr(part, name), getattr(layout, name)[rows])
        assert torch.equal(getattr(again, name), getattr(layout, name)[rows.flip(0)])
    assert torch.equal(part.per_token(x_S), layout.per_token(x_S)[rows])
    assert (part.total_tokens, part.valid_tokens) == (layout.total_tokens, layout.valid_tokens)


def runs_of(layout: SequenceLayout) -> tuple[tuple[int, int, int], ...]:
    return layout.segment_runs


@given(layouts, st.integers(1, 4))
@settings(max_examples=60, deadline=None)
def test_shards_have_the_tokens_of_the_pack(layout, size):
    """Also shards of some of the tokens, as under context and sequence parallelism."""
    layout = replace(layout, total_tokens=-(-layout.total_tokens // (2 * size)) * 2 * size)
    for pack in (layout, layout.select(torch.arange(1, layout.total_tokens, 2))):
        for rank, rows in enumerate(torch.arange(pack.num_local_tokens).chunk(size)):
            part, expected = pack.shard(rank, size), pack.select(rows)
            for name in ("local_indices", "segment_ids_T", "token_index_T", "valid_T"):
                assert torch.equal(getattr(part, name), getattr(expected, name))
            assert part.table(runs_of) == part.segment_runs == expected.segment_runs
        assert len(pack.tables) == size


@given(layouts)
@settings(max_examples=60, deadline=None)
def test_sum_per_sample_is_the_adjoint_of_per_token_on_real_tokens(layout):
    """<per_token(x), y> over real rows = <x, sum_per_sample(y)>, and padding may be NaN."""
    generator = torch.Generator().manual_seed(0)
    x_S = torch.randn(layout.num_samples, 2, dtype=torch.float64, generator=generator)
    y_T = torch.randn(layout.total_tokens, 2, dtype=torch.float64, generator=generator)
    left = (layout.per_token(x_S) * y_T)[layout.valid_T].sum()
    y_T[~layout.valid_T] = float("nan")
    torch.testing.assert_close((x_S * layout.sum_per_sample(y_T)).sum(), left)


@given(layouts, st.sampled_from([1, 3, 128]), st.booleans(), st.randoms(use_true_random=False))
@settings(max_examples=60, deadline=None)
def test_the_gradient_of_per_token_is_that_of_indexing(layout, longer, selected, random):
    """For short and long samples; for all tokens, and for some of them in any order, padding included."""
    lengths, padded = ([longer * n for n in sizes] for sizes in (layout.lengths, layout.padded_lengths))
    layout = SequenceLayout(tuple(lengths), tuple(padded), longer * layout.total_tokens)
    if selected:
        rows = list(range(layout.total_tokens))
        random.shuffle(rows)
        layout = layout.select(torch.tensor(rows[: 1 + len(rows) // 2]))
    for shape in ((), (3,)):
        x_S = torch.randn(layout.num_samples, *shape, dtype=torch.float64, requires_grad=True)
        expected_T = x_S[layout.segment_ids_T].view(layout.num_local_tokens, *(shape or (1,)))
        grad_T = torch.randn(expected_T.shape, dtype=torch.float64)
        (expected_S,) = torch.autograd.grad(expected_T, x_S, grad_T)
        (found_S,) = torch.autograd.grad(layout.per_token(x_S), x_S, grad_T)
        torch.testing.assert_close(found_S, expected_S)


@given(layouts)
@settings(max_examples=60, deadline=None)
def test_padding_is_inserted_as_zeros_and_removed(layout):
    x_R = torch.randn(layout.valid_tokens, 2, requires_grad=True)
    x_T = layout.insert_padding(x_R)
    assert torch.equal(x_T[layout.valid_T], x_R)
    assert not x_T[~layout.valid_T].any()
    assert torch.equal(layout.without_padding(x_T), x_R)
    y_T = torch.randn(x_T.shape)
    x_T.backward(y_T)
    assert torch.equal(x_R.grad, y_T[layout.valid_T])


def test_sums_of_slices_add_up_to_the_sum_of_the_pack():
    layout = SequenceLayout.from_lengths([5, 2], multiple_of=4, total_tokens=14)
    y_T = torch.arange(14.0)
    parts = [layout.select(torch.arange(14)[r::2]).sum_per_sample(y_T[r::2]) for r in range(2)]
    assert torch.equal(parts[0] + parts[1], layout.sum_per_sample(y_T))
    assert layout.sum_per_sample(y_T).tolist() == [0 + 1 + 2 + 3 + 4, 8 + 9]


def test_per_token_gives_scalars_a_channel_axis():
    layout = SequenceLayout.from_lengths([1, 2])
    assert layout.per_token(torch.tensor([3.0, 4.0])).tolist() == [[3.0], [4.0], [4.0]]


def test_uniform_length_means_a_dense_pack_without_padding():
    dense = SequenceLayout.from_lengths([4, 4])
    assert dense.uniform_length == 4
    assert dense.max_seqlen == 4
    assert SequenceLayout.from_lengths([4, 3]).uniform_length is None
    assert SequenceLayout.from_lengths([4, 4], multiple_of=8).uniform_length is None
    assert SequenceLayout.from_lengths([4, 4], total_tokens=9).uniform_length is None
    assert dense.select(torch.arange(4)).uniform_length == 4  # the layout of the global pack is uniform


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lengths": []}, r"at least one token, got lengths \[\]"),
        ({"lengths": [3, 0]}, r"got lengths \[3, 0\]"),
        (
            {"lengths": [5, 6], "multiple_of": 4, "total_tokens": 15},
            "2 samples need 16 tokens .* multiple of 4.* has 15; raise the pack length",
        ),
    ],
)
def test_impossible_layouts_are_refused_with_a_cure(options, message):
    with pytest.raises(BatchError, match=message):
        SequenceLayout.from_lengths(**options)


def test_unpatchified_undoes_patchify_for_every_sample():
    batch = make_batch([(2, 2, 3), (2, 2, 3)]).validate()
    first, second = batch.unpatchified(batch.latents_TC, 1, 2)
    expected = torch.arange(96, dtype=torch.float32).view(2, 2, 4, 6)
    assert torch.equal(first, expected)
    assert torch.equal(second, expected + 1000)


def test_dense_is_a_view_of_equal_samples():
    """Tokens `[S, t, h, w, C]` share the pack's memory and convert back to it."""
    batch = make_batch([(2, 2, 3), (2, 2, 3)])
    pictures = batch.dense(batch.latents_TC)
    assert pictures.shape == (2, 2, 2, 3, 8)
    assert pictures.data_ptr() == batch.latents_TC.data_ptr()
    assert pictures[1, 1, 0, 2].tolist() == batch.latents_TC[12 + 6 + 2].tolist()
    assert torch.equal(batch.layout.insert_padding(pictures.flatten(0, 3)), batch.latents_TC)


@pytest.mark.parametrize(("multiple_of", "total"), [(1, 8), (4, 8), (4, 12)])
def test_a_dense_view_omits_padding(multiple_of: int, total: int):
    batch = make_batch([(1, 1, 3), (1, 1, 3)])
    padded = replace(batch, layout=SequenceLayout.from_lengths([3, 3], multiple_of=multiple_of, total_tokens=total))
    padded.latents_TC = padded.layout.insert_padding(batch.latents_TC)
    assert torch.equal(padded.dense(padded.latents_TC), batch.dense(batch.latents_TC))
    padding = ~padded.layout.valid_T[:, None]
    filled = padded.latents_TC.masked_fill(padding, float("nan"))
    assert torch.equal(padded.layout.insert_padding(padded.dense(filled).flatten(0, 3)), padded.latents_TC)


def test_dense_refuses_mixed_shapes_and_parts_of_samples():
    mixed = make_batch([(1, 2, 3), (1, 3, 2)])
    with pytest.raises(BatchError, match=r"got grids \[\(1, 2, 3\), \(1, 3, 2\)\]; bucket the data by shape"):
        mixed.dense(mixed.latents_TC)
    batch = make_batch([(1, 2, 3), (1, 2, 3)])
    part = replace(batch, layout=batch.layout.select(torch.arange(6)))
    with pytest.raises(BatchError, match="split over ranks"):
        part.dense(batch.latents_TC[:6])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"latents_TC": torch.zeros(5, 8)}, "latents_TC has 5 rows, needs 10"),
        ({"positions_T3": torch.zeros(9, 3)}, "positions_T3 has 9 rows, needs 10"),
        ({"sample_ids_S": torch.zeros(3)}, "sample_ids_S has 3 rows, needs 2"),
        ({"keys": ("a",)}, "keys has 1 rows, needs 2"),
        ({"grids": ((1, 2, 2), (1, 2, 2))}, r"'sample1' has grid \(1, 2, 2\) but 6 tokens"),
        ({"label": Entry("sample", torch.tensor([1]))}, "'label' has 1 rows, needs 2"),
        (
            {"label": Entry("sample", torch.tensor([1, 10]))},
            r"'sample1' has label 10; the model has the classes 0 to 9 .*raise model.num_classes",
        ),
        ({"label": Entry("sample", torch.tensor([-1, 0]))}, "'sample0' has label -1"),
        ({"loss_weight_S": torch.ones(4)}, "loss_weight_S has 4 rows, needs 2"),
        (
            {"context": Entry("text", torch.zeros(4, 2), SequenceLayout.from_lengths([2, 3]))},
            "'context' has 4 rows, needs 5",
        ),
        (
            {"context": Entry("text", torch.zeros(4, 2), SequenceLayout.from_lengths([4]))},
            "'context' has 1 texts, needs 2",
        ),
    ],
)
def test_validate_names_the_wrong_part(change, message):
    batch = make_batch([(1, 2, 2), (1, 2, 3)], conditions=Conditions(label=Entry("sample", torch.tensor([0, 9]))))
    wanted = [replace(LABEL, num_classes=10)]
    assert batch.validate(wanted) is batch
    for name, value in change.items():
        if isinstance(value, Entry):
            batch.conditions |= {name: value}
        else:
            setattr(batch, name, value)
    with pytest.raises(BatchError, match=message):
        batch.validate(wanted)


def test_validate_names_a_sample_that_exceeds_the_learned_positions():
    """One axis on which a sample is too large is enough."""
    batch = make_batch([(1, 2, 2), (1, 2, 3)])
    assert batch.validate(largest_grid=(1, 2, 3)) is batch
    message = r"'sample1' has \(1, 2, 3\) patches .*end at \(4, 4, 2\); raise model.max_grid or drop such samples"
    with pytest.raises(BatchError, match=message):
        batch.validate(largest_grid=(4, 4, 2))


def test_validate_reports_everything_that_is_wrong_at_once():
    batch = make_batch([(1, 2, 2)])
    batch.keys, batch.latents_TC = ("a", "b"), torch.zeros(2, 8)
    with pytest.raises(BatchError, match=r"latents_TC has 2 rows.*; keys has 2 rows"):
        batch.validate()


class Recorded:
    """Stand-in for a tensor in ordinary host memory; records its copies."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def pin_memory(self) -> "Recorded":
        self.calls.append("pin_memory")
        return self

    def to(self, device: str, *, non_blocking: bool = False) -> "Recorded":
        self.calls.append((device, non_blocking))
        return self


@pytest.mark.parametrize(
    ("device", "calls"),
    [("cuda:0", ["pin_memory", ("cuda:0", True)]), ("cpu", [("cpu", False)]), ("meta", [("meta", False)])],
)
def test_a_copy_to_a_gpu_comes_from_pinned_memory_and_does_not_wait(device: str, calls: list[Any]) -> None:
    values: Any = Recorded()
    to_device(values, device)
    assert values.calls == calls


def test_moving_a_batch_moves_every_tensor_and_both_layouts():
    """The device of each tensor shows that it was moved; plain numbers stay on the host."""
    batch = make_batch(
        [(1, 1, 2)],
        conditions=Conditions(
            fps=Entry("sample", torch.ones(1)),
            context=Entry("text", torch.zeros(2, 4), SequenceLayout.from_lengths([2]), torch.zeros(1)),
        ),
    )
    moved = batch.to("meta")
    for value in (moved.latents_TC, moved.positions_T3, moved.sample_ids_S, moved.conditions["fps"].values):
        assert value.device.type == "meta"
    assert moved.layout.cu_seqlens.device.type == moved.conditions["context"].layout.cu_seqlens.device.type == "meta"
    text = moved.conditions["context"]
    assert text.values.device.type == text.dropped_S.device.type == "meta"
    assert (moved.grids, moved.keys) == (batch.grids, batch.keys)
