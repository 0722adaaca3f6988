"""Steps that must not be applied, for their loss or gradient norm is not finite or spikes: what is done and reported.

    training.on_bad_numbers   parameters, optimizer, average   step              data
    stop                      unchanged; the run ends          not counted       as in the last checkpoint
    skip                      unchanged                        counted           go on
    rewind                    those of the last checkpoint     that of these     go on: those since then are left out

Source of `rewind`: Chowdhery et al. 2022, arXiv:2204.02311, section 5.1 (PaLM restarted 100 steps before a spike, and
left out the batches around it).
"""

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

from dit.backends.device import begin_copy_to_host
from dit.backends.process_groups import ProcessGroups
from dit.batch import PackedBatch
from dit.checkpoint.checkpointer import Checkpointer
from dit.checkpoint.train_state import TrainState
from dit.durable_files import strict_json, write_record
from dit.errors import NotFiniteError
from dit.monitoring.expert_load import expert_layers
from dit.monitoring.guards import suspicion
from dit.monitoring.numbers import Bad, NumberGuard
from dit.monitoring.run_log import RunLog
from dit.objectives.base import Objective
from dit.run_config import RunConfig
from dit.safe_files import make_folder
from dit.training.culprit import Probe, find_culprit
from dit.training.step import ForwardStep, find_suspects

FOLDER = "bad_steps"
NUM_KEYS = 64  # samples of each rank in an incident


class MeanLoss:
    """The loss of a step over all ranks, on the way to the host.

    One sum over all ranks follows the backward pass on the device. The host reads the result after it has waited for
    the gradient norm, which is computed later: it does not wait again.

    Args:
        sums: of this rank in this step, what the objective logs, and the tokens; zeros where there is no loss.
    """

    def __init__(self, sums: torch.Tensor, objective: Objective, groups: ProcessGroups) -> None:
        self._summands = len(objective.terms)
        # Tensor-parallel ranks have the same sums, unless one of them is at fault: its share shows.
        reduced = sums / groups.tp.size()
        dist.all_reduce(reduced)
        self._read = begin_copy_to_host(reduced)

    def value(self) -> float:
        """Return the mean over all tokens of the step; the same on every rank."""
        *terms, tokens = self._read()
        return sum(terms[: self._summands]) / tokens if tokens else float("nan")


class BadSteps:
    """Judges the steps of a run, and acts on bad ones as `training.on_bad_numbers` says.

    Args:
        config: of the run.
        state, groups: of this rank.

    Attributes:
        guard: the judge.
        skipped: updates left out in this process.
    """

    def __init__(self, config: RunConfig, state: TrainState, groups: ProcessGroups) -> None:
        training = config.training
        self.config, self.state, self.groups = config, state, groups
        self.guard = NumberGuard(
            training.spike_threshold, training.spike_window, training.max_bad_steps, training.bad_steps_within
        )
        self.skipped = 0
        self._loads = [layer.load for chunk in state.chunks for _, layer in expert_layers(chunk)]

    def begin_step(self) -> None:
        """Remember what the log counts, before a step."""
        for load in self._loads:
            load.begin_step()

    def drop_counts(self) -> None:
        """Forget what was counted in a step that is not applied."""
        for load in self._loads:
            load.drop_step()

    def act(
        self,
        bad: Bad,
        log: RunLog,
        forward_step: ForwardStep,
        batches: Sequence[PackedBatch],
        sums: torch.Tensor,
        keys: Sequence[str],
    ) -> Literal["skip", "rewind"]:
        """Find out where the bad numbers of a step began, record it, and say what to do; every rank calls this.

        Args:
            forward_step, batches: of the step.
            sums: of this rank's losses, see `MeanLoss`.
            keys: samples of this rank in the step.

        Raises:
            NotFiniteError: the run must end, by its policy or for there were too many bad steps.
        """
        policy = self.config.training.on_bad_numbers
        model, state = self.config.model, self.state
        channels = model.token_channels, model.in_channels
        probe = Probe(state.chunks, state.wrapped, self.config.objective, channels, self.groups)
        compiled = self.config.training.kernels == "compile"
        # Compiled blocks would be compiled again around the looks, or run without them.
        with torch.compiler.set_stance("force_eager") if compiled else nullcontext():
            first, report = find_culprit(probe, forward_step, batches, sums, self.groups)
        self.drop_counts()  # of both times
        if compiled:
            report["repeats"] = None  # the second time nothing was compiled: numbers differ by rounding
        suspects = find_suspects(sums[:-1].sum().item(), keys)
        self.guard.note_bad(bad.step)
        ends = policy == "stop" or self.guard.too_many()
        where = self._where(bad, report, str(first) if first is not None else None)
        details: dict[str, Any] = {
            "reason": bad.reason,
            "loss": bad.loss,
            "grad_norm": bad.grad_norm,
            "ranks": sorted(suspects),
            "samples": {str(rank): list(named)[:NUM_KEYS] for rank, named in suspects.items()} or self._all_keys(keys),
            "began": where,
        }
        self._write(bad.step, {"step": bad.step, **details, **report})
        log.incident(bad.kind, bad.step, **details, action="stop" if ends else policy)
        if not ends:
            log.message(f"step {bad.step}: {bad.reason}; {where}; {_DONE[policy]}")
            if policy == "rewind":
                return "rewind"
            self.skipped += 1
            return "skip"
        if policy != "stop":
            limit = f"{self.guard.max_bad} in {self.guard.within} steps"
            where += f"; more bad steps than training.max_bad_steps allows ({limit})"
        where_suspect, look = suspicion(suspects)
        raise NotFiniteError(
            f"step {bad.step}: {bad.reason}; the update was not applied; {where}. {where_suspect}; {look}"
            "resume from the last checkpoint with a lower optimizer.lr or optimizer.clip_grad, or a longer "
            "schedule.warmup_steps, or training.on_bad_numbers=skip or rewind"
        )

    def go_back(self, bad_step: int, checkpointer: Checkpointer, log: RunLog, keys: Sequence[str]) -> None:
        """Load the last checkpoint, but for the position of the data; record how many steps of data are left out.

        Args:
            keys: samples that this rank read since the last log line.

        Raises:
            NotFiniteError: there is no valid checkpoint to go back to.
        """
        for load in self._loads:
            load.take(torch.device("cpu"))  # a line was logged before each checkpoint
        metadata = checkpointer.rewind(self.state)
        if metadata is None:
            raise NotFiniteError(
                f"step {bad_step} has bad numbers and training.on_bad_numbers=rewind, but there is no valid checkpoint "
                "to go back to; start again with a shorter checkpoint.interval, or with training.on_bad_numbers=skip"
            )
        self.guard.load_state_dict({**metadata.get("guard", {}), "bad_steps": self.guard.bad_steps})
        steps = bad_step - self.state.step
        log.message(f"step {bad_step}: back to step {self.state.step}; the data of {steps} steps are left out")
        to_step = self.state.step
        log.incident("rewind", bad_step, to_step=to_step, steps_left_out=steps, last_samples=list(keys)[-NUM_KEYS:])

    def _all_keys(self, keys: Sequence[str]) -> dict[str, list[str]]:
        """Return the samples of every rank, for a step in which no rank's own loss was not finite."""
        gathered: list[Any] = [None] * self.groups.world_size
        dist.all_gather_object(gathered, list(keys)[:NUM_KEYS])
        return {str(rank): named for rank, named in enumerate(gathered)}

    @staticmethod
    def _where(bad: Bad, report: dict[str, Any], first: str | None) -> str:
        if first is not None:
            return f"the first number that is not finite is {first}"
        again = ", and the losses are others than the first time" if report["repeats"] is False else ""
        if bad.kind == "spike" and report["repeats"] is not False:
            rank, (key, loss) = max(
                ((rank, worst[0]) for rank, worst in report["worst_samples"].items()), key=lambda item: item[1][1]
            )
            return f"computed again it is the same; the largest loss is {loss:.6g} of sample {key} on rank {rank}"
        either = "" if again else "the sum of the gradients over ranks, or its norm, overflows, or "
        return f"computed again, all numbers of the step are finite{again}: {either}look for a fault of the machine"

    def _write(self, step: int, report: dict[str, Any]) -> None:
        if self.groups.rank == 0:
            folder = make_folder(Path(self.config.training.run_dir) / FOLDER)
            write_record(folder / f"step_{step:07d}.json", strict_json(report, indent=1))


_DONE = {
    "skip": "the update is left out",
    "rewind": "the run goes back to its last checkpoint and leaves out the data since then",
}
