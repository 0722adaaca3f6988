"""Frozen autoencoders (VAEs) of diffusers, which encode pixels of data and decode latents of samples.

`Geometry` reads the compression and the scale of an autoencoder from its `config.json` without loading weights.

    pixels [3, T, H, W] in [-1, 1]  -- encoder, posterior mean -->  z  -- (z - mean) / std -->  latent [C, t, h, w]

The z of a `VQModel` is the encoder's output before quantisation; decoding quantises it. That of an `AutoencoderDC` is
the encoder's output. `AutoencoderKLFlux2` has mean and std per channel and position in a patch, among its weights.
"""

import inspect
import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, Optional, TypeVar

import torch
from torch import Tensor, nn

from dit.encoders.pretrained import load_network
from dit.errors import ConfigError
from dit.hub import check_hub
from dit.pipeline_folder import name_a_part
from dit.safe_files import parse_json, read_bytes, valid_entries

Key = TypeVar("Key", bound=Hashable)
Precision = Literal["fp32", "bf16"]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
IDENTITY = "identity"  # pixels are their own latents
FRAMEWISE = ("AutoencoderKL", "AutoencoderKLFlux2", "AutoencoderDC", "VQModel")
"""Classes of diffusers that encode each frame separately."""
KINDS = (
    *FRAMEWISE,
    *("AutoencoderKLWan", "AutoencoderKLQwenImage", "AutoencoderKLHunyuanVideo", "AutoencoderKLHunyuanVideo15"),
)
"""Supported classes of diffusers; those not in `FRAMEWISE` are causal in time."""
BRIGHTNESS = (0.299, 0.587, 0.114)
"""Weights of red, green and blue, as in Pillow's mode `L`."""
WITHOUT_BATCHES = ("AutoencoderKLHunyuanVideo15",)
"""Classes that accept one clip: in diffusers 0.38, the mask of their attention has no axis for heads."""


@dataclass(frozen=True, kw_only=True)
class Geometry:
    """Compression and scale of an autoencoder.

    Attributes:
        kind: class of diffusers, one of `KINDS`, or `identity`.
        time, space: frames, and pixels per side, per position of a latent.
        mean, std: per channel or one for all; a latent is (z - mean) / std.
        patch: positions of a latent per side with separate mean and std, which are among the weights if there are
            several.
    """

    kind: str
    channels: int
    time: int
    space: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    patch: int = 1

    @property
    def step(self) -> int:
        """Pixels of which each side must be a multiple."""
        return self.space * self.patch

    @classmethod
    def read(cls, name: str) -> "Geometry":
        """Read the configuration of an autoencoder.

        Args:
            name: a folder with `config.json` (or with a folder `vae` that has one), a name on the hub, or `identity`.
        """
        if name == IDENTITY:
            return cls(kind=IDENTITY, channels=3, time=1, space=1, mean=(0.0,), std=(1.0,))
        return cls.of(config_of(name), name)

    @classmethod
    def of(cls, config: dict[str, Any], name: str) -> "Geometry":
        """Interpret the content of `config.json`; absent fields have diffusers' defaults."""
        kind = str(config.get("_class_name"))
        if kind not in KINDS:
            has_class = config.get("_class_name") is not None
            fault = f"is a {kind}" if has_class else "has no _class_name in its config.json"
            raise ConfigError(f"{name} {fault}; supported classes are {', '.join(KINDS)}")
        entry = {**_defaults(kind, name), **config}
        with valid_entries(f"the config.json of {name}", ConfigError, "download it again"):
            channels = int(entry.get("vq_embed_dim") or entry.get("z_dim") or entry["latent_channels"])
            time, space = map(int, _compression(entry))
            scale = float(entry.get("scaling_factor", 1.0))
            means, deviations = [entry.get("shift_factor") or 0.0], [1.0]
            if entry.get("latents_mean") is not None and entry.get("latents_std") is not None:
                means, deviations = entry["latents_mean"], entry["latents_std"]
            mean, std = tuple(map(float, means)), tuple(float(deviation) / scale for deviation in deviations)
            patch = int(entry["patch_size"][0]) if kind == "AutoencoderKLFlux2" else 1
        if not all(map(math.isfinite, (*mean, *std))):
            raise ConfigError(f"the config.json of {name} has a scale or a shift that is not finite")
        if not all(1 <= size <= 2**16 for size in (channels, time, space, patch)):
            raise ConfigError(f"the config.json of {name} has invalid sizes: they must be 1 to 65,536")
        return cls(kind=kind, channels=channels, time=time, space=space, mean=mean, std=std, patch=patch)

    def latent_shape(self, frames: int, height: int, width: int) -> tuple[int, int, int, int]:
        """Return (C, t, h, w) of the latent of a picture (one frame) or clip."""
        if height % self.step or width % self.step:
            raise ConfigError(f"{height} x {width} pixels cannot be encoded; sides must be multiples of {self.step}")
        if (frames - 1) % self.time:
            raise ConfigError(f"{frames} frames cannot be encoded; use 1 + a multiple of {self.time}")
        return self.channels, 1 + (frames - 1) // self.time, height // self.space, width // self.space

    def pixel_shape(self, frames: int, height: int, width: int) -> tuple[int, int, int]:
        """Return (T, H, W) in pixels of a latent's (t, h, w)."""
        return 1 + (frames - 1) * self.time, height * self.space, width * self.space


def _compression(entry: dict[str, Any]) -> tuple[Any, Any]:
    if "scale_factor_spatial" in entry:
        return entry["scale_factor_temporal"], entry["scale_factor_spatial"]
    if "spatial_compression_ratio" in entry:
        return entry["temporal_compression_ratio"], entry["spatial_compression_ratio"]
    if "temperal_downsample" in entry:
        return 2 ** sum(entry["temperal_downsample"]), 2 ** len(entry["temperal_downsample"])
    return 1, 2 ** (len(entry.get("encoder_block_out_channels") or entry["block_out_channels"]) - 1)


def folder_of(name: str) -> Optional[Path]:
    """Return the local folder with the configuration, None for a name on the hub."""
    path = Path(name).expanduser()
    if not path.is_dir():
        return None
    return path if (path / "config.json").is_file() else path / "vae"


def config_of(name: str) -> dict[str, Any]:
    """Return the configuration of an autoencoder."""
    folder = folder_of(name)
    if folder is not None and not folder.is_dir() and (message := name_a_part(name, "vae", "vqvae")):
        raise ConfigError(f"autoencoder: {message}")
    try:
        if folder is not None:
            return dict(parse_json(read_bytes(folder / "config.json")))
        if name.count("/") > 1 or name.startswith((".", "/", "~")):
            raise FileNotFoundError(f"{Path(name).expanduser().absolute()} is not a folder")
        autoencoder = class_of("AutoencoderKL", name)
        check_hub(name)
        return dict(autoencoder.load_config(name))
    except ConfigError:
        raise
    except (OSError, TypeError, ValueError) as error:
        raise ConfigError(
            f"no autoencoder at {name!r}: {error}; name a folder in diffusers' layout (config.json and "
            "diffusion_pytorch_model.safetensors), or a name on the Hugging Face hub"
        ) from error


@lru_cache
def _defaults(kind: str, name: str) -> dict[str, Any]:
    parameters = inspect.signature(class_of(kind, name).__init__).parameters
    return {name: p.default for name, p in parameters.items() if p.default is not inspect.Parameter.empty}


def class_of(kind: str, name: str) -> Any:
    """Return the class of diffusers of an autoencoder."""
    try:
        import diffusers
    except ImportError as error:
        raise ConfigError(
            f"autoencoder {name!r} needs diffusers, which is not installed: pip install '.[encoders]'"
        ) from error
    return getattr(diffusers, kind)


class VAE:
    """A frozen pretrained autoencoder, see `Geometry.read`; latents are always float32."""

    def __init__(self, name: str, *, device: str = "cpu", precision: Precision = "fp32") -> None:
        self.name, self.geometry = name, Geometry.read(name)
        self.dtype = DTYPES[precision]
        self._model: Any = None if self.geometry.kind == IDENTITY else self._load(name).to(device)
        self._mean, self._std = (x.to(device) for x in self._statistics())

    def _load(self, name: str) -> Any:
        # low_cpu_mem_usage: the default needs accelerate, and logs a warning without it.
        options = {"torch_dtype": self.dtype, "low_cpu_mem_usage": False}
        source, kind = folder_of(name) or name, class_of(self.geometry.kind, name)
        return load_network(kind, f"autoencoder {name!r}", pretrained_model_name_or_path=source, **options)

    def _statistics(self) -> tuple[Tensor, Tensor]:
        """Return mean and standard deviation, `[C or 1, 1, 1, patch, 1, patch]`, see `_fold`."""
        geometry = self.geometry
        mean, std = torch.tensor(geometry.mean), torch.tensor(geometry.std)
        if geometry.patch > 1:
            bn = self._model.bn
            mean, std = bn.running_mean.float(), (bn.running_var.float() + self._model.config.batch_norm_eps).sqrt()
        shape = -1, 1, 1, geometry.patch, 1, geometry.patch
        return mean.view(shape), std.view(shape)

    def _fold(self, z: Tensor) -> Tensor:
        """Split the last two axes of `[B, C, t, h, w]` into patches and positions in a patch."""
        patch = self.geometry.patch
        return z.float().unflatten(-1, (-1, patch)).unflatten(-3, (-1, patch))

    @torch.no_grad()
    def encode(self, pixels_BCTHW: Tensor) -> Tensor:
        """Encode pictures (one frame) or clips of one shape, in [-1, 1].

        Returns:
            `[B, C, t, h, w]` float32 on the autoencoder's device: the mean of the posterior (of a `VQModel`, the latent
            before quantisation), shifted and scaled. An autoencoder of one channel encodes brightness (ITU-R BT.601).
        """
        frames, height, width = pixels_BCTHW.shape[2:]
        self.geometry.latent_shape(frames, height, width)
        if self._model is None:
            return pixels_BCTHW.to(self._mean.device, torch.float32)
        self._model.disable_tiling()  # of an earlier `decode`
        pixels = pixels_BCTHW.to(self._mean.device, self.dtype)
        if self.geometry.kind in FRAMEWISE:
            channels, count = self._model.config.in_channels, pixels.shape[1]
            if (channels, count) == (1, 3):
                pixels = (pixels * pixels.new_tensor(BRIGHTNESS).view(3, 1, 1, 1)).sum(1, keepdim=True)
            elif channels != count:
                raise ConfigError(
                    f"autoencoder {self.name!r} encodes pictures of {channels} channels, and these have {count}; use "
                    f"an autoencoder of {count}"
                )
            encoded = self._model.encode(pixels.transpose(1, 2).flatten(0, 1))
            flat = encoded.latent_dist.mode() if "latent_dist" in encoded else encoded[0]
            z = flat.unflatten(0, (-1, frames)).transpose(1, 2)
        else:
            z = torch.cat([self._model.encode(clips).latent_dist.mode() for clips in self._batches(pixels)])
        return _unfold((self._fold(z) - self._mean) / self._std)

    def _batches(self, clips: Tensor) -> Sequence[Tensor]:
        return clips.split(1 if self.geometry.kind in WITHOUT_BATCHES else len(clips))

    @torch.no_grad()
    def decode(self, latent_BCTHW: Tensor, tile: Optional[int] = None) -> Tensor:
        """Decode latents of one shape to `[B, 3, T, H, W]`, float32, clamped to [-1, 1].

        Args:
            tile: longest side, in pixels, without overlapping tiles (diffusers' tiling), which bound memory and change
                the numbers slightly; None for no tiles. A `VQModel` has none.
        """
        latent = latent_BCTHW.to(self._mean.device, torch.float32)
        if self._model is None:
            return latent.clamp(-1, 1)
        side = max(latent_BCTHW.shape[3:]) * self.geometry.space
        if tile is not None and side > tile and self.geometry.kind != "VQModel":
            self._model.enable_tiling()
        else:
            self._model.disable_tiling()
        z = _unfold(self._fold(latent) * self._std + self._mean).to(self.dtype)
        if self.geometry.kind in FRAMEWISE:
            flat = self._model.decode(z.transpose(1, 2).flatten(0, 1)).sample
            pixels = flat.unflatten(0, (-1, latent.shape[2])).transpose(1, 2)
        else:
            pixels = torch.cat([self._model.decode(clips).sample for clips in self._batches(z)])
        return pixels.float().clamp(-1, 1)

    @torch.no_grad()
    def save(self, folder: Path, *, shift: bool) -> None:
        """Write a class of diffusers in its layout.

        Without `shift`, the shift of an `AutoencoderKL` is merged into the biases of the 1 x 1 convolutions before the
        decoder and after the encoder, which are added if they are missing.
        """
        if self.geometry.kind != "AutoencoderKL":  # every reader applies the scale and shift of the other classes
            self._model.save_pretrained(folder)
            return
        if self._model.config.latents_mean is not None:
            raise ConfigError(
                f"the autoencoder {self.name!r} is not an AutoencoderKL with one scale and shift, as the pipeline needs"
            )
        [mean], channels = self.geometry.mean, self.geometry.channels
        if shift or not mean:
            self._model.register_to_config(shift_factor=mean if shift else None)
        else:
            for name, size in (("quant_conv", 2 * channels), ("post_quant_conv", channels)):
                if getattr(self._model, name) is None:
                    setattr(self._model, name, identity_convolution(size).to(self._mean.device, self.dtype))
                self._model.register_to_config(**{f"use_{name}": True})
            self._model.quant_conv.bias[:channels] -= mean
            self._model.post_quant_conv.bias += mean * self._model.post_quant_conv.weight.sum((1, 2, 3))
            self._model.register_to_config(shift_factor=None)
        self._model.save_pretrained(folder)


def _unfold(x: Tensor) -> Tensor:
    return x.flatten(-4, -3).flatten(-2)


def identity_convolution(channels: int) -> nn.Conv2d:
    """Return a 1 x 1 convolution that computes the identity."""
    convolution = nn.Conv2d(channels, channels, 1)
    nn.init.dirac_(convolution.weight)
    assert convolution.bias is not None
    nn.init.zeros_(convolution.bias)
    return convolution


def in_batches(keys: Sequence[Key], batch_size: Callable[[Key], int]) -> list[list[int]]:
    """Group the indices of items with equal keys into batches of at most `batch_size(key)` items, in their order."""
    by_key: dict[Key, list[int]] = {}
    for i, key in enumerate(keys):
        by_key.setdefault(key, []).append(i)
    return [
        indices[start : start + size]
        for key, indices in by_key.items()
        for size in [max(1, batch_size(key))]
        for start in range(0, len(indices), size)
    ]


def encode_together(encode: Callable[[Tensor], Tensor], clips: Sequence[Tensor], batch: int) -> list[Tensor]:
    """Encode clips of any shapes in batches of one shape; return the result of each clip, float32 on the host."""
    latents: dict[int, Tensor] = {}
    for part in in_batches([clip.shape for clip in clips], lambda _: batch):
        encoded = encode(torch.stack([clips[i] for i in part])).cpu()
        latents |= dict(zip(part, encoded, strict=True))
    return [latents[i] for i in range(len(clips))]


def load_vae(name: str, device: str = "cpu", precision: Precision = "fp32") -> VAE:
    """Return an autoencoder; the last one is cached until a file in its folder changes."""
    folder = folder_of(name)
    files = sorted(folder.iterdir()) if folder is not None and folder.is_dir() else []
    return _loaded(name, device, precision, tuple(file.stat().st_mtime_ns for file in files if file.exists()))


@lru_cache(maxsize=1)
def _loaded(name: str, device: str, precision: Precision, _times: tuple[int, ...]) -> VAE:
    return VAE(name, device=device, precision=precision)
