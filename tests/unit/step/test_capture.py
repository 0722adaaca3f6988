"""On a GPU, captured passes and updates of all steps have equal operations, and do not wait."""

import itertools
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch

from benchmarks.host import wait_job
from benchmarks.waits import META, meta_device
from dit.backends import process_groups
from dit.backends.graphs import WARM_UP, Graphed, NoCopiesFromHost, UsedMemory
from dit.backends.process_groups import ProcessGroups
from dit.context_parallel.shard_batch import shard
from dit.errors import BatchError
from dit.fixed_packs import PackMaxima
from dit.kernels.graph_tables import graph_tables, table_on
from dit.optimizer.ema import EMA
from dit.optimizer.master_weights import master_shards, set_rates
from dit.optimizer.step_numbers import Limits, StepNumbers
from dit.optimizer.update import Update
from dit.parallel.dims import ParallelConfig
from dit.parallel.implementations import target_of
from dit.planner.job import Job
from dit.planner.program import Program
from dit.planner.trace import Tracer
from dit.settings import OptimizerConfig
from dit.step.cuda_graph import GraphedSchedule, passes
from dit.step.forward_step import training_forward_step
from dit.step.schedule import Logs
from dit.tracing.packs import batch_of
from dit.tracing.world import fake_world
from tests.support.device_sequence import SequenceRecorder, differences

STEPS = 3  # the packs of a job repeat after three
TP2 = ParallelConfig(tensor_model_parallel_size=2)
TP2_SP = replace(TP2, sequence_parallel=True)
ULYSSES = ParallelConfig(context_parallel_size=2, context_comm="a2a")
RING = ParallelConfig(context_parallel_size=2)


@pytest.fixture(scope="module")
def tracer() -> Iterator[Tracer]:
    """Trace the jobs of all tests in one process, which keeps the results of operations."""
    with Tracer() as tracer:
        yield tracer


def test_each_difference_is_detected() -> None:
    """The difference may be an operation, a shape, a number, or the memory that remains allocated."""
    recorder, held = SequenceRecorder(), list[torch.Tensor]()

    def step(size: int = 3, factor: float = 2.0, *, add: bool = False, keeps: bool = False) -> Any:
        recorder.begin()
        values = torch.empty(size, device="meta")
        result = values + 1 if add else values * factor
        if keeps:
            held.append(result)
        del result
        torch.empty(7, device="meta")
        return recorder.operations

    with meta_device(recorder):
        first = step()
        assert not differences(first, step())
        for change in ({"size": 4}, {"factor": 3.0}, {"add": True}, {"keeps": True}):
            assert differences(first, step(**change)), change


def built_program(job: Job, groups: ProcessGroups, recorder: SequenceRecorder) -> Program:
    """Build the model of a job and its optimizer, without a step."""
    program = Program(replace(job, micro_batches=0, fills_caches=False), groups, recorder)
    program.run()
    return program


def passes_here(job: Job) -> list[Any]:
    """Return the operations of the passes of some steps, with the copies between host and device and the waits in them.

    The device is `meta`, on which operations with data-dependent shapes raise an error.
    """
    recorded = []
    with fake_world(job.rank, job.world_size):
        groups, recorder = process_groups.initialize(job.parallel), SequenceRecorder()
        try:
            with meta_device(recorder):
                program = built_program(job, groups, recorder)
                packs, step = [program._batch(), program._batch()], torch.zeros((), dtype=torch.int64, device=META)
                forward_step = training_forward_step(job.objective, job.model, job.training.seed, 0, program.mix)
                for number in range(WARM_UP + 2):  # of the same packs
                    program.state.wrapped[0].zero_grad_buffer()
                    recorder.begin()
                    recorder.enter("forward and backward")
                    with NoCopiesFromHost() if number >= WARM_UP else nullcontext():
                        passes(replace(forward_step, step=step), packs, program.state.wrapped, groups)
                    counted = recorder.result
                    recorded.append((recorder.operations, counted.queued.total(), dict(counted.lines)))
        finally:
            process_groups.release()
    return recorded[WARM_UP:]


class RecordedRuns(Graphed):
    """Records the operations of each run instead of capturing one."""

    def __init__(self, recorder: SequenceRecorder) -> None:
        super().__init__()
        self.recorder = recorder
        self.recorded: list[Any] = []

    def __call__(self, compute: Any, *inputs: Any) -> Any:
        self.recorder.begin()
        with NoCopiesFromHost() if len(self.recorded) >= WARM_UP else nullcontext():
            result = compute(*inputs)
        counted = self.recorder.result
        self.recorded.append((list(self.recorder.operations), counted.queued.total(), dict(counted.lines)))
        return result


def updates_here(job: Job) -> list[Any]:
    """Return the operations of numbers and updates of some steps, with the copies and waits in them."""
    with fake_world(job.rank, job.world_size):
        groups, recorder = process_groups.initialize(job.parallel), SequenceRecorder()
        try:
            with meta_device(recorder):
                program = built_program(job, groups, recorder)
                optimizer, wrapped = program.state.optimizer, program.state.wrapped
                shards = master_shards(optimizer, [chunk.module for chunk in wrapped], job.optimizer)
                numbers_of, of_update = RecordedRuns(recorder), RecordedRuns(recorder)
                parts = optimizer, shards, EMA(shards, 0.9, start_step=4), job.optimizer, groups
                target = target_of(job.model, job.training.precision, job.kernels)
                update = Update(*parts, target, job.training.kernels, of_update)
                for number in range(1, WARM_UP + STEPS + 1):
                    for chunk in wrapped:
                        chunk.zero_grad_buffer()
                        chunk.zero_stale()
                    optimizer.zero_grad()
                    set_rates(optimizer, 1e-3 / number, job.optimizer.beta1)
                    sums = torch.zeros(2, device=META)
                    limits = Limits(loss=1.0 * number)
                    numbers = StepNumbers(optimizer, groups, sums, 1, limits=limits, run=numbers_of)
                    update(numbers, number)
                    update.end(number, is_good=True)
        finally:
            process_groups.release()
    return [numbers_of.recorded[WARM_UP:], of_update.recorded[WARM_UP:]]


def passes_of_packs_here(job: Job) -> list[Any]:
    """Return the operations of the passes of some steps on different packs, with the copies and waits in them."""
    recorded, maxima = [], PackMaxima(tokens=2048, samples=8, text_tokens=63)
    with fake_world(job.rank, job.world_size):
        groups, recorder = process_groups.initialize(job.parallel), SequenceRecorder()

        def recorded_passes(*arguments: Any) -> Logs:
            recorder.begin()
            recorder.enter("forward and backward")
            with NoCopiesFromHost() if recorded else nullcontext():
                logs = passes(*arguments)
            counted = recorder.result
            recorded.append((list(recorder.operations), counted.queued.total(), dict(counted.lines)))
            return logs

        try:
            with (
                meta_device(recorder),
                mock.patch("dit.step.cuda_graph.passes", recorded_passes),
                mock.patch("dit.backends.graphs.WARM_UP", 99),
            ):
                program = built_program(job, groups, recorder)
                wrapped, schedule = program.state.wrapped, GraphedSchedule()
                for number in range(WARM_UP + STEPS):
                    shapes = itertools.islice(program._packs, 2)
                    padded = [maxima.pad(batch_of(job.model, shape)) for shape in shapes]
                    packs = [program._copy(shard(batch, 0, groups.cp.size(), "contiguous")) for batch in padded]
                    wrapped[0].zero_grad_buffer()
                    step = training_forward_step(job.objective, job.model, job.training.seed, number, program.mix)
                    schedule(step, iter(packs), wrapped, 2, groups)
        finally:
            process_groups.release()
    return recorded[WARM_UP:]


def of_layout(job: Job, parallel: ParallelConfig) -> Job:
    """Return a job on the tensor-parallel and context-parallel ranks of a layout."""
    ranks = parallel.tensor_model_parallel_size * parallel.context_parallel_size
    return replace(job, parallel=parallel, world_size=ranks)


def assert_equal_steps_without_waits(recorded: list[Any], least: int) -> None:
    """Check that all steps have the operations of the first, at least `least`, and neither copies nor waits."""
    (first, *_), *others = recorded
    assert len(first) >= least
    assert others
    assert [counts for _, *counts in recorded] == [[0, {}]] * len(recorded)
    for operations, *_ in others:
        assert not differences(first, operations)


def test_a_copy_from_the_host_is_an_error_of_a_capture() -> None:
    """A replay would read the memory of the host after it was freed."""
    table, device_table = torch.arange(3), torch.zeros(3, dtype=torch.int64, device=META)
    in_a_list = lambda: torch._foreach_copy_([device_table, device_table], [device_table, table])  # noqa: E731
    for copy in (lambda: table.to(META), lambda: device_table.copy_(table), in_a_list):
        error = pytest.raises(BatchError, match=r"shape \[3\] from the host.*texts of one length")
        with UsedMemory() as used, NoCopiesFromHost(), error:
            copy()
        assert not used.storages, "CUDA would raise its own error for the copy"
    with NoCopiesFromHost():
        device_table.copy_(device_table.int())


def test_a_table_is_not_in_the_memory_of_its_graph() -> None:
    """It would get memory of a freed tensor, which an earlier kernel of each replay writes. Captures are per thread."""
    values = torch.arange(3)
    with graph_tables(), UsedMemory() as captured:
        table = table_on(values, torch.device("cpu"))
    assert not captured.storages
    assert torch.equal(table, values)


@pytest.mark.parametrize(
    ("recipe", "kernels", "parallel"),
    [
        ("tiny_dit", "eager", ParallelConfig()),
        pytest.param("tiny_dit", "triton", ParallelConfig(), marks=pytest.mark.slow),
        ("tiny_dit", "triton", TP2_SP),
        pytest.param("flux_12b", "triton", ParallelConfig(), marks=pytest.mark.slow),
        pytest.param("flux_12b", "triton", TP2_SP, marks=pytest.mark.slow),
        pytest.param("tiny_ldm_unet", "eager", ParallelConfig(), marks=pytest.mark.slow),
    ],
)
def test_passes_on_a_device_have_no_wait_or_copy_and_are_equal_in_all_steps(
    tracer: Tracer, recipe: str, kernels: Any, parallel: ParallelConfig
) -> None:
    job = of_layout(wait_job(recipe, "dense", kernels), parallel)
    texts = (8,) * len(job.pack.text_lengths)
    job = replace(job, packs=tuple(replace(job.pack, text_lengths=texts) for _ in job.packs))
    assert_equal_steps_without_waits(tracer.run(passes_here, [job])[0], least=301)


@pytest.mark.parametrize(
    ("recipe", "kernels", "parallel"),
    [
        pytest.param("tiny_dit", "eager", ParallelConfig(), marks=pytest.mark.slow),
        pytest.param("pretrain_7b", "triton", TP2, marks=pytest.mark.long),
        ("pretrain_7b", "triton", TP2_SP),
        pytest.param("pretrain_7b", "triton", ULYSSES, marks=pytest.mark.slow),
        ("pretrain_7b", "triton", RING),
        pytest.param("flux_12b", "triton", RING, marks=pytest.mark.slow),
        pytest.param("flux_12b", "triton", ParallelConfig(), marks=pytest.mark.slow),
        pytest.param("z_image_1024", "triton", TP2, marks=pytest.mark.slow),
        pytest.param("z_image_1024", "triton", TP2_SP, marks=pytest.mark.slow),
        pytest.param("z_image_1024", "triton", ULYSSES, marks=pytest.mark.slow),
        ("tiny_sana", "triton", ParallelConfig()),
        pytest.param("tiny_sana", "triton", ULYSSES, marks=pytest.mark.long),
        ("tiny_stdit", "triton", ULYSSES),
        pytest.param("qwen_image_1024", "triton", TP2_SP, marks=pytest.mark.long),
        pytest.param("sd3_5_medium_1024", "eager", ParallelConfig(), marks=pytest.mark.long),
        pytest.param("lumina2_1024", "triton", TP2_SP, marks=pytest.mark.long),
        pytest.param("pretrain_ditllama5b", "triton", TP2_SP, marks=pytest.mark.slow),
    ],
)
def test_passes_of_packs_have_no_wait_or_copy_and_are_equal_in_all_steps(
    tracer: Tracer, recipe: str, kernels: Any, parallel: ParallelConfig
) -> None:
    """The packs differ in the number of samples and in the lengths of samples and texts."""
    job = of_layout(wait_job(recipe, "packed", kernels), parallel)
    assert len({(len(pack.grids), pack.text_lengths) for pack in job.packs}) == 3
    assert_equal_steps_without_waits(tracer.run(passes_of_packs_here, [job])[0], least=301)


@pytest.mark.parametrize(
    ("kernels", "data_parallel", "algorithm", "precision"),
    [
        ("triton", "distributed_optimizer", "adamw", "bf16"),
        pytest.param("eager", "distributed_optimizer", "adamw", "bf16", marks=pytest.mark.slow),
        ("eager", "ddp", "adamw", "bf16"),
        ("triton", "distributed_optimizer", "muon", "bf16"),
        ("triton", "distributed_optimizer", "adamw", "fp16"),
    ],
)
def test_updates_have_no_wait_or_copy_and_are_equal_in_all_steps(
    tracer: Tracer, kernels: Any, data_parallel: Any, algorithm: Any, precision: Any
) -> None:
    """On two tensor-parallel ranks and two replicas; rates, limits and the weight of the average change."""
    job = wait_job("tiny_dit", "dense", kernels)
    job = replace(job, training=replace(job.training, precision=precision))
    parallel = ParallelConfig(tensor_model_parallel_size=2, data_parallel=data_parallel)
    job = replace(job, parallel=parallel, world_size=4, optimizer=OptimizerConfig(algorithm=algorithm))
    numbers, updates = tracer.run(updates_here, [job])[0]
    for recorded, least in ((numbers, 15), (updates, 8)):
        assert len(recorded) == STEPS
        assert_equal_steps_without_waits(recorded, least)
