"""Time of a planned step."""

from dit.parallel.dims import ParallelDims
from dit.planner.plan import Plan
from dit.planner.schedule import replay, waits
from dit.planner.time import Cluster, StepTime, cost_of, step_time

REPLAYED = 4
"""Limit of simulated micro-batches per pipeline rank; after that, a schedule only repeats itself."""


def planned_step(plan: Plan, dims: ParallelDims, cluster: Cluster) -> StepTime:
    """Return the time of a plan's step at full depth."""
    size = cluster.parallel.pipeline_model_parallel_size
    chunks = cluster.parallel.virtual_pipeline_model_parallel_size or 1
    costs = {rank: cost_of(trace, dims.micro_batches, cluster) for rank, trace in plan.ranks.items()}
    without_waits = {rank: step_time(cost, dims.micro_batches, cluster, waits=0.0) for rank, cost in costs.items()}
    between = next((rank for rank in without_waits if 0 < rank < size - 1), 0)
    passes = [without_waits.get(rank, without_waits[between]).passes for rank in range(size)]
    timeline = replay(
        [(forward / chunks, backward / chunks) for forward, backward in passes],
        chunks,
        min(dims.micro_batches, REPLAYED * size),
    )
    slowest = max(without_waits, key=lambda rank: without_waits[rank].total)
    waited = waits(timeline)[slowest]
    return step_time(costs[slowest], dims.micro_batches, cluster, waited)
