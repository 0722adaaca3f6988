"""Checks of the weights that a run starts from, before anything is built."""

import json

from dit.checkpoint.base_model import unverified_start
from dit.checkpoint.diffusers_folder import local_path
from dit.checkpoint.reading import candidates
from dit.encoders.comparison import compare_encoders
from dit.run_config import RunConfig


def download_start(config: RunConfig) -> None:
    """Download `checkpoint.start_from` from the Hugging Face hub if the run will read it."""
    if (path := _path(config)) is not None:
        local_path(path)


def start_remarks(config: RunConfig) -> list[str]:
    """Compare the encoders of the data with those of `checkpoint.start_from`, unless the run resumes.

    Returns:
        A line for each encoder that may be another one, see `compare_encoders`.

    Raises:
        ConfigError: an encoder is another one, and `checkpoint.accept_changes` does not contain `data`.
    """
    path, accepted = _path(config), config.checkpoint.accept_changes or []
    start = None if path is None or "data" in accepted else unverified_start(path)
    if start is None:
        return []
    accept = json.dumps([*accepted, "data"], separators=(",", ":"))
    other_cure = f", or accept the difference: 'checkpoint.accept_changes={accept}'"
    conditions = config.model.conditions()
    return compare_encoders(config.data, start.encoders, conditions, f"checkpoint.start_from: {path}", other_cure)


def _path(config: RunConfig) -> str | None:
    """Return the path or address of the weights; None if the run has no start, or resumes."""
    return None if candidates(config.training.run_dir) else config.checkpoint.start_from
