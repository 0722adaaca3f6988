"""Laws of worker processes: messages are exact, positions need no worker, and nothing outlives the stream."""

import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from small_data import spec
from test_data_streams import PACKED, build, same, take, through_disk
from torch import Tensor

from dit.data_api import BatchSpec
from energon_data import background
from energon_data.background import AHEAD, AHEAD_IF_SMALL, BackgroundSource
from energon_data.dataset import EnergonData
from energon_data.mock import MockData, MockSource
from energon_data.skip_log import SkipLog
from energon_data.streams import Delivery, Position, StreamGroup


def source(spec_of_pack: BatchSpec | None = None, **settings: Any) -> MockSource:
    data = MockData(**{"shapes": ["1x4x4", "2x6x4"], **settings})
    return MockSource(data, spec_of_pack or spec(), seed=1, split="train", stream=0, num_streams=1)


class Counting:
    """A source that counts its deliveries in memory that processes share."""

    def __init__(self, inner: MockSource) -> None:
        self.inner, self.made = inner, torch.zeros(1, dtype=torch.int64).share_memory_()

    def next(self) -> Delivery:
        self.made += 1
        return self.inner.next()

    def state(self) -> Position:
        return self.inner.state()

    def load(self, state: dict[str, Any]) -> None:
        self.inner.load(state)

    def close(self) -> None: ...


@pytest.fixture
def opened() -> Iterator[Callable[..., BackgroundSource]]:
    """Open sources in the background, and close them in the end."""
    found: list[BackgroundSource] = []

    def start(inner: Any) -> BackgroundSource:
        found.append(BackgroundSource(inner, "stream 0 of a test"))
        return found[-1]

    yield start
    for stream in found:
        stream.close()


def received(message: object) -> Any:
    ours, theirs = socket.socketpair()
    sent = b"".join(background.packed(message))
    # More than the socket takes at once, so the sender is a thread.
    thread = threading.Thread(target=background._send, args=(theirs, background.packed(message), os.getppid()))
    thread.start()
    found, size = background._receive(ours, background._Blocks())
    thread.join()
    assert size + background._HEAD.size == len(sent)
    ours.close()
    theirs.close()
    return found


def plain(state: Any) -> Any:
    if isinstance(state, dict):
        return {key: plain(value) for key, value in state.items()}
    if isinstance(state, list):
        return [plain(value) for value in state]
    return state.tolist() if isinstance(state, Tensor) else state


def test_a_message_has_every_tensor_to_the_bit() -> None:
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
    ]
    found = received({"tensors": tensors, "more": [torch.arange(i) for i in range(700)], "text": "x"})
    assert found["text"] == "x"
    for a, b in zip(
        [*tensors, *(torch.arange(i) for i in range(700))], [*found["tensors"], *found["more"]], strict=True
    ):
        assert a.dtype == b.dtype
        assert a.shape == b.shape
        assert torch.equal(a, b)


def test_a_message_has_its_tensors_beside_the_pickle() -> None:
    _, pickled, *parts = background.packed([torch.zeros(10_000), torch.zeros(3)])
    assert len(pickled) < 500
    assert sum(map(len, parts)) == 40_000 + 64


def test_memory_is_used_again_once_nothing_refers_to_it() -> None:
    blocks = background._Blocks()
    first, second = blocks.take(100), blocks.take(80)
    part, places = first[64:96].view(torch.float32), [first.data_ptr(), second.data_ptr()]
    assert len(set(places)) == 2
    del first, second
    assert blocks.take(90).data_ptr() == places[1]
    third, fourth = blocks.take(90), blocks.take(90)
    assert places[0] not in (third.data_ptr(), fourth.data_ptr()), "a part of the first is in use"
    del part
    assert blocks.take(125).data_ptr() == places[0]
    assert len(blocks.take(10_000)) == 10_000


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


def test_the_position_is_there_while_the_worker_is_not(opened: Callable[..., BackgroundSource]) -> None:
    stream = opened(source())
    for _ in range(5):
        stream.next()
    assert stream._worker is not None
    os.kill(stream._worker.pid or 0, signal.SIGSTOP)
    assert stream.state() == Position({"taken": 0, "seed": 1}, 5)
    os.kill(stream._worker.pid or 0, signal.SIGCONT)


def test_a_worker_runs_ahead_and_stops(
    opened: Callable[..., BackgroundSource], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Deliveries of 0.4 MB, far more than a socket takes: two are received, one is being sent."""
    monkeypatch.setattr(background, "SMALL_BYTES", 1)
    counting = Counting(source(spec(micro_batch_size=800, context_size=None), shapes=["1x16x16"]))
    stream = opened(counting)
    for consumed in (1, 2, 3):
        stream.next()
        deadline = time.monotonic() + 30
        while counting.made < consumed + AHEAD + 1 and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.2)
        assert int(counting.made) == consumed + AHEAD + 1


def test_more_is_made_ahead_if_it_is_small(opened: Callable[..., BackgroundSource]) -> None:
    counting = Counting(source())
    opened(counting).next()
    deadline = time.monotonic() + 30
    while counting.made < AHEAD_IF_SMALL and time.monotonic() < deadline:
        time.sleep(0.01)
    assert counting.made >= AHEAD_IF_SMALL


def test_a_killed_worker_is_named(opened: Callable[..., BackgroundSource]) -> None:
    stream = opened(source())
    stream.next()
    assert stream._worker is not None
    stream._worker.kill()

    def read_on() -> None:
        while True:  # what was received before
            stream.next()

    with pytest.raises(RuntimeError, match=r"of stream 0 of a test was killed by SIGKILL.*data\.background=False"):
        read_on()


def test_a_fault_in_the_worker_comes_as_a_delivery(opened: Callable[..., BackgroundSource]) -> None:
    class Faulty(Counting):
        def next(self) -> Delivery:
            if self.made == 2:
                raise ZeroDivisionError("here")
            return super().next()

    stream = opened(Faulty(source()))
    assert [stream.next().failure for _ in range(2)] == [None, None]
    last = stream.next()
    assert last.is_bug
    assert "ZeroDivisionError: here" in str(last.failure)


@pytest.mark.parametrize("how", ["close", "forget"])
def test_a_worker_ends_with_its_stream(how: str) -> None:
    """Signals to all processes of a run leave it alone; what ends it is the end of the stream."""
    stream = BackgroundSource(source(), "stream 0 of a test")
    stream.next()
    worker = stream._worker
    assert worker is not None
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        os.kill(worker.pid or 0, number)
    for _ in range(50):
        stream.next()
    assert worker.is_alive()
    if how == "close":
        stream.close()
    del stream
    assert worker.exitcode == -signal.SIGKILL


def test_the_loader_knows_its_own_speed(opened: Callable[..., BackgroundSource]) -> None:
    """Samples by the seconds of work on them, of both workers at once; what training does meanwhile does not count."""

    class Slow(Counting):
        def next(self) -> Delivery:
            time.sleep(0.02)
            return super().next()

    for workers, most in ((1, 4 / 0.02), (2, 2 * 4 / 0.02)):
        sources = {s: opened(Slow(source())) for s in range(workers)}
        group = StreamGroup(sources, num_streams=workers, dp_size=1, log=SkipLog(0), origin="a test")
        take(group, 8)
        assert 0.2 * most < group.samples_per_s() <= most
        assert group.samples_per_s() == 0
    inline = StreamGroup({0: Slow(source())}, num_streams=1, dp_size=1, log=SkipLog(0), origin="a test")
    take(inline, 4)
    assert 0 < inline.samples_per_s() <= 4 / 0.02
