"""Reports of rank 0: the records in the run folder, their mirrors, and the console."""

import logging as log
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Optional

import yaml

from dit.checkpoint.records import CONFIG_FILE
from dit.checkpoint.run_identity import RUN_FILE
from dit.checkpoint.train_state import TrainState
from dit.config_record import trust_prefix
from dit.durable_files import write_record
from dit.monitoring.dropped import DropReport
from dit.monitoring.environment_record import ENV_FILE, append_attempt, environment_record
from dit.monitoring.headline import headline
from dit.monitoring.progress import ConsoleProgress
from dit.monitoring.sinks import (
    METRICS_FILE,
    FanOut,
    JsonlSink,
    Sink,
    TensorBoardSink,
    read_records,
    scalars_by_step,
)
from dit.monitoring.summary import drawing_command, exporting_command, how_it_went
from dit.monitoring.wandb_sink import WandbSink, has_wandb_key
from dit.parallel.dims import ParallelDims
from dit.parallel.implementations import implementations
from dit.run_config import RunConfig

logger = log.getLogger(__name__)


class RunLog:
    """The log of a run; ranks without sinks report nothing."""

    def __init__(self, sinks: Optional[Sink] = None, progress: Optional[ConsoleProgress] = None) -> None:
        self._sinks, self._progress = sinks, progress
        self.drops = DropReport()

    @property
    def is_silent(self) -> bool:
        """Whether this rank does not report."""
        return self._sinks is None

    def start(self, step: int) -> None:
        """Record that this attempt begins after `step`, and start the clock of the console."""
        if self._sinks is not None and self._progress is not None:
            self._sinks.start(step)
            self._progress.start(step)

    def scalars(self, state: TrainState, values: Mapping[str, float]) -> None:
        """Report the numbers of a step."""
        if self._sinks is not None and self._progress is not None:
            self._sinks.scalars(state.step, values, state.consumed_samples)
            self._progress.update(state.step, values)

    def held_out(self, state: TrainState, losses: Mapping[str, float]) -> None:
        """Report the held-out losses of a step, and flush them to the disk."""
        if self._sinks is not None:
            scalars = {f"held_out/{name}": value for name, value in losses.items()}
            self._sinks.scalars(state.step, scalars, state.consumed_samples)
            self.message(f"step {state.step}: held-out loss {losses['loss']:.4f}")
            self._sinks.sync()

    def samples(self, state: TrainState, path: Path, name: str = "samples") -> None:
        """Report a file of samples."""
        if self._sinks is not None:
            self._sinks.image(name, state.step, path, "one sample per class or prompt")
            self.message(f"step {state.step}: samples {path}")

    def checkpoint(self, step: int, path: Path, held_out: Mapping[str, Any]) -> None:
        """Report a checkpoint, with the held-out loss in its manifest."""
        if self._sinks is not None:
            self._sinks.artifact(path, {"step": step, **held_out})
            self.message(f"step {step}: checkpoint {path}")

    def incident(self, name: str, step: int, **details: Any) -> None:
        """Record an incident, and flush it to the disk because the run may end next."""
        if self._sinks is not None:
            self._sinks.incident(name, step, details)
            self._sinks.sync()

    def stops(self, step: int, reason: str) -> None:
        """Report that the run stops early."""
        self.incident("signal", step, signal=reason)
        self.message(f"step {step}: stops for {reason}")

    def save_failed(self, step: int, error: str, in_a_row: int) -> None:
        """Report a checkpoint that was not written."""
        self.incident("save_failed", step, error=error, in_a_row=in_a_row)

    def copy_failed(self, step: int, error: str) -> None:
        """Report a checkpoint that was not copied to another place."""
        self.incident("copy_failed", step, error=error)

    def message(self, text: str) -> None:
        """Print a line."""
        if self._progress is not None:
            self._progress.message(text)

    def sync(self) -> None:
        """Flush all records to the disk, so that they survive a power loss."""
        if self._sinks is not None:
            self._sinks.sync()

    def summarize(
        self, config: RunConfig, state: TrainState, *, seconds: float, frames: int, text_encoder: Optional[str]
    ) -> None:
        """Print the last two lines: the result of the run, and the command that samples from it."""
        if self._progress is None:
            return
        self._progress.close()  # ends the live line
        training, run_dir = config.training, config.training.run_dir
        steps = state.step, training.num_steps
        self.message(how_it_went(Path(run_dir) / METRICS_FILE, *steps, seconds, training.stop_at_step))
        trust = trust_prefix(config.to_record())
        if config.objective.reconstructs:
            self.message(f"export it: {trust}{exporting_command(run_dir)}")
            return
        self.message(f"draw from it: {trust}{drawing_command(run_dir, frames, text_encoder, config.sampling.prompts)}")

    def close(self) -> None:
        """Stop the progress line and flush all outputs."""
        if self._progress is not None:
            self._progress.close()
        if self._sinks is not None:
            self._sinks.close()


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
            epoch_samples=config.data.epoch_samples() if logging.wandb_artifacts else None,
        )
    return mirrors
