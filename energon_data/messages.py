"""Messages from a worker process through shared memory.

    worker                         socket                               training process
    values | pickle -> block 3     (block 3, bytes of each part) -->    tensors are views of block 3
    block 3 may be reused           <-- (3)                              once all views are freed

A message is one pickle, and the values of all its tensors, in one block. Only the number of the block is sent through
the socket, so each tensor is copied once, into the block.
"""

import io
import mmap
import os
import pickle
import select
import socket
import struct
import sys
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple, Optional

import numpy as np
import torch
from torch import Tensor

_ALIGNED = 64
_HEAD = struct.Struct("<qqqq")  # block; block that it replaces, -1 for none; bytes of the values, and of the pickle
_NOTE = struct.Struct("<q")  # a block that is free, or _TAKEN
_TAKEN = -1
_SIZE = struct.Struct("<Q")
_REFERENCES_IF_FREE = 2  # references to a free block: the dictionary of blocks, and the counting call


class Ahead(NamedTuple):
    """Number of messages that a sender may be ahead of the receiver.

    Attributes:
        messages: limit for messages of any size.
        if_small: limit while messages are small, because packs come in bursts of one buffer.
        small_bytes: total size of pending messages up to which they count as small.
    """

    messages: int = 2
    if_small: int = 32
    small_bytes: int = 2**25


class _Packer(pickle.Pickler):
    """Pickles a message without the values of its tensors, and lists the tensors with their offsets."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=5)
        self.tensors: list[tuple[int, Tensor]] = []
        self.size = 0

    def persistent_id(self, value: object) -> Optional[tuple[int, torch.dtype, tuple[int, ...]]]:
        if type(value) is not Tensor:
            return None
        start = self.size
        self.tensors.append((start, value.detach()))
        self.size += -(-value.numel() * value.itemsize // _ALIGNED) * _ALIGNED
        return start, value.dtype, tuple(value.shape)


class _Unpacker(pickle.Unpickler):
    """Reads a pickle of `_Packer`; tensors are views of the block."""

    def __init__(self, pickled: memoryview, block: Tensor) -> None:
        super().__init__(io.BytesIO(pickled))
        self._block = block

    def persistent_load(self, place: tuple[int, torch.dtype, tuple[int, ...]]) -> Tensor:
        return _view(self._block, *place)


def _view(block: Tensor, start: int, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    size = dtype.itemsize * torch.Size(shape).numel()
    return block[start : start + size].view(dtype).view(shape)


def _mapped(descriptor: int) -> np.ndarray:
    """Map a file into memory, and close its descriptor."""
    memory = mmap.mmap(descriptor, os.fstat(descriptor).st_size)
    os.close(descriptor)
    return np.frombuffer(memory, np.uint8)


class GoneError(Exception):
    """The process at the other end has exited or closed the channel."""


@contextmanager
def _connected() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise GoneError from error


class Outbox:
    """The sending end.

    Attributes:
        ahead: limits of the number of pending messages.
    """

    def __init__(self, channel: socket.socket) -> None:
        self._channel, self.ahead = channel, Ahead()
        self._blocks: dict[int, np.ndarray] = {}
        self._free: list[int] = []
        self._under_way: deque[int] = deque()  # bytes of each message that the receiver has not taken
        self._made = 0

    def send(self, message: object) -> None:
        """Write a message into a block, and send it once fewer messages are pending than the limit.

        Raises:
            GoneError: the receiver has exited.
        """
        file = io.BytesIO()
        packer = _Packer(file)
        packer.dump(message)
        pickled, size = file.getbuffer(), packer.size
        self._read_notes(socket.MSG_DONTWAIT)
        number, replaced, new = self._block(size + len(pickled))
        array = self._blocks[number]
        block = torch.from_numpy(array)
        for start, tensor in packer.tensors:
            _view(block, start, tensor.dtype, tuple(tensor.shape)).copy_(tensor)
        array[size : size + len(pickled)] = pickled
        while not self._has_room():
            self._read_notes()
        with _connected():
            socket.send_fds(self._channel, [_HEAD.pack(number, replaced, size, len(pickled))], new)
        for descriptor in new:
            os.close(descriptor)
        self._under_way.append(size + len(pickled))

    def _has_room(self) -> bool:
        is_small = sum(self._under_way) < self.ahead.small_bytes
        return len(self._under_way) < (self.ahead.if_small if is_small else self.ahead.messages)

    def _read_notes(self, flags: int = 0) -> None:
        """Read notes from the receiver; waits for one unless `flags` has `MSG_DONTWAIT`."""
        with _connected(), suppress(BlockingIOError):
            notes = self._channel.recv(1024 * _NOTE.size, flags)
            if not notes:
                raise GoneError
            for (number,) in _NOTE.iter_unpack(notes):
                if number == _TAKEN:
                    self._under_way.popleft()
                else:
                    self._free.append(number)

    def _block(self, size: int) -> tuple[int, int, list[int]]:
        """Return a free block of `size` bytes, the block it replaces (or -1), and the file descriptor if it is new."""
        # The most recently freed block is most likely still in the CPU cache.
        fitting = next((number for number in reversed(self._free) if len(self._blocks[number]) >= size), None)
        if fitting is not None:
            self._free.remove(fitting)
            return fitting, -1, []
        replaced = self._free.pop() if self._free else -1
        self._blocks.pop(replaced, None)
        number, self._made = self._made, self._made + 1
        descriptor = os.memfd_create("dit-batches")
        os.truncate(descriptor, size + size // 4)  # some spare room for longer packs
        self._blocks[number] = _mapped(os.dup(descriptor))
        return number, replaced, [descriptor]


class Inbox:
    """The receiving end."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._blocks: dict[int, np.ndarray] = {}
        self._busy: set[int] = set()
        self._poll = select.poll()
        self._poll.register(channel, select.POLLIN)

    def has_message(self) -> bool:
        """Return whether `receive` would return immediately."""
        return bool(self._poll.poll(0))

    def receive(self) -> Any:
        """Wait for a message; its tensors are views of memory that is reused after they are freed.

        Raises:
            GoneError: the sender has exited.
        """
        with _connected():
            head, new, *_ = socket.recv_fds(self._channel, _HEAD.size, 1, socket.MSG_WAITALL)
        if not head:
            raise GoneError
        number, replaced, value_bytes, pickle_bytes = _HEAD.unpack(head)
        self._blocks.pop(replaced, None)
        if new:
            self._blocks[number] = _mapped(new[0])
        array = self._blocks[number]
        pickled = array[value_bytes : value_bytes + pickle_bytes].data
        message = _Unpacker(pickled, torch.from_numpy(array)).load()
        del array, pickled
        self._busy.add(number)
        free = [n for n in self._busy if sys.getrefcount(self._blocks[n]) == _REFERENCES_IF_FREE]
        self._busy.difference_update(free)
        with suppress(OSError):  # the sender may have exited after its last message
            self._channel.sendall(b"".join(map(_NOTE.pack, (_TAKEN, *free))))
        return message


def send_pickle(channel: socket.socket, pickled: bytes) -> None:
    """Send a pickle for `receive_pickle`.

    Raises:
        GoneError: the receiver has exited.
    """
    with _connected():
        channel.sendall(_SIZE.pack(len(pickled)) + pickled)


def receive_pickle(channel: socket.socket) -> Any:
    """Receive an object.

    Raises:
        GoneError: the sender has exited.
    """
    (size,) = _SIZE.unpack(_read(channel, _SIZE.size))
    return pickle.loads(_read(channel, size))


def _read(channel: socket.socket, size: int) -> bytes:
    with _connected():
        data = channel.recv(size, socket.MSG_WAITALL)
    if len(data) < size:
        raise GoneError
    return data
