"""Records of a checkpoint that sampling and other runs read: the settings, and metadata for sampling."""

import math
import reprlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from dit.checkpoint.manifest import CURE
from dit.errors import CheckpointError
from dit.ranges import ASPECTS, MOST_POSITIONS
from dit.safe_files import read_json, read_yaml, valid_entries

CONFIG_FILE = "config.yaml"
METADATA_FILE = "metadata.json"


def usable(path: Path | str) -> AbstractContextManager[None]:
    """Raise `CheckpointError` with the file's name for invalid entries; a record with a valid hash may have them."""
    return valid_entries(path, CheckpointError, CURE)


def read_record(folder: Path) -> dict[str, Any]:
    """Return the settings in a checkpoint's config.yaml, as plain values, see `RunConfig.to_record`."""
    record = read_yaml(folder / CONFIG_FILE, CheckpointError, CURE)
    return _checked(folder / CONFIG_FILE, record, ("model", "objective", "training", "sampling"))


def read_metadata(folder: Path) -> dict[str, Any]:
    """Return the metadata that sampling needs in addition to the settings."""
    record = read_json(folder / METADATA_FILE, CheckpointError, CURE)
    table = _checked(folder / METADATA_FILE, record, ("class_names", "latent_size"))
    for name, (is_valid, kind) in _METADATA.items():
        if table.get(name) is not None and not is_valid(table[name]):
            raise CheckpointError(
                f"{folder / METADATA_FILE}: {name}={reprlib.repr(table[name])} is not a {kind}; {CURE}"
            )
    return table


def _is_size(value: object) -> bool:
    if not isinstance(value, list) or len(value) != 3 or not all(type(n) is int and n > 0 for n in value):
        return False
    return math.prod(value) <= MOST_POSITIONS


def _is_texts(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(text, str) for text in value)


_METADATA: dict[str, tuple[Callable[[Any], bool], str]] = {
    "latent_size": (_is_size, f"list of three sizes with a product of at most {MOST_POSITIONS:,}"),
    "class_names": (_is_texts, "list of names"),
    "attributions": (_is_texts, "list of lines"),
    "text_encoder": (lambda value: isinstance(value, str), "name"),
    "autoencoder": (lambda value: isinstance(value, str), "name"),
    "reference_aspect": (lambda value: value in ASPECTS, f"value of --aspect ({', '.join(ASPECTS)})"),
    "clean_parts": (_is_texts, "list of names"),
    "max_text_tokens": (lambda value: type(value) is int and value > 0, "number of tokens"),
    "fps": (lambda value: type(value) in (int, float) and 0 < value < math.inf, "number of frames per second"),
}
"""Checks of metadata entries that are not None, and the description of a valid value."""


def _checked(path: Path, record: Any, required: Sequence[str]) -> dict[str, Any]:
    missing = [name for name in required if not isinstance(record, dict) or name not in record]
    if missing:
        raise CheckpointError(f"{path} has no {', '.join(missing)}; {CURE}")
    return dict(record)
