"""Conversion of decoded pictures to 8-bit RGB in the colour space sRGB."""

import io
from functools import lru_cache
from typing import Any, Literal, Optional, get_args

import numpy as np
from PIL import Image, ImageCms

from energon_data.samples import SampleError

Colours = Literal["sRGB", "converted", "bad_profile", "not_converted"]
"""sRGB; converted to it; taken as it because the ICC profile cannot be used; HDR or wide gamut, not converted."""
OTHER_COLOURS = get_args(Colours)[1:]
"""Values of `Colours` other than sRGB."""

_GREYS = ("1", "L", "LA", "I", "I;16", "I;16B", "I;16L", "F")
_MODES = {"RGB ": ("RGB", "RGBA", "RGBX", "P", "PA", *_GREYS), "GRAY": _GREYS, "CMYK": ("CMYK",)}
"""Modes of pictures to which an ICC profile of a colour space can belong."""
_SAME = 2  # of 255; a profile that changes no colour by more is a copy of sRGB
_HDR = frozenset({16, 18})  # transfer of PQ and HLG; source: ITU-T H.273, table 3
_WIDE = frozenset({9, 11, 12})  # primaries of BT.2020, DCI-P3 and Display P3; source: ITU-T H.273, table 2
_BAND = 256  # rows


def to_srgb(picture: Image.Image, paper: str = "white") -> tuple[Image.Image, Colours]:
    """Convert a picture of any mode to RGB by its ICC profile.

    Args:
        picture: its pixels may change.
        paper: colour of transparent areas.

    Raises:
        SampleError: it has values that are not finite.
    """
    profile = picture.info.get("icc_profile")
    if not profile:
        return flattened(picture, paper), "sRGB"
    try:
        space, transform = _transform(profile)
    except (OSError, ImageCms.PyCMSError):
        return flattened(picture, paper), "bad_profile"
    if picture.mode not in _MODES.get(space, ()):
        return flattened(picture, paper), "bad_profile"
    picture = picture if space == "CMYK" else flattened(picture, paper)
    if transform is None:
        return picture, "sRGB"
    if space == "RGB ":
        return transform.apply_in_place(picture), "converted"
    return transform.apply(picture.getchannel(0) if space == "GRAY" else picture), "converted"


@lru_cache(maxsize=16)
def _transform(profile: bytes) -> tuple[str, Optional[ImageCms.ImageCmsTransform]]:
    """Return the colour space of an ICC profile, and its conversion to sRGB; None if the profile is a copy of sRGB.

    Raises:
        OSError, ImageCms.PyCMSError: the profile is damaged, or of another colour space.
    """
    source = ImageCms.ImageCmsProfile(io.BytesIO(profile))
    space = source.profile.xcolor_space
    transform = ImageCms.buildTransform(
        source,
        ImageCms.createProfile("sRGB"),
        {"GRAY": "L"}.get(space, space.strip()),
        "RGB",
        ImageCms.Intent.RELATIVE_COLORIMETRIC,
        ImageCms.Flags.BLACKPOINTCOMPENSATION,
    )
    if space == "RGB ":
        levels = np.arange(0, 256, 15).astype(np.uint8)
        chart = np.stack(np.meshgrid(levels, levels, levels), -1).reshape(1, -1, 3)
        changed = transform.apply(Image.fromarray(chart))
        if np.abs(np.asarray(changed).astype(int) - chart).max() <= _SAME:
            return space, None
    return space, transform


def colours_of_frame(frame: Any) -> Colours:
    """Return the colours of a PyAV frame, by the transfer and the primaries that the file states.

    PyAV below 17 does not read them.
    """
    is_wide = getattr(frame, "color_trc", None) in _HDR or getattr(frame, "color_primaries", None) in _WIDE
    return "not_converted" if is_wide else "sRGB"


def flattened(picture: Image.Image, paper: str = "white") -> Image.Image:
    """Convert a picture to RGB, in bands of rows where a conversion needs several copies."""
    bands = [(0, top, picture.width, min(top + _BAND, picture.height)) for top in range(0, picture.height, _BAND)]
    if picture.mode in ("I", "I;16", "I;16B", "I;16L", "F"):  # 16-bit grey, which Pillow's conversion clips
        values = np.asarray(picture)
        if not np.isfinite(values).all():
            raise SampleError("bad_image", "it has values that are not finite")
        largest = 65535 if picture.mode.startswith("I;16") else values.max(initial=0)  # "I" and "F" have any range
        top = 65535 if largest > 255 else 1 if picture.mode == "F" and largest <= 1 else 255
        grey = np.empty(values.shape, np.uint8)
        for _, start, _, end in bands:
            grey[start:end] = np.round(values[start:end].astype(np.float64).clip(0, top) * (255 / top))
        picture = Image.fromarray(grey)
    if picture.mode in ("RGBA", "LA", "PA") or "transparency" in picture.info:
        opaque = Image.new("RGB", picture.size)
        for box in bands:
            band = picture.crop(box).convert("RGBA")
            below = Image.new("RGBA", band.size, paper)
            opaque.paste(Image.alpha_composite(below, band).convert("RGB"), box)
        return opaque
    return picture if picture.mode == "RGB" else picture.convert("RGB")
