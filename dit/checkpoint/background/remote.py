"""Copies of checkpoints in an object store, or at any other address that fsspec supports.

    s3://bucket/run/owner.yaml                                   id and settings of the run, written before a copy
    s3://bucket/run/iter_0000400/rank_00000.safetensors ...      files of a checkpoint
    s3://bucket/run/iter_0000400/manifest.json                   written last, deleted first: it marks a complete copy
    s3://bucket/run/iter_0000400/damaged                         written if a fetched file does not match the manifest

An object appears only when it is complete, so a manifest guarantees that all files that it lists were written before.

Downloaded files are verified against the manifest, by size and SHA-256, before they become a checkpoint
(`CheckpointStore.adopt`). The protocol's client determines credentials, region and endpoint: for `s3`,
AWS_ACCESS_KEY_ID, AWS_ENDPOINT_URL and similar variables. This module does not import torch.
"""

import errno
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from glob import has_magic
from pathlib import Path
from typing import Any, Optional, ParamSpec, TypeVar

import yaml

from dit.checkpoint.manifest import MANIFEST, Manifest, step_of_folder, tree_files
from dit.checkpoint.reader_lock import being_read
from dit.checkpoint.records import usable
from dit.checkpoint.store import DISK_FULL, CheckpointStore, DamagedError
from dit.errors import CheckpointError
from dit.safe_files import LONGEST_FILE, parse_yaml, read_bytes

logger = logging.getLogger(__name__)
P = ParamSpec("P")
T = TypeVar("T")

CONNECT_S, READ_S, ATTEMPTS = 10, 60, 4
"""Limits of one request to an S3 store: seconds to connect, seconds between two packets, number of attempts."""

OWNER, DAMAGED = "owner.yaml", "damaged"


@dataclass(frozen=True)
class Owner:
    """The run that an address belongs to, with its settings, see `RunConfig.to_record`."""

    run: str
    settings: Mapping[str, Any]

    def __str__(self) -> str:
        return f"run {self.run} in training.run_dir={self.settings['training']['run_dir']}"


class RemoteStore:
    """The copies of one run. Only one process at a time may write; any process may read.

    Methods raise `CheckpointError` if the store cannot be read or written.

    Args:
        recent: manifests of copies that this process has read or written, by step; they are not read again.
    """

    def __init__(self, address: str, recent: Optional[dict[int, Manifest]] = None) -> None:
        import fsspec  # imported here because few runs need it

        options: dict[str, Any] = {"skip_instance_cache": True}
        if address.startswith("file://"):
            options["auto_mkdir"] = True  # other stores have no folders
        if address.startswith(("s3://", "s3a://")):
            retries = {"max_attempts": ATTEMPTS, "mode": "standard"}
            options["config_kwargs"] = {"connect_timeout": CONNECT_S, "read_timeout": READ_S, "retries": retries}
            options["use_listings_cache"] = False
        self.address = address.rstrip("/")
        try:
            self._files, root = fsspec.core.url_to_fs(self.address, **options)
        except (ImportError, ValueError) as error:
            raise CheckpointError(f"{address} cannot be used: {error}") from error
        self._root = root.rstrip("/")
        self._recent = {} if recent is None else recent

    def owner(self) -> Optional[Owner]:
        """Return the run that the address belongs to; None if the address is empty."""
        try:
            text = self._try(self._read, f"{self._root}/{OWNER}")
        except FileNotFoundError:
            if steps := self.steps():
                raise CheckpointError(
                    f"{self.address} has {len(steps)} checkpoints, but no {OWNER} that names their run; delete them, "
                    "or use another checkpoint.copy_to"
                ) from None
            return None
        with usable(f"{self.address}/{OWNER}"):
            entry = parse_yaml(text)
            return Owner(str(entry["run"]), entry["settings"])

    def put_owner(self, owner: Owner) -> None:
        """Record the run that the address belongs to; `FileNotFoundError` if its bucket or folder cannot be created."""
        text = yaml.safe_dump(asdict(owner), sort_keys=False).encode()
        self._try(self._files.pipe_file, f"{self._root}/{OWNER}", text)

    def claim(self, owner: Owner) -> None:
        """Check that the address belongs to a run, and update its settings; call this before each change."""
        present = self.owner()
        if present is not None and present.run != owner.run:
            raise CheckpointError(
                f"{self.address} has the copies of {present}, and this is {owner}; nothing was copied; give each run a "
                "separate checkpoint.copy_to"
            )
        if present != owner:
            self.put_owner(owner)

    def steps(self) -> list[int]:
        """Return the steps of all copies, including incomplete ones, ascending."""
        try:
            names = self._try(self._files.ls, self._root, detail=False, refresh=True)
        except FileNotFoundError:
            return []
        steps = (step_of_folder(name.rstrip("/").rsplit("/", 1)[-1]) for name in names)
        return sorted(step for step in steps if step is not None)

    def manifests(self, after: int = -1) -> Iterator[Manifest]:
        """Read the manifests of complete copies of steps after `after`, newest first, one request per manifest."""
        for step in reversed(self.steps()):
            if step <= after:
                return
            if (manifest := self.manifest(step)) is not None:
                yield manifest

    def manifest(self, step: int) -> Optional[Manifest]:
        """Read the manifest of a copy; None if the copy is incomplete or (with a warning) damaged."""
        try:
            manifest = Manifest.from_text(self._try(self._read, self._path(step, MANIFEST)).decode())
        except FileNotFoundError:
            return None
        except ValueError as error:
            logger.warning("%s/%s is damaged: %s", self.address, _folder(step), error)
            return None
        return manifest if manifest.step == step else None

    def copies(self) -> dict[int, Optional[Manifest]]:
        """Return the manifests of all copies by step, None for unusable ones.

        This reads only manifests of copies that this process has neither read nor written.
        """
        objects: dict[int, set[str]] = {}
        for path in self._sizes():
            folder, _, name = path.partition("/")
            if name and (step := step_of_folder(folder)) is not None:
                objects.setdefault(step, set()).add(name)
        copies: dict[int, Optional[Manifest]] = {}
        for step, names in sorted(objects.items()):
            complete = MANIFEST in names and DAMAGED not in names
            if complete and step not in self._recent and (manifest := self.manifest(step)) is not None:
                self._recent[step] = manifest
            copies[step] = self._recent.get(step) if complete else None
        return copies

    def _sizes(self, folder: str = "") -> dict[str, int]:
        """List the objects below a folder in one request per thousand; return their sizes by name in that folder."""
        root = f"{self._root}/{folder}".rstrip("/")
        self._files.invalidate_cache()
        with suppress(FileNotFoundError):
            entries = self._try(self._files.find, root, detail=True)
            return {path.removeprefix(f"{root}/"): entry["size"] for path, entry in entries.items()}
        return {}

    def mark_damaged(self, step: int, reason: str) -> None:
        """Mark a copy as damaged; the next copy of this step replaces all its files."""
        self._try(self._files.pipe_file, self._path(step, DAMAGED), reason.encode())

    def put(self, folder: Path, existing: Manifest | None = None) -> int:
        """Copy a local checkpoint, locked against deletion meanwhile; return the number of copied bytes.

        Files that are unchanged since the `existing` copy and have the same size are not copied again.
        """
        with being_read(folder):
            text = read_bytes(folder / MANIFEST)
            manifest = Manifest.from_text(text.decode())
            names = set(tree_files(folder)) - {MANIFEST}
            if names != manifest.files.keys():
                raise CheckpointError(f"{folder} has files that differ from its {MANIFEST}; it is not copied")
            existing_files = {} if existing is None else existing.files
            sizes = {} if existing is None else self._sizes(_folder(manifest.step))
            changed = sorted(
                name
                for name, record in manifest.files.items()
                if existing_files.get(name) != record or sizes.get(name) != record.size_bytes
            )
            self._recent.pop(manifest.step, None)
            if existing is not None and changed:
                self._try(self._files.rm_file, self._path(manifest.step, MANIFEST))
            for name in changed:
                self._try(self._files.put_file, str(folder / name), self._path(manifest.step, name))
            self._try(self._files.pipe_file, self._path(manifest.step, MANIFEST), text)
        self._recent[manifest.step] = manifest
        return sum(manifest.files[name].size_bytes for name in changed) + len(text)

    def get(self, manifest: Manifest, folder: Path) -> None:
        """Copy the files of a checkpoint into an empty folder, without its manifest; verifies only their sizes."""
        step = manifest.step
        for name, record in manifest.files.items():
            target, address = folder / name, f"{self.address}/{_folder(step)}"
            if folder.resolve() not in target.resolve().parents:
                raise CheckpointError(f"{address} lists {name!r}, a path outside the checkpoint")
            try:
                about = self._try(self._files.info, self._path(step, name))
            except FileNotFoundError as error:
                raise DamagedError(f"{address}/{name} is missing; copy the checkpoint again") from error
            if about["type"] != "file" or about["size"] != record.size_bytes:
                raise DamagedError(
                    f"{address}/{name} is a {about['type']} of {about['size']} bytes, its {MANIFEST} says "
                    f"{record.size_bytes}; copy the checkpoint again"
                )
            target.parent.mkdir(parents=True, exist_ok=True)
            self._try(self._files.get_file, self._path(step, name), str(target))

    def delete(self, step: int) -> None:
        """Delete the copy of `step`, its manifest first, so that an incomplete copy is never used."""
        with suppress(FileNotFoundError):
            self._try(self._files.rm_file, self._path(step, MANIFEST))
        path = self._path(step)
        with suppress(FileNotFoundError):
            if not has_magic(path):
                self._try(self._files.rm, path, recursive=True)
                return
            # `rm` would delete everything that matches the path as a pattern.
            entries = self._try(self._files.find, path, withdirs=True, detail=True)
            for name, entry in sorted(entries.items(), reverse=True):  # a folder after its content
                if entry["type"] != "directory":
                    self._try(self._files.rm_file, name)
                else:
                    with suppress(OSError):  # object stores have no folders
                        self._files.rmdir(name)

    def _read(self, path: str) -> bytes:
        """Read an object; objects longer than `LONGEST_FILE` are truncated, so that verification fails."""
        if self.address.startswith("file://") and not Path(path).is_file():  # a pipe would block
            raise FileNotFoundError(path)
        try:
            return bytes(self._files.cat_file(path, start=0, end=LONGEST_FILE))
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            return b""  # S3 refuses a range of an empty object

    def _path(self, step: int, name: str = "") -> str:
        return f"{self._root}/{_folder(step)}/{name}".rstrip("/")

    def _try(self, action: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call a method of the store; errors of its clients, except `FileNotFoundError`, become `CheckpointError`."""
        try:
            return action(*args, **kwargs)
        except (FileNotFoundError, CheckpointError):
            raise
        except Exception as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            full = isinstance(error, OSError) and error.errno in DISK_FULL
            cure = "free space" if full else "check address, credentials and network"
            raise CheckpointError(f"{self.address}: {type(error).__name__}: {reason}; {cure}") from error


def copy_all(store: CheckpointStore, remote: RemoteStore) -> int:
    """Copy complete local checkpoints that are missing remotely or differ, newest first, and delete unselected copies.

    A copy is retained while its local checkpoint exists, or if the retention rules select it among the copies. An empty
    run folder therefore deletes only what the rules would delete. Returns the number of copied bytes.
    """
    present = remote.copies()
    copies = {step: copy for step, copy in present.items() if copy is not None}
    local = store.complete()
    changed = {step for step in local if copies.get(step) != local[step]}
    losses = {step: copy.held_out_loss for step, copy in {**copies, **local}.items()}
    keep = store.retained(losses) | local.keys()
    cut_off = {step for step in present.keys() - copies.keys() if step < max(local, default=0)}
    unselected = (copies.keys() | cut_off) - keep
    sent = 0
    for step in sorted(changed, reverse=True):
        if step in present and step not in copies:  # incomplete or damaged
            remote.delete(step)
        sent += remote.put(store.path(step), copies.get(step))
    for step in unselected:
        remote.delete(step)
    return sent


def fetch_newer(store: CheckpointStore, remote: RemoteStore) -> int | None:
    """Copy and verify the newest valid checkpoint of the remote store that is newer than all local ones.

    Returns its step; None if there is none.
    """
    local, failures = store.complete(), list[str]()
    for manifest in remote.manifests(after=max(local, default=-1)):
        step = manifest.step
        logger.info("fetching checkpoint of step %d (%d bytes) from %s", step, manifest.size_bytes, remote.address)
        try:
            store.adopt(manifest, partial(remote.get, manifest))
            return step
        except CheckpointError as error:
            logger.warning("skipping %s/%s: %s", remote.address, _folder(step), error)
            failures.append(f"step {step}: {error}")
            if isinstance(error, DamagedError):
                with suppress(CheckpointError, FileNotFoundError):  # the address may be read-only
                    remote.mark_damaged(step, str(error))
    if failures and not local:
        raise CheckpointError(
            f"none of the {len(failures)} complete copies at {remote.address} could be fetched; the newest is "
            f"{failures[0]}; correct this, or delete the copies to start at step 0"
        )
    return None


def _folder(step: int) -> str:
    return f"iter_{step:07d}"
