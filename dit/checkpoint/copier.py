"""Process that copies finished checkpoints to `checkpoint.copy_to`, started by rank 0; it does not import torch.

It exits as soon as its training process exits. An interrupted copy has no manifest, and the next attempt of the run
repeats it.
"""

import json
import os
import select
import socket
import sys
import threading
import time
from contextlib import suppress
from typing import Any

from dit.checkpoint.remote import Owner, RemoteStore, copy_all
from dit.checkpoint.store import CheckpointStore
from dit.errors import CheckpointError
from dit.safe_files import parse_json, parse_yaml
from dit.settings import CheckpointConfig
from dit.terminal import log_to_stderr

ATTEMPTS, FIRST_WAIT_S = 3, 2.0
"""A failed copy is retried after a wait that doubles each time."""


def copy(root: str, config: CheckpointConfig, owner: Owner) -> int:
    """Copy all complete checkpoints, with retries; return the number of copied bytes.

    Raises:
        CheckpointError: the last attempt failed, or the address belongs to another run.
    """
    assert config.copy_to is not None
    for attempt in range(1, ATTEMPTS + 1):
        try:
            remote = RemoteStore(config.copy_to)
            remote.claim(owner)
            return copy_all(CheckpointStore(root, config), remote)
        except CheckpointError:
            if attempt == ATTEMPTS:
                raise
            time.sleep(FIRST_WAIT_S * 2 ** (attempt - 1))
    raise AssertionError


def execute(order: dict[str, Any], root: str, config: CheckpointConfig, owner: Owner) -> dict[str, Any]:
    """Execute a request, and return the reply: step, bytes, seconds, and the error or None."""
    began = time.monotonic()
    reply: dict[str, Any] = {"step": order["step"], "bytes": 0, "error": None}
    try:
        reply["bytes"] = copy(root, config, owner)
    except Exception as error:  # the training process logs it and continues
        reply["error"] = str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
    return reply | {"seconds": time.monotonic() - began}


def end_with(control: socket.socket) -> None:
    """Exit when the training process closes its end of the connection."""
    closed = select.poll()
    closed.register(control, select.POLLRDHUP)
    closed.poll()
    os._exit(0)


def main() -> None:
    """Execute requests until the training process closes the connection or exits."""
    control, root = socket.socket(fileno=int(sys.argv[1])), sys.argv[2]
    config, owner = CheckpointConfig(**parse_json(sys.argv[3])), Owner(**parse_yaml(sys.argv[4]))
    log_to_stderr()
    threading.Thread(target=end_with, args=(control,), daemon=True).start()
    with suppress(OSError), control.makefile("rb") as orders:
        for line in orders:
            control.sendall((json.dumps(execute(parse_json(line), root, config, owner)) + "\n").encode())


if __name__ == "__main__":
    main()
