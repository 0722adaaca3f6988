"""Pictures that samples start from or are edited from, as latents of the model."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Optional

from dit.errors import ConfigError
from dit.safe_files import read_bytes

if TYPE_CHECKING:
    from torch import Tensor

    from dit.inference.decoding import Decoder
    from dit.inference.drawing import Request


def with_references(
    requests: Sequence["Request"], paths: Sequence[Path], count: int, read: Callable[[Path], "Tensor"]
) -> list["Request"]:
    """Return the requests with the picture that each is edited from.

    Args:
        paths: one picture for all, or one for each `count` requests.
    """
    samples = len(requests) // count
    if len(paths) not in (1, samples):
        raise ConfigError(f"--reference has {len(paths)} pictures for {samples} samples; give one, or one for each")
    latents = [read(path) for path in paths]
    return [
        replace(
            request,
            reference=latents[(number := i // count % len(paths))],
            record=request.record | {"reference": str(paths[number])},
        )
        for i, request in enumerate(requests)
    ]


def read_initial(
    path: Path, latent_size: tuple[int, int, int], channels: int, decoder: "Decoder", option: str = "--init"
) -> "Tensor":
    """Return a picture as the latent of a sample, `[C, 1, H, W]`, float32.

    It is scaled until it covers the sample, and its middle is cut out. Without an autoencoder it stays pixels: three
    channels, or one of its brightness.
    """
    import torch
    from PIL import Image, ImageOps

    from dit.batch import pixel_values
    from dit.encoders.vae import load_vae
    from energon_data.media_files import open_picture, pixels_of
    from energon_data.samples import SampleError

    frames, height, width = latent_size
    if frames != 1:
        raise ConfigError(f"{option} {path} is one picture, and samples have {frames} frames; use --frames 1")
    if decoder.geometry is None and channels not in (1, 3):
        raise ConfigError(
            f"{option} {path}: the model draws latents of {channels} channels, and nothing encodes a picture to them; "
            "name the autoencoder with --vae"
        )
    try:
        picture = open_picture(read_bytes(path))
    except (OSError, SampleError) as error:
        raise ConfigError(f"{option} {path} cannot be read: {error}") from error
    if decoder.geometry is not None:
        _, height, width = decoder.geometry.pixel_shape(1, height, width)
    fitted = ImageOps.fit(picture, (width, height), Image.Resampling.LANCZOS)
    if channels == 1:
        fitted = fitted.convert("L").convert("RGB")
    pixels = pixel_values(pixels_of([fitted]))
    if decoder.name is None:
        return pixels[:channels]
    with torch.no_grad():
        return load_vae(decoder.name, str(decoder.device)).encode(pixels[None])[0].float().cpu()


def check_strength(strength: Optional[float], *, initial: bool) -> float:
    """Return the share of the noise that is added to an initial picture."""
    if strength is not None and not initial:
        raise ConfigError(f"--strength {strength:g} is how far samples leave the picture of --init; give one")
    if strength is not None and not 0 < strength <= 1:
        raise ConfigError(
            f"--strength {strength:g} must be above 0 and at most 1, where nothing is left of the picture"
        )
    return 0.75 if strength is None else strength
