"""Graphs of captured functions: their stream, their memory and their end."""

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from dit.backends import device, process_groups
from dit.backends.graphs import WARM_UP, Graphed
from dit.backends.process_groups import ProcessGroups
from dit.checkpoint import train_state
from tests.support.tiny_runs import tiny_config


class Cuda:
    """Streams and graphs of a GPU that record their use.

    Attributes:
        current: the stack of current streams.
        pools: memory of each graph.
        destroyed: one value for each destroyed graph.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.current: list[Any] = [mock.Mock()]
        self.pools, self.destroyed = list[Any](), list[bool]()
        device._stream_of_graphs.cache_clear()
        device._graphs.clear()
        monkeypatch.setattr(device, "use_cuda", lambda: True)
        names = {"Stream": mock.Mock, "stream": self.on, "current_stream": lambda: self.current[-1]}
        names |= {"graph": self.capture, "CUDAGraph": self.graph}
        for name, replacement in names.items():
            monkeypatch.setattr(torch.cuda, name, replacement)

    @contextmanager
    def on(self, stream: Any) -> Iterator[None]:
        self.current.append(stream)
        yield
        self.current.pop()

    def capture(self, graph: Any, pool: Any, stream: Any, capture_error_mode: str) -> Any:
        self.pools.append(pool)
        return self.on(stream)

    def graph(self) -> Any:
        return mock.Mock(reset=lambda: self.destroyed.append(True))


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cuda]:
    yield Cuda(monkeypatch)
    device._stream_of_graphs.cache_clear()


def test_a_graph_is_captured_on_the_stream_of_its_first_runs(cuda: Cuda) -> None:
    """Torch would not reuse the memory of a gradient that another stream accumulates before the capture ends."""
    [default] = cuda.current
    with device.graph_stream():
        of_wrapper = cuda.current[-1]
    graphed, used = Graphed(), list[Any]()
    for _ in range(WARM_UP + 2):
        graphed(lambda x: used.append(cuda.current[-1]) or x + 1, torch.ones(2))
    assert used == [of_wrapper] * (WARM_UP + 1)
    assert of_wrapper is not default
    assert of_wrapper.wait_stream.mock_calls == [mock.call(default)] * (WARM_UP + 1)
    assert default.wait_stream.mock_calls == [mock.call(of_wrapper)] * (WARM_UP + 1)


def test_a_graph_keeps_the_memory_that_it_did_not_allocate(cuda: Cuda) -> None:
    """Megatron-Core frees the buffer of gathered tokens when samples are larger, and caches drop tables."""
    outside, inside = [torch.ones(2)], list[StorageWeakRef]()

    def compute(x: torch.Tensor) -> torch.Tensor:
        y = x + outside[0]
        inside.append(StorageWeakRef(y.untyped_storage()))
        return y[:1] * 2

    graphed = Graphed()
    for _ in range(WARM_UP + 1):
        graphed(compute, torch.ones(2))
    kept = StorageWeakRef(outside[0].untyped_storage())
    outside.clear()
    assert not kept.expired()
    assert inside[-1].expired()
    del graphed
    assert kept.expired()


def test_a_captured_function_is_compiled(cuda: Cuda) -> None:
    """In the context of a dispatch mode, torch would run it eagerly."""
    runs = list[int]()

    def backend(graph: Callable[..., Any], inputs: Any) -> Callable[..., Any]:
        return lambda *args: runs.append(len(runs)) or graph(*args)

    graphed, compiled = Graphed(), torch.compile(torch.sigmoid, backend=backend)
    for _ in range(WARM_UP + 2):
        graphed(compiled, torch.ones(2))
    assert len(runs) == WARM_UP + 1


def test_the_wrapper_of_a_graphed_model_is_built_on_that_stream(
    tmp_path: Any, one_rank_world: ProcessGroups, monkeypatch: pytest.MonkeyPatch
) -> None:
    inside, wrap = list[bool](), train_state.wrap

    @contextmanager
    def graph_stream() -> Iterator[None]:
        inside.append(True)
        yield
        inside.append(False)

    def wrapped(*args: Any) -> Any:
        assert inside == [True]
        return wrap(*args)

    monkeypatch.setattr(train_state, "graph_stream", graph_stream)
    monkeypatch.setattr(train_state, "wrap", wrapped)
    config = tiny_config(tmp_path)
    _, spec = config.check_here()
    config.training.cuda_graph = True
    train_state.build_state(config, spec, one_rank_world).stream.close()
    assert inside == [True, False]


def test_graphs_share_memory_and_are_destroyed_before_the_groups_of_their_collectives(
    cuda: Cuda, one_rank_world: ProcessGroups, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL waits for the graphs, so otherwise a finished run would hang."""
    from megatron.core import parallel_state

    destroyed = list[int]()
    monkeypatch.setattr(parallel_state, "destroy_model_parallel", lambda: destroyed.append(len(cuda.destroyed)))
    monkeypatch.setattr(process_groups.dist, "destroy_process_group", lambda *_: destroyed.append(len(cuda.destroyed)))
    monkeypatch.setattr(process_groups.megatron_cpu, "forget_groups", lambda: None)
    graphs = [Graphed(), Graphed()]
    for graphed, _ in itertools.product(graphs, range(WARM_UP + 1)):
        graphed(lambda x: x + 1, torch.ones(2))
    assert [pool is None for pool in cuda.pools] == [True, False]  # the second graph shares the memory of the first
    process_groups.release()
    assert set(destroyed) == {len(graphs)}
    process_groups.release()
    assert len(cuda.destroyed) == len(graphs)
