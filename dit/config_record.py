"""Settings on disk: conversion of dataclasses to plain values with class names, and back.

The format is that of `--to-yaml`: a run's `config.yaml` starts the same run with `--yaml`. Only classes of this project
and of packages that the user names in `DIT_PACKAGES` are instantiated, so reading a record runs no other code.
"""

import dataclasses
import importlib
import os
from collections.abc import Iterator
from typing import Any

from dit.errors import CheckpointError

CLASS_KEY = "_target_"
TRUST_VARIABLE = "DIT_PACKAGES"
"""Environment variable: additional packages, separated by commas, whose settings classes records may name."""


def user_packages() -> tuple[str, ...]:
    """Return the packages that `DIT_PACKAGES` names."""
    return tuple(name.strip() for name in os.environ.get(TRUST_VARIABLE, "").split(",") if name.strip())


def trusted_packages() -> tuple[str, ...]:
    """Return the packages whose classes a record may name; they are imported to rebuild it."""
    return ("dit", "energon_data", *user_packages())


def trust_prefix(record: object) -> str:
    """Return the assignment before a shell command that rebuilds `record`: its packages outside this project, or ""."""
    packages = sorted({name.partition(".")[0] for name in _class_names(record)} - {"dit", "energon_data"})
    return f"{TRUST_VARIABLE}={','.join(packages)} " if packages else ""


def _class_names(record: object) -> Iterator[str]:
    if isinstance(record, dict):
        if CLASS_KEY in record:
            yield str(record[CLASS_KEY])
        record = list(record.values())
    if isinstance(record, list):
        for value in record:
            yield from _class_names(value)


def to_record(value: object) -> Any:
    """Convert dataclasses (nested in lists and dicts) to plain values."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: to_record(getattr(value, f.name)) for f in dataclasses.fields(value) if f.init}
        return {CLASS_KEY: f"{type(value).__module__}.{type(value).__qualname__}", **fields}
    if isinstance(value, dict):
        return {str(k): to_record(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_record(v) for v in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    return str(value)


def from_record(record: object) -> Any:
    """Rebuild the value that `to_record` wrote."""
    if isinstance(record, list):
        return [from_record(v) for v in record]
    if not isinstance(record, dict):
        return record
    name = record.get(CLASS_KEY)
    values = {k: from_record(v) for k, v in record.items() if k != CLASS_KEY}
    if name is None:
        return values
    module, _, qualname = str(name).rpartition(".")
    package = module.partition(".")[0]
    if package not in trusted_packages():
        raise CheckpointError(
            f"the record names {name!r}; only classes of {', '.join(trusted_packages())} are rebuilt. If {package!r} "
            f"is your package, set the environment variable {TRUST_VARIABLE}={','.join((*user_packages(), package))}"
        )
    try:
        settings_class = getattr(importlib.import_module(module), qualname)
    except (ImportError, AttributeError) as error:
        raise CheckpointError(f"the record names {name!r}, which this version does not have ({error})") from error
    if not (isinstance(settings_class, type) and dataclasses.is_dataclass(settings_class)):
        raise CheckpointError(f"the record names {name!r}, which is not a settings class")
    try:
        return settings_class(**values)
    except TypeError as error:
        raise CheckpointError(f"the record of {name!r} does not fit this version: {error}") from error
