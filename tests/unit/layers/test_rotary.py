"""Laws of rotary positions."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from dit.kernels.rope import rotate
from dit.layers.positions import RotaryPositions
from dit.patchify import grid_positions

HEAD = 32
ROTARY = RotaryPositions(HEAD)
SCALED = [
    ROTARY,
    replace(ROTARY, theta=200.0),
    replace(ROTARY, scaling="ntk", factors=(2.0, 1.5, 1.0)),
    replace(ROTARY, scaling="linear", factors=(4.0, 1.0, 0.5)),
]


def draw(rows: int, seed: int, head: int = HEAD) -> Tensor:
    return torch.randn(rows, 2, head, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).float()


def scores(rotary: RotaryPositions, positions_T3: Tensor) -> Tensor:
    q, k = (rotate(draw(len(positions_T3), seed), rotary(positions_T3)) for seed in (1, 2))
    return torch.einsum("tnh,knh->ntk", q.double(), k.double())


@pytest.mark.parametrize("rotary", SCALED, ids=range(len(SCALED)))
@pytest.mark.parametrize("shift", [(1, 0, 0), (0, 5, 0), (0, 0, 7), (11, 3, 40)])
def test_scores_see_relative_positions_only(rotary: RotaryPositions, shift: tuple[int, int, int]):
    """Moving queries and keys together along any axis changes no score."""
    positions = grid_positions((2, 3, 4))
    torch.testing.assert_close(
        scores(rotary, positions), scores(rotary, positions + torch.tensor(shift)), rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_scores_see_every_axis(axis: int):
    """Moving only the keys along one axis changes the scores."""
    positions = grid_positions((2, 3, 4))
    q = rotate(draw(24, 1), ROTARY(positions))
    k, moved = (rotate(draw(24, 2), ROTARY(positions + n * torch.eye(3, dtype=torch.long)[axis])) for n in (0, 1))
    assert not torch.allclose(torch.einsum("tnh,tnh->nt", q, k), torch.einsum("tnh,tnh->nt", q, moved), rtol=1e-2)


def test_features_rotate_as_complex_numbers():
    """(x_i + i x_(i + H / 2)) e^(i angle): trained weights rely on the direction of rotation, that of Eq. 34."""
    positions, x = grid_positions((2, 3, 4)), draw(24, 5)
    angles = ROTARY.angles(positions)[:, None]
    turned = torch.complex(*x.double().chunk(2, -1)) * torch.polar(torch.ones_like(angles), angles)
    torch.testing.assert_close(rotate(x, ROTARY(positions)), torch.cat([turned.real, turned.imag], -1).float())


@pytest.mark.parametrize("head_size", [6, 8, 64, 72, 128])
def test_rotation_keeps_lengths_and_the_origin(head_size: int):
    """A rotation changes no norm, and the patch at (0, 0, 0) is not rotated."""
    rotary, positions = RotaryPositions(head_size), grid_positions((3, 4, 5))
    x = draw(60, 3, head_size)
    turned = rotate(x, rotary(positions))
    torch.testing.assert_close(turned.norm(dim=-1), x.norm(dim=-1))
    assert torch.equal(turned[0], x[0])


@pytest.mark.parametrize("head_size", [6, 8, 64, 72, 128])
def test_every_axis_rotates_separate_pairs(head_size: int):
    """Each pair of features rotates with exactly one axis; h and w have equally many pairs, time has the rest."""
    axes = RotaryPositions(head_size).angles(torch.eye(3, dtype=torch.long)) != 0
    assert (axes.sum(0) == 1).all()
    t, h, w = axes.sum(1).tolist()
    assert h == w == head_size // 6
    assert t + h + w == head_size // 2


def test_patches_of_a_large_clip_do_not_alias():
    """No two patches of a 32 x 48 x 48 clip have the same angles; there is no table that could be too short."""
    angles = RotaryPositions(128).angles(grid_positions((32, 48, 48)))
    assert len(torch.unique(torch.cat([angles.cos(), angles.sin()], 1).round(decimals=9), dim=0)) == 32 * 48 * 48


def test_linear_scaling_squeezes_long_clips_into_the_trained_range():
    """Index 2 n at factor 2 rotates as index n did in training, only on the scaled axis."""
    scaled = replace(ROTARY, scaling="linear", factors=(2.0, 1.0, 1.0))
    trained = torch.tensor([[5, 3, 4]])
    assert torch.equal(scaled.angles(torch.tensor([[10, 3, 4]])), ROTARY.angles(trained))
    assert not torch.equal(scaled.angles(torch.tensor([[10, 6, 4]])), ROTARY.angles(trained))


@pytest.mark.parametrize("head_size", [16, 64, 128])
def test_ntk_scaling_stretches_the_longest_wave_and_keeps_the_shortest(head_size: int):
    """At factor 3, the slowest pair of an axis rotates a third as fast, and the fastest pair as before."""
    plain, scaled = RotaryPositions(head_size), RotaryPositions(head_size, factors=(3.0, 3.0, 3.0))
    for axis in range(3):
        unit = torch.eye(3, dtype=torch.long)[axis : axis + 1]
        speeds, slowed = (r.angles(unit)[0] for r in (plain, scaled))
        own = speeds != 0
        ratio = slowed[own] / speeds[own]
        assert ratio[0] == 1
        assert ratio[-1].item() == pytest.approx(1 / 3)
        assert (ratio.diff() < 0).all()


def test_rotation_is_exact_at_large_positions():
    """Angles are computed in float64: at index 100,000, a float32 angle would be off by 4e-3."""
    near, far = torch.tensor([[100_000, 0, 0]]), torch.tensor([[100_001, 0, 0]])
    rotation, following = ROTARY(near), ROTARY(far)
    turn = torch.complex(following.cos_T1H.double(), following.sin_T1H.double()) / torch.complex(
        rotation.cos_T1H.double(), rotation.sin_T1H.double()
    )
    unit = ROTARY(torch.tensor([[1, 0, 0]]))
    torch.testing.assert_close(turn.real, unit.cos_T1H.double(), rtol=0, atol=1e-6)


def test_half_precision_is_rotated_in_float32():
    x, positions = draw(60, 4).bfloat16(), grid_positions((3, 4, 5)) + 1000
    turned = rotate(x, ROTARY(positions))
    assert turned.dtype == torch.bfloat16
    assert torch.equal(turned, rotate(x.float(), ROTARY(positions)).bfloat16())
