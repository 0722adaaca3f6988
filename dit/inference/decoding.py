"""From the latents that a model draws to pictures."""

from typing import Optional

import torch
from torch import Tensor

from dit.encoders.vae import Geometry, load_vae
from dit.errors import ConfigError
from dit.sampling.grid import PIXEL_CHANNELS, to_pictures

TILE = 1024
"""Sides above so many pixels are decoded in overlapping tiles."""
PIXELS_AT_ONCE = 2**21
"""Decoded in one call, over all frames; more bounds speed little and costs memory."""


class Decoder:
    """Turns samples into pictures: decodes latents by an autoencoder, and leaves pixels as they are.

    Without an autoencoder, latents become false colours. The autoencoder is loaded at the first use and stays loaded.

    Args:
        name: autoencoder, as in `Geometry.read`; None for none.
        device: where it decodes.

    Attributes:
        geometry: what the autoencoder does to sizes, or None.

    Raises:
        ConfigError: there is no such autoencoder.
    """

    def __init__(self, name: Optional[str], device: torch.device) -> None:
        self.name, self.device = name, device
        self.geometry = None if name is None else Geometry.read(name)

    def __call__(self, samples: Tensor) -> Tensor:
        """Return pictures `[N, 1 or 3, T, H, W]` in [-1, 1], float32 on the host.

        Args:
            samples: `[N, C, t, h, w]`, as the model was trained on them.
        """
        if self.name is None or self.geometry is None:
            return to_pictures(samples).cpu()
        vae = load_vae(self.name, str(self.device), tile=TILE)
        frames, height, width = self.geometry.pixel_shape(*samples.shape[2:])
        parts = samples.split(max(1, PIXELS_AT_ONCE // (frames * height * width)))
        return torch.cat([vae.decode(part).cpu() for part in parts])


def find_autoencoder(
    channels: int, asked: Optional[str], recorded: Optional[str], setting: str
) -> tuple[Optional[str], Optional[str]]:
    """Select the autoencoder that decodes samples.

    Args:
        channels: of a sample.
        asked: by the user; None for the recorded one.
        recorded: by the data set that the model was trained on, if any.
        setting: how to ask for one, for messages.

    Returns:
        Its name, and a line for the user where latents have none.

    Raises:
        ConfigError: the one that was asked for cannot be read, or has other channels.
    """
    if asked is not None:
        _check_channels(asked, channels)
        return asked, None
    why = "the data set names no autoencoder"
    if recorded is not None:
        try:
            _check_channels(recorded, channels)
            return recorded, None
        except ConfigError as error:
            why = str(error)
    if channels in PIXEL_CHANNELS:
        return None, None
    return None, (
        f"latents of {channels} channels are drawn as false colours, for {why}; name the autoencoder that made them: "
        f"{setting}"
    )


def _check_channels(name: str, channels: int) -> None:
    decoded = Geometry.read(name).channels
    if decoded != channels:
        raise ConfigError(f"the autoencoder {name!r} decodes latents of {decoded} channels, the model has {channels}")
