"""Copies between host and device, and waits of the host, in a training step; counted on the meta device.

The program runs unchanged as one rank whose device is `meta`. Its tensors have shapes but no values, and differ from
tensors of the host, so each copy between host and device is an operation:

    host                                  device
    page-locked tensor      ----------->  queued: the host continues
    other tensor            ----------->  a wait: the host continues when the device has finished all earlier work
    `begin_copy_to_host`    <-----------  queued; reading it is a wait, unless the host has waited since, or it was
                                          queued in an earlier step (a late read)
    `item`, `tolist`, `to`  <-----------  a wait

Other operations that wait (`nonzero`, selection by a mask) have no form for the meta device, so they raise an error.
"""

import contextlib
import functools
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Optional

import torch
import torch.distributed as dist
from torch import Tensor

from dit import layout, pack_copy
from dit.backends import device, megatron_cpu, process_groups
from dit.patches import patches, replaced
from dit.planner.job import Job
from dit.planner.program import Program
from dit.planner.trace import Tracer
from dit.tracing.counter import ANSWER, NUMBER, StepCounter
from dit.tracing.routing import experts_evenly_full
from dit.tracing.world import fake_world

META = torch.device("meta")
PHASES = ("load", "forward", "backward", "reduction", "update")
PHASE_OF_PART = {
    "load": "load",
    "forward and backward": "forward",
    "numbers": "reduction",
    "update": "update",
    "end": "update",
}
"""Phase of each part of a step. Backward passes run inside the second part, in the autograd engine."""
ROOT = Path(__file__).parents[1]
NO_CAUSE = {Path(__file__), Path(megatron_cpu.__file__)}
"""Files that only forward the calls of others."""


@functools.cache
def _own_file(name: str) -> Optional[str]:
    """Return the path of a file in this repository; None if it is elsewhere or only forwards calls."""
    path = Path(name)
    return str(path.relative_to(ROOT)) if ROOT in path.parents and path not in NO_CAUSE else None


@dataclass
class Waits:
    """Copies and waits of one rank in one step.

    Attributes:
        queued: number of copies between host and device for which the host does not wait, by phase (`PHASES`).
        lines: phase and line of the program of each wait, with the number of waits.
    """

    queued: Counter[str] = field(default_factory=Counter)
    waits: Counter[str] = field(default_factory=Counter)
    late_reads: int = 0
    lines: Counter[str] = field(default_factory=Counter)


class WaitCounter(StepCounter):
    """Counts copies and waits in the context of `meta_device`."""

    def __init__(self) -> None:
        super().__init__()
        self.result = Waits()
        self._phase = "load"
        self._pinned: set[int] = set()
        # Copies to the host; those that had finished at the last wait; those of earlier steps.
        self._copies = self._finished = self._earlier = 0

    def begin(self) -> None:
        super().begin()
        self.result, self._earlier = Waits(), self._copies

    def enter(self, part: str) -> None:
        self._phase = PHASE_OF_PART[part]

    def pin(self, values: Tensor) -> Tensor:
        """Replace `Tensor.pin_memory`: return a copy that counts as page-locked."""
        pinned = values.clone()
        self._pinned.add(pinned.untyped_storage()._cdata)
        return pinned

    def filling(self, factory: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """Wrap a factory that copies numbers from the host; dispatch modes do not see this copy."""

        def create(*args: Any, **kwargs: Any) -> Tensor:
            tensor = factory(*args, **kwargs)
            if tensor.is_meta:
                self._wait(self._copies)
            return tensor

        return create

    def begin_copy_to_host(self, values: Tensor) -> Callable[[], list[float]]:
        """Replace `dit.backends.device.begin_copy_to_host`."""
        self.result.queued[self._now()] += 1
        self._copies += 1
        copy, answers = self._copies, [float(ANSWER)] * values.numel()

        def read() -> list[float]:
            if copy > self._finished and copy > self._earlier:
                self._wait(copy)
            self.result.late_reads += copy <= self._earlier
            return answers

        return read

    def _now(self) -> str:
        in_backward = torch._C._current_graph_task_id() != -1
        return "backward" if in_backward else self._phase

    def _wait(self, copy: int) -> None:
        """Count a wait, after which the copies up to number `copy` have finished."""
        self._finished, phase = copy, self._now()
        self.result.waits[phase] += 1
        self.result.lines[f"{phase}: {self.line()}"] += 1

    @staticmethod
    def line() -> str:
        """Return the line of the program that runs."""
        frame: Any = sys._getframe(1)
        while (file := _own_file(frame.f_code.co_filename)) is None:
            frame = frame.f_back
        return f"{file}:{frame.f_lineno}"

    def _copy_to_device(self, source: Tensor, *, non_blocking: bool) -> None:
        if non_blocking and source.untyped_storage()._cdata in self._pinned:
            self.result.queued[self._now()] += 1
        else:
            self._wait(self._copies)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, func.__name__.split(".")[0]
        if func.namespace == "c10d":
            return self._communicate(func, args, kwargs, on_device=True)
        if func is NUMBER and args[0].is_meta:
            self._wait(self._copies)
            return ANSWER if not args[0].is_floating_point() else float(ANSWER)
        if name == "_to_copy":
            source, target = args[0], torch.device(kwargs.get("device") or args[0].device)
            if source.is_meta and target.type == "cpu":
                self._wait(self._copies)
                return torch.full(source.shape, ANSWER, dtype=kwargs.get("dtype") or source.dtype)
            if source.device.type == "cpu" and target.type == "meta":
                self._copy_to_device(source, non_blocking=bool(kwargs.get("non_blocking")))
        if name == "copy_" and args[0].is_meta != args[1].is_meta:
            if args[1].is_meta:
                self._wait(self._copies)
                return args[0].fill_(ANSWER)
            self._copy_to_device(args[1], non_blocking=len(args) > 2 and args[2])
        if name.startswith("_fused_adam"):
            return None  # updates in place, and is not implemented for the meta device
        return func(*args, **kwargs)


@patches(
    "torch 2.11-2.14",
    "torch/optim/optimizer.py: _get_fused_kernels_supported_devices; torch: tensor, distributed.batch_isend_irecv",
    why="the meta device represents a GPU with fused AdamW and counted copies",
)
@contextlib.contextmanager
def meta_device(counter: WaitCounter) -> Iterator[None]:
    """Make `meta` the device of this process, which does not use CUDA, and count copies and waits."""
    from torch.optim import optimizer

    fused, tensor, new_tensor = optimizer._get_fused_kernels_supported_devices, torch.tensor, Tensor.new_tensor
    with (
        replaced(optimizer, _get_fused_kernels_supported_devices=lambda: [*fused(), "meta"]),
        replaced(dist, batch_isend_irecv=lambda _: []),
        replaced(device, SUBSTITUTE=META, begin_copy_to_host=counter.begin_copy_to_host),
        replaced(layout, UNPINNED=("cpu",)),
        replaced(pack_copy, page_locked=lambda nbytes: counter.pin(torch.empty(nbytes, dtype=torch.uint8))),
        replaced(torch, tensor=counter.filling(tensor)),
        replaced(Tensor, new_tensor=counter.filling(new_tensor), pin_memory=lambda values, *_: counter.pin(values)),
        counter,
    ):
        yield


def count_waits(job: Job) -> Waits:
    """Count copies and waits of a job's step in a new process, in which no table of a pack is cached."""
    with Tracer() as tracer:
        return tracer.run(count_waits_here, [job])[0]


def count_waits_here(job: Job) -> Waits:
    """Count copies and waits of a job's step in this process; see `dit.planner.trace.trace_here`."""
    with fake_world(job.rank, job.world_size), experts_evenly_full():
        groups, counter = process_groups.initialize(job.parallel), WaitCounter()
        try:
            with meta_device(counter):
                Program(job, groups, counter, late=True).run()
        finally:
            process_groups.release()
    return counter.result
