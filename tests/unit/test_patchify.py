"""Laws of patchify: a permutation with a known order and an exact inverse."""

from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dit.errors import BatchError
from dit.patchify import grid_positions, patchify, patchify_all, split_outputs, unpatchify

small = st.integers(1, 3)


@given(small, small, small, small, small, small)
@settings(max_examples=80, deadline=None)
def test_unpatchify_is_the_exact_inverse(channels, t, h, w, patch_temporal, patch_spatial):
    """For every grid and patch size, each is the inverse of the other; nothing is lost or repeated."""
    shape = (channels, t * patch_temporal, h * patch_spatial, w * patch_spatial)
    latent = torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape)
    tokens, grid = patchify(latent, patch_temporal, patch_spatial)
    assert grid == (t, h, w)
    assert tokens.shape == (t * h * w, channels * patch_temporal * patch_spatial**2)
    assert torch.equal(tokens.flatten().sort().values, latent.flatten())
    assert torch.equal(unpatchify(tokens, grid, patch_temporal, patch_spatial), latent)
    again, _ = patchify(unpatchify(tokens, grid, patch_temporal, patch_spatial), patch_temporal, patch_spatial)
    assert torch.equal(again, tokens)


@given(st.lists(st.tuples(small, small, small), min_size=1, max_size=9), small)
@settings(max_examples=60, deadline=None)
def test_tokens_of_latents_of_many_sizes_are_consecutive(grids, patch_spatial):
    """Tokens follow the order of the latents, also where equal sizes are not neighbours."""
    latents = [torch.randn(2, t, h * patch_spatial, w * patch_spatial) for t, h, w in grids]
    expected = torch.cat([patchify(latent, 1, patch_spatial)[0] for latent in latents])
    assert torch.equal(patchify_all(latents, 1, patch_spatial), expected)


@given(small, small, small)
@settings(max_examples=30, deadline=None)
def test_token_n_has_the_position_of_grid_positions(t, h, w):
    """The token at (i, j, k) is the patch at (i, j, k): positions and tokens have the same order."""
    latent = torch.zeros(3, t, h, w)
    for i, j, k in product(range(t), range(h), range(w)):
        latent[:, i, j, k] = torch.tensor([i, j, k])
    tokens, _ = patchify(latent, 1, 1)
    where = grid_positions((t, h, w))
    assert torch.equal(tokens.long(), where)
    assert where.dtype == torch.int64


def test_channels_of_a_token_have_the_order_of_nemo():
    """(ph pw pt C): channel fastest, then frame, then column, then row of the patch."""
    latent = torch.zeros(2, 2, 2, 2)
    for c in range(2):
        for f in range(2):
            for y in range(2):
                for x in range(2):
                    latent[c, f, y, x] = ((y * 2 + x) * 2 + f) * 2 + c
    tokens, grid = patchify(latent, 2, 2)
    assert grid == (1, 1, 1)
    assert tokens.flatten().tolist() == list(range(16))


@pytest.mark.parametrize(
    ("shape", "sizes"), [((4, 3, 4, 4), "3 x 4 x 4"), ((4, 2, 5, 4), "2 x 5 x 4"), ((4, 2, 4, 5), "2 x 4 x 5")]
)
def test_sides_that_do_not_divide_are_refused_with_a_cure(shape, sizes):
    message = rf"latent of {sizes} \(T x H x W\) cannot be cut into patches of 2 x 2 x 2; crop it to a multiple"
    with pytest.raises(BatchError, match=message):
        patchify(torch.zeros(shape), 2, 2)


def test_outputs_of_a_patch_are_sorted():
    """Patches of (mean, variance) images become patches of the mean image, then patches of the variance image."""
    both = torch.randn(6, 1, 4, 8, generator=torch.Generator().manual_seed(0))
    prediction_TC, _ = patchify(both, 1, 2)
    mean_TC, variance_TC = (patchify(half, 1, 2)[0] for half in both.chunk(2))
    assert torch.equal(split_outputs(prediction_TC, mean_TC.shape[1], 3, 2), torch.cat([mean_TC, variance_TC], 1))


def test_a_single_output_is_not_sorted_for_any_number_of_other_columns():
    """A codebook with wide entries adds more columns than a token has."""
    prediction_TC = torch.randn(5, 36)
    assert split_outputs(prediction_TC, 12, 3, 1) is prediction_TC
