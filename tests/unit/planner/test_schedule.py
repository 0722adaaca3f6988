"""The bubble of a pipeline: that of the textbook for equal stages, counted by hand for others."""

import numpy as np
import pytest

from dit.parallel.dims import ParallelConfig, ParallelDims
from dit.planner import plan
from dit.planner.devices import H100
from dit.planner.time import FORWARD, MICRO_BATCH, UPDATE, Cluster, Kind, bubble_passes

CASES = [(1, 1, 3), (2, 1, 3), (4, 1, 4), (4, 1, 16), (4, 2, 8), (4, 4, 16), (8, 2, 32)]


def step_of(monkeypatch, passes, chunks, micro_batches):
    """Return the planned step of ranks that take these seconds for forward, backward and, if given, the update."""

    def cost_of(seconds, *_):
        cost = np.zeros((4, len(Kind)))
        cost[FORWARD, Kind.MATMUL], cost[MICRO_BATCH, Kind.MATMUL] = seconds[0], sum(seconds[:2])
        cost[UPDATE, Kind.MATMUL] = sum(seconds[2:])
        return cost

    monkeypatch.setattr(plan, "cost_of", cost_of)
    pp, vpp = len(passes), chunks if chunks > 1 else None
    layout = ParallelConfig(pipeline_model_parallel_size=pp, virtual_pipeline_model_parallel_size=vpp)
    cluster, dims = Cluster(H100, pp, layout), ParallelDims(pp, 1, 1, micro_batches, 1)
    ranks = {rank: passes[rank] for rank in (0, pp // 2, pp - 1)}
    return plan.planned_step(plan.Plan(ranks), dims, cluster), layout


def waits(*arguments):
    """Return the idle seconds of `step_of`, and its layout."""
    step, layout = step_of(*arguments)
    return step.parts["pipeline bubble"], layout


def test_a_step_ends_with_the_rank_that_ends_last(monkeypatch):
    """The first rank waits for the passes of the second, then takes 100 s for its update."""
    step, _ = step_of(monkeypatch, [(1.0, 1.0, 100.0), (3.0, 3.0, 0.0)], 1, 20)
    assert step.total - step.parts["other"] == pytest.approx(20 * 6 + 2 + 100)


@pytest.mark.parametrize(("ranks", "chunks", "micro_batches"), CASES)
def test_equal_stages_have_the_published_bubble(monkeypatch, ranks, chunks, micro_batches):
    """On every rank, (p - 1) / v micro-batches, for any number of micro-batches (Narayanan et al. 2021)."""
    idle, layout = waits(monkeypatch, [(1.0, 2.5)] * ranks, chunks, micro_batches)
    assert idle == pytest.approx((ranks - 1) / chunks * 3.5) == bubble_passes(layout) * 3.5


@pytest.mark.parametrize(
    ("passes", "expected"),
    [
        # F0 and the last B of the first stage; at both ends, F and B of the last stage, less a pass of the second.
        ([(1.0, 1.0), (3.0, 3.0), (2.0, 2.0)], 1 + 1 + (4 - 3) + (4 - 3)),
        ([(1.0, 1.0), (3.0, 3.0), (1.0, 1.0)], 1 + 1),  # F and B of the last stage are shorter than that pass
        ([(1.0, 1.0), (2.0, 2.0), (3.0, 3.0)], 1 + 1 + 2 + 2),
    ],
)
def test_the_slowest_stage_waits_for_its_first_input_and_last_gradient(monkeypatch, passes, expected):
    assert waits(monkeypatch, passes, 1, 20)[0] == pytest.approx(expected)
