"""Conversion of latents to tokens and back. Both directions are permutations, so the inverse is exact."""

from collections.abc import Sequence

import torch
from einops import rearrange
from torch import Tensor

from dit.errors import BatchError

Grid = tuple[int, int, int]


def frames_to_patch(frames: int, patch_temporal: int) -> int:
    """Return the number of frames that `patchify` receives for a latent.

    An image is repeated to fill one temporal patch, so images and clips can share a model with `patch_temporal` > 1.
    Other lengths are unchanged.
    """
    return patch_temporal if frames == 1 else frames


def grid_of(frames: int, height: int, width: int, patch_temporal: int, patch_spatial: int) -> Grid:
    """Return (t, h, w) in patches of a latent."""
    t = frames_to_patch(frames, patch_temporal) // patch_temporal
    return t, height // patch_spatial, width // patch_spatial


def patchify(latent: Tensor, patch_temporal: int, patch_spatial: int) -> tuple[Tensor, Grid]:
    """Split a latent into patches, one token each; time is the slowest axis and width the fastest.

    Args:
        latent: `[C, T, H, W]`; an image has T = 1.

    Returns:
        Tokens `[(t h w), (ph pw pt C)]` in NeMo's channel order, and the grid (t, h, w) in patches.
    """
    _, frames, height, width = latent.shape
    if frames % patch_temporal or height % patch_spatial or width % patch_spatial:
        raise BatchError(
            f"latent of {frames} x {height} x {width} (T x H x W) cannot be cut into patches of "
            f"{patch_temporal} x {patch_spatial} x {patch_spatial}; crop it to a multiple or change the patch size"
        )
    tokens = rearrange(
        latent,
        "c (t pt) (h ph) (w pw) -> (t h w) (ph pw pt c)",
        pt=patch_temporal,
        ph=patch_spatial,
        pw=patch_spatial,
    )
    return tokens, (frames // patch_temporal, height // patch_spatial, width // patch_spatial)


def split_outputs(prediction_TC: Tensor, token_channels: int, latent_channels: int, num_outputs: int) -> Tensor:
    """Sort the channels of a prediction by output: first the latent, then other outputs such as a variance.

    Networks order the channels by patch position first:

        (mean mean var var)(mean mean var var) becomes (mean mean)(mean mean)(var var)(var var)

    Args:
        token_channels: channels per token of a patchified latent.
        latent_channels: channels per position of a latent.

    Source: the channel order of Nichol and Dhariwal 2021, arXiv:2102.09672, and DiT.
    """
    if num_outputs == 1:
        return prediction_TC  # perhaps followed by an uncertainty, a posterior or scores
    at_position = prediction_TC.unflatten(1, (token_channels // latent_channels, -1))
    return torch.cat([at_position[..., :latent_channels].flatten(1), at_position[..., latent_channels:].flatten(1)], 1)


def patchify_all(latents: Sequence[Tensor], patch_temporal: int, patch_spatial: int) -> Tensor:
    """Patchify several latents, `[sum of tokens, C]`, with one call per (height, width)."""
    groups: dict[tuple[int, int, int], list[int]] = {}
    for i, latent in enumerate(latents):
        groups.setdefault((latent.shape[0], latent.shape[2], latent.shape[3]), []).append(i)
    pieces: dict[int, Tensor] = {}
    for members in groups.values():
        # Time is the slowest axis of the token order, so concatenation in time keeps each clip's tokens contiguous.
        joined = latents[members[0]] if len(members) == 1 else torch.cat([latents[i] for i in members], 1)
        tokens, _ = patchify(joined, patch_temporal, patch_spatial)
        if len(groups) == 1:
            return tokens
        counts = [latents[i].numel() // tokens.shape[1] for i in members]
        pieces.update(zip(members, tokens.split(counts)))
    return torch.cat([pieces[i] for i in range(len(latents))])


def unpatchify(tokens: Tensor, grid: Grid, patch_temporal: int, patch_spatial: int) -> Tensor:
    """Convert tokens `[(t h w), (ph pw pt C)]` to a latent `[C, T, H, W]`, the inverse of `patchify`."""
    t, h, w = grid
    return rearrange(
        tokens,
        "(t h w) (ph pw pt c) -> c (t pt) (h ph) (w pw)",
        t=t,
        h=h,
        w=w,
        pt=patch_temporal,
        ph=patch_spatial,
        pw=patch_spatial,
    )


def num_frames(tokens: Tensor, grid: Grid, patch_temporal: int, patch_spatial: int) -> int:
    """Return the frames of a latent whose tokens are given: 1 for a still, see `frames_to_patch`."""
    if grid[0] > 1 or patch_temporal == 1:
        return grid[0] * patch_temporal
    frames = tokens.unflatten(1, (patch_spatial**2, patch_temporal, -1))
    return 1 if bool((frames == frames[:, :, :1]).all()) else patch_temporal


def grid_positions(grid: Grid) -> Tensor:
    """Return the (t, h, w) index of every token of a grid, int64 `[t * h * w, 3]`, in `patchify` order."""
    t, h, w = grid
    return torch.stack(torch.meshgrid(torch.arange(t), torch.arange(h), torch.arange(w), indexing="ij"), -1).view(-1, 3)
