"""Reading a run from disk: a verified checkpoint, its settings, and the names of its weights."""

from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal, Optional

from dit.backends.process_groups import ProcessGroups
from dit.checkpoint.manifest import read_manifest
from dit.checkpoint.records import CONFIG_FILE, read_metadata, read_record, usable
from dit.checkpoint.store import CheckpointStore
from dit.checkpoint.verify_together import newest_valid_together, on_first_rank, verified_together
from dit.errors import CheckpointError
from dit.pipeline_folder import PIPELINE_INDEX
from dit.run_config import RunConfig
from dit.settings import CheckpointConfig


def _is_checkpoint(path: Path) -> bool:
    """Return whether a path is named as a checkpoint and is not a run folder of such a name."""
    return path.name.startswith("iter_") and not (path / "checkpoints").is_dir()


def candidates(path: Path | str) -> list[Path]:
    """Return the checkpoints of a run folder, or one checkpoint, in the order in which they are tried; not verified."""
    path = Path(path)
    if _is_checkpoint(path):
        return [path]
    return CheckpointStore(path / "checkpoints", CheckpointConfig()).newest_first() if path.is_dir() else []


def no_checkpoint(path: Path | str, *, starts: bool = False) -> CheckpointError:
    """Return the error for a path without a valid checkpoint; with `starts`, the path could be one of diffusers."""
    if any((Path(path) / name).is_file() for name in ("config.json", PIPELINE_INDEX)):
        return CheckpointError(
            f"{path} is a folder of diffusers, not of a run; import it with `python -m launch.import_weights --format "
            "diffusers`, and give the run folder that it writes"
        )
    return CheckpointError(
        f"{path} is neither a run folder with a valid checkpoint nor a checkpoint (iter_NNNNNNN); "
        f"give the training.run_dir of a run that saved one{', or a folder or hf:// address of diffusers' * starts}"
    )


def find_checkpoint(
    path: Path | str,
    reading: Optional[ExitStack] = None,
    groups: Optional[ProcessGroups] = None,
    setting: Optional[str] = None,
    *,
    starts: bool = False,
) -> tuple[Path, int]:
    """Return a verified checkpoint folder and its step, from a run folder or one of its checkpoints.

    Args:
        reading: the checkpoint is not deleted until this stack is closed; None for no protection.
        groups: ranks, which all call this and each hash a share of the files; None for one process.
        setting: name of the setting with the path, for messages.
        starts: whether the path could also be a folder of diffusers, for messages.
    """
    is_checkpoint, folders = on_first_rank(lambda: (_is_checkpoint(Path(path)), candidates(path)), groups)
    try:
        if is_checkpoint:
            return folders[0], verified_together(folders[0], groups, reading).step
        newest = newest_valid_together(folders, groups, reading)
        if newest is None:
            raise no_checkpoint(path, starts=starts)
    except CheckpointError as error:
        raise CheckpointError(f"{setting}: {error}" if setting else str(error)) from error
    return newest[0], newest[1].step


def read_settings(folder: Path) -> tuple[RunConfig, dict[str, Any]]:
    """Return the settings of a verified checkpoint and its metadata for sampling."""
    record = read_record(folder)
    try:
        with usable(folder / CONFIG_FILE):
            config = RunConfig.from_record(record)
    except CheckpointError as error:
        raise CheckpointError(f"{folder / CONFIG_FILE}: {error}") from error
    return config, read_metadata(folder)


def slot_of(folder: Path, config: RunConfig, weights: Literal["ema", "raw"]) -> str:
    """Return the slot of the averaged or raw weights in a verified checkpoint; imported weights have one slot."""
    if weights == "raw" or read_manifest(folder).is_imported:
        return "weight"
    if config.training.ema_decay is None:
        raise CheckpointError(f"{folder} has no weight average; use the raw weights")
    return "ema"
