"""Checks of online encoders against the model, by their sizes, without loading weights."""

from dit.data_api import BatchSpec
from dit.encoders.text_config import as_conditions, check_text_encoder
from dit.encoders.vae import Geometry
from dit.errors import ConfigError


def check_vae(name: str, spec: BatchSpec) -> None:
    """Check the latents of the online autoencoder against the model."""
    channels = Geometry.read(name).channels
    if channels != spec.latent_channels:
        raise ConfigError(
            f"data.online_vae={name} has latents of {channels} channels, model.in_channels is {spec.latent_channels}; "
            f"set model.in_channels={channels}"
        )


def check_online_texts(line: str, spec: BatchSpec) -> None:
    """Check the outputs of the online text encoders against the model."""
    if check_text_encoder(line).reads_pictures:
        raise ConfigError(
            f"data.online_text_encoder={line} reads pictures to edit, and the data have only their latents; prepare "
            "the data with --text-encoder, and set data.online_text_encoder=none"
        )
    widths = embedded_widths(line, spec)
    if not widths:
        raise ConfigError(
            f"data.online_text_encoder={line} makes no condition of the model; set data.online_text_encoder=none"
        )
    for condition in spec.conditions:
        width = widths.get(condition.name)
        if width is not None and condition.shape not in (None, (width,)):
            raise ConfigError(
                f"data.online_text_encoder={line} makes a {condition.description} of {width} features, the model takes "
                f"{list(condition.shape)}; {condition.cure_of_width(width)}"
            )


def embedded_widths(line: str, spec: BatchSpec) -> dict[str, int]:
    """Return the widths of the model's conditions that these encoders produce."""
    return as_conditions(check_text_encoder(line).widths, spec.conditions)
