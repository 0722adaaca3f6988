"""Reports of rank 0: the records in the run folder, their mirrors, and the console."""

import logging as log
import math
import shlex
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Optional

import yaml

from dit.backends.device import describe
from dit.checkpoint.records import CONFIG_FILE
from dit.checkpoint.run_identity import RUN_FILE
from dit.checkpoint.train_state import TrainState
from dit.condition_table import CONTROL, FIRST_FRAMES
from dit.config_record import trust_prefix
from dit.durable_files import write_record
from dit.monitoring.environment_record import ENV_FILE, append_attempt, environment_record
from dit.monitoring.progress import ConsoleProgress, format_duration
from dit.monitoring.sinks import (
    LOSS,
    METRICS_FILE,
    FanOut,
    JsonlSink,
    Sink,
    TensorBoardSink,
    as_number,
    read_records,
    scalars_by_step,
)
from dit.monitoring.wandb_sink import WandbSink, has_wandb_key
from dit.parallel.dims import ParallelDims
from dit.parallel.implementations import fp8_of, implementations
from dit.run_config import RunConfig

logger = log.getLogger(__name__)

HELD_OUT = "held_out/loss"


class RunLog:
    """The log of a run; without sinks and progress, it reports nothing."""

    def __init__(self, sinks: Optional[FanOut] = None, progress: Optional[ConsoleProgress] = None) -> None:
        self._sinks, self._progress = sinks or FanOut(None, {}), progress

    @property
    def is_silent(self) -> bool:
        return self._progress is None

    def start(self, step: int) -> None:
        """Record that this attempt begins after `step`, and start the clock of the console."""
        self._sinks.each(lambda sink: sink.start(step))
        if self._progress is not None:
            self._progress.start(step)

    def scalars(self, state: TrainState, values: Mapping[str, float]) -> None:
        self._sinks.each(lambda sink: sink.scalars(state.step, values, state.consumed_samples))
        if self._progress is not None:
            self._progress.update(state.step, values)

    def held_out(self, state: TrainState, losses: Mapping[str, float]) -> None:
        """Report the held-out losses of a step, and flush them to the disk."""
        scalars = {f"held_out/{name}": value for name, value in losses.items()}
        self._sinks.each(lambda sink: sink.scalars(state.step, scalars, state.consumed_samples))
        self.message(f"step {state.step}: held-out loss {losses['loss']:.4f}")
        self.sync()

    def samples(self, state: TrainState, path: Path, name: str = "samples") -> None:
        self._sinks.each(lambda sink: sink.image(name, state.step, path, "one sample per class or prompt"))
        self.message(f"step {state.step}: samples {path}")

    def checkpoint(self, step: int, path: Path, held_out: Mapping[str, Any]) -> None:
        self._sinks.each(lambda sink: sink.artifact(path, {"step": step, **held_out}))
        self.message(f"step {step}: checkpoint {path}")

    def incident(self, name: str, step: int, **details: Any) -> None:
        """Record an incident, and flush it to the disk because the run may end next."""
        self._sinks.each(lambda sink: sink.incident(name, step, details))
        self.sync()

    def stops(self, step: int, reason: str) -> None:
        self.incident("signal", step, signal=reason)
        self.message(f"step {step}: stops for {reason}")

    def message(self, text: str) -> None:
        if self._progress is not None:
            self._progress.message(text)

    def sync(self) -> None:
        """Flush all records to the disk, so that they survive a power loss."""
        self._sinks.each(lambda sink: sink.sync())

    def summarize(
        self, config: RunConfig, state: TrainState, *, seconds: float, frames: int, text_encoder: Optional[str]
    ) -> None:
        """Print the last two lines: the result of the run, and the command that samples from it."""
        if self._progress is None:
            return
        training, run_dir = config.training, config.training.run_dir
        steps = state.step, training.num_steps
        self.message(how_it_went(Path(run_dir) / METRICS_FILE, *steps, seconds, training.stop_at_step))
        trust = trust_prefix(config.to_record())
        if config.objective.reconstructs:
            export = ("launch.export", "--checkpoint", run_dir, "--format", "diffusers", "--out", f"{run_dir}_vae")
            self.message(f"export it: {trust}{shlex.join(['python', '-m', *export])}")
            return
        pictures = [] if config.data.references_setting() is None else ["--reference"]
        for option, condition in (("--control", CONTROL), ("--first-frame", FIRST_FRAMES)):
            pictures += [option] if config.model.condition(condition.name) is not None else []
        times, prompts = config.objective.trained_times, config.sampling.prompts
        command = drawing_command(run_dir, frames, text_encoder, prompts, pictures, times)
        self.message(f"draw from it: {trust}{command}")

    def close(self) -> None:
        self._sinks.each(lambda sink: sink.close())


def open_log(config: RunConfig, dims: ParallelDims, state: TrainState, *, resumed: bool) -> RunLog:
    """Write the records of the run into its folder, open its sinks, and print its first line (rank 0 only)."""
    training, run_dir, record = config.training, Path(config.training.run_dir), config.to_record()
    run_dir.mkdir(parents=True, exist_ok=True)
    write_record(run_dir / RUN_FILE, f"{state.run}\n")
    write_record(run_dir / CONFIG_FILE, yaml.safe_dump(record, sort_keys=False))
    environment = environment_record(state.groups.world_size, implementations(config.model, training))
    append_attempt(run_dir / ENV_FILE, {**environment, "micro_batch_size": dims.micro_batch_size})
    sinks = FanOut(JsonlSink(run_dir / METRICS_FILE), mirrors_of(config, record, state.step))
    if not resumed and config.checkpoint.resume != "never":
        _warn_of_records(run_dir)
    return RunLog(sinks, ConsoleProgress(headline(config, dims, state, resumed=resumed), training.num_steps))


def _warn_of_records(run_dir: Path) -> None:
    """Log a warning if a run that starts at step 0 has records of later steps."""
    if step := max(scalars_by_step(read_records(run_dir / METRICS_FILE)), default=0):
        logger.warning(
            "%s records step %d, but the run has no checkpoint and starts at step 0; if it had one, stop this attempt, "
            "and restore or mount %s; checkpoint.resume=must refuses such a start",
            run_dir / METRICS_FILE,
            step,
            run_dir / "checkpoints",
        )


def mirrors_of(config: RunConfig, record: Mapping[str, Any], step: int) -> dict[str, Callable[[], Sink]]:
    """Return, by name, the function that builds each configured mirror after `step` steps."""
    run_dir, logging = Path(config.training.run_dir), config.logging
    mirrors: dict[str, Callable[[], Sink]] = {}
    if logging.tensorboard:
        mirrors["TensorBoard"] = lambda: TensorBoardSink(run_dir / "events", step)
    if logging.wandb or (logging.wandb is None and find_spec("wandb") is not None and has_wandb_key()):
        mirrors["wandb"] = lambda: WandbSink(
            run_dir,
            logging.wandb_project,
            record,
            name=logging.wandb_name,
            group=logging.wandb_group,
            artifacts=logging.wandb_artifacts,
        )
    return mirrors


def headline(config: RunConfig, dims: ParallelDims, state: TrainState, *, resumed: bool) -> str:
    """Return the first line of a run: model, objective, device, parallel layout."""
    parallel, training = config.parallel, config.training
    count = sum(shard.parameter.numel() for shard in state.shards)
    pp, vpp = parallel.pipeline_model_parallel_size, parallel.virtual_pipeline_model_parallel_size
    pipeline = f" x PP {pp}{f' (VPP {vpp})' if vpp else ''}" if pp > 1 else ""
    selections = implementations(config.model, training)
    context = ""
    if parallel.context_parallel_size > 1:
        context = f" x CP {parallel.context_parallel_size} ({parallel.context_comm}, {parallel.context_split})"
    ep = parallel.expert_model_parallel_size
    sharing = parallel.named_data_parallel() + (f", EP {ep}" if ep > 1 else "")
    return (
        f"{type(config.model).__name__} {count:,} parameters on rank 0 | {type(config.objective).__name__} | "
        f"{dims.world_size} x {describe()}: TP {parallel.tensor_model_parallel_size}"
        f"{'+SP' if parallel.sequence_parallel else ''}{pipeline}{context} x DP {dims.data_parallel_size} "
        f"({sharing}) | {training.precision}{fp8_of(training, selections)}, attention {selections['attention'].name} | "
        f"global batch {training.global_batch_size} | {training.run_dir}"
        + (f" | resumed at step {state.step}" if resumed else "")
        + (", the target" if state.step >= training.num_steps else "")
    )


def how_it_went(metrics: Path, step: int, num_steps: int, seconds: float, stop_at_step: Optional[int] = None) -> str:
    """Return a line with the last step of a run, the duration of this attempt, and the losses.

    Args:
        metrics: the run's `metrics.jsonl`; losses of earlier attempts count up to the step of the next start.
    """
    if step > num_steps:
        return (
            f"no step was trained, because this run has {step} steps and training.num_steps={num_steps}; give a larger "
            "number, or another training.run_dir"
        )
    steps = scalars_by_step(read_records(metrics))
    losses, held_out = (
        {n: number for n, values in steps.items() if (number := as_number(values.get(name))) is not None}
        for name in (LOSS, HELD_OUT)
    )
    held_out = {n: value for n, value in held_out.items() if not math.isnan(value)}
    ended = "finished" if step == num_steps else "stopped at"
    parts = [f"{ended} step {step} of {num_steps} after {format_duration(seconds)}"]
    if losses:
        parts.append(f"loss {losses[max(losses)]:.4f}")
    if held_out:
        best = min(held_out, key=lambda n: held_out[n])
        parts.append(f"best held-out loss {held_out[best]:.4f} at step {best}")
    if step < num_steps:
        is_reached = stop_at_step is not None and step >= stop_at_step
        change = " without this training.stop_at_step" if is_reached else ""
        parts.append(f"the same command{change} continues the run")
    return ", ".join(parts)


def drawing_command(
    run_dir: str,
    frames: int,
    text_encoder: Optional[str],
    prompts: Optional[list[str]],
    pictures: Sequence[str] = (),
    times: tuple[float, float] = (0.0, 1.0),
) -> str:
    """Return the shell command that samples from a run.

    Args:
        prompts: in the settings of the run; the command uses them by default.
        pictures: options that name a picture which the model reads.
        times: lowest and highest time of training; a model that lacks some times is one of a pair.
    """
    words = ["python", "-m", "launch.sample", "--checkpoint", run_dir if times[1] == 1 else "HIGH"]
    if times != (0, 1):
        words += ["--low-noise", "LOW" if times[1] == 1 else run_dir]
    for option in pictures:
        words += [option, "picture.png"]
    if text_encoder is not None and not prompts:
        words += ["--prompt", "a text"]
    if frames > 1:
        words += ["--out", "samples.gif"]
    return shlex.join(words)
