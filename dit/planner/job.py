"""A step to trace, and the steady state of its pipeline schedule."""

from dataclasses import dataclass
from typing import Optional

import torch

from dit.backends.device import ACCELERATOR
from dit.models.base import ModelConfig, Stage
from dit.objectives.base import Objective
from dit.parallel.dims import ParallelConfig
from dit.settings import OptimizerConfig, TrainingConfig
from dit.tracing.packs import PackShape


@dataclass(frozen=True)
class Job:
    """One step of one rank to trace.

    Attributes:
        micro_batches: number of micro-batches of the step; 0 to fill caches only.
        packs: shapes of the micro-batches in turn.
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
    packs: tuple[PackShape, ...] = ()


@dataclass(frozen=True)
class Steady:
    """Steady state of a rank's pipeline schedule.

    Attributes:
        unit: number of micro-batches after which the schedule repeats.
        calls: two calls of the forward step, `unit` micro-batches apart.
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
