"""Feature networks for pictures, loaded from files of the user."""

import hashlib
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dit.batch import pixel_bytes
from dit.convert.state_files import read_tensors
from dit.encoders.teacher import EFFICIENTNET, load_efficientnet
from dit.errors import ConfigError
from dit.evaluation.clip import ClipModel
from dit.evaluation.inception import PROBE, load_inception


@dataclass(frozen=True)
class Features:
    """A feature network.

    Attributes:
        of: maps pictures `[N, 3, H, W]` in [-1, 1] to features `[N, D]`.
        network: name of the network, for reports and stored statistics: distances of different networks are not
            comparable. It includes a digest of weights that are not published ones, see `named`.
    """

    of: Callable[[Tensor], Tensor]
    network: str

    def __call__(self, images: Tensor) -> Tensor:
        return self.of(images)


def load_features(path: str | Path, device: torch.device) -> Features:
    """Load `efficientnet_lite0`, a folder with a CLIP model of transformers, or a file.

    A file is a state dict of Inception v3 (`.safetensors`, `.pt`, `.pth`, `.bin`), that of FID, or a TorchScript module
    that maps uint8 pictures `[N, 3, H, W]` to `[N, D]`, as the Inception of StyleGAN's metrics does; if its `forward`
    has an argument `return_features`, it is set to True.
    """
    if str(path) == EFFICIENTNET:
        return _efficientnet(device)
    path = Path(path)
    if path.is_dir():
        clip = ClipModel(path, device)
        return Features(clip.image_features, named(f"CLIP of {path.name}", bytes_of(clip.state_dict())))
    if _is_program(path):
        with zipfile.ZipFile(path) as archive:
            # The folder in the archive has the name under which the file was saved.
            members = ((name.partition("/")[2], archive.read(name)) for name in sorted(archive.namelist()))
            name = named(f"TorchScript of {path.name}", members)
        return Features(_program(path, device), name)
    try:
        tensors = read_tensors(path)
    except ConfigError as error:
        raise ConfigError(f"--features {path} cannot be read: {error}") from error
    if PROBE not in tensors:
        raise ConfigError(
            f"--features {path} has tensors such as {next(iter(tensors))}, which are not those of Inception v3; give "
            "its state dict (pytorch-fid's or torch-fidelity's file), a TorchScript "
            "file (torch.jit.save), or a folder with a CLIP model of transformers"
        )
    network = load_inception(tensors, path).to(device)

    @torch.no_grad()
    def features(images: Tensor) -> Tensor:
        return network(pixel_bytes(images.to(device)))

    return Features(features, "Inception of FID")


def _efficientnet(device: torch.device) -> Features:
    """Return the 1,280 pooled features of EfficientNet-Lite0 at its size of 224 pixels."""
    network = load_efficientnet("--features").to(device)

    @torch.no_grad()
    def features(images: Tensor) -> Tensor:
        pixels = pixel_bytes(images.to(device)).float()
        pixels = nn.functional.interpolate(pixels, size=224, mode="bicubic", antialias=True)
        maps_NCHW: Tensor = network.extract_features((pixels - 127) / 128)  # as in its training
        return maps_NCHW.mean((2, 3))

    return Features(features, named("EfficientNet-Lite0", bytes_of(network.state_dict())))


def named(name: str, parts: Iterable[tuple[str, bytes]]) -> str:
    """Return a name with the start of the SHA-256 of the named parts of a network."""
    digest = hashlib.sha256()
    for key, content in parts:
        digest.update(f"{key} {len(content)} ".encode())
        digest.update(content)
    return f"{name} ({digest.hexdigest()[:12]})"


def bytes_of(state: Mapping[str, Tensor]) -> Iterator[tuple[str, bytes]]:
    """Yield the name and the bytes of each tensor of a state dict."""
    for key in sorted(state):
        tensor = state[key].detach().cpu().contiguous()
        yield f"{key} {tensor.dtype} {tuple(tensor.shape)}", tensor.view(-1).view(torch.uint8).numpy().tobytes()


def _is_program(path: Path) -> bool:
    """Return whether a file is a TorchScript archive, which has constants in addition to tensors."""
    if not path.is_file() or not zipfile.is_zipfile(path):
        return False
    with zipfile.ZipFile(path) as archive:
        return any(name.endswith("/constants.pkl") for name in archive.namelist())


def _program(path: Path, device: torch.device) -> Callable[[Tensor], Tensor]:
    try:
        module: Any = torch.jit.load(str(path), map_location=device).eval()
    except (OSError, RuntimeError, ValueError) as error:
        raise ConfigError(f"--features {path} cannot be read: {error}; give a complete TorchScript file") from error
    names = {argument.name for argument in module.forward.schema.arguments}
    options = {"return_features": True} if "return_features" in names else {}

    @torch.no_grad()
    def features(images: Tensor) -> Tensor:
        features_ND = module(pixel_bytes(images.to(device)), **options)
        if not isinstance(features_ND, Tensor) or features_ND.dim() != 2 or len(features_ND) != len(images):
            shape = list(features_ND.shape) if isinstance(features_ND, Tensor) else type(features_ND).__name__
            raise ConfigError(
                f"--features {path} gives {shape} for {len(images)} pictures, expected [{len(images)}, D]"
            )
        return features_ND.float()

    return features
