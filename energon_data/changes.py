"""Checks of the settings that change pictures at load time, before anything is read."""

from typing import NamedTuple, Optional

from dit.condition_table import LOW_RESOLUTION
from dit.data_api import BatchSpec
from dit.errors import ConfigError


class ChangesOfPixels(NamedTuple):
    """Settings of `EnergonData` that change pictures at load time."""

    resize_side: Optional[int]
    crop_size: Optional[list[int]]
    flip: float
    corrupt_low_resolution: bool

    @property
    def size_or_side(self) -> bool:
        """Whether settings change the picture itself."""
        return self.resize_side is not None or self.crop_size is not None or self.flip > 0


def check_changes(changes: ChangesOfPixels, spec: BatchSpec, multiple: int, *, online: bool) -> None:
    """Check crop sizes, and that the settings change nothing except pictures.

    Args:
        multiple: sides of a crop must be multiples of this, in pixels.
    """
    low = spec.condition(LOW_RESOLUTION.name)
    if changes.corrupt_low_resolution and (low is None or low.derive is None):
        raise ConfigError(
            "data.corrupt_low_resolution changes the low-resolution pictures of a super-resolution model, and "
            "this model takes none; set it to false"
        )
    if not changes.size_or_side:
        return
    # Conditions derived from the picture are derived from the changed picture.
    others = [c.description for c in spec.conditions if c.axis == "latent" and c.derive is None]
    if others:
        raise ConfigError(
            f"data.resize_side, crop_size and flip change the picture, and not the {' or '.join(others)} that the "
            "model takes in addition; unset them and prepare the data in the required size"
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
