"""Worker process: opens a stream, reads it to its end, and sends its items."""

import os
import pickle
import socket
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import NamedTuple, Optional

import torch

from dit.heap import keep_freed_memory
from energon_data.messages import Ahead, GoneError, Outbox, receive_pickle
from energon_data.streams import Position, Source, StreamItem


class Job(NamedTuple):
    """Stream to read; sent to the worker first, followed by the position to continue from.

    Attributes:
        open_source: opens the stream.
        folder: working directory for relative paths.
        position_every: number of items between two positions.
        ahead: limits of items made ahead of training.
    """

    open_source: Callable[[], Source]
    folder: str
    position_every: int
    ahead: Ahead


class Message(NamedTuple):
    """An item, and the pickled position after it if one is sent."""

    delivery: StreamItem
    state: Optional[bytes]


def _messages(channel: socket.socket, outbox: Outbox) -> Iterator[Message]:
    """Read the requested stream to its end, with its position every `position_every` items."""
    try:
        job: Job = receive_pickle(channel)
        outbox.ahead = job.ahead
        os.chdir(job.folder)
        source = job.open_source()
        position: Position = receive_pickle(channel)
        source.load(position.state)
        count, delivery = 0, StreamItem(None, [])
        while count == 0 or delivery.batch is not None:
            began = time.perf_counter()
            delivery = source.next()
            delivery.seconds = time.perf_counter() - began
            count += 1
            has_position = count % job.position_every == 0 and delivery.batch is not None
            yield Message(delivery, pickle.dumps(source.state()) if has_position else None)
    except GoneError:
        raise
    except Exception:
        yield Message(StreamItem(None, [], traceback.format_exc(), is_bug=True), None)


def work(channel: socket.socket) -> None:
    """Main function of a worker, until the stream ends or the training process closes it."""
    keep_freed_memory()
    torch.set_num_threads(1)  # one core for each stream
    outbox = Outbox(channel)
    with suppress(GoneError):
        for message in _messages(channel, outbox):
            outbox.send(message)
