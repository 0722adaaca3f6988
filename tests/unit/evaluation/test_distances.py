"""Distances between sets of features, compared with closed forms and explicit sums in float64."""

import pytest
import torch
from torch import Tensor

from dit.errors import ConfigError
from dit.evaluation import kernel_distance as kernel_module
from dit.evaluation import precision_recall as precision_module
from dit.evaluation.frechet import Gaussian, Moments, frechet_distance
from dit.evaluation.kernel_distance import kernel_distance
from dit.evaluation.precision_recall import precision_recall

EXACT = 1e-10  # relative, float64: roots of eigenvalues


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def covariance(size: int, seed: int) -> Tensor:
    x = random(size, size, seed=seed)
    return x @ x.T


def test_the_distance_of_gaussians_along_shared_axes_is_that_of_means_and_deviations() -> None:
    """|m - n|^2 + sum (s_i - t_i)^2 for covariances with the same eigenvectors."""
    axes = torch.linalg.qr(random(5, 5)).Q
    m, n, s, t = random(4, 5, seed=1).abs()
    first, second = (axes @ torch.diag(deviation**2) @ axes.T for deviation in (s, t))
    expected = float((m - n).square().sum() + (s - t).square().sum())
    assert frechet_distance(Gaussian(m, first), Gaussian(n, second)) == pytest.approx(expected, rel=EXACT)


def test_the_distance_of_gaussians_in_the_plane_has_a_closed_form() -> None:
    """tr((A B)^(1/2)) = (tr(A B) + 2 det(A B)^(1/2))^(1/2) for 2 x 2 matrices, which need not commute."""
    a, b, mean = covariance(2, 1), covariance(2, 2), random(2)
    root = ((a @ b).trace() + 2 * (a.det() * b.det()).sqrt()).sqrt()
    expected = float(mean.square().sum() + a.trace() + b.trace() - 2 * root)
    assert (a @ b - b @ a).abs().max() > 0.1
    first, second = Gaussian(mean, a), Gaussian(torch.zeros(2).double(), b)
    assert frechet_distance(first, second) == pytest.approx(expected, rel=EXACT)
    assert frechet_distance(second, first) == pytest.approx(expected, rel=EXACT)


def test_equal_sets_with_a_singular_covariance_have_zero_distance() -> None:
    moments = Moments()
    moments.add(random(4, 7))
    gaussian = moments.reduce()
    assert frechet_distance(gaussian, gaussian) == pytest.approx(0, abs=1e-6)


def test_sums_of_batches_give_mean_and_covariance_of_all() -> None:
    features = random(50, 6) + 100
    moments = Moments()
    for part in features.split([1, 20, 29]):
        moments.add(part)
    gaussian = moments.reduce()
    assert (gaussian.count, gaussian.width) == (50, 6)
    torch.testing.assert_close(gaussian.mean, features.mean(0))
    torch.testing.assert_close(gaussian.covariance, torch.cov(features.T), rtol=1e-9, atol=1e-9)


def explicit(x: Tensor, y: Tensor) -> float:
    """Sum pair by pair, as Gretton et al. 2012, Eq. 3, with the cubic kernel."""

    def k(a: Tensor, b: Tensor) -> float:
        return float((a @ b / len(a) + 1) ** 3)

    def within(z: Tensor) -> float:
        n = len(z)
        return sum(k(z[i], z[j]) for i in range(n) for j in range(n) if i != j) / (n * (n - 1))

    return within(x) + within(y) - 2 * sum(k(a, b) for a in x for b in y) / (len(x) * len(y))


def test_the_kernel_distance_equals_the_u_statistic(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = random(7, 3), random(5, 3, seed=1) + 0.3
    expected = explicit(x, y)
    assert kernel_distance(x, y) == pytest.approx(expected, rel=EXACT)
    monkeypatch.setattr(kernel_module, "BLOCK", 2)
    assert kernel_distance(x, y) == pytest.approx(expected, rel=EXACT)


def test_the_kernel_distance_is_unbiased_for_few_pictures() -> None:
    """The distance between two halves of a set is 0 on average over all halvings, even for a small set."""
    x = random(6, 3)
    halves = [[i for i in range(6) if bits >> i & 1] for bits in range(64) if bits.bit_count() == 3]
    total = sum(kernel_distance(x[half], x[[i for i in range(6) if i not in half]]) for half in halves)
    assert total / len(halves) == pytest.approx(0, abs=1e-12)


def test_precision_and_recall_are_shares_in_the_balls_of_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a line, the balls of 0, 1, 2, 3, 10 (third neighbours at 3, 2, 2, 3, 9) cover [-3, 19]."""
    real = torch.tensor([0.0, 1, 2, 3, 10])[:, None]
    generated = torch.tensor([-3.0, -3.5, 19.0, 19.5, 6.0, 40.0])[:, None]
    # The balls of -3, -3.5, 19, 19.5, 6 and 40 have radii 22, 22.5, 22, 16, 13, 34, and cover the real pictures.
    for block in (1024, 2):
        monkeypatch.setattr(precision_module, "BLOCK", block)
        assert precision_recall(real, generated) == (3 / 6, 1.0)
        assert precision_recall(generated, real) == (1.0, 3 / 6)
    with pytest.raises(ConfigError, match="at least 4 pictures of each kind, got 3 and 5"):
        precision_recall(real[:3], real)


def test_copies_are_in_the_region_of_their_originals() -> None:
    """Forty equal generated pictures have balls of radius 0, which contain the four real pictures equal to them."""
    real = 20 * random(34, 512)
    for copied in real[:5]:
        with_copies = torch.cat([real[5:], copied.expand(4, -1)])
        assert precision_recall(with_copies, copied.expand(40, -1)) == (1.0, 4 / 33)
        assert precision_recall(copied.expand(40, -1), with_copies) == (4 / 33, 1.0)


def test_too_few_pictures_are_refused() -> None:
    moments = Moments()
    with pytest.raises(ConfigError, match="at least 2 pictures, got 0"):
        moments.reduce()
    moments.add(random(1, 3))
    with pytest.raises(ConfigError, match="at least 2 pictures, got 1"):
        moments.reduce()
    with pytest.raises(ConfigError, match="got 1 and 4"):
        kernel_distance(random(1, 3), random(4, 3))
