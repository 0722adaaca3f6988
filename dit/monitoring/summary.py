"""The last two lines of a run: its result, and the command that samples from it or exports it."""

import math
import shlex
from pathlib import Path
from typing import Optional

from dit.monitoring.progress import format_duration
from dit.monitoring.sinks import LOSS, as_number, read_records, scalars_by_step

HELD_OUT = "held_out/loss"


def how_it_went(metrics: Path, step: int, num_steps: int, seconds: float, stop_at_step: Optional[int] = None) -> str:
    """Return a line with the last step of a run, the duration of this attempt, and the losses.

    Args:
        metrics: the run's `metrics.jsonl`; losses of earlier attempts count up to the step of the next start.
        stop_at_step: see `TrainingConfig`.
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
        command = "a later training.stop_at_step, or none," if is_reached else "the same command"
        parts.append(f"{command} continues the run")
    return ", ".join(parts)


def exporting_command(run_dir: str) -> str:
    """Return the shell command that writes a run's weights for other programs."""
    return shlex.join(
        ["python", "-m", "launch.export", "--checkpoint", run_dir, "--format", "diffusers", "--out", f"{run_dir}_vae"]
    )


def drawing_command(run_dir: str, frames: int, text_encoder: Optional[str], prompts: Optional[list[str]]) -> str:
    """Return the shell command that samples from a run.

    Args:
        prompts: in the settings of the run; the command uses them by default.
    """
    words = ["python", "-m", "launch.sample", "--checkpoint", run_dir]
    if text_encoder is not None and not prompts:
        words += ["--prompt", "a text"]
    if frames > 1:
        words += ["--out", "samples.gif"]
    return shlex.join(words)
