"""What a worker process does: open a stream, read it to its end, and send what it makes."""

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
    """What to read; the first thing that a worker receives, and the position to continue from is the second.

    Attributes:
        open_source: opens the stream.
        folder: to which relative paths belong.
        position_every: deliveries from one position to the next.
        ahead: how many of them are made ahead.
    """

    open_source: Callable[[], Source]
    folder: str
    position_every: int
    ahead: Ahead


class Message(NamedTuple):
    """A delivery, and the pickled position behind it, if it is sent along."""

    delivery: StreamItem
    state: Optional[bytes]


def _messages(channel: socket.socket, outbox: Outbox) -> Iterator[Message]:
    """Read the stream that the channel names to its end, and note its position every now and then."""
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
            noted = count % job.position_every == 0 and delivery.batch is not None
            yield Message(delivery, pickle.dumps(source.state()) if noted else None)
    except GoneError:
        raise
    except Exception:
        yield Message(StreamItem(None, [], traceback.format_exc(), is_bug=True), None)


def work(channel: socket.socket) -> None:
    """Be the worker, until the stream ends or the training process closes it."""
    keep_freed_memory()
    torch.set_num_threads(1)  # one core for each stream
    outbox = Outbox(channel)
    with suppress(GoneError):
        for message in _messages(channel, outbox):
            outbox.send(message)
