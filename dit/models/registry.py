"""Backbones by name: one folder each, one line here each, naming its settings and its model.

Classes are imported by name when needed, so that configs and models do not import each other in a cycle.
"""

from dataclasses import dataclass
from importlib import import_module
from typing import Any

from dit.backends.provider import LayerProvider
from dit.errors import ConfigError
from dit.kernels.attention import Attention
from dit.models.base import Backbone, ModelConfig, Stage
from dit.models.lora import add_adapters


@dataclass(frozen=True)
class Entry:
    """Where a backbone is, as `module:Class`.

    Attributes:
        config: its settings.
        model: its network, built from (config, provider, attention, stage).
    """

    config: str
    model: str


BACKBONES = {
    "autoencoder": Entry("dit.models.autoencoder.config:AutoencoderConfig", "dit.models.autoencoder.model:Autoencoder"),
    "ddpm_unet": Entry("dit.models.ddpm_unet.config:DDPMUNetConfig", "dit.models.ddpm_unet.model:DDPMUNet"),
    "dit": Entry("dit.models.dit.config:DiTConfig", "dit.models.dit.model:DiT"),
    "dit_cross": Entry("dit.models.dit_cross.config:DiTCrossConfig", "dit.models.dit_cross.model:DiTCross"),
    "efficient_unet": Entry(
        "dit.models.efficient_unet.config:EfficientUNetConfig", "dit.models.efficient_unet.model:EfficientUNet"
    ),
    "flux": Entry("dit.models.flux.config:FluxConfig", "dit.models.flux.model:Flux"),
    "ldm_unet": Entry("dit.models.ldm_unet.config:LDMUNetConfig", "dit.models.ldm_unet.model:LDMUNet"),
    "moviegen": Entry("dit.models.moviegen.config:MovieGenConfig", "dit.models.moviegen.model:MovieGen"),
    "stdit": Entry("dit.models.stdit.config:STDiTConfig", "dit.models.stdit.model:STDiT"),
    "unet": Entry("dit.models.unet.config:UNetConfig", "dit.models.unet.model:UNet"),
    "wan": Entry("dit.models.wan.config:WanConfig", "dit.models.wan.model:Wan"),
}


def _load(path: str) -> Any:
    module, _, name = path.partition(":")
    return getattr(import_module(module), name)


def config_class(name: str) -> type[ModelConfig]:
    """Return the settings class of a backbone of `BACKBONES`."""
    return _load(BACKBONES[name].config)


def build_backbone(config: ModelConfig, provider: LayerProvider, attention: Attention, stage: Stage) -> Backbone:
    """Build the part of a backbone of one stage, with its adapters.

    Args:
        config: its settings; their class, or the nearest base class of it in the table, selects the backbone.
        provider: of parallel linears, for this rank.
        attention: the attention of this run.

    Raises:
        ConfigError: neither a line of `BACKBONES` nor the settings themselves name a model.
    """
    models = {entry.config: entry.model for entry in BACKBONES.values()}
    paths = [f"{kind.__module__}:{kind.__qualname__}" for kind in type(config).__mro__]
    found = config.model_path or next((models[path] for path in paths if path in models), None)
    if found is None:
        raise ConfigError(
            f"{paths[0]} is in no line of dit/models/registry.py ({', '.join(BACKBONES)}); add one that names its "
            "model, or give the class a `model_path`"
        )
    backbone: Backbone = _load(found)(config, provider, attention, stage)
    if config.adapters is not None:
        add_adapters(backbone, config.adapters, provider)
    return backbone
