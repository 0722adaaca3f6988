"""Networks that turn pictures into features, from files of the user."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dit.errors import ConfigError
from dit.evaluation.clip import ClipModel

Features = Callable[[Tensor], Tensor]
"""Maps pictures `[N, 3, H, W]` in [-1, 1] to features `[N, D]`."""


def load_features(path: str | Path, device: torch.device) -> Features:
    """Load a network of features.

    Args:
        path: a folder with a CLIP model of transformers, or a TorchScript file whose module maps uint8 pictures
            `[N, 3, H, W]` to `[N, D]`, as the Inception of StyleGAN's metrics does; if its `forward` has an argument
            `return_features`, that is True.
        device: where it runs.

    Raises:
        ConfigError: it cannot be read.
    """
    path = Path(path)
    if path.is_dir():
        return ClipModel(path, device).image_features
    try:
        module: Any = torch.jit.load(str(path), map_location=device).eval()
    except (OSError, RuntimeError, ValueError) as error:
        raise ConfigError(
            f"--features {path} cannot be read: {error}; give a TorchScript file (torch.jit.save), or a folder with a "
            "CLIP model of transformers"
        ) from error
    names = {argument.name for argument in module.forward.schema.arguments}
    options = {"return_features": True} if "return_features" in names else {}

    @torch.no_grad()
    def features(images: Tensor) -> Tensor:
        pixels = ((images.to(device).clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8)
        found = module(pixels, **options)
        if not isinstance(found, Tensor) or found.dim() != 2 or len(found) != len(images):
            shape = list(found.shape) if isinstance(found, Tensor) else type(found).__name__
            raise ConfigError(f"--features {path} gives {shape} for {len(images)} pictures, wanted [{len(images)}, D]")
        return found.float()

    return features
