"""Low-rank adapters (LoRA) on the linear layers of any backbone.

An adapter is two linears, `lora_A` and `lora_B`, as submodules of the layer that it changes. The names of the layer's
parameters do not change, so weights of the base model load under their saved names:

    layers.0.attention.linear_qkv.weight            frozen
    layers.0.attention.linear_qkv.lora_A.weight     [rank, in], uniform in +-1 / sqrt(in)
    layers.0.attention.linear_qkv.lora_B.weight     [out, rank], zeros: the first prediction is the base model's

`dit.backends.sharding.adapter_shardings` returns their shardings.
"""

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor

from dit.backends.provider import LayerProvider
from dit.errors import ConfigError
from dit.models.base import Backbone
from dit.models.lora_config import LoRAConfig

A_WEIGHT, B_WEIGHT = ".lora_A.weight", ".lora_B.weight"
UNUSED_FORWARD = "*.router"
"""Linears whose weight is used without calling `forward`, so an adapter would have no effect."""


def add_adapters(backbone: Backbone, lora: LoRAConfig, provider: LayerProvider) -> None:
    """Add an adapter to every linear layer that matches a pattern, and freeze all other parameters."""
    linears = {
        name: module
        for name, module in backbone.named_modules()
        if provider.is_linear(module) and not fnmatchcase(name, UNUSED_FORWARD)
    }
    backbone.requires_grad_(False)
    targets = [layer for name, layer in linears.items() if any(fnmatchcase(name, p) for p in lora.targets)]
    if not targets and len(backbone.stage.layers) == backbone.config.num_layers:  # a pipeline stage may have none
        raise ConfigError(
            f"model.lora.targets={lora.targets} matches no linear layer of {type(backbone).__name__}, so there is "
            f"nothing to train; its linear layers are {', '.join(linears) or 'none'}"
        )
    for layer in targets:
        layer.lora_A, layer.lora_B = provider.adapter(layer, lora.rank)
        layer.lora_scale = lora.scale
        layer.register_forward_hook(_add_low_rank)


def _add_low_rank(layer: Any, args: tuple[Tensor], output: Tensor) -> Tensor:
    """Add (alpha / rank) B A x to the output W x of a layer."""
    return output + layer.lora_scale * layer.lora_B(layer.lora_A(args[0]))


@torch.no_grad()
def merge_adapters(base: Mapping[str, Tensor], adapters: Mapping[str, Tensor], lora: LoRAConfig) -> dict[str, Tensor]:
    """Return W + (alpha / rank) B A for every weight with an adapter, and the other parameters unchanged."""
    merged = dict(base)
    for layer, (a, b) in adapter_pairs(adapters).items():
        merged[f"{layer}.weight"] = base[f"{layer}.weight"] + lora.scale * (b @ a)
    return merged


def adapter_pairs(adapters: Mapping[str, Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
    """Return A `[rank, in]` and B `[out, rank]` by the name of their layer."""
    layers = [name.removesuffix(A_WEIGHT) for name in adapters if name.endswith(A_WEIGHT)]
    return {layer: (adapters[layer + A_WEIGHT], adapters[layer + B_WEIGHT]) for layer in layers}
