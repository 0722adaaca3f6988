"""Reading a stream in a separate process, ahead of training.

    training process              fork server of multiprocessing      worker
    BackgroundSource   -- start -->  imports `preload` once   fork -->  `worker.work`
    next               <-- items, some with the position after them (`messages`) --

Workers are forked from a small process that has imported their dependencies. Forking the training process is unsafe:
garbage collection in the child waits for threads that do not exist there (a gloo process group crashes with SIGSEGV or
hangs), locks held by other threads are never released, and the child keeps files and weights.

The position of the consumed data is known without asking the worker: the last position received, and the number of
items since. Saving does not wait for the worker.
"""

import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
from collections.abc import Callable, Sequence
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from multiprocessing.util import Finalize
from typing import Any, Optional

from dit.child_processes import run_signals_blocked
from energon_data.streams import Position, Source, StreamItem
from energon_data.workers.messages import receive
from energon_data.workers.worker import Message, work

POSITION_EVERY = 32
"""Items between two positions. A resumed run reads up to this many items again."""
LONGEST_FOLDER = 107 - len("/pymp-12345678/listener-12345678")
"""Longest name of a temporary folder, in bytes, in which the address of the fork server's socket is not too long."""
SHORT_FOLDER = "/tmp"
WORKERS = multiprocessing.get_context("forkserver")
PRELOAD = ["energon_data.workers.preload"]
WORKERS.set_forkserver_preload(PRELOAD)


class BackgroundSource(Source):
    """A stream that a worker process reads.

    The fork server starts immediately, because its imports take seconds; the worker starts at the first `next`. It
    exits with this object, with the training process, or with `close`.

    Args:
        open_source: opens the stream, in this process and, pickled, in the worker; the stream must give the same items
            in both.
        modules: the fork server imports them, so that each worker need not. They must not start threads.
    """

    def __init__(self, open_source: Callable[[], Source], name: str, modules: Sequence[str] = ()) -> None:
        self._open_source, self._name = open_source, name
        self._source = open_source()
        self._worker: Optional[ForkServerProcess] = None
        self._state, self._since = b"", 0
        _start_server(modules)

    def _start(self) -> None:
        position = self._source.state()
        self._connection, worker_end = WORKERS.Pipe()
        with worker_end:
            worker = WORKERS.Process(target=work, args=(worker_end, self._open_source, position, POSITION_EVERY))
            worker.start()
        self._worker = worker
        self._state = pickle.dumps(position)
        self._stop = Finalize(self, _stop, (self._worker, self._connection), exitpriority=0)

    def next(self) -> StreamItem:
        """Return the next item; raises `RuntimeError` if the worker was killed."""
        if self._worker is None:
            self._start()
        late = not self._connection.poll()
        try:
            message: Message = receive(self._connection)
        except (EOFError, ConnectionError):
            raise RuntimeError(f"the worker process of {self._name} {self._ended()}") from None
        message.item.late = late
        self._since += 1
        if message.state is not None:
            self._state, self._since = message.state, 0
        return message.item

    def _ended(self) -> str:
        """Wait for the worker to exit, and describe how it exited."""
        assert self._worker is not None
        self._worker.join()
        code = self._worker.exitcode or 0
        if code >= 0:
            return f"ended with code {code}; see its error above"
        return (
            f"was killed by {signal.Signals(-code).name}; if it was short of memory, set "
            "data.background=False, or start a new run with smaller data.packing_buffer_size and data.shuffle_buffer"
        )

    def state(self) -> Position:
        if self._worker is None:
            return self._source.state()
        state, offset = pickle.loads(self._state)
        return Position(state, offset + self._since)

    def adapt(self, position: Position) -> Position:
        return self._source.adapt(position)

    def load(self, state: dict[str, Any]) -> None:
        self._source.load(state)

    def close(self) -> None:
        if self._worker is not None:
            self._stop()
        self._source.close()


def _start_server(modules: Sequence[str]) -> None:
    """Start the fork server if it is not running: with this process's module path, and without a pool of threads.

    Its socket is in the temporary folder, or in `SHORT_FOLDER` if the address would be too long.
    """
    # With a safe path, folders in the working directory do not hide packages.
    variables = {"PYTHONPATH": os.pathsep.join(sys.path), "PYTHONSAFEPATH": "1"}
    variables |= dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    if modules:
        WORKERS.set_forkserver_preload([*PRELOAD, *modules])
    former = {name: os.environ[name] for name in variables if name in os.environ}
    os.environ |= variables
    former_folder = tempfile.tempdir
    if len(os.fsencode(tempfile.gettempdir())) > LONGEST_FOLDER:
        tempfile.tempdir = SHORT_FOLDER
    try:
        resource_tracker.ensure_running()  # its start unblocks SIGINT and SIGTERM
        with run_signals_blocked():
            forkserver.ensure_running()
    finally:
        tempfile.tempdir = former_folder
        for name in variables:
            del os.environ[name]
        os.environ |= former


def _stop(worker: ForkServerProcess, connection: Connection) -> None:
    connection.close()
    if worker.is_alive():
        worker.kill()
