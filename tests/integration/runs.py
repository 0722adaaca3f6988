"""Small real runs: command lines, processes, and readers of their outputs."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import torch
from safetensors.torch import load_file

from dit.monitoring.sinks import read_records
from tests.integration import actions
from tests.support.ranks import Job, call
from tests.support.repository import REPOSITORY

TINY = {
    "model.hidden_size": 32,
    "model.num_layers": 2,
    "model.num_attention_heads": 2,
    "model.patch_spatial": 2,
    "optimizer.algorithm": "adamw",
    "optimizer.lr": 3e-3,
    "schedule.warmup_steps": 2,
    "training.micro_batch_size": 4,
    "training.global_batch_size": 8,
    "training.log_interval": 1,
    "training.validation_interval": 0,
    "training.sample_interval": 0,
    "logging.tensorboard": False,
    "data.background": False,
    "data.shuffle_buffer": 32,
}
"""Overrides that make a step of `letters_dit` take milliseconds; data workers would need seconds to start."""

SLOTS = ("weight", "ema", "exp_avg", "exp_avg_sq")


def overrides(run_dir: Path, **settings: Any) -> list[str]:
    """Return `key=value` words. A double underscore in a key stands for a dot; later settings override earlier ones."""
    named = {key.replace("__", "."): value for key, value in settings.items()}
    named = {"training.run_dir": run_dir, **named}
    # Replace a part before setting its fields.
    return [f"{key}={value}" for key, value in sorted(named.items(), key=lambda item: "." in item[0])]


def training(factory: str, run_dir: Path, ranks: int = 1, fault: Any = None, **settings: Any) -> Job:
    """Return a job that trains a recipe with some settings, see `overrides`."""
    words = ("--yes", "--factory", factory, *overrides(run_dir, **settings))
    return call(actions.train, *words, ranks=ranks, fault=fault)


def letters(data: Path, run_dir: Path, **settings: Any) -> list[str]:
    """Return the arguments of a tiny `letters_dit` run on a data set."""
    tiny = {key.replace(".", "__"): value for key, value in TINY.items()}
    words = overrides(run_dir, **{**tiny, "data__path": data, **settings})
    return ["--yes", "--factory", "letters_dit", *words]


def mock(run_dir: Path, **settings: Any) -> list[str]:
    """Return the arguments of a `tiny_dit` run on synthetic data, with the distributed optimizer."""
    own = {"logging__tensorboard": False, "parallel__data_parallel": "distributed_optimizer"}
    return ["--yes", "--factory", "tiny_dit", *overrides(run_dir, **{**own, **settings})]


SMALL_PACKS: dict[str, Any] = {
    "data": "energon",
    "data__num_streams": 2,
    "data__background": True,
    "data__max_tokens_per_pack": 64,
    "data__packing_buffer_size": 12,
    "data__shuffle_buffer": 10,
    "model__hidden_size": 16,
    "model__num_layers": 1,
    "model__num_attention_heads": 2,
    "training__micro_batch_size": 1,
}
"""Packs from two background streams of real shards, with a network that costs almost no time."""


def environment(**changes: str) -> dict[str, str]:
    """Return the environment of a CPU run, without variables that a launcher of the tests may have set."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("WANDB", "TORCHELASTIC"))}
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        inherited.pop(name, None)
    own = {"OMP_NUM_THREADS": "1", "DIT_DEVICE": "cpu", "PYTHONPATH": str(REPOSITORY), "WANDB_MODE": "offline"}
    return {**inherited, **own, **changes}


@contextmanager
def started(
    arguments: Sequence[str], log: Path, *, ranks: int = 0, torchrun: Sequence[str] = ()
) -> Iterator[subprocess.Popen]:
    """Start `launch.train` in a new session, under torchrun if `ranks` is positive; kill all its processes at the end.

    `torchrun` has further flags of torchrun.
    """
    command = [sys.executable, "-W", "ignore", "-m"]
    if ranks:
        command += ["torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), *torchrun, "-m"]
    with open(log, "w") as file:
        process = subprocess.Popen(
            [*command, "launch.train", *arguments],
            env=environment(),
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        kill_session(process)


def kill_session(process: subprocess.Popen) -> None:
    """Kill a process and all its descendants at once, like a machine that loses power."""
    try:
        below = psutil.Process(process.pid).children(recursive=True)  # torchrun's ranks have separate sessions
    except psutil.NoSuchProcess:
        below = []
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    for child in below:
        with suppress(psutil.NoSuchProcess):
            child.kill()
    process.wait()
    psutil.wait_procs(below, timeout=30)


def wait_for(process: subprocess.Popen, moment: Callable[[], bool], log: Path, *, timeout_s: float = 240.0) -> None:
    """Wait until `moment` returns true.

    Raises:
        RuntimeError: the process ended or the time ran out first.
    """
    deadline = time.monotonic() + timeout_s
    while not moment():
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"the moment did not come, exit code {process.returncode}:\n{log.read_text()[-4000:]}")
        time.sleep(0.001)


def steps_logged(run_dir: Path) -> int:
    """Return the newest step logged by a run, which may still be writing; 0 if there is none."""
    path = run_dir / "metrics.jsonl"
    if not path.exists():
        return 0
    return max((record["step"] for record in read_records(path) if record["kind"] == "scalars"), default=0)


def losses(run_dir: Path) -> dict[int, set[str]]:
    """Return for each step the set of losses that all attempts logged, as exact hexadecimal numbers."""
    found: dict[int, set[str]] = {}
    for record in read_records(run_dir / "metrics.jsonl"):
        if "loss_hex" in record:
            found.setdefault(record["step"], set()).add(record["loss_hex"])
    return found


def loss_values(run_dir: Path) -> list[float]:
    """Return the losses by step.

    Raises:
        AssertionError: two attempts differ in a bit.
    """
    found = losses(run_dir)
    assert all(len(values) == 1 for values in found.values()), found
    return [float.fromhex(*found[step]) for step in sorted(found)]


def scalars(run_dir: Path, name: str) -> dict[int, float]:
    """Return one scalar by step."""
    return {r["step"]: r[name] for r in read_records(run_dir / "metrics.jsonl") if name in r}


def incidents(run_dir: Path) -> list[dict[str, Any]]:
    """Return the records of bad steps, rewinds and other incidents of a run, in order."""
    return [record for record in read_records(run_dir / "metrics.jsonl") if record["kind"] == "incident"]


def outcome(run_dir: Path) -> dict[str, Any]:
    """Return the exit record."""
    return json.loads((run_dir / "exit.json").read_text())


def checkpoint(run_dir: Path, step: int) -> Path:
    return run_dir / "checkpoints" / f"iter_{step:07d}"


def checkpoints(run_dir: Path) -> list[str]:
    """Return the names of all entries in the folder of checkpoints."""
    return sorted(path.name for path in (run_dir / "checkpoints").iterdir())


def read_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Read every full tensor of a checkpoint from its index and safetensors, without any code for layouts."""
    index = json.loads((folder / "state.json").read_text())
    files = {path.name: load_file(path) for path in folder.glob("*.safetensors")}
    tensors = {}
    for name, entry in index["tensors"].items():
        tensors[name] = torch.full(entry["shape"], float("nan"))
        for file, offsets, sizes in entry["boxes"]:
            block = tuple(slice(offset, offset + size) for offset, size in zip(offsets, sizes))
            tensors[name][block] = files[file][f"{name}@{','.join(map(str, offsets))}"]
    return tensors


def assert_same_bits(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    """Check that two checkpoints have the same tensors to the bit, including signs of zeros."""
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype == torch.float32
        assert torch.equal(found[name].view(torch.int32), tensor.view(torch.int32)), name


def held_out(run_dir: Path) -> dict[int, set[float]]:
    """Return the held-out losses of each step."""
    found: dict[int, set[float]] = {}
    for record in read_records(run_dir / "metrics.jsonl"):
        if "held_out/loss" in record:
            found.setdefault(record["step"], set()).add(record["held_out/loss"])
    return found


def same(a: Any, b: Any) -> bool:
    """Compare nested containers of tensors."""
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b
