"""The linear layers of all experts as one product on CUDA; torch's grouped product needs bf16 there."""

import pytest
import torch

from tests.unit.kernels.test_grouped import COUNTS, check


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
def test_each_group_equals_its_linear_layer(counts, bias):
    check(counts, torch.bfloat16, bias=bias, device="cuda")
