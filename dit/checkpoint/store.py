"""Checkpoint folders: written under a temporary name, verified, and published by one atomic rename.

    checkpoints/iter_0000400/           a checkpoint: the files of the ranks, and manifest.json
    checkpoints/iter_0000600.tmp/       being written; if a crash leaves it, the next `begin` removes it
    checkpoints/iter_0000100.trash/     being deleted; removed likewise
    checkpoints/iter_0000400.replaced/  an older checkpoint of the same step, deleted after the newer one is published
    checkpoints/iter_0000400.part       its next manifest, being written; removed likewise

There is no "latest" file that a crash could leave half written: the newest folder whose manifest verifies is the
current checkpoint. All ranks write the sharded state (`dit.checkpoint.sharded_state`). This module only creates,
verifies and removes folders, and does not import torch.

Saving a step (ranks only need to agree on the step number):

    if rank == 0: store.begin(step)                                             # then a barrier
    with store.writing(step): write_this_ranks_files(store.partial_path(step))  # then check that no rank failed
    if rank == 0: store.publish(step, meta, hashes_of_all_ranks)                # then a barrier
"""

import errno
import logging
import os
import resource
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Optional

from dit.checkpoint.manifest import (
    MANIFEST,
    FileRecord,
    Manifest,
    UnlistedFileError,
    hash_tree,
    read_manifest,
    step_of_folder,
    verify_folder,
)
from dit.checkpoint.reader_lock import to_delete
from dit.durable_files import fsync, write_atomic
from dit.errors import CheckpointError, UserError
from dit.settings import CheckpointConfig

logger = logging.getLogger(__name__)

PARTIAL, TRASH, REPLACED, PART = ".tmp", ".trash", ".replaced", ".part"
DISK_FULL = (errno.ENOSPC, errno.EDQUOT)


class DamagedError(CheckpointError):
    """The files of a checkpoint do not match its manifest."""


class CheckpointStore:
    """The checkpoints of one run folder.

    One process (rank 0) calls `begin`, `publish` and `prune`, one save at a time. Any process may read, even while
    another process saves.

    Attributes:
        unpublished: step of a save that has begun; stays set if the save fails.
    """

    def __init__(self, root: Path | str, config: CheckpointConfig) -> None:
        config.validate()
        self.root = Path(root)
        self.config = config
        self.unpublished: Optional[int] = None

    def path(self, step: int) -> Path:
        """Return the folder of the published checkpoint of `step`."""
        return self.root / f"iter_{step:07d}"

    def partial_path(self, step: int) -> Path:
        """Return the folder that all ranks write to between `begin` and `publish`."""
        return self.root / f"iter_{step:07d}{PARTIAL}"

    def steps(self) -> list[int]:
        """Return the steps with a published folder, valid or not, ascending."""
        return sorted({step for step, _ in self._folders()})

    def check_link(self) -> None:
        """Check that the folder is not a link without a target, such as on a disk that is not mounted."""
        if self.root.is_symlink() and not self.root.exists():
            raise CheckpointError(
                f"{self.root} links to {os.readlink(self.root)}, which does not exist; mount its disk, or delete the "
                "link to start from step 0"
            )

    def begin(self, step: int) -> Path:
        """Remove leftovers of crashed processes, and create the empty folder of a new checkpoint.

        Retention is applied, too, so there is at most one checkpoint too many, even if runs often crash between
        publishing and deleting.
        """
        self.unpublished = step
        with self.writing(step):
            self.root.mkdir(parents=True, exist_ok=True)
            self.recover()
            self.prune(up_to=step - 1)
            self.partial_path(step).mkdir()
        return self.partial_path(step)

    @contextmanager
    def writing(self, step: int) -> Iterator[None]:
        """Convert a failed write of this rank to a `CheckpointError`, and abort the checkpoint.

        A failure on any rank aborts the save on all: `publish` then finds no folder.
        """
        try:
            yield
        except BaseException as error:
            # On a full disk, the unfinished folder must be removed to free space.
            self.abort(step)
            os_error = _os_error(error)
            if os_error is None or isinstance(error, UserError):
                raise
            raise CheckpointError(self._why(step, os_error)) from error

    def abort(self, step: int) -> None:
        """Remove the unfinished checkpoint of `step`, if there is one; `attach` then ignores this step."""
        self.unpublished = step
        self._discard(self.partial_path(step))

    def publish(self, step: int, meta: Mapping[str, Any], hashed: Mapping[str, FileRecord] = {}) -> Manifest:
        """Publish the folder that the ranks wrote as the checkpoint of `step`, and apply the retention rules.

        The manifest is written last, and one rename publishes the checkpoint. An existing checkpoint of `step` stays
        readable until then. Files without an entry in `hashed` are flushed and hashed.
        """
        partial = self.partial_path(step)
        if not partial.is_dir():
            raise CheckpointError(
                f"{partial} does not exist: `begin` was not called or a rank failed to write; "
                "see the other ranks' errors, earlier checkpoints are intact"
            )
        with self.writing(step):
            manifest = Manifest(step=step, files=hash_tree(partial, hashed), meta=dict(meta))
            if not manifest.files:
                raise CheckpointError(
                    f"{partial} is empty, because no rank wrote a file; earlier checkpoints are intact"
                )
            self._put_in_place(manifest)
        self.unpublished = None
        self.prune(up_to=step, verified=step)
        return manifest

    def adopt(self, manifest: Manifest, fetch: Callable[[Path], None]) -> None:
        """Fetch a checkpoint into this folder, if its files match its manifest exactly; otherwise leave no file.

        Args:
            fetch: called with an empty folder; writes the files except the manifest.

        Raises:
            DamagedError: a file is damaged.
        """
        step = manifest.step
        with self.writing(step):
            self.root.mkdir(parents=True, exist_ok=True)
            self.recover()
            self.partial_path(step).mkdir()
            fetch(self.partial_path(step))
            records = hash_tree(self.partial_path(step), {})
            for name in sorted(records.keys() | manifest.files.keys()):
                if records.get(name) != manifest.files.get(name):
                    raise DamagedError(f"file {name} does not match its {MANIFEST}")
            self._put_in_place(manifest)

    def _put_in_place(self, manifest: Manifest) -> None:
        """Write the manifest into the unfinished folder, publish it by one rename, and delete the replaced folder."""
        partial, final = self.partial_path(manifest.step), self.path(manifest.step)
        replaced = final.with_suffix(REPLACED)
        write_atomic(partial / MANIFEST, manifest.to_text())
        for folder, _, _ in os.walk(partial, topdown=False):
            fsync(Path(folder))
        if final.exists():
            self._discard(replaced)
            os.rename(final, replaced)
        os.rename(partial, final)
        fsync(self.root)
        self._discard(replaced)

    def attach(self, step: int, meta: Mapping[str, Any]) -> None:
        """Add entries to the manifest of the published checkpoint of `step`, and apply the retention rules again.

        Does nothing if the checkpoint was deleted, or if its last save failed: the folder may then be of an earlier
        attempt. The manifest is replaced by one rename, so readers see either the old one or the new one.
        """
        folder = self.path(step)
        if step == self.unpublished or not folder.is_dir():
            return
        manifest = read_manifest(folder)
        try:
            # Outside the folder, because a leftover of a crash inside it would fail verification. `begin` removes it.
            text = replace(manifest, meta={**manifest.meta, **meta}).to_text()
            write_atomic(folder / MANIFEST, text, part=folder.with_suffix(PART))
        except OSError as error:
            raise CheckpointError(
                f"{folder / MANIFEST} cannot be written: {error.strerror}; free space or fix the permissions, then "
                "resume; the checkpoint itself is intact"
            ) from error
        self.prune(up_to=step, verified=step)

    def newest_first(self) -> list[Path]:
        """Return all published folders, valid or not, in the order in which a resume tries them."""
        order = sorted(self._folders(), key=lambda item: (item[0], item[1].suffix != REPLACED), reverse=True)
        return [folder for _, folder in order]

    def prune(self, *, up_to: Optional[int] = None, verified: Optional[int] = None) -> list[int]:
        """Delete the checkpoints that no retention rule selects, and return their steps.

        The rules ignore damaged checkpoints, and those that may be intact: with an added file or link, or on a disk
        that cannot be read now, which are not deleted. Nothing is deleted unless one of the retained checkpoints
        verifies. A checkpoint that is being read (`dit.checkpoint.reader_lock`) is deleted by the next save.

        Args:
            up_to: ignore newer checkpoints, which a run that resumed before damaged ones replaces later.
            verified: a step that is known to be valid and is retained; None verifies the retained checkpoints.
        """
        manifests: dict[int, Optional[Manifest]] = {}
        for step in self.steps():
            if self.path(step).exists() and (up_to is None or step <= up_to):
                try:
                    manifests[step] = verify_folder(self.path(step), hashes=False)
                except CheckpointError as error:
                    cause = error.__cause__
                    may_be_intact = isinstance(cause, OSError) and not isinstance(cause, FileNotFoundError)
                    if not (may_be_intact or isinstance(error, UnlistedFileError)):
                        manifests[step] = None
        keep = self.retained({step: m.held_out_loss for step, m in manifests.items() if m is not None})
        unselected, newest = sorted(manifests.keys() - keep - {verified}), sorted(keep, reverse=True)
        if unselected and verified is None and not any(map(self._manifest_if_valid, newest)):
            logger.warning("deleting no checkpoint: none of those to keep (%s) is valid", sorted(keep))
            return []
        deleted = [step for step in unselected if self._delete(step)]
        if deleted:
            logger.debug("deleted checkpoints of steps %s, retained %s", deleted, sorted(keep))
        return deleted

    def _delete(self, step: int) -> bool:
        """Delete a checkpoint unless it is being read; return whether it was deleted."""
        with suppress(OSError), to_delete(self.path(step)) as unread:
            if unread:
                self._discard(self.path(step))
            return unread
        return False

    def complete(self) -> dict[int, Manifest]:
        """Return the manifests, by step, of checkpoints whose files have the listed names and sizes; hashes nothing."""
        manifests = {step: self._manifest_if_valid(step, hashes=False) for step in self.steps()}
        return {step: manifest for step, manifest in manifests.items() if manifest is not None}

    def retained(self, losses: Mapping[int, Optional[float]]) -> set[int]:
        """Return the steps that a retention rule selects, by step and held-out loss of the complete checkpoints."""
        newest = sorted(losses, reverse=True)
        keep = set(newest[: self.config.keep_last])
        if self.config.keep_every:
            keep |= {step for step in newest if step % self.config.keep_every == 0}
        return keep | _lowest(losses, self.config.keep_best)

    def _folders(self) -> Iterator[tuple[int, Path]]:
        with suppress(FileNotFoundError, NotADirectoryError):
            for folder in self.root.iterdir():
                step = step_of_folder(folder.name)
                if step is not None and folder.is_dir():
                    yield step, folder

    def _manifest_if_valid(self, step: int, *, hashes: bool = True) -> Optional[Manifest]:
        """Return the manifest if the hashes of all files match it, or only their sizes, because hashing is slow."""
        try:
            return verify_folder(self.path(step), hashes=hashes)
        except CheckpointError:
            return None

    def recover(self) -> None:
        """Finish or undo the work of a crashed process: unfinished, replaced and partly deleted folders."""
        for folder in sorted(self.root.iterdir()):
            if step_of_folder(folder.stem) is None:
                continue
            if folder.suffix == REPLACED and not folder.with_suffix("").exists():
                os.rename(folder, folder.with_suffix(""))  # a crash between the two renames of `publish`
            elif folder.suffix in (PARTIAL, TRASH, REPLACED, PART):
                logger.info("removing %s, left by an interrupted run", folder)
                self._discard(folder)

    def _discard(self, folder: Path) -> None:
        """Delete a folder so that a crash in between leaves nothing that looks like a checkpoint."""
        trash = folder.with_suffix(TRASH)
        try:
            if folder != trash:
                if os.path.lexists(trash):
                    _remove(trash)
                os.rename(folder, trash)
                fsync(self.root)
            _remove(trash)
        except FileNotFoundError:
            pass  # it does not exist, or another rank deleted it
        except OSError as error:
            logger.warning("cannot delete %s (%s); delete it by hand to get its space back", folder, error)

    def _why(self, step: int, error: OSError) -> str:
        newest = self.steps()
        intact = f"the checkpoint of step {newest[-1]} is intact" if newest else "there is no earlier checkpoint"
        where = error.filename or self.partial_path(step)
        if error.errno not in DISK_FULL:
            return (
                f"checkpoint of step {step} was not written: {error.strerror} at {where}; "
                f"{cure_of(error, self.root)}; {intact}"
            )
        needed, free = "an unknown number of", "unknown"
        with suppress(CheckpointError, IndexError):
            needed = f"about {read_manifest(self.path(newest[-1])).size_bytes}"
        with suppress(OSError):
            free = str(shutil.disk_usage(self.root).free)
        return (
            f"checkpoint of step {step} was not written: the disk of {self.root} is full; it needs {needed} bytes, "
            f"{free} are free now that the unfinished part is gone; free space or lower checkpoint.keep_last="
            f"{self.config.keep_last}, keep_every={self.config.keep_every}, keep_best={self.config.keep_best}; {intact}"
        )


def cure_of(error: OSError, root: Path) -> str:
    """Return the cure of a failed write below `root`, or into shared memory, for which the same limit applies."""
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    if error.errno == errno.EFBIG and limit != resource.RLIM_INFINITY:
        return f"the limit for a file is {limit} bytes (ulimit -f); raise it"
    return f"check the disk and the permissions of {root}"


def _lowest(losses: Mapping[int, Optional[float]], count: int) -> set[int]:
    """Return the steps with the lowest losses; ties prefer the newer step."""
    ranked = sorted((loss, -step) for step, loss in losses.items() if loss is not None and loss == loss)  # no nan
    return {-step for _, step in ranked[:count]}


def _remove(path: Path) -> None:
    """Delete a folder, or a link or file of that name; the target of a link is not deleted."""
    if path.is_symlink() or not path.is_dir():
        path.unlink()
    else:
        shutil.rmtree(path)


def _os_error(error: BaseException) -> Optional[OSError]:
    """Return the operating-system error in the chain of causes of `error`; None if there is none."""
    if isinstance(error, OSError):
        return error
    cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return None if cause is None else _os_error(cause)
