"""The training program of one rank, for a trace: build the model and its optimizer, and run `train_step`."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Optional

import torch
from torch import Tensor, nn

from dit.backends.device import local_device
from dit.backends.process_groups import ProcessGroups
from dit.batch import PackedBatch
from dit.context_parallel.shard_batch import shard
from dit.models.base import Backbone, Stage
from dit.optimizer.model_state import ModelState, build_model_state
from dit.optimizer.step_numbers import StepNumbers
from dit.parallel.build import TracedBuild, build_model, wrap
from dit.parallel.fsdp import gathered_bytes
from dit.parallel.implementations import target_of
from dit.patches import replaced
from dit.planner.job import Job, steady_state
from dit.step.device_batches import PackCopy
from dit.step.forward_step import ForwardStep, noise_kernel, training_forward_step
from dit.step.schedule import Logs
from dit.step.train_step import Action, Compute, Part, Step, StepFunctions, StepObserver, train_step
from dit.tracing.counter import PHASES, STATE, StepCounter, StepTrace, combined
from dit.tracing.packs import batch_of


class Phases(StepObserver):
    """Reports the ends of a step's phases to the counter.

    Args:
        marked: indices of forward-step calls.

    Attributes:
        marks: counts before each of these calls.
        forwards: counts of the forward pass of each of these calls, times the number of model chunks.
    """

    def __init__(self, counter: StepCounter, num_chunks: int, marked: Sequence[int]) -> None:
        self.counter, self.num_chunks, self.marked = counter, num_chunks, marked
        self.marks: dict[int, StepTrace] = {}
        self.forwards: dict[int, StepTrace] = {}
        self._before_update = counter.trace
        self._calls = itertools.count()

    def enter(self, part: Part) -> None:
        counter = self.counter
        counter.enter(part)
        if part == "numbers":
            counter.phase(PHASES[1])
            self._before_update = counter.trace.copy()
        elif part == "update":
            counter.phase(PHASES[2])
        elif part == "end":
            counter.phase(PHASES[3])
            counter.trace.parts["update"] = counter.trace.since(self._before_update)

    def compute(self, compute: Compute, batches: Iterator[PackedBatch]) -> Logs:
        """Compute the gradients; returns no logs, because a plan does not count the sums of a few numbers."""
        compute(batches)
        return []

    def judge(self, step: Step) -> Action:
        """Read the numbers of the step, as a run does."""
        assert step.numbers.host.grad_norm > 0
        return "update"

    def marking(self, forward_step: ForwardStep) -> ForwardStep:
        """Return a forward step that adds the counts of marked calls."""

        def marked(batches: Iterator[PackedBatch], network: nn.Module) -> Any:
            counter, call = self.counter, next(self._calls)
            if call not in self.marked:
                return forward_step(batches, network)
            before = self.marks[call] = counter.trace.copy()
            output = forward_step(batches, network)
            self.forwards[call] = combined([counter.trace.since(before)], [self.num_chunks])
            return output

        return marked


class Program:
    """Builds the model of a job on one rank and runs its steps.

    Args:
        late: read the numbers of a step in the next one, like most steps of a run.
    """

    def __init__(self, job: Job, groups: ProcessGroups, counter: StepCounter, *, late: bool = False) -> None:
        self.job, self.groups, self.counter, self.late = job, groups, counter, late
        self._previous: Optional[Step] = None
        self._copy = PackCopy(local_device())
        self._packs = itertools.cycle(job.packs or [job.pack])

    def run(self) -> StepTrace:
        """Build the model, its optimizer and the optimizer's state, and trace a step."""
        job, training, counter = self.job, self.job.training, self.counter

        def build(stages: Optional[Sequence[Stage]]) -> list[Backbone]:
            # A compiler's fusions are not known in advance, so a plan counts the eager layer.
            kernels = "eager" if training.kernels == "compile" else training.kernels
            eager_settings = replace(training, attention="auto", linears="auto", kernels=kernels, fp8=None)
            traced = TracedBuild(stages, job.kernels)
            auxiliary = job.objective.auxiliary
            return build_model(job.model, job.parallel, eager_settings, self.groups, auxiliary=auxiliary, traced=traced)

        chunks = build(job.stages)
        if self.groups.pp.size() > 1:
            counter.received_shape = self._between_stages(build)
        target = target_of(job.model, training.precision, job.kernels)
        with replaced(Tensor, is_meta=property(lambda _: False)):  # Megatron-FSDP would initialise meta tensors
            wrapped = wrap(chunks, job.parallel, self.groups, target, training.kernels)
        weights = counter.live
        decay = None if training.ema_offload else training.ema_decay
        # The traced step stands for most steps of a run, in which the average is interpolated.
        traced = replace(training, cuda_graph=False, ema_decay=decay, ema_start_step=0)
        self.state = build_model_state(chunks, wrapped, job.optimizer, job.parallel, traced, self.groups, target)
        self.mix = noise_kernel(job.model, training, job.kernels)
        self._create_optimizer_state(self.state)
        ema, scale = self.state.ema, self.state.loss_scale
        average = 0 if ema is None else sum(value.nbytes for values in ema.by_slot.values() for value in values)
        if job.optimizer.offload:
            counter.live -= sum(master.slot(name).nbytes for master in self.state.shards for name in master.slots)
        optimizer_state = counter.live - weights - average - gathered_bytes(wrapped)
        self._state_bytes = dict(zip(STATE, (weights, optimizer_state, average)))
        if scale is not None:
            scale.tokens = 1  # the traced step is not the first of its run
        return self._trace()

    def _trace(self) -> StepTrace:
        """Trace a step; one of its micro-batches stands for those that are not traced."""
        job, counter = self.job, self.counter
        steady = steady_state(job.parallel, self.groups.pp.rank(), job.world_size)
        if job.fills_caches:
            self._step(steady.unit)
        if not job.micro_batches:
            return StepTrace()
        traced = job.micro_batches if job.in_full else min(job.micro_batches, steady.micro_batches)
        counter.begin()
        counter.trace.state_bytes = self._state_bytes
        phases = self._step(traced, steady.calls)
        step, calls = counter.trace, [call for call in steady.calls if call in phases.forwards]
        if calls:
            step.parts["forward"] = phases.forwards[calls[-1]]
        if len(calls) < len(steady.calls):  # too few micro-batches to fill the pipeline
            return step
        unit = phases.marks[calls[1]].since(phases.marks[calls[0]])
        parts = {**step.parts, "micro-batch": combined([unit], [1 / steady.unit])}
        missing = (job.micro_batches - traced) / steady.unit
        counts = replace(step, parts={})
        total = combined([counts, unit], [1, missing])
        return replace(total, state_bytes=step.state_bytes, peak_bytes=step.peak_bytes, parts=parts)

    def _create_optimizer_state(self, state: ModelState) -> None:
        """Run an update without a step, in which the optimizer creates its state."""
        for chunk in state.wrapped:
            chunk.zero_grad_buffer()
            if self.job.parallel.data_parallel == "fsdp":
                chunk.finish_grad_sync()  # shows the optimizer the local gradients
        state.update(StepNumbers(state.optimizer, self.groups, torch.zeros(2, device=local_device()), 1), 1)
        state.update.end(1, is_good=True)

    @torch.no_grad()
    def _between_stages(self, build: Callable[[Sequence[Stage]], list[Backbone]]) -> list[int]:
        """Return the shape of activations sent between pipeline stages: that of the first layer's output."""
        (first,) = build([Stage(range(1), first=True, last=False)])
        batch = self._batch()
        time_S = torch.zeros(batch.layout.num_samples)
        return list(first(batch.latents_TC, time_S, batch).shape)

    def _step(self, micro_batches: int, marked: Sequence[int] = ()) -> Phases:
        """Run the optimizer step of training."""
        job, counter, wrapped = self.job, self.counter, self.state.wrapped
        phases = Phases(counter, len(wrapped), marked)

        def forward_step(step: int) -> ForwardStep:
            # All steps of a trace drop the same conditions, so that it does not depend on `fills_caches`.
            number = step if self.late else 1
            return phases.marking(training_forward_step(job.objective, job.model, job.training.seed, number, self.mix))

        def finalize(*args: Any, **kwargs: Any) -> None:
            counter.phase(PHASES[0])
            exchange(*args, **kwargs)

        counter.peak = counter.live
        exchange = wrapped[0].config.finalize_model_grads_func
        rates = job.optimizer.lr, job.optimizer.beta1
        functions = StepFunctions(job.objective, forward_step, lambda _: rates, micro_batches)
        batches = (self._batch() for _ in range(micro_batches))
        with replaced(wrapped[0].config, finalize_model_grads_func=finalize):
            step = train_step(self.state, batches, functions, phases, self._previous, late=self.late)
        self._previous = step if step.is_pending else None
        return phases

    def _batch(self) -> PackedBatch:
        """Return a micro-batch with this rank's tokens on the device."""
        job, cp, counter = self.job, self.groups.cp, self.counter
        counter.enter("load")
        pack = job.objective.of_full_pack(batch_of(job.model, next(self._packs), job.objective.conditions))
        batch = self._copy(shard(pack, cp.rank(), cp.size(), job.parallel.context_split))
        counter.enter("forward and backward")
        return batch
