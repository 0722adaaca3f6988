"""Kill -9 in every phase of saves and resumes, on two ranks: the resumed run equals a run that was never killed.

`python -m tests.faults.kill_campaign --write` runs the campaign and writes tests/faults/kill_campaign.md.

One run saves synchronously, another one asynchronously. Each is killed repeatedly and started again with the same
command: packs from two data sets, mixed with weights that change with the step, read by worker processes. A kill comes
a few random milliseconds after a phase starts (a call that a rank enters, or a state of the checkpoint folder).
"""

import argparse
import json
import os
import pkgutil
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Optional
from unittest import mock

from dit.checkpoint.background.writer import ORDER
from dit.verify.ranks import FORKS
from tests.integration.runs import assert_same_bits, checkpoint, losses, read_tensors
from tests.support import faults
from tests.support.attempts import Files, arguments, attempt, children, finish, prepare_media
from tests.support.repository import REPOSITORY

RANKS, NUM_STEPS, KILLS, SEED = 2, 120, 68, 14
SETTINGS = {
    "model__hidden_size": 64,
    "training__num_steps": NUM_STEPS,
    "training__log_interval": 1,
    "training__validation_interval": 0,
    "checkpoint__interval": 2,
    "checkpoint__keep_last": 2,
}
ENTERED = {
    "building the model": "dit.training.pretrain.build_state",
    "verifying": "dit.checkpoint.checkpointer.newest_valid_together",
    "loading": "dit.checkpoint.checkpointer.load_state",
    "positioning the data": "dit.checkpoint.checkpointer.read_loader_state",
    "training": "dit.training.pretrain.Run.step",
    "beginning a save": "dit.checkpoint.saves.Saves.save",
    "copying to the host": "dit.checkpoint.background.writer.SharedMemory.write",
    "sealing": "dit.checkpoint.store.CheckpointStore.publish",
    "deleting old ones": "dit.checkpoint.store.CheckpointStore.prune",
}
"""Phases that begin when a rank enters a function."""
RESUME = ("building the model", "verifying", "loading", "positioning the data")
SYNC = ("training", "beginning a save", "writing", "sealing", "deleting old ones")
ASYNC = ("training", "beginning a save", "copying to the host", "writing", "a part is written", "sealing")
KINDS = ("all ranks", "rank 0", "rank 1")
WRITER_KILLS = 4
JITTER_S = 0.004
LATEST_STEPS = 7
"""Steps after which an attempt is killed even if the phase has not come."""


@dataclass(frozen=True)
class Row:
    """One kill.

    Attributes:
        mode: `synchronous` or `asynchronous` saves.
        phase: phase of the kill.
        what: killed processes.
        step: newest step of any rank at the kill.
        resumed: step from which the next attempt resumed.
    """

    mode: str
    phase: str
    what: str
    step: int
    resumed: int


@contextmanager
def phases_noted(file: Path) -> Iterator[None]:
    """Append to a file the name of every phase that this rank enters."""
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def noted(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            os.write(descriptor, f"{name}\n".encode())
            return original(*args, **kwargs)

        return call

    with ExitStack() as stack:
        for name, path in ENTERED.items():
            stack.enter_context(mock.patch(path, noted(name, pkgutil.resolve_name(path))))
        yield


def phases_of(files: Files, rank: int) -> faults.Fault:
    return partial(phases_noted, files.of("phases", rank))


def entered(files: Files, phase: str) -> int:
    """Return the number of times that the ranks have entered a phase."""
    notes = [files.of("phases", rank) for rank in range(files.ranks)]
    return sum(note.read_text().split("\n").count(phase) for note in notes if note.exists())


def writer_of(rank: BaseProcess) -> Optional[int]:
    """Return the process id of a rank's checkpoint writer; None if there is none."""
    for child in children(rank):
        with suppress(FileNotFoundError, ProcessLookupError):
            if b"dit.checkpoint.background.writer" in Path(f"/proc/{child}/cmdline").read_bytes():
                return child
    return None


def is_in(phase: str, files: Files, before: int, since: float) -> bool:
    """Return whether the run is in a phase, which it had entered `before` times at the time `since`.

    If `before` is -1, only the checkpoint folder is inspected, because the writer process enters the phase.
    """
    if phase in ENTERED and before >= 0:
        return entered(files, phase) > before
    for folder in (files.run_dir / "checkpoints").glob("*.tmp"):
        with suppress(FileNotFoundError):
            if folder.stat().st_mtime < since:
                continue  # written by an earlier attempt
            names = set(os.listdir(folder))
            if phase == "writing" and any(name.startswith("rank_") for name in names):
                return True
            if phase == "a part is written" and any(name.startswith("part_") for name in names):
                return True
            if phase == "sealing" and names and ORDER not in names:
                return True
    return False


def wait(ranks: Sequence[BaseProcess], files: Files, is_reached: Callable[[], bool], pause_s: float = 0.0) -> None:
    """Wait for a moment of an attempt whose ranks stay alive."""
    deadline = time.monotonic() + 240
    while not is_reached():
        assert all(rank.is_alive() for rank in ranks), files.log()
        assert time.monotonic() < deadline, files.log()
        time.sleep(pause_s)


def wait_for_phase(
    ranks: Sequence[BaseProcess], files: Files, phase: str, first: int, most: int, *, by_folder: bool = False
) -> bool:
    """Wait until an attempt is in a phase; return False if `most` steps have passed without it.

    Args:
        first: number of steps after which the phase counts, unless it is one of a resume.
        by_folder: inspect only the checkpoint folder, because the writer process enters the phase.
    """
    before, is_found = 0, False
    if phase not in RESUME:
        wait(ranks, files, lambda: len(files.steps(0)) >= first, 0.002)
        before = -1 if by_folder else entered(files, phase)
    since = time.time()

    def is_over() -> bool:
        nonlocal is_found
        is_found = is_in(phase, files, before, since)
        return is_found or len(files.steps(0)) >= first + most

    wait(ranks, files, is_over)
    return is_found


def kill_at(words: list[str], files: Files, phase: str, what: str, rng: random.Random, *, beside: bool) -> str:
    """Start the run and kill some of its processes in a phase; return the phase."""
    first = rng.randrange(1, 4) if phase not in RESUME else 0
    with attempt(words, files, phases_of) as ranks:
        by_folder = phase == "sealing" and beside
        if not wait_for_phase(ranks, files, phase, first, LATEST_STEPS, by_folder=by_folder):
            phase = "training"
        time.sleep(JITTER_S * rng.random())
        assert all(rank.is_alive() for rank in ranks), files.log()
        if what == "a writer":
            writer = writer_of(rng.choice(ranks))
            assert writer is not None
            with suppress(ProcessLookupError):
                os.kill(writer, signal.SIGKILL)
            done = len(files.steps(0))
            wait(ranks, files, lambda: len(files.steps(0)) >= done + 5, 0.01)  # the run continues and saves again
        struck = ranks if what in ("all ranks", "a writer") else [ranks[int(what[-1])]]
        for rank in struck:
            (os.killpg if what == "all ranks" or rng.random() < 0.5 else os.kill)(rank.pid, signal.SIGKILL)
        for rank in ranks:  # the other rank exits after it has lost its peer
            rank.join(120)
            assert not rank.is_alive(), files.log()
    return phase


def moments(beside: bool, kills: int) -> list[tuple[str, str]]:
    """Return phases and processes to kill: every pair, repeated up to the number of kills."""
    pairs = [(phase, what) for phase in (*(ASYNC if beside else SYNC), *RESUME) for what in KINDS]
    if beside:
        pairs = [("writing", "a writer")] * WRITER_KILLS + pairs
    return [pairs[i % len(pairs)] for i in range(kills)]


def campaign(folder: Path, kills: int, seed: int = SEED) -> list[Row]:
    """Kill a synchronous and an asynchronous run `kills` / 2 times each, and compare them with an undisturbed one.

    Raises:
        AssertionError: a loss, a sample or a bit of the last checkpoint differs.
    """
    prepare_media(folder)
    calm = folder / "calm"
    finish(arguments(folder, calm, **SETTINGS), Files(calm, 0, RANKS))
    expected = [Files(calm, 0, RANKS).steps(rank) for rank in range(RANKS)]
    assert all(list(steps) == list(range(1, NUM_STEPS + 1)) for steps in expected)
    rows = []
    for beside in (False, True):
        rng, run_dir = random.Random(seed + beside), folder / ("beside" if beside else "sync")
        words = arguments(folder, run_dir, **SETTINGS, checkpoint__async_save=beside)
        plan = moments(beside, kills // 2)
        rng.shuffle(plan)
        plan.sort(key=lambda moment: moment[0] != "training")  # the first kills cannot hit a resume
        struck = []
        for number, (phase, what) in enumerate(plan):
            struck.append(kill_at(words, Files(run_dir, number, RANKS), phase, what, rng, beside=beside))
            if max(_reached(Files(run_dir, number, RANKS)), default=0) >= NUM_STEPS - 20:
                raise AssertionError(f"the run is too short: {number + 1} of {len(plan)} kills")
        finish(words, Files(run_dir, len(plan), RANKS))
        attempts = [Files(run_dir, number, RANKS) for number in range(len(plan) + 1)]
        for one in attempts:
            for rank in range(RANKS):
                assert one.steps(rank).items() <= expected[rank].items(), (beside, one.number)
        reached = {step for one in attempts for step in _reached(one)}
        assert reached == set(expected[0])
        assert losses(run_dir) == losses(calm)
        last = [read_tensors(checkpoint(path, NUM_STEPS)) for path in (run_dir, calm)]
        assert_same_bits(*last)
        done = 0
        for number, (_, what) in enumerate(plan):
            done = max([done, *_reached(attempts[number])])
            later = next((steps for one in attempts[number + 1 :] if (steps := _reached(one))), [NUM_STEPS + 1])
            mode = "asynchronous" if beside else "synchronous"
            rows.append(Row(mode, struck[number], what, done, min(later) - 1))
    return rows


def _reached(files: Files) -> list[int]:
    return [step for rank in range(RANKS) for step in files.steps(rank)]


def table(rows: Sequence[Row]) -> str:
    """Return the table of a campaign in Markdown: kills by phase, kind of save and killed process."""
    counts = Counter((row.phase, row.mode, row.what) for row in rows)
    phases_by_cells: dict[str, list[str]] = {}
    for phase in (*RESUME, *dict.fromkeys((*SYNC, *ASYNC))):
        kills = [
            [counts[phase, mode, what] for what in (*KINDS, "a writer")] for mode in ("synchronous", "asynchronous")
        ]
        cells = " | ".join(", ".join(map(str, row)) if any(row) else "" for row in kills)
        if any(map(any, kills)):
            phases_by_cells.setdefault(cells, []).append(phase)
    lines = ["| phases | synchronous saves | asynchronous saves |", "|---" * 3 + "|"]
    lines += [f"| {', '.join(phases)} | {cells} |" for cells, phases in phases_by_cells.items()]
    return "\n".join(lines)


PAGE = REPOSITORY / "tests" / "faults" / "kill_campaign.md"
HEAD = """# Kills by phase

`python -m tests.faults.kill_campaign --write` writes this page: kills (`kill -9`) by phase of a run that saves every 2
steps. The numbers of a cell are kills of both ranks, of rank 0, of rank 1 and of a writer process in each phase.
"""


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Run the campaign and print its table; `--write` writes the page."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults.kill_campaign", description=__doc__)
    parser.add_argument("--kills", type=int, default=KILLS)
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--write", action="store_true", help="write tests/faults/kill_campaign.md")
    args = parser.parse_args(argv)
    folder, began = Path(tempfile.mkdtemp()), time.monotonic()
    os.environ["COUNTED_OPERATIONS"] = str(folder)
    try:
        rows = campaign(folder, args.kills, args.seed)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    text = table(rows)
    repeated = max(row.step - row.resumed for row in rows)
    minutes = (time.monotonic() - began) / 60
    summary = f"{len(rows)} kills in {minutes:.0f} min; at most {repeated} steps since a checkpoint were repeated."
    print(f"{text}\n\n{summary}")
    print(json.dumps([asdict(row) for row in rows]))
    if args.write:
        PAGE.write_text(f"{HEAD}\n{text}\n\n{summary}\n")
    return 0


if __name__ == "__main__":
    FORKS.set_forkserver_preload(["tests.preload"])
    sys.exit(main())
