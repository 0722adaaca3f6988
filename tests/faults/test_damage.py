"""Every file of a checkpoint, damaged in every way: no code is executed, and the run resumes from the one before."""

import os
import pickle
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.integration import actions
from tests.integration.runs import assert_same_bits, checkpoint, losses, mock, read_tensors
from tests.support.ranks import Job, run_jobs
from tests.support.trap import Trap

pytestmark = pytest.mark.slow

STEPS, BEFORE = 6, 4
FILES = (
    *("rank_00000.safetensors", "rank_00001.safetensors", "state.json", "manifest.json"),
    *("config.yaml", "metadata.json", "loader/dp_00000.pt", "loader/dp_00001.pt"),
)


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) * 2 // 3] ^= 1
    path.write_bytes(content)


def swap(path: Path) -> None:
    """Replace a file by the same file of the previous checkpoint, which is intact but of another step."""
    folder = next(parent for parent in path.parents if parent.name.startswith("iter_"))
    shutil.copy(folder.with_name(f"iter_{BEFORE:07d}") / path.relative_to(folder), path)


DAMAGE: dict[str, Callable[[Path], Any]] = {
    "cut": lambda path: os.truncate(path, path.stat().st_size // 2),
    "emptied": lambda path: os.truncate(path, 0),
    "flipped": flip,
    "swapped": swap,
    "removed": Path.unlink,
    "hostile": lambda path: path.write_bytes(pickle.dumps(Trap(marker_of(path)))),
    "a folder": lambda path: (path.unlink(), path.mkdir()),
}
SAME_IN_BOTH = ("config.yaml", "metadata.json")  # equal in the checkpoints of both steps


def marker_of(path: Path) -> Path:
    """Return the folder that a hostile file of a run would make."""
    run = next(parent.parent for parent in path.parents if parent.name == "checkpoints")
    return run.with_name(f"{run.name}.sprung")


CASES = [(f, d) for f in FILES for d in DAMAGE if (d, f) not in {("swapped", same) for same in SAME_IN_BOTH}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("damage")


def run_dir(folder: Path, file: str, damage: str) -> Path:
    return folder / f"{file.replace('/', '_')}_{damage.replace(' ', '_')}"


def damaged(arguments: list[str], source: Path, run: Path, file: str, damage: str) -> actions.Ended:
    """Copy a run, damage a file of its newest checkpoint, and resume."""
    if int(os.environ["RANK"]) == 0:
        shutil.copytree(source, run)
        DAMAGE[damage](checkpoint(run, STEPS) / file)
        (run / "copied").touch()
    while not (run / "copied").exists():
        time.sleep(0.01)
    return actions.train(arguments)


@pytest.fixture(scope="module")
def ended(folder: Path) -> dict[str, Any]:
    usual = {"training__num_steps": STEPS, "training__log_interval": 1, "checkpoint__interval": 2}
    usual |= {"checkpoint__keep_last": 3, "data__dataset_size": 64}
    sound = mock(folder / "sound", **usual)
    jobs = {"sound": Job(actions.train, {"arguments": sound}, 2)}
    for file, damage in CASES:
        run = run_dir(folder, file, damage)
        case = {"arguments": mock(run, **usual), "source": folder / "sound", "run": run, "file": file, "damage": damage}
        jobs[f"{file} {damage}"] = Job(damaged, case, 2)
    return run_jobs(folder / "world", jobs)


@pytest.mark.parametrize(("file", "damage"), CASES)
def test_the_previous_checkpoint_is_used(ended: dict[str, Any], folder: Path, file: str, damage: str) -> None:
    """The resumed run equals the undamaged one to the bit, and the log names the damaged file."""
    runs, run = ended[f"{file} {damage}"], run_dir(folder, file, damage)
    assert [one.code for one in runs] == [0, 0], runs
    log = (folder / "world" / "rank_0.log").read_text().partition(f"--- {file} {damage}\n")[2].partition("--- ")[0]
    reason = re.search(rf"skipping checkpoint iter_{STEPS:07d}: (.*)", log)
    assert reason is not None
    assert file in reason[1] or ("loader" in reason[1] and damage == "a folder"), reason[1]
    assert f"resumed at step {BEFORE}" in runs[0].out
    assert not marker_of(checkpoint(run, STEPS) / file).exists()
    assert losses(run) == losses(folder / "sound")
    assert_same_bits(*(read_tensors(checkpoint(path, STEPS)) for path in (run, folder / "sound")))


def test_the_check_detects_a_hostile_file(tmp_path: Path) -> None:
    """Unpickling the trap makes its folder."""
    pickle.loads(pickle.dumps(Trap(tmp_path / "sprung")))
    assert (tmp_path / "sprung").exists()
