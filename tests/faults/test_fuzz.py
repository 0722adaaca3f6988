"""Random command lines, and data sets and checkpoints with directed and random damage.

A command succeeds with an unchanged result, or prints one screen with the cause. The message of a failed random case
has its seed and number.
"""

import os
import pickle
import random
import re
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from dit.verify.ranks import FORKS
from tests.faults import fuzz, fuzz_checkpoints, fuzz_overrides, fuzz_shards
from tests.faults.damage import DAMAGES, OF_CHECKPOINTS
from tests.integration import actions, runs
from tests.support.ranks import Job, rows, run_jobs

QUICK, BATCH = 40, 100
COUNTS = {fuzz_overrides: 500, fuzz_shards: 250, fuzz_checkpoints: 250}
RANDOM = [
    (module, range(*ends))
    for module, count in COUNTS.items()
    for ends in pairwise([0, QUICK, *range(BATCH, count + 1, BATCH)])
]
STEPS, BEFORE = 6, 4
FILES = (
    *("rank_00000.safetensors", "rank_00001.safetensors", "state.json", "manifest.json"),
    *("config.yaml", "metadata.json", "loader/dp_00000.pt", "loader/dp_00001.pt"),
)
DIRECTED = [*((file, "flip") for file in FILES), *((FILES[0], damage) for damage in OF_CHECKPOINTS if damage != "flip")]
"""Every file, and every damage; tests/unit/checkpoint/test_checkpoint_store.py has more pairs on one rank."""


@pytest.fixture(scope="module")
def process() -> Iterator[Executor]:
    """Run cases in a new process, because their commands start worlds, and this process may have one already."""
    with ProcessPoolExecutor(1, FORKS) as pool:
        yield pool


@pytest.mark.parametrize(("module", "numbers"), rows(RANDOM, lambda module, numbers: numbers.start == 0), ids=str)
def test_random_input_is_read_unchanged_or_refused_by_name(process: Executor, module: Any, numbers: range) -> None:
    found = process.submit(fuzz.failures, module.attempt, fuzz.SEED, numbers).result()
    assert not found, "\n".join(found)


def damaged(arguments: list[str], source: Path, run: Path, file: str, damage: str) -> actions.Ended:
    """Copy a run, damage a file of its newest checkpoint, and resume."""
    if int(os.environ["RANK"]) == 0:
        shutil.copytree(source, run)
        OF_CHECKPOINTS[damage](runs.checkpoint(run, STEPS) / file, random.Random(f"{file} {damage}"))
        (run / "copied").touch()
    while not (run / "copied").exists():
        time.sleep(0.01)
    return actions.train(arguments)


def run_dir(folder: Path, file: str, damage: str) -> Path:
    return folder / f"{file} {damage}".translate(str.maketrans("/ ", "__"))


@pytest.fixture(scope="module")
def resumed(folder: Path) -> dict[str, Any]:
    usual = {"training__num_steps": STEPS, "training__log_interval": 1, "checkpoint__interval": 2}
    usual |= {"checkpoint__keep_last": 3, "data__dataset_size": 64}
    jobs = {"sound": Job(actions.train, {"arguments": runs.mock(folder / "sound", **usual)}, 2)}
    for file, damage in DIRECTED:
        run = run_dir(folder, file, damage)
        case = {"source": folder / "sound", "run": run, "file": file, "damage": damage}
        jobs[f"{file} {damage}"] = Job(damaged, {"arguments": runs.mock(run, **usual), **case}, 2)
    return run_jobs(folder / "world", jobs)


@pytest.mark.slow
@pytest.mark.parametrize(("file", "damage"), DIRECTED)
def test_the_previous_checkpoint_is_used(resumed: dict[str, Any], folder: Path, file: str, damage: str) -> None:
    """Two ranks resume before the damaged checkpoint, and the log names the damaged file."""
    ranks, run = resumed[f"{file} {damage}"], run_dir(folder, file, damage)
    assert [one.code for one in ranks] == [0, 0], ranks
    log = (folder / "world" / "rank_0.log").read_text().partition(f"--- {file} {damage}\n")[2].partition("--- ")[0]
    reason = re.search(rf"skipping checkpoint iter_{STEPS:07d}: (.*)", log)
    assert reason is not None
    assert file in reason[1], reason[1]
    assert f"resumed at step {BEFORE}" in ranks[0].out
    assert not list(run.rglob(f"{fuzz.SPRUNG}*"))
    assert runs.losses(run).keys() == runs.losses(folder / "sound").keys()
    fuzz_checkpoints.assert_unchanged(run, folder / "sound", STEPS)


@pytest.mark.parametrize(
    ("program", "wrong"),
    [
        ("code = 0", ""),
        ("print('error: x is wrong', file=sys.stderr); code = 2", ""),
        ("raise KeyError('x')", "escapes"),
        ("sys.exit(2)", "escapes"),
        ("print('Traceback', file=sys.stderr); code = 2", "a traceback"),
        ("print('error: x' * 999, file=sys.stderr); code = 2", "more than a screen"),
        ("print('error: x\\n' * 99, file=sys.stderr); code = 2", "more than a screen"),
        ("print('error: y', file=sys.stderr); code = 2", "is named"),
        ("print('bad x', file=sys.stderr); code = 2", "no line says error"),
        ("print('error: x', file=sys.stderr); code = 70", "exit code 70"),
        ("(folder / 'deep').mkdir(); file = folder / 'deep' / 'x'; hostile(file); load(file)", "code was run"),
        ("print('\\udcff')", "escapes"),
        ("while True: pass", "no end after 1 s"),
    ],
)
def test_run_and_judge_report_a_wrong_ending(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str, wrong: str
) -> None:
    def main(words: object) -> int:
        scope: dict[str, Any] = {"folder": tmp_path, "code": 0}
        scope["hostile"] = lambda file: DAMAGES["hostile"](file, random.Random(0))
        scope["load"] = lambda file: pickle.loads(file.read_bytes())
        exec(f"import sys\n{program}", scope)
        return int(scope["code"])

    monkeypatch.setattr(fuzz, "HANGS_AFTER_S", 1)
    ended = fuzz.run(main, [], tmp_path)
    fuzz.judge(ended, tmp_path, codes=(2,), causes=("x",))
    assert wrong in "; ".join(ended.wrong)
    assert bool(wrong) == bool(ended.wrong)
