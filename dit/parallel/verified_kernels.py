"""Kernels that have passed tests/gpu on this kind of device; `auto` selects them there.

tests/gpu writes the record, a file in the user's cache. An entry is valid for one device name, one version of the
driver, torch and `PACKAGES`, and unchanged sources of `dit.kernels`. After a change of any of them, tests/gpu must pass
again.
"""

import os
from collections.abc import Mapping
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any, Optional

import torch

from dit import kernels
from dit.backends.device import accelerator_versions, describe, use_cuda
from dit.backends.process_groups import gather_objects
from dit.durable_files import strict_json, write_atomic
from dit.errors import UserError
from dit.patches import installed_version
from dit.safe_files import read_bytes, read_json

RECORD = "verified_kernels.json"
PACKAGES = ("triton", "transformer-engine", "flash-attn", "flash-attn-3", "flash-attn-4")
KNOWN_MACHINES = 16  # entries in the record; the oldest ones are removed


def record_path() -> Path:
    """Return the path of the record: in XDG_CACHE_HOME, by default ~/.cache."""
    cache_folder = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache_folder) / "megatron-dit" / RECORD


def machine() -> str:
    """Return device, versions and a digest of the kernels' sources, the name of an entry in the record."""
    packages = "".join(f", {name} {installed_version(name) or 'none'}" for name in PACKAGES)
    digest = sha256()
    for path in sorted(Path(kernels.__file__).parent.rglob("*.py")):
        digest.update(read_bytes(path))
    driver = accelerator_versions()["driver"]
    return f"{describe()}, driver {driver}, torch {torch.__version__}{packages}, {digest.hexdigest()[:12]}"


def _entries() -> dict[str, Any]:
    """Return the record; a missing or damaged one has no entries."""
    try:
        record = read_json(record_path(), UserError, "delete it")
    except (UserError, OSError):
        return {}
    return record if isinstance(record, dict) else {}


def verified_here() -> frozenset[str]:
    """Return the kernels that have passed on this machine, such as `layers.triton`; none on CPU."""
    if not use_cuda():
        return frozenset()
    return _of_all_ranks if _of_all_ranks is not None else _of_this_machine()


@cache
def _of_this_machine() -> frozenset[str]:
    names = _entries().get(machine())
    return frozenset(map(str, names)) if isinstance(names, list) else frozenset()


_of_all_ranks: Optional[frozenset[str]] = None


def agree() -> None:
    """Restrict `verified_here` to kernels that have passed on the machines of all ranks; every rank calls this.

    Replicas whose ranks used different kernels would drift apart by rounding.
    """
    global _of_all_ranks
    _of_all_ranks = None
    _of_all_ranks = frozenset.intersection(*gather_objects(verified_here()))


def record_results(results: Mapping[str, bool]) -> None:
    """Store which kernels have passed on this machine; kernels without a result keep their state."""
    entries = _entries()
    known = entries.pop(machine(), [])
    passed = {name for name in known if results.get(name, True)} | {name for name in results if results[name]}
    entries = dict([*entries.items(), (machine(), sorted(passed))][-KNOWN_MACHINES:])
    record_path().parent.mkdir(parents=True, exist_ok=True)
    write_atomic(record_path(), strict_json(entries, indent=2))
    _of_this_machine.cache_clear()
