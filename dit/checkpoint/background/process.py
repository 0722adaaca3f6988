"""Child processes of a training process that save during training; they send a reply for each request.

They start in milliseconds without torch, may be killed at any time, and block signals that a scheduler or a terminal
sends to all processes of a run. They are started with `subprocess`: `multiprocessing` would import the main module, and
at exit wait for a child that is blocked on a disk.

The processes of torch's `async_save` join the parts of the ranks by collectives, which wait for a rank that died.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

from dit.child_processes import run_signals_blocked
from dit.errors import CheckpointError
from dit.terminal import log_to_stderr


class BackgroundProcess:
    """A running child process and the connection to it.

    Args:
        module: module to run; it calls `connection_and_settings`, then `serve`.
    """

    def __init__(self, module: str, settings: Mapping[str, Any], inherited: Sequence[int], purpose: str) -> None:
        self.purpose = purpose
        self._module, self._settings, self._inherited = module, settings, inherited
        self._start()

    def _start(self) -> None:
        self._connection, remote_end = Pipe()
        self._connection.send(self._settings)  # first, because sending fails once the process has ended
        python = [sys.executable, "-P", *(f"-W{option}" for option in sys.warnoptions)]
        with remote_end, run_signals_blocked():
            self.process = subprocess.Popen(
                [*python, "-m", self._module, str(remote_end.fileno())],
                pass_fds=[remote_end.fileno(), *self._inherited],
                env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
                stdin=subprocess.DEVNULL,
            )

    @property
    def is_alive(self) -> bool:
        return self.process.poll() is None

    def request(self, request: Mapping[str, Any]) -> None:
        """Send a request; does not wait."""
        try:
            self._connection.send(request)
        except OSError as error:
            raise CheckpointError(self.ended()) from error

    def replies(self) -> list[dict[str, Any]]:
        """Return the replies received so far; does not wait."""
        replies: list[dict[str, Any]] = []
        try:
            while self._connection.poll():
                replies.append(self._connection.recv())
        except (EOFError, OSError) as error:
            if not replies:
                raise CheckpointError(self.ended()) from error
        return replies

    def ended(self) -> str:
        """Wait until the process has exited, and describe how it exited."""
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(1.0)
        code, how = self.process.returncode, "is gone"
        if code is not None:
            how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"left {code}"
        return f"the {self.purpose} {how}"

    def restart(self) -> None:
        """Kill the process and start another one."""
        self.process.kill()
        # It takes longer only if the process is blocked in the kernel, on a disk that hangs.
        BackgroundProcess.close(self, 1.0)  # not that of a subclass, which also frees the memory
        self._start()

    def close(self, timeout_s: float) -> None:
        """Let the process finish its requests and exit; wait at most `timeout_s` seconds."""
        self._connection.close()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout_s)


def connection_and_settings() -> tuple[Connection, dict[str, Any]]:
    """Return, in the child, the connection to the training process and the settings of `BackgroundProcess`."""
    log_to_stderr()
    connection = Connection(int(sys.argv[1]))
    return connection, connection.recv()


def serve(connection: Connection, execute: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Execute requests, and send the replies, until the training process closes the connection or exits."""
    while True:
        try:
            request = connection.recv()
        except (EOFError, OSError):  # the connection is reset if the training process exits before it reads all replies
            return
        reply = execute(request)
        with suppress(OSError):  # finish pending requests even if the training process is gone
            connection.send(reply)
