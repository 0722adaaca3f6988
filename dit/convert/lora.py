"""Adapters (LoRA) under the names of other code bases, as their loaders read them.

Each of our linear layers is one or several of theirs, by the rules of its weight (`dit.convert.rules`). A rule that
rearranges outputs is applied to B, one that rearranges inputs to A, so that every product B A is exact:

    ours     layers.0.attention.linear_qkv     A [r, D]   B [3 D, r], by head
    theirs   transformer_blocks.0.attn.to_q    A [r, D]   B [D, r], the rows of all queries
             transformer_blocks.0.attn.to_k    A          B [D, r], the rows of all keys
             transformer_blocks.0.attn.to_v    A          B [D, r]
    ComfyUI  double_blocks.0.img_attn.qkv      A          B [3 D, r], part after part

alpha / rank is multiplied into B, so that the scale is 1 (alpha = rank) in every loader.

Source: huggingface/peft, names `lora_A` and `lora_B`; diffusers 0.38, `pytorch_lora_weights.safetensors` with the
prefix `transformer.`; ComfyUI, `comfy/lora.py` (`diffusion_model.` and the name of the model's own layer) and
`comfy/weight_adapter/lora.py` (`lora_down`, `lora_up`, `alpha`).
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dit.convert.rules import Rule, RuleBook
from dit.errors import ConfigError
from dit.models.lora import adapter_pairs

DIFFUSERS_FILE = "pytorch_lora_weights.safetensors"
WEIGHT = ".weight"


@dataclass(frozen=True)
class Adapter:
    """The adapter of one of their linear layers, of scale 1: its weight is W + B A."""

    a: Tensor
    b: Tensor


def to_their_layers(rules: RuleBook, adapters: Mapping[str, Tensor], scale: float) -> dict[str, Adapter]:
    """Return the adapters of their linear layers by name, in the order of the rules.

    Args:
        rules: between the weights.
        adapters: A and B, by our global names.
        scale: alpha / rank.

    Raises:
        ConfigError: a layer has no counterpart, or one whose adapter is no product of two matrices.
    """
    by_weight = {rule.ours: rule for rule in rules.rules}
    found: dict[str, Adapter] = {}
    for layer, (a, b) in adapter_pairs(adapters).items():
        rule = by_weight.get(layer + WEIGHT)
        if rule is None:
            raise ConfigError(f"the adapter of {layer} has no counterpart there; train without it (model.lora.targets)")
        found |= _split(layer, rule, a, scale * b)
    return found


def _split(layer: str, rule: Rule, a: Tensor, b: Tensor) -> dict[str, Adapter]:
    if rule.form.axis is None:
        raise ConfigError(
            f"the adapter of {layer} cannot be one of {rule.theirs[0].removesuffix(WEIGHT)}, whose weight is arranged "
            "otherwise; train without it (model.lora.targets)"
        )
    names = [name.removesuffix(WEIGHT) for name in rule.theirs]
    if rule.form.axis == 0:
        return {name: Adapter(a, part) for name, part in zip(names, rule.form.to_theirs(b), strict=True)}
    return {name: Adapter(part, b) for name, part in zip(names, rule.form.to_theirs(a), strict=True)}


def diffusers_tensors(layers: Mapping[str, Adapter]) -> dict[str, Tensor]:
    """Return the tensors of diffusers' file."""
    tensors = {}
    for name, adapter in layers.items():
        tensors[f"transformer.{name}.lora_A.weight"] = adapter.a.clone()
        tensors[f"transformer.{name}.lora_B.weight"] = adapter.b.contiguous().clone()
    return tensors


def comfyui_tensors(layers: Mapping[str, Adapter], names: Sequence[tuple[str, str]]) -> dict[str, Tensor]:
    """Return the tensors of a file for ComfyUI.

    Args:
        layers: by diffusers' names.
        names: patterns of diffusers' names, and the names of the model's own layers; those of one name are stacked.

    Raises:
        ConfigError: a layer has no name there.
    """
    joined: dict[str, list[Adapter]] = {}
    for layer, adapter in layers.items():
        matches = ((re.fullmatch(pattern, layer), own) for pattern, own in names)
        own = next((match.expand(own) for match, own in matches if match), None)
        if own is None:
            raise ConfigError(f"ComfyUI's name of {layer} is not known here; train without it (model.lora.targets)")
        joined.setdefault(own, []).append(adapter)
    tensors = {}
    for own, adapters in joined.items():
        a, b = adapters[0].a, torch.cat([adapter.b for adapter in adapters])
        tensors[f"diffusion_model.{own}.lora_down.weight"] = a.clone()
        tensors[f"diffusion_model.{own}.lora_up.weight"] = b
        tensors[f"diffusion_model.{own}.alpha"] = torch.tensor(float(len(a)))
    return tensors
