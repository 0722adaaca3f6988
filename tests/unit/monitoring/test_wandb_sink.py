"""Weights & Biases: offline without a key or a service, one page per run, and no endless wait for a lost service."""

import logging
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from dit.checkpoint.manifest import MANIFEST, Manifest
from dit.models.dit.config import DiTConfig
from dit.monitoring.run_log import mirrors_of
from dit.monitoring.sinks import FanOut, JsonlSink, read_records
from dit.monitoring.wandb_sink import WandbSink
from dit.objectives.flow_matching import FlowMatching
from dit.run_config import RunConfig
from dit.settings import LoggingConfig
from energon_data.mock import MockData
from tests.unit.monitoring.test_sinks import moving_picture

WANDB_CHILD = """
import logging, sys
from pathlib import Path
logging.basicConfig(level=logging.INFO, format="%(message)s")
from dit.monitoring.sinks import FanOut, JsonlSink
from dit.monitoring.wandb_sink import WandbSink
run_dir, home = Path(sys.argv[1]), Path(sys.argv[2])
for attempt in range(2):
    record = JsonlSink(run_dir / "metrics.jsonl")
    fan = FanOut(record, {"wandb": lambda: WandbSink(run_dir, "test", {"lr": 1e-3}, artifacts=True)})
    assert "wandb" in fan.mirrors
    assert not fan.mirrors["wandb"]._run.settings.x_disable_stats  # the statistics of the machine are on
    fan.each(lambda sink: sink.scalars(attempt + 2, {"loss": attempt + 0.5}, consumed_samples=8))
    fan.each(lambda sink: sink.scalars(attempt + 1, {"loss": attempt + 0.25}, consumed_samples=16))  # after a rewind
    fan.each(lambda sink: sink.image("samples", attempt + 1, run_dir / "grid.png", "a caption"))
    fan.each(lambda sink: sink.image("clips", attempt + 1, run_dir / "grid.gif", "a caption"))
    fan.each(lambda sink: sink.artifact(run_dir / "checkpoints", {"step": attempt + 1}))
    assert "wandb" in fan.mirrors
    fan.each(lambda sink: sink.close())
assert list(home.iterdir()) == [], list(home.iterdir())
"""


def test_offline_wandb_writes_to_the_run_folder_and_keeps_its_id(tmp_path):
    """Two attempts without a key leave two offline parts of one run, with names and pictures, and no other file."""
    pytest.importorskip("wandb")
    run_dir, home = tmp_path / "run", tmp_path / "home"
    (run_dir / "checkpoints").mkdir(parents=True)
    home.mkdir()
    Image.fromarray(np.zeros((4, 6, 3), np.uint8)).save(run_dir / "grid.png")
    moving_picture(run_dir / "grid.gif")
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("WANDB", "NETRC", "XDG"))}
    done = subprocess.run(
        [sys.executable, "-c", WANDB_CHILD, str(run_dir), str(home)],
        env=environment | {"HOME": str(home)},
        check=False,
        timeout=120,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    run_id = (run_dir / "wandb_id").read_text().strip()
    parts = list((run_dir / "wandb").glob(f"offline-run-*-{run_id}*"))  # a second part in one second ends in -1
    assert len(parts) == 2
    named = re.findall(r"upload with: wandb sync (.+)", done.stderr)
    assert [sorted(Path(text).parent.glob(Path(text).name)) for text in named] == [sorted(parts)] * 2
    files = [path for part in parts for path in part.rglob("*")]
    assert any(path.suffix == ".wandb" and path.stat().st_size for path in files)
    assert sum(path.suffix == ".png" for path in files) == 2
    clips = [path.read_bytes() for path in files if path.suffix == ".gif"]
    assert clips == [(run_dir / "grid.gif").read_bytes()] * 2
    assert len(read_records(run_dir / "metrics.jsonl")) == 10
    recorded = b"".join(path.read_bytes() for path in files if path.suffix == ".wandb")
    assert {value for value in re.findall(rb"loss\W+([\d.]+)", recorded)} == {b"0.5", b"0.25", b"1.5", b"1.25"}


@pytest.mark.parametrize(
    ("asked", "key", "mirrored"), [(None, True, True), (None, False, False), (False, True, False), (True, False, True)]
)
def test_wandb_is_on_with_a_key_unless_the_settings_disable_it(asked, key, mirrored, tmp_path, monkeypatch):
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    if key:
        monkeypatch.setenv("WANDB_API_KEY", "k" * 40)
    config = RunConfig(
        model=DiTConfig(num_classes=3),
        data=MockData(shapes=["1x8x8"]),
        objective=FlowMatching(),
        logging=LoggingConfig(wandb=asked, tensorboard=False),
    )
    assert list(mirrors_of(config, {}, 0)) == (["wandb"] if mirrored else [])


class FakeRun:
    """Stand-in for wandb's run that keeps its artifacts."""

    id, sync_dir, starting_step = "x", "somewhere", 0

    def __init__(self, *, offline):
        self.offline, self.artifacts = offline, []

    def define_metric(self, *args, **kwargs):
        pass

    def log_artifact(self, artifact):
        self.artifacts.append(artifact)


def test_wandb_continues_with_increasing_steps(tmp_path, monkeypatch):
    """Online, a resumed run repeats steps that wandb already has, and it has rows after the last step."""
    wandb = pytest.importorskip("wandb")
    run, rows = FakeRun(offline=False), []
    run.starting_step, run.log = 7, lambda values, step: rows.append((step, values))
    keep_wandb_in(tmp_path, monkeypatch)
    monkeypatch.setattr(wandb, "init", lambda **arguments: run)
    sink = WandbSink(tmp_path, "test", {})
    for step in (4, 5, 5, 9, 8, 30):
        sink.scalars(step, {"loss": 0.5}, step * 10)
    assert [row for row, _ in rows] == [7, 8, 9, 10, 11, 30]
    assert rows[-2][1] == {"loss": 0.5, "consumed_samples": 80, "step": 8}


def keep_wandb_in(folder, monkeypatch):
    """Restore the environment variables of the sink after the test."""
    for name in ("DATA", "CACHE", "CONFIG"):
        monkeypatch.setenv(f"WANDB_{name}_DIR", str(folder / "wandb" / name.lower()))


@pytest.mark.parametrize("offline", [False, True])
def test_checkpoints_are_uploaded_if_wandb_is_online(tmp_path, monkeypatch, offline):
    """All files are uploaded from a copy, which stays if the checkpoint is deleted; the name has the step."""
    wandb = pytest.importorskip("wandb")
    folder = tmp_path / "checkpoints" / "iter_0000030"
    (folder / "part").mkdir(parents=True)
    (folder / "part" / "weights.bin").write_bytes(b"weights")
    (folder / MANIFEST).write_text(Manifest(30, {}, {"consumed_samples": 900}).to_text())
    run = FakeRun(offline=offline)
    keep_wandb_in(tmp_path, monkeypatch)
    monkeypatch.setattr(wandb, "init", lambda **arguments: run)
    WandbSink(tmp_path, "test", {}).artifact(folder, {"step": 30})
    assert run.artifacts == []  # off by default
    sink = WandbSink(tmp_path, "test", {}, artifacts=True)
    sink.artifact(folder, {"step": 30, "held_out_loss": 0.5})
    (artifact,) = run.artifacts
    assert artifact.name.split(":")[0] == "checkpoint-x-step_30"
    assert artifact.metadata == {"step": 30, "held_out_loss": 0.5}
    entries = artifact.manifest.entries
    if offline:
        expected = {(folder / name).as_uri() for name in (MANIFEST, "part/weights.bin")}
        assert {entry.ref for entry in entries.values()} == expected
        return
    assert set(entries) == {MANIFEST, "part/weights.bin"}
    shutil.rmtree(folder)
    assert Path(entries["part/weights.bin"].local_path).read_bytes() == b"weights"


def test_a_long_error_of_a_mirror_is_shortened(tmp_path, monkeypatch, caplog):
    """wandb refuses an id of 100,000 characters, and its error repeats the id."""
    wandb = pytest.importorskip("wandb")

    def init(**arguments):
        raise wandb.errors.UsageError(f"Invalid run id {arguments['id']}: must be shorter")

    keep_wandb_in(tmp_path, monkeypatch)
    monkeypatch.setattr(wandb, "init", init)
    (tmp_path / "wandb_id").write_text("x" * 100_000)
    with caplog.at_level(logging.WARNING):
        FanOut(JsonlSink(tmp_path / "metrics.jsonl"), {"wandb": lambda: WandbSink(tmp_path, "test", {})})
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 2
    for message in messages:
        assert len(message) < 500
        assert "...(100,001 characters) must be shorter" in message


def test_wandb_service_failure_means_offline(tmp_path, monkeypatch, caplog):
    """A service that does not answer causes one warning; the second `init` is offline with the same id."""
    wandb = pytest.importorskip("wandb")
    modes, ids, pages = [], [], []

    def init(mode, **arguments):
        modes.append(mode)
        ids.append(arguments["id"])
        pages.append((arguments["name"], arguments["group"]))
        if mode == "online":
            raise wandb.errors.CommError("Run initialization has timed out")
        return FakeRun(offline=mode == "offline")

    keep_wandb_in(tmp_path, monkeypatch)
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setattr(wandb, "init", init)
    with caplog.at_level(logging.WARNING):
        WandbSink(tmp_path, "test", {}, name="a page", group="a group")
    assert pages == [("a page", "a group")] * 2
    assert modes == ["online", "offline"]
    assert ids == [(tmp_path / "wandb_id").read_text().strip()] * 2
    assert caplog.text.count("recorded offline: Run initialization has timed out") == 1


LOST_SERVICE = """
import http.server, json, logging, os, sys, tempfile, threading, time
from pathlib import Path
logging.basicConfig(format="%(message)s")
from dit.monitoring import wandb_sink
from dit.monitoring.sinks import FanOut

bucket = {"id": "b", "name": "n", "displayName": "d", "description": "", "config": "{}", "sweepName": None}
bucket |= {"project": {"id": "p", "name": "test", "entity": {"id": "e", "name": "u"}}, "historyLineCount": 0}
content = {"upsertBucket": {"bucket": bucket, "inserted": True}, "model": {"bucket": None}, "project": None}
content |= {"viewer": {"id": "1", "username": "u", "entity": "u", "flags": "{}", "teams": {"edges": []}}}

class Service(http.server.BaseHTTPRequestHandler):
    status = 200
    def do_POST(self):
        self.rfile.read(int(self.headers["content-length"] or 0))
        answer = json.dumps({"data": content}).encode()
        self.send_response(self.status)
        self.send_header("content-length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)
    def log_message(self, *_):
        pass

server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Service)
threading.Thread(target=server.serve_forever, daemon=True).start()
os.environ |= {"WANDB_BASE_URL": f"http://127.0.0.1:{server.server_address[1]}", "WANDB_API_KEY": "k" * 40}
wandb_sink.FINISH_S = 2.0
fan = FanOut(None, {"wandb": lambda: wandb_sink.WandbSink(Path(sys.argv[1]), "test", {})})
assert not fan.mirrors["wandb"]._run.offline
Service.status = 503
fan.each(lambda sink: sink.scalars(1, {"loss": 0.5}, 8))
fan.each(lambda sink: sink.close())
sys.stderr.flush()
os._exit(0)
"""


def test_a_run_ends_without_a_service_that_was_lost(tmp_path):
    """By default wandb waits for hours; the run would count as hung, or be killed without its record."""
    pytest.importorskip("wandb")
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("WANDB", "NETRC", "XDG"))}
    command = [sys.executable, "-c", LOST_SERVICE, str(tmp_path)]
    done = subprocess.run(command, env=environment, check=False, timeout=90, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "wandb stops (TimeoutError: Timed out finishing run.); training continues" in done.stderr
    assert list((tmp_path / "wandb").glob("run-*/run-*.wandb"))
