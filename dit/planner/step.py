"""The time of a planned step, and when each pipeline rank computes what."""

from dataclasses import dataclass

from dit.parallel.dims import ParallelDims
from dit.planner.plan import Plan
from dit.planner.schedule import Pass, replay, waits
from dit.planner.time import Cluster, StepTime, cost_of, step_time

REPLAYED = 4
"""Micro-batches per pipeline rank that are replayed at most: from then on a schedule only repeats itself."""


@dataclass(frozen=True)
class PlannedStep:
    """A step of the real depth.

    Attributes:
        time: of the slowest pipeline rank.
        timeline: the passes of each pipeline rank; of the first micro-batches where there are many.
    """

    time: StepTime
    timeline: list[list[Pass]]


def planned_step(plan: Plan, dims: ParallelDims, cluster: Cluster) -> PlannedStep:
    """Return the time of a plan's step.

    Args:
        plan: of the layout that the cluster has.
    """
    size = cluster.parallel.pipeline_model_parallel_size
    chunks = cluster.parallel.virtual_pipeline_model_parallel_size or 1
    costs = {rank: cost_of(trace, dims.micro_batches, cluster) for rank, trace in plan.ranks.items()}
    alone = {rank: step_time(cost, dims.micro_batches, cluster, waits=0.0) for rank, cost in costs.items()}
    between = next((rank for rank in alone if 0 < rank < size - 1), 0)
    passes = [alone.get(rank, alone[between]).passes for rank in range(size)]
    timeline = replay(
        [(forward / chunks, backward / chunks) for forward, backward in passes],
        chunks,
        min(dims.micro_batches, REPLAYED * size),
    )
    slowest = max(alone, key=lambda rank: alone[rank].total)
    waited = waits(timeline)[slowest]
    return PlannedStep(step_time(costs[slowest], dims.micro_batches, cluster, waited), timeline)
