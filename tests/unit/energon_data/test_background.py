"""Worker processes: messages are exact, positions do not depend on workers, and no worker outlives its stream."""

import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
import torch.distributed as dist
from small_data import spec
from small_streams import PACKED, build, same, take, through_disk
from torch import Tensor

from energon_data.dataset import EnergonData
from energon_data.skip_log import SkipLog
from energon_data.streams import Position, StreamGroup
from energon_data.workers import background, messages
from energon_data.workers.background import LONGEST_FOLDER, SHORT_FOLDER, BackgroundSource
from energon_data.workers.messages import Sender, receive
from tests.support.ranks import Job, forked_servers, is_alive, run_jobs
from tests.support.sources import Watched

Open = Callable[..., BackgroundSource]


@pytest.fixture
def opened() -> Iterator[Open]:
    """Open sources in the background, and close them in the end."""
    found: list[BackgroundSource] = []

    def start(**settings: Any) -> BackgroundSource:
        open_source = partial(Watched, **{"spec": spec(), **settings})
        found.append(BackgroundSource(open_source, "stream 0 of a test"))
        return found[-1]

    yield start
    for stream in found:
        stream.close()


@pytest.fixture
def ends() -> Iterator[tuple[Sender, Connection]]:
    """The two ends of a connection, both in this process."""
    receiver, other = multiprocessing.Pipe()
    with receiver, other:
        yield Sender(other), receiver


def plain(state: Any) -> Any:
    if isinstance(state, dict):
        return {key: plain(value) for key, value in state.items()}
    if isinstance(state, list):
        return [plain(value) for value in state]
    return state.tolist() if isinstance(state, Tensor) else state


def gone(pid: int) -> bool:
    """Return whether a process has ended, or ends within some seconds; otherwise it is killed."""
    deadline = time.monotonic() + 30
    while is_alive(pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    if not is_alive(pid):
        return True
    os.kill(pid, signal.SIGKILL)
    return False


def test_a_message_transfers_every_tensor_bitwise_equal(ends: tuple[Sender, Connection]) -> None:
    sender, connection = ends
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(700, 600, generator=generator)
    tensors = [
        *(values[:5].to(dtype) for dtype in (torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8)),
        values > 0,
        values,
        values.T[3:9, ::2],
        values[0, 0],
        values[:0],
        torch.zeros(()).expand(3, 4),
        *(torch.arange(i) for i in range(700)),
    ]
    sender.send({"tensors": tensors, "text": "x"})
    found = receive(connection)
    assert found["text"] == "x"
    for a, b in zip(tensors, found["tensors"], strict=True):
        assert a.dtype == b.dtype
        assert a.shape == b.shape
        assert torch.equal(a, b)


def test_memory_is_freed_with_the_last_view_of_a_message(ends: tuple[Sender, Connection]) -> None:
    """No descriptor remains open, in either process."""
    sender, connection = ends

    def mapped() -> int:
        return Path("/proc/self/maps").read_text().count("memfd:dit-batch")

    descriptors = os.listdir("/proc/self/fd")
    parts = []
    for value in range(3):
        sender.send([torch.full((100,), value), torch.zeros(5)])
        first, _ = receive(connection)
        parts.append(first[64:])
        del first, _
    assert mapped() == 3
    assert [part.tolist() for part in parts] == [[value] * 36 for value in range(3)]
    del parts[1]
    assert mapped() == 2
    parts.clear()
    assert mapped() == 0
    assert os.listdir("/proc/self/fd") == descriptors


def test_no_process_waits_for_a_closed_connection(ends: tuple[Sender, Connection]) -> None:
    """Messages that were sent before are received."""
    sender, connection = ends
    sender.send("last")
    sender._connection.close()
    assert receive(connection) == "last"
    with pytest.raises((EOFError, ConnectionError)):
        receive(connection)
    receiver, other = multiprocessing.Pipe()
    receiver.close()
    with other, pytest.raises((EOFError, ConnectionError)):
        Sender(other).send("nobody")


def test_a_worker_inherits_no_object_of_the_training_process(opened: Open, tmp_path: Path) -> None:
    """A fork of this process would collect the group, and crash or wait for threads, which a fork does not have."""
    gc.disable()
    try:
        file = os.open(tmp_path / "open", os.O_CREAT)
        os.set_inheritable(file, True)
        group = dist.ProcessGroupGloo(dist.HashStore(), 0, 1, timedelta(seconds=10))
        circle: list[Any] = [group]
        circle.append(circle)
        del group, circle
        stream = opened(collects=True)
        stream.next()
        stream.next()
        worker = stream._worker.pid
        parent = int(Path(f"/proc/{worker}/stat").read_text().rpartition(")")[2].split()[1])
        assert parent != os.getpid()
        assert len(list(Path(f"/proc/{parent}/task").iterdir())) == 1, "a fork of threads"
        assert str(tmp_path / "open") not in {os.path.realpath(path) for path in Path(f"/proc/{worker}/fd").iterdir()}
        os.close(file)
    finally:
        gc.enable()


@pytest.mark.parametrize("packing", [{}, PACKED], ids=["dense", "packed"])
def test_every_position_resumes_bitwise_equal(
    mixed_folder: Path, packing: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every third delivery has a position; a resumed stream reads later deliveries again, with or without worker."""
    monkeypatch.setattr(background, "POSITION_EVERY", 3)
    mbs = 1 if packing else 4
    common: dict[str, Any] = {"path": str(mixed_folder), "num_streams": 2, "shuffle_buffer": 10, **packing}
    expected = take(build(EnergonData(**common, background=False), mbs=mbs), 24)
    stream = build(EnergonData(**common, background=True), mbs=mbs)
    seen, states = [], []
    for _ in range(16):
        seen.append(next(stream))
        states.append(through_disk(stream.state_dict()))
    same(expected[:16], seen)
    behind = [[state["streams"][s]["behind"] for s in (0, 1)] for state in states]
    assert behind == [[(n // 2 + n % 2) % 3, (n // 2) % 3] for n in range(1, 17)]
    for n in (6, 15):
        resumed = build(EnergonData(**common, background=n % 2 == 0), mbs=mbs)
        resumed.load_state_dict(states[n])
        again = through_disk(resumed.state_dict())
        assert [again["streams"][s]["behind"] for s in (0, 1)] == behind[n]
        same(expected[n + 1 : n + 8], take(resumed, 7))
        resumed.close()
        other = build(EnergonData(**common, background=n % 2 == 1), mbs=mbs)
        other.load_state_dict(again)
        same(expected[n + 1 : n + 5], take(other, 4))
        other.close()
    stream.close()


def test_the_position_of_a_resumed_stream_equals_an_uninterrupted_one(
    mixed_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So checkpoints of both streams are equal."""
    monkeypatch.setattr(background, "POSITION_EVERY", 4)
    data = EnergonData(path=str(mixed_folder), background=True, shuffle_buffer=10)
    calm, stopped = build(data), build(data)
    take(calm, 11)
    take(stopped, 6)
    resumed = build(data)
    resumed.load_state_dict(stopped.state_dict())
    take(resumed, 5)
    assert plain(calm.state_dict()) == plain(resumed.state_dict())
    for stream in (calm, stopped, resumed):
        stream.close()


def test_the_position_is_available_without_the_worker(opened: Open) -> None:
    stream = opened()
    for _ in range(5):
        stream.next()
    os.kill(stream._worker.pid, signal.SIGSTOP)
    assert stream.state() == Position({"taken": 0, "seed": 1}, 5)
    os.kill(stream._worker.pid, signal.SIGCONT)


def test_a_worker_prefetches_up_to_its_limit(opened: Open, tmp_path: Path) -> None:
    """32 small deliveries wait, and the worker has made the next one."""
    sample_log, ahead = tmp_path / "made", 32
    stream = opened(sample_log=sample_log)
    for consumed in (1, 2, 3):
        stream.next()
        deadline = time.monotonic() + 30
        while sample_log.stat().st_size < consumed + ahead + 1 and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.2)
        assert sample_log.stat().st_size == consumed + ahead + 1


def test_two_large_messages_wait(ends: tuple[Sender, Connection], monkeypatch: pytest.MonkeyPatch) -> None:
    sender, receiver = ends
    monkeypatch.setattr(messages, "SMALL_BYTES", 1)
    for number in (0, 1):
        sender.send(number)
    third = Thread(target=sender.send, args=(2,))
    third.start()
    third.join(0.5)
    assert third.is_alive()
    assert [receive(receiver) for _ in range(3)] == [0, 1, 2]
    third.join()


def test_a_killed_worker_is_named(opened: Open) -> None:
    stream = opened()
    stream.next()
    os.kill(stream._worker.pid, signal.SIGKILL)

    with pytest.raises(RuntimeError, match=r"of stream 0 of a test was killed by SIGKILL.*data\.background=False"):
        take(iter(stream.next, None), 100)  # some were sent before


PROGRAM = """
import os, signal, sys, time
from functools import partial
from multiprocessing import forkserver
sys.path[:0] = sys.argv[2:]
from small_data import spec
import users_data
from energon_data.workers.background import BackgroundSource

if __name__ == "__main__":
    streams = [BackgroundSource(partial(users_data.Mine, spec()), "a test", ["users_data"]) for _ in range(2)]
    for stream in streams:
        stream.next()
        stream.close()
    stream = BackgroundSource(partial(users_data.Mine, spec(), seconds=600), "a test")
    stream._start()
    lines = open(f"/proc/{forkserver._forkserver._forkserver_pid}/status").read().splitlines()
    (mask,) = (int(line.split()[1], 16) for line in lines if line.startswith("SigBlk:"))
    print(os.path.dirname(os.path.dirname(forkserver._forkserver._forkserver_address)))
    print([bool(mask >> number - 1 & 1) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)])
    print(stream._worker.pid, flush=True)
    time.sleep(0.5)
    if sys.argv[1] == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize(("how", "longer"), [pytest.param("exit", 0, marks=pytest.mark.long), ("kill", 1)])
def test_workers_end_with_the_training_process(how: str, longer: int, tmp_path: Path) -> None:
    """They also end if the process is killed while they work on an item; a run that ends prints nothing about them.

    The path of the fork server's socket has at most 107 bytes, so it is not in a temporary folder with a long name.
    In a new process, the first use of multiprocessing starts a resource tracker, which unblocks signals; signals to all
    processes of a run do not end the fork server. The training process and the fork server import the module of a
    user's data; the three workers do not.
    """
    (tmp_path / "users_data.py").write_text("""
import os, warnings
from pathlib import Path
from tests.support.sources import Watched
with (Path(__file__).parent / "imports").open("a") as file:
    print(os.getpid(), file=file)
warnings.warn_explicit("no accelerator", UserWarning, "file", 1, module="megatron.core")
class Mine(Watched): ...
""")
    command = [sys.executable, "-c", PROGRAM, how, str(tmp_path), str(Path(__file__).parent)]
    with tempfile.TemporaryDirectory(dir=SHORT_FOLDER) as parent:
        folder = Path(parent, "x" * (LONGEST_FOLDER + longer - len(f"{parent}/")))
        folder.mkdir()
        with subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "TMPDIR": str(folder)},
        ) as training:
            assert training.stdout is not None
            socket_folder, blocked, worker = (training.stdout.readline().strip() for _ in range(3))
            assert training.wait() == (0 if how == "exit" else -signal.SIGKILL)
            assert gone(int(worker)), "the item takes 600 s"
            # The training process, which does not hide warnings, printed this one.
            assert training.communicate() == ("", "file:1: UserWarning: no accelerator\n")
        assert socket_folder == (SHORT_FOLDER if longer else str(folder))
        assert list(folder.iterdir()) == []
    assert blocked == "[True, True, True]"
    assert len(set((tmp_path / "imports").read_text().split())) == 2


def kill_the_fork_server_of_a_worker() -> tuple[Any, bool, bool]:
    """Return the worker's exit code, whether it ran until its stream was closed, and whether it ended then."""
    stream, another = (BackgroundSource(partial(Watched, spec(), seconds=n), "a test") for n in (600, 0))
    stream._start()
    server, worker = forkserver._forkserver._forkserver_pid, stream._worker
    os.kill(server, signal.SIGKILL)
    os.waitid(os.P_PID, server, os.WEXITED | os.WNOWAIT)  # the next start finds that it has ended
    assert worker is not None
    worker.join()
    ran = Path(f"/proc/{worker.pid}").exists()
    stream.close()
    with forked_servers():
        another.next()
    another.close()
    return worker.exitcode, ran, gone(worker.pid)


def test_close_ends_a_worker_whose_fork_server_was_killed(tmp_path: Path) -> None:
    """The exit code of the worker is unknown then, so multiprocessing reports it as ended while it still runs.

    The next stream has a worker of another fork server.
    """
    assert run_jobs(tmp_path, {"kill": Job(kill_the_fork_server_of_a_worker)}) == {"kill": (255, True, True)}


def test_a_stream_whose_worker_cannot_start_can_be_closed() -> None:
    stream = BackgroundSource(lambda: Watched(spec()), "stream 0 of a test")
    with pytest.raises(Exception, match="pickle"):
        stream.next()
    stream.close()


@pytest.mark.parametrize("fails_at", [1, 3])
def test_a_worker_error_is_returned_as_a_stream_item(opened: Open, fails_at: int) -> None:
    stream = opened(fails_at=fails_at)
    assert [stream.next().failure for _ in range(fails_at - 1)] == [None] * (fails_at - 1)
    last = stream.next()
    assert last.is_bug
    assert "ZeroDivisionError: here" in str(last.failure)


@pytest.mark.parametrize("how", ["close", "forget"])
def test_a_worker_ends_with_its_stream(how: str) -> None:
    """Signals to all processes of a run do not end a worker; the end of its stream does."""
    stream = BackgroundSource(partial(Watched, spec()), "stream 0 of a test")
    stream.next()
    worker = stream._worker
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        os.kill(worker.pid, number)
    for _ in range(50):
        stream.next()
    assert Path(f"/proc/{worker.pid}").exists()
    if how == "close":
        stream.close()
    del stream
    worker.join()
    assert worker.exitcode in (-signal.SIGKILL, 0)  # 0 if it saw the end of the connection first
    assert gone(worker.pid)


def test_the_loader_measures_its_speed(opened: Open) -> None:
    """Samples per second of work, added over both workers; the time of training between deliveries does not count."""
    for workers, most in ((1, 4 / 0.02), (2, 2 * 4 / 0.02)):
        sources = {s: opened(seconds=0.02) for s in range(workers)}
        group = StreamGroup(sources, num_streams=workers, dp_rank=0, dp_size=1, log=SkipLog(0), origin="a test")
        take(group, 8)
        assert 0.2 * most < group.samples_per_s() <= most
        assert group.samples_per_s() == 0
    slow = Watched(spec(), seconds=0.02)
    inline = StreamGroup({0: slow}, num_streams=1, dp_rank=0, dp_size=1, log=SkipLog(0), origin="a test")
    take(inline, 4)
    assert 0 < inline.samples_per_s() <= 4 / 0.02


def test_a_micro_batch_is_late_if_requested_before_it_is_ready(opened: Open) -> None:
    """A stream without worker is always late, and a worker with enough time never is."""
    source = opened(seconds=0.05)
    group = StreamGroup({0: source}, num_streams=1, dp_rank=0, dp_size=1, log=SkipLog(0), origin="a test")
    take(group, 1)  # the worker may have made it while starting
    group.late()
    deadline = time.monotonic() + 60
    for _ in range(2):
        while not source._connection.poll():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        take(group, 1)
    assert group.late() == 0
    take(group, 40)  # first those that are ready, then each as soon as the worker has made it
    assert 1 <= group.late() <= 40
    assert group.late() == 0
    inline = StreamGroup({0: Watched(spec())}, num_streams=1, dp_rank=0, dp_size=1, log=SkipLog(0), origin="a test")
    take(inline, 3)
    assert inline.late() == 3
