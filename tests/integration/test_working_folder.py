"""Tests run outside of the clone, so data sets, runs and pictures left there by commands do not affect them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import dit
from dit.verify.ranks import run_ranks
from tests.support.repository import REPOSITORY, changed, outputs


def outside(folder: Path) -> bool:
    return REPOSITORY not in (folder, *folder.parents)


@pytest.fixture(scope="module")
def folder_of_module() -> Path:
    return Path.cwd()


def test_fixtures_tests_and_subprocesses_run_outside_of_the_clone(folder_of_module, tmp_path):
    """Child processes import the same source, even if another copy is installed."""
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


def test_new_deleted_and_changed_files_in_the_clone_are_detected(tmp_path):
    files = [tmp_path / name for name in ("data/letters/dataset.json", "runs/x/metrics.jsonl", "a.png", "README.md")]
    empty = outputs(tmp_path)
    for file in files:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("old")
        os.utime(file, ns=(0, 0))
    names = ["a.png", "data/letters", "data/letters/dataset.json", "runs/x", "runs/x/metrics.jsonl"]
    before = outputs(tmp_path)
    assert changed(empty, before) == names
    assert changed(before, outputs(tmp_path)) == []
    data, metrics, picture, other = files
    data.write_text("new")  # same size as before
    metrics.write_text("longer")
    os.utime(metrics, ns=(0, 0))
    picture.unlink()
    other.unlink()
    assert changed(before, outputs(tmp_path)) == ["a.png", "data/letters/dataset.json", "runs/x/metrics.jsonl"]
