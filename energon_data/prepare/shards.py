"""Write WebDataset shards and Energon's metadata; a folder appears only when it is complete."""

import contextlib
import hashlib
import io
import json
import os
import shutil
import socket
import tarfile
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import Any
from unittest import mock

import numpy as np
import yaml

from dit.errors import ConfigError, DataError
from dit.safe_files import LONGEST_YAML, open_binary, read_yaml
from energon_data.samples import META_PART, seal

DATASET_FILE = "dataset.json"


def npy_bytes(array: np.ndarray) -> bytes:
    """Return an array as the bytes of an `.npy` part."""
    buffer = io.BytesIO()
    np.save(buffer, array, allow_pickle=False)
    return buffer.getvalue()


class ShardWriter:
    """Writes samples to shards of one split.

    Args:
        split: name of the split; shards are called `SPLIT-000000.tar`.
        samples_per_shard: samples in every shard except the last; None for one shard with all.
    """

    def __init__(self, folder: Path, split: str, samples_per_shard: int | None, first: int = 0) -> None:
        self.folder, self.split, self.samples_per_shard, self.first = folder, split, samples_per_shard, first
        self.shards: dict[str, dict[str, Any]] = {}
        self._tar: tarfile.TarFile | None = None
        self._name, self._count = "", 0
        self._keys: set[str] = set()

    def add(self, key: str, metadata: dict[str, Any], parts: dict[str, bytes]) -> None:
        """Append a sample; the metadata is sealed with the checksums of its parts."""
        if "." in key or not key:
            raise DataError(f"a sample name must not be empty or contain a dot, got {key!r}")
        if key in self._keys:
            raise DataError(f"two samples of split {self.split!r} are called {key!r}; use different names")
        self._keys.add(key)
        if self._tar is None:
            name = f"{self.split}-{self.first + len(self.shards):06d}.tar"
            self._name = name
            self._tar = tarfile.open(self.folder / name, "w", format=tarfile.USTAR_FORMAT)  # noqa: SIM115
            self._count = 0
        # Sorted names without time and owner, so that equal samples give equal bytes.
        for part, data in [(META_PART, seal(metadata, parts)), *sorted(parts.items())]:
            member = tarfile.TarInfo(f"{key}.{part}")
            member.size, member.mode = len(data), 0o644
            self._tar.addfile(member, io.BytesIO(data))
        self._count += 1
        if self._count == self.samples_per_shard:
            self.close()

    def close(self) -> None:
        """Finish the open shard, and hash it."""
        if self._tar is None:
            return
        self._tar.close()
        with open_binary(self.folder / self._name) as shard:
            digest = hashlib.file_digest(shard, "sha256").hexdigest()
            size = shard.tell()
        self.shards[self._name] = {"samples": self._count, "bytes": size, "sha256": digest}
        self._tar = None


class _InThisProcess:
    """Indexes shards sequentially, in place of Energon's pool.

    Energon forks a process that has started threads for its queues; in rare cases the child hangs.
    """

    def __init__(
        self, num_workers: int, user_produce_data: Callable[[Any], Iterable[Any]], aggregator: Any, *, batch_size: int
    ) -> None:
        self.produce, self.aggregator, self.batch_size = user_produce_data, aggregator, batch_size
        self.tasks: list[Any] = []

    def submit_task(self, task: Any) -> None:
        self.tasks.append(task)

    def process(self) -> Any:
        """Index all shards and return the aggregator's result."""
        self.aggregator.on_start(self)
        for task in self.tasks:
            items = iter(self.produce(task))
            while batch := list(islice(items, self.batch_size)):
                self.aggregator.on_item(batch, self)
        self.aggregator.on_finish(self)
        return self.aggregator.get_final_result_data()


def write_energon_metadata(
    folder: Path, shards: Iterable[str], splits: Iterable[str], repeats: Mapping[str, int] = MappingProxyType({})
) -> None:
    """Index the shards and write `.nv-meta` for a `CrudeWebdataset`, without any prompt.

    Args:
        repeats: number of reads of a shard in one pass, if not 1; the split lists the shard that many times.
    """
    from megatron.energon.flavors import BaseWebdatasetFactory
    from megatron.energon.flavors.webdataset import prepare

    names = sorted(shards)
    output = io.StringIO()
    try:
        with contextlib.redirect_stdout(output), mock.patch.object(prepare, "AggregatorPool", _InThisProcess):
            BaseWebdatasetFactory.prepare_dataset(
                folder,
                names,
                split_parts_patterns=[(split, f"{split}-[0-9]*[.]tar") for split in splits],
                shuffle_seed=None,
                workers=1,
            )
    except SystemExit as leave:  # Energon prints the reason and exits
        reason = " ".join(output.getvalue().split())
        raise DataError(
            f"the shards in {folder} cannot be indexed: {reason or 'Energon printed no reason'}; names of samples must "
            "be unique over all splits"
        ) from leave
    meta = folder / ".nv-meta"
    (meta / "dataset.yaml").write_text("__module__: megatron.energon\n__class__: CrudeWebdataset\n")
    if repeats:
        split_file = meta / "split.yaml"
        content = read_yaml(split_file, DataError, "prepare the folder again")
        for split in content["split_parts"]:  # in place of Energon's patterns, which list each shard once
            shards_of_split = [name for name in names if name.startswith(f"{split}-")]
            content["split_parts"][split] = [name for name in shards_of_split for _ in range(repeats.get(name, 1))]
        text = yaml.safe_dump(content, sort_keys=False)
        if len(text) > LONGEST_YAML:
            raise DataError(f"{len(names)} shards with their repeats are too many names; raise --samples-per-shard")
        split_file.write_text(text)
    needed = [meta / ".info.json", meta / "split.yaml", meta / "index.sqlite"]
    needed += [(folder / name).with_suffix(".tar.idx") for name in names]
    absent = [path.name for path in needed if not path.is_file()]
    if absent:
        raise DataError(f"indexing the shards in {folder} did not write {absent}; is the disk full?")


def _temporary(out: Path, process: object) -> Path:
    return out.with_name(f".{out.name}.tmp-{socket.gethostname()}-{process}")


def _remove_leftovers(out: Path) -> None:
    """Remove temporary folders of processes of this machine that were killed."""
    for leftover in out.parent.iterdir():
        process = leftover.name.rpartition("-")[2]
        if leftover == _temporary(out, process) and process.isdecimal():
            try:
                os.kill(int(process), 0)
            except (ProcessLookupError, OverflowError):
                shutil.rmtree(leftover, ignore_errors=True)
            except PermissionError:  # a running process of another user
                continue


def check_replaceable(out: Path, *, force: bool) -> None:
    """Check that a data set may be made at `out`."""
    if out.exists() and not force:
        raise ConfigError(f"{out} exists already; choose another --out, or replace it with --force")
    if out.exists() and not (out.is_dir() and ((out / DATASET_FILE).is_file() or not any(out.iterdir()))):
        raise ConfigError(f"{out} was not made by this command, so --force does not delete it; remove it first")


def publish(folder: Path, out: Path) -> None:
    """Rename a finished folder to `out`; replaces an older data set."""
    if out.exists():
        with tempfile.TemporaryDirectory(prefix=f".{out.name}.old-", dir=out.parent) as trash:
            out.rename(Path(trash) / out.name)
            folder.rename(out)
    else:
        folder.rename(out)


@contextlib.contextmanager
def published_folder(out: Path, *, force: bool) -> Iterator[Path]:
    """Yield a temporary folder that replaces `out` after the block, and is deleted if the block raises."""
    check_replaceable(out, force=force)
    out.parent.mkdir(parents=True, exist_ok=True)
    _remove_leftovers(out)
    temporary = _temporary(out, os.getpid())
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        yield temporary
        publish(temporary, out)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def write_dataset_file(folder: Path, content: dict[str, Any]) -> None:
    """Write `dataset.json`, the description of the data set."""
    (folder / DATASET_FILE).write_text(json.dumps(content, indent=1) + "\n")
