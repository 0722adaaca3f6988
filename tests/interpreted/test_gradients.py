"""The fused addition to main gradients equals torch's, for any size and alignment."""

import weakref
from contextlib import contextmanager
from functools import partial
from unittest import mock

import pytest
import torch

from dit.backends import graphs
from dit.kernels.fused.gpu import gradients as gpu
from dit.kernels.fused.gpu.gradients import BLOCK, CHUNK
from dit.kernels.fused.gradients import add_gradients

SIZES = (1, 5, BLOCK, BLOCK + 3, CHUNK + BLOCK - 1)


def drawn(dtype, shift=0, sizes=SIZES):
    generator = torch.Generator().manual_seed(4)
    mains = [torch.randn(size + shift + 1, generator=generator)[shift:] for size in sizes]
    return mains, [torch.randn(size + shift, generator=generator).to(dtype)[shift:] for size in sizes]


@pytest.mark.parametrize("shift", [0, 1], ids=["aligned", "not_aligned"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_the_sums_are_bitwise_equal_to_torch(dtype, shift):
    """The element after each main gradient belongs to another parameter and must not change."""
    mains, gradients = drawn(dtype, shift)
    want = [
        torch.cat([main[:-1].double() + g.double(), main[-1:].double()]).float() for main, g in zip(mains, gradients)
    ]
    add_gradients([main[:-1] for main in mains], gradients)
    for got, exact in zip(mains, want, strict=True):
        assert torch.equal(got, exact)


def test_offsets_have_64_bits():
    """The chunk after 2**31 elements of a parameter, whose addresses are chosen so that this chunk is in memory."""
    (main,), (gradient,) = drawn(torch.bfloat16, sizes=(CHUNK,))
    want, number = main[:-1] + gradient, 2**31 // CHUNK + 1
    first = number * CHUNK
    row = [*(x.data_ptr() - first * x.element_size() for x in (gradient, main)), first + CHUNK]
    chunks = torch.tensor([[0, number]], dtype=torch.int32)
    gpu.add_gradients(torch.tensor([row]), chunks, half=False, aligned=False)
    assert torch.equal(main[:-1], want)


def test_a_graph_contains_one_kernel_for_all_parameters_and_keeps_its_tables():
    """A capture launches no kernel and keeps no tensor allocated."""
    launches, launch = [], gpu.add_gradients

    def captured_launch(*tables, **flags):
        launches.append(([weakref.ref(table) for table in tables], flags))

    @contextmanager
    def capture_graph():
        with mock.patch.object(gpu, "add_gradients", captured_launch):
            yield lambda: [launch(*(table() for table in tables), **flags) for tables, flags in launches]

    mains, gradients = drawn(torch.bfloat16)
    mains = [main[:-1].clone() for main in mains]
    want = [main.clone() for main in mains]
    with mock.patch.object(graphs, "capture_graph", capture_graph):
        _, replay = graphs.capture_on_gpu(partial(add_gradients, mains, gradients))
    assert len(launches) == 1
    assert all(map(torch.equal, mains, want))
    for factor in (1, 3):
        torch._foreach_mul_(gradients, factor)
        torch._foreach_add_(want, gradients)
        replay()
        assert all(map(torch.equal, mains, want))
