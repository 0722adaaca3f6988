"""Embedders of time, class and text against formulas."""

import math

import pytest
import torch

from dit.errors import ConfigError
from dit.layers.embeddings import timestep_features
from dit.layers.positions import check_size, sincos
from dit.layout import SequenceLayout
from dit.patchify import grid_positions


def test_time_features_are_cosines_then_sines():
    """Frequencies fall from 1 to almost 1 / 10000; angles are exact even if float32 would lose five digits."""
    times = [0.0, 0.5, 1.0, 999.75]
    features = timestep_features(torch.tensor(times), 6)
    for row, t in zip(features.tolist(), times):
        angles = [t, t * 10000 ** (-1 / 3), t * 10000 ** (-2 / 3)]
        assert row == pytest.approx([*map(math.cos, angles), *map(math.sin, angles)], abs=1e-7)


def test_time_features_distinguish_neighbouring_steps():
    """All thousand classic timesteps differ by far more than the bf16 rounding of one feature."""
    features = timestep_features(torch.arange(1000.0), 256)
    assert torch.cdist(features, features).fill_diagonal_(9.0).min() > 0.5


@pytest.mark.parametrize("kind", ["sincos_2d", "sincos_3d"])
@pytest.mark.parametrize("hidden_size", [12, 16, 64, 100, 384, 1152])
def test_every_position_of_a_large_grid_is_distinct(kind: str, hidden_size: int):
    """No two patches of a 48 x 48 grid (768 px) share an embedding: there is no table that could alias."""
    features = sincos(grid_positions((1, 48, 48)), hidden_size, kind)
    assert features.shape == (48 * 48, hidden_size)
    assert torch.cdist(features.double(), features.double()).fill_diagonal_(9.0).min() > 1e-3


@pytest.mark.parametrize("kind", ["sincos_2d", "sincos_3d"])
def test_position_is_a_product_of_axes(kind: str):
    """The inner product of two embeddings depends only on their distance along each axis (sine-cosine pairs)."""
    features = sincos(grid_positions((3, 6, 7)), 96, kind).double().view(3, 6, 7, 96)
    gram = torch.einsum("thwd,Tyxd->thwTyx", features, features)
    torch.testing.assert_close(gram[0, 0, 0, 1, 2, 3], gram[1, 3, 2, 2, 5, 5], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(gram[0, 4, 6, 2, 1, 0], gram[2, 4, 6, 0, 1, 0], rtol=1e-6, atol=1e-6)


def test_only_positions_with_a_time_axis_depend_on_time():
    first, later = torch.tensor([[0, 2, 3]]), torch.tensor([[5, 2, 3]])
    assert torch.equal(sincos(first, 64, "sincos_2d"), sincos(later, 64, "sincos_2d"))
    assert not torch.equal(sincos(first, 64, "sincos_3d"), sincos(later, 64, "sincos_3d"))


@pytest.mark.parametrize("hidden_size", [12, 16, 20, 64, 384, 1152, 3072])
def test_each_axis_has_separate_features(hidden_size: int):
    """Moving along one axis only changes features of that axis, and every axis has features."""
    origin = sincos(torch.tensor([[0, 0, 0]]), hidden_size, "sincos_3d")
    changed = []
    for axis in range(3):
        moved = sincos(torch.eye(3, dtype=torch.long)[axis : axis + 1], hidden_size, "sincos_3d")
        changed.append((moved != origin)[0])
    assert all(mask.any() for mask in changed)
    assert not (changed[0] & changed[1]).any()
    assert not (changed[0] & changed[2]).any()
    assert not (changed[1] & changed[2]).any()


@pytest.mark.parametrize(("hidden_size", "kind"), [(6, "sincos_2d"), (10, "sincos_3d"), (8, "sincos_3d")])
def test_sizes_that_do_not_divide_are_refused(hidden_size: int, kind: str):
    with pytest.raises(ConfigError, match=kind):
        check_size(hidden_size, kind)


def test_positions_of_padding_are_arbitrary():
    """Any integer is a valid position; positions of padding are usually zeros."""
    layout = SequenceLayout.from_lengths([3], total_tokens=8)
    assert sincos(torch.zeros(layout.total_tokens, 3, dtype=torch.long), 16, "sincos_3d").isfinite().all()
