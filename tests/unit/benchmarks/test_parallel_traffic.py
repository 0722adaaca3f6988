"""The drawings in docs/parallelism.md match the code, and their bytes match the formulas."""

import re

import pytest

from benchmarks import parallel_traffic as traffic
from benchmarks.parallel_matrix import PAGE
from dit.planner.trace import trace

BF16, FP32 = 2, 4


@pytest.fixture(scope="module")
def steps():
    """Trace all jobs in one process."""
    jobs, stages = traffic.segment_jobs(), traffic.stage_jobs()
    found = trace([*jobs.values(), *stages])
    return dict(zip(jobs, found)), found[len(jobs) :]


@pytest.mark.slow
def test_the_page_shows_the_counted_bytes(steps):
    segments, stages = steps
    start, end = traffic.MARKS
    section = PAGE.read_text().partition(start)[2].partition(end)[0]
    for part in (traffic.pipeline_drawing(stages), traffic.segment_drawing(), traffic.segment_table(segments)):
        assert part in section, "run python -m benchmarks.parallel_traffic --write"


@pytest.mark.slow
@pytest.mark.parametrize("ranks", traffic.RANKS)
def test_the_hybrid_sends_a_share_of_the_ring(steps, ranks):
    """Ring: keys and values of T/c tokens to c - 1 ranks; hybrid: tokens and results, except a rank's own share."""
    t, h, w = traffic.GRID
    unit = 2 * t * h * w // ranks * traffic.HIDDEN * BF16 * (ranks - 1)
    for kind, hybrid in (("spatial", 0), ("temporal", unit // ranks)):
        assert traffic.exchanged(steps[0][kind, ranks, "context"]) == unit
        assert traffic.exchanged(steps[0][kind, ranks, "hybrid"]) == hybrid


@pytest.mark.slow
def test_a_pipeline_sends_activations_and_sums_the_conditioner(steps):
    stages, tokens = steps[1], traffic.SAMPLES * traffic.PATCHES[1] * traffic.PATCHES[2]
    drawing = traffic.pipeline_drawing(stages)
    sent = [stage.parts["micro-batch"].sent_bytes["send", "pp"] for stage in stages]
    boundary = tokens * traffic.HIDDEN * BF16
    assert sent == [boundary, 2 * boundary, 2 * boundary, boundary]
    parameters = int(re.search(r"([\d,]+) parameters", drawing)[1].replace(",", ""))
    ring = 2 * parameters * FP32 * (traffic.STAGES - 1) // traffic.STAGES
    for stage in stages:  # the rest are norms and losses
        assert stage.sent_bytes["all_reduce", "pp"] == pytest.approx(ring, abs=1000)


@pytest.mark.parametrize("kind", ["spatial", "temporal"])
def test_a_segment_is_on_one_rank(kind):
    t, h, w = traffic.DRAWN
    ranks = traffic.owners(kind, traffic.DRAWN, 2)
    frames = [ranks[i * h * w : (i + 1) * h * w] for i in range(t)]
    segments = frames if kind == "spatial" else list(zip(*frames))
    assert {len(set(segment)) for segment in segments} == {1}
    assert sorted(ranks) == [0] * (t * h * w // 2) + [1] * (t * h * w // 2)
