"""The known conditions, and the comparison of a model's conditions with those of the data."""

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Optional

import torch
from torch import Tensor

from dit.conditions import Condition
from dit.errors import ConfigError

DEFAULT_FPS = 30.0
"""Frame rate of samples that store none, such as images (NeMo's convention)."""

LABEL = Condition(
    name="label",
    axis="sample",
    what="class",
    dtype=torch.int64,
    null="no class",
    stored_as=("label",),
    setting="model.num_classes",
)
CONTEXT = Condition(
    name="context",
    axis="text",
    what="text",
    shape=None,
    dtype=None,
    stored_as=("text",),
    setting="model.context_size",
    hint=", which the DiT backbone alone can (model=dit_s or larger)",
)
CONTEXT_2 = replace(
    CONTEXT, name="context_2", what="second encoder's text", beside="context", stored_as=("text_2",), setting=None
)
POOLED = Condition(
    name="pooled", axis="sample", what="pooled text", shape=None, beside="context", stored_as=("pooled",)
)
FPS = Condition(
    name="fps",
    axis="sample",
    what="frame rate",
    default=DEFAULT_FPS,
    limits=(1e-3, 1e6),  # wide, but far from where float32 becomes 0 or infinite
    stored_as=("fps", "framerate"),
)
SIZE = Condition(name="size", axis="sample", what="size of the original", shape=(2,), null=0.0, stored_as=("size",))
PIXELS_PER_LATENT = 8
"""Side of the square of pixels that a position of the latents of Stable Diffusion's autoencoders shows."""


def size_and_crop(height: int, width: int) -> Tensor:
    """Return the six lengths of an uncut picture in pixels, `[6]`, float32; height and width of its latent."""
    sides = [float(side * PIXELS_PER_LATENT) for side in (height, width)]
    return torch.tensor([*sides, 0.0, 0.0, *sides])


def _of_latent(latent: Tensor) -> Tensor:
    return size_and_crop(latent.shape[-2], latent.shape[-1])


SIZE_AND_CROP = Condition(
    name="size_and_crop",
    axis="sample",
    what="height and width of the original, top and left of its crop, height and width of the target",
    shape=(6,),
    derive=_of_latent,
    stored_as=("size_and_crop",),
)
LOW_RESOLUTION = Condition(
    name="low_resolution",
    axis="latent",
    what="low-resolution picture",
    shape=None,
    null=0.0,
    stored_as=("low_resolution",),
)
AUGMENTATION = Condition(
    name="augmentation",
    axis="sample",
    what="noise level of the low-resolution picture",
    null=0.0,
    beside="low_resolution",
    limits=(0.0, 1.0),
    stored_as=("augmentation",),
)
MASK = Condition(name="mask", axis="latent", what="mask", shape=(1,), null=0.0, stored_as=("mask",))
CONTROL = Condition(name="control", axis="latent", what="control picture", shape=None, null=0.0, stored_as=("control",))
FIRST_FRAMES = Condition(
    name="first_frames", axis="latent", what="clip of first frames", shape=None, null=0.0, stored_as=("first_frames",)
)
TABLE = (
    LABEL,
    CONTEXT,
    CONTEXT_2,
    POOLED,
    FPS,
    SIZE,
    SIZE_AND_CROP,
    LOW_RESOLUTION,
    AUGMENTATION,
    MASK,
    CONTROL,
    FIRST_FRAMES,
)
"""The known conditions. A model takes `replace(CONTEXT, shape=(1024,), dropout=0.1)`, or a `Condition` of its own."""


def match_conditions(wanted: Sequence[Condition], stored: Optional[Collection[str]]) -> list[str]:
    """Compare the conditions of a model with those of the data.

    Args:
        stored: names under which the samples store values; None if unknown, or if all are generated on demand.

    Returns:
        One line with the known conditions of the data that the model does not take, if there are any.

    Raises:
        ConfigError: a condition of the model is missing in the data.
    """
    if stored is None:
        return []
    for condition in wanted:
        optional = condition.default is not None or condition.derive is not None
        if not optional and not set(condition.stored_as) & set(stored):
            raise ConfigError(
                f"the model takes the condition {condition.name!r} ({condition.what}), and none of the first samples "
                f"stores {' or '.join(map(repr, condition.stored_as))}, only {sorted(stored)}; add it to the data"
                f"{condition.or_without}"
            )
    read = {name for condition in wanted for name in condition.stored_as}
    # What is derived where it is not stored is stored by every preparation, and missed by nobody.
    offered = [name for condition in TABLE if condition.derive is None for name in condition.stored_as]
    unused = [name for name in offered if name in stored and name not in read]
    return [f"the data hold {', '.join(unused)}, which the model does not take"] if unused else []
