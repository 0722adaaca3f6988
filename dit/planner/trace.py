"""Trace of one training step without values: computation, memory and traffic of any rank of any layout.

The model is built and trained by the real program, as one rank of a world of any size, on tensors that have shapes but
no memory. A dispatch mode counts every operation:

```
    dit.parallel.build, dit.step, Megatron-Core      the program, unchanged
       |  aten and c10d operations, after autograd
    StepCounter         counts; replaces operations that need values
       |
    meta device         shapes; small integer tables stay on the host
       |
    fake process group  sends nothing
```

Three kinds of values do not exist and are assumed. A number read by the host is 1000. A table received from another
rank equals the one that this rank would have sent. All experts receive the same number of tokens.

`Tracer` starts separate processes, because tracing changes torch.distributed, Megatron-Core's groups and caches.
"""

import contextlib
import functools
import gc
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from multiprocessing.connection import wait
from typing import Any, Optional, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from dit import philox
from dit.backends import device
from dit.backends.device import ACCELERATOR, is_started
from dit.patches import patches, replaced
from dit.philox import Words
from dit.planner.job import Job
from dit.planner.trace_cache import read_traces, write_traces
from dit.tracing.counter import META, StepCounter, StepTrace
from dit.tracing.routing import experts_evenly_full
from dit.tracing.world import fake_world, fused_attention

FEW_NUMBERS = 1 << 12
"""Draws of up to this many numbers keep their values; per-sample numbers decide which conditions are dropped."""

Result = TypeVar("Result")
Key = TypeVar("Key", bound=Hashable)


Trace = Callable[[Sequence[Job]], list[StepTrace]]
"""Returns the traces of steps."""


class Tracer:
    """Processes that trace steps. A search uses them for all layouts, whose traces share cached results of operations.

    The calling process does not change.
    """

    def __init__(self, size: int = 1) -> None:
        self.size = size

    def __enter__(self) -> "Tracer":
        # A fork has all modules imported already. CUDA and process groups do not survive a fork, so a process with
        # either starts a server without them.
        needs_server = is_started() or dist.is_initialized()
        context = multiprocessing.get_context("forkserver" if needs_server else "fork")
        if needs_server:
            context.set_forkserver_preload([__name__, "dit.planner.program"])
        self._pool = ProcessPoolExecutor(self.size, context, _begin_process)
        self._pool.submit(int).result()  # forks all processes, before this one starts threads
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def __call__(self, jobs: Sequence[Job]) -> list[StepTrace]:
        """Trace steps, one after another."""
        return self.run(trace_here, jobs)

    def run(self, function: Callable[[Job], Result], jobs: Sequence[Job]) -> list[Result]:
        """Return the results of a function of a module for each job, computed in one process."""
        return self._pool.submit(_results, function, list(jobs)).result()

    def stored(self, jobs: Sequence[Job]) -> list[StepTrace]:
        """Return the traces of steps; they are kept on disk, see `dit.planner.trace_cache`."""
        traces = read_traces(jobs)
        if traces is None:
            traces = self(jobs)
            write_traces(jobs, traces)
        return traces

    def for_each(self, function: Callable[[Key, Trace], Result], keys: Iterable[Key]) -> dict[Key, Result]:
        """Return the result of a function for each key; calls run at the same time."""
        with ThreadPoolExecutor(self.size) as threads:
            calls = {key: threads.submit(function, key, self.stored) for key in keys}
            try:
                for call in as_completed(calls.values()):
                    call.result()  # raises the first error
            except BaseException:
                threads.shutdown(wait=False, cancel_futures=True)
                self._pool.shutdown(wait=False, cancel_futures=True)  # other calls fail at their next trace
                raise
            return {key: call.result() for key, call in calls.items()}


def trace(jobs: Sequence[Job]) -> list[StepTrace]:
    """Trace steps in a new process, see `Tracer`."""
    with Tracer() as tracer:
        return tracer(jobs)


def _end_with_caller() -> None:
    caller = multiprocessing.parent_process()
    assert caller is not None
    wait([caller.sentinel])
    os._exit(0)


def _begin_process() -> None:
    """Prepare a process of `Tracer`."""
    threading.Thread(target=_end_with_caller, daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the caller reports Ctrl-C
    os.environ["DIT_DEVICE"] = "cpu"
    torch.set_num_threads(1)
    sys.modules.setdefault("wandb", None)  # type: ignore[arg-type]  # Megatron-Core imports it, which takes two seconds


def _results(function: Callable[[Job], Result], jobs: Sequence[Job]) -> list[Result]:
    """Return the results of a function for jobs in this process."""
    rank = _rank_of_process()
    if function is trace_here:
        function = rank.trace  # type: ignore[assignment]
    else:
        rank.close()
    return [function(job) for job in jobs]


def trace_here(job: Job) -> StepTrace:
    """Trace a job's step in this process, which must not use torch.distributed before and must not train afterwards."""
    with contextlib.closing(TracedRank()) as rank:
        return rank.trace(job)


class TracedRank:
    """Traces jobs as one rank of a layout after another."""

    def __init__(self) -> None:
        self._rank: Any = None
        self._groups: Any = None
        self._stack = contextlib.ExitStack()

    def close(self) -> None:
        """Release the process groups."""
        self._rank = None
        self._stack.close()
        gc.collect()
        gc.freeze()  # a trace collects garbage, which must not scan modules and cached results

    def trace(self, job: Job) -> StepTrace:
        """Trace a job's step."""
        from dit.backends import process_groups
        from dit.planner import muon
        from dit.planner.program import Program

        if self._rank != (job.rank, job.world_size, job.parallel):
            self.close()
            self._rank = job.rank, job.world_size, job.parallel
            self._stack.enter_context(fake_world(job.rank, job.world_size))
            self._groups = process_groups.initialize(job.parallel)
            self._stack.callback(process_groups.release)
        program = Program(job, self._groups, StepCounter(self._groups))
        norms = fused_rms_norm() if job.kernels == ACCELERATOR else contextlib.nullcontext()
        counter = program.counter
        with (
            experts_evenly_full(),
            _without_values(),
            norms,
            _local_shards(),
            _watching_resizes(counter),
            _numbers_without_values(),
            fused_attention(),
        ):
            with counter:
                step = program.run()
            update = program.state.update
            if job.micro_batches and update.muon is not None:
                muon.average(step, update.muon, update.shards, self._groups)
        return step


@functools.cache
def _rank_of_process() -> TracedRank:
    return TracedRank()


@patches(
    "torch 2.11-2.14",
    "nn/modules/module.py: Module.to",
    why="Megatron-FSDP moves the model to the device, and it is on the meta device",
)
@contextlib.contextmanager
def _without_values() -> Iterator[None]:
    """Patch the places that need tensor values.

    A step reads its numbers from an asynchronous copy; without values this would count as a wait.
    """
    with (
        # A good step, in fp16 without an overflow.
        replaced(device, begin_copy_to_host=lambda values: [1.0, 1.0, 1.0, 1.0, 1.0, 0.0, 1.0][: len(values)].copy),
        replaced(nn.Module, to=lambda module, *_, **__: module),
    ):
        yield


def _numbers_without_values() -> contextlib.AbstractContextManager[None]:
    """Replace large random draws by tensors without values: drawing numbers for all tokens takes seconds."""
    original = philox.ten_rounds

    def ten_rounds(counter: Words, key: tuple[int | Tensor, int | Tensor]) -> Words:
        if counter[0].numel() > FEW_NUMBERS:
            with _disable_current_modes():
                c0, c1, c2, c3 = (x.to(META) for x in counter)
            counter = c0, c1, c2, c3
        return original(counter, key)

    return replaced(philox, ten_rounds=ten_rounds)


class _Shards:
    """Equal shards of a buffer, created when indexed."""

    def __init__(self, buffer: Tensor, size: int) -> None:
        self.buffer, self.length = buffer, buffer.numel() // size

    def __getitem__(self, rank: int) -> Tensor:
        return self.buffer[rank * self.length : (rank + 1) * self.length]


@patches(
    "megatron-core 0.16",
    "core/distributed/param_and_grad_buffer.py: shard_buffer",
    why="it slices the shards of all ranks, and one is used",
)
def _local_shards() -> contextlib.AbstractContextManager[None]:
    """Slice only those shards of data-parallel buffers that are used."""
    from megatron.core.distributed import param_and_grad_buffer as buffers

    return replaced(buffers, shard_buffer=_Shards)


class _FusedRMSNorm(torch.autograd.Function):
    """Shapes of torch's fused RMS norm: saves its input, weight and one number per row; no temporaries.

    Source: `_fused_rms_norm` in torch's `derivatives.yaml`.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, x.new_empty((*x.shape[:-1], 1), dtype=torch.float32))
        return torch.empty_like(x, dtype=torch.result_type(x, weight))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight)


@patches(
    "torch 2.11-2.14",
    "torch/nn/functional.py: rms_norm",
    why="torch's CPU norm saves three copies of its input, CUDA's none",
)
def fused_rms_norm(
    function: type[torch.autograd.Function] = _FusedRMSNorm,
) -> contextlib.AbstractContextManager[None]:
    """Replace RMS norms with a weight by a function that saves the tensors of CUDA's kernel."""
    original = nn.functional.rms_norm

    def rms_norm(
        input: Tensor,
        normalized_shape: Sequence[int],
        weight: Optional[Tensor] = None,
        eps: Optional[float] = None,
    ) -> Tensor:
        if weight is None:
            return original(input, list(normalized_shape), weight, eps)
        return function.apply(input, weight)

    return replaced(nn.functional, rms_norm=rms_norm)


@patches(
    "torch 2.11-2.14",
    "torch/storage.py: UntypedStorage.resize_",
    why="a dispatch mode does not see it",
)
def _watching_resizes(counter: StepCounter) -> contextlib.AbstractContextManager[None]:
    """Notify the counter when a storage is freed or reallocated without an operation (in pipelines)."""
    original = torch.UntypedStorage.resize_

    def resize_(storage: Any, size: int) -> Any:
        result = original(storage, size)
        counter.watch(storage)
        return result

    return replaced(torch.UntypedStorage, resize_=resize_)
