"""env.json has the revision of this code and a record of every attempt."""

import json
import subprocess
from importlib.metadata import version

import torch

from dit.kernels.choice import Selection
from dit.monitoring import environment_record as module
from dit.monitoring.environment_record import append_attempt, environment_record, git_revision


def git(folder, *arguments):
    command = ["git", "-C", str(folder), "-c", "user.name=a", "-c", "user.email=a@b", *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def test_revision_and_dirty_flag_belong_to_the_repository_of_the_code(tmp_path, monkeypatch):
    """An uncommitted change sets the flag; a package inside another repository has no revision."""
    git(tmp_path, "init", "--quiet")
    (tmp_path / "code.py").write_text("a = 1\n")
    (tmp_path / "installed").mkdir()
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "--quiet", "-m", "first")
    monkeypatch.setattr(module, "ROOT", tmp_path)
    assert git_revision() == {"commit": git(tmp_path, "rev-parse", "HEAD"), "dirty": False}
    (tmp_path / "code.py").write_text("a = 2\n")
    assert git_revision()["dirty"]
    monkeypatch.setattr(module, "ROOT", tmp_path / "installed")
    assert git_revision() is None


def test_the_record_has_versions_and_resolved_implementations(monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    selections = {"attention": Selection("sdpa", {"varlen": "needs CUDA"}), "swiglu": Selection("eager", {})}
    record = environment_record(8, selections)
    assert record["world_size"] == 8
    assert record["kernels"] == {"attention": "sdpa", "swiglu": "eager"}
    assert record["kernels_not_selected"] == {"attention": {"varlen": "needs CUDA"}}
    assert record["job"] == "4711"
    assert record["packages"]["torch"] == torch.__version__
    assert record["packages"]["megatron-core"] == version("megatron-core")
    assert {"transformer-engine", "flash-attn", "triton", "megatron-energon", "numpy"} <= record["packages"].keys()
    assert {"driver", "cuda", "cudnn", "nccl", "host", "python", "command", "revision"} <= record.keys()
    json.dumps(record)


def test_the_record_lists_all_attempts(tmp_path, caplog):
    """A damaged file is replaced with a warning."""
    path = tmp_path / "env.json"
    append_attempt(path, {"torch": "2.0"})
    append_attempt(path, {"torch": "2.1"})
    append_attempt(path, {"torch": "2.2"})
    assert json.loads(path.read_text()) == [{"torch": "2.0"}, {"torch": "2.1"}, {"torch": "2.2"}]
    for damaged in ('[{"torch"', "null", '{"torch": "2.0"}'):
        path.write_text(damaged)
        caplog.clear()
        append_attempt(path, {"torch": "2.3"})
        assert json.loads(path.read_text()) == [{"torch": "2.3"}]
        assert "env.json is damaged" in caplog.text
