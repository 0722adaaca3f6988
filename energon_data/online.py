"""Whether the encoders of the training device fit the model: by their sizes, without their weights."""

from dit.data_api import BatchSpec
from dit.encoders.text_config import as_conditions, check_text_encoder
from dit.encoders.vae import Geometry
from dit.errors import ConfigError


def check_vae(name: str, spec: BatchSpec) -> None:
    """Check the latents of the online autoencoder against the model.

    Raises:
        ConfigError: they have another number of channels, or there is no such autoencoder.
    """
    found = Geometry.read(name).channels
    if found != spec.latent_channels:
        raise ConfigError(
            f"data.online_vae={name} makes latents of {found} channels, model.in_channels is {spec.latent_channels}; "
            f"set model.in_channels={found}"
        )


def check_online_texts(line: str, spec: BatchSpec) -> None:
    """Check what the online text encoders make against the model.

    Raises:
        ConfigError: the model takes nothing of it or of another width, or there are no such encoders.
    """
    made = embedded_widths(line, spec)
    if not made:
        raise ConfigError(
            f"data.online_text_encoder={line} makes nothing that the model takes; set data.online_text_encoder=none"
        )
    for condition in spec.conditions:
        width = made.get(condition.name)
        if width is not None and condition.shape not in (None, (width,)):
            raise ConfigError(
                f"data.online_text_encoder={line} makes a {condition.what} of {width} features, the model takes "
                f"{list(condition.shape)}; {condition.cure_of_width(width)}"
            )


def embedded_widths(line: str, spec: BatchSpec) -> dict[str, int]:
    """Return the width of each of the model's conditions that these encoders make."""
    return as_conditions(check_text_encoder(line).widths, spec.conditions)
