"""Pictures of latents, decoded by their autoencoder, for inspection."""

from collections.abc import Callable

from torch import Tensor

from dit.encoders.vae import Geometry, load_vae
from dit.errors import ConfigError
from energon_data.report.false_colours import middle_frame

TILE = 1024
"""Pictures with longer sides are decoded in overlapping tiles of this many pixels."""


def decoder(name: str) -> Callable[[Tensor], Tensor]:
    """Return a function that decodes a latent `[C, t, h, w]` to its middle frame, `[3, H, W]` in [-1, 1].

    Args:
        name: autoencoder, as in `Geometry.read`; loaded at the first latent.
    """
    geometry = Geometry.read(name)

    def decoded(clip: Tensor) -> Tensor:
        if len(clip) != geometry.channels:
            raise ConfigError(
                f"--vae {name} decodes latents of {geometry.channels} channels, and the samples have {len(clip)}; use "
                "the autoencoder that encoded them, or omit --vae"
            )
        return middle_frame(load_vae(name, tile=TILE).decode(clip[None])[0].cpu())

    return decoded
