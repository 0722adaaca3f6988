"""Functions of the loader on values and bytes: the largest magnitude, and checksums."""

import math
import zlib

import pytest
import torch

from energon_data.filters import largest_magnitude
from energon_data.samples import checksum

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_largest_magnitude_equals_that_of_torch(dtype: torch.dtype) -> None:
    """Values of either sign at any place; zeros of both signs, subnormal numbers and infinities."""
    small = torch.finfo(dtype).smallest_normal / 4
    x = torch.randn(40, 30, generator=torch.Generator().manual_seed(0)).to(dtype)
    rows = [x, x.abs(), -x.abs(), x[:, ::7], x[:1].expand(5, -1), 0 * x, -0.0 * x.abs(), x.sign() * small]
    for row in rows:
        assert largest_magnitude(row) == row.abs().max().item()
    for value in (7.5, -7.5, small, -small, math.inf, -math.inf):
        for other in (0.0, -0.0, small / 2):
            row = torch.tensor([other, value, other], dtype=dtype)
            assert largest_magnitude(row) == abs(row[1].item())
    assert largest_magnitude(torch.zeros(0, 4, dtype=dtype)) == 0  # tokens of an empty text


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_nan_of_either_sign_is_detected(dtype: torch.dtype) -> None:
    for nan in (math.nan, -math.nan):
        for other in (1.0, -1.0, math.inf, -math.inf):
            row = torch.tensor([other, other, nan], dtype=dtype)
            assert math.isnan(largest_magnitude(row))


def test_checksums_equal_the_crc32_standard() -> None:
    """Compared with the check value of CRC-32/ISO-HDLC, and with zlib at all lengths near steps of fast versions."""
    assert checksum(b"123456789") == "cbf43926"
    data = torch.randint(0, 256, (4200,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)).numpy()
    for length in (*range(300), *range(1000, 4200, 101)):
        assert checksum(memoryview(data)[1 : 1 + length]) == f"{zlib.crc32(data[1 : 1 + length]):08x}"
