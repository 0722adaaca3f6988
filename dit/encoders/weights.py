"""Size of the weights of online encoders, computed from their configurations without loading them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from dit.conditions import Condition
from dit.data_api import OnlineEncoding
from dit.encoders import text, text_config, vae
from dit.errors import ConfigError


def weight_bytes(encoding: OnlineEncoding, conditions: Sequence[Condition]) -> dict[str, int]:
    """Return the bytes of the weights of each encoder that a run loads, by name."""
    configs = () if encoding.text_encoder is None else text_config.parse_line(encoding.text_encoder)
    names = [*(config.name for config in configs), *([] if encoding.vae is None else [encoding.vae])]
    for name in names:
        if name not in (*text_config.ENCODERS, text_config.IDENTITY) and not Path(name).expanduser().is_dir():
            raise ConfigError(f"{name} is not a local folder; download it and name the folder to count its weights")
    sizes: dict[str, int] = {}
    if encoding.vae is not None:
        sizes[encoding.vae] = _autoencoder(encoding.vae, encoding.precision)
    for config in configs:
        if text_config.as_conditions({entry: entry for entry in config.makes}, conditions):
            sizes[config.name] = _text_encoder(config.name, encoding.precision)
    return sizes


def _autoencoder(name: str, precision: vae.Precision) -> int:
    kind = vae.Geometry.read(name).kind
    if kind == vae.IDENTITY:
        return 0
    with torch.device("meta"):
        model = vae.class_of(kind, name).from_config(vae.config_of(name))
    return int(model.to(vae.DTYPES[precision]).get_memory_footprint())


def _text_encoder(name: str, precision: vae.Precision) -> int:
    kind = text_config.read_geometry(name).kind
    if kind == "identity":
        return 0
    config: Any = text_config.config_of(name)
    build: Any = text.class_of(kind)
    with torch.device("meta"):
        own = config if isinstance(config, build.config_class) else config.get_text_config()
        model = build(**{"config": own, **text.options_of(kind, config)})
    return int(model.to(vae.DTYPES[precision]).get_memory_footprint())
