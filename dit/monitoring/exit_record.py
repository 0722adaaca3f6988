"""How a run ended: `run_dir/exit.json`.

torchrun replaces every worker's exit code by 1, so the code is stored in a file. A failing rank writes
`exit.rank<N>.json`. `exit.json` is a copy of the root cause, not of the "connection closed" errors of its peers. If
`exit.json` is missing, the run is still running or was killed without a signal that it could handle.
"""

import logging
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Optional

from dit.durable_files import strict_json, write_atomic
from dit.errors import EXIT_OK, EXIT_PREEMPTED, EXIT_REASONS, EXIT_UNEXPECTED, UserError, exit_code
from dit.monitoring.time_limit import started_at
from dit.safe_files import read_own
from dit.terminal import echo

logger = logging.getLogger(__name__)

EXIT_FILE = "exit.json"
CODE_FILE = "DIT_EXIT_CODE_FILE"
"""Environment variable: an existing file of this node for the code of a refused attempt, see launch/train.sh."""
PEER_LOST = "peer_lost"
# Errors that torch.distributed raises, and words in the messages of gloo, NCCL and the store, when another rank died
# or hangs.
PEER_ERRORS = ("DistBackendError", "DistNetworkError", "DistStoreError")
PEER_WORDS = (
    "connection closed",
    "connection reset",
    "connection refused",
    "broken pipe",
    "remote process exited",
    "timed out waiting",
    "collective operation timeout",
    "socket timeout",
    "store timeout",
)
# Words of NCCL errors that this machine causes, unless the message has one of PEER_WORDS, too.
LOCAL_NCCL_WORDS = ("duplicate gpu", "invalid usage", "unhandled system error", "unhandled cuda error")


@dataclass(frozen=True)
class Outcome:
    """How one rank ended.

    Attributes:
        reason: name of the code; `peer_lost` has the code of unexpected errors.
        traceback: of unexpected errors only; the messages of other errors state the cure.
    """

    code: int
    reason: str
    step: Optional[int]
    rank: int
    error: Optional[str] = None
    time: float = field(default_factory=time.time)
    traceback: Optional[str] = None

    @property
    def precedence(self) -> tuple[int, float, int]:
        """Sort key: causes, then ranks that lost a peer, then preemption, then success; the earliest first."""
        if self.code == EXIT_OK:
            kind = 3
        elif self.code == EXIT_PREEMPTED:
            kind = 2
        else:
            kind = 1 if self.reason == PEER_LOST else 0
        return kind, self.time, self.rank


def is_peer_lost(error: BaseException) -> bool:
    """Return whether `error` is a consequence of another rank's failure; False if the launcher started one rank."""
    is_alone = int(os.environ.get("WORLD_SIZE", "1")) == 1
    if is_alone or isinstance(error, UserError) or not isinstance(error, Exception):
        return False
    text = str(error).lower()
    if isinstance(error, ConnectionError) or (isinstance(error, RuntimeError) and _has(text, PEER_WORDS)):
        return True
    return type(error).__name__ in PEER_ERRORS and not _has(text, LOCAL_NCCL_WORDS)


def _has(text: str, words: Iterable[str]) -> bool:
    return any(word in text for word in words)


def outcome_of(error: Optional[BaseException], *, step: Optional[int], rank: int, preempted: bool) -> Outcome:
    """Return the record of how a rank ended.

    Args:
        preempted: the run stopped early on request, with a checkpoint.
    """
    at_end = EXIT_PREEMPTED if preempted else EXIT_OK
    code = at_end if error is None else exit_code(error)
    outcome = Outcome(code, EXIT_REASONS.get(code, EXIT_REASONS[EXIT_UNEXPECTED]), step, rank)
    if error is None or code in (EXIT_OK, EXIT_PREEMPTED):
        return outcome
    reason = PEER_LOST if is_peer_lost(error) else outcome.reason
    trace = None if isinstance(error, UserError) else "".join(traceback.format_exception(error))
    return replace(outcome, reason=reason, error=f"{type(error).__name__}: {error}", traceback=trace)


class ExitRecord:
    """Record how the run ended, also after an exception.

    Exceptions pass through unchanged, except a request to stop because another rank failed; let `dit.errors.exit_code`
    turn them into the process's code, or use `code`.

    Args:
        rank: of this process. Rank 0 removes the records of an earlier attempt on entering, and records success.
        is_ours: whether this attempt may write into the folder (`RunLock.is_ours`); if not, the records in it
            belong to another run and are not changed. The code then goes to the file in `CODE_FILE`.

    Attributes:
        step: to be updated by the run.
        preempted: to be set when the run stops early on request.
        explain: returns why a peer was lost; an empty text if that is unknown.

    Raises:
        ConnectionAbortedError: this rank was stopped (`SystemExit` with code 75) after another one had failed. In
            this case torchrun sends the same signal as a scheduler that preempts the run.
    """

    def __init__(self, run_dir: Path | str, rank: int = 0, is_ours: Callable[[], bool] = lambda: True) -> None:
        self.run_dir = Path(run_dir)
        self.rank = rank
        self._is_ours = is_ours
        self.step: Optional[int] = None
        self.preempted = False
        self.code: Optional[int] = None
        self.explain: Callable[[], str] = str

    def __enter__(self) -> "ExitRecord":
        if self.rank == 0 and self._is_ours():
            for path in (self.run_dir / EXIT_FILE, *self.run_dir.glob("exit.rank*.json")):
                # A folder that is not writable stops the run elsewhere, with a better message.
                with suppress(OSError):
                    path.unlink()
        return self

    def __exit__(
        self, kind: Optional[type[BaseException]], error: Optional[BaseException], trace: Optional[TracebackType]
    ) -> None:
        peer_error = self._failed_peer() if error is not None and exit_code(error) == EXIT_PREEMPTED else None
        outcome = outcome_of(peer_error or error, step=self.step, rank=self.rank, preempted=self.preempted)
        self.code = outcome.code
        if outcome.reason == PEER_LOST and (cause := self.explain()):
            outcome = replace(outcome, error=f"{outcome.error}; {cause}")
        if self._is_ours():
            write_outcome(self.run_dir, outcome)
        elif isinstance(error, UserError) and (file := Path(os.environ.get(CODE_FILE, ""))).is_file():
            file.write_text(str(outcome.code))
        if peer_error is not None:
            raise peer_error from error

    def _failed_peer(self) -> Optional[ConnectionAbortedError]:
        """Return an error that names the rank that has failed since this process started; None if there is none."""
        failed = _root_outcome(self.run_dir)
        if failed is None or failed.rank == self.rank or failed.time < started_at(os.getpid()):
            return None
        return ConnectionAbortedError(f"rank {failed.rank} ended: {failed.error}")


def write_outcome(run_dir: Path, outcome: Outcome) -> None:
    """Record how a rank ended, and copy the root cause to `exit.json`.

    If writing fails, the record is logged to stderr instead: the failure must not hide the original error.
    """
    text = strict_json(asdict(outcome), indent=1) + "\n"
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        failed = outcome.code not in (EXIT_OK, EXIT_PREEMPTED)
        if not failed and outcome.rank != 0:
            return
        if outcome.reason == PEER_LOST and (root := read_outcome(run_dir)) and root.precedence < outcome.precedence:
            return  # if many ranks lost the same peer, a few records are enough
        write_atomic(run_dir / (f"exit.rank{outcome.rank}.json" if failed else EXIT_FILE), text)
        root = None
        # Ranks fail at the same time. Each reads again after writing, so the last writer has seen all records.
        while (best := _root_outcome(run_dir)) is not None and best != root:
            write_atomic(run_dir / EXIT_FILE, strict_json(asdict(best), indent=1) + "\n")
            root = best
    except OSError as error:
        logger.error("cannot write %s: %s", run_dir / EXIT_FILE, error)
        echo(text, end="", file=sys.stderr)


def read_outcome(run_dir: Path | str) -> Optional[Outcome]:
    """Read `exit.json`; None if there is none."""
    return _read(Path(run_dir) / EXIT_FILE)


def _root_outcome(run_dir: Path) -> Optional[Outcome]:
    outcomes = [_read(path) for path in run_dir.glob("exit.rank*.json")]
    return min((outcome for outcome in outcomes if outcome is not None), key=lambda o: o.precedence, default=None)


def _read(path: Path) -> Optional[Outcome]:
    outcome = read_own(path, Outcome)
    if outcome is None:
        return None
    texts = outcome.reason, outcome.error or "", outcome.traceback or ""
    integers = outcome.code, outcome.rank, outcome.step or 0
    is_valid = all(isinstance(text, str) for text in texts) and all(isinstance(number, int) for number in integers)
    return outcome if is_valid and isinstance(outcome.time, int | float) else None
