"""Gradients are added to the main ones in batches: each once, and the optimizer reads the sums."""

from itertools import pairwise

import pytest
import torch
from torch import nn

from dit.backends import gradients
from dit.backends.process_groups import ProcessGroups
from dit.models.base import Backbone
from dit.models.dit.config import DiTConfig
from dit.parallel.build import build_model, build_optimizer, wrap
from dit.parallel.dims import ParallelConfig
from dit.settings import OptimizerConfig, TrainingConfig
from dit.tracing.packs import PackShape, batch_of
from tests.support.calls import CallCounter

CONFIG = DiTConfig(hidden_size=32, num_layers=2, num_attention_heads=2, in_channels=4, patch_spatial=2)
PACK = PackShape(((1, 4, 4), (1, 2, 3)))


def built(groups: ProcessGroups, data_parallel: str) -> tuple[Backbone, nn.Module, ParallelConfig]:
    parallel = ParallelConfig(data_parallel=data_parallel)
    chunks = build_model(CONFIG, parallel, TrainingConfig(precision="fp32"), groups)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in chunks[0].parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.1)
    return chunks[0], wrap(chunks, parallel, groups)[0], parallel


def loss_of(network: nn.Module, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    batch = batch_of(CONFIG, PACK)
    inputs_TC = torch.randn(batch.latents_TC.shape, generator=generator)
    time_S = torch.rand(2, generator=generator)
    return network(inputs_TC, time_S, batch).square().sum()


@pytest.mark.parametrize("data_parallel", ["ddp", "distributed_optimizer"])
@pytest.mark.parametrize("pending_bytes", [64 << 20, 5000, 1])
def test_main_gradients_are_sums_over_micro_batches(
    data_parallel: str, pending_bytes: int, one_rank_world: ProcessGroups, monkeypatch: pytest.MonkeyPatch
):
    """Those of torch.autograd, whether they are added at the end, several times, or one by one."""
    monkeypatch.setattr(gradients, "PENDING_BYTES", pending_bytes)
    chunk, wrapped, _ = built(one_rank_world, data_parallel)
    expected = [torch.zeros_like(p) for p in chunk.parameters()]
    wrapped.zero_grad_buffer()
    for seed in range(3):
        found = torch.autograd.grad(loss_of(chunk, seed), list(chunk.parameters()), allow_unused=True)
        torch._foreach_add_(expected, [torch.zeros_like(p) if g is None else g for g, p in zip(found, expected)])
        with CallCounter() as counter:
            loss_of(wrapped, seed).backward()
        adds = counter.by_operation["_foreach_add_"]
        assert {64 << 20: adds == 1, 5000: 1 < adds < 30, 1: adds >= 30}[pending_bytes]
    for (name, parameter), grad in zip(chunk.named_parameters(), expected, strict=True):
        assert torch.equal(parameter.main_grad, grad), name
        assert parameter.grad is None


def test_a_failed_pass_leaves_nothing(one_rank_world: ProcessGroups):
    """What waited when a backward pass failed is forgotten with the gradients."""
    chunk, wrapped, _ = built(one_rank_world, "ddp")
    wrapped.zero_grad_buffer()

    def fail(grad: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("stop here")

    handle = chunk.embed.weight.register_hook(fail)
    with pytest.raises(RuntimeError, match="stop here"):
        loss_of(wrapped, 0).backward()
    handle.remove()
    wrapped.zero_grad_buffer()
    loss_of(wrapped, 1).backward()
    found = [p.main_grad.clone() for p in chunk.parameters()]
    wrapped.zero_grad_buffer()
    loss_of(wrapped, 1).backward()
    assert all(torch.equal(a, p.main_grad) for a, p in zip(found, chunk.parameters(), strict=True))


@pytest.mark.parametrize("data_parallel", ["ddp", "distributed_optimizer"])
def test_the_optimizer_reads_the_main_gradients_themselves(data_parallel: str, one_rank_world: ProcessGroups):
    """In every step, and from the second on without a call for each parameter."""
    chunk, wrapped, parallel = built(one_rank_world, data_parallel)
    optimizer = build_optimizer(
        [wrapped], OptimizerConfig(), parallel, TrainingConfig(precision="fp32"), one_rank_world
    )
    calls, norms = [], []
    for seed in range(3):
        wrapped.zero_grad_buffer()
        optimizer.zero_grad()
        loss_of(wrapped, seed).backward()
        with CallCounter() as counter:
            optimizer.prepare_grads()
        calls.append(counter.calls)
        norms.append(float(optimizer.get_grad_norm()))
        exact = torch.cat([p.main_grad.flatten().double() for p in chunk.parameters()]).norm().item()
        assert norms[-1] == pytest.approx(exact, rel=1e-6)
    assert calls[1:] == [0, 0]
    assert all(abs(a - b) > 1e-3 * a for a, b in pairwise(norms))
