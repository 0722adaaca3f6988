"""Conversion of the decoded parts of a sample to a `Clip`.

A sample has a part `latent.npy` or `latent.safetensors` (`[C, T, H, W]`, or `[C, H, W]` for an image), or a picture or
video called `pixels`, whose values in [-1, 1] are the latent of a model with three channels. Conditions are separate
array parts, or numbers in the metadata, named as in `dit.conditions.Condition.stored_as`; those that the model does not
take are not read. Other metadata: `loss_weight`, and values that settings limit.
"""

from collections.abc import Callable
from typing import Any, Optional

import torch
from megatron.energon import stateless
from torch import Tensor

from dit.batch import pixel_values
from dit.condition_table import SIZE_AND_CROP
from dit.conditions import Condition, Value
from dit.data_api import sample_id
from dit.encoders.vae import Geometry
from dit.errors import ConfigError, page_of
from energon_data.media_files import PICTURES, VIDEOS, read_pixels
from energon_data.samples import (
    CAPTIONS,
    LATENT,
    META_PART,
    PIXELS,
    REFERENCE,
    Clip,
    FilteredOutError,
    SampleError,
    finite_number,
    numbered_stem,
)

LOSS_WEIGHT_RANGE = (0.0, 1e3)
"""Allowed loss weights of a sample: not negative, and not so large that one sample dominates."""


def _tensor(sample: dict[str, Any], stem: str) -> Optional[Tensor]:
    """Return the floating-point tensor of a part, from either of its formats."""
    value = sample.get(f"{stem}.npy")
    tensors = sample.get(f"{stem}.safetensors")
    if value is not None:
        try:
            tensor = torch.from_numpy(value)
        except (TypeError, ValueError) as error:  # ValueError: a byte order that differs from this machine's
            problem = f"{stem}.npy holds {value.dtype}, which is no number type of torch"
            raise SampleError("wrong_part", problem) from error
    elif tensors is None:
        return None
    elif stem in tensors:
        tensor = tensors[stem]
    elif len(tensors) == 1:
        tensor = next(iter(tensors.values()))
    else:
        raise SampleError("wrong_part", f"{stem}.safetensors has {sorted(tensors)}, none is called {stem!r}")
    if not tensor.is_floating_point():
        raise SampleError("wrong_part", f"the {stem} holds {tensor.dtype}; store a real floating-point type")
    return tensor


def _pixels(sample: dict[str, Any], wanted: str = PIXELS) -> Optional[Tensor]:
    """Decode the picture or video of a sample, uint8 `[3, T, H, W]`; None if it has none."""
    for name, data in sample.items():
        stem, _, extension = name.partition(".")
        if stem == wanted and extension in PICTURES | VIDEOS:
            return read_pixels(data, extension)
    return None


def _number(metadata: dict[str, Any], names: tuple[str, ...], limits: tuple[float, float]) -> Optional[float]:
    """Return the first existing entry of `names`, or None; raises `SampleError` if it is not between the limits."""
    for name in names:
        if metadata.get(name) is not None:
            value = finite_number(metadata, name)
            if not limits[0] <= value <= limits[1]:
                raise SampleError("metadata", f"{name} is {value:g}, must be {limits[0]:g} to {limits[1]:g}")
            return value
    return None


def read_condition(condition: Condition, clip: Clip) -> Optional[Value]:
    """Read a condition from a sample's metadata or parts; None if it has none and it is optional.

    Raises:
        SampleError: the condition is missing, has the wrong type, rank or width, or is out of range.
    """
    return _read_number(condition, clip) if condition.is_number else _read_array(condition, clip)


def _read_number(condition: Condition, clip: Clip) -> Optional[float]:
    """Read a number from the metadata; a class must be an integer in the model's range."""
    name = condition.stored_as[0]
    value = _number(clip.metadata, condition.stored_as, condition.limits)
    if value is None:
        if condition.default is not None:
            return None
        numbers = "" if condition.num_classes is None else f" of 0..{condition.num_classes - 1}"
        raise SampleError(
            condition.name,
            f"the sample stores no {name}, and the model takes one{numbers}; add it to the metadata{_cure(condition)}",
        )
    if condition.num_classes is None:
        return value
    if not value.is_integer():
        raise SampleError("metadata", f"{name} is {value:g}, not a whole number; classes count from 0")
    if (fault := condition.out_of_range(value)) is not None:
        raise SampleError(condition.name, f"the {name} is {fault}; correct the metadata{condition.or_without}")
    return int(value)


def _cure(condition: Condition) -> str:
    """Return how to train on samples without a condition."""
    return condition.or_without or (", or declare the condition with a default" if condition.axis == "sample" else "")


def _read_array(condition: Condition, clip: Clip) -> Optional[Tensor]:
    """Read an array part, None if it is missing and optional; a picture is repeated for all frames of the latent."""
    # Parts that are stored once belong to all captions. Pictures are: `reference-1` is the second reference.
    numbers = dict.fromkeys((0 if condition.is_per_token else clip.wording, 0))
    stems = [numbered_stem(name, i) for i in numbers for name in condition.stored_as]
    value = next((x for stem in stems if (x := _tensor(clip.parts, stem)) is not None), None)
    if value is None and condition.axis == "sample":
        value = _list_of_numbers(clip.metadata, condition.stored_as)
    if value is not None and condition.derive is not None and condition.is_per_token and clip.pixels is not None:
        raise SampleError(
            "wrong_part",
            f"the sample stores a {condition.description}, which data.online_vae derives from the encoded pixels; "
            "leave it out of the sample, or prepare latents (--vae) and set data.online_vae=none",
        )
    if value is None and condition.derive is not None:
        return condition.derive(clip.latent)
    if value is None and condition.default is not None:
        return None
    if value is None:
        raise SampleError(
            "missing_part",
            f"the model takes a {condition.description} and the sample has no {condition.stored_as[0]}.npy; store its "
            f"{condition.description}, {condition.stored_shape}{_cure(condition)}",
        )
    size = clip.grid if condition.axis == "token" else clip.latent.shape[1:]
    if condition.is_per_token:
        if value.dim() == 3:
            value = value[:, None]
        if value.dim() == 4 and value.shape[1] == 1:
            value = value.expand(-1, size[0], -1, -1)  # like the latent of an image, which is repeated
    if fault := condition.wrong_shape(value, size):
        raise SampleError("wrong_shape", fault)
    return value if condition.dtype is None else value.to(condition.dtype)


def _list_of_numbers(metadata: dict[str, Any], names: tuple[str, ...]) -> Optional[Tensor]:
    """Return the first entry of `names` that is a list, float32; raises `SampleError` if one is no finite number."""
    for name in names:
        if isinstance(values := metadata.get(name), list):
            return torch.tensor([finite_number({name: value}, name) for value in values])
    return None


def read_references(
    sample: dict[str, Any], latent: Tensor, change: Optional[Callable[[Tensor], Tensor]] = None
) -> list[Tensor]:
    """Return the latents that a sample is edited from, `[C, T, H, W]` float32: `reference`, `reference-1`, ...

    Args:
        change: augments pixels of the references as those of the sample.

    Raises:
        SampleError: one has other channels than the sample, or another rank, or is an array and `change` is given.
    """
    references: list[Tensor] = []
    while True:
        stem = numbered_stem(REFERENCE, len(references))
        if (reference := _tensor(sample, stem)) is not None:
            _check_unchanged("reference that is a latent", change)
        elif (pixels := _pixels(sample, stem)) is not None:
            reference = pixel_values(pixels if change is None else change(pixels))
        else:
            return references
        reference = reference[:, None] if reference.dim() == 3 else reference
        if reference.dim() != 4 or 0 in reference.shape or len(reference) != len(latent):
            raise SampleError(
                "wrong_shape",
                f"the {stem} has shape {list(reference.shape)}, expected [{len(latent)}, T, H, W] as the latent",
            )
        references.append(reference.float())


def read_caption(clip: Clip) -> str:
    """Return the caption that the training device embeds.

    Raises:
        FilteredOutError: the metadata has none; `prepare --text-encoder` leaves such samples out, too.
        SampleError: the caption is not a text.
    """
    caption = clip.metadata[CAPTIONS][clip.wording] if clip.wording else clip.metadata.get("caption")
    if caption is None:
        raise FilteredOutError("no_caption", "it has no caption, and data.online_text_encoder embeds one")
    if not isinstance(caption, str):
        raise SampleError("no_caption", f"the caption is {caption!r:.60}, and data.online_text_encoder embeds a text")
    return caption


def _without_values(pixels: Tensor, vae: Geometry) -> Tensor:
    """Return zeros in the shape of the latent of these pixels, without allocating memory."""
    try:
        return torch.zeros(()).expand(vae.latent_shape(*pixels.shape[1:]))
    except ConfigError as error:
        raise SampleError("wrong_shape", str(error)) from error


def _check_unchanged(name: str, change: Optional[Callable[[Tensor], Tensor]]) -> None:
    if change is not None:
        raise SampleError(
            "not_pixels",
            f"the sample has a {name}, which cannot be resized, cropped or flipped: the latent of a mirrored picture "
            "is not the mirrored latent; unset data.resize_side, crop_size and flip, or prepare the data without --vae",
        )


def _media(
    sample: dict[str, Any], vae: Optional[Geometry], change: Optional[Callable[[Tensor], Tensor]]
) -> tuple[Tensor, Optional[Tensor], Optional[tuple[int, int, int]]]:
    """Return the latent (without values if encoded later), the pixels to encode, and the shape of stored pixels."""
    stored = None if vae is not None else _tensor(sample, LATENT)
    if stored is not None:
        _check_unchanged("latent", change)
        return stored, None, None
    if (pixels := _pixels(sample)) is None:
        missing = (
            "the sample has no latent.npy, latent.safetensors, or picture or video called pixels; "
            f"`python -m energon_data.prepare` makes such samples ({page_of('energon_data')})"
        )
        if vae is not None:
            missing = (
                "the sample has no picture or video called pixels, which data.online_vae encodes; prepare the data "
                "without --vae, or train on stored latents with data.online_vae=none"
            )
        raise SampleError("missing_part", missing)
    shape = (pixels.shape[1], pixels.shape[2], pixels.shape[3])
    pixels = pixels if change is None else change(pixels)
    return (pixel_values(pixels), None, shape) if vae is None else (_without_values(pixels, vae), pixels, shape)


@stateless
def cook_clip(
    sample: dict[str, Any],
    vae: Optional[Geometry] = None,
    change: Optional[Callable[[Tensor], Tensor]] = None,
    references: bool = False,
) -> Clip:
    """Create a clip from the decoded parts of a sample.

    Args:
        vae: autoencoder that encodes pixels on the training device; None if latents are stored or pixels are the
            latents.
        change: augments pixels, uint8 `[3, T, H, W]`.
        references: also read the latents that the sample is edited from.

    Raises:
        SampleError: the latent is missing or has the wrong rank or type, or the loss weight is out of range.
    """
    metadata = sample[META_PART]
    latent, pixels, pixel_shape = _media(sample, vae, change)
    if latent.dim() == 3:
        latent = latent[:, None]
    if latent.dim() != 4 or 0 in latent.shape:
        raise SampleError("wrong_shape", f"the latent has shape {list(latent.shape)}, expected [C, T, H, W]")
    if pixel_shape not in (None, tuple((latent if pixels is None else pixels).shape[-3:])):
        # The picture was cropped or resized at load time, so the stored sizes no longer apply.
        metadata = {name: value for name, value in metadata.items() if name != SIZE_AND_CROP.name}
    weight = _number(metadata, ("loss_weight",), LOSS_WEIGHT_RANGE)
    return Clip(
        __key__=sample["__key__"],
        __restore_key__=sample.get("__restore_key__", ()),
        latent=latent.float(),
        pixel_shape=pixel_shape,
        metadata=metadata,
        parts={name: part for name, part in sample.items() if name.endswith((".npy", ".safetensors"))},
        pixels=pixels,
        id=sample_id(sample["__key__"]),
        loss_weight=1.0 if weight is None else weight,
        references=read_references(sample, latent, change) if references else [],
    )
