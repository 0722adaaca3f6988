"""The fused residual, norm and modulation against formulas in float64: values and every gradient."""

from functools import partial

import pytest
import torch

from dit.kernels.fused import blocks
from dit.kernels.fused import residual_norm as fused
from dit.kernels.fused.blocks import FEWEST_ROWS, MOST_ROWS, blocks_of, blocks_of_passes, rows_of_blocks
from dit.kernels.fused.gpu.residual_norm import tiles
from dit.kernels.modulation import NormModulation
from dit.layout import SequenceLayout
from tests.interpreted import formulas
from tests.support.ranks import rows

DENSE = SequenceLayout.from_lengths([6, 6, 6])
RAGGED = SequenceLayout.from_lengths([11, 1, 7])
PADDED = SequenceLayout.from_lengths([9, 2, 13], multiple_of=4, total_tokens=37)
FEW = SequenceLayout.from_lengths([9, 1], multiple_of=2, total_tokens=12)
LAYOUTS = {
    "dense": DENSE,
    "one_sample": SequenceLayout.from_lengths([19]),
    "ragged": RAGGED,
    "ragged_padded": PADDED,
    "fixed": SequenceLayout((9, 2, 0, 0), (12, 4, 0, 0), 37, is_fixed=True),
    "any_order": PADDED.select(torch.randperm(37, generator=torch.Generator().manual_seed(1))[:21]),
    "shard": SequenceLayout.from_lengths([13, 11, 2, 9], multiple_of=4, total_tokens=44).shard(1, 2),
    "without_a_sample": RAGGED.select(torch.arange(12, 19)),
}
DTYPES = {"fp32": (torch.float32, 6.0), "bf16": (torch.bfloat16, 1.5)}  # the interpreter truncates in bf16 stores
EPS = 1e-5
SLOW = pytest.mark.slow


def call(layout, x, y, gate, bias, shift, scale, weight):
    """Call the fused function for these parts, and return its results in the order of the formula."""
    into = None if shift is None else NormModulation(shift, scale, EPS, weight)
    if into is None:
        return [fused.residual(x, y, gate, bias, layout)]
    if y is None:
        return list(fused.norm_modulate(x, into, layout))
    return list(fused.residual_norm_modulate(x, y, gate, bias, into, layout))


def leaves(layout, width, parts):
    tokens, samples = (layout.num_local_tokens, width), (layout.num_samples, width)
    shapes = {"x": tokens, "y": tokens, "gate": samples, "bias": (width,), "shift": samples, "scale": samples}
    shapes["weight"] = (width,)
    return formulas.draws(*(shape if name in parts else None for name, shape in shapes.items()))


ALL = "x y gate bias shift scale"
PARTS = {
    "all": ALL,
    "norm": "x shift scale",
    "rms_norm": "x shift scale weight",
    "residual": "x y gate bias",
    "no_bias": "x y gate shift scale",
    "rms_all": ALL + " weight",
    "no_gate": "x y bias shift scale",
    "no_gate_no_bias": "x y shift scale",
    "sum": "x y",
}


def check(layout, width, parts, precision):
    dtype, ulps = DTYPES[precision]
    kernel = partial(call, layout)
    reference = lambda *given: formulas.residual_norm(layout, *given, EPS)  # noqa: E731
    formulas.check(kernel, reference, leaves(layout, width, parts.split()), dtype, ulps)


QUICK = ("ragged_padded", "fixed", "any_order", "without_a_sample", "all", "norm", "rms_norm", "residual", "sum")
"""Layouts and parts without the mark `slow`."""


@pytest.mark.parametrize("layout", rows([(name,) for name in LAYOUTS], lambda name: name in QUICK))
def test_every_layout_equals_the_formula(layout):
    check(LAYOUTS[layout], 40, ALL, "fp32")


@pytest.mark.parametrize(
    ("parts", "precision"),
    rows(
        [*((parts, "fp32") for parts in PARTS), ("all", "bf16"), ("residual", "bf16")],
        lambda parts, precision: parts in QUICK and (parts, precision) != ("residual", "bf16"),
    ),
)
def test_every_part_equals_the_formula(parts, precision):
    check(FEW, 48, PARTS[parts], precision)


@pytest.mark.parametrize("width", [5, 77, 1152, *(pytest.param(n, marks=SLOW) for n in (128, 3072, 4096, 5120)), 4100])
def test_every_width_equals_the_formula(width):
    """The bias is added before the kernel for widths above 4096."""
    few = SequenceLayout.from_lengths([2, 1], total_tokens=4)
    check(few, width, ALL, "fp32")
    if width == 77:
        check(few, width, ALL + " weight", "bf16")


def test_modulation_may_be_a_part_of_a_wider_tensor():
    """Chunks of one projection are passed as views, and each gets its own gradient."""
    (x, wide) = formulas.draws((18, 16), (3, 96))
    whole = wide.float().requires_grad_()
    chunks = whole.chunk(6, -1)
    out, normed = fused.residual_norm_modulate(
        x.float(), x.float() + 1, chunks[3], None, NormModulation(chunks[1], chunks[4], EPS), DENSE
    )
    want = wide.clone().requires_grad_()
    parts = want.chunk(6, -1)
    expected = formulas.residual_norm(DENSE, x, x.float() + 1, parts[3], None, parts[1], parts[4], None, EPS)
    torch.testing.assert_close(normed.double(), expected[1], rtol=1e-5, atol=1e-5)
    (out.sum() + normed.square().sum()).backward()
    (expected[0].sum() + expected[1].square().sum()).backward()
    torch.testing.assert_close(whole.grad.double(), want.grad, rtol=1e-5, atol=1e-4)


def test_results_are_bitwise_equal_in_every_call_and_pack():
    """Sums have a fixed order, so a sample's outputs do not depend on the other samples of its pack."""
    x, y, gate, bias, shift, scale, _ = (None if t is None else t.float() for t in leaves(RAGGED, 24, ALL.split()))
    run = partial(formulas.run, partial(call, RAGGED))
    first, again = (run([x, y, gate, bias, shift, scale, None]) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, again))
    alone = SequenceLayout.from_lengths([11])
    rows = slice(0, 11)
    out = call(RAGGED, x, y, gate, bias, shift, scale, None)[1][rows]
    assert torch.equal(out, call(alone, x[rows], y[rows], gate[:1], bias, shift[:1], scale[:1], None)[1])


def test_the_last_residual_may_be_unused():
    """The head of a network reads only the normalised tokens."""
    x, _, _, _, shift, scale, _ = (None if t is None else t.float() for t in leaves(DENSE, 24, ALL.split()))
    x.requires_grad_()
    fused.norm_modulate(x, NormModulation(shift, scale, EPS), DENSE)[1].square().sum().backward()
    want = x.detach().double().requires_grad_()
    formulas.residual_norm(DENSE, want, None, None, None, shift, scale, None, EPS)[1].square().sum().backward()
    torch.testing.assert_close(x.grad.double(), want.grad, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("size", [1, 40, 77, 384, 1000, 1152, 1536, 3072, 4096, 5120, 6144, 7168])
def test_less_than_half_of_a_tile_is_masked(size):
    first, rest = tiles(size)
    assert first & (first - 1) == rest & (rest - 1) == 0
    assert 0 <= first + rest - size < max(rest, first) / 2
    assert rest or size in (1, 4096, 1000, 7168)
    assert first + rest == size or size in (77, 1000, 7168)


@pytest.mark.parametrize("multiprocessors", [132, 148])
@pytest.mark.parametrize(("size", "programs"), [(1152, 4), (3072, 2)])
@pytest.mark.parametrize("lengths", [[16], [1024] * 8, [*range(100, 380, 7)], [64] * 200, [7] * 600])
def test_no_multiprocessor_has_more_blocks_with_sums(monkeypatch, lengths, size, programs, multiprocessors):
    """A multiprocessor with one block more than the others would take longer than they."""
    monkeypatch.setattr(blocks, "multiprocessors", lambda device: multiprocessors)
    layout, most = SequenceLayout.from_lengths(lengths), programs * multiprocessors
    rows, count = rows_of_blocks(sum(lengths), len(lengths), most), len(blocks_of_passes(layout, size)[1].table)
    assert FEWEST_ROWS <= rows <= MOST_ROWS
    assert count == len(blocks_of(layout, rows).table)
    assert count <= max(most, len(lengths))
    if max(lengths) > 100:
        assert count >= 0.8 * most


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("rows", [1, 3, 64])
def test_blocks_cover_every_token_once_and_never_cross_samples(layout, rows):
    blocks = blocks_of(layout, rows)
    seen = []
    used = int(blocks.offsets[-1])
    assert used == len(blocks.table) or layout.is_fixed
    for i, (first, count, segment) in enumerate(blocks.table[:used].tolist()):
        assert 1 <= count <= rows
        assert set(layout.segment_ids_T[first : first + count].tolist()) == {segment}
        assert blocks.offsets[segment] <= i < blocks.offsets[segment + 1]
        seen += range(first, first + count)
    assert sorted(seen) == list(range(layout.num_local_tokens))
