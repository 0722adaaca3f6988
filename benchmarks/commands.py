"""Commands of measurements, as processes of this machine."""

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Optional


def python_command(module: str, ranks: int, words: Sequence[str]) -> list[str]:
    """Return the command of a module of Python, by torchrun for several ranks."""
    launcher = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "-m"] if ranks > 1 else []
    return [sys.executable, "-m", *launcher, module, *words]


def run_command(command: Sequence[str], log: Path, limit_s: float) -> Optional[int]:
    """Run a command in a new session, and kill all its processes at its end or at that of this call.

    Args:
        log: file of its output.

    Returns:
        Its exit code; None if it did not end within the limit.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with open(log, "w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        return process.wait(limit_s)
    except subprocess.TimeoutExpired:
        return None
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
