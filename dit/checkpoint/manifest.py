"""The manifest of a checkpoint: metadata, and hashes that verify its files.

`manifest.json` lists every file of the folder with its size and SHA-256, and contains a digest of its own content. A
flipped bit in any file, including the manifest, is detected before anything is loaded.
"""

import hashlib
import os
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Optional

from dit.auxiliary import PREFIXES
from dit.durable_files import strict_json, write_all
from dit.errors import CheckpointError, ConfigError, first_few
from dit.safe_files import parse_json, read_bytes

MANIFEST = "manifest.json"
FORMAT = 1
BASE = "base"
"""Entry of the metadata: the checkpoint of the adapters' base weights, as `folder` and `digest` of its files."""
RUN = "run"
"""Entry of the metadata: id of the run that saved it, see `dit.checkpoint.run_identity`."""
DATA = "data"
"""Entry of the metadata: identity of the data, see `DataConfig.identity`."""
FLUSH_BYTES = 256 << 20
MOST_FILES = 100_000  # a checkpoint has two files per rank
HASH_THREADS = 8  # hashlib releases the GIL; one core hashes 1-2 GiB/s
NUM_DIFFERENCES = 5  # differences listed in a message; the others are counted
CURE = "delete or restore the folder; an older valid checkpoint is used if there is one"

_FOLDER = re.compile(r"iter_(\d{7,})(?:\.replaced)?")


class UnlistedFileError(CheckpointError):
    """A checkpoint has a link, or a file that its manifest does not list."""


@dataclass(frozen=True)
class FileRecord:
    """Size and SHA-256 (hex) of one file."""

    size_bytes: int
    sha256: str


@dataclass(frozen=True)
class HeldOut:
    """A held-out loss, and the optimizer step whose weights it was measured with."""

    loss: float
    step: int


@dataclass(frozen=True)
class Manifest:
    """Contents of a checkpoint.

    Attributes:
        files: every file except the manifest, by path relative to the folder, with forward slashes.
        meta: plain JSON that a run reads before loading, see `Checkpointer.meta`.
    """

    step: int
    files: Mapping[str, FileRecord]
    meta: Mapping[str, Any] = field(default_factory=dict)
    created: float = field(default_factory=time.time)

    @property
    def size_bytes(self) -> int:
        return sum(record.size_bytes for record in self.files.values())

    @property
    def held_out(self) -> Optional[HeldOut]:
        """The newest held-out loss when the checkpoint was taken; None before the first one."""
        value = self.meta.get("held_out_loss")
        if value is None:
            return None
        # float("NaN") is nan. Without `held_out_step`, it is the loss of this step.
        return HeldOut(float(value), int(self.meta.get("held_out_step", self.step)))

    @property
    def held_out_loss(self) -> Optional[float]:
        """The held-out loss of this step; None if it was not measured."""
        return None if self.held_out is None or self.held_out.step != self.step else self.held_out.loss

    @property
    def is_imported(self) -> bool:
        """Whether it has imported weights, without optimizer state and data position to resume."""
        return "imported_from" in self.meta

    @property
    def run(self) -> Optional[str]:
        """The id of the run that saved it; None for imported weights."""
        value = self.meta.get(RUN)
        return None if value is None else str(value)

    @property
    def base(self) -> Optional[Mapping[str, str]]:
        """Folder or hub address, and digest, of the base weights if this checkpoint has only adapters; else None."""
        base = self.meta.get(BASE)
        if base is None:
            return None
        if not isinstance(base, dict) or not all(isinstance(base.get(name), str) for name in ("folder", "digest")):
            raise CheckpointError(f"the manifest of step {self.step} names no checkpoint as its base: {base!r}; {CURE}")
        return base

    def to_text(self) -> str:
        """Return the canonical text of this manifest, with its own digest."""
        body = {
            "format": FORMAT,
            "step": self.step,
            "created": self.created,
            "meta": dict(self.meta),
            "files": {name: [record.size_bytes, record.sha256] for name, record in sorted(self.files.items())},
        }
        digest = hashlib.sha256(strict_json(body).encode()).hexdigest()
        return strict_json({"sha256": digest, **body}, indent=1)

    @classmethod
    def from_text(cls, text: str) -> "Manifest":
        """Read a manifest back; raise `ValueError` unless the text is exactly the one that `to_text` writes."""
        raw = parse_json(text)
        try:
            files = {name: FileRecord(int(size), str(digest)) for name, (size, digest) in raw["files"].items()}
            manifest = cls(step=int(raw["step"]), files=files, meta=dict(raw["meta"]), created=raw["created"])
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ValueError(f"field missing or of a wrong kind ({error!r})") from error
        if len(files) > MOST_FILES:
            raise ValueError(f"it lists {len(files):,} files, at most {MOST_FILES:,}")
        if raw.get("format") != FORMAT:
            raise ValueError(f"format {raw.get('format')!r}, this version reads {FORMAT}")
        if manifest.to_text() != text:
            raise ValueError("its content does not match its own digest")
        return manifest


def step_of_folder(name: str) -> Optional[int]:
    """Return the step in a checkpoint folder's name, None for any other name."""
    match = _FOLDER.fullmatch(name)
    return int(match.group(1)) if match else None


def model_fingerprint(parameters: Mapping[str, Sequence[int]]) -> dict[str, Any]:
    """Return the identity of a model: the unsharded shape of every parameter by global name."""
    return {"parameters": {name: [int(n) for n in shape] for name, shape in sorted(parameters.items())}}


def stored_shapes(manifest: Manifest) -> dict[str, list[int]]:
    """Return the shapes in the stored result of `model_fingerprint`."""
    stored = manifest.meta.get("fingerprint")
    if not isinstance(stored, dict) or not isinstance(stored.get("parameters"), dict):
        raise CheckpointError(
            f"the checkpoint of step {manifest.step} has no model fingerprint, so its model is unknown; "
            "start from another checkpoint, or in a new training.run_dir"
        )
    return stored["parameters"]


def check_same_model(
    saved: Mapping[str, list[int]],
    expected: Mapping[str, Sequence[int]],
    checkpoint: str,
    settings: Sequence[str] = (),
    cure: str = "use the settings it was trained with, or another training.run_dir",
) -> None:
    """Check that a checkpoint belongs to the model about to be trained.

    Args:
        saved, expected: unsharded shape of each parameter of the checkpoint, and of the model.
        checkpoint: name of the checkpoint in the message.
        settings: changes of the model's settings since the checkpoint; the message lists them.
    """
    expected = {name: list(shape) for name, shape in expected.items()}
    if saved == expected:
        return
    unshared = saved.keys() ^ expected.keys()
    if unshared and all(name.startswith(PREFIXES) for name in unshared):
        has = "has" if unshared <= saved.keys() else "lacks"
        networks = " and ".join(sorted({name.partition(".")[0] for name in unshared}))
        raise ConfigError(
            f"{checkpoint} {has} the {networks} that the objective adds "
            f"({len(unshared)} parameters); set the objective back, or give another training.run_dir with "
            "checkpoint.start_from=this run folder, which loads the model without it"
        )
    names, differences = sorted(saved.keys() | expected.keys()), []
    for name in names:
        if name not in expected:
            differences.append(f"{name} {saved[name]} is only in the checkpoint")
        elif name not in saved:
            differences.append(f"{name} {expected[name]} is only in the model")
        elif saved[name] != expected[name]:
            differences.append(f"{name} is {saved[name]} in the checkpoint and {expected[name]} in the model")
    changed = f" ({'; '.join(settings)})" if settings else ""
    raise ConfigError(
        f"{checkpoint} is of another model{changed}: {len(differences)} of {len(names)} parameters differ: "
        f"{first_few(differences, NUM_DIFFERENCES, '; ')}; {cure}"
    )


def check_same_base(folder: Path, manifest: Manifest, base: Optional[Mapping[str, str]]) -> None:
    """Check that adapters continue training with `base`, the base weights that they were trained with."""
    saved = manifest.base
    if saved is not None and base is not None and saved["digest"] != base["digest"]:
        raise ConfigError(
            f"{folder} has adapters (LoRA) for the weights of {saved['folder']}, but checkpoint.start_from has "
            f"those of {base['folder']}; set checkpoint.start_from={saved['folder']}, or another training.run_dir"
        )


def tree_files(folder: Path) -> Iterator[str]:
    """Yield every file under `folder` by relative name, except the manifest."""
    for entry in sorted(os.scandir(folder), key=lambda e: e.name):
        if entry.is_dir(follow_symlinks=False):
            for name in tree_files(Path(entry.path)):
                yield f"{entry.name}/{name}"
        elif not entry.is_file(follow_symlinks=False):
            raise UnlistedFileError(
                f"{entry.path} is a link or a special file, refused in a checkpoint; remove it, or restore the file"
            )
        else:
            yield entry.name


def hash_tree(folder: Path, hashed: Mapping[str, FileRecord]) -> dict[str, FileRecord]:
    """Return size and SHA-256 of every file under `folder`; flush and read only those that `hashed` lacks."""
    names = {name for name in tree_files(folder) if name != MANIFEST}
    for name, record in hashed.items():
        size = os.lstat(folder / name).st_size if name in names else None
        if size != record.size_bytes:
            raise CheckpointError(
                f"{folder / name} {'is missing' if size is None else f'has {size} bytes'}, but its writer wrote "
                f"{record.size_bytes} bytes; check that all nodes mount the same disk"
            )
    others = sorted(names - hashed.keys())
    with ThreadPoolExecutor(HASH_THREADS) as pool:
        return {**hashed, **dict(zip(others, pool.map(lambda name: hash_file(folder / name, flush=True), others)))}


def hash_file(path: Path, *, flush: bool = False) -> FileRecord:
    """Read a file and return its size and SHA-256; `flush` first flushes it to the disk."""
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW), "rb", buffering=0) as file:
        if flush:
            os.fsync(file.fileno())
        digest = hashlib.file_digest(file, "sha256")
        return FileRecord(file.tell(), digest.hexdigest())


def write_hashed(path: Path, pieces: Iterable[memoryview]) -> FileRecord:
    """Write a new file, flushed to the disk; return its size and SHA-256, computed while writing."""
    digest, size = hashlib.sha256(), 0
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o644)
    try:
        with ThreadPoolExecutor(1) as hashing:  # hashlib and writing release the GIL
            for piece in pieces:
                hashed = hashing.submit(digest.update, piece)
                write_all(descriptor, piece)
                size += len(piece)
                if size // FLUSH_BYTES > (size - len(piece)) // FLUSH_BYTES:  # keeps the final flush short
                    os.fdatasync(descriptor)
                hashed.result()
        os.fsync(descriptor)
    except OSError as error:
        error.filename = str(path)  # `os.write` does not set it
        raise
    finally:
        os.close(descriptor)
    return FileRecord(size, digest.hexdigest())


def read_manifest(folder: Path) -> Manifest:
    """Read a checkpoint's manifest and check it against its digest and the folder's name; reads no other file."""
    path = folder / MANIFEST
    if folder.is_symlink() or path.is_symlink():
        raise UnlistedFileError(f"{folder} or its {MANIFEST} is a link, refused in a checkpoint; give the real folder")
    try:
        manifest = Manifest.from_text(read_bytes(path).decode())
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing, the checkpoint was never finished; {CURE}") from error
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} is damaged: {error}; {CURE}") from error
    named_step = step_of_folder(folder.name)
    if named_step is not None and named_step != manifest.step:
        raise CheckpointError(f"{path} is of step {manifest.step}, the folder's name says {named_step}; {CURE}")
    return manifest


def verify_folder(folder: Path, *, hashes: bool = True, share: tuple[int, int] = (0, 1)) -> Manifest:
    """Verify that a checkpoint is, to the bit, what was published.

    Args:
        hashes: also read the files; without it only names and sizes are compared.
        share: (i, n) to read only the i-th of n shares of the files, where n ranks verify one checkpoint together.
    """
    manifest = read_manifest(folder)
    for name in manifest.files:
        if any(part in ("", ".", "..") for part in name.split("/")):
            raise CheckpointError(f"{folder / MANIFEST} lists {name!r}, a path outside the checkpoint; {CURE}")
    try:
        present = set(tree_files(folder)) - {MANIFEST}
        for name, record in manifest.files.items():
            if name not in present:
                raise CheckpointError(f"{folder / name} is missing; {CURE}")
            if (size := os.lstat(folder / name).st_size) != record.size_bytes:
                raise CheckpointError(f"{folder / name} has {size} bytes, {MANIFEST} says {record.size_bytes}; {CURE}")
        if unlisted := sorted(present - manifest.files.keys()):
            raise UnlistedFileError(f"{folder / unlisted[0]} is not in {MANIFEST}; remove that file")
        if hashes:
            with ThreadPoolExecutor(HASH_THREADS) as pool:
                largest_first = sorted(manifest.files.items(), key=lambda item: (-item[1].size_bytes, item[0]))
                share_files = dict(largest_first[share[0] :: share[1]])
                records = pool.map(lambda name: hash_file(folder / name), share_files)
                for (name, record), now in zip(share_files.items(), records):
                    if now != record:
                        raise CheckpointError(
                            f"{folder / name} was damaged after saving: SHA-256 {now.sha256[:12]}..., "
                            f"{MANIFEST} says {record.sha256[:12]}...; {CURE}"
                        )
    except OSError as error:
        raise CheckpointError(f"{error.filename or folder} cannot be read: {error.strerror}; {CURE}") from error
    return manifest
