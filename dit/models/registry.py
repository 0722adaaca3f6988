"""Backbones by name. Each has a folder and a line in `BACKBONES` with its settings and its network.

A folder with only a config has the sizes of a family of `streams`.

Classes are imported by name when needed, which avoids import cycles between configs and models.
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
    """Import paths of a backbone, as `module:Class`.

    Attributes:
        config: settings class.
        model: network class, built from (config, provider, attention, stage).
    """

    config: str
    model: str


BACKBONES = {
    "autoencoder": Entry("dit.models.autoencoder.config:AutoencoderConfig", "dit.models.autoencoder.model:Autoencoder"),
    "chroma": Entry("dit.models.chroma.config:ChromaConfig", "dit.models.streams.model:Streams"),
    "ddpm_unet": Entry("dit.models.ddpm_unet.config:DDPMUNetConfig", "dit.models.ddpm_unet.model:DDPMUNet"),
    "dit": Entry("dit.models.dit.config:DiTConfig", "dit.models.dit.model:DiT"),
    "dit_cross": Entry("dit.models.dit_cross.config:DiTCrossConfig", "dit.models.dit_cross.model:DiTCross"),
    "edm2_unet": Entry("dit.models.edm2_unet.config:EDM2UNetConfig", "dit.models.edm2_unet.model:EDM2UNet"),
    "efficient_unet": Entry(
        "dit.models.efficient_unet.config:EfficientUNetConfig", "dit.models.efficient_unet.model:EfficientUNet"
    ),
    "flux": Entry("dit.models.flux.config:FluxConfig", "dit.models.streams.model:Streams"),
    "flux2": Entry("dit.models.flux2.config:Flux2Config", "dit.models.streams.model:Streams"),
    "hunyuan_video": Entry(
        "dit.models.hunyuan_video.config:HunyuanVideoConfig", "dit.models.hunyuan_video.model:HunyuanVideo"
    ),
    "ldm_unet": Entry("dit.models.ldm_unet.config:LDMUNetConfig", "dit.models.ldm_unet.model:LDMUNet"),
    "lumina2": Entry("dit.models.lumina2.config:Lumina2Config", "dit.models.streams.model:Streams"),
    "moviegen": Entry("dit.models.moviegen.config:MovieGenConfig", "dit.models.moviegen.model:MovieGen"),
    "prx": Entry("dit.models.prx.config:PRXConfig", "dit.models.prx.model:PRX"),
    "qwen_image": Entry("dit.models.qwen_image.config:QwenImageConfig", "dit.models.streams.model:Streams"),
    "sana": Entry("dit.models.sana.config:SanaConfig", "dit.models.sana.model:Sana"),
    "sd3": Entry("dit.models.sd3.config:SD3Config", "dit.models.streams.model:Streams"),
    "stdit": Entry("dit.models.stdit.config:STDiTConfig", "dit.models.stdit.model:STDiT"),
    "unet": Entry("dit.models.unet.config:UNetConfig", "dit.models.unet.model:UNet"),
    "wan": Entry("dit.models.wan.config:WanConfig", "dit.models.wan.model:Wan"),
    "z_image": Entry("dit.models.z_image.config:ZImageConfig", "dit.models.streams.model:Streams"),
}


def _load(path: str) -> Any:
    module, _, name = path.partition(":")
    return getattr(import_module(module), name)


def config_class(name: str) -> type[ModelConfig]:
    """Return the settings class of a backbone of `BACKBONES`."""
    return _load(BACKBONES[name].config)


def build_backbone(config: ModelConfig, provider: LayerProvider, attention: Attention, stage: Stage) -> Backbone:
    """Build one stage of a backbone, with its adapters.

    Args:
        config: settings; their class, or its nearest base class in `BACKBONES`, selects the backbone.
        provider: builds the parallel linears of this rank.
        attention: the attention of this run.
    """
    models = {entry.config: entry.model for entry in BACKBONES.values()}
    paths = [f"{kind.__module__}:{kind.__qualname__}" for kind in type(config).__mro__]
    path = config.model_path or next((models[path] for path in paths if path in models), None)
    if path is None:
        raise ConfigError(
            f"{paths[0]} is not listed in dit/models/registry.py ({', '.join(BACKBONES)}); add a line with its "
            "network, or set `model_path` in the class"
        )
    backbone: Backbone = _load(path)(config, provider, attention, stage)
    if config.adapters is not None:
        add_adapters(backbone, config.adapters, provider)
    return backbone
