"""The record of kernels that passed tests/gpu: its contents, the machines it applies to, and when it is written."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from dit.parallel import verified_kernels as verified
from dit.parallel.verified_kernels import record_path, record_results, verified_here
from launch.kernels import main
from tests.support.repository import REPOSITORY


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Simulate a machine with a GPU and an empty cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(verified, "use_cuda", lambda: True)
    monkeypatch.setattr(verified, "_of_all_ranks", None)  # set by an earlier run in this process
    verified._of_this_machine.cache_clear()
    yield
    verified._of_this_machine.cache_clear()


def test_a_kernel_that_fails_later_is_no_longer_verified():
    assert verified_here() == frozenset()
    record_results({"layers.triton": True, "noise.triton": False})
    assert verified_here() == {"layers.triton"}
    record_results({"noise.triton": True})
    assert verified_here() == {"layers.triton", "noise.triton"}
    record_results({"layers.triton": False})
    assert verified_here() == {"noise.triton"}


@pytest.mark.parametrize("change", ["describe", "accelerator_versions", "installed_version"])
def test_the_record_holds_for_one_device_driver_and_version(monkeypatch, change):
    record_results({"layers.triton": True})
    other = {"driver": "1.2"} if change == "accelerator_versions" else "another"
    monkeypatch.setattr(verified, change, lambda *_: other)
    verified._of_this_machine.cache_clear()
    assert verified_here() == frozenset()


@pytest.mark.parametrize("package", ["triton", "transformer-engine", "flash-attn"])
def test_another_version_of_a_package_must_pass_again(monkeypatch, package):
    record_results({"attention.flash_attn": True})
    former = verified.installed_version
    monkeypatch.setattr(verified, "installed_version", lambda name: "9.9" if name == package else former(name))
    verified._of_this_machine.cache_clear()
    assert verified_here() == frozenset()


def test_ranks_use_kernels_that_have_passed_on_all_their_machines(monkeypatch):
    other = frozenset({"noise.triton", "attention.flash_attn"})
    monkeypatch.setattr(verified, "gather_objects", lambda names: [names, other])
    record_results({"layers.triton": True, "noise.triton": True})
    verified.agree()
    assert verified_here() == {"noise.triton"}


def test_on_cpu_no_kernel_is_verified(monkeypatch):
    record_results({"layers.triton": True})
    monkeypatch.setattr(verified, "use_cuda", lambda: False)
    assert verified_here() == frozenset()


@pytest.mark.parametrize("content", ["", "[1]", "{", '{"x": 3}'])
def test_a_damaged_record_verifies_no_kernel_and_is_replaced(content):
    record_path().parent.mkdir(parents=True)
    record_path().write_text(content)
    assert verified_here() == frozenset()
    record_results({"layers.triton": True})
    assert verified_here() == {"layers.triton"}


TESTS = """
import pytest
@pytest.mark.verifies("a.passes")
def test_pass(): pass
@pytest.mark.verifies("a.mixed")
@pytest.mark.parametrize("wrong", [True, False])
def test_mixed(wrong): assert not wrong
@pytest.mark.verifies("a.skipped")
def test_skip(): pytest.skip("not installed")
@pytest.mark.verifies("a.setup")
def test_setup(missing_fixture): pass
"""


RUNS = [
    ([], ["a.passes"]),
    (["-k", "pass"], None),
    (["gpu/test_a.py"], None),
    (["gpu", "-n", "1"], None),
    (["gpu/test_a.py::test_pass", "gpu/test_b.py"], None),
]
"""Arguments of pytest, and the kernels in the record."""
FORKED = """
import os, sys, pytest, dit.parallel.verified_kernels
for run in sys.argv[1:]:
    folder, *words = run.split()
    if not os.fork():
        os.chdir(folder)
        os.environ["XDG_CACHE_HOME"] = folder
        os._exit(pytest.main(["-q", "-p", "no:cacheprovider", *(words or ["gpu"])]))
    os.wait()
"""
"""Runs pytest in each folder, in processes that have imported torch."""


@pytest.mark.slow
def test_a_complete_run_of_the_tests_writes_the_record(tmp_path, monkeypatch):
    """A kernel passes if at least one of its tests runs and none fails."""
    folders = [tmp_path / str(number) for number in range(len(RUNS))]
    for folder in folders:
        (folder / "gpu").mkdir(parents=True)
        shutil.copy(REPOSITORY / "tests" / "gpu" / "conftest.py", folder / "gpu")
        (folder / "gpu" / "test_a.py").write_text(TESTS)
        (folder / "gpu" / "test_b.py").write_text("def test_b(): pass")
    runs = [" ".join([str(folder), *words]) for folder, (words, _) in zip(folders, RUNS)]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    subprocess.run([sys.executable, "-c", FORKED, *runs], env=environment, check=True, capture_output=True)
    for folder, (words, expected) in zip(folders, RUNS):
        monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
        assert verified._entries().get(verified.machine()) == expected, words


def test_verify_needs_a_gpu(monkeypatch, capsys):
    monkeypatch.setenv("DIT_DEVICE", "cpu")
    assert main(["--verify"]) == 2
    assert "this process sees none" in capsys.readouterr().err
