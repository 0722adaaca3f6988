"""Checks of a data set before samples are read: complete, unchanged, and free of executable code."""

import hashlib
import json
import math
import os
import re
import reprlib
import tarfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Optional

from dit import extensions
from dit.data_api import WITHOUT_HELD_OUT
from dit.errors import ConfigError, DataError, page_of
from dit.safe_files import open_binary, read_json, read_yaml
from energon_data.samples import META_PART, SampleError, unseal
from energon_data.tar_index import read_samples, sample_of

_META = ".nv-meta"
_PROBED_SHARDS, _PROBED_SAMPLES = 4, 4
"""Number of shards of a folder, and of samples per shard, that are read to list the conditions."""
_MOST_SHARDS = 10_000_000
_DIGEST_BLOCKS, _DIGEST_BLOCK_BYTES, _DIGEST_THREADS = 5, 16 << 10, 16
"""Number and size of the blocks of a shard that identify its content, and number of shards read at a time."""
_DATASET_KEYS = {"__module__", "__class__", "subflavors"}
_ADVICE = (
    "prepare the folder with `energon prepare --sample-type CrudeWebdataset`, or write it again (energon_data.prepare)"
)


@dataclass(frozen=True)
class SplitInfo:
    """One split of one data set folder, checked.

    Attributes:
        unlisted: tar files of the folder that no split names.
    """

    path: Path
    split: str
    samples: int
    shards: tuple[Path, ...]
    description: dict[str, Any]
    unlisted: tuple[str, ...] = ()


def _load(*files: Path) -> Any:
    """Parse the first of these YAML or JSON files that exists, or the last one, without executing code."""
    file = next((file for file in files if file.is_file()), files[-1])
    return (read_json if file.suffix == ".json" else read_yaml)(file, DataError, _ADVICE)


def _count_of(entry: str) -> int:
    """Return the number of names in an entry with patterns such as `{0..9}` or `{a,b}`, without expanding it."""
    ranges = [abs(int(high) - int(low)) + 1 for low, high in re.findall(r"\{(-?\d+)\.\.(-?\d+)", entry)]
    lists = [inner.count(",") + 1 for inner in re.findall(r"\{([^{}]*,[^{}]*)\}", entry)]
    return math.prod(ranges) * math.prod(lists)


def _names_of(value: object, label: str) -> list[str]:
    """Return the file names of an entry of `split.yaml`, with patterns in braces expanded."""
    import braceexpand

    entries = [] if value is None else value
    if not isinstance(entries, list) or not all(isinstance(entry, str) for entry in entries):
        raise DataError(f"{label} is {reprlib.repr(value)}, and must be a list of shards; {_ADVICE}")
    try:
        if sum(map(_count_of, entries)) > _MOST_SHARDS:
            raise DataError(f"{label} names more than {_MOST_SHARDS:,} shards; {_ADVICE}")
        return [name for entry in entries for name in braceexpand.braceexpand(entry)]
    except ValueError as error:
        raise DataError(f"{label}: {error}; {_ADVICE}") from error


def _check_shard_name(folder: Path, name: str) -> Path:
    parts = PurePosixPath(name).parts
    if not name or PurePosixPath(name).is_absolute() or ".." in parts or "\\" in name:
        raise DataError(f"{folder / _META} names the shard {name!r}, which is outside the data set; {_ADVICE}")
    path = folder / name
    # `Path.resolve` fails for a link to itself.
    if not Path(os.path.realpath(path)).is_relative_to(os.path.realpath(folder)):
        raise DataError(f"shard {path} is a link to a file outside the data set; copy the file instead")
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
        raise DataError(f"shard {path} has {size} bytes but {written_bytes} were written; restore the file")


def check_folder(folder: Path, split: str, otherwise: str = WITHOUT_HELD_OUT) -> SplitInfo:
    """Check one data set folder; `otherwise` as in `DataConfig.validate_held_out`."""
    meta = folder / _META
    if not meta.is_dir():
        raise DataError(f"{folder} has no {_META} folder, so Energon cannot read it; {_ADVICE}")
    scripts = sorted(p.name for p in meta.rglob("*") if p.suffix in (".py", ".pyc", ".so"))
    if scripts:
        raise DataError(f"{meta} has {scripts}, which Energon would execute; only data sets without code are read")
    description = _load(meta / "dataset.yaml")
    if not isinstance(description, dict) or set(description) - _DATASET_KEYS:
        raise DataError(
            f"{meta / 'dataset.yaml'} must contain only {sorted(_DATASET_KEYS)}, got {reprlib.repr(description)}; "
            f"{_ADVICE}"
        )
    target = f"{description.get('__module__')}.{description.get('__class__')}"
    if target != "megatron.energon.CrudeWebdataset" or _nested_targets(description.get("subflavors")):
        raise DataError(f"{meta / 'dataset.yaml'} names {target}; only megatron.energon.CrudeWebdataset is read")
    info, splits = _load(meta / ".info.json", meta / ".info.yaml"), _load(meta / "split.yaml", meta / "split.json")
    counts = info.get("shard_counts") if isinstance(info, dict) else None
    parts = splits.get("split_parts") if isinstance(splits, dict) else None
    if not isinstance(counts, dict) or not isinstance(parts, dict):
        raise DataError(f"{meta} has no valid .info.json and split.yaml; {_ADVICE}")
    if split not in parts:
        cure = f"prepare it with a larger --validation, {otherwise}" if split == "val" else _ADVICE
        raise DataError(f"{folder} has no split {split!r}, only {sorted(map(str, parts))}; {cure}")
    for entry, value in {**parts, "exclude": splits.get("exclude")}.items():  # Energon reads all of them
        parts[entry] = _names_of(value, f"{entry!r} in {meta / 'split.yaml'}")
    names = [name for name in parts[split] if name not in parts["exclude"]]
    if not names:
        raise DataError(f"split {split!r} of {folder} is empty; {_ADVICE}")
    metadata_file = folder / "dataset.json"
    metadata = _load(metadata_file) if metadata_file.is_file() else {}
    if not isinstance(metadata, dict) or not isinstance(written := metadata.get("shards", {}), dict):
        raise DataError(f"{metadata_file} is not a valid description of a data set and its shards; {_ADVICE}")
    shards = [_check_shard_name(folder, name) for name in names]
    for name, path in zip(names, shards):
        count = counts.get(name)
        if not isinstance(count, int) or count < 1:
            raise DataError(f"{meta / '.info.json'} lacks the number of samples of shard {name!r}; {_ADVICE}")
        recorded = written.get(name, {})
        if not isinstance(recorded, dict):
            raise DataError(f"{metadata_file} has no valid entry for shard {name!r}; {_ADVICE}")
        _check_shard(path, count, recorded.get("bytes"))
    samples = sum(counts[name] for name in names)
    unlisted = tuple(sorted({path.name for path in folder.glob("*.tar")}.difference(*parts.values())))
    return SplitInfo(folder, split, samples, tuple(shards), metadata, unlisted)


def is_mixed(folder: Path) -> bool:
    """Return whether samples are in random order: `dataset.json` has a `name`, or `prepare` wrote files or rows."""
    file = folder / "dataset.json"
    description = _load(file) if file.is_file() else {}
    prepared = description.get("prepared")
    return "name" in description or (isinstance(prepared, dict) and prepared.get("command") != "webdataset")


def _nested_targets(value: object) -> list[str]:
    """List the classes and functions that Energon would import for a configuration."""
    if isinstance(value, dict):
        targets = [f"{value.get('__module__')}.{value[k]}" for k in ("__class__", "__function__") if k in value]
        return targets + [t for v in value.values() for t in _nested_targets(v)]
    return [t for v in value for t in _nested_targets(v)] if isinstance(value, list) else []


def stored_names(infos: Sequence[SplitInfo]) -> Optional[set[str]]:
    """Return the names of array parts and metadata in the first samples, common to all members of a blend.

    Returns:
        Names without extensions; None if no sample can be read.
    """
    members = []
    for info in infos:
        names, is_read = set[str](), False
        for shard in info.shards[:_PROBED_SHARDS]:
            for _, data in read_samples([shard], range(_PROBED_SAMPLES)):
                with suppress(ValueError, tarfile.TarError):
                    names.update(_names(sample_of(data)[1]))
                    is_read = True
        if is_read:
            members.append(names)
    return set.intersection(*members) if members else None


def _names(parts: dict[str, bytes]) -> Iterator[str]:
    for name, content in parts.items():
        stem, _, extension = name.rpartition(".")
        if extension in ("npy", "safetensors"):
            yield stem
        elif name == META_PART:
            with suppress(SampleError):  # training reports damage when it reads the data
                yield from unseal(content)


def _prepare_words(folder: str) -> Optional[str]:
    """Return the command and flags that write a data folder of a recipe; None if no command states the folder."""
    if folder == "mine":  # of `own_data`
        return "images --in PICTURES --size 256 --text-encoder all-minilm-l6-v2"
    for name, command in extensions.load("preparations", {}).items():
        if folder in command.folders:
            return f"{name} {command.folders[folder]}".strip()
    return None


def check_dataset(path: str, split: str, otherwise: str = WITHOUT_HELD_OUT) -> SplitInfo:
    """Check a data set folder; `otherwise` as in `DataConfig.validate_held_out`."""
    if not path:
        raise ConfigError("data.path is empty; set it to a data set folder")
    file = Path(path).absolute()
    if file.is_dir():
        return check_folder(file, split, otherwise)
    if file.exists():
        raise DataError(f"{path} is not a data set folder; data.blend reads several folders")
    words = _prepare_words(file.name)
    command = f"; `python -m energon_data.prepare {words} --out {path}` writes it" if words else ""
    raise DataError(
        f"{path} does not exist; {page_of('energon_data')} describes each recipe's data folder and how to "
        f"write one{command}"
    )


def identity(path: str, split: str) -> str:
    """Return the number of samples and shards of a data set, and a digest.

    The digest covers names and sizes of the shards, a few blocks of each, and their SHA-256 in `dataset.json`. A change
    outside these blocks that keeps size and `dataset.json` is not noticed.
    """
    info, contents = check_dataset(path, split), []
    recorded = info.description.get("shards", {})
    with ThreadPoolExecutor(_DIGEST_THREADS) as pool:  # a network file system answers slowly
        for shard, (size, blocks) in zip(info.shards, pool.map(_size_and_digest_of_blocks, info.shards)):
            name = shard.relative_to(info.path).as_posix()
            contents.append([name, size, recorded.get(name, {}).get("sha256"), blocks])
    digest = hashlib.sha256(json.dumps(contents, default=str).encode()).hexdigest()
    shards = len(info.shards)
    return f"{info.samples} samples in {shards} shard{'' if shards == 1 else 's'}, digest {digest[:16]}"


def _size_and_digest_of_blocks(file: Path) -> tuple[int, str]:
    """Return the size of a file, and the SHA-256 of evenly spaced blocks, which cover a small file completely."""
    digest, size = hashlib.sha256(), file.stat().st_size
    last = max(size - _DIGEST_BLOCK_BYTES, 0)
    with open_binary(file) as f:
        for block in range(_DIGEST_BLOCKS):
            f.seek(last * block // (_DIGEST_BLOCKS - 1))
            digest.update(f.read(_DIGEST_BLOCK_BYTES))
    return size, digest.hexdigest()
