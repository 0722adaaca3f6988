"""Detection of machine faults that raise no error: compute a step twice and compare the results of every rank, bitwise.

Noise, dropout and dropped conditions are counter-based, so under `training.deterministic` the losses and gradients of a
step repeat bitwise. If they do not, a third computation decides: its result is used if it equals one of the first two,
so that a single fault changes nothing. This does not detect faults that repeat with the same bits, that happen in the
sum over ranks, or that permute values within a gradient.

Source: the rerun state machine of Megatron-Core, which compares losses. Here the gradients of all weights are compared,
too, before they are summed over ranks, so that the rank is known.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dit.backends.gradients import main_gradients
from dit.batch import PackedBatch
from dit.checkpoint.train_state import TrainState
from dit.errors import MachineError
from dit.monitoring.run_log import RunLog
from dit.patches import replaced
from dit.settings import TrainingConfig
from dit.step.device_batches import DeviceBatches
from dit.step.intervals import is_due
from dit.step.schedule import Logs
from dit.step.train_step import Compute

TIMES = 3
_WORDS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


class Recheck:
    """Computes the gradients of a step, in some steps twice.

    Args:
        forget: discards the counts of the previous computation.
    """

    def __init__(self, state: TrainState, training: TrainingConfig, forget: Callable[[], None]) -> None:
        self._state, self._interval, self._forget = state, training.recheck_interval, forget
        self._marked = self._marked_sums if training.cuda_graph else self._marked_gradients

    def compute(
        self, compute: Compute, batches: Iterator[PackedBatch], device_batches: DeviceBatches, log: RunLog
    ) -> Logs:
        """Compute the gradients of the next step; every rank calls this."""
        step = self._state.step + 1
        if not is_due(step, self._interval):
            return compute(batches)
        marks: list[list[int]] = []
        for _ in range(TIMES):
            if marks:
                self._forget()
                batches = device_batches.replay()
            with self._marked(device_batches.device) as mark:
                logs = compute(batches)
            for micro_batch in logs:
                mark += _checksum(micro_batch["sums"])
            marks.append(self._gather(mark))
            if len(marks) == 2 and marks[0] == marks[1]:
                return logs
        self._report(marks, step, log)
        return logs

    @staticmethod
    def _report(marks: Sequence[Sequence[int]], step: int, log: RunLog) -> None:
        """Log the ranks whose results differ; raise an error if the last result equals no earlier one."""
        by_rank = list(enumerate(zip(*marks, strict=True)))
        ranks = [rank for rank, results in by_rank if len(set(results)) > 1]
        open_ranks = [rank for rank, results in by_rank if results[-1] not in results[:-1]]
        log.incident("machine_fault", step, ranks=ranks, times=TIMES, action="stop" if open_ranks else "repeat")
        if open_ranks:
            raise MachineError(
                f"step {step}: two computations from the same data and weights gave different results, and a third "
                f"one neither of them, on {_named(open_ranks)}. No update was made; resume from the last checkpoint "
                "without that machine"
            )
        log.message(
            f"step {step}: two computations gave different results on {_named(ranks)}. A third one equals one of "
            "them and is used; watch that machine"
        )

    def _gather(self, mark: Tensor) -> list[int]:
        gathered = [torch.zeros_like(mark) for _ in range(self._state.groups.world_size)]
        dist.all_gather(gathered, mark)
        return torch.stack(gathered).tolist()

    @contextmanager
    def _marked_sums(self, device: torch.device) -> Iterator[Tensor]:
        """Yield a number, `[]`, to which the checksums of the main gradients are added before ranks reduce them.

        The replay of a CUDA graph runs no hooks.
        """
        config, mark = self._state.wrapped[0].config, torch.zeros((), dtype=torch.int64, device=device)
        reduce = config.finalize_model_grads_func

        def add_and_reduce(*args: Any, **kwargs: Any) -> None:
            trained = (p for chunk in self._state.chunks for p in chunk.parameters() if p.requires_grad)
            for i, gradient in enumerate(main_gradients(trained)):
                mark.add_(_checksum(gradient) * _factor(i))
            reduce(*args, **kwargs)

        with replaced(config, finalize_model_grads_func=add_and_reduce):
            yield mark

    @contextmanager
    def _marked_gradients(self, device: torch.device) -> Iterator[Tensor]:
        """Yield a number, `[]`, to which the checksums of this rank's weight gradients are added in this context."""
        # Between steps, Megatron-FSDP's parameters are shards; hooks belong to the original parameters.
        parameters = [getattr(p, "orig_param", p) for chunk in self._state.chunks for p in chunk.parameters()]
        mark = torch.zeros((), dtype=torch.int64, device=device)

        def add(factor: int, gradient: Tensor) -> None:
            mark.add_(_checksum(gradient) * factor)

        with ExitStack() as hooks:
            for i, parameter in enumerate(parameter for parameter in parameters if parameter.requires_grad):
                hooks.enter_context(parameter.register_hook(partial(add, _factor(i))))
            yield mark


def _named(ranks: Sequence[int]) -> str:
    shared = "; ranks that share a model exchange their results, so one of them is at fault" if ranks[1:] else ""
    return f"rank{'s' if ranks[1:] else ''} {', '.join(map(str, ranks))}{shared}"


def _factor(i: int) -> int:
    """Return the factor of the `i`-th parameter's checksum: odd numbers, so that swapped gradients change the sum."""
    return 2 * i + 1


def _checksum(values: Tensor) -> Tensor:
    """Return the sum of the bit patterns as integers, modulo 2^64, `[]`; it changes with any single bit."""
    return values.detach().contiguous().view(_WORDS[values.element_size()]).sum(dtype=torch.int64)
