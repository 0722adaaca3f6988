"""Reading a run from disk: a verified checkpoint, its settings, and the names of its weights."""

from pathlib import Path
from typing import Any, Literal

from dit.checkpoint.manifest import read_manifest
from dit.checkpoint.records import read_metadata, read_record
from dit.checkpoint.store import CheckpointStore
from dit.errors import CheckpointError
from dit.run_config import RunConfig
from dit.settings import CheckpointConfig


def candidates(path: Path | str) -> list[Path]:
    """Return the checkpoint folders of a path, in the order in which they are tried; they are not verified.

    Args:
        path: a run folder, or one checkpoint folder (`iter_NNNNNNN`).
    """
    path = Path(path)
    if path.name.startswith("iter_"):
        return [path]
    return CheckpointStore(path / "checkpoints", CheckpointConfig()).newest_first() if path.is_dir() else []


def no_checkpoint(path: Path | str) -> CheckpointError:
    """Return the error for a path without a valid checkpoint."""
    return CheckpointError(
        f"{path} is neither a run folder with a valid checkpoint nor a checkpoint (iter_NNNNNNN); "
        "give the training.run_dir of a run that saved one"
    )


def find_checkpoint(path: Path | str) -> tuple[Path, int]:
    """Return a verified checkpoint folder and its step, from a run folder or one of its checkpoints.

    Raises:
        CheckpointError: there is none, or it is damaged.
    """
    path = Path(path)
    store = CheckpointStore(path / "checkpoints", CheckpointConfig())
    if path.name.startswith("iter_"):
        return path, store.verify(path).step
    found = store.newest_valid() if path.is_dir() else None
    if found is None:
        raise no_checkpoint(path)
    return found[0], found[1].step


def read_settings(folder: Path) -> tuple[RunConfig, dict[str, Any]]:
    """Return the settings of a verified checkpoint and its metadata for sampling.

    Raises:
        CheckpointError: they cannot be read.
    """
    return RunConfig.from_record(read_record(folder)), read_metadata(folder)


def slot_of(folder: Path, config: RunConfig, weights: Literal["ema", "raw"]) -> str:
    """Return the name of the averaged or raw weights in a verified checkpoint; imported weights have one name.

    Raises:
        CheckpointError: the run has no average.
    """
    if weights == "raw" or read_manifest(folder).is_imported:
        return "weight"
    if config.training.ema_decay is None:
        raise CheckpointError(f"{folder} holds no weight average; ask for the raw weights")
    return "ema"
