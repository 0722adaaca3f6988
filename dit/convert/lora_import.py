"""Adapters (LoRA) that were made elsewhere, as adapters beside our linear layers: the way back of `dit.convert.lora`.

    peft        adapter_config.json, adapter_model.safetensors   base_model.model.LAYER.lora_A.weight
    diffusers   pytorch_lora_weights.safetensors                 transformer.LAYER.lora_A.weight, unet.LAYER...
    kohya-ss    one file                                         lora_unet_LAYER_.lora_down.weight, .alpha
    ComfyUI     one file                                         diffusion_model.NATIVE_LAYER.lora_down.weight, .alpha

Ours is one adapter where theirs are several, of queries, keys and values for instance. Their A are stacked, and their B
stand beside zeros; equal A, as our export writes, are one:

    A = [A_q; A_v]    B = [B_q 0; 0 0; 0 B_v]    rank 2 r, no adapter of the keys

The scale alpha / rank of each layer is multiplied into its B. All of ours have the largest rank. One of smaller rank
gets random rows of A and zeros of B, as a new adapter has, which change nothing and can be trained.

Source: as `dit.convert.lora`; peft 0.21, `rank_pattern`, `alpha_pattern` and `use_rslora` of `adapter_config.json`.
"""

import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Optional

import torch
from torch import Tensor

from dit.convert.diffusers_format import DiffusersFormat
from dit.convert.lora import DIFFUSERS_FILE, PEFT_CONFIG, PEFT_FILE, PEFT_PREFIX, WEIGHT, Adapter
from dit.convert.rules import Pointwise, Rule, RuleBook, Shape, check_numbers, some_of
from dit.convert.state_files import read_json, read_metadata, read_tensors
from dit.errors import ConfigError
from dit.models.base import ModelConfig
from dit.models.lora import A_WEIGHT, B_WEIGHT
from dit.models.lora_config import LoRAConfig
from dit.safe_files import parse_json

METADATA_KEY = "lora_adapter_metadata"
"""Entry of the header of diffusers' files, with the settings of peft."""
A_NAMES, B_NAMES = (
    (".lora_A.weight", ".lora_A.default.weight", ".lora_down.weight", ".lora.down.weight"),
    (".lora_B.weight", ".lora_B.default.weight", ".lora_up.weight", ".lora.up.weight"),
)
ALPHA = ".alpha"
OTHER_KINDS = {
    "DoRA": ("dora_scale", "lora_magnitude_vector"),
    "LoHa or LoKr": ("hada_w", "lokr_w"),
    "adapters of three matrices": ("lora_mid",),
    "biases": ("lora_bias", ".bias"),
}
"""Kinds of adapters that ours are not, by parts of names of their tensors."""
TEXT_ENCODERS = re.compile(r"(lora_te\d?_|text_encoders?[._\d]|te\d?\.)")


@dataclass(frozen=True)
class ImportedAdapters:
    """Adapters beside our layers.

    Attributes:
        config: rank and layers.
        tensors: A and B by our global names, float32.
        notes: what was read and left out, in a sentence each.
    """

    config: LoRAConfig
    tensors: dict[str, Tensor]
    notes: list[str]


def read_adapters(
    path: Path,
    form: DiffusersFormat[ModelConfig],
    model: ModelConfig,
    rules: RuleBook,
    linears: Collection[str],
) -> ImportedAdapters:
    """Read adapters made elsewhere for a model.

    Args:
        path: a `.safetensors` file, or a folder of peft or diffusers.
        form: of the model in diffusers.
        model: the base, without adapters.
        rules: between the weights of the two.
        linears: our layers that can have an adapter.

    Raises:
        ConfigError: the files cannot be read, belong to another model, or have adapters that ours cannot be.
    """
    file, settings = _files(path, form.part)
    pairs = _pairs(read_tensors(file), settings, file)
    texts = [stem for stem in pairs if TEXT_ENCODERS.match(stem)]
    theirs = _by_layer({stem: pair for stem, pair in pairs.items() if stem not in texts}, form, model, rules, file)
    if not theirs:
        raise ConfigError(f"{file} has no adapter of {form.class_name}; check that it belongs to --base")
    ours = _join_all(theirs, rules, linears)
    ranks = {layer: len(adapter.a) for layer, adapter in ours.items()}
    rank = max(ranks.values())
    config = LoRAConfig(rank=rank)
    if {layer for layer in linears if any(fnmatchcase(layer, target) for target in config.targets)} != set(ours):
        config.targets = sorted(ours)
    notes = [f"read adapters of {len(theirs)} layers of {form.class_name}: rank {rank} beside {len(ours)} layers here"]
    if min(ranks.values()) < rank:
        notes.append(f"adapters of smaller rank, down to {min(ranks.values())}, are filled up to rank {rank} by zeros")
    if texts:
        notes.append(f"{len(texts)} adapters of a text encoder are left out ({some_of(texts)}): it stays as it is")
    generator = torch.Generator().manual_seed(0)
    tensors: dict[str, Tensor] = {}
    for layer, adapter in ours.items():
        a, b = _filled(adapter, rank, generator)
        tensors |= {layer + A_WEIGHT: a, layer + B_WEIGHT: b}
    return ImportedAdapters(config, tensors, notes)


def _files(path: Path, part: str) -> tuple[Path, dict[str, Any]]:
    """Return the file with the tensors, and the settings of peft that belong to it."""
    file = path
    if path.is_dir():
        found = [path / name for name in (PEFT_FILE, DIFFUSERS_FILE) if (path / name).is_file()]
        found = found or sorted(path.glob("*.safetensors"))
        if not found:
            raise ConfigError(f"{path} holds neither {PEFT_FILE}, {DIFFUSERS_FILE} nor another .safetensors file")
        file = found[0]
    if file.name == PEFT_FILE:
        return file, read_json(file.with_name(PEFT_CONFIG))
    text = read_metadata(file).get(METADATA_KEY) if file.is_file() else None
    settings = {} if text is None else parse_json(text)
    if not isinstance(settings, dict):
        raise ConfigError(f"{file}: its {METADATA_KEY} is {settings!r:.80} and not settings by name; save it again")
    return file, {name.removeprefix(f"{part}."): value for name, value in settings.items()}


def _pairs(tensors: Mapping[str, Tensor], settings: Mapping[str, Any], file: Path) -> dict[str, Adapter]:
    """Return the adapters of a file by their layers' names there, of scale 1.

    Raises:
        ConfigError: they are of another kind, incomplete, or not of numbers.
    """
    for kind, words in OTHER_KINDS.items():
        if odd := [name for name in tensors if any(word in name for word in words)]:
            raise ConfigError(f"{file} has {kind} ({some_of(odd)}); only LoRA of two matrices is read")
    if settings.get("use_dora"):
        raise ConfigError(f"{file} has DoRA (use_dora in its settings); only LoRA of two matrices is read")
    found: dict[str, dict[str, Tensor]] = {}
    endings = {**dict.fromkeys(A_NAMES, "a"), **dict.fromkeys(B_NAMES, "b"), ALPHA: "alpha"}
    unknown = []
    for name, tensor in tensors.items():
        check_numbers(name, tensor)
        ending = next((ending for ending in endings if name.endswith(ending)), None)
        if ending is None:
            unknown.append(name)
        else:
            found.setdefault(name.removesuffix(ending), {})[endings[ending]] = tensor.float()
    incomplete = [stem for stem, parts in found.items() if not {"a", "b"} <= parts.keys()]
    if unknown or incomplete:
        what = f"{some_of(unknown)} are no tensors of LoRA" if unknown else f"{some_of(incomplete)} lack A or B"
        raise ConfigError(f"{file}: {what}; names end in {', '.join((*A_NAMES, *B_NAMES, ALPHA))}")
    adapters = {}
    for stem, parts in found.items():
        a, b, alpha = parts["a"], parts["b"], parts.get("alpha")
        if a.dim() != b.dim() or a.dim() not in (2, 4) or a.shape[0] != b.shape[1] or 0 in (*a.shape, *b.shape):
            raise ConfigError(f"{file}: {stem} has A {list(a.shape)} and B {list(b.shape)}, which have no product")
        if alpha is not None and alpha.numel() != 1:
            raise ConfigError(f"{file}: alpha of {stem} is {list(alpha.shape)}, not one number")
        scale = _scale(stem, len(a), settings) if alpha is None else float(alpha) / len(a)
        adapters[stem] = Adapter(a, b if scale == 1 else scale * b)
    return adapters


def _scale(stem: str, rank: int, settings: Mapping[str, Any]) -> float:
    """Return alpha / rank of a layer by the settings of peft; 1 if there are none."""
    alpha = settings.get("lora_alpha", rank)
    patterns = settings.get("alpha_pattern") or {}
    if not isinstance(patterns, dict):
        raise ConfigError(f"the settings of the adapters have alpha_pattern={patterns!r:.40}, not numbers by layer")
    for key, value in patterns.items():
        # A pattern may be any regular expression, and that of a stranger may take forever: names only.
        name = str(key).removeprefix("^").removesuffix("$").replace("\\.", ".")
        if not re.fullmatch(r"[\w.-]+", name):
            raise ConfigError(
                f"the settings of the adapters have alpha_pattern {key!r:.60}; only names of layers are read"
            )
        if f".{stem}".endswith(f".{name}"):
            alpha = value
            break
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not math.isfinite(alpha):
        raise ConfigError(f"the settings of the adapters have alpha={alpha!r:.40} for {stem}, which is no number")
    return float(alpha) / (math.sqrt(rank) if settings.get("use_rslora") else rank)


def _by_layer(
    pairs: Mapping[str, Adapter], form: DiffusersFormat[ModelConfig], model: ModelConfig, rules: RuleBook, file: Path
) -> dict[str, Adapter]:
    """Return adapters by diffusers' names of the layers, those of fused layers split.

    Raises:
        ConfigError: a layer is not of the model, or of another size.
    """
    shapes = {name.removesuffix(WEIGHT): s for name, s in rules.their_shapes().items() if name.endswith(WEIGHT)}
    names = layer_names(form, model, list(shapes))
    if unknown := [stem for stem in pairs if stem not in names]:
        raise ConfigError(
            f"{file}: {len(unknown)} of {len(pairs)} layers are not of {form.class_name} ({some_of(unknown)}); check "
            "that adapters and --base belong together"
        )
    found: dict[str, Adapter] = {}
    for stem, pair in pairs.items():
        layers = names[stem]
        if len(layers) > 1 and pair.b.shape[0] != sum(shapes[layer][0] for layer in layers):
            raise ConfigError(f"{file}: B of {stem} has {pair.b.shape[0]} rows, not those of {', '.join(layers)}")
        rows = [shapes[layer][0] for layer in layers] if len(layers) > 1 else [len(pair.b)]
        for layer, b in zip(layers, pair.b.split(rows), strict=True):
            _check_sizes(f"{file}: {stem}", Adapter(pair.a, b), shapes[layer])
            found[layer] = Adapter(pair.a, b)
    return found


def _check_sizes(what: str, adapter: Adapter, shape: Shape) -> None:
    if len(shape) == 4 and tuple(shape[2:]) != (1, 1):
        raise ConfigError(f"{what} is beside a convolution of {shape[2]} x {shape[3]}; only linear layers are adapted")
    if (adapter.b.shape[0], adapter.a.shape[1]) != tuple(shape[:2]) or adapter.a.dim() != len(shape):
        got = f"A {list(adapter.a.shape)} and B {list(adapter.b.shape)}"
        raise ConfigError(f"{what} has {got}, and the weight of the base is {list(shape)}; check --base")


def layer_names(
    form: DiffusersFormat[ModelConfig], model: ModelConfig, layers: Sequence[str]
) -> dict[str, tuple[str, ...]]:
    """Return diffusers' layers by every name that a file may have for them; fused layers of other code are several."""
    names: dict[str, tuple[str, ...]] = {}
    for layer in layers:
        flat = layer.replace(".", "_")
        same = ["", f"{form.part}.", f"{PEFT_PREFIX}.", "diffusion_model."]
        others = [f"lora_unet_{flat}", f"lora_transformer_{flat}", *form.other_names(layer, model)]
        names |= dict.fromkeys([*(prefix + layer for prefix in same), *others], (layer,))
    fused: dict[str, list[str]] = {}
    for layer in layers:
        native = form.comfyui_name(layer)
        if native is not None and native.startswith("diffusion_model."):
            fused.setdefault(native.removeprefix("diffusion_model."), []).append(layer)
    for native, parts in fused.items():
        for name in (native, f"diffusion_model.{native}", f"lora_unet_{native.replace('.', '_')}"):
            names[name] = tuple(parts)
    return names


def _join_all(theirs: Mapping[str, Adapter], rules: RuleBook, linears: Collection[str]) -> dict[str, Adapter]:
    """Return the adapters of our layers by name.

    Raises:
        ConfigError: a layer of theirs is none that has an adapter here.
    """
    found: dict[str, Adapter] = {}
    shapes = rules.their_shapes()
    for rule in rules.rules:
        parts = [theirs.get(name.removesuffix(WEIGHT)) for name in rule.theirs]
        if not any(parts):
            continue
        layer = rule.ours.removesuffix(WEIGHT)
        if layer not in linears or rule.form.axis is None:
            raise ConfigError(
                f"the adapter of {rule.theirs[0].removesuffix(WEIGHT)} has no counterpart: {layer} is no linear layer "
                "with an adapter here"
            )
        try:
            found[layer] = _joined(rule, parts, [shapes[name][0] for name in rule.theirs])
        except ConfigError as error:
            raise ConfigError(f"the adapters of {', '.join(rule.theirs)} cannot be one of {layer}: {error}") from error
    return found


def _joined(rule: Rule, parts: Sequence[Optional[Adapter]], outputs: Sequence[int]) -> Adapter:
    """Return one adapter with the products of several, in our form.

    Args:
        parts: of each layer of theirs; None for none.
        outputs: features of each.
    """
    [first, *_] = present = [part for part in parts if part is not None]
    if isinstance(rule.form, Pointwise):
        return Adapter(rule.form.to_ours([first.a]), rule.form.to_ours([first.b]))
    if rule.form.axis == 1:
        return Adapter(rule.form.to_ours([first.a]), first.b)
    different: list[Tensor] = []
    for adapter in present:
        if not any(torch.equal(adapter.a, other) for other in different):
            different.append(adapter.a)
    columns = [[torch.zeros(size, len(a)) for a in different] for size in outputs]
    for part, own in zip(parts, columns, strict=True):
        if part is not None:
            own[next(i for i, a in enumerate(different) if torch.equal(part.a, a))] = part.b
    return Adapter(torch.cat(different), rule.form.to_ours([torch.cat(own, 1) for own in columns]))


def _filled(adapter: Adapter, rank: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return A and B of a rank, with rows of A as a new adapter has them, and columns of zeros of B."""
    missing, inputs = rank - len(adapter.a), adapter.a.shape[1]
    bound = 1 / math.sqrt(inputs)
    rows = torch.empty(missing, inputs).uniform_(-bound, bound, generator=generator)
    return torch.cat([adapter.a, rows]), torch.cat([adapter.b, adapter.b.new_zeros(len(adapter.b), missing)], 1)
