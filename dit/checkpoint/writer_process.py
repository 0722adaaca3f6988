"""The training process's side of `dit.checkpoint.writer`: shared memory, requests and replies."""

import json
import mmap
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Optional

import torch
from torch import Tensor

from dit.checkpoint.helper_process import HelperProcess
from dit.checkpoint.writer import Settings
from dit.errors import CheckpointError
from dit.settings import CheckpointConfig

ALIGNMENT = 64  # of each file in shared memory, in bytes

Pieces = Sequence[bytes | Tensor]
"""The content of a file: bytes and contiguous tensors, one after the other."""


class SharedMemory:
    """Anonymous shared memory, freed with the last process that has it open; it grows, and every save reuses it."""

    def __init__(self) -> None:
        self.descriptor = os.memfd_create("dit-checkpoint")
        self._bytes = torch.empty(0, dtype=torch.uint8)

    def reserve(self, size: int) -> None:
        """Allocate at least `size` bytes.

        Raises:
            OSError: there is not enough memory.
        """
        if size > len(self._bytes):
            # Without this, a page that cannot be allocated later would kill the process.
            os.posix_fallocate(self.descriptor, 0, size)
            self._bytes = torch.frombuffer(mmap.mmap(self.descriptor, size), dtype=torch.uint8)

    def write(self, start: int, pieces: Pieces) -> None:
        """Copy pieces from any device to consecutive bytes that begin at `start`."""
        for piece in pieces:
            size = size_of(piece)
            target = self._bytes[start : start + size]
            if isinstance(piece, Tensor):
                target.view(piece.dtype).copy_(piece.detach().view(-1))
            elif size:
                target.copy_(torch.frombuffer(bytearray(piece), dtype=torch.uint8))
            start += size

    def close(self) -> None:
        """Release the memory; it is freed when no process has it open."""
        self._bytes = torch.empty(0, dtype=torch.uint8)
        os.close(self.descriptor)


def size_of(piece: bytes | Tensor) -> int:
    """Return the bytes of a piece."""
    return piece.numel() * piece.element_size() if isinstance(piece, Tensor) else len(piece)


class WriterProcess(HelperProcess):
    """A process that writes the files that this rank stages.

    Args:
        root: folder of the checkpoints.
        rank, world_size: of this process.
        config: retention rules and time limit.
        lock: file descriptor of the run's lock, which the process inherits; -1 for none.
    """

    def __init__(self, root: Path, rank: int, world_size: int, config: CheckpointConfig, lock: int = -1) -> None:
        self.memory = SharedMemory()
        settings = Settings(str(root), rank, world_size, config.save_timeout_s, asdict(config))
        inherited = [self.memory.descriptor, *([lock] if lock >= 0 else [])]
        arguments = [str(self.memory.descriptor), json.dumps(asdict(settings))]
        super().__init__("dit.checkpoint.writer", arguments, inherited, f"writer process on rank {rank}")

    def save(self, step: int, token: str, files: Mapping[str, Pieces], meta: Optional[Mapping[str, Any]]) -> None:
        """Copy the files of a checkpoint into shared memory, and request that they are written.

        Args:
            token: token of this save, the same on every rank.
            files: content by file name.
            meta: metadata for the manifest; None except on rank 0.

        Raises:
            CheckpointError: there is not enough memory, or the process has exited.
        """
        last = json.dumps(meta).encode() if meta is not None else b""
        content = [*files.values(), [last]]
        places = list(_places(sum(map(size_of, pieces)) for pieces in content))
        needed = places[-1][0] + places[-1][1]
        try:
            self.memory.reserve(needed)
        except OSError as error:
            raise CheckpointError(
                f"checkpoint of step {step} was not written: {error.strerror}, its copy needs {needed} bytes of host "
                "memory; set checkpoint.async_save=False"
            ) from error
        for (start, _), pieces in zip(places, content):
            self.memory.write(start, pieces)
        named = [(name, *place) for name, place in zip(files, places)]
        self.order({"do": "save", "step": step, "token": token, "files": named, "meta": places[-1]})

    def ended(self) -> str:
        step = self.newest.get("step")
        return f"the checkpoint of step {step} was not written: {super().ended()}; earlier ones are intact"

    def close(self, timeout_s: float) -> None:
        super().close(timeout_s)
        self.memory.close()


def _places(sizes: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Yield start and size of each file in shared memory."""
    start = 0
    for size in sizes:
        yield start, size
        start += -(-size // ALIGNMENT) * ALIGNMENT


def wait_briefly() -> None:
    """Sleep between two polls of a save."""
    time.sleep(0.005)
