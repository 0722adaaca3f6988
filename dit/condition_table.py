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
    description="class",
    dtype=torch.int64,
    null="no class",
    setting="model.num_classes",
)
CONTEXT = Condition(
    name="context",
    axis="text",
    description="text",
    shape=None,
    dtype=None,
    stored_as=("text",),
    setting="model.context_size",
    hint=", which only the DiT backbone supports (model=dit_s or larger)",
)
CONTEXT_2 = replace(
    CONTEXT,
    name="context_2",
    description="second encoder's text",
    requires="context",
    stored_as=("text_2",),
    setting=None,
)
POOLED = Condition(name="pooled", axis="sample", description="pooled text", shape=None, requires="context")
FPS = Condition(
    name="fps",
    axis="sample",
    description="frame rate",
    default=DEFAULT_FPS,
    limits=(1e-3, 1e6),  # wide, but far from where float32 becomes 0 or infinite
    stored_as=("fps", "framerate"),
)
SIZE = Condition(name="size", axis="sample", description="size of the original", shape=(2,), null=0.0)
PIXELS_PER_LATENT = 8
"""Pixels along each side of one latent position of Stable Diffusion's autoencoders."""


def size_and_crop(height: int, width: int) -> Tensor:
    """Return the six lengths of an uncropped picture in pixels, `[6]`, float32, from the sides of its latent."""
    sides = [float(side * PIXELS_PER_LATENT) for side in (height, width)]
    return torch.tensor([*sides, 0.0, 0.0, *sides])


def _of_latent(latent: Tensor) -> Tensor:
    return size_and_crop(latent.shape[-2], latent.shape[-1])


SIZE_AND_CROP = Condition(
    name="size_and_crop",
    axis="sample",
    description="height and width of the original, top and left of its crop, height and width of the target",
    shape=(6,),
    derive=_of_latent,
)
LOW_RESOLUTION = Condition(
    name="low_resolution", axis="latent", description="low-resolution picture", shape=None, null=0.0
)
AUGMENTATION = Condition(
    name="augmentation",
    axis="sample",
    description="noise level of the low-resolution picture",
    null=0.0,
    requires="low_resolution",
    limits=(0.0, 1.0),
)
MASK = Condition(name="mask", axis="latent", description="mask", shape=(1,), null=0.0)
CONTROL = Condition(name="control", axis="latent", description="control picture", shape=None, null=0.0)
FIRST_FRAMES = Condition(name="first_frames", axis="latent", description="clip of first frames", shape=None, null=0.0)
IMAGE_TOKENS = Condition(
    name="image_tokens", axis="text", description="embedding of a picture", shape=None, default=0.0, of_picture=True
)
TEACHER = Condition(
    name="teacher",
    axis="token",
    description="feature map of the teacher",
    shape=None,
    dtype=None,
    setting="objective.alignment",
)
TEACHER_TOKEN = Condition(
    name="teacher_token",
    axis="sample",
    description="class token of the teacher",
    shape=None,
    setting="model.teacher_token_size",
)
CLEAN_TEACHER_TOKEN = "clean_teacher_token"
"""Name of the teacher's class token before noise, in the conditions of a batch whose `TEACHER_TOKEN` is noised."""
TABLE = tuple(value for value in globals().values() if isinstance(value, Condition))
"""The known conditions. A model uses `replace(CONTEXT, shape=(1024,), dropout=0.1)`, or declares its own."""


def match_conditions(wanted: Sequence[Condition], stored: Optional[Collection[str]]) -> list[str]:
    """Check that the data have the conditions of a model; return a line about others that it does not read, if any.

    Args:
        stored: names of the stored values; None if they are unknown or generated on demand.
    """
    if stored is None:
        return []
    for condition in wanted:
        optional = condition.default is not None or condition.derive is not None
        if not optional and not set(condition.stored_as) & set(stored):
            raise ConfigError(
                f"the model takes the condition {condition.name!r} ({condition.description}), and none of the first "
                f"samples stores {' or '.join(map(repr, condition.stored_as))}, only {sorted(stored)}; add it to the "
                f"data{condition.or_without}"
            )
    read = {name for condition in wanted for name in condition.stored_as}
    # Every preparation stores the conditions that can be derived, so their presence is no sign of a mistake.
    offered = [name for condition in TABLE if condition.derive is None for name in condition.stored_as]
    unused = [name for name in offered if name in stored and name not in read]
    return [f"the data hold {', '.join(unused)}, which the model does not take"] if unused else []
