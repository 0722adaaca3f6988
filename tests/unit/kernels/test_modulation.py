"""Per-sample conditioning of packed rows: the dense view and the ragged gather give the same results."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from dit.kernels.modulation import NormModulation, broadcast_per_sample, norm_modulate, residual
from dit.layout import SequenceLayout

DENSE = SequenceLayout.from_lengths([6, 6, 6])
# The same pack with `local_indices` takes the gather path.
GATHERED = DENSE.select(torch.arange(18))
RAGGED = SequenceLayout.from_lengths([6, 2, 7], multiple_of=4, total_tokens=24)

Op = Callable[[Tensor, Tensor, Tensor, SequenceLayout], Tensor]
OPS: dict[str, Op] = {
    "norm_modulate": lambda x, a, b, layout: norm_modulate(x, NormModulation(a, b, 1e-6), layout)[1],
    "residual": lambda x, a, b, layout: residual(x, x.tanh(), a + b, None, layout),
}


def draws(rows: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(4)
    sizes = [(rows, 10), (3, 10), (3, 10)]
    return [torch.randn(size, generator=generator, dtype=torch.float64).requires_grad_() for size in sizes]


def run(op: Op, leaves: list[Tensor], layout: SequenceLayout) -> list[Tensor]:
    """Return the output and the gradients of all three inputs."""
    out = op(*leaves, layout)
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
    return [out.detach(), *torch.autograd.grad((out * weights).sum(), leaves)]


@pytest.mark.parametrize("name", OPS)
def test_dense_view_equals_ragged_gather(name: str):
    leaves = draws(18)
    for dense, gathered in zip(run(OPS[name], leaves, DENSE), run(OPS[name], leaves, GATHERED)):
        torch.testing.assert_close(dense, gathered, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("layout", [DENSE, RAGGED], ids=["dense", "ragged"])
def test_each_row_has_the_conditioning_of_its_sample(name: str, layout: SequenceLayout):
    """Every sample of the pack equals a pack of only that sample."""
    x, a, b = draws(layout.total_tokens)
    out = OPS[name](x, a, b, layout)
    for i, (start, length) in enumerate(zip(layout.starts, layout.lengths)):
        rows = slice(start, start + length)
        alone = OPS[name](x[rows], a[i : i + 1], b[i : i + 1], SequenceLayout.from_lengths([length]))
        torch.testing.assert_close(out[rows], alone, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", OPS)
def test_a_rank_with_some_rows_computes_those_rows(name: str):
    x, a, b = draws(RAGGED.total_tokens)
    rows = torch.arange(5, 15)
    expected = OPS[name](x, a, b, RAGGED)[rows]
    torch.testing.assert_close(OPS[name](x[rows], a, b, RAGGED.select(rows)), expected)


def test_modulated_norm_equals_its_formula():
    x, shift, scale = draws(24)
    mean, variance = x.mean(-1, keepdim=True), x.var(-1, keepdim=True, unbiased=False)
    normed = (x - mean) / (variance + 0.1).sqrt()
    expected = normed * (1 + RAGGED.per_token(scale)) + RAGGED.per_token(shift)
    torch.testing.assert_close(norm_modulate(x, NormModulation(shift, scale, 0.1), RAGGED)[1], expected)


def test_a_zero_gate_is_bitwise_the_identity():
    x, y = torch.randn(24, 10), torch.randn(24, 10)
    assert torch.equal(residual(x, y, torch.zeros(3, 10), None, RAGGED), x)


def test_dense_batch_copies_no_conditioning():
    """A dense batch broadcasts one row per sample; only a ragged pack gathers one per token."""
    cond = torch.randn(3, 10)
    assert broadcast_per_sample(cond, DENSE).data_ptr() == cond.data_ptr()
    assert broadcast_per_sample(cond, RAGGED).shape == (24, 10)


@pytest.mark.parametrize("name", OPS)
def test_ragged_packs_of_any_lengths_share_a_compiled_graph(name: str) -> None:
    """After two packs with different numbers of samples and tokens, sizes are dynamic."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("eager")
    compiled: Op = torch.compile(OPS[name], backend=counter)
    generator = torch.Generator().manual_seed(4)
    counts = []
    for lengths in ([3, 2, 4], [6, 1], [3, 1, 2, 5, 5], [2, 7, 3, 3]):
        layout = SequenceLayout.from_lengths(lengths, multiple_of=3)
        assert layout.kind == "ragged"
        _ = layout.segment_ids_T, layout.tokens_by_sample  # compiled layers compute these before a graph
        rows = (layout.total_tokens, len(lengths), len(lengths))
        leaves = [torch.randn(n, 10, generator=generator).requires_grad_() for n in rows]
        torch.testing.assert_close(run(compiled, leaves, layout), run(OPS[name], leaves, layout))
        counts.append(counter.frame_count)
    assert counts[1:] == [2, 2, 2]
