"""Pictures of latents by their autoencoder, to look at; training reads latents without one."""

from collections.abc import Callable

from torch import Tensor

from dit.encoders.vae import Geometry, load_vae
from dit.errors import ConfigError
from energon_data.false_colours import middle_frame

TILE = 1024
"""Sides above so many pixels are decoded in overlapping tiles."""


def decoder(name: str) -> Callable[[Tensor], Tensor]:
    """Return what decodes a latent `[C, t, h, w]` and takes its middle frame, `[3, H, W]` in [-1, 1].

    Args:
        name: autoencoder, as in `Geometry.read`; it is loaded at the first latent.

    Raises:
        ConfigError: there is no such autoencoder, or later, its latents have other channels.
    """
    geometry = Geometry.read(name)

    def decoded(clip: Tensor) -> Tensor:
        if len(clip) != geometry.channels:
            raise ConfigError(
                f"--vae {name} decodes latents of {geometry.channels} channels, and the samples have {len(clip)}; name "
                "the autoencoder that made them, or leave it out"
            )
        return middle_frame(load_vae(name, tile=TILE).decode(clip[None])[0].cpu())

    return decoded
