"""The environment of a run: `env.json` has one entry per attempt with code version, machine and libraries."""

import json
import logging
import platform
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Optional

from dit.backends.device import accelerator_versions, describe
from dit.durable_files import write_record
from dit.kernels.choice import Selection
from dit.monitoring.run_lock import job_id
from dit.patches import installed_version
from dit.safe_files import parse_json, read_bytes

logger = logging.getLogger(__name__)

ENV_FILE = "env.json"
PACKAGES = (
    "megatron-dit",
    "torch",
    "megatron-core",
    "megatron-energon",
    "transformer-engine",
    "flash-attn",
    "triton",
    "numpy",
    "nemo-run",
)
ROOT = Path(__file__).parents[2]


def environment_record(world_size: int, kernels: Mapping[str, Selection]) -> dict[str, Any]:
    """Return the environment of an attempt as plain JSON."""
    return {
        "command": sys.argv,
        "time": time.time(),
        "host": socket.gethostname(),
        "job": job_id(),
        "world_size": world_size,
        "device": describe(),
        **versions(),
        "revision": git_revision(),
        "kernels": {op: selection.name for op, selection in kernels.items()},
        "kernels_not_selected": {op: dict(selection.others) for op, selection in kernels.items() if selection.others},
    }


def versions() -> dict[str, Any]:
    """Return the versions of the accelerator's software, of Python and of `PACKAGES` (None: not installed)."""
    packages = {name: installed_version(name) for name in PACKAGES}
    return {**accelerator_versions(), "python": platform.python_version(), "packages": packages}


def git_revision() -> Optional[dict[str, Any]]:
    """Return `commit` (hex) of this code and whether its files differ from it (`dirty`).

    Returns None outside a git repository, and for a package installed inside another project's repository.
    """
    try:
        if Path(_git("rev-parse", "--show-toplevel")).resolve() != ROOT.resolve():
            return None
        changes = _git("status", "--porcelain", "--untracked-files=no")
        return {"commit": _git("rev-parse", "HEAD"), "dirty": bool(changes)}
    except (OSError, subprocess.SubprocessError):
        return None


def append_attempt(path: Path, record: dict[str, Any]) -> None:
    """Append an attempt to `env.json`."""
    attempts: list[Any] = []
    if path.exists():
        try:
            content = parse_json(read_bytes(path, follow=False))
            if not isinstance(content, list):
                raise ValueError("it is not a list of attempts")
            attempts = content
        except (OSError, ValueError) as error:
            logger.warning("%s is damaged (%s); its entries of earlier attempts are lost", path, error)
    write_record(path, json.dumps([*attempts, record], indent=1) + "\n")


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(ROOT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.strip()
