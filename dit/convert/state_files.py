"""Read tensor files without executing code, and write them atomically.

`.safetensors` files have only tensors. `.pt`, `.pth`, `.bin` and `.ckpt` are pickles, read by torch's `weights_only`
reader, which builds tensors and plain containers and raises for everything else.
"""

import argparse
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from dit import safe_files
from dit.durable_files import fsync
from dit.errors import ConfigError

CONFIG = "config.json"
STEM = "diffusion_pytorch_model"
INDEX = f"{STEM}.safetensors.index.json"
VARIANT = f"{STEM}.*.safetensors"
"""Pattern of the weights of a variant, such as `fp16`."""
VARIANT_INDEX = f"{STEM}.safetensors.index.*.json"
PICKLES = (".pt", ".pth", ".bin", ".ckpt")
MAX_SHARD_BYTES = 10 * 1000**3  # as in diffusers


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Read the tensors of a file by name; from a training checkpoint, the first of `ema`, `model` and `state_dict`."""
    if path.suffix not in (".safetensors", *PICKLES):
        fault = "is not a supported file of weights" if path.exists() else "does not exist"
        raise ConfigError(f"{path} {fault}; use .safetensors, {', '.join(PICKLES)}")
    with reading(path):
        if path.suffix != ".safetensors":
            return _tensors_of(_read_pickle(path), path)
        with safe_files.open_safetensors(path) as file:
            return _tensors_of({name: file.get_tensor(name) for name in file.keys()}, path)  # noqa: SIM118


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Raise errors of a file of tensors as `ConfigError`."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(
            f"{path} cannot be read: {reason}; give a complete file of tensors, or download it again"
        ) from error


def _tensors_of(loaded: object, path: Path) -> dict[str, Tensor]:
    for part in ("ema", "model", "state_dict"):
        if isinstance(loaded, dict) and isinstance(loaded.get(part), dict):
            loaded = loaded[part]
    if not isinstance(loaded, dict) or not loaded:
        raise ConfigError(f"{path} has a {type(loaded).__name__}, not tensors by name; save a model's state_dict()")
    odd = [f"{name!r} is a {type(x).__name__}" for name, x in loaded.items() if not isinstance(x, Tensor)]
    if odd:
        raise ConfigError(f"{path} has other objects than tensors: {', '.join(odd[:3])}; save a model's state_dict()")
    return loaded


def read_metadata(path: Path) -> dict[str, str]:
    """Return the metadata of a safetensors file, or an empty dictionary for other files."""
    if path.suffix != ".safetensors":
        return {}
    with reading(path), safe_files.open_safetensors(path) as file:
        return file.metadata() or {}


def _read_pickle(path: Path) -> Any:
    # The published training script stores its command line, a Namespace of plain values, with the weights.
    with torch.serialization.safe_globals([argparse.Namespace]):
        try:
            return safe_files.read_torch(path)
        except OSError:
            raise
        except Exception as error:  # a damaged or hostile pickle can raise anything
            lines = str(error).strip().splitlines()
            reason = next((line for line in lines if "GLOBAL" in line or "global" in line), lines[0] if lines else "")
            reason = reason.partition(" was not an allowed")[0].strip()  # torch then recommends to allow it
            raise ConfigError(
                f"{path} is damaged or has other objects than tensors, and is not loaded because a pickle can run code "
                f"({reason}); save plain tensors by name, best as .safetensors"
            ) from error


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object."""
    value = safe_files.read_json(path, ConfigError, "give a folder in the diffusers layout")
    if not isinstance(value, dict):
        raise ConfigError(f"{path} has a {type(value).__name__}, not settings by name")
    return value


def index_of(folder: Path) -> Path:
    """Return the index of the shards in a folder: of its only variant if it has no other weights."""
    usual, variants = folder / INDEX, list(folder.glob(VARIANT_INDEX))
    others = [folder / name for name in (INDEX, f"{STEM}.safetensors", f"{STEM}.bin")]
    return usual if len(variants) != 1 or any(path.exists() for path in others) else variants[0]


def weights_file(folder: Path) -> Path:
    """Return the file with the weights of a folder without an index: of its only variant if it has no other weights."""
    for name in (f"{STEM}.safetensors", f"{STEM}.bin"):
        if (folder / name).exists():
            return folder / name
    variants = sorted(folder.glob(VARIANT))
    if len(variants) > 1:
        names = ", ".join(path.name for path in variants)
        raise ConfigError(f"{folder} has only variants of the weights ({names}); rename one to {STEM}.safetensors")
    return variants[0] if variants else folder / f"{STEM}.safetensors"


def shard_names(folder: Path) -> dict[str, str]:
    """Return the file of each tensor in the index of a folder."""
    index = index_of(folder)
    names = read_json(index).get("weight_map")
    if not isinstance(names, dict) or not names:
        raise ConfigError(f"{index} has no weight_map; download the folder again")
    for file in map(str, names.values()):
        if Path(file).name != file or not file.endswith(".safetensors"):
            raise ConfigError(f"{index} names {file!r}; only .safetensors files next to it are read")
    return {str(name): str(file) for name, file in names.items()}


def check_index(folder: Path, weight_map: Mapping[str, str], tensors: Mapping[str, object]) -> None:
    """Check that an index lists the tensors of its shards."""
    if tensors.keys() != weight_map.keys():
        odd = sorted(tensors.keys() ^ weight_map.keys())
        raise ConfigError(f"{index_of(folder)} and its shards disagree on {len(odd)} tensors, such as {odd[0]}")


@contextmanager
def written_atomically(out: Path) -> Iterator[Path]:
    """Yield a temporary path next to `out`; it is renamed to `out` at the end, or removed after an error."""
    if os.path.lexists(out):
        raise ConfigError(f"{out} already exists and is not changed; choose another --out or remove it")
    part = out.with_name(f".{out.name}.{os.getpid()}.tmp{out.suffix}")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        yield part
        for entry in (*part.rglob("*"), part):
            fsync(entry)
        os.rename(part, out)
        fsync(out.parent)
    except (OSError, SafetensorError) as error:
        raise ConfigError(
            f"cannot write {out}: {getattr(error, 'strerror', None) or error}; choose another --out"
        ) from error
    finally:
        if part.is_dir():
            shutil.rmtree(part)
        else:
            part.unlink(missing_ok=True)


def write_tensors(tensors: Mapping[str, Tensor], out: Path, metadata: Mapping[str, str] = MappingProxyType({})) -> None:
    """Write tensors to a `.safetensors` or `.pt` file."""
    if out.suffix not in (".safetensors", ".pt"):
        raise ConfigError(f"--out {out} must end in .safetensors or .pt")
    with written_atomically(out) as part:
        if out.suffix == ".pt":
            torch.save(dict(tensors), part)
        else:
            save_file(dict(tensors), part, metadata={"format": "pt", **metadata})


def write_diffusers(
    settings: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    out: Path,
    *,
    subfolder: str = ".",
    texts: Mapping[str, str] = MappingProxyType({}),
    others: Callable[[Path], Mapping[str, str]] = lambda folder: MappingProxyType({}),
) -> None:
    """Write a folder in the diffusers layout; above `MAX_SHARD_BYTES`, tensors are written in shards with an index.

    Args:
        subfolder: of `out`, for settings and tensors; a pipeline has one per part.
        texts: further text files, by their paths in `out`.
        others: writes further parts of a pipeline, and returns the texts that depend on them.
    """
    from huggingface_hub import save_torch_state_dict

    with written_atomically(out) as part:
        part.mkdir(parents=True, exist_ok=True)
        for name, text in {**texts, **others(part), f"{subfolder}/{CONFIG}": to_json(settings)}.items():
            (part / name).parent.mkdir(parents=True, exist_ok=True)
            (part / name).write_text(text, encoding="utf-8")
        folder = part / subfolder
        pattern = f"{STEM}{{suffix}}.safetensors"
        save_torch_state_dict(dict(tensors), folder, filename_pattern=pattern, max_shard_size=MAX_SHARD_BYTES)


def to_json(value: Mapping[str, Any]) -> str:
    """Return the text of a JSON file."""
    return json.dumps(value, indent=2) + "\n"
