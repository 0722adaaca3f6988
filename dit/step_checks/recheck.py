"""Faults of the machine that raise no error: compute a step twice, and compare what each rank computed, to the bit.

Noise, dropout and dropped conditions are counter-based and nothing random is left, so under `training.deterministic`
the losses and the gradients of a step repeat to the bit. Where they do not, a third time decides which were right, and
the step goes on with those: a fault that comes once changes nothing. What repeats itself with the same wrong bits,
happens in the sum over ranks, or moves numbers within a gradient without changing them cannot be seen.

The idea is that of Megatron-Core's rerun state machine, which compares losses; here the gradients of all weights are
compared, too, before they are summed over ranks, so that the rank is known.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dit.backends.process_groups import ProcessGroups
from dit.batch import PackedBatch
from dit.checkpoint.train_state import TrainState
from dit.errors import MachineError
from dit.monitoring.run_log import RunLog
from dit.step.device_batches import DeviceBatches
from dit.step.forward_step import ForwardStep
from dit.step.intervals import is_due
from dit.step.schedule import forward_backward

TIMES = 3
_WORDS = {2: torch.int16, 4: torch.int32, 8: torch.int64}

Logs = list[dict[str, Any]]


class StepGradients:
    """Computes the gradients of steps, of some of them twice.

    Args:
        state, groups: of this rank.
        micro_batches: of a step.
        interval: steps between those that are computed twice; 0 for none.
        forget: takes back what a step has counted for the log.
    """

    def __init__(
        self,
        state: TrainState,
        groups: ProcessGroups,
        micro_batches: int,
        interval: int,
        forget: Callable[[], None],
    ) -> None:
        self._state, self._groups = state, groups
        self._micro_batches, self._interval, self._forget = micro_batches, interval, forget

    def compute(self, forward_step: ForwardStep, batches: DeviceBatches, log: RunLog) -> Logs:
        """Leave the gradients of the next step in their buffers; every rank calls this.

        Args:
            batches: gives this rank's micro-batches of the step.

        Returns:
            What `forward_backward` returns.

        Raises:
            MachineError: two results on a rank differ, and a third one is neither.
        """
        step, scale = self._state.step + 1, self._state.loss_scale
        if scale is not None and scale.tokens is None:
            scale.start(batches.peek().layout.valid_tokens)
        if not is_due(step, self._interval):
            return self._once(forward_step, batches)
        marks: list[list[int]] = []
        for _ in range(TIMES):
            given: Iterator[PackedBatch] = batches
            if marks:
                self._forget()
                given = batches.again()
            with self._marked(batches.device) as mark:
                logs = self._once(forward_step, given)
            for of_micro_batch in logs:
                mark += _checksum(of_micro_batch["sums"])
            marks.append(self._of_all_ranks(mark))
            if len(marks) == 2 and marks[0] == marks[1]:
                return logs
        self._report(marks, step, log)
        return logs

    def _once(self, forward_step: ForwardStep, batches: Iterator[PackedBatch]) -> Logs:
        for chunk in self._state.wrapped:
            chunk.zero_grad_buffer()
        self._state.optimizer.zero_grad()
        return forward_backward(forward_step, batches, self._state.wrapped, self._micro_batches, self._groups)

    @staticmethod
    def _report(marks: Sequence[Sequence[int]], step: int, log: RunLog) -> None:
        """Say which ranks computed a step with several results, and whether the last one counts."""
        by_rank = list(enumerate(zip(*marks, strict=True)))
        ranks = [rank for rank, results in by_rank if len(set(results)) > 1]
        open_ranks = [rank for rank, results in by_rank if results[-1] not in results[:-1]]
        log.incident("machine_fault", step, ranks=ranks, times=TIMES, action="stop" if open_ranks else "repeat")
        if open_ranks:
            raise MachineError(
                f"step {step}: computed twice from the same data and weights, with different results, and a third time "
                f"with neither, on {_named(open_ranks)}. No update was made; resume from the last checkpoint without "
                "that machine"
            )
        log.message(
            f"step {step}: computed twice, with different results on {_named(ranks)}. The third result is one of these "
            "two, and is used; watch that machine"
        )

    def _of_all_ranks(self, mark: Tensor) -> list[int]:
        gathered = [torch.zeros_like(mark) for _ in range(self._groups.world_size)]
        dist.all_gather(gathered, mark)
        return torch.stack(gathered).tolist()

    @contextmanager
    def _marked(self, device: torch.device) -> Iterator[Tensor]:
        """Give a number, `[]`, to which the checksums of this rank's gradients of weights are added meanwhile."""
        # Megatron-FSDP's parameters are shards between steps; the original ones have the gradient.
        parameters = [getattr(p, "orig_param", p) for chunk in self._state.chunks for p in chunk.parameters()]
        mark = torch.zeros((), dtype=torch.int64, device=device)

        def adder(factor: int) -> Callable[[Tensor], None]:
            def add(gradient: Tensor) -> None:
                mark.add_(_checksum(gradient) * factor)

            return add

        # Odd factors: gradients that change places change the sum.
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        handles = [parameter.register_hook(adder(2 * i + 1)) for i, parameter in enumerate(trained)]
        try:
            yield mark
        finally:
            for handle in handles:
                handle.remove()


def _named(ranks: Sequence[int]) -> str:
    shared = "; ranks that share a model pass on what they compute: one of them is at fault" if ranks[1:] else ""
    return f"rank{'s' if ranks[1:] else ''} {', '.join(map(str, ranks))}{shared}"


def _checksum(values: Tensor) -> Tensor:
    """Return the sum of values read as integers, modulo 2^64: `[]`. Another bit of one of them changes it."""
    return values.detach().contiguous().view(_WORDS[values.element_size()]).sum(dtype=torch.int64)
