"""Tests run outside of the clone, so data sets, runs and pictures left there by commands do not affect them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import dit
from dit.verify.ranks import run_ranks
from tests.support.repository import REPOSITORY


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
