"""Steps whose loss or gradient norm is not finite or spikes: they make no update on any rank, and are reported.

    training.on_bad_numbers   parameters, optimizer, average   step                data
    stop                      unchanged; the run ends          not counted         as in the last checkpoint
    skip                      unchanged                        counted             continue
    rewind                    from the last checkpoint         of the checkpoint   continue; those since then are lost

Power-function averages change in every step that is counted (`dit.optimizer.ema`).

Source of `rewind`: Chowdhery et al. 2022, arXiv:2204.02311, section 5.1 (PaLM restarted 100 steps before a spike, and
skipped the batches around it).
"""

import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch

from dit.backends.process_groups import ProcessGroups, gather_objects
from dit.batch import PackedBatch
from dit.checkpoint.checkpointer import Checkpointer
from dit.checkpoint.train_state import TrainState
from dit.durable_files import strict_json, write_record
from dit.errors import NotFiniteError, first_few
from dit.monitoring.expert_load import expert_layers
from dit.monitoring.run_log import RunLog
from dit.run_config import RunConfig
from dit.safe_files import make_folder
from dit.step.train_step import Step
from dit.step_checks.first_bad_tensor import Probe, find_first
from dit.step_checks.spikes import PERIOD, Bad, NumberGuard

FOLDER = "bad_steps"
NUM_NAMES = 8
"""Ranks and samples that a message lists."""
NUM_KEYS = 64
"""Samples of each rank that an incident lists."""


class BadSteps:
    """Judges the steps of a run, and handles bad ones according to `training.on_bad_numbers`."""

    def __init__(self, config: RunConfig, state: TrainState, groups: ProcessGroups) -> None:
        training = config.training
        self.config, self.state, self.groups = config, state, groups
        self.guard = NumberGuard(training.spike_threshold, training.max_bad_steps)
        self.skipped = 0
        self._loads = [layer.load for chunk in state.chunks for _, layer in expert_layers(chunk)]

    def state_dict(self) -> dict[str, Any]:
        """Return the entries of a checkpoint's metadata."""
        return {"guard": self.guard.state_dict(), "skipped_updates": self.skipped}

    def load_state_dict(self, metadata: Mapping[str, Any]) -> None:
        """Restore the entries of `state_dict`, which imported weights do not have."""
        self.guard.load_state_dict(metadata.get("guard", {}))
        self.skipped = int(metadata.get("skipped_updates", 0))

    def begin_step(self) -> None:
        """Store the logged counts before a step; the first step with another loss starts a new history."""
        if self.state.step in self.config.loss_changes:
            self.guard.clear_history()
        self.mark_counts()

    def mark_counts(self) -> None:
        for load in self._loads:
            load.begin_step()

    def drop_counts(self, steps: int = 1) -> None:
        """Discard the counts of the newest step, which makes no update, or of the newest two."""
        for load in self._loads:
            load.drop_step(steps)

    def judge(
        self, step: Step, batches: Sequence[PackedBatch], keys: Sequence[str], log: RunLog
    ) -> Literal["update", "skip", "rewind"]:
        """Return the use of a step's gradients; a bad step is computed again and recorded. Every rank calls this."""
        bad = self.guard.judge(step.number, step.loss, step.grad_norm)
        if bad is None:
            return "update"
        scale = self.state.loss_scale
        if step.overflowed and scale is not None and math.isfinite(step.loss):
            bad = replace(bad, reason=f"{bad.reason} {scale.exhausted()}")
        policy = self.config.training.on_bad_numbers
        model, state = self.config.model, self.state
        probe = Probe(state, self.config.objective, (model.token_channels, model.in_channels))
        compiled = self.config.training.kernels == "compile"
        # The hooks of the probe would cause a recompilation, or would not run.
        with torch.compiler.set_stance("force_eager") if compiled else nullcontext():
            first, report = find_first(probe, step.forward_step, batches, step.sums)
        if compiled:
            report["repeats"] = None  # the eager computation rounds differently
        is_finite = math.isfinite(step.sums[:-1].sum().item())
        gathered = gather_objects((is_finite, list(keys)[:NUM_KEYS] if is_finite else list(keys)))
        of_ranks = {rank: samples for rank, (_, samples) in enumerate(gathered)}
        suspects = {rank: samples for rank, samples in of_ranks.items() if not gathered[rank][0]}
        self.guard.note_bad(bad.step)
        ends = policy == "stop" or self.guard.too_many()
        where = self._where(bad, report, str(first) if first is not None else None)
        details: dict[str, Any] = {
            "reason": bad.reason,
            "loss": bad.loss,
            "grad_norm": bad.grad_norm,
            "ranks": sorted(suspects),
            "samples": {str(rank): samples[:NUM_KEYS] for rank, samples in (suspects or of_ranks).items()},
            "began": where,
        }
        self._write(bad.step, {"step": bad.step, **details, **report})
        log.incident(bad.kind, bad.step, **details, action="stop" if ends else policy)
        if policy != "stop" and not ends:
            log.message(f"step {bad.step}: {bad.reason}; {where}; {_CONSEQUENCE[policy]}")
            self.skipped += policy == "skip"
            return policy
        if policy != "stop":
            limit = f"{self.guard.max_bad} in {PERIOD} steps"
            where += f"; more bad steps than training.max_bad_steps allows ({limit})"
        raise NotFiniteError(
            f"step {bad.step}: {bad.reason}; the update was not applied; {where}. {suspicion(suspects)}; "
            "resume from the last checkpoint with a lower optimizer.lr or optimizer.clip_grad, or a longer "
            "schedule.warmup_steps, or training.on_bad_numbers=skip or rewind"
        )

    def go_back(self, bad_step: int, checkpointer: Checkpointer, log: RunLog, keys: Sequence[str]) -> None:
        """Load the last checkpoint, except for the position of the data, and record the number of skipped steps."""
        for load in self._loads:
            load.take(torch.device("cpu"))  # the log line before the checkpoint has its counts
        metadata = checkpointer.rewind(self.state)
        if metadata is None:
            raise NotFiniteError(
                f"step {bad_step} has bad numbers and training.on_bad_numbers=rewind, but there is no valid checkpoint "
                "to go back to; start again with a shorter checkpoint.interval, or with training.on_bad_numbers=skip"
            )
        self.guard.load_state_dict({**metadata.get("guard", {}), "bad_steps": self.guard.bad_steps})
        steps = bad_step - self.state.step
        log.message(f"step {bad_step}: back to step {self.state.step}; the data of {steps} steps are skipped")
        to_step = self.state.step
        log.incident("rewind", bad_step, to_step=to_step, steps_left_out=steps, last_samples=list(keys)[-NUM_KEYS:])

    @staticmethod
    def _where(bad: Bad, report: dict[str, Any], first: str | None) -> str:
        if first is not None:
            return f"the first number that is not finite is {first}"
        if bad.kind == "spike" and report["repeats"] is not False:
            rank, (key, loss) = max(
                ((rank, worst[0]) for rank, worst in report["worst_samples"].items()), key=lambda item: item[1][1]
            )
            return f"a second computation gives the same; the largest loss is {loss:.6g} of sample {key} on rank {rank}"
        if report["repeats"] is False:
            cause = " and the losses differ from the first: "
        else:
            cause = ": the sum of the gradients over ranks, or its norm, overflows, or "
        return f"in a second computation, all numbers of the step are finite{cause}suspect a fault of the machine"

    def _write(self, step: int, report: dict[str, Any]) -> None:
        if self.groups.rank == 0:
            folder = make_folder(Path(self.config.training.run_dir) / FOLDER)
            write_record(folder / f"step_{step:07d}.json", strict_json(report, indent=1))


_CONSEQUENCE = {
    "skip": "the update is skipped",
    "rewind": "the run returns to its last checkpoint and skips the data since then",
}


def suspicion(suspects: Mapping[int, Sequence[str]]) -> str:
    """Return a sentence about the ranks and samples with a non-finite loss."""
    if not suspects:
        return "Each rank's own loss is finite"
    # Ranks that share a model (tensor, pipeline, context parallel) read the same samples.
    keys = list(dict.fromkeys(key for keys in suspects.values() for key in keys))
    ranks = first_few([str(rank) for rank in sorted(suspects)], NUM_NAMES)
    return (
        f"The loss of rank {ranks} is not finite, on the samples {first_few(keys, NUM_NAMES)}; look at these samples; "
        "if they are valid"
    )
