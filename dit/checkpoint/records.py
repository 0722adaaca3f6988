"""The records in a checkpoint that sampling and other runs read: the settings, and what else sampling needs."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import yaml

from dit.checkpoint.manifest import CURE
from dit.durable_files import read_regular
from dit.errors import CheckpointError

CONFIG_FILE = "config.yaml"
METADATA_FILE = "facts.json"


def read_record(folder: Path) -> dict[str, Any]:
    """Return the settings in a checkpoint's config.yaml, as plain values, see `RunConfig.to_record`.

    Raises:
        CheckpointError: the file is missing or is no such record.
    """
    return _read_table(folder / CONFIG_FILE, yaml.safe_load, ("model", "objective", "training", "sampling"))


def read_metadata(folder: Path) -> dict[str, Any]:
    """Return the metadata that sampling needs besides the settings.

    Raises:
        CheckpointError: the file is missing or is no such record.
    """
    return _read_table(folder / METADATA_FILE, json.loads, ("class_names", "latent_size"))


def _read_table(path: Path, parse: Callable[[str], Any], required: Sequence[str]) -> dict[str, Any]:
    try:
        table = parse(read_regular(path).decode())
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}; {CURE}") from error
    missing = [name for name in required if not isinstance(table, dict) or name not in table]
    if missing:
        raise CheckpointError(f"{path} has no {', '.join(missing)}; {CURE}")
    return table
