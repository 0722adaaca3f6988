"""Helper processes of a training process, which sends requests to them: one line of JSON in each direction.

Helpers are spawned, not forked; they start in milliseconds without torch, and may be killed at any time. They block
signals that a scheduler or a terminal sends to all processes of a run.
"""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from dit.errors import CheckpointError
from dit.safe_files import parse_json

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


class HelperProcess:
    """A running helper process and the connection to it.

    Args:
        module: module to run; its first argument is the file descriptor of its end of the connection.
        arguments: further arguments.
        inherited: file descriptors that it inherits.
        purpose: name of the process in messages, such as `writer process on rank 0`.

    Attributes:
        newest: the newest request.
    """

    def __init__(self, module: str, arguments: Sequence[str], inherited: Sequence[int], purpose: str) -> None:
        self.purpose = purpose
        self._module, self._arguments, self._inherited = module, arguments, inherited
        self.newest: Mapping[str, Any] = {}
        self._replies = b""
        self._start()

    def _start(self) -> None:
        self._control, remote_end = socket.socketpair()
        python = [sys.executable, "-P", *(f"-W{option}" for option in sys.warnoptions)]
        before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # child processes inherit the signal mask
        try:
            self.process = subprocess.Popen(
                [*python, "-m", self._module, str(remote_end.fileno()), *self._arguments],
                pass_fds=[remote_end.fileno(), *self._inherited],
                env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
                stdin=subprocess.DEVNULL,
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            remote_end.close()

    @property
    def is_alive(self) -> bool:
        """Whether the process has not ended."""
        return self.process.poll() is None

    def order(self, order: Mapping[str, Any]) -> None:
        """Send a request; does not wait.

        Raises:
            CheckpointError: the process is gone.
        """
        self.newest = order
        try:
            self._control.sendall(json.dumps(order).encode() + b"\n")
        except OSError as error:
            raise CheckpointError(self.ended()) from error

    def replies(self) -> list[dict[str, Any]]:
        """Return the replies received so far; does not wait.

        Raises:
            CheckpointError: the process is gone, and there is no reply left.
        """
        gone = False
        while not gone:
            try:
                received = self._control.recv(1 << 16, socket.MSG_DONTWAIT)
            except BlockingIOError:
                break
            except OSError:
                received = b""
            self._replies += received
            gone = not received
        *lines, self._replies = self._replies.split(b"\n")
        if gone and not lines:
            raise CheckpointError(self.ended())
        return [parse_json(line) for line in lines]

    def ended(self) -> str:
        """Wait until the process has exited, and describe how it exited."""
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(1.0)
        code = self.process.returncode
        how = (
            "is gone" if code is None else f"was killed by {signal.Signals(-code).name}" if code < 0 else f"left {code}"
        )
        return f"the {self.purpose} {how}"

    def restart(self) -> None:
        """Kill the process and start another one."""
        self.process.kill()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(1.0)  # takes longer only if the process is blocked in the kernel, on a disk that hangs
        self._control.close()
        self._replies = b""
        self._start()

    def close(self, timeout_s: float) -> None:
        """Let the process finish its requests and exit; wait at most `timeout_s` seconds."""
        with suppress(OSError):
            self._control.shutdown(socket.SHUT_WR)
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout_s)
        self._control.close()
