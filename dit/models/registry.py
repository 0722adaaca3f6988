"""Backbones by name. Each has a line in `BACKBONES` with its settings and its network; several share `Streams`.

Classes are imported by name when needed, which avoids import cycles between configs and models.
"""

from importlib import import_module
from typing import Any

from dit.backends.provider import LayerProvider
from dit.errors import ConfigError
from dit.kernels.attention import Attention
from dit.models.base import Backbone, ModelConfig, Stage
from dit.models.lora import add_adapters

BACKBONES = {
    "autoencoder": ("autoencoder.config:AutoencoderConfig", "autoencoder.model:Autoencoder"),
    "chroma": ("streams.families:ChromaConfig", "streams.model:Streams"),
    "ddpm_unet": ("ddpm_unet.config:DDPMUNetConfig", "ddpm_unet.model:DDPMUNet"),
    "dit": ("dit.config:DiTConfig", "dit.model:DiT"),
    "dit_cross": ("dit_cross.config:DiTCrossConfig", "dit_cross.model:DiTCross"),
    "edm2_unet": ("edm2_unet.config:EDM2UNetConfig", "edm2_unet.model:EDM2UNet"),
    "efficient_unet": ("efficient_unet.config:EfficientUNetConfig", "efficient_unet.model:EfficientUNet"),
    "flux": ("flux.config:FluxConfig", "streams.model:Streams"),
    "flux2": ("streams.families:Flux2Config", "streams.model:Streams"),
    "hunyuan_video": ("hunyuan_video.config:HunyuanVideoConfig", "hunyuan_video.model:HunyuanVideo"),
    "ldm_unet": ("ldm_unet.config:LDMUNetConfig", "ldm_unet.model:LDMUNet"),
    "lumina2": ("streams.families:Lumina2Config", "streams.model:Streams"),
    "moviegen": ("moviegen.config:MovieGenConfig", "moviegen.model:MovieGen"),
    "prx": ("prx.config:PRXConfig", "prx.model:PRX"),
    "qwen_image": ("streams.families:QwenImageConfig", "streams.model:Streams"),
    "sana": ("sana.config:SanaConfig", "sana.model:Sana"),
    "sd3": ("streams.families:SD3Config", "streams.model:Streams"),
    "stdit": ("stdit.config:STDiTConfig", "stdit.model:STDiT"),
    "unet": ("unet.config:UNetConfig", "unet.model:UNet"),
    "wan": ("wan.config:WanConfig", "wan.model:Wan"),
    "z_image": ("streams.families:ZImageConfig", "streams.model:Streams"),
}
"""Import paths in `dit.models`, as `module:Class`: of the settings, and of the network, which is built from (config,
provider, attention, stage)."""


def _load(path: str) -> Any:
    module, _, name = path.partition(":")
    return getattr(import_module(module), name)


def config_class(name: str) -> type[ModelConfig]:
    """Return the settings class of a backbone of `BACKBONES`."""
    return _load(f"dit.models.{BACKBONES[name][0]}")


def build_backbone(config: ModelConfig, provider: LayerProvider, attention: Attention, stage: Stage) -> Backbone:
    """Build one stage of a backbone, with its adapters.

    Args:
        config: settings; their class, or its nearest base class in `BACKBONES`, selects the backbone.
    """
    models = {f"dit.models.{settings}": f"dit.models.{network}" for settings, network in BACKBONES.values()}
    paths = [f"{kind.__module__}:{kind.__qualname__}" for kind in type(config).__mro__]
    path = config.model_path or next((models[path] for path in paths if path in models), None)
    if path is None:
        raise ConfigError(
            f"{paths[0]} is not listed in dit/models/registry.py ({', '.join(BACKBONES)}); add a line with its "
            "network, or set `model_path` in the class"
        )
    backbone: Backbone = _load(path)(config, provider, attention, stage)
    backbone.sum_over_context_ranks = provider.sum_over_context_ranks
    if config.adapters is not None:
        add_adapters(backbone, config.adapters, provider)
    return backbone
