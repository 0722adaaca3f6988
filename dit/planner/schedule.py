"""Simulation of pipeline schedules: which pass of which micro-batch each rank computes when, and when it waits.

1F1B on 2 ranks with 3 micro-batches (F forward, B backward, by micro-batch, `.` waits):

    rank 0   F0 F1 .  B0 F2 B1 .  B2
    rank 1   .  F0 B0 F1 B1 F2 B2 .
"""

from collections.abc import Sequence
from dataclasses import dataclass

from dit.parallel.dims import ParallelDims
from dit.planner.plan import Plan
from dit.planner.time import Cluster, StepTime, cost_of, step_time

REPLAYED = 4
"""Limit of simulated micro-batches per pipeline rank; after that, a schedule only repeats itself."""


@dataclass(frozen=True, slots=True)
class Pass:
    """A forward or backward pass of one micro-batch through one model chunk."""

    forward: bool
    micro_batch: int
    chunk: int
    start: float = 0.0
    end: float = 0.0


def order_of(pp_size: int, pp_rank: int, chunks: int, micro_batches: int) -> list[Pass]:
    """Return the passes of a rank in execution order.

    A rank starts with warm-up forward passes, then alternates forward and backward, then runs the remaining backward
    passes.

    Source: the schedules of Megatron-Core 0.16.1; Narayanan et al. 2021, arXiv:2104.04473, section 2.2.
    """
    total = micro_batches * chunks
    warmup = pp_size - pp_rank - 1 if chunks == 1 else 2 * (pp_size - pp_rank - 1) + (chunks - 1) * pp_size
    warmup = min(warmup, total)

    def at(index: int, forward: bool) -> Pass:
        if chunks == 1:
            return Pass(forward, index, 0)
        turn, place = divmod(index, pp_size * chunks)  # each chunk runs `pp_size` micro-batches at a time
        chunk = place // pp_size
        return Pass(forward, turn * pp_size + place % pp_size, chunk if forward else chunks - 1 - chunk)

    order = [at(index, True) for index in range(warmup)]
    for index in range(total - warmup):
        order += [at(warmup + index, True), at(index, False)]
    return order + [at(index, False) for index in range(total - warmup, total)]


def replay(passes: Sequence[tuple[float, float]], chunks: int, micro_batches: int) -> list[list[Pass]]:
    """Simulate a step; return the passes of each rank, with times.

    Args:
        passes: seconds of a chunk's forward and backward pass, for each pipeline rank.
    """
    size = len(passes)
    waiting = [order_of(size, rank, chunks, micro_batches) for rank in range(size)]
    done: list[list[Pass]] = [[] for _ in passes]
    ends: dict[tuple[bool, int, int], float] = {}  # by direction, micro-batch, stage
    last = size * chunks - 1
    while any(len(finished) < len(order) for finished, order in zip(done, waiting)):
        before = len(ends)
        for rank, order in enumerate(waiting):
            while len(done[rank]) < len(order):
                now = order[len(done[rank])]
                stage = now.chunk * size + rank
                if now.forward:
                    needs = 0.0 if stage == 0 else ends.get((True, now.micro_batch, stage - 1))
                else:
                    key = (True, now.micro_batch, last) if stage == last else (False, now.micro_batch, stage + 1)
                    needs = ends.get(key)
                if needs is None:
                    break
                free = done[rank][-1].end if done[rank] else 0.0
                start = max(free, needs)
                end = start + passes[rank][0 if now.forward else 1]
                ends[now.forward, now.micro_batch, stage] = end
                done[rank].append(Pass(now.forward, now.micro_batch, now.chunk, start, end))
        assert len(ends) > before, "the schedule is deadlocked"
    return done


def waits(ranks: Sequence[Sequence[Pass]]) -> list[float]:
    """Return the idle time of each rank between the first and the last pass of the step."""
    total = max(rank[-1].end for rank in ranks)
    return [total - sum(computed.end - computed.start for computed in rank) for rank in ranks]


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
