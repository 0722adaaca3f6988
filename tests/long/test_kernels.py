"""The Triton kernels of every model, and further sizes, in Triton's interpreter."""

from importlib.util import find_spec

import pytest

from tests.unit.kernels.test_fused import interpret

pytestmark = [pytest.mark.long, pytest.mark.skipif(find_spec("triton") is None, reason="needs triton, from `dev`")]


def test_more_sizes_and_layouts_equal_the_formula_in_the_interpreter():
    interpret("-m", "slow")
