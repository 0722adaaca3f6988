"""Rewriting checkpoints of earlier versions (Megatron-Core's `torch_dist`) in today's format.

`torch_dist` describes its tensors in `.metadata`, a pickle, which can name any function to be called. Only the
classes of that format are imported here; any other name is refused before it is imported.
"""

import pickle
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as torch_checkpoint
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata

from dit.checkpoint.manifest import CURE
from dit.checkpoint.sharded_state import ADAM_STEP
from dit.checkpoint.state_files import INDEX, write_full_state
from dit.checkpoint.store import CheckpointStore
from dit.errors import CheckpointError
from dit.safe_files import open_binary, read_torch
from dit.settings import CheckpointConfig

METADATA, COMMON = ".metadata", "common.pt"
CARRIED_OVER = ("config.yaml", "facts.json", "loader")

_METADATA_CLASSES = (
    "ChunkStorageMetadata",
    "Metadata",
    "MetadataIndex",
    "StorageMeta",
    "TensorProperties",
    "TensorStorageMetadata",
    "BytesStorageMetadata",
    "_MEM_FORMAT_ENCODING",
)
KNOWN = frozenset(
    [
        ("torch", "Size"),
        ("torch", "float32"),
        ("torch.serialization", "_get_layout"),
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
        *(("torch.distributed.checkpoint.metadata", name) for name in _METADATA_CLASSES),
        *(
            ("torch.distributed.checkpoint.planner", name)
            for name in ("SavePlan", "TensorWriteData", "WriteItem", "WriteItemType")
        ),
    ]
)


class _KnownClasses(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in KNOWN:
            raise CheckpointError(
                f"{METADATA} names {module}.{name}, which is no part of a checkpoint's description; nothing was run; "
                "do not use this checkpoint"
            )
        return super().find_class(module, name)


class _Reader(torch_checkpoint.FileSystemReader):
    """torch's reader of the tensors (with `weights_only`), with our reader of the metadata."""

    def __init__(self, folder: Path) -> None:
        super().__init__(str(folder))
        self._metadata = read_metadata(folder)

    def read_metadata(self, *args: object, **kwargs: object) -> Metadata:
        return self._metadata


def read_metadata(folder: Path) -> Metadata:
    """Read the description of a `torch_dist` checkpoint's tensors without running anything it may contain.

    Raises:
        CheckpointError: it is damaged, or names anything but the classes of the format.
    """
    path = folder / METADATA
    try:
        with open_binary(path) as file:
            metadata = _KnownClasses(file).load()
        files = {info.relative_path for info in metadata.storage_data.values()}
        if not all(Path(name).name == name for name in files):
            raise CheckpointError(f"{path} names files outside the checkpoint's folder: {sorted(files)}; {CURE}")
    except CheckpointError:
        raise
    except Exception as error:  # a damaged pickle can end in nearly any exception
        raise CheckpointError(f"{path} cannot be read: {error!r}; {CURE}") from error
    metadata.storage_meta = metadata.storage_meta or StorageMeta()
    return metadata


def rewrite_run(run_dir: Path) -> list[Path]:
    """Rewrite every checkpoint of a run that is in the earlier format, one tensor in memory at a time.

    Each is verified first, and replaced only when the new one is complete.

    Returns:
        The folders that were rewritten; those in the current format are not changed.

    Raises:
        CheckpointError: one is damaged or names what it must not, or writing failed; it is not changed.
    """
    root = run_dir / "checkpoints"
    all_of_them = 1 + len(list(root.iterdir()))
    store = CheckpointStore(root, CheckpointConfig(keep_last=all_of_them))
    store.recover()
    old = [step for step in store.steps() if not (store.path(step) / INDEX).exists()]
    for step in old:
        source = store.path(step)
        manifest = store.verify(source)
        reader = _Reader(source)
        described = reader.read_metadata().state_dict_metadata
        shapes = {n: tuple(entry.size) for n, entry in described.items() if isinstance(entry, TensorStorageMetadata)}
        target = store.begin(step)
        with store.writing(step):
            records = write_full_state(target, shapes, _tensors(reader, shapes), _scalars(source))
            for name in CARRIED_OVER:
                if (source / name).is_dir():
                    shutil.copytree(source / name, target / name)
                elif (source / name).exists():
                    shutil.copy(source / name, target / name)
        store.publish(step, manifest.meta, records)
    return [store.path(step) for step in old]


def _tensors(reader: _Reader, shapes: dict[str, tuple[int, ...]]) -> Iterator[Tensor]:
    for name, shape in shapes.items():
        tensor = torch.empty(shape, dtype=torch.float32)
        torch_checkpoint.load({name: tensor}, storage_reader=reader, no_dist=True)
        yield tensor


def _scalars(folder: Path) -> dict[str, int]:
    common = read_torch(folder / COMMON) if (folder / COMMON).exists() else {}
    return {ADAM_STEP: int(common[ADAM_STEP])} if ADAM_STEP in common else {}
