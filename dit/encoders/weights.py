"""How many bytes the weights of online encoders take, from their configurations: nothing is loaded."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dit.conditions import Condition
from dit.data_api import OnlineEncoding
from dit.encoders import text, text_config, vae
from dit.errors import ConfigError


def weight_bytes(encoding: OnlineEncoding, conditions: Sequence[Condition]) -> dict[str, int]:
    """Return the bytes of each encoder that a run loads, by name; activations come on top.

    Args:
        encoding: which encoders, and their precision.
        conditions: of the model; encoders that make none of them are not loaded.

    Raises:
        ConfigError: an encoder is not on this machine (the hub is not asked), or a package is not installed.
    """
    parts = [] if encoding.text_encoder is None else encoding.text_encoder.split(",")
    configs = [text_config.TextEncoderConfig.parse(part) for part in parts]
    names = [*(config.name for config in configs), *([] if encoding.vae is None else [encoding.vae])]
    for name in names:
        if name not in (*text_config.ENCODERS, text_config.IDENTITY) and not Path(name).expanduser().is_dir():
            raise ConfigError(f"{name} is no folder here; download it and name the folder to have it counted")
    found: dict[str, int] = {}
    if encoding.vae is not None:
        found[encoding.vae] = _autoencoder(encoding.vae, encoding.precision)
    for config in configs:
        if text_config.as_conditions({entry: entry for entry in config.makes}, conditions):
            found[config.name] = _text_encoder(config.name, encoding.precision)
    return found


def _autoencoder(name: str, precision: vae.Precision) -> int:
    kind = vae.Geometry.read(name).kind
    if kind == vae.IDENTITY:
        return 0
    with torch.device("meta"):
        model = vae.class_of(kind).from_config(vae.config_of(name))
    return _bytes(model, precision)


def _text_encoder(name: str, precision: vae.Precision) -> int:
    kind = text_config.read_geometry(name).kind
    if kind == "identity":
        return 0
    config: Any = text_config.config_of(name)
    made: Any = text.class_of(kind)
    with torch.device("meta"):
        model = made(getattr(config, "text_config", config), **text.options_of(kind))
    return _bytes(model, precision)


def _bytes(model: nn.Module, precision: vae.Precision) -> int:
    """Return the bytes of the parameters, shared ones once, and of floating-point buffers, in a precision."""
    tensors = {id(x): x for x in (*model.parameters(), *model.buffers())}.values()
    return sum(x.numel() * (vae.DTYPES[precision] if x.is_floating_point() else x.dtype).itemsize for x in tensors)
