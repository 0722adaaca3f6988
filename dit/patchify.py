"""Latents to tokens and back; both are permutations, so the inverse is exact."""

from collections.abc import Sequence
from itertools import accumulate

import torch
from einops import rearrange
from torch import Tensor

from dit.errors import BatchError

Grid = tuple[int, int, int]


def frames_to_patch(frames: int, patch_temporal: int) -> int:
    """Return the number of frames of a latent before patchifying: an image is repeated to fill one patch.

    With `patch_temporal` of 2 or more, images can then be trained together with clips. Other lengths are unchanged.

    Args:
        frames: of the latent; 1 is an image.
    """
    return patch_temporal if frames == 1 else frames


def patchify(latent: Tensor, patch_temporal: int, patch_spatial: int) -> tuple[Tensor, Grid]:
    """Split a latent into patches, one token each; time is the slowest axis and width the fastest.

    Args:
        latent: `[C, T, H, W]`; an image has T = 1.

    Returns:
        Tokens `[(t h w), (ph pw pt C)]` in NeMo's channel order, and the grid (t, h, w) in patches.

    Raises:
        BatchError: a side is not a multiple of its patch size.
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


def split_outputs(prediction_TC: Tensor, token_channels: int, latent_channels: int) -> Tensor:
    """Sort a prediction by output: first the channels of the latent, then the others, such as a variance.

    Networks predict all outputs of one position of a patch before those of the next:

        (mean mean var var)(mean mean var var) becomes (mean mean)(mean mean)(var var)(var var)

    Args:
        prediction_TC: the network's output.
        token_channels: channels of a patchified latent, per token.
        latent_channels: channels of a latent, per position.

    Returns:
        The same values, `[T, C]`; `prediction_TC` itself if there is one output.

    Source: the channel order of Nichol and Dhariwal 2021, arXiv:2102.09672, and DiT.
    """
    if prediction_TC.shape[1] < 2 * token_channels:
        return prediction_TC  # one output, and perhaps an uncertainty or a posterior behind it
    at_position = prediction_TC.unflatten(1, (token_channels // latent_channels, -1))
    return torch.cat([at_position[..., :latent_channels].flatten(1), at_position[..., latent_channels:].flatten(1)], 1)


def patchify_all(latents: Sequence[Tensor], patch_temporal: int, patch_spatial: int) -> Tensor:
    """Patchify several latents, `[sum of tokens, C]`, with one call for all of equal height and width."""
    groups: dict[tuple[int, int, int], list[int]] = {}
    for i, latent in enumerate(latents):
        groups.setdefault((latent.shape[0], latent.shape[2], latent.shape[3]), []).append(i)
    pieces = []
    for members in groups.values():
        # Time is the slowest axis of the token order: clips concatenated in time have their tokens one after the other.
        joined = latents[members[0]] if len(members) == 1 else torch.cat([latents[i] for i in members], 1)
        pieces.append(patchify(joined, patch_temporal, patch_spatial)[0])
    tokens = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
    order = [i for members in groups.values() for i in members]
    return tokens if order == sorted(order) else tokens.index_select(0, _rows(latents, order, tokens))


def _rows(latents: Sequence[Tensor], order: Sequence[int], tokens: Tensor) -> Tensor:
    """Return where each token of latents one after another is, among those of the latents in another order."""
    counts = [latent.numel() // tokens.shape[1] for latent in latents]
    starts = dict(zip(order, accumulate((counts[i] for i in order), initial=0)))
    shifts = [starts[i] - first for i, first in enumerate(accumulate(counts[:-1], initial=0))]
    shift_T = torch.repeat_interleave(torch.tensor(shifts), torch.tensor(counts), output_size=sum(counts))
    return (torch.arange(sum(counts)) + shift_T).to(tokens.device)


def unpatchify(tokens: Tensor, grid: Grid, patch_temporal: int, patch_spatial: int) -> Tensor:
    """Undo `patchify`: tokens `[(t h w), (ph pw pt C)]` become a latent `[C, T, H, W]`."""
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


def grid_positions(grid: Grid) -> Tensor:
    """Return the (t, h, w) index of every token of a grid, int64 `[t * h * w, 3]`, in `patchify` order."""
    t, h, w = grid
    return torch.stack(torch.meshgrid(torch.arange(t), torch.arange(h), torch.arange(w), indexing="ij"), -1).view(-1, 3)
