"""Fork server for data workers.

    training process                nursery                             workers
    Nursery.start  -- channel -->   imports once, one thread   fork --> energon_data.worker.work(channel)
    Worker.pid, .wait  <-- events   waits for workers to exit

Workers are forked from a small process that has imported their dependencies and runs one thread. Forking the training
process is unsafe: garbage collection in the child waits for threads that do not exist there (a gloo process group
crashes with SIGSEGV or hangs), locks held by other threads are never released, and the child keeps files and weights.

The nursery and its workers ignore signals that a scheduler or terminal sends to all processes of a run: the training
process decides when they exit. They also exit if the training process is killed.
"""

import ctypes
import gc
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import traceback
import weakref
from contextlib import suppress
from functools import lru_cache
from typing import NamedTuple, Optional

from dit.terminal import echo

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
_REQUEST = struct.Struct("<iq")  # _START or _KILL, and the number of the worker
_START, _KILL = 0, 1
_EVENT = struct.Struct("<qqi")  # number of the worker, its process, and its exit code or _RUNNING
_RUNNING = 1 << 20
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


class _Event(NamedTuple):
    """Event of a worker: it has started or exited."""

    pid: int
    code: int


class Nursery:
    """The fork server of this process; it starts on construction, and is ready seconds later."""

    def __init__(self) -> None:
        self._control, remote_end = socket.socketpair()
        self._events: dict[int, _Event] = {}
        self._count = 0
        self._lock, self._owner = threading.Lock(), os.getpid()
        # -P: the working directory is on the path only if it is on this process's path.
        command = [sys.executable, "-P", *(f"-W{option}" for option in sys.warnoptions), "-m", "energon_data.nursery"]
        one_thread = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
        environment = {**os.environ, **one_thread, "PYTHONPATH": os.pathsep.join(sys.path)}
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)  # child processes inherit the signal mask
        try:
            process = subprocess.Popen(
                [*command, str(remote_end.fileno())],
                pass_fds=[remote_end.fileno()],
                env=environment,
                stdin=subprocess.DEVNULL,
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        remote_end.close()
        weakref.finalize(self, _end, self._control, process, self._owner)

    def start(self, channel: socket.socket) -> "Worker":
        """Start a worker that reads and writes the channel; does not wait for it.

        Raises:
            OSError: the nursery has exited.
        """
        with self._lock:
            while self._read_event(socket.MSG_DONTWAIT):
                pass  # otherwise the nursery could block on a full socket
            self._count += 1
            socket.send_fds(self._control, [_REQUEST.pack(_START, self._count)], [channel.fileno()])
            return Worker(self, self._count)

    def kill(self, number: int) -> None:
        """Kill a worker if it is running; does not wait for it."""
        if os.getpid() == self._owner:
            with suppress(OSError):
                self._control.sendall(_REQUEST.pack(_KILL, number))

    def event(self, number: int, *, ended: bool) -> Optional[_Event]:
        """Wait until a worker has started or exited; returns None if the nursery has exited."""
        with self._lock:
            while number not in self._events or (ended and self._events[number].code == _RUNNING):
                if not self._read_event():
                    return None
            return self._events[number]

    def _read_event(self, flags: int = 0) -> bool:
        """Read an event; return whether there was one."""
        try:
            event = self._control.recv(_EVENT.size, flags | socket.MSG_WAITALL)
        except OSError:  # no event yet, or the nursery has exited
            return False
        if event:
            number, pid, code = _EVENT.unpack(event)
            self._events[number] = _Event(pid, code)
        return bool(event)


class Worker:
    """A worker process started by the nursery."""

    def __init__(self, nursery: Nursery, number: int) -> None:
        self._nursery, self._number = nursery, number

    @property
    def pid(self) -> int:
        """Process id; waits until the process has started."""
        event = self._nursery.event(self._number, ended=False)
        if event is None:
            raise ProcessLookupError("the process that starts workers has exited")
        return event.pid

    def wait(self) -> Optional[int]:
        """Wait until the worker exits, and return its exit code, -N for signal N; None if it is unknown."""
        event = self._nursery.event(self._number, ended=True)
        return None if event is None else event.code

    def kill(self) -> None:
        """Kill the worker if it is running; does not wait for its exit."""
        self._nursery.kill(self._number)


@lru_cache(maxsize=1)
def nursery_of(pid: int) -> Nursery:
    """Return the nursery of this process; the argument `pid` gives each forked process a new one."""
    return Nursery()


def _end(control: socket.socket, process: subprocess.Popen[bytes], owner: int) -> None:
    control.close()
    if os.getpid() == owner:  # a fork of the training process must not stop its workers
        process.kill()
        process.wait()


def _fork(channel: socket.socket, control: socket.socket) -> int:
    """Fork a worker, and return its process id."""
    from energon_data.worker import work

    nursery = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])
        control.close()
        if os.getppid() == nursery:
            work(channel)
        code = 0
    except BaseException:
        echo(traceback.format_exc(), end="", file=sys.stderr)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def main() -> None:
    """Main loop of the nursery, until the training process exits."""
    import energon_data.energon_source  # noqa: F401  imported because nearly every stream needs it

    gc.freeze()  # otherwise garbage collection in each worker would copy these pages
    control = socket.socket(fileno=int(sys.argv[1]))
    numbers: dict[int, int] = {}  # of the workers, by process

    def reap(*_: object) -> None:
        with suppress(ChildProcessError, OSError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                pid, status = ended
                control.sendall(_EVENT.pack(numbers.pop(pid), pid, os.waitstatus_to_exitcode(status)))

    signal.signal(signal.SIGCHLD, reap)
    while True:
        try:
            request, descriptors, *_ = socket.recv_fds(control, _REQUEST.size, 1, socket.MSG_WAITALL)
        except ConnectionResetError:  # the training process exited without reading the last events
            return
        if not request:
            return
        kind, number = _REQUEST.unpack(request)
        # Blocking SIGCHLD reports a worker's exit after its start, and prevents killing a reused process id.
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
        if kind == _START:
            with socket.socket(fileno=descriptors[0]) as channel:
                pid = _fork(channel, control)
            numbers[pid] = number
            with suppress(BrokenPipeError):
                control.sendall(_EVENT.pack(number, pid, _RUNNING))
        elif number in numbers.values():
            os.kill(next(pid for pid, worker in numbers.items() if worker == number), signal.SIGKILL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])


if __name__ == "__main__":
    main()
