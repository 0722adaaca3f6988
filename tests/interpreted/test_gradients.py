"""The fused addition to main gradients equals torch's, for any size and alignment."""

import pytest
import torch

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
