"""Check the size of samples: in pixels if an autoencoder decodes them, else in positions of the latent."""

from collections.abc import Callable
from typing import Optional

from dit.data_api import BatchSpec
from dit.encoders.vae import Geometry
from dit.errors import ConfigError
from dit.models.base import ModelConfig
from dit.patchify import frames_to_patch

Size = tuple[int, int, int]


def check_size(spec: BatchSpec, model: ModelConfig, size: Size, geometry: Optional[Geometry] = None) -> Size:
    """Return (T, H, W) of the latents of samples of `size`, which is in pixels, or in latents without `geometry`."""
    frames, *sides = size
    time, space = (1, 1) if geometry is None else (geometry.time, geometry.space)
    unit = space * spec.patch_spatial
    multiple = unit * spec.side_multiple
    factors = f"a patch of {spec.patch_spatial}" + (f" x {space} pixels of the autoencoder" if geometry else "")
    factors += f", times {spec.side_multiple} for the levels of the network" if spec.side_multiple > 1 else ""
    for name, side in zip(("height", "width"), sides):
        if side < 1 or side % multiple:
            near = _near(side, lambda n: n % multiple == 0)
            raise ConfigError(f"the {name} of {side} is not a multiple of {multiple} ({factors}); use {near}")

    def fits(count: int) -> bool:
        return (count - 1) % time == 0 and _latent_frames(count, time, spec) % spec.patch_temporal == 0

    if frames < 1 or not fits(frames):
        causal = f"; the autoencoder decodes 1 + a multiple of {time} frames" if time > 1 else ""
        raise ConfigError(
            f"frames={frames} cannot be cut into patches of {spec.patch_temporal} frames; use a multiple, or 1 for a "
            f"still{causal}: {_near(frames, fits)}"
        )
    latent = (1 + (frames - 1) // time, sides[0] // space, sides[1] // space)
    if model.largest_grid is not None:
        grid = (_latent_frames(frames, time, spec) // spec.patch_temporal, sides[0] // unit, sides[1] // unit)
        if any(n > most for n, most in zip(grid, model.largest_grid)):
            t, h, w = model.largest_grid
            most = (1 + (t * spec.patch_temporal - 1) * time, h * unit, w * unit)
            raise ConfigError(
                f"samples of {_x(size)} (T x H x W) are {_x(grid)} patches, but the model has learned positions for "
                f"{_x(model.largest_grid)}; draw at most {_x(most)}"
            )
    return latent


def _latent_frames(frames: int, time: int, spec: BatchSpec) -> int:
    """Return the frames of a latent that are split into patches; a still fills one patch."""
    return frames_to_patch(1 + (frames - 1) // time, spec.patch_temporal)


def _near(number: int, fits: Callable[[int], bool]) -> str:
    """Return the nearest numbers below and above that fit."""
    below = next((n for n in range(number, 0, -1) if fits(n)), None)
    above = next(n for n in range(max(number, 0) + 1, max(number, 0) + 10_000) if fits(n))
    return f"{above}" if below is None else f"{below} or {above}"


def _x(sides: Size) -> str:
    return " x ".join(map(str, sides))
