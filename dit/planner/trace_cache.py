"""Traces of earlier searches, on disk: a search for another device needs the same traces.

A trace depends on its job, on this program, on the libraries under it, and on the packages of a backbone or objective
from elsewhere; a digest of all of them names the file.
"""

import functools
import importlib
import importlib.metadata
import os
import pickle
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any, Optional

from dit.durable_files import strict_json, write_atomic
from dit.errors import UserError
from dit.planner.job import Job
from dit.safe_files import read_bytes, read_json
from dit.tracing.counter import Product, StepTrace

UNUSED_DAYS = 30
TABLES: dict[str, Callable[[list[Any]], Any]] = {"sent_bytes": tuple, "calls": tuple, "products": Product._make}
"""Tables of a trace whose keys are tuples, and the function that returns a key from its list of elements."""


def cache_folder() -> Path:
    """Return the folder of the traces: in XDG_CACHE_HOME, by default ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "megatron-dit" / "traces"


def read_traces(jobs: Sequence[Job]) -> Optional[list[StepTrace]]:
    """Return stored traces of jobs; None if there are none, or if the file is damaged."""
    path = _path(jobs)
    with suppress(UserError, OSError, KeyError, TypeError, ValueError):
        steps = [_step(values) for values in read_json(path, UserError, "delete it")]
        os.utime(path)
        return steps
    return None


def write_traces(jobs: Sequence[Job], steps: Sequence[StepTrace]) -> None:
    """Store the traces of jobs if the disk allows it, and delete those that were not read for `UNUSED_DAYS`."""
    path = _path(jobs)
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, strict_json([_values(step) for step in steps]), flush=False)
        for other in path.parent.iterdir():
            if time.time() - other.stat().st_mtime > UNUSED_DAYS * 86400:
                other.unlink()


def _path(jobs: Sequence[Job]) -> Path:
    program = b"".join(_sources(package) for package in _packages(jobs))
    return cache_folder() / f"{sha256(_libraries() + program + pickle.dumps(list(jobs))).hexdigest()[:32]}.json"


@functools.cache
def _libraries() -> bytes:
    """Return the versions of the program's libraries."""
    return repr([importlib.metadata.version(name) for name in ("torch", "megatron-core")]).encode()


def _packages(jobs: Sequence[Job]) -> list[str]:
    """Return the top-level packages of this program and of the networks and objectives of jobs."""
    classes = {cls for job in jobs for part in (job.model, job.objective) for cls in type(part).__mro__}
    modules = {cls.__module__ for cls in classes} | {path for job in jobs if (path := job.model.model_path)}
    return sorted({"dit", *(name.partition(":")[0].partition(".")[0] for name in modules)} - sys.stdlib_module_names)


@functools.cache
def _sources(package: str) -> bytes:
    """Return a digest of the source files of a package or module."""
    module, digest = importlib.import_module(package), sha256()
    folders: Sequence[str] = getattr(module, "__path__", ())
    files = sorted(path for folder in folders for path in Path(folder).rglob("*.py"))
    file = getattr(module, "__file__", None)
    for path in files or ([Path(file)] if file else []):
        digest.update(read_bytes(path))
    return digest.digest()


def _values(step: StepTrace) -> dict[str, Any]:
    """Return a trace as plain values; the keys of its tables are lists."""
    tables = {name: [[list(key), value] for key, value in getattr(step, name).items()] for name in TABLES}
    return {**vars(step), **tables, "parts": {name: _values(part) for name, part in step.parts.items()}}


def _step(values: dict[str, Any]) -> StepTrace:
    """Return a trace from its plain values."""
    tables = {name: Counter({key(elements): n for elements, n in values[name]}) for name, key in TABLES.items()}
    tables["work"] = Counter(values["work"])
    return StepTrace(**{**values, **tables, "parts": {name: _step(part) for name, part in values["parts"].items()}})
