"""Writing checkpoints during training, in one process per rank (`dit.checkpoint.background.process`).

    training process: WriterProcess               writer process: Writer
    copies its part into shared memory,
    sends a request                 -- request --> writes, hashes and flushes the files
    continues training              <--  reply --- reports the result

The writers combine the parts of all ranks without collectives, through the checkpoint's folder:

    rank 0                                             every other rank
    creates iter_N.tmp, and in it `order` with a token waits for this token
    writes its files                                   writes its files, then `part_00003.json`: the token, its hashes
    waits for every part, removes these notes,
    publishes (`CheckpointStore.publish`)

The token differs for every save, so that notes of a killed attempt are not mistaken for those of the current one.

If the training process is gone, for example after `kill -9`, the writer drops unfinished saves after ten seconds,
unless only flushing and publishing is left. The next attempt waits for the run folder's lock, which the writer of rank
0 inherits (`dit.monitoring.run_lock`).
"""

import errno
import json
import mmap
import os
import select
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import accumulate
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, Optional

from dit.checkpoint.background.process import BackgroundProcess, connection_and_settings, serve
from dit.checkpoint.manifest import FileRecord, write_hashed
from dit.checkpoint.store import CheckpointStore, cure_of
from dit.durable_files import write_atomic
from dit.errors import CheckpointError
from dit.safe_files import parse_json, read_bytes
from dit.settings import CheckpointConfig

if TYPE_CHECKING:
    from torch import Tensor

ORDER = "order"
CHUNK_BYTES = 4 << 20
POLL_S = 0.02
ORPHAN_S = 10.0
"""Time that a writer continues without its training process; `dit.monitoring.run_lock` waits longer."""
ALIGNMENT = 64  # of each file in shared memory, in bytes

Pieces = Sequence["bytes | Tensor"]
"""The content of a file: bytes and contiguous tensors, one after the other."""


def part_file(rank: int) -> str:
    """Return the name of the note that a rank writes after its part."""
    return f"part_{rank:05d}.json"


def size_of(piece: "bytes | Tensor") -> int:
    """Return the bytes of a piece."""
    return len(piece) if isinstance(piece, bytes) else piece.numel() * piece.element_size()


class SharedMemory:
    """Anonymous shared memory, freed with the last process that has it open; it grows, and every save reuses it."""

    def __init__(self) -> None:
        self.descriptor = os.memfd_create("dit-checkpoint")
        self._mapped: Optional[mmap.mmap] = None

    def reserve(self, size: int) -> None:
        if self._mapped is None or size > len(self._mapped):
            # Without this, a page that cannot be allocated later would kill the process.
            os.posix_fallocate(self.descriptor, 0, size)
            self._mapped = mmap.mmap(self.descriptor, size)

    def write(self, start: int, pieces: Pieces) -> None:
        """Copy pieces from any device to consecutive bytes that begin at `start`."""
        from torch import frombuffer  # imported here because the writer process does not need it

        assert self._mapped is not None
        for piece in pieces:
            size = size_of(piece)
            if isinstance(piece, bytes):
                self._mapped[start : start + size] = piece
            elif size:
                target = frombuffer(self._mapped, dtype=piece.dtype, count=piece.numel(), offset=start)
                target.copy_(piece.detach().view(-1))
            start += size

    def close(self) -> None:
        """Release the memory; it is freed when no process has it open."""
        self._mapped = None
        os.close(self.descriptor)


class WriterProcess(BackgroundProcess):
    """A process that writes the files that this rank stages; it inherits the file descriptor `lock`, -1 for none."""

    def __init__(self, root: Path, rank: int, world_size: int, config: CheckpointConfig, lock: int = -1) -> None:
        self.root, self.memory = root, SharedMemory()
        self._step: Optional[int] = None
        settings = {
            "memory": self.memory.descriptor,
            "root": str(root),
            "rank": rank,
            "world_size": world_size,
            "config": config,
        }
        inherited = [self.memory.descriptor, *([lock] if lock >= 0 else [])]
        super().__init__(__name__, settings, inherited, f"writer process on rank {rank}")

    def save(self, step: int, token: str, files: Mapping[str, Pieces], meta: Optional[Mapping[str, Any]]) -> None:
        """Copy the files of a checkpoint into shared memory, and request that they are written.

        All ranks pass the same `token` for a save. Only rank 0 passes `meta`, the entries of the manifest.
        """
        self._step = step
        content = [*files.values(), [b"" if meta is None else json.dumps(meta).encode()]]
        sizes = [sum(map(size_of, pieces)) for pieces in content]
        starts = list(accumulate((size + -size % ALIGNMENT for size in sizes), initial=0))
        try:
            self.memory.reserve(starts[-1])
        except OSError as error:
            cure = f"{cure_of(error, self.root)}, or " if error.errno == errno.EFBIG else ""
            raise CheckpointError(
                f"checkpoint of step {step} was not written: {error.strerror}, its copy needs {starts[-1]} bytes of "
                f"host memory; {cure}set checkpoint.async_save=False"
            ) from error
        for start, pieces in zip(starts, content):
            self.memory.write(start, pieces)
        *named, last = zip([*files, ""], starts, sizes)
        self.request({"do": "save", "step": step, "token": token, "files": named, "meta": last[1:]})

    def ended(self) -> str:
        return f"the checkpoint of step {self._step} was not written: {super().ended()}; earlier ones are intact"

    def close(self, timeout_s: float) -> None:
        super().close(timeout_s)
        self.memory.close()


class Writer:
    """Executes the requests of one training process in order."""

    def __init__(
        self, connection: Connection, *, memory: int, root: str, rank: int, world_size: int, config: CheckpointConfig
    ) -> None:
        self.rank, self.world_size = rank, world_size
        self._closed = select.poll()
        self._closed.register(connection, select.POLLRDHUP)
        self._orphan_since: Optional[float] = None
        self.store = CheckpointStore(root, config)
        self._memory = memory
        self._mapped: Optional[mmap.mmap] = None

    def execute(self, order: dict[str, Any]) -> dict[str, Any]:
        """Execute a request, and return the reply: kind, step, and the error or None."""
        actions: dict[str, Callable[[dict[str, Any]], None]] = {
            "save": self._lead if self.rank == 0 else self._follow,
            "attach": lambda order: self.store.attach(order["step"], order["meta"]),
            "abort": lambda order: self.store.abort(order["step"]),
        }
        error = None
        try:
            actions[order["do"]](order)
        except Exception as failure:  # the training process logs it and decides
            error = str(failure)
            if not isinstance(failure, CheckpointError):
                where = f"rank {self.rank}: {order['do']} of the checkpoint of step {order['step']}"
                error = f"{where}: {type(failure).__name__}: {failure}"
        return {"do": order["do"], "step": order["step"], "error": error}

    def _lead(self, order: dict[str, Any]) -> None:
        step = order["step"]
        folder = self.store.begin(step)
        with self.store.writing(step):
            write_atomic(folder / ORDER, order["token"], flush=False)
            meta = parse_json(self._staged(*order["meta"]).tobytes())
            records = dict(self._write(folder, order))
            records |= self._parts(folder, order)
            for name in (ORDER, *map(part_file, range(1, self.world_size))):
                (folder / name).unlink()
        self.store.publish(step, meta, records)

    def _parts(self, folder: Path, order: dict[str, Any]) -> dict[str, FileRecord]:
        records: dict[str, FileRecord] = {}
        missing, patience = set(range(1, self.world_size)), self._patience()
        while missing:
            present = set(os.listdir(folder))
            for rank in sorted(rank for rank in missing if part_file(rank) in present):
                note = parse_json(read_bytes(folder / part_file(rank)))
                if note["token"] != order["token"]:
                    continue
                if note["error"] is not None:
                    raise CheckpointError(note["error"])
                records |= {name: FileRecord(size, digest) for name, (size, digest) in note["files"].items()}
                missing.remove(rank)
            if missing and not next(patience):
                names = ", ".join(map(str, sorted(missing)[:8]))
                raise CheckpointError(
                    f"checkpoint of step {order['step']} was not written: no files arrived from {len(missing)} of "
                    f"{self.world_size} ranks ({names}) {self.store.config.save_limit}; earlier checkpoints are intact"
                )
        return records

    def _follow(self, order: dict[str, Any]) -> None:
        folder, rank, patience = self.store.partial_path(order["step"]), self.rank, self._patience()
        while not _is_ordered(folder, order["token"]):
            if not next(patience):
                late = f"rank 0 has not begun the checkpoint of step {order['step']} {self.store.config.save_limit}"
                raise CheckpointError(f"rank {rank}: {late}")
        note: dict[str, Any] = {"token": order["token"], "error": None, "files": {}}
        try:
            records = dict(self._write(folder, order))
            note["files"] = {name: [record.size_bytes, record.sha256] for name, record in records.items()}
        except OSError as error:
            for name, _, _ in order["files"]:  # free space for the note
                with suppress(OSError):
                    (folder / name).unlink()
            note["error"] = (
                f"rank {rank}: checkpoint of step {order['step']} was not written: {error.strerror} at "
                f"{error.filename or folder}; {cure_of(error, self.store.root)}; "
                "earlier checkpoints are intact"
            )
        with suppress(FileNotFoundError):  # the folder is missing if rank 0 has aborted
            write_atomic(folder / part_file(rank), json.dumps(note), flush=False)
        if note["error"] is not None:
            raise CheckpointError(note["error"])

    def _patience(self) -> Iterator[bool]:
        """Sleep and yield True until the time limit, then yield False."""
        deadline = time.monotonic() + self.store.config.save_timeout_s
        while time.monotonic() < deadline and not self._is_abandoned():
            time.sleep(POLL_S)
            yield True
        yield False

    def _is_abandoned(self) -> bool:
        """Return whether the training process has been gone for `ORPHAN_S`; unread requests may still be pending."""
        if self._orphan_since is None and self._closed.poll(0):
            self._orphan_since = time.monotonic()
        return self._orphan_since is not None and time.monotonic() - self._orphan_since > ORPHAN_S

    def _write(self, folder: Path, order: dict[str, Any]) -> Iterator[tuple[str, FileRecord]]:
        for name, start, size in order["files"]:
            path = folder / name
            if path.parent != folder:  # its absence means that rank 0 has aborted
                path.parent.mkdir(exist_ok=True)
            yield name, write_hashed(path, self._pieces(path, self._staged(start, size)))

    def _pieces(self, path: Path, content: memoryview) -> Iterator[memoryview]:
        for at in range(0, len(content), CHUNK_BYTES):
            if self._is_abandoned():
                raise CheckpointError(f"{path} was not written: the training process is gone")
            yield content[at : at + CHUNK_BYTES]

    def _staged(self, start: int, size: int) -> memoryview:
        if self._mapped is None or len(self._mapped) < start + size:
            self._mapped = mmap.mmap(self._memory, os.fstat(self._memory).st_size, prot=mmap.PROT_READ)
        return memoryview(self._mapped)[start : start + size]


def _is_ordered(folder: Path, token: str) -> bool:
    try:
        return read_bytes(folder / ORDER).decode() == token
    except OSError:
        return False


def main() -> None:
    """Execute requests until the training process closes the connection or exits."""
    connection, settings = connection_and_settings()
    serve(connection, Writer(connection, **settings).execute)


if __name__ == "__main__":
    main()
