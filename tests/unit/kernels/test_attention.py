"""Attention over packs: every sample attends only to itself, in every layout."""

import ast
import sys
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from inspect import signature
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from dit.kernels.attention import (
    _most_segments,
    _packed,
    _segments_with_padding,
    attend_densely,
    reference_attention,
    segment_sdpa,
)
from dit.kernels.te_attention import TEAttention
from dit.layout import SequenceLayout
from tests.support.calls import CallCounter
from tests.unit.kernels.attention_cases import CASES, GQA_CASES, AttentionCase, check

# float32 sums of up to 33 terms in another order.
RTOL = 2e-6


@pytest.mark.parametrize("case", [*CASES, *GQA_CASES], ids=lambda case: case.name)
def test_segment_sdpa_equals_the_reference(case: AttentionCase):
    check(segment_sdpa, case, case.qkv(), rtol=RTOL)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_reference_is_a_separate_softmax_per_segment(case: AttentionCase):
    """The mask-based reference equals a plain softmax over one segment at a time, in float64."""
    q, k, v = case.qkv()
    layout_q, layout_k = case.layouts()
    out = reference_attention(q, k, v, layout_q, layout_k)
    for i in range(layout_q.num_samples):
        rows_q = slice(layout_q.starts[i], layout_q.starts[i] + layout_q.lengths[i])
        rows_k = slice(layout_k.starts[i], layout_k.starts[i] + layout_k.lengths[i])
        for head in range(case.heads):
            scores = q[rows_q, head].double() @ k[rows_k, head].double().T / case.head_size**0.5
            expected = scores.softmax(-1) @ v[rows_k, head].double()
            torch.testing.assert_close(out[rows_q, head].double(), expected, rtol=RTOL, atol=RTOL)


def test_padding_values_do_not_matter():
    """NaN in padding rows of q, k and v reaches no output row and no gradient."""
    case = AttentionCase("padded", (5, 3), multiple_of_q=4, tail_q=4)
    layout, _ = case.layouts()
    dirty = tuple(x.masked_fill(~layout.valid_T[:, None, None], float("nan")) for x in case.qkv())
    leaves = [x.requires_grad_() for x in dirty]
    out = segment_sdpa(*leaves, layout, layout)
    assert out.isfinite().all()
    out.sum().backward()
    assert all(x.grad.isfinite().all() for x in leaves)


def kernel_that_needs_queries(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: object) -> torch.Tensor:
    raise AssertionError(f"called with {len(q)} queries and {len(k)} keys")


@pytest.mark.parametrize("attention", [segment_sdpa, partial(_packed, kernel_that_needs_queries)])
@pytest.mark.parametrize("lengths", [((0, 0), (3, 5)), ((4, 0), (0, 5))])
def test_padding_ranks_have_zero_outputs_with_a_graph(attention, lengths):
    """On a context-parallel rank with only padding, every parameter before attention still gets a gradient, of zeros.

    The padding may have any values, and no kernel is called without queries or keys.
    """
    layout_q, layout_k = (SequenceLayout(n, (4, 8), 16) for n in lengths)
    q, k, v = (torch.full((16, heads, 8), float("nan"), requires_grad=True) for heads in (4, 2, 2))
    out = attention(q, k, v, layout_q, layout_k)
    assert out.shape == q.shape
    assert not out.any()
    out.sum().backward()
    assert [x.grad is not None and not x.grad.any() for x in (q, k, v)] == [True] * 3


def test_the_gathered_layout_equals_the_global_pack():
    """Under sequence parallelism, attention gets all rows and a layout of local rows; it must use the pack's."""
    for case in (CASES[0], CASES[4]):
        layout, _ = case.layouts()
        local = layout.shard(0, 2)
        q, k, v = case.qkv()
        for attention in (reference_attention, segment_sdpa):
            expected = attention(q, k, v, layout, layout)
            assert torch.equal(attention(q, k, v, local, local), expected)


def test_dense_pack_copies_no_rows(monkeypatch: pytest.MonkeyPatch):
    """A dense batch is passed to the kernel as a view of the packed rows."""
    seen = []
    monkeypatch.setattr(
        "dit.kernels.attention.sdpa", lambda q, k, v, **_: seen.append((q, k, v)) or torch.zeros_like(q)
    )
    layout = SequenceLayout.from_lengths([4, 4])
    qkv = AttentionCase("dense", (4, 4)).qkv()
    segment_sdpa(*qkv, layout, layout)
    assert len(seen) == 1
    assert all(given.data_ptr() == x.data_ptr() for given, x in zip(seen[0], qkv))


@pytest.mark.parametrize(
    ("lengths_q", "lengths_k", "calls"),
    [
        ((4, 8, 4, 8, 4), None, [2, 3]),
        ((65, 66, 65), None, [1, 2]),
        ((4, 6, 4, 6, 4), (2, 2, 2, 3, 2), [1, 1, 3]),
    ],
)
def test_samples_of_equal_lengths_share_a_call(lengths_q, lengths_k, calls):
    """They may be anywhere in the pack; their texts must also have equal lengths."""
    batches = []

    def kernel(q: torch.Tensor, *_: object) -> torch.Tensor:
        batches.append(len(q))
        return torch.zeros_like(q)

    case = AttentionCase("mixed", lengths_q, lengths_k)
    attend_densely(kernel, *case.qkv(), *case.layouts())
    assert sorted(batches) == calls


def test_a_call_has_no_more_segments_than_a_gpu_supports(monkeypatch: pytest.MonkeyPatch):
    """More segments, such as the columns of large images in temporal attention, are split over calls."""
    batches = []

    def kernel(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **_: object) -> torch.Tensor:
        batches.append(len(q))
        return torch.nn.functional.scaled_dot_product_attention(q, k, v)

    def packed(*_: object) -> torch.Tensor:
        raise AssertionError("more segments than the kernel supports")

    monkeypatch.setattr("dit.kernels.attention.sdpa", kernel)
    heads, many = 4, 2**31
    for lengths, segments, sums, calls in (
        ((2,) * 7, 3, many, [3, 3, 1]),
        ((2, 2, 5, 2, 2), 3, many, [3, 1, 1]),
        ((2,) * 7, 9, heads * 2 * 128 * 64, [2, 2, 2, 1]),
        ((2, 2, 129, 2, 2), 9, heads * 2 * 128 * 64 - 1, [1, 1, 1, 1, 1]),
    ):
        monkeypatch.setattr("dit.kernels.attention.MOST_SEGMENTS", segments)
        monkeypatch.setattr("dit.kernels.attention.MOST_SUMS", sums)
        case = AttentionCase("many", lengths, heads=heads)
        check(partial(_packed, packed), case, case.qkv(), rtol=RTOL)
        assert batches == calls
        batches.clear()
    monkeypatch.undo()
    # ST-DiT-XL: 16 heads of 72 features, rounded up to 128, and one frame, rounded up to 128 queries.
    assert _most_segments(16, 1, 72) * 16 * 128 * 128 <= 2**31
    assert _most_segments(16, 1, 72) == 8192
    assert _most_segments(1, 1, 8) == 65535
    assert _most_segments(64, 10**6, 128) == 1


def test_a_packed_kernel_gets_no_more_sums_than_it_can_number(monkeypatch: pytest.MonkeyPatch):
    """A pack has 128 sums of dq for each segment in addition to those of its tokens."""
    calls = []

    def packed(q: torch.Tensor, *_: object) -> torch.Tensor:
        calls.append(len(q))
        return q

    case = AttentionCase("columns", (2, 3, 2, 3), heads=4)
    for sums, packed_calls in ((4 * (128 + 4 * 128) * 64, 1), (4 * (128 + 4 * 128) * 64 - 1, 0)):
        monkeypatch.setattr("dit.kernels.attention.MOST_SUMS", sums)
        _packed(packed, *case.qkv(), *case.layouts())
        assert len(calls) == packed_calls
        calls.clear()


def no_kernel(*_: object) -> torch.Tensor:
    raise AssertionError("a packed kernel allocates 128 sums of dq for each of the single tokens")


@pytest.mark.parametrize("lengths", [(1, 1, 1), (1, 4, 1, 4, 1)], ids=str)
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_a_single_query_with_a_single_key_needs_no_kernel(lengths: tuple[int, ...], groups: int):
    """Temporal attention of a still: the output is the value, and the gradients of query and key are 0."""
    batches = []

    def kernel(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        batches.append(len(q))
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)

    layout = SequenceLayout.from_lengths(lengths, total_tokens=sum(lengths) + 2)
    leaves = [torch.randn(layout.total_tokens, heads, 8, requires_grad=True) for heads in (4, groups, groups)]
    grad = torch.randn(layout.total_tokens, 4, 8)
    results = []
    for attention in (partial(attend_densely, kernel), reference_attention):
        q, k, v = (
            leaves
            if attention is not reference_attention
            else (leaves[0], *(x.repeat_interleave(4 // groups, 1) for x in leaves[1:]))
        )
        out = attention(q, k, v, layout, layout)
        results.append([out, *torch.autograd.grad(out, leaves, grad)])
    assert torch.equal(_packed(no_kernel, *leaves, layout, layout), segment_sdpa(*leaves, layout, layout))
    assert batches == [count for count in [lengths.count(4)] if count]
    for ours, exact in zip(*results, strict=True):
        torch.testing.assert_close(ours, exact, rtol=RTOL, atol=RTOL)


@pytest.mark.parametrize(
    "case",
    [
        AttentionCase("self", (4, 6, 14, 3), multiple_of_q=4),
        AttentionCase("groups", (4, 6, 14, 3), (4, 2, 2, 3), multiple_of_q=4),
    ],
    ids=lambda case: case.name,
)
def test_a_sample_in_a_shared_call_never_sees_another(case: AttentionCase):
    """NaN in every token of one sample reaches no other sample's output and gradient."""
    layout_q, layout_k = case.layouts()
    bad_T, bad_K = (layout.segment_ids_T == 1 for layout in (layout_q, layout_k))
    leaves = [
        x.masked_fill(bad[:, None, None], float("nan")).requires_grad_()
        for x, bad in zip(case.qkv(), (bad_T, bad_K, bad_K))
    ]
    out = segment_sdpa(*leaves, layout_q, layout_k)
    assert out[~bad_T].isfinite().all()
    assert out[bad_T & layout_q.valid_T].isnan().all()
    out[~bad_T].sum().backward()
    assert all(x.grad[~bad].isfinite().all() for x, bad in zip(leaves, (bad_T, bad_K, bad_K)))


def test_groups_are_computed_once_for_all_layers():
    """The second layer of a step builds no table and copies no number to the host."""
    case = AttentionCase("mixed", (4, 6, 70, 3), (5, 20, 3, 3), multiple_of_q=4)
    layouts, qkv = case.layouts(), case.qkv()
    segment_sdpa(*qkv, *layouts)
    with CallCounter() as counter:
        segment_sdpa(*qkv, *layouts)
    assert counter.waits == 0
    assert not {"arange", "lift_fresh", "index", "index_put", "sort"} & set(counter.by_operation)


def test_cudnn_builds_no_plan_for_sizes_that_occur_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups of segments have other sizes in each pack; batches of equal samples repeat."""
    enabled = []

    def recorded(*qkv: torch.Tensor, **options: Any) -> torch.Tensor:
        enabled.append(torch.backends.cuda.cudnn_sdp_enabled())
        return torch.nn.functional.scaled_dot_product_attention(*qkv, **options)

    monkeypatch.setattr("dit.kernels.attention.sdpa", recorded)
    for lengths in ((4, 6, 4), (5, 5)):
        case = AttentionCase("packs", lengths)
        segment_sdpa(*case.qkv(), *case.layouts())
    assert enabled == [False, False, True]
    with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.MATH]):  # a request for cuDNN
        segment_sdpa(*AttentionCase("packs", (4, 6)).qkv(), *AttentionCase("packs", (4, 6)).layouts())
    assert enabled[3:] == [True, True]


def packed_reference(q, k, v, cu_q, cu_k, max_q, max_k):
    """Attend segment by segment, like a packed kernel of flash-attn; a segment without keys gives zeros."""
    assert len(cu_q) == len(cu_k)
    longest = int(cu_q.diff().max()), int(cu_k.diff().max())
    limits = max(2, longest[0]), max(2, longest[1])
    assert (max_q, max_k) in (longest, limits, (len(q), len(k)))  # the last is the limit of a pack of fixed size
    assert (int(cu_q[-1]), int(cu_k[-1])) == (len(q), len(k))
    parts = []
    for a, b, c, d in zip(cu_q[:-1], cu_q[1:], cu_k[:-1], cu_k[1:]):
        scores = torch.einsum("tnh,knh->ntk", q[a:b], k[c:d]) * q.shape[-1] ** -0.5
        parts.append(torch.einsum("ntk,knh->tnh", scores.softmax(-1), v[c:d]))
    return torch.cat(parts)


def test_the_packed_reference_has_the_signature_of_the_kernels() -> None:
    """The segments are the positional arguments after q, k and v."""
    from torch.nn.attention.varlen import varlen_attn

    names = [x.name for x in signature(varlen_attn).parameters.values() if x.default is x.empty]
    short = {"query": "q", "key": "k", "value": "v", "cu_seq_q": "cu_q", "cu_seq_k": "cu_k"}
    assert [short.get(name, name) for name in names] == list(signature(packed_reference).parameters)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_packed_kernels_get_padding_as_separate_segments(case: AttentionCase):
    """No token is copied, and padding attends to nothing."""
    given = []

    def kernel(q, k, v, *segments):
        given.extend((q, k, v))
        return packed_reference(q, k, v, *segments)

    def attention(q, k, v, layout_q, layout_k):
        return _packed(kernel, q, k, v, layout_q, layout_k)

    check(attention, case, case.qkv(), rtol=1e-5)
    layout_q, layout_k = case.layouts()
    if not (layout_q.uniform_length and layout_k.uniform_length):
        assert [len(x) for x in given[:3]] == [layout_q.total_tokens] + [layout_k.total_tokens] * 2


def test_flash_attention_does_not_expect_a_query_in_every_segment() -> None:
    """It does if the longest segment has one query and heads share keys; padding adds segments without queries."""
    single = AttentionCase("single", (1, 1), (5, 3), multiple_of_q=2)
    assert _segments_with_padding(*single.layouts())[2:] == (2, 5)


def test_transformer_engine_gets_all_segments_by_arguments_that_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """The names are compared with the source of Transformer Engine if it is installed."""
    installed, calls = find_spec("transformer_engine"), {}

    class Recorded:
        def __init__(self, *sizes, **options):
            calls["__init__"] = sizes, options

        def __call__(self, *qkv, **options):
            calls["forward"] = qkv, options
            return Unwritten.apply(*qkv).flatten(1)

    class Unwritten(torch.autograd.Function):
        """Outputs and gradients of padding are memory that nothing has written."""

        @staticmethod
        def forward(ctx, q, k, v):
            return torch.ones_like(q).masked_fill_(padding, float("nan"))

        @staticmethod
        def backward(ctx, grad):
            assert not grad.masked_select(padding).any()
            of_keys = torch.ones_like(k).masked_fill_(padding_k, float("nan"))
            return torch.ones_like(grad).masked_fill_(padding, float("nan")), of_keys, of_keys

    monkeypatch.setitem(sys.modules, "transformer_engine", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch", SimpleNamespace(DotProductAttention=Recorded))
    case = AttentionCase("ragged", (4, 6), (5, 3), multiple_of_q=4, tail_k=2)
    layout_q, layout_k = case.layouts()
    padding, padding_k = (~layout.valid_T[:, None, None] for layout in (layout_q, layout_k))
    dirty = zip(case.qkv(), (padding, padding_k, padding_k))
    q, k, v = (x.masked_fill(mask, float("nan")).requires_grad_() for x, mask in dirty)
    out = TEAttention()(q, k, v, layout_q, layout_k)
    out.sum().backward()
    assert all(x.isfinite().all() for x in calls["forward"][0])
    for x, mask in ((out, padding), (q.grad, padding), (k.grad, padding_k), (v.grad, padding_k)):
        assert torch.equal(x, (~mask).expand_as(x).to(x.dtype))
    sizes, _ = calls["__init__"]
    options = calls["forward"][1]
    assert sizes == (q.shape[1], q.shape[2])
    assert [options[f"cu_seqlens_{of}"].tolist() for of in ("q", "kv")] == [[0, 4, 10], [0, 5, 8]]
    assert options["cu_seqlens_q_padded"].tolist() == [0, 4, 12]
    assert (options["max_seqlen_q"], options["max_seqlen_kv"]) == (6, 5)
    assert options["pad_between_seqs"] is False  # all padding is after the last token
    between = replace(case, lengths_k=(3, 5), multiple_of_k=5, tail_k=0)
    TEAttention()(*between.qkv(), *between.layouts())
    assert calls["forward"][1]["pad_between_seqs"] is True
    if installed is not None:
        (folder,) = installed.submodule_search_locations
        tree = ast.parse(next(Path(folder).rglob("dot_product_attention.py")).read_text())
        (module,) = (x for x in ast.walk(tree) if isinstance(x, ast.ClassDef) and x.name == "DotProductAttention")
        for method in (x for x in module.body if isinstance(x, ast.FunctionDef) and x.name in calls):
            assert set(calls[method.name][1]) <= {x.arg for x in (*method.args.args, *method.args.kwonlyargs)}
