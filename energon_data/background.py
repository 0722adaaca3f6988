"""Read a stream in a process of its own, ahead of training.

The worker makes deliveries until it is far enough ahead. Behind every few of them it sends the position that the stream
has there. So the position of what training has consumed is known without asking the worker: the last one that was
passed, and the number of deliveries since. Saving does not wait, whatever the worker is doing.
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
"""Deliveries from one position to the next. A resumed run reads up to as many again."""
AHEAD = Ahead()


def read_ahead(open_source: Callable[[], Source], name: str) -> Source:
    """Return a stream that a worker process reads; off Linux, one that this process reads. Arguments as below."""
    return BackgroundSource(open_source, name) if sys.platform == "linux" else open_source()


class BackgroundSource:
    """A stream that a worker process reads.

    The worker is started at once, since it needs seconds to import what it needs. It ends with this object, with the
    training process, or with `close`.

    Args:
        open_source: opens the stream, here and in the worker, to which it is pickled; read in this process the stream
            gives the same.
        name: of the stream, for messages.
    """

    def __init__(self, open_source: Callable[[], Source], name: str) -> None:
        self._source, self._name = open_source(), name
        self._base: Optional[bytes] = None
        self._since = 0
        job = pickle.dumps(Job(open_source, os.getcwd(), POSITION_EVERY, AHEAD))
        self._channel, theirs = socket.socketpair()
        with theirs:
            self._worker = nursery_of(os.getpid()).start(theirs)
        self._inbox = Inbox(self._channel)
        self._stop = weakref.finalize(self, _stop, self._worker, self._channel)
        with suppress(GoneError):  # said by `next`
            send_pickle(self._channel, job)

    def next(self) -> StreamItem:
        """Return the next delivery; do not call after a failure.

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
        """Wait for the worker to end, and say how it did."""
        code = self._worker.wait()
        if code is None:
            return "is gone, as is the process that started it"
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"

    def state(self) -> Position:
        """Return the last position that was passed, and the deliveries since."""
        if self._base is None:
            return self._source.state()
        state, behind = pickle.loads(self._base)
        return Position(state, behind + self._since)

    def adapt(self, position: Position) -> Position:
        """Return an equal position for the present settings."""
        return self._source.adapt(position)

    def load(self, state: dict[str, Any]) -> None:
        """Continue from `state`; called before the first `next`."""
        self._source.load(state)

    def close(self) -> None:
        """Stop the worker."""
        self._stop()
        self._source.close()


def _stop(worker: Worker, channel: socket.socket) -> None:
    worker.kill()
    channel.close()
