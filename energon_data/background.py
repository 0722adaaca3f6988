"""Reading a stream in a separate process, ahead of training.

The worker makes items until it is far enough ahead. With every few items it sends its position in the stream. So the
position of the consumed data is known without asking the worker: the last position received, and the number of items
since. Saving does not wait for the worker.
"""

import os
import pickle
import signal
import socket
import sys
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Optional

from energon_data.messages import Ahead, GoneError, Inbox, send_pickle
from energon_data.nursery import Worker, nursery_of
from energon_data.streams import Position, Source, StreamItem
from energon_data.worker import Job, Message

POSITION_EVERY = 32
"""Items between two positions. A resumed run reads up to this many items again."""
AHEAD = Ahead()


def read_ahead(open_source: Callable[[], Source], name: str) -> Source:
    """Return a stream that a worker process reads (on Linux) or this process; arguments as in `BackgroundSource`."""
    return BackgroundSource(open_source, name) if sys.platform == "linux" else open_source()


class BackgroundSource:
    """A stream that a worker process reads.

    The worker is started immediately, because its imports take seconds. It exits with this object, with the training
    process, or with `close`.

    Args:
        open_source: opens the stream, in this process and, pickled, in the worker; the stream must give the same items
            in both.
        name: name of the stream, for messages.
    """

    def __init__(self, open_source: Callable[[], Source], name: str) -> None:
        self._source, self._name = open_source(), name
        self._base: Optional[bytes] = None
        self._since = 0
        job = pickle.dumps(Job(open_source, os.getcwd(), POSITION_EVERY, AHEAD))
        self._channel, worker_end = socket.socketpair()
        with worker_end:
            self._worker = nursery_of(os.getpid()).start(worker_end)
        self._inbox = Inbox(self._channel)
        self._stop = weakref.finalize(self, _stop, self._worker, self._channel)
        with suppress(GoneError):  # raised again by `next`
            send_pickle(self._channel, job)

    def next(self) -> StreamItem:
        """Return the next item; do not call after a failure.

        Raises:
            RuntimeError: the worker was killed.
        """
        try:
            if self._base is None:
                self._base = pickle.dumps(self._source.state())
                send_pickle(self._channel, self._base)
            late = not self._inbox.has_message()
            message: Message = self._inbox.receive()
        except GoneError:
            raise RuntimeError(
                f"the worker process of {self._name} {self._ended()}; if it was short of memory, use a smaller "
                "data.shuffle_buffer or data.packing_buffer_size, or data.background=False"
            ) from None
        message.delivery.late = late
        self._since += 1
        if message.state is not None:
            self._base, self._since = message.state, 0
        return message.delivery

    def _ended(self) -> str:
        """Wait for the worker to exit, and describe how it exited."""
        code = self._worker.wait()
        if code is None:
            return "is gone, as is the process that started it"
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"

    def state(self) -> Position:
        """Return the last position received, and the number of items since."""
        if self._base is None:
            return self._source.state()
        state, offset = pickle.loads(self._base)
        return Position(state, offset + self._since)

    def adapt(self, position: Position) -> Position:
        """Convert a position to one that is equal under the current settings."""
        return self._source.adapt(position)

    def load(self, state: dict[str, Any]) -> None:
        """Continue from `state`; call before the first `next`."""
        self._source.load(state)

    def close(self) -> None:
        """Stop the worker."""
        self._stop()
        self._source.close()


def _stop(worker: Worker, channel: socket.socket) -> None:
    worker.kill()
    channel.close()
