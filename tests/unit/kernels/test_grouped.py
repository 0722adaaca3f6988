"""The linear layers of all experts as one product: values, gradients, and the number of operations."""

from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from dit.kernels import grouped as grouped_products
from dit.kernels.grouped import grouped_linear

# float64 takes one product per group; the others use torch's grouped product. bf16 outputs are rounded once.
RTOL = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 2**-7}
COUNTS = {"even": [3, 3, 3], "ragged": [5, 0, 2, 1], "one": [0, 4, 0], "none": [0, 0]}


def leaves(counts, dtype, inputs=16, outputs=24, device="cpu"):
    generator = torch.Generator().manual_seed(3)
    shapes = [(sum(counts), inputs), *[(outputs, inputs)] * len(counts), *[(outputs,)] * len(counts)]
    return [
        torch.randn(shape, generator=generator, dtype=torch.float64).to(device, dtype).requires_grad_()
        for shape in shapes
    ]


def grouped(counts, x, *parameters, bias=True):
    ends = torch.tensor(counts).cumsum(0).int().to(x.device)
    return grouped_linear(x, counts, ends, parameters[: len(counts)], parameters[len(counts) :] if bias else None)


def check(counts, dtype, *, bias, device="cpu"):
    """Compare outputs and gradients with one linear layer per group."""
    given = leaves(counts, dtype, device=device)
    exact = [x.detach().double().requires_grad_() for x in given]
    weights, biases = exact[1 : len(counts) + 1], exact[len(counts) + 1 :]
    rows = exact[0].split(counts)
    want = torch.cat([x @ w.T + (b if bias else 0) for x, w, b in zip(rows, weights, biases, strict=True)])
    got = grouped(counts, *given, bias=bias)
    cotangent = torch.linspace(-2, 3, got.numel(), device=device).to(torch.bfloat16).view_as(got)
    used = slice(None) if bias else slice(len(counts) + 1)
    actual = torch.autograd.grad(got, given[used], cotangent.to(dtype))
    expected = torch.autograd.grad(want, exact[used], cotangent.double())
    for a, b in zip((got, *actual), (want, *expected), strict=True):
        assert a.shape == b.shape
        torch.testing.assert_close(a.double(), b, rtol=RTOL[dtype], atol=8 * RTOL[dtype])


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", RTOL, ids=str)
@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
def test_each_group_equals_its_linear_layer(counts, dtype, bias):
    check(counts, dtype, bias=bias)


def test_gradients_of_empty_groups_are_zero_if_the_product_leaves_them_uninitialised(monkeypatch):
    """As on SM 100, see https://github.com/pytorch/pytorch/issues/172439."""

    def uninitialised(a, b, offs):
        product = torch.nn.functional.grouped_mm(a, b, offs=offs)
        if b.dim() == 2:
            product[offs.diff(prepend=offs.new_zeros(1)) == 0] = torch.nan
        return product

    monkeypatch.setattr(grouped_products, "grouped_mm", uninitialised)
    for counts in COUNTS.values():
        check(counts, torch.bfloat16, bias=True)


class Operations(TorchDispatchMode):
    """Counts operations that launch kernels."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.counts[func._overloadpacket.__name__] += not func.is_view
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("experts", [2, 16])
def test_the_number_of_operations_does_not_depend_on_the_number_of_experts(experts):
    given = leaves([2] * experts, torch.bfloat16)
    with Operations() as operations:
        grouped([2] * experts, *given).sum().backward()
    products = {name: n for name, n in operations.counts.items() if name.startswith("grouped")}
    assert products == {"grouped_product": 2, "grouped_gradient": 1, "grouped_sums": 1}
    assert "mm" not in operations.counts
    assert operations.counts["stack"] == 3
    assert operations.counts.total() <= 20 + 2 * experts  # gradients of the parameters are stored one by one here


def test_flops_count_all_rows():
    given = leaves([5, 0, 2, 1], torch.bfloat16)
    with FlopCounterMode(display=False) as flops:
        grouped([5, 0, 2, 1], *given).sum().backward()
    assert flops.get_total_flops() == 3 * 2 * 8 * 16 * 24
