"""Import checkpoints of NVIDIA NeMo's Imagen into our regular UNet and Efficient UNet.

Differences of NeMo's networks: other names; convolutions of size 1 instead of linear layers; q, k and v of
self-attention in one tensor; a separate bias of the attention pooling's score; the first convolution of the regular
UNet is stored twice, because two modules share it.

Source: NVIDIA NeMo 2.0, `nemo/collections/multimodal/modules/imagen` and `models/text_to_image/imagen`, names.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Optional

import torch
from torch import Tensor

from dit.convert.rules import Axes, Copies, Form, Pointwise, Rule, RuleBook, Same, Shape
from dit.convert.state_files import read_nemo, read_tensors
from dit.errors import ConfigError
from dit.models.efficient_unet.config import EfficientUNetConfig
from dit.models.imagen_config import ImagenConfig

PLACE = re.compile(r"(?:(?:model\.)?(?:module\.)?model\.)?unet\.")
"""Prefix of the network in NeMo's Lightning module, with or without the wrapper for half precision."""
COMPILED = "_orig_mod."
"""Part of the names in a network that torch.compile wraps."""
TEXT_ENCODER = "text_encoder."
"""Prefix of T5's weights, which the `.nemo` file of a run with online encoding also has."""
Q, KV = " (q)", " (k, v)"
"""Suffixes of the names of the two parts of a fused q, k and v."""
CKPT_CURE = (
    "a .ckpt of NeMo has the settings as objects: give the .nemo of the run, or, if you trust the file, write the "
    "weights in NeMo's environment by torch.save(torch.load(FILE, weights_only=False)['state_dict'], 'weights.pt')"
)

MODULES = {
    "time.frequencies": "time_embed.0.weights",
    "time.linear_1": "time_embed.1",
    "time.linear_2": "time_embed.3",
    "augmentation.frequencies": "lowres_time_embed.0.weights",
    "augmentation.linear_1": "lowres_time_embed.1",
    "augmentation.linear_2": "lowres_time_embed.3",
    "caption.to_tokens": "text_to_cond",
    "caption.pooling.norm": "attention_pooling.1",
    "caption.pooling.to_out": "attention_pooling.2",
    "caption.norm": "to_text_non_attn_cond.0",
    "caption.linear_1": "to_text_non_attn_cond.1",
    "caption.linear_2": "to_text_non_attn_cond.3",
    "caption.null_token": "null_text_embedding",
}
"""Names of modules outside of the levels: ours, NeMo's."""
BLOCK = {
    "branch.norm_1": "in_layers.0",
    "branch.resample": "h_upd.conv",
    "branch.convolution_1": "in_layers.2",
    "branch.vector": "emb_layers.1",
    "branch.norm_2": "out_layers.0",
    "branch.convolution_2": "out_layers.3",
    "resample": "x_upd.conv",
    "shortcut": "skip_connection",
}
"""Modules of a residual block of the regular UNet."""
EFFICIENT_BLOCK = {**BLOCK, "branch.convolution_2": "out_layers.2", "shortcut": "shortcut"}
ATTENTION = {
    "self": {"norm": "norm", "to_q": f"qkv{Q}", "to_kv": f"qkv{KV}", "to_out": "proj_out"},
    "cross": {
        **{"norm": "norm", "norm_context": "norm_context", "to_q": "q", "context_to_kv": "kv", "to_out": "proj_out"},
    },
    "fused": {
        **{"norm": "norm", "norm_kv": "norm_self", "norm_context": "norm_context", "to_q": "q", "to_kv": "kv_self"},
        **{"context_to_kv": "kv_context", "to_out": "proj_out"},
    },
}
"""Modules of each kind of attention; in NeMo all except the norms are convolutions."""
STACKED = {
    "norm": "norm",
    "to_inner": "proj_in",
    **{f"self_attention.{name}": f"self_attention_block.{nemo}" for name, nemo in ATTENTION["self"].items()},
    **{f"cross_attention.{name}": f"cross_attention_block.{nemo}" for name, nemo in ATTENTION["cross"].items()},
    "feed_forward.norm": "ff.norm",
    "feed_forward.linear_1": "ff.net.0.proj",
    "feed_forward.linear_2": "ff.net.2",
    "to_out": "proj_out",
}
"""Modules of a block of stacked attention."""


@dataclass(frozen=True)
class BiasColumn:
    """A linear layer with its bias in the last column, from separate external weight and bias."""

    axis: ClassVar[Optional[int]] = None

    def from_external(self, tensors: Sequence[Tensor]) -> Tensor:
        weight, bias = tensors
        return torch.cat([weight, bias[:, None]], 1)

    def to_external(self, parameter: Tensor) -> Sequence[Tensor]:
        return parameter[:, :-1], parameter[:, -1]


def read(path: Path) -> tuple[Any, dict[str, Tensor], list[str]]:
    """Read a checkpoint.

    Returns:
        Its settings (None if the file has none); the tensors by their names in the network, with fused q, k and v
        split; and notes about omitted tensors.
    """
    settings, stored = read_nemo(path) if path.suffix == ".nemo" else (None, read_tensors(path, CKPT_CURE))
    encoder = [name for name in stored if name.startswith(TEXT_ENCODER)]
    notes = [f"{len(encoder)} tensors of the text encoder are left out"] if encoder else []
    tensors: dict[str, Tensor] = {}
    for name, tensor in stored.items():
        if name in encoder:
            continue
        plain = name.replace(COMPILED, "")
        place = PLACE.match(plain)
        for part, values in _parts(plain[place.end() :] if place else plain, tensor):
            if part in tensors:
                raise ConfigError(
                    f"{path} has {part} twice, the second time as {name}; save one network's state_dict()"
                )
            tensors[part] = values
    return settings, tensors, notes


def _parts(name: str, tensor: Tensor) -> list[tuple[str, Tensor]]:
    """Return a tensor by its name, or the two parts of a fused q, k and v."""
    module, _, kind = name.rpartition(".")
    if not module.endswith("qkv") or not tensor.dim() or len(tensor) % 3:
        return [(name, tensor)]
    third = len(tensor) // 3
    return [(f"{module}{Q}.{kind}", tensor[:third]), (f"{module}{KV}.{kind}", tensor[third:])]


def rules(model: ImagenConfig, shapes: Mapping[str, Shape]) -> RuleBook:
    """Return the rules between the weights."""
    efficient = isinstance(model, EfficientUNetConfig)
    return RuleBook(shapes, [_rule(name, model, shapes, efficient=efficient) for name in shapes])


def _rule(name: str, model: ImagenConfig, shapes: Mapping[str, Shape], *, efficient: bool) -> Rule:
    if name == "caption.pooling.to_score":
        return Rule(name, ("attention_pooling.0.W.weight", "attention_pooling.0.W.bias"), BiasColumn())
    if name in MODULES:
        return Rule(name, (MODULES[name],), Axes("1 1 d -> d") if name == "caption.null_token" else Same())
    module, _, kind = name.rpartition(".")
    if module == "first" and not efficient:
        return Rule(name, (f"init_conv.0.{kind}", f"input_blocks.0.0.{kind}"), Copies(2))
    nemo = MODULES.get(module) or (_efficient(module, model) if efficient else _regular(module, model, shapes))
    return Rule(name, (f"{nemo}.{kind}",), _form(module, kind, model))


def _form(module: str, kind: str, model: ImagenConfig) -> Form:
    """Return the form of a tensor; NeMo's linear layers of attention are convolutions over tokens or pixels."""
    inner = module.partition("attention.inner.")[2]
    layer = inner.rpartition(".")[2]
    if kind == "bias" or not layer.startswith(("to_", "context_to_")):
        return Same()
    return Pointwise() if model.attention_type == "stacked" and layer == inner else Axes("o i 1 -> o i")


def _attention(module: str, model: ImagenConfig) -> str:
    table = STACKED if model.attention_type == "stacked" else ATTENTION[model.attention_type]
    return table[module.removeprefix("inner.")]


def _regular(module: str, model: ImagenConfig, shapes: Mapping[str, Shape]) -> str:
    match = re.fullmatch(r"(down|middle|up)\.(\d+)\.(block|attention|resample)\.(.+)", module)
    if match is None:
        return {"norm": "out.0", "last": "out.2"}[module]
    way, number, part, layer = match[1], int(match[2]), match[3], match[4]
    attends = f"{way}.{number}.attention.inner.norm.weight" in shapes
    place = {
        "down": f"input_blocks.{number + 1}.{part == 'attention':d}",
        "middle": f"middle_block.{2 * number + (part == 'attention')}",
        "up": f"output_blocks.{number}.{(part != 'block') + (part == 'resample' and attends)}",
    }[way]
    if part == "attention":
        return f"{place}.{_attention(layer, model)}"
    if layer == "convolution":
        return f"{place}.{'op' if way == 'down' else 'conv'}"
    return f"{place}.{BLOCK[layer]}"


def _efficient(module: str, model: ImagenConfig) -> str:
    match = re.fullmatch(r"(down|up)\.(\d+)\.(before|after|attention|blocks\.\d+)\.?(.*)", module)
    if match is None:
        return {"first": "init_conv", "last": "out"}[module]
    level = f"{'DBlocks' if match[1] == 'down' else 'UBlocks'}.{match[2]}"
    if match[3] == "attention":
        return f"{level}.attention_layer.{_attention(match[4], model)}"
    return f"{level}.{match[3]}.{EFFICIENT_BLOCK[match[4]]}" if match[4] else f"{level}.conv"
