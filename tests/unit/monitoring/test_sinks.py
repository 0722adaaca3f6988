"""Sinks: the record on disk is exact and complete; mirrors may fail without harm."""

import errno
import json
import logging
import math
import os
import random
import signal
import struct
import subprocess
import sys

import numpy as np
import pytest
from PIL import Image

from dit.errors import CheckpointError
from dit.monitoring.sinks import (
    FanOut,
    JsonlSink,
    Sink,
    TensorBoardSink,
    current_records,
    read_records,
    scalars_by_step,
)

KILLED_CHILD = """
import os, sys
from dit.monitoring.sinks import JsonlSink
sink = JsonlSink(sys.argv[1])
step = 0
while True:
    step += 1
    sink.scalars(step, {"loss": 1 / step, "grad_norm": 3.0}, consumed_samples=8 * step)
    os.write(1, step.to_bytes(8, "little"))   # says what has been handed over
"""


@pytest.fixture
def picture(tmp_path):
    pixels = np.arange(4 * 6 * 3, dtype=np.uint8).reshape(4, 6, 3)
    Image.fromarray(pixels).save(tmp_path / "grid.png")
    return tmp_path / "grid.png"


# --- metrics.jsonl --------------------------------------------------------------------------------------------------


def test_values_are_read_bitwise_unchanged(tmp_path):
    """Any float is exact, the training loss also as hex; values that JSON lacks are still written as strict JSON."""
    rng = random.Random(0)
    losses = [struct.unpack("<d", rng.randbytes(8))[0] for _ in range(300)] + [0.1 + 0.2, -0.0, 5e-324]
    losses = [x for x in losses if math.isfinite(x)] + [math.nan, math.inf, -math.inf]
    sink = JsonlSink(tmp_path / "metrics.jsonl")
    for step, loss in enumerate(losses):
        sink.scalars(step, {"loss": loss, "held_out_loss": loss, "count": 2**60}, consumed_samples=8 * step)
    sink.close()

    def refuse(name):
        raise AssertionError(name)

    for line in (tmp_path / "metrics.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=refuse)
    for record, loss in zip(read_records(sink.path), losses, strict=True):
        assert float(record["loss"]).hex() == loss.hex() == record["loss_hex"]
        assert float(record["held_out_loss"]).hex() == loss.hex()
        assert record["count"] == 2**60
        assert record["consumed_samples"] == 8 * record["step"]


def test_numpy_scalars_are_numbers(tmp_path):
    sink = JsonlSink(tmp_path / "metrics.jsonl")
    sink.scalars(1, {"loss": np.float32(0.1), "count": np.int64(3)}, consumed_samples=np.int64(8))
    record = read_records(sink.path)[0]
    assert record["loss"] == float(np.float32(0.1))
    assert record["count"] == 3


def test_resuming_keeps_every_line_and_drops_lost_steps_for_readers(tmp_path):
    """Repeated steps are written again, marked by attempt; the second attempt wrote no start."""
    path = tmp_path / "metrics.jsonl"
    for attempt, steps in ((1, (1, 2, 3)), (2, (2, 3, 4))):
        sink = JsonlSink(path)
        assert sink.attempt == attempt
        for step in steps:
            sink.scalars(step, {"loss": float(10 * attempt + step)}, consumed_samples=step)
            if attempt == 1:
                sink.scalars(step, {"held_out_loss": 0.5}, consumed_samples=step)
        sink.close()
    records = read_records(path)
    assert [r["attempt"] for r in records] == [1] * 6 + [2] * 3
    joined = scalars_by_step(records)
    assert {step: r["loss"] for step, r in joined.items()} == {1: 11.0, 2: 22.0, 3: 23.0, 4: 24.0}
    assert "held_out_loss" in joined[1]
    assert "held_out_loss" not in joined[3]


def test_steps_after_a_start_or_a_rewind_are_dropped_before_they_are_logged_again(tmp_path):
    path = tmp_path / "metrics.jsonl"
    sink = JsonlSink(path)
    sink.start(0)
    for step in range(1, 9):
        sink.scalars(step, {"loss": float(step)}, consumed_samples=step)
    sink.incident("rewind", 9, {"to_step": 6})
    assert list(scalars_by_step(read_records(path))) == [1, 2, 3, 4, 5, 6]
    sink = JsonlSink(path)
    sink.start(4)
    assert sink.attempt == 2
    assert list(scalars_by_step(read_records(path))) == [1, 2, 3, 4]
    sink.scalars(6, {"loss": 0.5}, consumed_samples=6)
    assert list(scalars_by_step(read_records(path))) == [1, 2, 3, 4, 6]
    assert [r["kind"] for r in current_records(read_records(path))].count("incident") == 1


DAMAGED = {
    "zeros": b"\0" * 200,
    "not a table": b"[1]",
    "null": b"null",
    "cut": b'{"kind": "scalars", "st',
    "deep": b"[" * 100_000,
    "not UTF-8": b'{"kind": "\xff"}',
    "no step": b'{"kind": "scalars", "time": 1, "attempt": 1}',
    "no time": b'{"kind": "incident", "step": 1, "attempt": 1, "incident": "rewind"}',
    "a text as step": b'{"kind": "scalars", "step": "x", "time": 1, "attempt": 1}',
    "a step of 400 digits": b'{"kind": "scalars", "step": 1' + b"0" * 400 + b', "time": 1, "attempt": 1}',
    "a text as time": b'{"kind": "scalars", "step": 1, "time": "then", "attempt": 1}',
    "a text as attempt": b'{"kind": "scalars", "step": 1, "time": 1, "attempt": "2"}',
    "a list as kind": b'{"kind": ["scalars"], "step": 1, "time": 1, "attempt": 1}',
}


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_lines_are_skipped_and_counted(tmp_path, caplog, name):
    """Wherever the line is; the number of the next attempt is still right."""
    path = tmp_path / "metrics.jsonl"
    sink = JsonlSink(path)
    sink.scalars(1, {"loss": 0.5}, consumed_samples=8)
    sink.close()
    sound = path.read_bytes()
    path.write_bytes(DAMAGED[name] + b"\n" + sound + DAMAGED[name] + b"\n")
    assert read_records(path) == [json.loads(sound)]
    assert "skipped 2 damaged lines of 3" in caplog.text
    assert JsonlSink(path).attempt == 2


def test_jsonl_keeps_every_complete_line_after_a_kill(tmp_path):
    """Every record whose call returned before `kill -9` is in the file, exact, and the file can be continued."""
    path = tmp_path / "metrics.jsonl"
    child = subprocess.Popen([sys.executable, "-c", KILLED_CHILD, str(path)], stdout=subprocess.PIPE)
    child.stdout.read(8 * 500)
    child.send_signal(signal.SIGKILL)
    rest = child.stdout.read()
    child.wait()
    handed_over = 500 + len(rest) // 8
    records = read_records(path)
    assert len(records) - handed_over in (0, 1)
    assert [r["step"] for r in records] == list(range(1, len(records) + 1))
    assert all(r["loss_hex"] == (1 / r["step"]).hex() for r in records)
    assert JsonlSink(path).attempt == 2


@pytest.mark.parametrize("length", [10, 70_000, 300_000])
def test_torn_last_line_is_cut_off(tmp_path, length):
    """An unfinished record is removed, however long; all others stay, and the next record starts on a new line."""
    path = tmp_path / "metrics.jsonl"
    sink = JsonlSink(path)
    sink.scalars(1, {"loss": 1.0, "text": "x" * length}, consumed_samples=1)
    sink.close()
    sound = path.read_bytes()
    path.write_bytes(sound + sound[: length // 2])
    again = JsonlSink(path)
    assert path.read_bytes() == sound
    assert again.attempt == 2
    again.scalars(2, {"loss": 1.0}, consumed_samples=2)
    assert [r["step"] for r in read_records(path)] == [1, 2]


def test_a_single_torn_line_leaves_an_empty_file(tmp_path):
    (tmp_path / "metrics.jsonl").write_bytes(b'{"kind": "sca')
    assert JsonlSink(tmp_path / "metrics.jsonl").attempt == 1
    assert (tmp_path / "metrics.jsonl").read_bytes() == b""


def test_a_scalar_may_not_have_the_name_of_a_field(tmp_path):
    with pytest.raises(AssertionError, match="time"):
        JsonlSink(tmp_path / "metrics.jsonl").scalars(1, {"time": 1.0}, 1)


# --- fan-out --------------------------------------------------------------------------------------------------------


class BrokenSink(Sink):
    """Counts its calls, and fails from the n-th call on."""

    def __init__(self, n):
        self.n, self.calls = n, 0

    def _call(self, *args):
        self.calls += 1
        if self.calls >= self.n:
            raise ConnectionError("service is gone")

    scalars = image = artifact = _call

    def close(self):
        self._call()


def everything(picture):
    """Return the calls that give a sink five steps, a picture and an artifact, and close it."""
    for step in range(1, 6):
        yield lambda sink, step=step: sink.scalars(step, {"loss": 1 / step}, step)
    yield lambda sink: sink.image("samples", 5, picture, "a caption")
    yield lambda sink: sink.artifact(picture.parent, {"step": 5})
    yield lambda sink: sink.close()


@pytest.mark.parametrize("n", range(1, 9))
def test_failing_mirror_is_dropped_with_one_warning(tmp_path, picture, caplog, n):
    """Whenever a mirror starts to fail, the record and the other mirrors are complete, and it is reported once."""
    broken, sound = BrokenSink(n), BrokenSink(1000)

    def unbuildable():
        raise ImportError("no module named x")

    record = JsonlSink(tmp_path / "metrics.jsonl")
    with caplog.at_level(logging.WARNING):
        fan = FanOut(record, {"broken": lambda: broken, "missing": unbuildable, "sound": lambda: sound})
        for call in everything(picture):
            fan.each(call)
    assert len(read_records(record.path)) == 7
    assert (broken.calls, sound.calls) == (n, 8)
    assert caplog.text.count("broken stops (ConnectionError: service is gone)") == 1
    assert caplog.text.count("missing stops (ImportError") == 1


def test_failing_record_is_an_error(tmp_path, monkeypatch):
    """Training must not continue without its record: exit code 5 and a cure. A part of a line is not left in it."""
    sink, write = JsonlSink(tmp_path / "metrics.jsonl"), os.write
    fan = FanOut(sink, {})
    fan.each(lambda sink: sink.scalars(1, {"loss": 1.0}, 1))

    def full(descriptor, data):
        write(descriptor, data[:9])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(os, "write", full)
        with pytest.raises(CheckpointError, match=r"metrics\.jsonl cannot be written: No space left.*make room"):
            fan.each(lambda sink: sink.scalars(2, {"loss": 1.0}, 2))
    fan.each(lambda sink: sink.scalars(3, {"loss": 1.0}, 3))
    assert [record["step"] for record in read_records(sink.path)] == [1, 3]
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot be written"):
        JsonlSink(tmp_path / "file" / "metrics.jsonl")


# --- mirrors --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["deleted", "moved", "replaced"])
def test_a_moved_or_deleted_record_is_an_error(tmp_path, how):
    """Writes to a deleted file would succeed and be lost."""
    path = tmp_path / "run" / "metrics.jsonl"
    sink = JsonlSink(path)
    sink.scalars(1, {"loss": 1.0}, 8)
    path.rename(tmp_path / "elsewhere") if how == "moved" else path.unlink()
    if how == "replaced":
        path.write_text("")
    with pytest.raises(CheckpointError, match=r"run/metrics\.jsonl was deleted, moved or replaced.*put .* back"):
        sink.scalars(2, {"loss": 1.0}, 16)


def test_tensorboard_shows_the_resumed_history(tmp_path, picture, monkeypatch):
    """Scalars and pictures are read back; each start and rewind hides entries of the steps that are done again."""
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    for attempt, (done, steps, loss) in enumerate(((0, (1, 2, 3), 1.0), (0, (1, 2, 3), 1.5), (1, (2, 3, 4), 2.0))):
        monkeypatch.setattr(
            "time.time", lambda time=2e9 + attempt: time
        )  # the files are read in order of their seconds
        sink = TensorBoardSink(tmp_path / "events", done)
        for step in steps:
            sink.scalars(step, {"loss": loss}, consumed_samples=8 * step)
        if done:
            sink.incident("rewind", 4, {"to_step": 2})
        sink.image("samples", 2, picture, "a caption")
        sink.artifact(tmp_path, {"step": 2})
        sink.close()
    events = event_accumulator.EventAccumulator(str(tmp_path / "events"), size_guidance={"scalars": 0, "images": 0})
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("loss")] == [(1, 1.5), (2, 2.0)]
    assert [e.value for e in events.Scalars("consumed_samples")] == [8.0, 16.0]
    assert (events.Images("samples")[-1].width, events.Images("samples")[-1].height) == (6, 4)


def moving_picture(path):
    first, second = (Image.fromarray(np.full((4, 6, 3), value, np.uint8)) for value in (0, 200))
    first.save(path, save_all=True, append_images=[second], duration=100, loop=0)
    return path


def test_tensorboard_gets_the_file_of_a_clip(tmp_path):
    """TensorBoard gets the file unchanged, with all frames."""
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    clip = moving_picture(tmp_path / "x.gif")
    sink = TensorBoardSink(tmp_path / "events")
    sink.image("samples", 2, clip)
    sink.close()
    events = event_accumulator.EventAccumulator(str(tmp_path / "events"))
    events.Reload()
    (image,) = events.Images("samples")
    assert (image.step, image.width, image.height) == (2, 6, 4)
    assert image.encoded_image_string == clip.read_bytes()
