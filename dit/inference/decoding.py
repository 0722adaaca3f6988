"""Decode latents to pictures."""

from typing import Optional

import torch
from torch import Tensor

from dit.encoders.vae import Geometry, load_vae
from dit.errors import ConfigError
from dit.sampling.grid import PIXEL_CHANNELS, to_pictures

TILE = 1024
"""Longest side, in pixels, that is decoded without overlapping tiles."""
PIXELS_AT_ONCE = 2**21
"""Pixels, over all frames, that are decoded in one call; more pixels gain little speed and cost memory."""


class Decoder:
    """Converts samples to pictures: decodes latents with an autoencoder, and returns pixels unchanged.

    Without an autoencoder, latents become false colours. The autoencoder is loaded at the first use and stays loaded.
    """

    def __init__(self, name: Optional[str], device: torch.device) -> None:
        self.name, self.device = name, device
        self.geometry = None if name is None else Geometry.read(name)

    def __call__(self, samples: Tensor) -> Tensor:
        """Return pictures `[N, 1 or 3, T, H, W]` in [-1, 1], float32 on the host.

        `samples` are latents or pixels `[N, C, t, h, w]`, scaled as in training.
        """
        if self.name is None or self.geometry is None:
            return to_pictures(samples).cpu()
        vae = load_vae(self.name, str(self.device))
        frames, height, width = self.geometry.pixel_shape(*samples.shape[2:])
        parts = samples.split(max(1, PIXELS_AT_ONCE // (frames * height * width)))
        return torch.cat([vae.decode(part, TILE).cpu() for part in parts])


def find_autoencoder(
    channels: int, requested: Optional[str], recorded: Optional[str], setting: str
) -> tuple[Optional[str], Optional[str]]:
    """Return the autoencoder that decodes samples, and a line for the user if the latents have none.

    `setting` is the setting or option that selects one, for messages.
    """
    if requested is not None:
        _check_channels(requested, channels)
        return requested, None
    why = "the checkpoint names no autoencoder"
    if recorded is not None:
        try:
            _check_channels(recorded, channels)
            return recorded, None
        except ConfigError as error:
            why = str(error)
    if channels in PIXEL_CHANNELS:
        return None, None
    return None, (
        f"latents of {channels} channels are drawn as false colours because {why}; name the autoencoder that encoded "
        f"them: {setting}"
    )


def _check_channels(name: str, channels: int) -> None:
    decoded = Geometry.read(name).channels
    if decoded != channels:
        raise ConfigError(f"autoencoder {name!r} decodes latents of {decoded} channels, but the model has {channels}")
