"""Laws of worker processes: messages are exact, positions need no worker, and nothing outlives the stream."""

import gc
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from small_data import spec
from test_data_streams import PACKED, build, same, take, through_disk
from torch import Tensor

from energon_data import background
from energon_data import nursery as nursery_module
from energon_data.background import BackgroundSource
from energon_data.dataset import EnergonData
from energon_data.messages import Ahead, GoneError, Inbox, Outbox
from energon_data.nursery import Nursery, nursery_of
from energon_data.skip_log import SkipLog
from energon_data.streams import Position, StreamGroup
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
def ends() -> Iterator[tuple[Outbox, Inbox]]:
    """The two ends of a channel, both in this process."""
    ours, theirs = socket.socketpair()
    yield Outbox(theirs), Inbox(ours)
    ours.close()
    theirs.close()


def plain(state: Any) -> Any:
    if isinstance(state, dict):
        return {key: plain(value) for key, value in state.items()}
    if isinstance(state, list):
        return [plain(value) for value in state]
    return state.tolist() if isinstance(state, Tensor) else state


def gone(pid: int) -> bool:
    """Return whether a process has ended, or ends within some seconds."""
    deadline = time.monotonic() + 30
    while Path(f"/proc/{pid}").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    return not Path(f"/proc/{pid}").exists()


def test_a_message_has_every_tensor_to_the_bit(ends: tuple[Outbox, Inbox]) -> None:
    outbox, inbox = ends
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
    outbox.send({"tensors": tensors, "text": "x"})
    found = inbox.receive()
    assert found["text"] == "x"
    for a, b in zip(tensors, found["tensors"], strict=True):
        assert a.dtype == b.dtype
        assert a.shape == b.shape
        assert torch.equal(a, b)


def test_memory_is_used_again_once_nothing_refers_to_it(ends: tuple[Outbox, Inbox]) -> None:
    """A block for each message that is in use; one that is too short is replaced; what is read never changes."""
    outbox, inbox = ends

    def passed(value: int, size: int) -> Tensor:
        outbox.send(torch.full((size,), value))
        found = inbox.receive()
        assert found.tolist() == [value] * size
        return found

    first, second = passed(1, 100), passed(2, 90)
    part, places = first[64:], [first.data_ptr(), second.data_ptr()]
    del first, second
    assert passed(3, 80).data_ptr() not in places, "a block is known to be free one message later"
    assert passed(4, 95).data_ptr() == places[1]
    assert len(inbox._blocks) == len(outbox._blocks) == 3
    assert part.tolist() == [1] * 36
    del part
    passed(5, 10_000)
    assert len(inbox._blocks) == len(outbox._blocks) == 3
    assert len({passed(6, 5).data_ptr() for _ in range(9)}) <= 2


def test_nobody_waits_for_an_end_that_is_gone(ends: tuple[Outbox, Inbox]) -> None:
    """What was sent before is received."""
    outbox, inbox = ends
    outbox.send("last")
    outbox._channel.close()
    assert inbox.receive() == "last"
    with pytest.raises(GoneError):
        inbox.receive()
    ours, theirs = socket.socketpair()
    ours.close()
    with pytest.raises(GoneError):
        Outbox(theirs).send("nobody")
    theirs.close()


def test_a_worker_has_no_part_of_the_training_process(opened: Open) -> None:
    """A fork of this process would collect the group, and die or wait for its threads, which a fork does not have."""
    gc.disable()
    try:
        group = dist.ProcessGroupGloo(dist.HashStore(), 0, 1, timedelta(seconds=10))
        circle: list[Any] = [group]
        circle.append(circle)
        del group, circle
        stream = opened(collects=True)
        stream.next()
        stream.next()
        parent = int(Path(f"/proc/{stream._worker.pid}/stat").read_text().rpartition(")")[2].split()[1])
        assert parent != os.getpid()
        assert len(list(Path(f"/proc/{parent}/task").iterdir())) == 1, "a fork of threads"
    finally:
        gc.enable()


@pytest.mark.parametrize("packing", [{}, PACKED], ids=["dense", "packed"])
def test_every_position_continues_to_the_bit(
    mixed_folder: Path, packing: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A position comes with every third delivery; any number of deliveries since is continued, by both ways to read."""
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
    stream.close()


def test_the_position_of_a_resumed_stream_is_that_of_one_that_was_never_stopped(
    mixed_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So checkpoints of both are equal."""
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


def test_the_position_is_there_while_the_worker_is_not(opened: Open) -> None:
    stream = opened()
    for _ in range(5):
        stream.next()
    os.kill(stream._worker.pid, signal.SIGSTOP)
    assert stream.state() == Position({"taken": 0, "seed": 1}, 5)
    os.kill(stream._worker.pid, signal.SIGCONT)


def test_a_worker_runs_ahead_and_stops(opened: Open, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Two deliveries are waiting, and one is made that is to follow them; but 32 while they are small."""
    made = tmp_path / "made"
    for small_bytes, ahead in ((1, 2), (2**25, 32)):
        monkeypatch.setattr(background, "AHEAD", Ahead(small_bytes=small_bytes))
        made.write_bytes(b"")
        stream = opened(made=made)
        for consumed in (1, 2, 3):
            stream.next()
            deadline = time.monotonic() + 30
            while made.stat().st_size < consumed + ahead + 1 and time.monotonic() < deadline:
                time.sleep(0.01)
            time.sleep(0.2)
            assert made.stat().st_size == consumed + ahead + 1


def test_a_killed_worker_is_named(opened: Open) -> None:
    stream = opened()
    stream.next()
    os.kill(stream._worker.pid, signal.SIGKILL)

    with pytest.raises(RuntimeError, match=r"of stream 0 of a test was killed by SIGKILL.*data\.background=False"):
        take(iter(stream.next, None), 100)  # some were sent before


def test_workers_end_with_the_process_that_started_them(opened: Open) -> None:
    stream = opened()
    stream.next()
    worker = stream._worker.pid
    os.kill(int(Path(f"/proc/{worker}/stat").read_text().rpartition(")")[2].split()[1]), signal.SIGKILL)
    nursery_of.cache_clear()
    assert gone(worker)
    with pytest.raises(RuntimeError, match="is gone, as is the process that started it"):
        take(iter(stream.next, None), 100)  # some were sent before
    opened().next()


def test_the_nursery_ends_in_silence(capfd: pytest.CaptureFixture[str]) -> None:
    """A run that ends has not read the last events: nothing of that is worth a word at the end of a training."""
    nursery = Nursery()
    ours, theirs = socket.socketpair()
    nursery.start(theirs)
    event = nursery._control.recv(nursery_module._EVENT.size, socket.MSG_PEEK)
    _, worker, _ = nursery_module._EVENT.unpack(event)
    itself = int(Path(f"/proc/{worker}/stat").read_text().rpartition(")")[2].split()[1])
    nursery._control.close()
    assert os.waitpid(itself, 0)[1] == 0
    ours.close()
    theirs.close()
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("fails_at", [1, 3])
def test_a_fault_in_the_worker_comes_as_a_delivery(opened: Open, fails_at: int) -> None:
    stream = opened(fails_at=fails_at)
    assert [stream.next().failure for _ in range(fails_at - 1)] == [None] * (fails_at - 1)
    last = stream.next()
    assert last.is_bug
    assert "ZeroDivisionError: here" in str(last.failure)


@pytest.mark.parametrize("how", ["close", "forget"])
def test_a_worker_ends_with_its_stream(how: str) -> None:
    """Signals to all processes of a run leave it alone; what ends it is the end of the stream."""
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
    assert worker.wait() in (-signal.SIGKILL, 0)  # 0 if it saw the end of the channel first
    assert gone(worker.pid)


def test_the_loader_knows_its_own_speed(opened: Open) -> None:
    """Samples by the seconds of work on them, of both workers at once; what training does meanwhile does not count."""
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


def test_a_micro_batch_is_late_if_it_is_asked_for_before_it_is_there(opened: Open) -> None:
    """A stream that training reads by itself is always late, and a worker that was given time never."""
    source = opened(seconds=0.05)
    group = StreamGroup({0: source}, num_streams=1, dp_rank=0, dp_size=1, log=SkipLog(0), origin="a test")
    take(group, 1)  # it may have been made while the worker started
    group.late()
    deadline = time.monotonic() + 60
    for _ in range(2):
        while not source._inbox.has_message():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        take(group, 1)
    assert group.late() == 0
    take(group, 40)  # those that are ahead by now, and then as they are made
    assert 1 <= group.late() <= 40
    assert group.late() == 0
    inline = StreamGroup({0: Watched(spec())}, num_streams=1, dp_rank=0, dp_size=1, log=SkipLog(0), origin="a test")
    take(inline, 3)
    assert inline.late() == 3
