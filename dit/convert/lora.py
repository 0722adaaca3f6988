"""Export adapters (LoRA) to diffusers, peft and ComfyUI.

One of our linear layers corresponds to one or several external layers, by the rules of its weight. A rule that
rearranges outputs is applied to B, one that rearranges inputs to A, so that every product B A is exact:

    this project  layers.0.attention.linear_qkv     A [r, D]   B [3 D, r], by head
    diffusers     transformer_blocks.0.attn.to_q    A [r, D]   B [D, r], the rows of all queries
                  transformer_blocks.0.attn.to_k    A          B [D, r], the rows of all keys
                  transformer_blocks.0.attn.to_v    A          B [D, r]
    ComfyUI       double_blocks.0.img_attn.qkv      A          B [3 D, r], by part

B is multiplied by alpha / rank, so that the scale is 1 (alpha = rank) in every loader.

Source: huggingface/peft 0.21; diffusers 0.38; ComfyUI, `comfy/lora.py` (`diffusion_model.` and the name of the layer in
the original code; for UNets `lora_unet_` and diffusers' name with underscores, as in kohya-ss/sd-scripts) and
`comfy/weight_adapter/lora.py`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Optional

import torch
from torch import Tensor

from dit.convert.diffusers_format import DiffusersFormat
from dit.convert.diffusers_pipeline import pipeline_class
from dit.convert.diffusers_sampling import PAGE
from dit.convert.rules import Rule, RuleBook
from dit.convert.state_files import to_json, write_tensors, written_atomically
from dit.errors import ConfigError
from dit.models.base import ModelConfig
from dit.models.lora import adapter_pairs

DIFFUSERS_FILE, PEFT_FILE, PEFT_CONFIG = (
    "pytorch_lora_weights.safetensors",
    "adapter_model.safetensors",
    "adapter_config.json",
)
PEFT_PREFIX = "base_model.model"
WEIGHT = ".weight"


@dataclass(frozen=True)
class Adapter:
    """The adapter of an external linear layer with scale 1: the layer's weight is W + B A."""

    a: Tensor
    b: Tensor


def to_external_layers(rules: RuleBook, adapters: Mapping[str, Tensor], scale: float) -> dict[str, Adapter]:
    """Return the adapters of external linear layers by name, in the order of the rules."""
    by_weight = {rule.name: rule for rule in rules.rules}
    split_adapters: dict[str, Adapter] = {}
    for layer, (a, b) in adapter_pairs(adapters).items():
        rule = by_weight.get(layer + WEIGHT)
        if rule is None:
            raise ConfigError(f"the adapter of {layer} has no counterpart; train without it (model.lora.targets)")
        split_adapters |= _split(layer, rule, a, scale * b)
    return split_adapters


def _split(layer: str, rule: Rule, a: Tensor, b: Tensor) -> dict[str, Adapter]:
    if rule.form.axis is None:
        external = rule.external_names[0].removesuffix(WEIGHT)
        raise ConfigError(
            f"the adapter of {layer} cannot be an adapter of {external}, because the weight has another layout; train "
            "without it (model.lora.targets)"
        )
    names = [name.removesuffix(WEIGHT) for name in rule.external_names]
    if rule.form.axis == 0:
        parts = rule.form.to_external(b)
        a = a[:, :, None, None] if parts[0].dim() == 4 else a  # both are convolutions of 1 x 1
        return {name: Adapter(a, part) for name, part in zip(names, parts, strict=True)}
    return {name: Adapter(part, b) for name, part in zip(names, rule.form.to_external(a), strict=True)}


def write_adapter_folder(
    layers: Mapping[str, Adapter], form: DiffusersFormat[ModelConfig], model: ModelConfig, out: Path
) -> None:
    """Write adapter files for diffusers and peft, and a page with loading instructions, to a new folder."""
    rank = len(next(iter(layers.values())).a)
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": sorted(layers)}
    with written_atomically(out) as part:
        part.mkdir(parents=True, exist_ok=True)
        for name, prefix in ((DIFFUSERS_FILE, form.part), (PEFT_FILE, PEFT_PREFIX)):
            tensors = {}
            for layer, adapter in layers.items():
                tensors[f"{prefix}.{layer}.lora_A.weight"] = adapter.a.contiguous().clone()
                tensors[f"{prefix}.{layer}.lora_B.weight"] = adapter.b.contiguous().clone()
            write_tensors(tensors, part / name)
        (part / PEFT_CONFIG).write_text(to_json(config), encoding="utf-8")
        (part / PAGE).write_text(adapter_page(form, model), encoding="utf-8")


def comfyui_tensors(layers: Mapping[str, Adapter], name_of: Callable[[str], Optional[str]]) -> dict[str, Tensor]:
    """Return the tensors of a file for ComfyUI.

    Args:
        name_of: returns ComfyUI's name of a layer of diffusers, or None; layers with the same name are stacked.
    """
    names = {layer: name_of(layer) for layer in layers}
    joined: dict[str, list[Adapter]] = {}
    for layer, name in names.items():
        if name is None:
            cure = "train without it (model.lora.targets)" if any(names.values()) else "use --format diffusers-lora"
            raise ConfigError(f"ComfyUI's name of {layer} is not known; {cure}")
        joined.setdefault(name, []).append(layers[layer])
    tensors = {}
    for name, adapters in joined.items():
        a, b = adapters[0].a, torch.cat([adapter.b for adapter in adapters])
        tensors[f"{name}.lora_down.weight"] = a.contiguous().clone()
        tensors[f"{name}.lora_up.weight"] = b
        tensors[f"{name}.alpha"] = torch.tensor(float(len(a)))
    return tensors


def adapter_page(form: DiffusersFormat[ModelConfig], model: ModelConfig) -> str:
    """Return the README page of a folder with adapters, in Markdown, with loading instructions."""
    name, part, pipeline = form.class_name, form.part, pipeline_class(form, model)
    ways = [
        f'from diffusers import {name}\nfrom peft import PeftModel\n\n{part} = {name}.from_pretrained("BASE", '
        f'subfolder="{part}")\n{part} = PeftModel.from_pretrained({part}, "THIS_FOLDER").merge_and_unload()\n'
    ]
    if pipeline is not None and pipeline.reads_adapters:
        ways.insert(
            0,
            f'from diffusers import {pipeline.class_name}\n\npipeline = {pipeline.class_name}.from_pretrained("BASE")\n'
            f'pipeline.load_lora_weights("THIS_FOLDER", weight_name="{DIFFUSERS_FILE}")\n',
        )
    code = "\nor\n\n".join(f"```python\n{way}```\n" for way in ways)
    end = "BASE is the model that the adapters were trained for. Their scale is 1. peft must be installed."
    return f"# Adapters (LoRA) of {name}, exported by megatron-dit\n\n{code}\n{end}\n"
