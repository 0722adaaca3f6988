"""Checks of the weights that a run starts from, before anything is built."""

import json

from dit.checkpoint.base_model import download_base, unverified_start
from dit.checkpoint.diffusers_folder import local_path
from dit.checkpoint.reading import candidates
from dit.encoders.comparison import compare_encoders
from dit.errors import CheckpointError
from dit.run_config import RunConfig

SETTING = "checkpoint.start_from"
"""The setting that names the weights; among the accepted changes, it accepts other encoders of the data."""


def download_start(config: RunConfig) -> None:
    """Download `checkpoint.start_from` from the Hugging Face hub if the run will read it.

    A run of adapters always reads it, because its checkpoints lack the frozen weights.
    """
    path = config.checkpoint.start_from if config.model.adapters is not None else _path(config)
    if path is not None:
        download_base(local_path(path))


def start_remarks(config: RunConfig) -> list[str]:
    """Compare the encoders of the data with those of `checkpoint.start_from`, unless the run resumes.

    Returns:
        A line for each encoder that may be another one, see `compare_encoders`.

    Raises:
        ConfigError: an encoder is another one, and `checkpoint.accept_changes` does not contain `SETTING`.
    """
    path, accepted = _path(config), config.checkpoint.accept_changes or []
    start = None if path is None or SETTING in accepted else unverified_start(path)
    if path is None or start is None:
        return []
    try:
        encoders = start.encoders
    except CheckpointError:  # the run reports damage, or reads an older checkpoint
        return []
    accept = json.dumps([*accepted, SETTING], separators=(",", ":"))
    other_cure = f", or accept the difference: 'checkpoint.accept_changes={accept}'"
    conditions = config.model.conditions()
    return compare_encoders(config.data, encoders, conditions, f"{SETTING}: {path}", other_cure)


def _path(config: RunConfig) -> str | None:
    """Return the path or address of the weights; None if the run has no start, or resumes."""
    path = config.checkpoint.start_from
    return None if path is None or candidates(config.training.run_dir) else path
