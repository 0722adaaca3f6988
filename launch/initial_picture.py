"""Pictures that samples start from, are edited from, follow, or keep outside a mask, as latents of the model."""

import math
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Optional

import torch
from PIL import ImageOps
from PIL.Image import Image, Resampling
from torch import Tensor

from dit.batch import pixel_values
from dit.condition_table import CONTROL, FIRST_FRAMES
from dit.encoders.text_config import check_text_encoder
from dit.encoders.vae import load_vae
from dit.errors import ConfigError
from dit.inference.decoding import Decoder
from dit.inference.drawing import Request
from dit.safe_files import read_bytes
from energon_data.media_files import open_picture, pixels_of
from energon_data.prepare.pictures import Fit
from energon_data.samples import SampleError

if TYPE_CHECKING:
    from dit.inference.generator import Generator


DATA_SETTINGS = {
    "reference": ("references", "references", "edit pictures", "on data of `energon_data.prepare --reference`"),
    "first_frame": ("clean_first_frame", "clean first frames", "continue a picture", "with data.clean_first_frame=0.5"),
    "inpaint": ("inpaint", "clean regions", "complete a picture", "with data.inpaint=0.5"),
}
"""Options that need a setting of the data: the setting, what it trains, what it allows, and how to train with it."""


def check_trained(args: Namespace, generator: "Generator") -> None:
    """Check that the run trained what the picture options of the command require; imported weights have no data."""
    data, spec = generator.config.data, generator.spec
    starts_clips = getattr(data, "frame_levels", 0) or spec.condition(FIRST_FRAMES.name) is not None
    for name, (setting, missing, task, cure) in DATA_SETTINGS.items():
        if name == "first_frame" and starts_clips:
            continue
        value = getattr(data, setting, None)
        if getattr(args, name) and value is not None and not value:
            raise ConfigError(
                f"--checkpoint {args.checkpoint} was trained without {missing} (data.{setting}={value}), so it cannot "
                f"{task}; train {cure}, or leave --{name.replace('_', '-')} out"
            )
    if args.control and spec.condition(CONTROL.name) is None:
        raise ConfigError(
            f"--checkpoint {args.checkpoint} takes no control picture; train with model.control_channels="
            f"{generator.config.model.in_channels}, or leave --control out"
        )


def add_pictures(
    requests: Sequence[Request],
    option: str,
    paths: Sequence[Sequence[Path]],
    count: int,
    read: Callable[[Path], Tensor],
) -> list[Request]:
    """Return the requests with the pictures that each is edited from (`--reference`), or the control picture of each.

    Args:
        paths: pictures of all requests, or of each `count` requests.
    """
    _check_count(option, paths, len(requests) // count)
    latents, name, changed = [tuple(map(read, several)) for several in paths], option.removeprefix("--"), []
    for i, request in enumerate(requests):
        number = i // count % len(paths)
        request = replace(request, record=request.record | {name: list(map(str, paths[number]))})
        if name == "reference":
            changed.append(replace(request, references=latents[number]))
        else:
            changed.append(replace(request, conditions={**request.conditions, name: latents[number][0]}))
    return changed


def _check_count(option: str, paths: Sequence[Sequence[Path]], samples: int) -> None:
    if len(paths) not in (1, samples):
        cure = "repeat the option for each" if option == "--reference" else "give one for each"
        raise ConfigError(
            f"{option} has pictures of {len(paths)} samples, and there are {samples}; {cure}, or give pictures for all"
        )


def open_requested(path: Path, option: str, paper: str = "white") -> Image:
    """Open a picture that an option of the command names; transparent areas get the colour `paper`."""
    try:
        return open_picture(read_bytes(path), paper)
    except (OSError, SampleError) as error:
        reason = error.detail if isinstance(error, SampleError) else error.strerror
        raise ConfigError(f"{option} {path} cannot be read: {reason}; name a picture") from error


def pictures_of_texts(
    paths: Sequence[Sequence[Path]], text_encoder: Optional[str], count: int
) -> Optional[list[list[Image]]]:
    """Return the pictures to edit of each text (`--reference`); None if no text encoder reads pictures."""
    if not paths or text_encoder is None or not check_text_encoder(text_encoder).reads_pictures:
        return None
    if count == 0:
        raise ConfigError("--reference needs --prompt: the text encoder of the run reads pictures and text together")
    _check_count("--reference", paths, count)
    pictures = [[open_requested(path, "--reference") for path in several] for several in paths]
    return pictures * count if len(pictures) == 1 else pictures


def read_initial(
    path: Path, latent_size: tuple[int, int, int], channels: int, decoder: Decoder, option: str = "--init"
) -> Tensor:
    """Return a picture as the latent of a sample, `[C, 1, H, W]`, float32.

    It is scaled until it covers the sample, and its middle is cut out. Without an autoencoder it stays pixels: three
    channels, or one of its brightness.
    """
    picture = open_requested(path, option)
    return _encoded(_pixels(picture, latent_size, channels, decoder, f"{option} {path}"), decoder)


def read_reference(
    path: Path,
    largest: tuple[int, int],
    channels: int,
    patch: int,
    decoder: Decoder,
    aspect: Literal["keep", "square", "buckets"] = "keep",
) -> Tensor:
    """Return a picture to edit as a latent, `[C, 1, H, W]`, float32.

    Its size is that of pictures of `energon_data.prepare --size N --aspect ASPECT --enlarge`, and does not depend on
    that of the drawn sample. N is the smallest side with which `prepare` makes the largest training sample.

    Args:
        largest: height and width of the largest training sample, in positions of a latent.
        patch: side of a patch in positions of a latent.
    """
    geometry = decoder.geometry
    unit = patch if geometry is None else math.lcm(geometry.step, geometry.space * patch)

    def fit(picture: Image, width: int, height: int) -> Image:
        side = math.ceil(math.sqrt(width * height) / unit) * unit
        return Fit(size=side, aspect=aspect, multiple_of=unit, enlarge=True, max_cut=1.0).apply(picture)

    picture = open_requested(path, "--reference")
    return _encoded(_pixels(picture, (1, *largest), channels, decoder, f"--reference {path}", fit), decoder)


def _cover(picture: Image, width: int, height: int) -> Image:
    """Scale a picture until it covers a size, and cut its middle out."""
    return ImageOps.fit(picture, (width, height), Resampling.LANCZOS)


def _pixels(
    picture: Image,
    latent_size: tuple[int, int, int],
    channels: int,
    decoder: Decoder,
    name: str,
    fit: Callable[[Image, int, int], Image] = _cover,
) -> Tensor:
    """Return a picture scaled by `fit`, by default to the size of a sample, `[1 or 3, 1, H, W]` in [-1, 1]."""
    frames, height, width = latent_size
    if frames != 1:
        raise ConfigError(f"{name} is one picture, and samples have {frames} frames; use --frames 1")
    if decoder.geometry is None and channels not in (1, 3):
        raise ConfigError(
            f"{name}: the model draws latents of {channels} channels, and nothing encodes a picture to them; "
            "name the autoencoder with --vae"
        )
    if decoder.geometry is not None:
        _, height, width = decoder.geometry.pixel_shape(1, height, width)
    fitted = fit(picture, width, height)
    if channels == 1:
        fitted = fitted.convert("L").convert("RGB")
    pixels = pixel_values(pixels_of([fitted]))
    return pixels if decoder.geometry is not None else pixels[:channels]


def _encoded(pixels: Tensor, decoder: Decoder) -> Tensor:
    """Return a picture as a latent; without an autoencoder unchanged."""
    if decoder.name is None:
        return pixels
    with torch.no_grad():
        return load_vae(decoder.name, str(decoder.device)).encode(pixels[None])[0].float().cpu()


def read_inpainting(
    paths: Sequence[Path], latent_size: tuple[int, int, int], channels: int, patch: int, decoder: Decoder
) -> "tuple[dict[str, Tensor], Callable[[Tensor], Tensor]]":
    """Read a picture and its mask, which is bright where the picture is generated; transparent areas of it are dark.

    A patch of the model is generated if a pixel of it is in the mask; other pixels are those of the picture.

    Args:
        patch: side of a patch in positions of a latent.

    Returns:
        `known` and `mask` of `Generator.generate`; and a function that replaces the pixels outside the mask of drawn
        pictures `[N, C, T, H, W]` by those of the picture.
    """
    name = f"--inpaint {paths[0]} {paths[1]}"
    picture, mask = (open_requested(path, "--inpaint", paper) for path, paper in zip(paths, ("white", "black")))
    (width, height), (mask_width, mask_height) = picture.size, mask.size
    rounding = max(*picture.size, *mask.size)  # of the sides of a resized mask
    if abs(mask_width * height - mask_height * width) > rounding:
        raise ConfigError(
            f"{name}: the mask of {mask_width} x {mask_height} pixels has another aspect ratio than the picture of "
            f"{width} x {height}, so they do not match; paint the mask at the size of the picture"
        )
    pixels = _pixels(picture, latent_size, channels, decoder, name)
    mask_HW = _pixels(mask, latent_size, channels, decoder, name).mean((0, 1)) > 0
    if not mask_HW.any():
        raise ConfigError(f"{name}: the mask is dark everywhere; paint white what to generate")
    sides = [pixel // (side // patch) for pixel, side in zip(mask_HW.shape, latent_size[1:])]
    patches = torch.nn.functional.max_pool2d(mask_HW[None].float(), sides)[0] > 0
    settings = {"known": _encoded(pixels, decoder), "mask": patches}
    return settings, lambda drawn: torch.where(mask_HW, drawn, pixels)


def check_strength(strength: Optional[float], *, initial: bool) -> float:
    """Return the share of the noise that is added to an initial picture."""
    if strength is not None and not initial:
        raise ConfigError(f"--strength {strength:g} is how far samples leave the picture of --init; give one")
    if strength is not None and not 0 < strength <= 1:
        raise ConfigError(
            f"--strength {strength:g} must be above 0 and at most 1, where nothing is left of the picture"
        )
    return 0.75 if strength is None else strength
