"""Trace of one training step on fake tensors: computation, memory and traffic of any rank of any layout.

The model is built and trained by the real program, as one rank of a world of any size, on tensors that have shapes but
no memory. A dispatch mode counts every operation:

```
    dit.parallel.build, dit.training.step, Megatron-Core      the program, unchanged
       |  aten and c10d operations, after autograd
    StepCounter         counts; replaces operations that need values
       |
    FakeTensorMode      shapes; small integer tables stay real
       |
    fake process group  sends nothing
```

Three kinds of values do not exist and are assumed. A number read by the host is 1000. A table received from another
rank equals the one that this rank would have sent. All experts receive the same number of tokens.

`trace` starts a separate process, because tracing changes torch.distributed, Megatron-Core's groups and caches.
"""

import contextlib
import functools
import gc
import itertools
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Optional

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dit.backends.device import ACCELERATOR, is_started
from dit.backends.process_groups import ProcessGroups
from dit.batch import PackedBatch
from dit.context_parallel.shard_batch import shard
from dit.models.base import Backbone, ModelConfig, Stage
from dit.objectives.base import Objective
from dit.parallel.dims import ParallelConfig
from dit.settings import OptimizerConfig, TrainingConfig
from dit.tracing.counter import PHASES, STATE, StepCounter, StepTrace, combined
from dit.tracing.numbers import numbers_without_values
from dit.tracing.packs import PackShape, batch_of
from dit.tracing.routing import experts_evenly_full
from dit.tracing.world import fake_world


@dataclass(frozen=True)
class Job:
    """One step of one rank to trace.

    Attributes:
        world_size, rank: size of the job, and rank to trace.
        pack: shape of every micro-batch.
        micro_batches: number of micro-batches of the step.
        stages: model chunks of this rank; None for those of its layout.
        kernels: device whose attention kernels are assumed: flash attention in half precision on an accelerator.
        in_full: trace every micro-batch; otherwise one is traced once the pipeline is full, and multiplied.
        fills_caches: run a step before the traced one, to fill caches that last for all steps. Not needed after another
            job with the same rank, model and pack in the same call of `trace`.
    """

    model: ModelConfig
    objective: Objective
    optimizer: OptimizerConfig
    parallel: ParallelConfig
    training: TrainingConfig
    pack: PackShape
    world_size: int = 1
    rank: int = 0
    micro_batches: int = 1
    stages: Optional[tuple[Stage, ...]] = None
    kernels: torch.device = ACCELERATOR
    in_full: bool = False
    fills_caches: bool = True


def trace(jobs: Sequence[Job]) -> list[StepTrace]:
    """Trace steps, one after another, in one new process; does not change this process.

    Raises:
        ConfigError: a job's settings are inconsistent.
        RuntimeError: the process ended without a result.
    """
    # A fork has all modules imported already. CUDA and process groups do not survive a fork; if this process has
    # either,
    # fork a server that has neither.
    needs_server = is_started() or dist.is_initialized()
    context: Any = multiprocessing.get_context("forkserver" if needs_server else "fork")
    if needs_server:
        context.set_forkserver_preload([__name__, "dit.parallel.build", "dit.parallel.schedule", "dit.training.step"])
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_trace_process, args=(sender, list(jobs)), daemon=True)
    child.start()
    sender.close()
    try:
        result = receiver.recv()
    except EOFError:
        result = RuntimeError("the process that traces a step ended early; see its output above")
    child.join()
    if isinstance(result, Exception):
        raise result
    return result


def _trace_process(pipe: Any, jobs: Sequence[Job]) -> None:
    """Main function of the tracing process."""
    os.environ["DIT_DEVICE"] = "cpu"
    torch.set_num_threads(1)
    sys.modules.setdefault("wandb", None)  # type: ignore[arg-type]  # Megatron-Core imports it, which takes two seconds
    gc.freeze()  # excludes existing objects from garbage collection
    try:
        pipe.send([trace_here(job) for job in jobs])
    except Exception as error:
        try:
            pipe.send(error)
        except Exception:  # it does not pickle
            pipe.send(RuntimeError(f"{type(error).__name__}: {error}"))
        raise


def trace_here(job: Job) -> StepTrace:
    """Trace a job's step in this process, which must not use torch.distributed before and must not train afterwards."""
    from dit.backends import process_groups

    norms = _fused_rms_norm() if job.kernels == ACCELERATOR else contextlib.nullcontext()
    with fake_world(job.rank, job.world_size), experts_evenly_full(), _without_values(), norms:
        groups = process_groups.initialize(job.parallel)
        try:
            counter = StepCounter(groups)
            with _watching_resizes(counter), numbers_without_values(_fake_tensors()), _fake_tensors(), counter:
                return _Program(job, groups, counter).run()
        finally:
            process_groups.release()


@functools.cache
def _fake_tensors() -> Any:
    """Return the fake tensor mode of this process, one for all traces, because the program caches tensors."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    mode = FakeTensorMode(allow_non_fake_inputs=True)
    mode.cache_enabled = False  # `FakeOpCache` is faster
    return mode


@contextlib.contextmanager
def _without_values() -> Iterator[None]:
    """Patch two places of Megatron-Core that need tensor values.

    Its FSDP moves the model to the device, which torch implements by swapping parameters and fake tensors do not
    support; they are all on the device already. It also checks with other ranks that their shards add up to a
    parameter.
    """
    from megatron.core.distributed.fsdp.src.megatron_fsdp import param_and_grad_buffer as fsdp

    move, nn.Module.to = nn.Module.to, lambda module, *_, **__: module  # type: ignore[method-assign, assignment]
    validate, fsdp.validate_uneven_dtensor = fsdp.validate_uneven_dtensor, lambda _: None
    try:
        yield
    finally:
        nn.Module.to = move  # type: ignore[method-assign]
        fsdp.validate_uneven_dtensor = validate


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


@contextlib.contextmanager
def _fused_rms_norm() -> Iterator[None]:
    """Make RMS norms save the tensors of CUDA's kernel; torch's CPU norm saves three float32 copies of its input."""
    functional = torch.nn.functional
    original = functional.rms_norm

    def rms_norm(
        input: Tensor,
        normalized_shape: Sequence[int],
        weight: Optional[Tensor] = None,
        eps: Optional[float] = None,
    ) -> Tensor:
        if weight is None:
            return original(input, list(normalized_shape), weight, eps)
        return _FusedRMSNorm.apply(input, weight)

    functional.rms_norm = rms_norm
    try:
        yield
    finally:
        functional.rms_norm = original


@contextlib.contextmanager
def _watching_resizes(counter: StepCounter) -> Iterator[None]:
    """Notify the counter when a storage is freed or reallocated without an operation (in pipelines)."""
    base = torch.UntypedStorage.__mro__[1].resize_  # type: ignore[attr-defined]

    def resize_(storage: Any, size: int) -> Any:
        result = base(storage, size)
        counter.watch(storage)
        return result

    torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        del torch.UntypedStorage.resize_


@dataclass(frozen=True)
class Steady:
    """Steady state of a rank's pipeline schedule.

    Attributes:
        unit: number of micro-batches after which the schedule repeats.
        calls: two calls of the forward step, `unit` micro-batches apart.
        micro_batches: smallest number of micro-batches that includes both calls.
    """

    unit: int
    calls: tuple[int, int]
    micro_batches: int


def steady_state(parallel: ParallelConfig, pp_rank: int, world_size: int) -> Steady:
    """Return the steady state of a rank: after the warm-up, it alternates forward and backward passes.

    The first micro-batch may gather parameters, and the last one reduces gradients; with a single rank, neither
    happens. On the first of 2 ranks (F forward, B backward), the work between the marks is the cost of one micro-batch:

        F0 | F1 B0 | F2 B1 F3 ...

    Source: the schedules of Megatron-Core 0.16.1; Narayanan et al. 2021, arXiv:2104.04473, section 2.2.
    """
    pp, chunks = parallel.pipeline_model_parallel_size, parallel.virtual_pipeline_model_parallel_size or 1
    unit, warmup = (1, pp - pp_rank - 1) if chunks == 1 else (pp, 2 * (pp - pp_rank - 1) + (chunks - 1) * pp)
    first = max(min(1, world_size - 1), warmup)
    last = first + unit * chunks
    return Steady(unit, (first, last), unit * (1 + last // (unit * chunks)))


class _Program:
    """The training program on one rank: builds the model and runs steps.

    Args:
        counter: counter to notify when a step or a phase begins.
    """

    def __init__(self, job: Job, groups: ProcessGroups, counter: StepCounter) -> None:
        self.job, self.groups, self.counter = job, groups, counter

    def run(self) -> StepTrace:
        """Build the model, its optimizer and the optimizer's state, and trace a step."""
        from dit.optimizer.ema import EMA
        from dit.optimizer.master_weights import SLOTS, master_shards
        from dit.optimizer.update import build_update
        from dit.parallel.build import TracedBuild, build_model, build_optimizer, wrap
        from dit.parallel.implementations import target_of
        from dit.training.step import noise_kernel

        job, training = self.job, self.job.training

        def build(stages: Optional[Sequence[Stage]]) -> list[Backbone]:
            # A compiler's fusions are not known in advance, so a plan counts the eager layer.
            kernels = "eager" if training.kernels == "compile" else training.kernels
            eager_settings = replace(training, attention="auto", linears="auto", kernels=kernels)
            traced = TracedBuild(stages, job.kernels)
            learns_uncertainty = job.objective.weighting is not None
            return build_model(
                job.model, job.parallel, eager_settings, self.groups, uncertainty=learns_uncertainty, traced=traced
            )

        chunks = build(job.stages)
        if self.groups.pp.size() > 1:
            self.counter.received_shape = self._between_stages(build)
        self.wrapped = wrap(chunks, job.parallel, self.groups)
        weights = self.counter.live
        self.optimizer = build_optimizer(self.wrapped, job.optimizer, job.parallel, training, self.groups)
        shards = master_shards(self.optimizer, chunks, offload=job.optimizer.offload)
        before = self.counter.live
        decay = None if training.ema_offload else training.ema_decay
        ema = None if decay is None else EMA(shards, decay)
        average = self.counter.live - before
        target = target_of(job.model, training.precision, job.kernels)
        self.mix = noise_kernel(job.model, training, job.kernels)
        self.update = build_update(self.optimizer, shards, ema, job.optimizer.clip_grad, target, training.kernels)
        self._make_optimizer_state()
        if job.optimizer.offload:
            self.counter.live -= sum(shard.slot(name).nbytes for shard in shards for name in SLOTS)
        state = dict(zip(STATE, (weights, self.counter.live - weights - average, average)))
        steady = steady_state(job.parallel, self.groups.pp.rank(), job.world_size)
        traced = job.micro_batches if job.in_full else min(job.micro_batches, steady.micro_batches)
        if job.fills_caches:
            self._step(steady.unit)
        self.counter.begin()
        self.counter.trace.state_bytes = state
        marks = self._step(traced, steady.calls)
        step = self.counter.trace
        if len(marks) < len(steady.calls):  # too few micro-batches to fill the pipeline
            return step
        unit = marks[1].since(marks[0])
        parts = {**step.parts, "micro-batch": combined([unit], [1 / steady.unit])}
        missing = (job.micro_batches - traced) / steady.unit
        total = combined([replace(step, parts={}), unit], [1, missing])
        return replace(total, state_bytes=step.state_bytes, peak_bytes=step.peak_bytes, parts=parts)

    @torch.no_grad()
    def _between_stages(self, build: Callable[[Sequence[Stage]], list[Backbone]]) -> list[int]:
        """Return the shape of activations sent between pipeline stages: that of the first layer's output."""
        (first,) = build([Stage(range(1), first=True, last=False)])
        batch = self._batch()
        time_S = torch.zeros(batch.layout.num_samples)
        return list(first(batch.latents_TC, time_S, batch).shape)

    def _make_optimizer_state(self) -> None:
        """Run an update without a step, in which the optimizer creates its state."""
        for chunk in self.wrapped:
            chunk.zero_grad_buffer()
            if self.job.parallel.data_parallel == "fsdp":
                chunk.finish_grad_sync()  # shows the optimizer the local gradients
        self._update()

    def _update(self) -> None:
        """Update the weights and their average from the gradients."""
        from dit.optimizer.master_weights import gradient_norm, set_rates
        from dit.parallel.loss_scale import loss_scale_of

        settings, counter = self.job.optimizer, self.counter
        set_rates(self.optimizer, settings.lr, settings.beta1)
        norm = gradient_norm(self.optimizer)
        scale = loss_scale_of(self.optimizer)
        if scale is not None:
            scale.settle()
        counter.phase(PHASES[2])
        self.update(norm, 1)
        counter.phase(PHASES[3])

    def _step(self, micro_batches: int, marked: Sequence[int] = ()) -> list[StepTrace]:
        """Run one optimizer step, as `dit.training.pretrain.Run.step` does.

        Args:
            marked: indices of forward-step calls.

        Returns:
            Counts before each of these calls.
        """
        from dit.parallel.schedule import forward_backward
        from dit.training.bad_steps import MeanLoss
        from dit.training.step import training_forward_step

        job, counter = self.job, self.counter
        counter.peak = counter.live
        for chunk in self.wrapped:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        forward_step = training_forward_step(job.objective, job.model, job.training.seed, 1, self.mix)
        marks: list[StepTrace] = []
        calls = itertools.count()

        def marking(*args: Any) -> Any:
            if next(calls) not in marked:
                return forward_step(*args)
            marks.append(counter.trace.copy())
            output = forward_step(*args)
            forward = counter.trace.since(marks[-1])
            counter.trace.parts["forward"] = combined([forward], [len(self.wrapped)])  # of one chunk
            return output

        def finalize(*args: Any, **kwargs: Any) -> None:
            counter.phase(PHASES[0])
            exchange(*args, **kwargs)

        batches = (self._batch() for _ in range(micro_batches))
        config = self.wrapped[0].config
        exchange, config.finalize_model_grads_func = config.finalize_model_grads_func, finalize
        forward_backward(marking, batches, self.wrapped, micro_batches, self.groups)
        config.finalize_model_grads_func = exchange
        counter.phase(PHASES[1])
        MeanLoss(torch.zeros(len(job.objective.logged) + 1), job.objective, self.groups)
        before = counter.trace.copy()
        self._update()
        counter.trace.parts["update"] = counter.trace.since(before)
        return marks

    def _batch(self) -> PackedBatch:
        """Return a micro-batch with this rank's tokens."""
        job, model = self.job, self.job.model
        batch = batch_of(model, job.pack)
        cp = self.groups.cp
        return shard(batch, cp.rank(), cp.size(), job.parallel.context_split)
