"""Functions that tests run in worker processes."""

import contextlib
import io
import resource
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from statistics import median
from typing import Any, Optional
from unittest.mock import patch

import torch
from torch import Tensor

from dit.errors import exit_code
from dit.models.base import ModelConfig
from dit.objectives.base import Objective
from dit.training.pretrain import Run
from tests.support import faults


@dataclass(frozen=True)
class Ended:
    """Exit code and output of a command."""

    code: int
    out: str
    err: str


def command(main: Callable[[Sequence[str]], int], arguments: Sequence[str]) -> Ended:
    """Run the `main` of a command and capture its output."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(arguments)
    print(out.getvalue()[-2000:], err.getvalue()[-4000:], flush=True)
    return Ended(code, out.getvalue(), err.getvalue())


def run(module: str, arguments: Sequence[str], fault: Optional[faults.Fault] = None) -> Ended:
    """Run the command of a module, optionally with a fault."""
    main = import_module(module).main
    with contextlib.nullcontext() if fault is None else fault():
        return command(main, arguments)


train = partial(run, "launch.train")
draw = partial(run, "launch.sample")
evaluate = partial(run, "launch.evaluate")
export = partial(run, "launch.export")
import_weights = partial(run, "launch.import_weights")
average = partial(run, "launch.average")
prepare = partial(run, "energon_data.prepare.__main__")
benchmark = partial(run, "benchmarks.step")


def make_run(run_dir: Path, model: ModelConfig, objective: Objective, class_names: Sequence[str]) -> None:
    """Make a run folder with random, untrained weights."""
    from dit.checkpoint.full_weights import write_imported
    from dit.convert.diffusers_format import TrainedModel
    from dit.parallel.build import parameter_shapes
    from dit.settings import SamplingConfig
    from tests.parity.convert_cases import random_weights

    trained = TrainedModel(model, objective, (1, 8, 8), {}, class_names=list(class_names))
    sampling = SamplingConfig(solver="heun", num_steps=3, guidance_scale=1.5, seed=11)
    write_imported(run_dir, random_weights(parameter_shapes(model)), trained, sampling, "random")


def sample(run_dir: Path, requests: Sequence[dict[str, Any]], **options: Any) -> tuple[dict[str, Tensor], list[Tensor]]:
    """Load a trained model and generate; return its weights and the latents of each request."""
    from dit.inference.generator import load_generator

    generator = load_generator(run_dir, **options)
    weights = {name: p.detach().clone() for name, p in generator.network.named_parameters()}
    return weights, [generator.generate(**request) for request in requests]


def full_disk(arguments: Sequence[str], limits: Sequence[int]) -> list[tuple[int, str, list[str]]]:
    """Save once without a file size limit, once for each limit (bytes), and once more without.

    Every failed save raises its error, also the first one.

    Returns:
        For each limit: exit code, message, and the remaining checkpoint folders.
    """
    from dit.backends import process_groups
    from dit.checkpoint import saves

    run = open_run(arguments)
    run.step(torch.zeros(2))
    run.save()
    found = []
    for limit in limits:
        run.step(torch.zeros(2))
        with faults.no_file_beyond(limit), patch.object(saves, "FAILED_SAVES_ALLOWED", 0):
            try:
                run.save()
                code, message = 0, ""
            except Exception as error:
                code, message = exit_code(error), f"{type(error).__name__}: {error}"
        found.append((code, message, sorted(path.name for path in run.checkpointer.store.root.iterdir())))
    run.save()
    run.close()
    process_groups.destroy()
    return found


def save_cost(arguments: Sequence[str], rounds: int, folder: Path) -> dict[str, float]:
    """Save synchronously and in the background, alternating.

    Returns:
        `wall` and `cpu`: the time that a background save blocks, relative to a synchronous one, the median over the
        rounds; `state_gib`: size of the saved state.
    """
    from dit.backends import process_groups
    from dit.checkpoint.checkpointer import Checkpointer
    from dit.checkpoint.saves import Saves
    from dit.checkpoint.store import CheckpointStore
    from dit.monitoring.run_log import RunLog

    run = open_run(arguments)
    saves = []
    for name, is_async in (("full", False), ("background", True)):
        config = replace(run.config.checkpoint, async_save=is_async, keep_last=1)
        store = CheckpointStore(folder / name, config)
        saves.append(Saves(Checkpointer(store, run.config), run.state, RunLog()))

    def seconds(way: Saves) -> tuple[float, float]:
        run.state.step += 1
        began = time.perf_counter(), time.process_time()
        way.save(run.state, {})
        blocked = time.perf_counter() - began[0], time.process_time() - began[1]
        way.wait()
        return blocked

    pairs = [tuple(seconds(way) for way in saves) for _ in range(1 + rounds)][1:]  # the first round warms up
    for way in saves:
        way.close()
    size = sum(path.stat().st_size for path in (folder / "full").rglob("*.safetensors"))
    run.close()
    process_groups.destroy()
    walls, cpus = ([blocked[clock] / full[clock] for full, blocked in pairs] for clock in range(2))
    return {"wall": median(walls), "cpu": median(cpus), "state_gib": size / 2**30}


def host_memory(network: Path) -> tuple[int, int]:
    """Build this rank's part of a FLUX without initial weights, and read its weights from a folder of diffusers.

    Returns:
        Bytes of the part, and the growth of the peak of the resident memory; pages of mapped files count, too.
    """
    from dit.backends import process_groups
    from dit.checkpoint.base_model import find_start
    from dit.checkpoint.diffusers_folder import read_network
    from dit.checkpoint.sharded_state import load_weights
    from dit.models.base import Backbone
    from dit.parallel.build import TracedBuild, build_model
    from dit.parallel.dims import ParallelConfig
    from dit.settings import TrainingConfig

    parallel = ParallelConfig(tensor_model_parallel_size=2, sequence_parallel=True)
    groups = process_groups.initialize(parallel)
    model = read_network(network).trained.model

    def build(model: ModelConfig) -> list[Backbone]:
        traced = TracedBuild(None, torch.device("cpu"))
        return build_model(model, parallel, TrainingConfig(precision="bf16"), groups, traced=traced)

    build(replace(model, num_joint_layers=1, num_single_layers=1, hidden_size=256, num_attention_heads=2))  # imports
    weights = find_start(str(network)).weights(model)
    torch.distributed.barrier()
    Path("/proc/self/clear_refs").write_text("5")  # reset the peak
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    chunks = build(model)
    load_weights(weights, chunks, groups)
    growth = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10
    process_groups.destroy()
    return sum(p.numel() * p.element_size() for chunk in chunks for p in chunk.parameters()), growth


def open_run(arguments: Sequence[str]) -> Run:
    """Build a run as `pretrain` does, without loop and logs."""
    from dit.backends import process_groups
    from launch import cli, config_file
    from launch.train import resolve

    config = config_file.built(resolve(cli.parse(arguments)))
    dims, spec = config.check_here()
    return Run(config, dims, spec, process_groups.initialize(config.parallel), quiet=True)


def contents(folder: Path) -> dict[str, bytes]:
    """Return the content of every file in a folder by relative path."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def state_at_start(arguments: Sequence[str], folder: Path) -> None:
    """Build a run as `pretrain` does, and save its state before the first step to a folder."""
    from benchmarks.parallel_checkpoints import save_state
    from dit.backends import process_groups

    run = open_run(arguments)
    folder.mkdir(parents=True, exist_ok=True)
    save_state(folder, run.state, run.state.ema)
    run.close()
    process_groups.destroy()
