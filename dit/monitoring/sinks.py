"""Outputs of scalars, pictures and artifacts: `metrics.jsonl`, the reference record, and mirrors that may fail.

Sinks exist on rank 0 and get host values only. Names are not changed; the training loss is called `loss`.
"""

import logging
import math
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Optional

from dit.durable_files import strict_json, write_all
from dit.errors import CheckpointError, on_a_screen
from dit.media import open_image
from dit.safe_files import is_at, make_folder, open_binary, open_regular, parse_json, read_bytes

logger = logging.getLogger(__name__)

METRICS_FILE = "metrics.jsonl"
LOSS = "loss"
RECORD_FIELDS = ("kind", "step", "consumed_samples", "time", "attempt", "loss_hex")
TAIL_BYTES = 1 << 16
LONGEST_LINE = 16 << 20  # bytes


class Sink(ABC):
    """One output of a run's records."""

    @abstractmethod
    def scalars(self, step: int, values: Mapping[str, float], consumed_samples: int) -> None:
        """Record numbers of one optimizer step."""

    @abstractmethod
    def image(self, name: str, step: int, picture: Path, caption: str = "") -> None:
        """Record a picture file; an animation is a `.gif`."""

    @abstractmethod
    def artifact(self, path: Path, metadata: Mapping[str, Any]) -> None:
        """Record a folder of the run, usually a checkpoint."""

    def start(self, step: int) -> None:  # noqa: B027 - mirrors get the step when they are built
        """Record that an attempt begins after `step`."""

    def incident(self, name: str, step: int, details: Mapping[str, Any]) -> None:  # noqa: B027 - not every mirror can
        """Record an incident; `details` are plain JSON."""

    def sync(self) -> None:  # noqa: B027 - mirrors have nothing to do
        """Flush all records to the disk, if the sink supports it."""

    @abstractmethod
    def close(self) -> None:
        """Write buffered records and close."""


class JsonlSink(Sink):
    """Writes one line of JSON per record.

    A record is passed to the operating system before the call returns, so it survives `kill -9`. After `sync` it also
    survives a power loss. Checkpoints are saved after `sync`, because a resumed run does not repeat records before its
    checkpoint.

    Every record has `kind` (start, scalars, image, artifact or incident), `step`, `time` (seconds since the epoch) and
    `attempt` (1 for the first process that wrote here, 2 after the first resume, ...). Scalars keep their exact value;
    the training loss is also written as `loss_hex`, so that runs can be compared to the bit.

    Records are never removed: a run that resumes from an earlier step writes the steps in between again. The record
    `start` has the step from which an attempt continued, so readers can drop later ones, see `current_records`. Only
    an incomplete last line is removed on opening.

    Raises:
        CheckpointError: the file cannot be written (exit code 5), or it was moved or deleted.
        ConfigError: it is a link.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._descriptor = open_regular(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, follow=False)
            tail = _cut_torn_line(self._descriptor)
        except OSError as error:
            raise self._failed(error) from error
        self.attempt = newest_attempt(tail) + 1

    def scalars(self, step: int, values: Mapping[str, float], consumed_samples: int) -> None:
        clash = sorted(values.keys() & set(RECORD_FIELDS))
        assert not clash, f"scalars named like fields of the record: {clash}"
        numbers: dict[str, Any] = {
            name: value if isinstance(value, (int, str)) else float(value) for name, value in values.items()
        }
        if LOSS in values:
            numbers["loss_hex"] = float(values[LOSS]).hex()
        self._write("scalars", step, {"consumed_samples": int(consumed_samples), **numbers})

    def image(self, name: str, step: int, picture: Path, caption: str = "") -> None:
        self._write("image", step, {"image": name, "path": str(picture), "caption": caption})

    def artifact(self, path: Path, metadata: Mapping[str, Any]) -> None:
        self._write("artifact", metadata.get("step"), {"path": str(path), "metadata": dict(metadata)})

    def start(self, step: int) -> None:
        self._write("start", step, {})

    def incident(self, name: str, step: int, details: Mapping[str, Any]) -> None:
        self._write("incident", step, {"incident": name, "details": dict(details)})

    def sync(self) -> None:
        try:
            os.fsync(self._descriptor)
        except OSError as error:
            raise self._failed(error) from error

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _write(self, kind: str, step: Optional[int], record: Mapping[str, Any]) -> None:
        line = strict_json({"kind": kind, "step": step, "time": time.time(), "attempt": self.attempt, **record})
        try:
            write_all(self._descriptor, line.encode() + b"\n")
        except OSError as error:
            with suppress(OSError):
                _cut_torn_line(self._descriptor)  # training continues if the record was that of a failed save
            raise self._failed(error) from error
        if not is_at(self.path, self._descriptor):
            # Writes to a deleted file succeed, but the data are lost.
            raise CheckpointError(
                f"{self.path} was deleted, moved or replaced while the run wrote to it; put the run folder back where "
                "it was, then resume, or start a new run in another training.run_dir"
            )

    def _failed(self, error: OSError) -> CheckpointError:
        return CheckpointError(
            f"{self.path} cannot be written: {error.strerror}; it is the record of the run, so training stops here; "
            "make room or fix the permissions, then resume"
        )


class TensorBoardSink(Sink):
    """Event files for TensorBoard.

    Args:
        folder: by convention `run_dir/events`.
        step: steps done before this process; TensorBoard hides later steps of earlier processes.
    """

    def __init__(self, folder: Path | str, step: int = 0) -> None:
        from torch.utils.tensorboard import SummaryWriter  # slow to import, only rank 0 needs it

        self._writer = SummaryWriter(str(make_folder(Path(folder))), purge_step=step + 1)

    def scalars(self, step: int, values: Mapping[str, float], consumed_samples: int) -> None:
        for name, value in {**values, "consumed_samples": consumed_samples}.items():
            if not isinstance(value, str):
                self._writer.add_scalar(name, float(value), step)

    def image(self, name: str, step: int, picture: Path, caption: str = "") -> None:
        # TensorBoard shows the file unchanged; `add_image` and `add_video` would encode it again.
        from tensorboard.compat.proto.summary_pb2 import Summary

        with open_image(picture) as image:
            width, height = image.size
        record = Summary.Image(height=height, width=width, colorspace=3, encoded_image_string=read_bytes(picture))
        self._writer._get_file_writer().add_summary(Summary(value=[Summary.Value(tag=name, image=record)]), step)

    def artifact(self, path: Path, metadata: Mapping[str, Any]) -> None:
        self._writer.add_text("artifact", f"{path}\n\n{strict_json(dict(metadata))}", metadata.get("step"))

    def incident(self, name: str, step: int, details: Mapping[str, Any]) -> None:
        if name == "rewind":
            self._writer.close()  # the next event opens a file that hides the discarded steps
            self._writer.purge_step = details["to_step"] + 1
        self._writer.add_text("incident", f"{name}\n\n{strict_json(dict(details))}", step)

    def close(self) -> None:
        self._writer.close()


class FanOut:
    """Sends everything to the reference record, then to mirrors; a mirror that fails is dropped with one warning.

    Args:
        record: its errors are raised; None on ranks that report nothing.
        mirrors: by name, functions that build the sinks, because building may fail too.
    """

    def __init__(self, record: Optional[Sink], mirrors: Mapping[str, Callable[[], Sink]]) -> None:
        self.record = record
        self.mirrors: dict[str, Sink] = {}
        for name, build in mirrors.items():
            try:
                self.mirrors[name] = build()
            except Exception as error:
                self._warn(name, error)

    def each(self, call: Callable[[Sink], None]) -> None:
        """Pass the record, then each mirror, to a function."""
        if self.record is not None:
            call(self.record)
        for name, sink in list(self.mirrors.items()):
            try:
                call(sink)
            except Exception as error:
                del self.mirrors[name]
                self._warn(name, error)

    @staticmethod
    def _warn(name: str, error: Exception) -> None:
        logger.warning(
            "%s stops (%s: %s); training continues, metrics.jsonl stays complete",
            name,
            type(error).__name__,
            on_a_screen(str(error)),
        )


def read_records(path: Path | str) -> list[dict[str, Any]]:
    """Read all records of a `metrics.jsonl`; a line that is damaged or not yet complete is skipped."""
    records, num_lines = [], 0
    with open_binary(Path(path), follow=False) as file:
        while line := file.readline(LONGEST_LINE):
            if not line.endswith(b"\n") and len(line) < LONGEST_LINE:
                break  # it is being written
            num_lines += 1
            if (record := _parse_record(line)) is not None:
                records.append(record)
    if len(records) < num_lines:
        logger.warning("%s: skipped %d damaged lines of %d", path, num_lines - len(records), num_lines)
    return records


def newest_attempt(tail: bytes) -> int:
    """Return the attempt of the last record in the last lines of a `metrics.jsonl`; 0 if there is none."""
    records = map(_parse_record, reversed(tail.splitlines()))
    return next((record["attempt"] for record in records if record is not None), 0)


def _parse_record(line: bytes) -> Optional[dict[str, Any]]:
    """Return the record in a line; None if a crash or an editor damaged the line."""
    try:
        record = parse_json(line)
    except ValueError:
        return None
    if not isinstance(record, dict):
        return None
    kind, step, when, attempt = (record.get(name) for name in ("kind", "step", "time", "attempt"))
    has_step = isinstance(step, int) or (step is None and kind == "artifact")
    has_time = isinstance(when, int | float) and math.isfinite(when)
    is_sound = isinstance(kind, str) and has_step and has_time and isinstance(attempt, int)
    return record if is_sound else None


def as_number(value: object) -> Optional[float]:
    """Return the value of a scalar, which may be the word "NaN" or "Infinity"; None if it is not a number."""
    try:
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return None


def current_records(records: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Drop the scalars of discarded steps: those after the step to which a resume or a rewind returned."""
    current: list[Mapping[str, Any]] = []
    started = 0
    for record in records:
        kind, step, back_to = record["kind"], record["step"], None
        if kind == "start" and step is not None:
            back_to, started = step, record["attempt"]
        elif kind == "scalars" and record["attempt"] > started:  # its start was not written
            back_to, started = step - 1, record["attempt"]
        elif kind == "incident" and record.get("incident") == "rewind":
            with suppress(KeyError, TypeError, ValueError, OverflowError):  # damaged details
                back_to = int(record["details"]["to_step"])
        if back_to is not None:
            current = [r for r in current if r["kind"] != "scalars" or r["step"] <= back_to]
        current.append(record)
    return current


def scalars_by_step(records: Iterable[Mapping[str, Any]]) -> dict[int, dict[str, Any]]:
    """Merge the scalars of each step, without those of discarded steps, see `current_records`."""
    steps: dict[int, dict[str, Any]] = {}
    for record in current_records(records):
        if record["kind"] == "scalars":
            steps.setdefault(record["step"], {}).update(record)
    return steps


def _cut_torn_line(descriptor: int) -> bytes:
    """Truncate after the last newline; return the last complete lines, at least one if there is one."""
    end = os.lseek(descriptor, 0, os.SEEK_END)
    start = max(0, end - TAIL_BYTES)
    tail = os.pread(descriptor, end - start, start)
    while start and tail.count(b"\n") < 2:
        start = max(0, start - TAIL_BYTES)
        tail = os.pread(descriptor, end - start, start)
    complete = tail.rfind(b"\n") + 1
    if complete < len(tail):
        os.ftruncate(descriptor, start + complete)
    return tail[:complete]
