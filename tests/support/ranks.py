"""Ranks for tests: selection of cases, comparison with one rank, and jobs in worker processes that start once."""

import logging
import os
import pickle
import traceback
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from importlib import import_module
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from typing import TYPE_CHECKING, Any, Optional, TypeVar
from unittest import mock

import psutil
import pytest
import torch.distributed as dist

from dit.child_processes import run_signals_blocked
from dit.verify.ranks import free_port, run_ranks, run_world
from dit.verify.report import Verdict
from dit.verify.trial import Trial

if TYPE_CHECKING:
    from dit.run_config import RunConfig
    from dit.settings import Fp8
    from launch.verify import Pair

Key = TypeVar("Key", bound=Hashable)


def rows(
    cases: Iterable[tuple], quick: Callable[..., bool], long: Callable[..., bool] = lambda *case: False
) -> list[Any]:
    """Mark the cases that `make test` does not run as `slow`, or as `long`."""

    def marks(case: tuple) -> Any:
        if quick(*case):
            return ()
        return pytest.mark.long if long(*case) else pytest.mark.slow

    return [pytest.param(*case, marks=marks(case)) for case in cases]


def selected(request: pytest.FixtureRequest, names: tuple[str, ...]) -> set[tuple]:
    """Return the values of these parameters in all tests of the requesting module that this pytest session will run."""
    return {tuple(params[n] for n in names) for params in _parameters(request) if params.keys() >= set(names)}


def others_selected(request: pytest.FixtureRequest, *rows: tuple[str, ...]) -> bool:
    """Return whether the session will run tests of the requesting module that have none of these sets of parameters."""
    return any(not any(params.keys() >= set(names) for names in rows) for params in _parameters(request))


def _parameters(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    """Return the parameters of all tests of the requesting module that this pytest session will run."""
    calls = [getattr(item, "callspec", None) for item in request.session.items if item.path == request.path]
    return [{} if call is None else call.params for call in calls]


def one_step(run: "RunConfig", ranks: int, fp8: "Optional[Fp8]" = None) -> "Pair":
    """Return the pair of `tiny_pair` with one training step instead of two."""
    from launch.verify import tiny_pair

    pair = tiny_pair(run, ranks, fp8)
    return replace(pair, one=replace(pair.one, steps=1), many=replace(pair.many, steps=1))


def compared(pairs: Mapping[Key, "Pair"], folder: Path) -> dict[Key, Verdict]:
    """Compare the layout of each pair with one rank; each world size starts once."""
    from launch.verify import compare

    def trained(ranks: int, trials: Iterable[Trial]) -> list[dict[str, Any]]:
        cases = [{"task": "dit.verify.trial:run_case", "trial": trial} for trial in trials]
        return run_world(ranks, cases, folder / str(ranks))

    ones = {repr(pair.one): pair.one for pair in pairs.values()}
    one, many = dict(zip(ones, trained(1, ones.values()))), {}
    for size in sorted({pair.world_size for pair in pairs.values()}):
        of_size = {row: pair.many for row, pair in pairs.items() if pair.world_size == size}
        many |= dict(zip(of_size, trained(size, of_size.values())))
    return {row: compare(pair, one[repr(pair.one)], many[row]) for row, pair in pairs.items()}


@dataclass(frozen=True)
class Job:
    """A function call in a worker process.

    Attributes:
        action: a function of `tests.integration.actions`.
        arguments: keyword arguments of the function.
        ranks: world size; the other worker processes wait meanwhile.
    """

    action: Callable[..., Any]
    arguments: dict[str, Any] = field(default_factory=dict)
    ranks: int = 1


def call(action: Callable[..., Any], *words: object, ranks: int = 1, **options: Any) -> Job:
    """Return a job that runs a command with these words, and with further options of the action."""
    return Job(action, {"arguments": [str(word) for word in words], **options}, ranks)


def run_jobs(folder: Path, jobs: Mapping[str, Job], *, timeout_s: float = 1500.0) -> dict[str, Any]:
    """Run all jobs in order; the worker processes start once.

    Returns:
        By name, the action's result; for a job of several ranks, the list of their results.

    Raises:
        RuntimeError: a worker failed; the message has the end of its output.
    """
    folder.mkdir(parents=True, exist_ok=True)
    # Each world has its own port, because the store of the previous one may linger.
    (folder / "jobs.pkl").write_bytes(pickle.dumps([(name, job, free_port()) for name, job in jobs.items()]))
    count = max(job.ranks for job in jobs.values())
    run_ranks(_work, count, folder, timeout_s=timeout_s)
    outputs = [pickle.loads((folder / f"results_{rank}.pkl").read_bytes()) for rank in range(count)]
    return {
        name: outputs[0][name] if job.ranks == 1 else [results[name] for results in outputs[: job.ranks]]
        for name, job in jobs.items()
    }


def is_alive(pid: int) -> bool:
    """Return whether a process runs; one that ended, but whose parent did not ask for its status, does not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@contextmanager
def forked_servers() -> Iterator[None]:
    """Fork a fork server of multiprocessing from this rank; a new Python would import every module again.

    The rank must not have threads that a worker needs. A server that was forked from pytest made ranks hang.
    """

    def forked(path: bytes, arguments: Sequence[bytes], fds: Sequence[int]) -> int:
        server = os.fork()
        if not server:
            try:
                forkserver._forkserver._lock.release()  # `ensure_running` has acquired it
                for fd in {int(name) for name in os.listdir("/proc/self/fd")}.difference((0, 1, 2), fds):
                    with suppress(OSError):
                        os.close(fd)  # such as the end of the pipe whose closing ends the server
                for name in forkserver._forkserver._preload_modules:
                    import_module(name)
                forkserver.main(*fds, None)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(0)
        return server

    resource_tracker.ensure_running()  # otherwise it would be forked, too
    with mock.patch("multiprocessing.util.spawnv_passfds", forked):
        yield


def fork_data_server() -> None:
    """Fork the server of this rank's data workers, which ignore the signals of a run."""
    with forked_servers(), run_signals_blocked():  # the start of a resource tracker unblocks signals
        forkserver.ensure_running()


def _work(folder: Path, rank: int) -> None:
    """Run the jobs of one worker process in order."""
    from dit.backends import process_groups

    fork_data_server()
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    results: dict[str, Any] = {}
    for name, job, port in pickle.loads((folder / "jobs.pkl").read_bytes()):
        if rank >= job.ranks:
            continue
        launched = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": job.ranks, "MASTER_PORT": port}
        for variable, value in launched.items():
            if job.ranks > 1:
                os.environ[variable] = str(value)
            else:
                os.environ.pop(variable, None)
        print(f"--- {name}", flush=True)
        results[name] = job.action(**job.arguments)
        if dist.is_initialized():  # a failed run does not destroy its groups
            process_groups.destroy()
    (folder / f"results_{rank}.pkl").write_bytes(pickle.dumps(results))
