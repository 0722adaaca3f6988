"""Measure real training steps on one rank, for comparison with their trace; test cases name `measure`."""

import inspect
import itertools
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.parallel_training import tiny_model
from dit.backends import init, process_groups
from dit.models.base import ModelConfig
from dit.objectives.flow_matching import FlowMatching
from dit.parallel.dims import ParallelConfig
from dit.parallel.fsdp import gathered_bytes
from dit.planner.job import Job
from dit.run_config import RunConfig
from dit.settings import LoggingConfig, OptimizerConfig, TrainingConfig
from dit.tracing.counter import flop_formulas
from dit.tracing.packs import PackShape, batch_of
from dit.training.pretrain import Run
from energon_data.mock import MockData
from tests.laws.trial_unet import UNetConfig
from tests.parallel.traffic import bytes_sent
from tests.support.reference import LiveBytes

MICRO_BATCHES = 2
GROUPS = ("tp", "cp", "pp", "ep", "dp")
"""The trace names process groups with the same ranks by the first of these."""
MODELS: dict[str, dict[str, Any]] = {
    "dit": {"hidden_size": 64, "num_layers": 2},
    "experts": {"hidden_size": 64, "num_layers": 2, "num_experts": 4},
    "deep": {"hidden_size": 64, "num_layers": 4},
    "dit_cross": {"backbone": "dit_cross", "hidden_size": 64, "num_layers": 2},
}
PACK = PackShape(((1, 8, 8), (1, 4, 8), (2, 4, 4)), text_lengths=(5, 7, 3), multiple_of=4, total_tokens=128)
PICTURES = PackShape(((1, 16, 16),) * 2)  # of equal shape, because convolutions require it
UNET = UNetConfig(hidden_size=32)


def job(case: dict[str, Any], world_size: int, rank: int = 0) -> Job:
    """Return the planner's job for a case."""
    model: ModelConfig = UNET if case["model"] == "unet" else tiny_model(**MODELS[case["model"]])
    parallel = ParallelConfig(**case["parallel"])
    ranks = parallel.pipeline_model_parallel_size * parallel.context_parallel_size
    replicas = world_size // (ranks * parallel.tensor_model_parallel_size)
    precision = case.get("precision", "fp32")
    # Steps in fp16 must not overflow.
    scale = {"initial_loss_scale": 64.0} if precision == "fp16" else {}
    training = TrainingConfig(
        **scale,
        precision=precision,
        ema_decay=0.9,
        global_batch_size=MICRO_BATCHES * replicas,
        recompute=case.get("recompute", "none"),
    )
    return Job(
        model,
        FlowMatching(),
        OptimizerConfig(),
        parallel,
        training,
        PACK if model.supports.mixed_shapes else PICTURES,
        world_size,
        rank,
        MICRO_BATCHES,
        kernels=torch.device("cpu"),
    )


def measure(case: dict[str, Any]) -> dict[str, Any]:
    """Make two steps; return the bytes of state before the second, and the second's peak memory, FLOPs and traffic."""
    work = job(case, process_groups.world_size_from_environment())
    folder = case["folder"]
    config = RunConfig(
        model=work.model,
        data=MockData(max_tokens_per_pack=128, shapes=["1x8x8"]),
        objective=work.objective,
        optimizer=work.optimizer,
        parallel=work.parallel,
        training=replace(work.training, run_dir=folder),
        logging=LoggingConfig(tensorboard=False),
    )
    dims, spec = config.check_here()
    groups = process_groups.initialize(work.parallel)
    # `tests.preload` keeps the initial weights that a rank draws, which would be counted.
    with mock.patch.object(init, "draw", inspect.unwrap(init.draw)), LiveBytes() as live:
        run = Run(config, dims, spec, groups, quiet=True)
        run.batches._stream = (batch_of(work.model, work.pack) for _ in itertools.count())  # type: ignore[assignment]
        sums = torch.zeros(2)
        run.step(sums)
        live.peak = live.total()
        before = live.peak - gathered_bytes(run.state.wrapped)
        run.step(sums)
        peak = live.peak
    custom = {op: formula for op, formula in flop_formulas().items() if "for_cpu" in str(op)}
    counter = FlopCounterMode(display=False, custom_mapping={op: _of_shapes(f) for op, f in custom.items()})
    name = next(name for name in GROUPS if getattr(groups.collection, name).size() > 1)
    with bytes_sent([getattr(groups.collection, name)], reductions=True) as counted:
        run.step(sums)
    sent = {name: dict(counted)}
    with counter:
        run.step(sums)
    result = {"before": before, "peak": peak, "flops": counter.get_total_flops(), "sent": sent}
    run.state.stream.close()
    process_groups.release()
    return result


def _of_shapes(formula: Any) -> Any:
    """Let a FLOP formula receive tensors: torch passes shapes to custom formulas unless `_get_raw` is set."""

    def flops(*args: Any, **kwargs: Any) -> int:
        return formula(*args)

    flops._get_raw = True  # type: ignore[attr-defined]
    return flops
