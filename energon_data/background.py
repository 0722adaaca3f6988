"""Read a stream in a process of its own, ahead of training.

    training process                                       worker, a fork of it
    next() <-- queue <-- thread <-- socket <-- delivery, delivery, position, delivery, ...

The worker makes deliveries until the queue and the socket are full. Behind every few of them it sends the position that
the stream has there. So the position of what training has consumed is known without asking the worker: the last one
that was passed, and the number of deliveries since. Saving does not wait, whatever the worker is doing.

A message is one pickle and one block with the values of all its tensors; a receiver's tensors are views of the block.
"""

import ctypes
import io
import os
import pickle
import signal
import socket
import struct
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from multiprocessing.util import Finalize
from typing import Any, NamedTuple, Optional

import numpy as np
import torch
from torch import Tensor

from energon_data.streams import Delivery, Position, Source

POSITION_EVERY = 32
"""Deliveries from one position to the next. A resumed run reads up to as many again."""
AHEAD, AHEAD_IF_SMALL = 2, 32
"""Deliveries that are received ahead, and how many if they are small: packs come in bursts, a buffer at a time."""
SMALL_BYTES = 2**25
"""Of all deliveries that were received ahead, together."""

_ALIGNED = 64
_REFERENCES_IF_FREE = 3  # of a block: the list of blocks, the loop over it, and the call that counts
_HEAD = struct.Struct("<QQ")  # bytes of the pickle, and of the block
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h
_VIEWS_PER_CALL = 512  # the kernel takes at most 1,024
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
"""What a scheduler or terminal sends to all processes of a run: the training process decides when its workers end."""


class _Message(NamedTuple):
    """A delivery, and the pickled position behind it, if it is sent along."""

    delivery: Delivery
    state: Optional[bytes]


class _Packer(pickle.Pickler):
    """Pickles a message but for the values of its tensors, which are to be sent in `parts`."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=5)
        self.parts: list[memoryview] = []
        self.size = 0

    def persistent_id(self, value: object) -> Optional[tuple[int, torch.dtype, tuple[int, ...]]]:
        if type(value) is not Tensor:
            return None
        start = self.size
        raw = value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data
        self.parts.append(raw)
        gap = -len(raw) % _ALIGNED
        if gap:
            self.parts.append(memoryview(bytes(gap)))
        self.size += len(raw) + gap
        return start, value.dtype, tuple(value.shape)


class _Unpacker(pickle.Unpickler):
    """Reads what `_Packer` made; tensors are views of the block."""

    def __init__(self, pickled: memoryview, block: Tensor) -> None:
        super().__init__(io.BytesIO(pickled))
        self._block = block

    def persistent_load(self, place: tuple[int, torch.dtype, tuple[int, ...]]) -> Tensor:
        start, dtype, shape = place
        size = dtype.itemsize * torch.Size(shape).numel()
        return self._block[start : start + size].view(dtype).view(shape)


def packed(message: object) -> list[memoryview]:
    """Return the bytes of a message, in parts; they refer to the tensors' memory."""
    file = io.BytesIO()
    packer = _Packer(file)
    packer.dump(message)
    pickled = file.getbuffer()
    return [memoryview(_HEAD.pack(len(pickled), packer.size)), pickled, *packer.parts]


def _send(channel: socket.socket, views: Sequence[memoryview], parent: int) -> None:
    """Send all bytes.

    Raises:
        OSError: the training process is gone, or has closed the stream.
    """
    left = deque(view for view in views if len(view))
    while left:
        try:
            sent = channel.sendmsg([left[i] for i in range(min(len(left), _VIEWS_PER_CALL))])
        except TimeoutError:
            # A worker that was started later has copies of the receiving end, so a broken pipe does not tell.
            if os.getppid() != parent:
                raise ConnectionError("the training process is gone") from None
            continue
        while sent:
            first = left.popleft()
            if sent < len(first):
                left.appendleft(first[sent:])
                break
            sent -= len(first)


def _fill(channel: socket.socket, target: memoryview) -> None:
    """Receive as many bytes as there is room for.

    Raises:
        EOFError: the worker is gone.
    """
    while target:
        count = channel.recv_into(target)
        if count == 0:
            raise EOFError
        target = target[count:]


class _Blocks:
    """Memory of received messages, which is used again: the system takes longer to give new memory than copies take."""

    def __init__(self) -> None:
        self._blocks: list[np.ndarray] = []

    def take(self, size: int) -> Tensor:
        """Return `[size]` bytes to which no earlier message's tensors refer."""
        free = [block for block in self._blocks if sys.getrefcount(block) == _REFERENCES_IF_FREE]
        fitting = next((block for block in free if len(block) >= size), None)
        if fitting is None:
            # Room for somewhat longer packs; what is free is too short for those that come now.
            fitting = np.empty(size + size // 4, np.uint8)
            self._blocks = [block for block in self._blocks if not any(block is one for one in free)] + [fitting]
        return torch.from_numpy(fitting)[:size]


def _receive(channel: socket.socket, blocks: _Blocks) -> tuple[Any, int]:
    """Receive a message; return it, and its size in bytes."""
    head = bytearray(_HEAD.size)
    _fill(channel, memoryview(head))
    pickle_bytes, block_bytes = _HEAD.unpack(head)
    pickled, block = bytearray(pickle_bytes), blocks.take(block_bytes)
    _fill(channel, memoryview(pickled))
    _fill(channel, block.numpy().data)
    return _Unpacker(memoryview(pickled), block).load(), pickle_bytes + block_bytes


def _messages(source: Source) -> Iterator[_Message]:
    """Read a stream to its end, and note its position every now and then."""
    count, delivery = 0, Delivery(None, [])
    while count == 0 or delivery.batch is not None:
        began = time.perf_counter()
        try:
            delivery = source.next()
        except Exception:
            delivery = Delivery(None, [], traceback.format_exc(), is_bug=True)
        delivery.seconds = time.perf_counter() - began
        count += 1
        noted = count % POSITION_EVERY == 0 and delivery.batch is not None
        yield _Message(delivery, pickle.dumps(source.state()) if noted else None)


def _keep_memory() -> None:
    """Let the C library use freed memory again, however large a piece, in place of returning it to the system."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # of glibc
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, 2**25)  # the largest that older versions take
        mallopt(_M_TRIM_THRESHOLD, 2**30)


def _work(source: Source, channel: socket.socket, other_end: socket.socket, parent: int) -> None:
    """Be the worker."""
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    other_end.close()
    _keep_memory()
    channel.settimeout(1.0)
    torch.set_num_threads(1)  # one core for each stream; and threads of the parent's pool are not in a fork
    with suppress(OSError):
        for message in _messages(source):
            _send(channel, packed(message), parent)


class _Queue:
    """Received messages, bounded by number and bytes; the last one is what ended the stream."""

    def __init__(self) -> None:
        self._items: deque[tuple[_Message | Exception, int]] = deque()
        self._bytes = 0
        self._changed = threading.Condition()
        self.is_closed = False

    def put(self, message: _Message | Exception, size: int) -> None:
        """Append a message, and wait until there is room for the next one."""
        with self._changed:
            self._items.append((message, size))
            self._bytes += size
            self._changed.notify_all()
            self._changed.wait_for(self._has_room)

    def _has_room(self) -> bool:
        limit = AHEAD_IF_SMALL if self._bytes < SMALL_BYTES else AHEAD
        return self.is_closed or len(self._items) < limit

    def get(self) -> _Message | Exception:
        """Wait for the next message."""
        with self._changed:
            self._changed.wait_for(lambda: self._items)
            message, size = self._items.popleft()
            self._bytes -= size
            self._changed.notify_all()
            return message

    def close(self) -> None:
        """Let nobody wait."""
        with self._changed:
            self.is_closed = True
            self._changed.notify_all()


def _listen(channel: socket.socket, queue: _Queue) -> None:
    """Receive messages until the end of the stream."""
    blocks = _Blocks()
    while not queue.is_closed:
        try:
            message, size = _receive(channel, blocks)
        except Exception as error:
            queue.put(error, 0)
            return
        queue.put(message, size)


def _stop(worker: BaseProcess, channel: socket.socket, queue: _Queue, thread: threading.Thread) -> None:
    """End the worker and the thread."""
    queue.close()
    with suppress(OSError):
        channel.shutdown(socket.SHUT_RDWR)
    worker.kill()
    worker.join()
    thread.join()
    channel.close()


class BackgroundSource:
    """A stream that a worker process reads.

    The worker starts with the first `next`. It ends with this object, with the training process, or with `close`.

    Args:
        source: the stream; read in this process it gives the same.
        name: of the stream, for messages.
    """

    def __init__(self, source: Source, name: str) -> None:
        self._source, self._name = source, name
        self._base: Optional[bytes] = None
        self._since = 0
        self._queue: Optional[_Queue] = None
        self._worker: Optional[BaseProcess] = None
        self._stop: Optional[Finalize] = None

    def _start(self) -> _Queue:
        position = self._source.state()
        self._base, self._since = pickle.dumps(position), 0
        queue = _Queue()
        ours, theirs = socket.socketpair()
        arguments = (self._source, theirs, ours, os.getpid())
        self._worker = get_context("fork").Process(target=_work, args=arguments, daemon=True, name=self._name)
        self._worker.start()
        theirs.close()
        thread = threading.Thread(target=_listen, args=(ours, queue), daemon=True, name=self._name)
        thread.start()
        # Before multiprocessing ends its daemons by SIGTERM, which workers ignore.
        self._stop = Finalize(self, _stop, args=(self._worker, ours, queue, thread), exitpriority=10)
        self._queue = queue
        return queue

    def next(self) -> Delivery:
        """Return the next delivery; do not call after a failure.

        Raises:
            RuntimeError: the worker was killed.
        """
        message = (self._queue or self._start()).get()
        if isinstance(message, EOFError | ConnectionError):
            raise RuntimeError(
                f"the worker process of {self._name} {self._ended()}; if it was short of memory, use a smaller "
                "data.shuffle_buffer or data.packing_buffer_size, or data.background=False"
            )
        if isinstance(message, Exception):
            raise message
        self._since += 1
        if message.state is not None:
            self._base, self._since = message.state, 0
        return message.delivery

    def _ended(self) -> str:
        """Wait for the worker to end, and say how it did."""
        assert self._worker is not None
        self._worker.join()
        code = self._worker.exitcode or 0
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"

    def state(self) -> Position:
        """Return the last position that was passed, and the deliveries since."""
        if self._base is None:
            return self._source.state()
        state, behind = pickle.loads(self._base)
        return Position(state, behind + self._since)

    def load(self, state: dict[str, Any]) -> None:
        """Continue from `state`; called before the first `next`."""
        self._source.load(state)

    def close(self) -> None:
        """Stop the worker."""
        if self._stop is not None:
            self._stop()
        self._source.close()
