"""Programs of their own beside a training process, which orders what they do: one line of JSON each way.

They are no forks, start in milliseconds without torch, and may be killed at any time. Signals that a scheduler or a
terminal sends to all processes of a run are blocked in them.
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
    """A running program, and the connection with it.

    Args:
        module: the program, which gets the descriptor of its end of the connection as first argument.
        arguments: further ones.
        inherited: descriptors that it keeps.
        purpose: of the program, such as `writer process on rank 0`, for messages.

    Attributes:
        newest: the newest order.
    """

    def __init__(self, module: str, arguments: Sequence[str], inherited: Sequence[int], purpose: str) -> None:
        self.purpose = purpose
        self._module, self._arguments, self._inherited = module, arguments, inherited
        self.newest: Mapping[str, Any] = {}
        self._replies = b""
        self._start()

    def _start(self) -> None:
        self._control, theirs = socket.socketpair()
        python = [sys.executable, "-P", *(f"-W{option}" for option in sys.warnoptions)]
        before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # programs have the mask of their parent
        try:
            self.process = subprocess.Popen(
                [*python, "-m", self._module, str(theirs.fileno()), *self._arguments],
                pass_fds=[theirs.fileno(), *self._inherited],
                env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
                stdin=subprocess.DEVNULL,
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            theirs.close()

    @property
    def is_alive(self) -> bool:
        """Whether the process has not ended."""
        return self.process.poll() is None

    def order(self, order: Mapping[str, Any]) -> None:
        """Send an order; does not wait.

        Raises:
            CheckpointError: the process is gone.
        """
        self.newest = order
        try:
            self._control.sendall(json.dumps(order).encode() + b"\n")
        except OSError as error:
            raise CheckpointError(self.ended()) from error

    def replies(self) -> list[dict[str, Any]]:
        """Return the replies that have come; does not wait.

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
        """Wait until the process has ended, and say how."""
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
            self.process.wait(1.0)  # longer only inside the kernel, on a disk that hangs
        self._control.close()
        self._replies = b""
        self._start()

    def close(self, timeout_s: float) -> None:
        """Let the process finish its orders and end; wait for it no longer than `timeout_s`."""
        with suppress(OSError):
            self._control.shutdown(socket.SHUT_WR)
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout_s)
        self._control.close()
