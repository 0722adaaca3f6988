"""Steps with replayed passes equal eager steps to the bit."""

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch

from benchmarks.step import build_parser, config_of
from dit import philox
from dit.backends import process_groups
from dit.backends.graphs import WARM_UP, Graphed, Runner, call
from dit.backends.process_groups import ProcessGroups
from dit.batch import PackedBatch
from dit.errors import BatchError, ConfigError
from dit.layers.tokens import with_control
from dit.models.routing_config import RoutingConfig
from dit.optimizer.schedules import TorchOneCycle
from dit.optimizer.step_numbers import Limits
from dit.parallel.dims import ParallelConfig
from dit.run_config import check_cuda_graph
from dit.step.cuda_graph import MOST_GRAPHS, Compute, GraphedSchedule, constants
from dit.step.schedule import Logs, Schedule, forward_backward
from dit.step.train_step import Action, Step, StepObserver, settle, train_step
from dit.step_checks.recheck import Recheck
from dit.tracing.packs import PackShape, batch_of
from dit.training.pretrain import Run
from dit.verify.ranks import run_world
from launch.config_file import built
from launch.train import call_recipe
from tests.support.replays import record
from tests.support.tiny_runs import tiny_config

STEPS = WARM_UP + 5
GRAPHS = 3  # of the passes, of the numbers, and of the update
DENSE = ("data.max_tokens_per_pack=None", "data.pack_multiple_of=16", "data.shapes=['4x8x8']")
"""Changes of a recipe with packs."""

FP16 = "training.precision=fp16", "training.initial_loss_scale=1e6", "training.loss_scale_window=1"
"""The loss scale doubles until gradients overflow, in captured steps, too."""

PACKS = "tiny_dit_pack", "tiny_dit_cross", "tiny_flux", "tiny_sana", "tiny_stdit", "tiny_moviegen"
"""Recipes of packs that are padded to fixed sizes."""


class Records:
    """Records passes; counts records and replays."""

    recorded = replayed = 0

    def __call__(self, compute: Compute) -> tuple[Logs, Callable[[], None]]:
        self.recorded += 1
        logs, run = record(compute)

        def replay() -> None:
            self.replayed += 1
            run()

        return logs, replay


class OneBadStep(StepObserver):
    """An observer that omits the update of one step.

    Args:
        bad: number of the step; None for no bad step.
    """

    def __init__(self, run: Run, bad: int | None) -> None:
        self.run, self.bad = run, bad
        self.logs: Logs = []

    def compute(self, compute: Compute, batches: Any) -> Logs:
        self.logs = compute(batches)
        return self.logs

    def limits(self) -> Limits:
        return Limits(loss=0.0) if self.run.state.step + 1 == self.bad else Limits()

    def judge(self, step: Step) -> Action:
        return "update" if step.numbers.host.is_good else "skip"

    def repeat(self, compute: Compute) -> Logs:
        return self.logs


def steps(
    folder: Any, groups: ProcessGroups, records: Records | None, recipe: str, *words: str, bad: int | None = None
) -> list[Any]:
    """Return loss, gradient norm, and sums of weights, their average and the model's copies, for each step of a run.

    The run resumes in `folder` if it has a checkpoint; with `training.stop_at_step`, it saves one.
    """
    micro_batch = 1 if recipe in PACKS and not set(DENSE) & set(words) else 2
    sizes = {"global": 2 * micro_batch * groups.dp_size, "micro": micro_batch}
    words = *(f"training.{name}_batch_size={size}" for name, size in sizes.items()), "data.num_streams=1", *words
    config = config_of(build_parser().parse_args(["--factory", recipe, *words]), str(folder))
    dims_and_spec = config.check_here()
    config.training.cuda_graph = True  # without a GPU, `check_here` refuses it
    run = Run(config, *dims_and_spec, groups, quiet=True)

    def graphed() -> Runner:
        return call if records is None else Graphed(records)

    run.state.update.run = graphed()
    schedule: Schedule = forward_backward if records is None else GraphedSchedule(records)
    functions = replace(run.functions, schedule=schedule, run_numbers=graphed())
    numbers, step, observer = [], None, OneBadStep(run, bad)
    try:
        while run.state.step < (config.training.stop_at_step or STEPS):
            run.batches.begin_step()
            step = train_step(run.state, run.batches, functions, observer, step, late=True)
            average = [] if run.state.ema is None else run.state.ema.values
            weights = *(shard.main for shard in run.state.shards), *average, *run.state.chunks[0].parameters()
            scale = step.numbers.host.loss_scale
            numbers.append((step.loss, repr(step.grad_norm), scale, *(x.double().sum().item() for x in weights)))
        assert step is not None
        settle(run.state, step, observer)
        if config.training.stop_at_step:
            run.save()
            run.saves.wait()
    finally:
        run.close()
    return numbers


@pytest.fixture
def words_on_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute random words with torch operations, as on a GPU."""
    monkeypatch.setattr(philox, "ten_rounds", philox._rounds)


@pytest.mark.usefixtures("words_on_device")
@pytest.mark.parametrize(
    "words",
    [
        ("tiny_dit", "data.text_tokens=1"),
        ("tiny_dit", "data.text_tokens=1", *FP16),
        ("tiny_dit_pack", "objective=contrastive_flow_matching"),  # `of_full_pack` adds an entry
        (PACKS[0],),
        *(
            pytest.param(words, marks=pytest.mark.slow)
            for words in (("tiny_ldm_unet", "data.text_tokens=1"), PACKS[1:2])
        ),
        *(
            pytest.param(words, marks=pytest.mark.long)
            for words in (
                ("tiny_dit", "data.text_tokens=1", "parallel.data_parallel=ddp"),
                ("tiny_dit", "data.text_tokens=1", "training.precision=bf16"),
                ("tiny_flux", "data.text_tokens=1", *DENSE),
                *((recipe,) for recipe in PACKS[2:]),
            )
        ),
    ],
    ids=" ".join,
)
def test_replayed_steps_have_the_numbers_of_eager_steps(
    words: tuple[str, ...], tmp_path: Any, one_rank_world: ProcessGroups
) -> None:
    """Samples, noise and weights differ in every step; a replay that does not read one of them has another loss."""
    records = Records()
    eager = steps(tmp_path / "eager", one_rank_world, None, *words)
    assert steps(tmp_path / "replayed", one_rank_world, records, *words) == eager
    assert (records.recorded, records.replayed) == (GRAPHS, GRAPHS * (STEPS - WARM_UP))
    assert len({loss for loss, *_ in eager}) == STEPS
    scales = [scale for _, _, scale, *_ in eager]
    directions = {after > before for before, after in itertools.pairwise(scales[WARM_UP:]) if after != before}
    assert directions == ({True, False} if "training.precision=fp16" in words else set())


@pytest.mark.usefixtures("words_on_device")
def test_a_run_of_graphs_resumes_to_the_bit(tmp_path: Any, one_rank_world: ProcessGroups) -> None:
    """The learning rate, the weight of the average and Adam's bias correction differ between steps."""
    words = "tiny_dit", "data.text_tokens=1", "training.ema_start_step=4", "optimizer.beta2=0.9", "optimizer.lr=1e-2"
    eager = steps(tmp_path / "eager", one_rank_world, None, *words)
    records = Records()
    stopped = steps(tmp_path / "run", one_rank_world, records, *words, "training.stop_at_step=4")
    assert (*stopped, *steps(tmp_path / "run", one_rank_world, records, *words)) == (*eager,)
    assert (records.recorded, records.replayed) == (2 * GRAPHS, GRAPHS * (STEPS - 2 * WARM_UP))


@pytest.mark.usefixtures("words_on_device")
@pytest.mark.parametrize("algorithm", ["adamw", "muon"])
def test_a_replayed_update_of_a_bad_step_changes_nothing(
    algorithm: str, tmp_path: Any, one_rank_world: ProcessGroups
) -> None:
    """The bias correction of the next step does not count the bad step."""
    words, bad = ("tiny_dit", "data.text_tokens=1", f"optimizer.algorithm={algorithm}"), WARM_UP + 2
    eager = steps(tmp_path / "eager", one_rank_world, None, *words, bad=bad)
    assert steps(tmp_path / "replayed", one_rank_world, Records(), *words, bad=bad) == eager
    weights = [of_step[3:] for of_step in eager]
    assert [x == y for x, y in itertools.pairwise(weights)] == [number == bad for number in range(2, STEPS + 1)]


def rechecked(folder: Any, groups: ProcessGroups, interval: int, wrong: int = 0) -> tuple[list[Any], list[int]]:
    """Run steps of graphs, of which some are computed twice; return the incidents, and all checksums.

    Args:
        wrong: number of the computation that changes one bit of a main gradient; 0 for none.
    """
    words = "training.global_batch_size=2", "training.micro_batch_size=2", "data.num_streams=1", "data.text_tokens=1"
    words = *words, "training.deterministic=True", f"training.recheck_interval={interval}"
    config = tiny_config(folder, *words)
    dims_and_spec = config.check_here()
    config.training.cuda_graph = True
    run = Run(config, *dims_and_spec, groups, quiet=True)
    run.functions = replace(run.functions, schedule=GraphedSchedule(Records()), run_numbers=call)
    run.state.update.run = call
    chunk, computations, checksums, gather = run.state.wrapped[0], itertools.count(1), [], Recheck._gather

    def end_replay() -> None:
        if next(computations) == wrong:
            next(chunk.parameters()).main_grad.view(torch.int32).view(-1)[0] ^= 1

    def gathered(recheck: Recheck, mark: torch.Tensor) -> list[int]:
        checksums.append(*gather(recheck, mark))
        return checksums[-1:]

    try:
        with (
            mock.patch.object(chunk, "end_replay", end_replay),
            mock.patch.object(Recheck, "_gather", gathered),
            mock.patch.object(run.log, "incident") as incident,
        ):
            while run.state.step < WARM_UP + 3:
                run.step(torch.zeros(2))
    finally:
        run.close()
    return incident.mock_calls, checksums


@pytest.mark.usefixtures("words_on_device")
def test_a_step_of_graphs_that_is_computed_twice_compares_gradients(
    tmp_path: Any, one_rank_world: ProcessGroups
) -> None:
    """Eager and replayed computations of a step have equal checksums; one wrong bit of a replay is found."""
    incidents, checksums = rechecked(tmp_path / "sound", one_rank_world, 1)
    assert incidents == []
    assert checksums[::2] == checksums[1::2]
    assert len(set(checksums)) == WARM_UP + 3
    due = WARM_UP + 1
    incidents, (first, second, third) = rechecked(tmp_path / "wrong", one_rank_world, due, wrong=due + 1)
    assert incidents == [mock.call("machine_fault", due, ranks=[0], times=3, action="repeat")]
    assert first == third != second


LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2_sp": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "cp2": {"context_parallel_size": 2, "context_comm": "a2a"},
    "dp2": {"data_parallel": "distributed_optimizer"},
}


def replay_on_a_rank(case: dict[str, Any]) -> list[Any]:
    """Return the results of eager and of replayed steps on packs."""
    parallel = (f"parallel.{name}={value}" for name, value in case["parallel"].items())
    words = "tiny_dit_pack", "model.num_layers=1", *parallel
    groups = process_groups.initialize(ParallelConfig(**case["parallel"]))
    try:
        with mock.patch.object(philox, "ten_rounds", philox._rounds):
            records, folder = Records(), case["folder"]
            eager = steps(f"{folder}/eager", groups, None, *words)
            replayed = steps(f"{folder}/replayed", groups, records, *words)
            return [eager, replayed, (records.recorded, records.replayed)]
    finally:
        process_groups.release()


def test_replayed_steps_on_two_ranks_have_the_numbers_of_eager_steps(tmp_path: Any) -> None:
    task = f"{__name__}:{replay_on_a_rank.__name__}"
    cases = [{"task": task, "parallel": x, "folder": str(tmp_path / name)} for name, x in LAYOUTS.items()]
    for eager, replayed, counts in run_world(2, cases, tmp_path, timeout_s=300):
        assert eager == replayed
        assert counts == (GRAPHS, GRAPHS * (STEPS - WARM_UP))
        assert len({loss for loss, *_ in eager}) == STEPS


@pytest.mark.usefixtures("words_on_device")
def test_shapes_that_change_in_every_step_are_an_error(tmp_path: Any, one_rank_world: ProcessGroups) -> None:
    """Each step has other shapes, because texts have random lengths."""
    with (
        mock.patch("dit.step.cuda_graph.MOST_GRAPHS", STEPS - 3),
        pytest.raises(BatchError, match=rf"more than {STEPS - 3}: .*; use data of one shape with texts of one length"),
    ):
        steps(tmp_path, one_rank_world, Records(), "tiny_dit", "data.text_tokens=64")
    assert MOST_GRAPHS > 1


@pytest.mark.usefixtures("words_on_device")
def test_a_network_that_reads_lengths_is_an_error_in_the_second_step(
    tmp_path: Any, one_rank_world: ProcessGroups
) -> None:
    def read(inputs_TC: torch.Tensor, batch: PackedBatch, features: int) -> torch.Tensor:
        return with_control(inputs_TC, batch, features).clamp(max=1e9 * max(batch.layout.lengths))

    records = Records()
    with (
        mock.patch("dit.models.token_stack.with_control", read),
        pytest.raises(BatchError, match="the model reads the lengths of samples on the host"),
    ):
        steps(tmp_path, one_rank_world, records, "tiny_dit_pack")
    assert records.recorded == 0


def test_packs_that_differ_in_values_and_names_share_a_graph() -> None:
    """Packs need different graphs if they differ in anything that the host reads."""
    model = built(call_recipe("tiny_dit")).model

    def kind(grid: tuple[int, int, int], text: int = 3, **changes: Any) -> Any:
        return constants([replace(batch_of(model, PackShape((grid, grid), (text, 4))), **changes)], [])

    ids = torch.tensor([3, 5])
    assert kind((1, 4, 4)) == kind((1, 4, 4), keys=("a", "b"), sample_ids_S=ids)
    other = kind((1, 2, 8)), kind((1, 4, 8)), kind((1, 4, 4), 2), kind((1, 4, 4), repeated=True)
    assert len({kind((1, 4, 4)), *other}) == 5


@pytest.mark.parametrize(
    ("recipe", "words", "message"),
    [
        (
            "tiny_stdit",
            {"context_parallel_size": 2},
            "packs and parallel.context_comm=p2p .* use parallel.context_comm=a2a and .*spatial_temporal_comm=context",
        ),
        ("tiny_dit_pack", {"clean_first_frame": 0.5}, "packs and data.clean_first_frame=0.5, .* use data without it"),
        ("tiny_dit_pack", {"attention": "transformer_engine"}, "attention=transformer_engine, .*attention=auto"),
        ("tiny_dit_pack", {"kernels": "compile"}, "packs and training.kernels=compile, .* use training.kernels=auto"),
        ("tiny_dit", {"shapes": ["1x8x8", "1x8x16"]}, "data=MockData, because batches .* set data.max_tokens_per_pack"),
        ("tiny_ecdit", {}, r"num_moe_experts=\d+, because .* use a model without experts"),
        (
            "tiny_dit",
            {"routing": RoutingConfig(first_layers=1, last_layers=0)},
            "model.routing, because .* use model.routing=none",
        ),
        ("tiny_dit", {"pipeline_model_parallel_size": 2}, "pipeline_model_parallel_size=2, .* use .*size=1"),
        ("tiny_dit", {"data_parallel": "fsdp"}, "fsdp, .* use parallel.data_parallel=distributed_optimizer"),
        ("tiny_dit", {"overlap_grad_reduce": True}, "overlap_grad_reduce=True, .* use .*=False"),
        ("tiny_dit", {"offload": True}, "optimizer.offload=True, .* use optimizer.offload=False"),
        (
            "tiny_dit",
            {"schedule": TorchOneCycle()},
            "schedule=TorchOneCycle, .* use training.kernels=triton",
        ),
        ("tiny_dit", {"linears": "transformer_engine"}, "linears=transformer_engine, .* use training.linears=megatron"),
        (
            "tiny_dit",
            {"linears": "overlapped", "tensor_model_parallel_size": 2, "sequence_parallel": True},
            "linears=overlapped, .* use training.linears=megatron",
        ),
    ],
)
def test_runs_that_no_graph_can_repeat_are_errors(recipe: str, words: dict[str, Any], message: str) -> None:
    config = built(call_recipe(recipe))
    config.check()
    config.training.cuda_graph = True
    for name, value in words.items():
        parts = config.parallel, config.training, config.data, config.optimizer, config.model, config
        part = next(x for x in parts if hasattr(x, name))
        setattr(part, name, value)
    with pytest.raises(
        ConfigError, match=rf"^training.cuda_graph=True does not work with .*{message}.*cuda_graph=False$"
    ):
        config.check()


def test_packs_of_a_model_that_reads_lengths_are_an_error() -> None:
    config = built(call_recipe("tiny_dit_pack"))
    _, spec = config.check()
    config.training.cuda_graph, config.model.teacher_token_size = True, 5
    with pytest.raises(
        ConfigError,
        match=r"DiTConfig does not .*, which .* with packs .*=False, or model.teacher_token_size=null",
    ):
        check_cuda_graph(config, spec)


def test_packs_of_sequence_parallel_ranks_may_have_graphs() -> None:
    config = built(call_recipe("pretrain_7b_256p_joint_pack"))
    assert config.parallel.sequence_parallel
    config.parallel.overlap_grad_reduce = config.parallel.overlap_param_gather = False
    config.training.cuda_graph = True
    config.check()


def test_a_graph_needs_a_gpu() -> None:
    config = built(call_recipe("tiny_dit"))
    config.training.cuda_graph = True
    config.check()
    with pytest.raises(ConfigError, match="cuda_graph=True needs a GPU, but the device is cpu; set"):
        config.check_here()
