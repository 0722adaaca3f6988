"""Checks of settings of `EnergonData` that read no data: ranges, changes of pictures, settings without effect.

Online encoders are checked against the model by their sizes, without loading weights.
"""

from typing import Any

from dit.condition_table import TEACHER_TOKEN
from dit.data_api import BatchSpec
from dit.encoders.text_config import as_conditions, check_text_encoder
from dit.encoders.vae import Geometry
from dit.errors import ConfigError
from dit.ranges import check_unused


def check_values(data: Any, micro_batches_per_step: int) -> None:
    """Check ranges, streams, and settings without effect."""
    data.check_streams(micro_batches_per_step)
    for quantity in ("side", "seconds", "caption_length"):
        low, high = getattr(data, f"min_{quantity}"), getattr(data, f"max_{quantity}")
        if low is not None and high is not None and low > high:
            raise ConfigError(f"data.min_{quantity}={low} is above data.max_{quantity}={high}, so no sample is left")
    encoders = data.online_vae, data.online_text_encoder
    for is_unused, setting, needed in (
        (data.crop_size is None, "random_crop", "crop_size"),
        (encoders == (None, None), "online_precision", "online_vae or online_text_encoder"),
    ):
        if is_unused:
            check_unused("data", data, [setting], f"without data.{needed}", f"set data.{needed}")


def changes_pictures(data: Any) -> bool:
    """Return whether settings change the picture itself at load time."""
    return data.resize_side is not None or data.crop_size is not None or data.flip > 0


def check_changes(data: Any, spec: BatchSpec, multiple: int) -> None:
    """Check crop sizes, and that the settings change nothing except pictures.

    Args:
        multiple: sides of a crop must be multiples of this, in pixels.
    """
    if not changes_pictures(data):
        return
    # Conditions derived from the picture are derived from the changed picture.
    drawn = [c for c in spec.conditions if c.is_per_token or c.name == TEACHER_TOKEN.name]
    others = [c.description for c in drawn if c.derive is None]
    if others:
        raise ConfigError(
            f"data.resize_side, crop_size and flip change the picture, and not the {' or '.join(others)} that the "
            "model takes in addition; unset them and prepare the data in the required size"
        )
    size, side = data.crop_size, data.resize_side
    if size is None:
        return
    if len(size) != 2:
        raise ConfigError(f"data.crop_size={size} must be height and width, such as [64,64]")
    if side is not None and min(size) > side:
        raise ConfigError(
            f"data.crop_size={size} is larger than data.resize_side={side}, so no square "
            f"picture has room for it; use resize_side={max(size)} or a smaller crop"
        )
    if any(length % multiple for length in size):
        times = f" times {spec.side_multiple} for the levels of the network" if spec.side_multiple > 1 else ""
        times += " times the compression of data.online_vae" if data.online_vae else ""
        raise ConfigError(f"data.crop_size={size} must be multiples of {multiple}, model.patch_spatial{times}")


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
