"""Replayed pipelines: equal stages have the bubble of the textbook, and no pass starts before its inputs are ready."""

import pytest

from dit.parallel.dims import ParallelConfig
from dit.parallel.pipeline import layers_in_flight
from dit.planner.schedule import order_of, replay, waits
from dit.planner.time import bubble_passes

CASES = [(1, 1, 3), (2, 1, 3), (4, 1, 4), (4, 1, 16), (4, 2, 8), (4, 4, 16), (8, 2, 32)]
FORWARD, BACKWARD = 1.0, 2.5


@pytest.mark.parametrize(("ranks", "chunks", "micro_batches"), CASES)
def test_equal_stages_have_the_published_bubble(ranks, chunks, micro_batches):
    """On every rank, (p - 1) / v micro-batches, for any number of micro-batches (Narayanan et al. 2021)."""
    layout = ParallelConfig(
        pipeline_model_parallel_size=ranks, virtual_pipeline_model_parallel_size=chunks if chunks > 1 else None
    )
    passes = [(FORWARD / chunks, BACKWARD / chunks)] * ranks
    expected = bubble_passes(layout) * (FORWARD + BACKWARD)
    assert expected == pytest.approx((ranks - 1) / chunks * 3.5)
    assert waits(replay(passes, chunks, micro_batches)) == pytest.approx([expected] * ranks)


def test_the_slowest_stage_waits_least():
    """Stages take 1, 3 and 2 seconds, for 20 micro-batches; the second waits for its first input and last gradient."""
    found = waits(replay([(1.0, 1.0), (3.0, 3.0), (2.0, 2.0)], 1, 20))
    assert min(found) == found[1]
    # F0 and the last B of the first stage; at both ends, F and B of the last stage, less a pass of the second.
    assert found[1] == pytest.approx(1 + 1 + (4 - 3) + (4 - 3))


@pytest.mark.parametrize(("ranks", "chunks", "micro_batches"), CASES)
def test_every_pass_runs_once_after_its_inputs(ranks, chunks, micro_batches):
    timeline = replay([(FORWARD, BACKWARD)] * ranks, chunks, micro_batches)
    ends = {
        (made.forward, made.micro_batch, made.chunk * ranks + rank): made
        for rank, passes in enumerate(timeline)
        for made in passes
    }
    assert len(ends) == 2 * ranks * chunks * micro_batches == sum(map(len, timeline))
    for (forward, micro_batch, stage), made in ends.items():
        needs = ends.get((forward, micro_batch, stage + (-1 if forward else 1)))
        if not forward:
            assert made.start >= ends[True, micro_batch, stage].end
        assert needs is None or made.start >= needs.end


@pytest.mark.parametrize(("ranks", "chunks", "micro_batches"), CASES)
def test_micro_batches_in_flight_equal_the_memory_plan(ranks, chunks, micro_batches):
    for rank in range(ranks):
        alive = most = 0
        for made in order_of(ranks, rank, chunks, micro_batches):
            alive += 1 if made.forward else -1
            most = max(most, alive)
        assert most == layers_in_flight([1] * (ranks * chunks), ranks, rank, micro_batches)
