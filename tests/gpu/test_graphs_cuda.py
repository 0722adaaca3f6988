"""Memory of CUDA graphs."""

import pytest
import torch

from dit.backends.device import destroy_graphs, graph_stream
from dit.backends.graphs import WARM_UP, Graphed
from dit.kernels.graph_tables import table_on

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
ELEMENTS, MICRO_BATCHES = 1 << 24, 8


def test_a_replay_reads_a_table_that_its_cache_dropped():
    """Otherwise another tensor would get its memory."""
    x = torch.zeros(ELEMENTS, device="cuda")
    cache, graphed = [torch.ones_like(x)], Graphed()
    for _ in range(WARM_UP + 1):
        graphed(lambda x: x + cache[0], x)
    cache.clear()
    others = [torch.full_like(x, 7.0) for _ in range(8)]
    assert (graphed(lambda x: x, x) == 1).all()
    del others


def test_a_replay_does_not_overwrite_its_tables():
    """A table may not get the memory of a tensor that the same graph freed."""
    x, values = torch.ones(ELEMENTS, device="cuda"), torch.arange(ELEMENTS, dtype=torch.float32)

    def compute(x: torch.Tensor) -> torch.Tensor:
        freed = (x * 3).sum()
        return table_on(values, x.device) + 0 * freed

    graphed = Graphed()
    for _ in range(WARM_UP + 2):
        assert torch.equal(graphed(compute, x).cpu(), values)
    destroy_graphs()


def test_graphs_share_the_memory_of_freed_tensors():
    x, graphs, reserved = torch.ones(ELEMENTS, device="cuda"), [Graphed() for _ in range(4)], []
    for factor, graphed in enumerate(graphs):
        for _ in range(WARM_UP + 1):
            graphed(lambda: (x * factor).exp().sum())  # noqa: B023
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        reserved.append(torch.cuda.memory_reserved())
    assert reserved[-1] - reserved[0] < x.nbytes
    for factor, graphed in reversed(list(enumerate(graphs))):
        assert torch.equal(graphed(lambda: x), (x * factor).exp().sum())
    destroy_graphs()


def test_a_capture_reuses_the_memory_of_gradients():
    """The gradients of a step are accumulated on the stream of the capture, as if a wrapper had been built on it."""
    weight = torch.zeros(ELEMENTS, device="cuda", requires_grad=True)
    main = torch.zeros(ELEMENTS, device="cuda")
    with graph_stream():
        accumulator = weight.view_as(weight).grad_fn.next_functions[0][0]

    def step() -> None:
        for _ in range(MICRO_BATCHES):
            (weight * 2).sum().backward()
            main.add_(weight.grad)
            weight.grad = None

    graphed = Graphed()
    for _ in range(WARM_UP):
        graphed(step)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    graphed(step)
    assert torch.cuda.memory_reserved() - before <= MICRO_BATCHES / 2 * weight.nbytes
    assert (main == 2 * MICRO_BATCHES * (WARM_UP + 1)).all()
    assert accumulator is not None
    destroy_graphs()
