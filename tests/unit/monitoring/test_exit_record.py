"""exit.json: one correct line about the end of a run, for every kind of exit."""

import errno
import json
import logging
import multiprocessing
import os
import random
import time

import pytest

from dit.errors import BatchError, BusyError, CheckpointError, ConfigError, DataError, MachineError, NotFiniteError
from dit.monitoring.exit_record import ExitRecord, Outcome, is_peer_lost, read_outcome, write_outcome
from dit.verify.ranks import FORKS

GLOO_CLOSED = "[../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:31713"


NCCL = "NCCL error in: ProcessGroupNCCL.cpp:2690, "


def nccl_error(cause):
    return type("DistBackendError", (RuntimeError,), {})(NCCL + cause)


@pytest.fixture(autouse=True)
def two_ranks(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")


def end_with(run_dir, error, rank=0):
    """End a run after step 7 with `error`, as if it were raised; return the exit code."""
    record = ExitRecord(run_dir, rank)
    try:
        with record:
            record.step = 7
            if error is not None:
                raise error
    except BaseException as raised:
        if raised is not error:
            raise
    return record.code


@pytest.mark.parametrize("age_s", [-1.0, 1e6])
def test_a_rank_that_torchrun_stops_because_another_one_failed_is_not_preempted(tmp_path, age_s):
    """Both ranks get SIGTERM. A failure that is older than this process belongs to an earlier attempt."""
    failed = Outcome(3, "data", None, 0, "DataError: no shard", time.time() - age_s)
    write_outcome(tmp_path, failed)
    record = ExitRecord(tmp_path, 1)
    with pytest.raises(ConnectionAbortedError if age_s < 0 else SystemExit) as stopped, record:
        raise SystemExit(75)
    assert record.code == (70 if age_s < 0 else 75)
    assert read_outcome(tmp_path) == failed
    if age_s < 0:
        assert is_peer_lost(stopped.value)
        assert "rank 0 ended: DataError: no shard" in str(stopped.value)


@pytest.mark.parametrize(
    ("error", "code", "reason"),
    [
        (None, 0, "completed"),
        (ConfigError("heads"), 2, "config"),
        (DataError("shard"), 3, "data"),
        (BatchError("lengths"), 3, "data"),
        (NotFiniteError("nan"), 4, "not_finite"),
        (CheckpointError("full"), 5, "checkpoint"),
        (MachineError("bits"), 17, "machine"),
        (KeyError("bug"), 70, "unexpected"),
        (RuntimeError(GLOO_CLOSED), 70, "peer_lost"),
        (KeyboardInterrupt(), 130, "interrupted"),
        (SystemExit(75), 75, "preempted"),
        (SystemExit(0), 0, "completed"),
        (SystemExit(9), 9, "unexpected"),
    ],
)
def test_every_kind_of_exit_is_recorded(tmp_path, error, code, reason):
    """The error's class determines code and reason; the error is raised unchanged; bugs have a traceback."""
    assert end_with(tmp_path / "run", error) == code
    record = json.loads((tmp_path / "run" / "exit.json").read_text())
    assert (record["code"], record["reason"], record["step"], record["rank"]) == (code, reason, 7, 0)
    if code not in (0, 75):
        assert record["error"] == f"{type(error).__name__}: {error}"
    assert (record["traceback"] is not None) == (code not in (0, 2, 3, 4, 5, 17, 75))
    if record["traceback"]:
        assert "in end_with" in record["traceback"]


def test_preemption_is_recorded(tmp_path):
    with ExitRecord(tmp_path) as record:
        record.step, record.preempted = 12, True
    outcome = read_outcome(tmp_path)
    assert (record.code, outcome.code, outcome.reason, outcome.step) == (75, 75, "preempted", 12)


def test_a_new_attempt_deletes_the_old_record(tmp_path):
    """During a run there is no exit record, and an old failure does not remain after a success."""
    end_with(tmp_path, ConfigError("old"), rank=3)
    with ExitRecord(tmp_path):
        assert read_outcome(tmp_path) is None
    assert read_outcome(tmp_path).reason == "completed"
    assert [p.name for p in tmp_path.iterdir()] == ["exit.json"]


@pytest.mark.parametrize("seed", range(6))
def test_first_cause_wins_in_any_order_of_writing(tmp_path, seed):
    """exit.json has the earliest cause among all ranks, not its consequences on other ranks or the view of rank 0."""
    outcomes = [
        Outcome(code=70, reason="peer_lost", step=5, rank=0, time=1.0),
        Outcome(code=70, reason="peer_lost", step=5, rank=1, time=2.0),
        Outcome(code=3, reason="data", step=5, rank=2, time=3.0),
        Outcome(code=4, reason="not_finite", step=5, rank=3, time=4.0),
        Outcome(code=75, reason="preempted", step=5, rank=4, time=0.5),
        Outcome(code=0, reason="completed", step=5, rank=0, time=0.1),
    ]
    random.Random(seed).shuffle(outcomes)
    for outcome in outcomes:
        write_outcome(tmp_path, outcome)
    assert read_outcome(tmp_path) == Outcome(code=3, reason="data", step=5, rank=2, time=3.0)


def test_records_of_another_run_are_not_changed(tmp_path):
    """An attempt that does not own the folder removes and writes no file, whatever its rank."""
    write_outcome(tmp_path, Outcome(code=3, reason="data", step=5, rank=2, time=3.0))
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    for rank in (0, 1):
        with pytest.raises(ConfigError), ExitRecord(tmp_path, rank, lambda: False):
            raise ConfigError("in use")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize("is_ours", [False, True])
@pytest.mark.parametrize(
    ("error", "code"), [(ConfigError("in use"), "2"), (BusyError("stops soon"), "70"), (SystemExit(75), "")]
)
def test_only_a_refused_attempt_writes_its_code_for_the_script_of_the_job(tmp_path, monkeypatch, error, code, is_ours):
    """launch/train.sh reads it. A rank that is stopped before it has the lock has another cause."""
    file = tmp_path / "code"
    file.touch()
    for name in (file, tmp_path / "on another node"):
        monkeypatch.setenv("DIT_EXIT_CODE_FILE", str(name))
        with pytest.raises(type(error)), ExitRecord(tmp_path / "run", 1, lambda: is_ours):
            raise error
    assert file.read_text() == ("" if is_ours else code)
    assert not (tmp_path / "on another node").exists()


def test_a_pipe_among_the_records_does_not_hang(tmp_path):
    os.mkfifo(tmp_path / "exit.rank7.json")
    assert end_with(tmp_path, DataError("shard")) == 3
    assert read_outcome(tmp_path).reason == "data"


def _fail_together(run_dirs, rank, barrier):
    reason = "data" if rank == 5 else "peer_lost"
    outcome = Outcome(code=3 if rank == 5 else 70, reason=reason, step=1, rank=rank, time=float(rank))
    for run_dir in run_dirs:
        barrier.wait()
        write_outcome(run_dir, outcome)


def test_ranks_failing_at_the_same_moment_agree(tmp_path):
    """Eight processes write at once, ten times: the cause is never overwritten."""
    context, run_dirs = multiprocessing.get_context("fork"), [tmp_path / str(attempt) for attempt in range(10)]
    barrier = context.Barrier(8)
    ranks = [context.Process(target=_fail_together, args=(run_dirs, rank, barrier)) for rank in range(8)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
        assert process.exitcode == 0
    for run_dir in run_dirs:
        assert read_outcome(run_dir).rank == 5
        assert not list(run_dir.glob("*.part"))


def test_a_full_disk_does_not_hide_the_error(tmp_path, monkeypatch, caplog, capsys):
    """The record is printed to stderr, and the original error is raised."""

    def full(*args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    for call in ("write", "fsync", "rename"):
        with monkeypatch.context() as patched, caplog.at_level(logging.ERROR):
            patched.setattr(os, call, full)
            assert end_with(tmp_path, NotFiniteError("loss=nan")) == 4
        assert "No space left" in caplog.text
        assert '"reason": "not_finite"' in capsys.readouterr().err
        assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        (RuntimeError(GLOO_CLOSED), True),
        (RuntimeError("Timed out waiting 6000ms for recv operation to complete"), True),
        (nccl_error("remote process exited or there was a network error"), True),
        (nccl_error("unhandled system error\nConnection refused"), True),
        (nccl_error("unhandled system error\nError while creating shared memory segment: No space left"), False),
        (nccl_error("invalid usage\nDuplicate GPU detected : rank 1 and rank 0 both on CUDA device 1b000"), False),
        (nccl_error("unhandled cuda error\nCuda failure 2 'out of memory'"), False),
        (ConnectionResetError("peer"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (DataError("connection reset while reading the shard"), False),
        (ValueError("broken pipe"), False),
        (KeyboardInterrupt(), False),
    ],
)
def test_only_communication_errors_count_as_lost_peers(error, lost):
    assert is_peer_lost(error) == lost


def test_one_rank_loses_no_peer(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert not is_peer_lost(ConnectionResetError("the server of a download"))


def test_a_lost_gloo_peer_is_recognised(tmp_path):
    """On the rank whose peer was killed, the error is recognised as a consequence."""
    torch = pytest.importorskip("torch")
    ranks = [FORKS.Process(target=_lose_a_peer, args=(str(tmp_path), rank)) for rank in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(60)
    assert torch.distributed.is_available()
    outcome = read_outcome(tmp_path / "run")
    assert (outcome.reason, outcome.rank, outcome.code) == ("peer_lost", 0, 70)


def _lose_a_peer(folder, rank):
    import torch

    os.environ["WORLD_SIZE"] = "2"  # as torchrun
    store = torch.distributed.FileStore(f"{folder}/store", 2)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=2)
    torch.distributed.all_reduce(torch.ones(1))
    if rank == 1:
        os._exit(1)
    with ExitRecord(f"{folder}/run", rank):
        torch.distributed.all_reduce(torch.ones(1))
