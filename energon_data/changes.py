"""Which changes of pictures settings may ask for, checked before anything is read."""

from typing import NamedTuple, Optional

from dit.condition_table import LOW_RESOLUTION
from dit.data_api import BatchSpec
from dit.errors import ConfigError


class ChangesOfPixels(NamedTuple):
    """The settings of `EnergonData` that change pictures while they are read, by their names."""

    resize_side: Optional[int]
    crop_size: Optional[list[int]]
    flip: float
    corrupt_low_resolution: bool

    @property
    def size_or_side(self) -> bool:
        """Whether the picture itself is changed."""
        return self.resize_side is not None or self.crop_size is not None or self.flip > 0


def check_changes(changes: ChangesOfPixels, spec: BatchSpec, multiple: int, *, online: bool) -> None:
    """Check sizes of crops, and that pictures are all that is changed.

    Args:
        multiple: of the sides of a crop, in pixels.
        online: an autoencoder of the training device encodes the pictures.

    Raises:
        ConfigError: they do not fit each other or the model.
    """
    low = spec.condition(LOW_RESOLUTION.name)
    if changes.corrupt_low_resolution and (low is None or low.derive is None):
        raise ConfigError(
            "data.corrupt_low_resolution changes the small pictures that are made for a super-resolution model, and "
            "this model takes none; set it to false"
        )
    if not changes.size_or_side:
        return
    # What is made from the picture is made from the changed one.
    beside = [c.what for c in spec.conditions if c.axis == "latent" and c.derive is None]
    if beside:
        raise ConfigError(
            f"data.resize_side, crop_size and flip change the picture, and not the {' or '.join(beside)} that the "
            "model takes beside it; unset them and prepare the data in the size wanted"
        )
    size, side = changes.crop_size, changes.resize_side
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
        times = " times the compression of data.online_vae" if online else ""
        raise ConfigError(f"data.crop_size={size} must be multiples of {multiple}, model.patch_spatial{times}")
