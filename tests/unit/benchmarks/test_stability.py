"""The detector of the stability study on known curves; tests/integration/test_loop_options.py runs the study."""

import pytest

from benchmarks.stability import FAR_ABOVE, WINDOW, Curve

FLAT = [1.0] * 60


@pytest.mark.parametrize(
    ("losses", "not_finite", "outlier", "expected"),
    [
        (FLAT, None, None, None),
        ([1.0 / step for step in range(1, 60)], None, None, None),
        (FLAT[:7], 8, None, 8),
        (FLAT, 61, None, 61),
        # The mean of 20 steps is above 3 if one of them is above 41.
        ([*FLAT, 41.0 + 1e-6, *FLAT], None, None, 61),
        ([*FLAT, 40.9, *FLAT], None, None, None),
        ([*FLAT, 1e6, *FLAT], None, 61, None),
        # With n of the 20 equal to 4 the sum is 20 + 3 n, above 60 from n = 14 on.
        ([*FLAT, *[4.0] * 20], None, None, 74),
    ],
)
def test_a_divergence_is_a_running_loss_far_above_its_lowest(losses, not_finite, outlier, expected) -> None:
    assert (WINDOW, FAR_ABOVE) == (20, 3.0)
    assert Curve(losses, losses, losses, not_finite).diverged_at(outlier) == expected
