"""Tests run outside of the clone: data sets, runs and pictures that commands left there change no result."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import dit
from dit.verify.ranks import run_ranks
from tests.mutants.runner import copy_tree, run_tests
from tests.support.repository import REPOSITORY, outputs


def outside(folder: Path) -> bool:
    return REPOSITORY not in (folder, *folder.parents)


@pytest.fixture(scope="module")
def folder_of_module() -> Path:
    return Path.cwd()


def test_fixtures_tests_and_children_run_outside_of_the_clone(folder_of_module, tmp_path):
    """And children import the same source, wherever another copy of it is installed."""
    assert outside(folder_of_module)
    assert Path.cwd() == tmp_path
    child = [sys.executable, "-c", "import dit, os, tests; print(os.getcwd(), dit.__file__)"]
    done = subprocess.run(child, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(tmp_path), dit.__file__]


def _write_working_folder(folder: Path, rank: int) -> None:
    (folder / f"working_folder_{rank}").write_text(os.getcwd())


def test_ranks_have_the_working_folder_of_their_caller(tmp_path):
    logs = tmp_path / "logs"
    logs.mkdir()
    run_ranks(_write_working_folder, 2, logs, timeout_s=120.0)
    assert {(logs / f"working_folder_{rank}").read_text() for rank in (0, 1)} == {str(tmp_path)}


def test_what_a_demo_leaves_in_the_clone_changes_no_result(tmp_path, letters_data):
    """This test trains for minutes if it reads `data/letters`."""
    clone = tmp_path / "clone"
    copy_tree(clone)
    shutil.copytree(letters_data, clone / "data" / "letters")
    (clone / "runs").mkdir()
    (clone / "samples.png").touch()
    test = "tests/integration/test_speedrun.py::test_settings_without_a_race_are_refused"
    assert run_tests([test], clone).seen_by is None


def test_outputs_in_the_clone_are_seen(tmp_path):
    for path in ("data/letters/dataset.json", "runs/x/metrics.jsonl", "samples.png", "README.md"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).touch()
    assert outputs(tmp_path) == {"data/letters", "runs/x", "samples.png"}
