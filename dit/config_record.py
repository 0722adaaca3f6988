"""Settings on disk: conversion of dataclasses to plain values with class names, and back.

The format is that of `--to-yaml`: a run's `config.yaml` starts the same run with `--yaml`. Only classes of this project
and of packages that the user names in `DIT_PACKAGES` are instantiated, so reading a record runs no other code.
"""

import dataclasses
import importlib
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dit.errors import CheckpointError, ConfigError, UserError

CLASS_KEY = "_target_"
TRUST_VARIABLE = "DIT_PACKAGES"
"""Environment variable: additional packages, separated by commas, whose settings classes records may name."""


FORMER = {"EDM2UNetConfig": {"dropout": 0.0}}
"""Former settings by class, each with the value that had no effect."""


def user_packages() -> tuple[str, ...]:
    """Return the packages that `DIT_PACKAGES` names."""
    return tuple(name.strip() for name in os.environ.get(TRUST_VARIABLE, "").split(",") if name.strip())


def import_trusted(
    name: str, place: str, refusal: type[UserError] = ConfigError, more_packages: Sequence[str] = ()
) -> Any:
    """Import a class, given as `package.module.Class`, if its package is trusted.

    Args:
        place: setting or record that has the name, for messages.
        more_packages: trusted packages in addition to `dit`, `energon_data` and those of `DIT_PACKAGES`.
    """
    module, _, attribute = name.rpartition(".")
    package, trusted = module.partition(".")[0], ("dit", "energon_data", *more_packages, *user_packages())
    if not package:
        raise refusal(f"{place} names {name!r}; write the class as package.module.Class")
    if package not in trusted:
        raise refusal(
            f"{place} names {name!r}, which is not in {', '.join(trusted)}, so it is not imported. If {package!r} is "
            f"your package, set the environment variable {TRUST_VARIABLE}={','.join((*user_packages(), package))}"
        )
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise refusal(
            f"{place} names {name!r}, which cannot be imported ({error}); correct the name, or read a record with the "
            "version that wrote it"
        ) from error


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


def without_former(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the record of a settings class without former settings that had no effect."""
    former = FORMER.get(str(record.get(CLASS_KEY)).rpartition(".")[2], {})
    return {k: v for k, v in record.items() if k not in former or v != former[k]}


def from_record(record: object) -> Any:
    """Rebuild the value that `to_record` wrote."""
    if isinstance(record, list):
        return [from_record(v) for v in record]
    if not isinstance(record, dict):
        return record
    name = record.get(CLASS_KEY)
    values = {k: from_record(v) for k, v in without_former(record).items() if k != CLASS_KEY}
    if name is None:
        return values
    settings_class = import_trusted(str(name), "the record", CheckpointError)
    if not (isinstance(settings_class, type) and dataclasses.is_dataclass(settings_class)):
        raise CheckpointError(f"the record names {name!r}, which is not a settings class")
    try:
        return settings_class(**values)
    except TypeError as error:
        raise CheckpointError(
            f"the record of {name!r} does not fit this version: {error}; read it with the version that wrote it"
        ) from error
