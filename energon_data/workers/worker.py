"""Worker process: opens a stream, reads it to its end, and sends its items."""

import multiprocessing
import os
import pickle
import select
import signal
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from multiprocessing.connection import Connection
from threading import Thread
from typing import NamedTuple, Optional

import torch

from dit.child_processes import RUN_SIGNALS
from dit.errors import EXIT_OK
from dit.heap import keep_freed_memory
from energon_data.streams import Position, Source, StreamItem
from energon_data.workers.messages import Sender


class Message(NamedTuple):
    """An item, and the pickled position after it if one is sent."""

    item: StreamItem
    state: Optional[bytes]


def work(connection: Connection, open_source: Callable[[], Source], position: Position, position_every: int) -> None:
    """Main function of a worker; returns when the stream ends or the training process closes the connection."""
    signal.pthread_sigmask(signal.SIG_BLOCK, RUN_SIGNALS)  # the training process decides when its workers exit
    Thread(target=_exit_with_training, args=(connection,), daemon=True).start()
    keep_freed_memory()
    torch.set_num_threads(1)  # one core for each stream
    sender = Sender(connection)
    with suppress(EOFError, ConnectionError):
        for message in _messages(open_source, position, position_every):
            sender.send(message)


def _messages(open_source: Callable[[], Source], position: Position, position_every: int) -> Iterator[Message]:
    """Read the stream to its end, with its position every `position_every` items."""
    try:
        source = open_source()
        source.load(position.state)
        count, item = 0, StreamItem(None, [])
        while count == 0 or item.batch is not None:
            began = time.perf_counter()
            item = source.next()
            item.seconds = time.perf_counter() - began
            count += 1
            has_position = count % position_every == 0 and item.batch is not None
            yield Message(item, pickle.dumps(source.state()) if has_position else None)
    except Exception:
        yield Message(StreamItem(None, [], traceback.format_exc(), is_bug=True), None)


def _exit_with_training(connection: Connection) -> None:
    """Exit when the training process exits, also if it is killed, or closes the connection."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    ends = select.poll()
    ends.register(parent.sentinel, select.POLLIN)
    ends.register(connection, 0)  # only its end, because the main thread reads it
    ends.poll()
    os._exit(EXIT_OK)
