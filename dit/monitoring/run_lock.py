"""One run at a time in a run folder: `run.lock` names the process that has the lock; a crash releases it.

Rank 0 locks the file with `flock`. The kernel releases the lock when the process ends, so stale locks do not exist; the
content of the file is valid only while it is locked. Linux implements `flock` over NFS as a lock on the server (NFSv4;
NFSv3 with lockd), so runs on other machines are detected too; the lock of a crashed machine is released when the
server's lease expires. A new run waits if the process with the lock is about to stop. On a disk without locks (Lustre
mounted without `flock`) a warning is logged. Loader workers are not forked from rank 0, so they do not share the lock.
"""

import errno
import fcntl
import json
import logging
import os
import socket
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Optional

from dit.errors import BusyError, ConfigError, UserError
from dit.monitoring.heartbeat import read_beat
from dit.safe_files import open_regular, parse_json, read_own, refuse_links

logger = logging.getLogger(__name__)

LOCK_FILE = "run.lock"
LINKS = ("checkpoints",)  # may be a symbolic link in a run folder: checkpoints are often on a larger disk
WAIT_S = 30.0  # the grace period of Slurm and torchrun between SIGTERM and SIGKILL
POLL_S = 0.2
ENDING_WAIT_S = 900.0  # for a run that still writes a checkpoint after its training process or launcher ended
READ_S = 30.0  # limit for all ranks to read the refusal
WITHOUT_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
JOB_VARIABLES = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID")


def job_id() -> Optional[str]:
    """Return the scheduler's number of this job; None outside a job."""
    return next((os.environ[name] for name in JOB_VARIABLES if name in os.environ), None)


class RunLock:
    """Exclusive lock on a run folder; a context manager around the run.

    Rank 0 takes the lock on entering and stores a failure; `agree` raises it on every rank.

    Args:
        setting: name of the setting that selects the folder, for messages.
        waiting: context in which rank 0 waits for the lock, such as `PreemptionFlag.exit_immediately`.

    Attributes:
        descriptor: file descriptor with the lock, -1 without; a process that inherits it keeps the lock until it ends.
    """

    def __init__(
        self,
        run_dir: Path | str,
        rank: int = 0,
        setting: str = "training.run_dir",
        *,
        waiting: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self.run_dir, self.rank = Path(run_dir), rank
        self._named, self._waiting = f"{setting}={run_dir}", waiting
        self.path = self.run_dir / LOCK_FILE
        self.descriptor = -1
        self._holder: Optional[dict[str, Any]] = None
        self._refusal: Optional[str] = None
        self._is_busy = False

    def __enter__(self) -> "RunLock":
        if self.rank == 0:
            try:
                with self._waiting():
                    self._take()
            except SystemExit:  # a request to stop
                self.__exit__()
                raise
            except UserError as error:
                self._refusal, self._is_busy = str(error), isinstance(error, BusyError)
        return self

    def __exit__(self, *_: object) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def agree(self) -> None:
        """Broadcast the result of rank 0 (collective, once per world).

        The result is sent through the rendezvous store, so no device is used before the settings are checked.
        """
        import torch.distributed as dist  # takes seconds, and `launch.status` does not need it

        store = dist.distributed_c10d._get_default_store()
        key = LOCK_FILE  # each attempt has its own store
        if self.rank == 0:
            store.set(key, json.dumps([self._holder, self._refusal, self._is_busy]))
        else:
            self._holder, self._refusal, self._is_busy = parse_json(store.get(key))
        if self._refusal is not None and self.rank > 0:
            store.set(f"{key}.{self.rank}", "read")
        elif self._refusal is not None:  # rank 0 may host the store, so it waits for the others
            with suppress(dist.DistError):  # a rank died before
                store.wait([f"{key}.{rank}" for rank in range(1, dist.get_world_size())], timedelta(seconds=READ_S))
        self.check()

    def check(self) -> None:
        """Check that the lock was taken; for a single process.

        Raises:
            ConfigError: the folder is in use by another process, or cannot be used at all.
            BusyError: it is in use by a process that will stop.
        """
        if self._refusal is not None:
            raise (BusyError if self._is_busy else ConfigError)(self._refusal)

    def is_ours(self) -> bool:
        """Return whether this attempt may write into the folder: it has the lock, and no other process took it."""
        return self._holder is not None and self._read() in (self._holder, None)

    def _take(self) -> None:
        try:
            self.run_dir.mkdir(parents=True, exist_ok=True)
            refuse_links(self.run_dir, allowed=LINKS)
            self.descriptor = open_regular(self.path, os.O_RDWR | os.O_CREAT, follow=False)
            self._wait()
            started = datetime.now(UTC).isoformat(sep=" ")
            self._holder = {"host": socket.gethostname(), "pid": os.getpid(), "started": started, "job": job_id()}
            text = json.dumps(self._holder).encode()
            os.pwrite(self.descriptor, text, 0)
            os.ftruncate(self.descriptor, len(text))
            os.fsync(self.descriptor)  # else ranks on other nodes read the previous owner
        except UserError:
            raise
        except (OSError, ValueError) as error:  # a path with a zero byte is a ValueError
            self._holder = None
            reason = f"{error.filename or self.path}: {error.strerror}" if isinstance(error, OSError) else str(error)
            raise ConfigError(f"{self._named} cannot be used: {reason}; choose another folder") from error

    def _wait(self) -> None:
        """Lock the file; wait for a process that is about to end."""
        began, reported = time.monotonic(), ""
        while True:
            try:
                fcntl.flock(self.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                in_use, ends = self._in_use()
                patience_s = ENDING_WAIT_S if ends else WAIT_S
                if in_use != reported:
                    logger.warning("%s; waiting up to %.0f s for its end", in_use, patience_s)
                    reported = in_use
                if time.monotonic() >= began + patience_s:
                    if ends:
                        raise BusyError(f"{in_use}; give the same command again after its end") from None
                    raise ConfigError(f"{in_use}; stop that run, wait for its end, or choose another folder") from None
                time.sleep(POLL_S)
            except OSError as error:
                if error.errno not in WITHOUT_LOCKS:
                    raise
                logger.warning(
                    "the disk of %s has no locks (%s): make sure that no second run uses this folder",
                    self.run_dir,
                    error.strerror,
                )
                return

    def _in_use(self) -> tuple[str, bool]:
        """Return a sentence about the process with the lock, and whether it or its checkpoint writer will end soon."""
        holder = self._read() or {}
        host, pid = holder.get("host"), holder.get("pid")
        who = "process {pid} on {host}, started {started}".format_map(holder) if holder else "another process"
        job = f", job {holder['job']}" if holder.get("job") else ""
        in_use = f"{self._named} is in use by {who}{job}"
        if host == socket.gethostname() and not Path(f"/proc/{pid}").exists():
            return f"{in_use}, which has ended; its checkpoint is still being written", True
        beat = read_beat(self.run_dir, 0)
        if beat is not None and beat.is_orphan and (beat.host, beat.pid) == (host, pid):
            return f"{in_use}, whose launcher is dead; it saves and will stop", True
        return in_use, False

    def _read(self) -> Optional[dict[str, Any]]:
        """Return the content of the file; None if it is missing or has another form."""
        holder = read_own(self.path, dict[str, Any])
        return holder if holder is not None and {"host", "pid", "started"} <= holder.keys() else None
