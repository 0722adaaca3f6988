"""Import adapters (LoRA) from peft, diffusers, kohya-ss and ComfyUI; the inverse of `dit.convert.lora`.

    peft        adapter_config.json, adapter_model.safetensors   base_model.model.LAYER.lora_A.weight
    diffusers   pytorch_lora_weights.safetensors                 transformer.LAYER.lora_A.weight, unet.LAYER...
    kohya-ss    one file                                         lora_unet_LAYER_.lora_down.weight, .alpha
    ComfyUI     one file                                         diffusion_model.NATIVE_LAYER.lora_down.weight, .alpha

One of our layers may correspond to several external layers, such as queries, keys and values. Their A are stacked, and
their B are blocks of a larger B; equal A, as in our exports, are stored once:

    A = [A_q; A_v]    B = [B_q 0; 0 0; 0 B_v]    rank 2 r, no adapter of the keys

B of each layer is multiplied by its alpha / rank. All our adapters have the largest rank. An adapter of smaller rank is
extended like a new adapter, by random rows of A and zeros of B, which change nothing and can be trained.

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
from dit.convert.rules import Rule, RuleBook, Shape, check_numbers
from dit.convert.state_files import read_json, read_metadata, read_tensors
from dit.errors import ConfigError, first_few
from dit.models.base import ModelConfig
from dit.models.lora import A_WEIGHT, B_WEIGHT
from dit.models.lora_config import LoRAConfig
from dit.safe_files import parse_json

METADATA_KEY = "lora_adapter_metadata"
"""Entry with the settings of peft in the header of diffusers' files."""
A_NAMES, B_NAMES = (
    (".lora_A.weight", ".lora_A.default.weight", ".lora_down.weight", ".lora.down.weight"),
    (".lora_B.weight", ".lora_B.default.weight", ".lora_up.weight", ".lora.up.weight"),
)
ALPHA = ".alpha"
OTHER_KINDS = {
    "DoRA": ("dora_scale", "lora_magnitude_vector", "use_dora"),
    "LoHa or LoKr": ("hada_w", "lokr_w"),
    "adapters of three matrices": ("lora_mid",),
    "biases": ("lora_bias", ".bias"),
}
"""Kinds of adapters that are not supported, by parts of the names of tensors, and by settings."""
CHANGE_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Initialisations of peft that subtract the first B A from the weights of the base."""
TEXT_ENCODERS = re.compile(r"(lora_te\d?_|text_encoders?[._\d]|te\d?\.)")


@dataclass(frozen=True)
class ImportedAdapters:
    """Imported adapters."""

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
    """Read external adapters for a model: of a `.safetensors` file, or of a folder of peft or diffusers.

    Args:
        model: the base, without adapters.
        linears: our layers that can have an adapter.
    """
    file, settings = _files(path, form.part)
    pairs = _pairs(read_tensors(file), settings, file)
    texts = [stem for stem in pairs if TEXT_ENCODERS.match(stem)]
    external = _by_layer({stem: pair for stem, pair in pairs.items() if stem not in texts}, form, model, rules, file)
    if not external:
        raise ConfigError(f"{file} has no adapter of {form.class_name}; check that it belongs to --base")
    adapters = _join_all(external, rules, linears)
    ranks = {layer: len(adapter.a) for layer, adapter in adapters.items()}
    rank = max(ranks.values())
    config = LoRAConfig(rank=rank)
    if {layer for layer in linears if any(fnmatchcase(layer, target) for target in config.targets)} != set(adapters):
        config.targets = sorted(adapters)
    notes = [f"read adapters of {len(external)} layers of {form.class_name}: rank {rank}, {len(adapters)} layers here"]
    if min(ranks.values()) < rank:
        notes.append(f"adapters of smaller rank, down to {min(ranks.values())}, are extended to rank {rank} by zeros")
    if texts:
        notes.append(f"{len(texts)} adapters of a text encoder are left out ({first_few(texts)}): it is not adapted")
    generator = torch.Generator().manual_seed(0)
    tensors: dict[str, Tensor] = {}
    for layer, adapter in adapters.items():
        a, b = _filled(adapter, rank, generator)
        tensors |= {layer + A_WEIGHT: a, layer + B_WEIGHT: b}
    return ImportedAdapters(config, tensors, notes)


def _files(path: Path, part: str) -> tuple[Path, dict[str, Any]]:
    file = path
    if path.is_dir():
        named = [path / name for name in (PEFT_FILE, DIFFUSERS_FILE) if (path / name).is_file()]
        files = named[:1] or sorted(path.glob("*.safetensors"))
        if not files:
            raise ConfigError(f"{path} has no {PEFT_FILE}, {DIFFUSERS_FILE} or other .safetensors file")
        if len(files) > 1:
            names = first_few([each.name for each in files])
            raise ConfigError(f"{path} has {len(files)} files ({names}); give one of them: --from {files[-1]}")
        file = files[0]
    if file.name == PEFT_FILE:
        return file, read_json(file.with_name(PEFT_CONFIG))
    text = read_metadata(file).get(METADATA_KEY, "{}") if file.is_file() else "{}"
    try:
        settings = parse_json(text)
    except ValueError as error:
        raise ConfigError(f"{file}: its {METADATA_KEY} cannot be read: {error}; save it again") from error
    if not isinstance(settings, dict):
        raise ConfigError(f"{file}: its {METADATA_KEY} is {settings!r:.80}, not settings by name; save it again")
    return file, {name.removeprefix(f"{part}."): value for name, value in settings.items()}


def _pairs(tensors: Mapping[str, Tensor], settings: Mapping[str, Any], file: Path) -> dict[str, Adapter]:
    """Return the adapters of a file, with scale 1, by the names of their layers in the file."""
    if repeated := settings.get("layer_replication"):
        raise ConfigError(
            f"{file} belongs to a model with repeated layers (layer_replication={repeated!r:.40}); train adapters of "
            "the base without it"
        )
    flags = [name for name in ("use_dora", "lora_bias") if settings.get(name)]
    for kind, words in OTHER_KINDS.items():
        if odd := [name for name in (*tensors, *flags) if any(word in name for word in words)]:
            raise ConfigError(f"{file} has {kind} ({first_few(odd)}); only LoRA of two matrices is read")
    if (init := str(settings.get("init_lora_weights")).lower()).startswith(CHANGE_BASE):
        raise ConfigError(
            f"{file} was trained on changed weights of the base (init_lora_weights={init:.40}); convert it to LoRA "
            "with peft: save_pretrained(..., path_initial_model_for_weight_conversion=FOLDER_OF_THE_INITIAL_ADAPTERS)"
        )
    by_stem: dict[str, dict[str, Tensor]] = {}
    endings = {**dict.fromkeys(A_NAMES, "a"), **dict.fromkeys(B_NAMES, "b"), ALPHA: "alpha"}
    unknown = []
    for name, tensor in tensors.items():
        check_numbers(name, tensor)
        ending = next((ending for ending in endings if name.endswith(ending)), None)
        if ending is None:
            unknown.append(name)
        else:
            by_stem.setdefault(name.removesuffix(ending), {})[endings[ending]] = tensor.float()
    incomplete = [stem for stem, parts in by_stem.items() if not {"a", "b"} <= parts.keys()]
    if unknown or incomplete:
        fault = f"{first_few(unknown)} are not LoRA tensors" if unknown else f"{first_few(incomplete)} lack A or B"
        raise ConfigError(f"{file}: {fault}; names end in {', '.join((*A_NAMES, *B_NAMES, ALPHA))}")
    adapters = {}
    for stem, parts in by_stem.items():
        a, b, alpha = parts["a"], parts["b"], parts.get("alpha")
        if a.dim() != b.dim() or a.dim() not in (2, 4) or a.shape[0] != b.shape[1] or 0 in (*a.shape, *b.shape):
            raise ConfigError(f"{file}: {stem} has A {list(a.shape)} and B {list(b.shape)}, which have no product")
        if alpha is not None and alpha.numel() != 1:
            raise ConfigError(f"{file}: alpha of {stem} is {list(alpha.shape)}, not one number")
        scale = _scale(stem, len(a), settings) if alpha is None else float(alpha) / len(a)
        adapters[stem] = Adapter(a, b if scale == 1 else scale * b)
    return adapters


def _scale(stem: str, rank: int, settings: Mapping[str, Any]) -> float:
    """Return alpha / rank of a layer in the settings of peft; 1 without settings."""
    alpha = settings.get("lora_alpha", rank)
    patterns = settings.get("alpha_pattern") or {}
    if not isinstance(patterns, dict):
        raise ConfigError(f"the settings of the adapters have alpha_pattern={patterns!r:.40}, not numbers by layer")
    for key, value in patterns.items():
        # peft accepts regular expressions, but an untrusted one may never end, so only names are read.
        name = str(key).removeprefix("^").removesuffix("$").replace("\\.", ".")
        if not re.fullmatch(r"[\w.-]+", name):
            raise ConfigError(
                f"the settings of the adapters have alpha_pattern {key!r:.60}; only names of layers are read"
            )
        if f".{stem}".endswith(f".{name}"):
            alpha = value
            break
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not math.isfinite(alpha):
        raise ConfigError(f"the settings of the adapters have alpha={alpha!r:.40} for {stem}, which is not a number")
    return float(alpha) / (math.sqrt(rank) if settings.get("use_rslora") else rank)


def _by_layer(
    pairs: Mapping[str, Adapter], form: DiffusersFormat[ModelConfig], model: ModelConfig, rules: RuleBook, file: Path
) -> dict[str, Adapter]:
    """Return adapters by diffusers' layer names; adapters of fused layers are split."""
    shapes = {name.removesuffix(WEIGHT): s for name, s in rules.external_shapes().items() if name.endswith(WEIGHT)}
    names = layer_names(form, model, list(shapes))
    if unknown := [stem for stem in pairs if stem not in names]:
        raise ConfigError(
            f"{file}: {len(unknown)} of {len(pairs)} layers are not of {form.class_name} ({first_few(unknown)}); check "
            "that adapters and --base belong together"
        )
    by_layer: dict[str, Adapter] = {}
    for stem, pair in pairs.items():
        layers = names[stem]
        rows = [shapes[layer][0] for layer in layers]
        _check_sizes(f"{file}: {stem}", pair, (sum(rows), *shapes[layers[0]][1:]))
        by_layer |= {layer: Adapter(pair.a, b) for layer, b in zip(layers, pair.b.split(rows), strict=True)}
    return by_layer


def _check_sizes(label: str, adapter: Adapter, shape: Shape) -> None:
    if len(shape) == 4 and tuple(shape[2:]) != (1, 1):
        raise ConfigError(f"{label} adapts a {shape[2]} x {shape[3]} convolution; only linear layers are supported")
    if (adapter.b.shape[0], adapter.a.shape[1]) != tuple(shape[:2]) or adapter.a.dim() != len(shape):
        sizes = f"A {list(adapter.a.shape)} and B {list(adapter.b.shape)}"
        raise ConfigError(f"{label} has {sizes}, and the weight of the base is {list(shape)}; check --base")


def layer_names(
    form: DiffusersFormat[ModelConfig], model: ModelConfig, layers: Sequence[str]
) -> dict[str, tuple[str, ...]]:
    """Return diffusers' layers for every name that a file may use; a fused layer of other code is several layers."""
    names: dict[str, tuple[str, ...]] = {}
    for layer in layers:
        flat = layer.replace(".", "_")
        prefixes = ["", f"{form.part}.", f"{PEFT_PREFIX}.", "diffusion_model."]
        other_names = [f"lora_unet_{flat}", f"lora_transformer_{flat}", *form.other_names(layer, model)]
        names |= dict.fromkeys([*(prefix + layer for prefix in prefixes), *other_names], (layer,))
    fused: dict[str, list[str]] = {}
    for layer in layers:
        native = form.comfyui_name(layer)
        if native is not None and native.startswith("diffusion_model."):
            fused.setdefault(native.removeprefix("diffusion_model."), []).append(layer)
    for native, parts in fused.items():
        for name in (native, f"diffusion_model.{native}", f"lora_unet_{native.replace('.', '_')}"):
            names[name] = tuple(parts)
    return names


def _join_all(external: Mapping[str, Adapter], rules: RuleBook, linears: Collection[str]) -> dict[str, Adapter]:
    adapters: dict[str, Adapter] = {}
    shapes = rules.external_shapes()
    for rule in rules.rules:
        parts = [external.get(name.removesuffix(WEIGHT)) for name in rule.external_names]
        if not any(parts):
            continue
        layer = rule.name.removesuffix(WEIGHT)
        if layer not in linears or rule.form.axis is None:
            raise ConfigError(
                f"the adapter of {rule.external_names[0].removesuffix(WEIGHT)} has no counterpart: {layer} cannot have "
                "an adapter"
            )
        try:
            adapters[layer] = _joined(rule, parts, [shapes[name][0] for name in rule.external_names])
        except ConfigError as error:
            raise ConfigError(f"adapters of {', '.join(rule.external_names)} do not fit {layer}: {error}") from error
    return adapters


def _joined(rule: Rule, parts: Sequence[Optional[Adapter]], outputs: Sequence[int]) -> Adapter:
    """Return one adapter equal to the adapters of several external layers."""
    [first, *_] = present = [part for part in parts if part is not None]
    if rule.form.axis == 1:
        return Adapter(rule.form.from_external([first.a]), first.b)
    unique: list[Tensor] = []
    for adapter in present:
        if not any(torch.equal(adapter.a, a) for a in unique):
            unique.append(adapter.a)
    blocks = [[torch.zeros(size, len(a)) for a in unique] for size in outputs]
    for part, row in zip(parts, blocks, strict=True):
        if part is not None:
            row[next(i for i, a in enumerate(unique) if torch.equal(part.a, a))] = part.b
    return Adapter(torch.cat(unique).flatten(1), rule.form.from_external([torch.cat(row, 1) for row in blocks]))


def _filled(adapter: Adapter, rank: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Extend A by random rows, as in a new adapter, and B by columns of zeros, to a rank."""
    num_new, inputs = rank - len(adapter.a), adapter.a.shape[1]
    bound = 1 / math.sqrt(inputs)
    rows = torch.empty(num_new, inputs).uniform_(-bound, bound, generator=generator)
    return torch.cat([adapter.a, rows]), torch.cat([adapter.b, adapter.b.new_zeros(len(adapter.b), num_new)], 1)
