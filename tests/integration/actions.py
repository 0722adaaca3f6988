"""What a worker process can be asked to do, and what can be made to go wrong meanwhile."""

import contextlib
import errno
import io
import os
import resource
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Optional
from unittest import mock

import torch
from torch import Tensor

from dit.errors import exit_code
from dit.models.base import ModelConfig
from dit.objectives.base import Objective
from dit.training.checkpoint import Checkpointer
from dit.training.pretrain import Run, check_settings
from dit.training.sharded_state import save_state

Fault = Callable[[], contextlib.AbstractContextManager[None]]


@dataclass(frozen=True)
class Ended:
    """How a command ended: exit code and output."""

    code: int
    out: str
    err: str


def command(main: Callable[[Sequence[str]], int], arguments: Sequence[str]) -> Ended:
    """Run the `main` of a command and catch what it prints."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(arguments)
    print(out.getvalue()[-2000:], err.getvalue()[-4000:], flush=True)
    return Ended(code, out.getvalue(), err.getvalue())


def train(arguments: Sequence[str], fault: Optional[Fault] = None) -> Ended:
    """Train as `python -m launch.train` does, with something going wrong."""
    from launch.train import main

    with contextlib.nullcontext() if fault is None else fault():
        return command(main, arguments)


def draw(arguments: Sequence[str]) -> Ended:
    """Do as `python -m launch.sample` does."""
    from launch.sample import main

    return command(main, arguments)


def import_weights(arguments: Sequence[str]) -> Ended:
    """Do as `python -m launch.import_weights` does."""
    from launch.import_weights import main

    return command(main, arguments)


def export(arguments: Sequence[str]) -> Ended:
    """Do as `python -m launch.export` does."""
    from launch.export import main

    return command(main, arguments)


def make_run(run_dir: Path, model: ModelConfig, objective: Objective, class_names: Sequence[str]) -> None:
    """Make a run folder of random weights, which were never trained."""
    from dit.convert.diffusers_format import TrainedModel
    from dit.parallel.parallelize import parameter_shapes
    from dit.training.settings import SamplingConfig
    from dit.training.whole_weights import write_imported
    from tests.parity.convert_cases import random_weights

    trained = TrainedModel(model, objective, (1, 8, 8), {}, class_names=list(class_names))
    sampling = SamplingConfig(solver="heun", num_steps=3, guidance_scale=1.5, seed=11)
    write_imported(run_dir, random_weights(parameter_shapes(model)), trained, sampling, "random")


def benchmark(arguments: Sequence[str]) -> Ended:
    """Do as `python -m benchmarks.step` does."""
    from benchmarks.step import main

    return command(main, arguments)


def sample(run_dir: Path, requests: Sequence[dict[str, Any]], **options: Any) -> tuple[dict[str, Tensor], list[Tensor]]:
    """Load a trained model and generate; return its weights and the latents of each request."""
    from dit.training.generator import load_generator

    generator = load_generator(run_dir, **options)
    weights = {name: p.detach().clone() for name, p in generator.network.named_parameters()}
    return weights, [generator.generate(**request) for request in requests]


def full_disk(arguments: Sequence[str], limits: Sequence[int]) -> list[tuple[int, str, list[str]]]:
    """Save once, then again and again while no file may grow beyond a limit (bytes), and at last without one.

    Returns:
        Of each failed save: exit code, message, and the folders that are left.
    """
    from dit.backends import process_groups

    run = open_run(arguments)
    run.step(torch.zeros(2))
    run._save()
    found = []
    for limit in limits:
        run.step(torch.zeros(2))
        with no_file_beyond(limit):
            try:
                run._save()
                code, message = 0, ""
            except Exception as error:
                code, message = exit_code(error), f"{type(error).__name__}: {error}"
        found.append((code, message, sorted(path.name for path in run.checkpointer.store.root.iterdir())))
    run._save()
    run.close()
    process_groups.destroy()
    return found


def open_run(arguments: Sequence[str]) -> Run:
    """Build a run as `pretrain` does, without its loop and logs."""
    import fiddle

    from dit.backends import process_groups
    from launch import cli
    from launch.train import resolve

    settings = fiddle.build(resolve(cli.parse(arguments))).keywords
    named = ("model", "data", "optimizer", "schedule", "parallel", "training")
    dims, spec = check_settings(*(settings[name] for name in named))
    return Run(settings, dims, spec, process_groups.initialize(settings["parallel"]), quiet=True)


@contextlib.contextmanager
def no_file_beyond(limit: int) -> Iterator[None]:
    """Let the kernel refuse to write any file of this process beyond `limit` bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@contextlib.contextmanager
def saving_fails(limit: int, rank: int) -> Iterator[None]:
    """Let no file of this rank's checkpoints grow beyond `limit` bytes."""
    original = Run._save

    def save(self: Run) -> None:
        with no_file_beyond(limit) if self.groups.rank == rank else contextlib.nullcontext():
            original(self)

    with mock.patch.object(Run, "_save", save):
        yield


@contextlib.contextmanager
def index_refused() -> Iterator[None]:
    """Let the disk be full when rank 0 writes the index of the checkpoint."""
    from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync

    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), ".metadata")
    with mock.patch.object(FileSystemWriterAsync, "finish", side_effect=full):
        yield


@contextlib.contextmanager
def terminated(step: int) -> Iterator[None]:
    """Send SIGTERM to this process inside a step."""
    original = Run.step

    def signalled(self: Run, loss_sums: Tensor) -> float:
        if self.state.step + 1 == step:
            os.kill(os.getpid(), signal.SIGTERM)
        return original(self, loss_sums)

    with mock.patch.object(Run, "step", signalled):
        yield


class _NaN:
    """An objective whose target is not a number."""

    def __init__(self, objective: Any) -> None:
        self.objective, self.loss_kind = objective, objective.loss_kind

    def prepare(self, *inputs: Any) -> Any:
        prepared = self.objective.prepare(*inputs)
        return replace(prepared, target_TC=prepared.target_TC * float("nan"))


@contextlib.contextmanager
def not_a_number(step: int, rank: int, weights: Path) -> Iterator[None]:
    """Make the loss NaN on one rank in one step, and write down the master weights that the run ends with."""
    from dit.training import pretrain

    forward_step, close = pretrain.training_forward_step, Run.close

    def poisoned(objective: Any, model: Any, seed: int, done: int) -> Any:
        bad = done + 1 == step and torch.distributed.get_rank() == rank
        return forward_step(_NaN(objective) if bad else objective, model, seed, done)

    def close_and_tell(self: Run) -> None:
        shards = self.state.shards
        whole = {f"weight.{s.name}": s.gather(s.main) for s in shards}
        if self.groups.rank == 0:
            torch.save(whole, weights)
        close(self)

    poison = mock.patch.object(pretrain, "training_forward_step", poisoned)
    with poison, mock.patch.object(Run, "close", close_and_tell):
        yield


@contextlib.contextmanager
def resaved(folder: Path) -> Iterator[None]:
    """Write what a resumed run has loaded, at once and as it holds it, into a folder."""
    original = Checkpointer.resume

    def resume(self: Checkpointer, state: Any, mode: str) -> bool:
        found = original(self, state, mode)
        assert found
        folder.mkdir(exist_ok=True)
        save_state(folder, state.shards, state.ema, state.optimizer, state.groups)
        return found

    with mock.patch.object(Checkpointer, "resume", resume):
        yield


@contextlib.contextmanager
def no_wandb() -> Iterator[None]:
    """Let Weights & Biases fail at its first scalar."""
    from dit.training.sinks import WandbSink

    with mock.patch.object(WandbSink, "scalars", side_effect=ConnectionError("the service is gone")):
        yield
