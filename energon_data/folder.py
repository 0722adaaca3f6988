"""Check a data set before anything is read from it: complete, untouched, and unable to execute code."""

import hashlib
import json
import math
import os
import re
import reprlib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Optional

from dit.errors import ConfigError, DataError, page_of
from dit.safe_files import open_binary, read_json, read_yaml
from energon_data.samples import META_PART, SampleError, unseal
from energon_data.tar_index import first_samples

_META = ".nv-meta"
_SHARDS_LOOKED_AT, _LOOKED_AT = 4, 4
"""Number of shards of a folder, and of samples of each, that are read to list the conditions of the data."""
_MOST_SHARDS = 10_000_000
_DATASET_KEYS = {"__module__", "__class__", "subflavors"}
_METADATASETS = {"Metadataset", "MetadatasetV2"}
_ADVICE = (
    "prepare the folder with `energon prepare --sample-type CrudeWebdataset`, or write it again (energon_data.prepare)"
)
_RENDERED = {
    "letters": "letters",
    "letters_text": "letters --text-encoder all-minilm-l6-v2",
    "pictograms": "pictograms --size 64",
    "pictograms_latent": "pictograms --size 64 --vae runs/pictogram_vae --text-encoder all-minilm-l6-v2",
    "moving_letters": "moving_letters --text-encoder all-minilm-l6-v2",
    "mine": "images --in PICTURES --size 256 --text-encoder all-minilm-l6-v2",
}
"""The commands that make the folders of recipes; other folders have none."""


@dataclass(frozen=True)
class SplitInfo:
    """One split of one data set folder, checked."""

    path: Path
    split: str
    samples: int
    shards: tuple[Path, ...]
    description: dict[str, Any]


def _load(file: Path) -> Any:
    """Parse a YAML or JSON file without executing code."""
    return (read_json if file.suffix == ".json" else read_yaml)(file, DataError, _ADVICE)


def _count_of(entry: str) -> int:
    """Return how many names an entry with patterns such as `{0..9}` or `{a,b}` stands for, without making them."""
    ranges = [abs(int(high) - int(low)) + 1 for low, high in re.findall(r"\{(-?\d+)\.\.(-?\d+)", entry)]
    lists = [inner.count(",") + 1 for inner in re.findall(r"\{([^{}]*,[^{}]*)\}", entry)]
    return math.prod(ranges) * math.prod(lists)


def _names_of(value: object, what: str) -> list[str]:
    """Return the file names of an entry of `split.yaml`, with patterns in braces expanded.

    Raises:
        DataError: the entry is no list of names.
    """
    import braceexpand

    entries = [] if value is None else value
    if not isinstance(entries, list) or not all(isinstance(entry, str) for entry in entries):
        raise DataError(f"{what} is {reprlib.repr(value)}, and must be a list of shards; {_ADVICE}")
    try:
        if sum(map(_count_of, entries)) > _MOST_SHARDS:
            raise DataError(f"{what} names more than {_MOST_SHARDS:,} shards; {_ADVICE}")
        return [name for entry in entries for name in braceexpand.braceexpand(entry)]
    except ValueError as error:
        raise DataError(f"{what}: {error}; {_ADVICE}") from error


def _check_shard_name(folder: Path, name: str) -> Path:
    parts = PurePosixPath(name).parts
    if not name or PurePosixPath(name).is_absolute() or ".." in parts or "\\" in name:
        raise DataError(f"{folder / _META} names the shard {name!r}, which is outside of the data set; {_ADVICE}")
    path = folder / name
    # `Path.resolve` fails at a link that leads to itself.
    if not Path(os.path.realpath(path)).is_relative_to(os.path.realpath(folder)):
        raise DataError(f"shard {path} is a link that leads outside the data set; copy the file instead")
    return path


def _check_shard(path: Path, count: int, written_bytes: int | None) -> None:
    """Compare a shard with its index and with its recorded size, without reading the samples."""
    if not path.is_file():
        raise DataError(f"shard {path} is missing; restore the file, or {_ADVICE}")
    index = path.with_suffix(".tar.idx")
    if not index.is_file():
        raise DataError(f"shard {path} has no index {index.name}; {_ADVICE}")
    entries, rest = divmod(index.stat().st_size, 8)
    if rest or entries != count + 1:
        raise DataError(f"index {index} lists {entries - 1} samples, the metadata {count}; {_ADVICE}")
    with open_binary(index) as f:
        f.seek(-8, 2)
        end = int.from_bytes(f.read(8), "little")
    size = path.stat().st_size
    if size < end:
        raise DataError(f"shard {path} is truncated: {size} bytes, its last sample ends at {end}; restore the file")
    if written_bytes is not None and size != written_bytes:
        raise DataError(f"shard {path} has {size} bytes and had {written_bytes} when it was written; restore the file")


def check_folder(folder: Path, split: str) -> SplitInfo:
    """Check one data set folder.

    Raises:
        DataError: something is missing, damaged, or could execute code.
    """
    meta = folder / _META
    if not meta.is_dir():
        raise DataError(f"{folder} has no {_META} folder, so Energon cannot read it; {_ADVICE}")
    scripts = sorted(p.name for p in meta.rglob("*") if p.suffix in (".py", ".pyc", ".so"))
    if scripts:
        raise DataError(f"{meta} holds {scripts}, which Energon would execute; only data sets without code are read")
    description = _load(meta / "dataset.yaml")
    if not isinstance(description, dict) or set(description) - _DATASET_KEYS:
        raise DataError(
            f"{meta / 'dataset.yaml'} must hold only {sorted(_DATASET_KEYS)}, got {reprlib.repr(description)}; "
            f"{_ADVICE}"
        )
    target = f"{description.get('__module__')}.{description.get('__class__')}"
    if target != "megatron.energon.CrudeWebdataset" or _nested_targets(description.get("subflavors")):
        raise DataError(f"{meta / 'dataset.yaml'} asks for {target}; only megatron.energon.CrudeWebdataset is read")
    info_file = meta / ".info.json"
    info = _load(info_file if info_file.is_file() else meta / ".info.yaml")
    split_file = meta / "split.yaml"
    splits = _load(split_file if split_file.is_file() else meta / "split.json")
    counts = info.get("shard_counts") if isinstance(info, dict) else None
    parts = splits.get("split_parts") if isinstance(splits, dict) else None
    if not isinstance(counts, dict) or not isinstance(parts, dict):
        raise DataError(f"{meta} has no valid .info.json and split.yaml; {_ADVICE}")
    if split not in parts:
        raise DataError(f"{folder} has no split {split!r}, only {sorted(map(str, parts))}; {_ADVICE}")
    for entry, value in {**parts, "exclude": splits.get("exclude")}.items():  # Energon reads all of them
        found = _names_of(value, f"{entry!r} in {split_file}")
        parts[entry] = found
    names = [name for name in parts[split] if name not in parts["exclude"]]
    if not names:
        raise DataError(f"split {split!r} of {folder} is empty; {_ADVICE}")
    own_file = folder / "dataset.json"
    own = _load(own_file) if own_file.is_file() else {}
    if not isinstance(own, dict) or not isinstance(written := own.get("shards", {}), dict):
        raise DataError(f"{own_file} is no description of a data set, or its shards are none; {_ADVICE}")
    shards = []
    for name in names:
        path = _check_shard_name(folder, name)
        shards.append(path)
        count = counts.get(name)
        if not isinstance(count, int) or count < 1:
            raise DataError(f"{info_file} does not say how many samples shard {name!r} holds; {_ADVICE}")
        recorded = written.get(name, {})
        if not isinstance(recorded, dict):
            raise DataError(f"{own_file} does not say what shard {name!r} is; {_ADVICE}")
        _check_shard(path, count, recorded.get("bytes"))
    samples = sum(counts[name] for name in names)
    return SplitInfo(folder, split, samples, tuple(shards), own)


def _nested_targets(value: object) -> list[str]:
    """Return every class or function that Energon would import for a configuration."""
    if isinstance(value, dict):
        own = [f"{value.get('__module__')}.{value[k]}" for k in ("__class__", "__function__") if k in value]
        return own + [t for v in value.values() for t in _nested_targets(v)]
    return [t for v in value for t in _nested_targets(v)] if isinstance(value, list) else []


def _nested(value: object, key: str) -> list[Any]:
    """Return every value of `key` anywhere in a configuration."""
    if isinstance(value, dict):
        return [v for k, v in value.items() if k == key] + [x for v in value.values() for x in _nested(v, key)]
    return [x for v in value for x in _nested(v, key)] if isinstance(value, list) else []


def _check_blend_file(file: Path, above: tuple[Path, ...] = ()) -> list[Any]:
    """Refuse a metadataset file, or one it refers to, that makes Energon import anything but metadatasets.

    Returns:
        The content of these files.

    Raises:
        DataError: it does, or files refer to each other in a cycle.
    """
    if file in above:
        raise DataError(f"the blends {[str(p) for p in (*above, file)]} refer to each other in a circle")
    content = _load(file)
    targets = _nested_targets(content)
    allowed = {f"megatron.energon.{name}" for name in _METADATASETS}
    if not targets or set(targets) - allowed:
        raise DataError(f"{file} asks for {targets or 'no class'}; a blend may only use {sorted(allowed)}")
    for key in ("dataset_config", "split_config", "aux", "join"):
        if _nested(content, key):
            raise DataError(f"{file} uses {key!r}, which is not supported; blend plain data set folders")
    contents = [content]
    for member in _nested(content, "path"):
        if isinstance(member, str) and member.endswith((".yaml", ".yml")):
            contents += _check_blend_file(Path(os.path.realpath(file.parent / member)), (*above, file))
    return contents


def _check_blend(file: Path, split: str) -> list[SplitInfo]:
    """Check a metadataset file and every data set it blends."""
    _check_blend_file(Path(os.path.realpath(file)))
    from megatron.energon.metadataset.loader import traverse_metadataset

    try:
        members = traverse_metadataset(file, split_part=split)
    except Exception as error:
        raise DataError(
            f"cannot read the blend {file}, split {split!r}: {error}; compare it with Energon's docs"
        ) from error
    return [check_folder(Path(str(member.path.local_path())), member.split_part) for member in members]


def stored_names(infos: Sequence[SplitInfo]) -> Optional[set[str]]:
    """Return the names of array parts and metadata in the first samples that all members of a blend have.

    Returns:
        Names without extensions; None if no sample can be read.
    """
    members = []
    for info in infos:
        samples = [parts for shard in info.shards[:_SHARDS_LOOKED_AT] for parts in first_samples(shard, _LOOKED_AT)]
        if samples:
            members.append({name for parts in samples for name in _names(parts)})
    return set.intersection(*members) if members else None


def _names(parts: dict[str, bytes]) -> Iterator[str]:
    for name, content in parts.items():
        stem, _, extension = name.rpartition(".")
        if extension in ("npy", "safetensors"):
            yield stem
        elif name == META_PART:
            with suppress(SampleError):  # damage is reported when the data are read
                yield from unseal(content)


def check_dataset(path: str, split: str) -> list[SplitInfo]:
    """Check a data set folder, or a metadataset file and all its members.

    Raises:
        ConfigError: no path is given.
        DataError: something is missing, damaged, or could execute code.
    """
    if not path:
        raise ConfigError("data.path is empty; name a data set folder or a metadataset file")
    file = Path(path).absolute()
    if file.is_dir():
        return [check_folder(file, split)]
    if file.is_file() and file.suffix in (".yaml", ".yml"):
        return _check_blend(file, split)
    if file.exists():
        raise DataError(f"{path} is neither a data set folder nor a metadataset .yaml file")
    renders = _RENDERED.get(file.name)
    command = f"; `python -m energon_data.prepare {renders} --out {path}` makes it" if renders else ""
    raise DataError(
        f"{path} does not exist; {page_of('energon_data')} says what each recipe's data folder must hold and how to "
        f"write one{command}"
    )


def identity(path: str, split: str) -> str:
    """Return how many samples and shards a data set or metadataset has, and a digest, without reading samples.

    The digest is of the names and sizes of the shards, their SHA-256 if `dataset.json` has it, and the content of
    metadataset files.

    Raises:
        ConfigError, DataError: as of `check_dataset`.
    """
    infos = check_dataset(path, split)
    stated = [] if Path(path).is_dir() else _check_blend_file(Path(os.path.realpath(path)))
    for info in infos:
        recorded = info.description.get("shards", {})
        for shard in info.shards:
            name = shard.relative_to(info.path).as_posix()
            stated.append([name, shard.stat().st_size, recorded.get(name, {}).get("sha256")])
    digest = hashlib.sha256(json.dumps(stated, default=str).encode()).hexdigest()
    samples, shards = sum(info.samples for info in infos), sum(len(info.shards) for info in infos)
    return f"{samples} samples in {shards} shard{'' if shards == 1 else 's'}, digest {digest[:16]}"
