"""Gradients are added to the main gradients in batches, each once; the optimizer reads the sums."""

import math
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from megatron.core.distributed import DistributedDataParallelConfig
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from dit.backends import gradients
from dit.backends.gradients import finalize_gradients
from dit.backends.process_groups import ProcessGroups
from dit.kernels.choice import Target
from dit.models.base import Backbone, ModelConfig
from dit.models.dit.config import DiTConfig
from dit.objectives.flow_matching import FlowMatching
from dit.optimizer.master_weights import master_shards, set_rates, squared_gradient_norm
from dit.optimizer.step_numbers import StepNumbers
from dit.optimizer.update import Update
from dit.parallel import build
from dit.parallel.build import build_model, build_optimizer, wrap
from dit.parallel.dims import ParallelConfig
from dit.settings import OptimizerConfig, TrainingConfig
from dit.step.forward_step import training_forward_step
from dit.tracing.packs import PackShape, batch_of
from tests.laws.backbones import config_of, pack
from tests.support.calls import CallCounter

CONFIG = DiTConfig(hidden_size=32, num_layers=2, num_attention_heads=2, in_channels=4, patch_spatial=2)
PACK = PackShape(((1, 4, 4), (1, 2, 3)))


def built(
    groups: ProcessGroups, data_parallel: str, config: ModelConfig = CONFIG, **settings: Any
) -> tuple[Backbone, nn.Module, ParallelConfig]:
    parallel = ParallelConfig(data_parallel=data_parallel, **settings)
    chunks = build_model(config, parallel, TrainingConfig(precision="fp32"), groups)
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
    """They equal those of torch.autograd, whether they are added at the end, several times, or one by one."""
    monkeypatch.setattr(gradients, "PENDING_BYTES", pending_bytes)
    chunk, wrapped, _ = built(one_rank_world, data_parallel)
    expected = [torch.zeros_like(p) for p in chunk.parameters()]
    wrapped.zero_grad_buffer()
    for seed in range(3):
        found = torch.autograd.grad(loss_of(chunk, seed), list(chunk.parameters()), allow_unused=True)
        torch._foreach_add_(expected, [torch.zeros_like(p) if g is None else g for g, p in zip(found, expected)])
        with CallCounter() as counter:
            loss_of(wrapped, seed).backward()
        calls = {name: counter.by_operation[name] for name in ("_foreach_copy_", "_foreach_add_")}
        writes = calls.pop("_foreach_add_" if seed else "_foreach_copy_")
        assert {64 << 20: writes == 1, 5000: 1 < writes < 30, 1: writes >= 30}[pending_bytes]
        assert list(calls.values()) == [0]
    wrapped.finish_grad_sync()
    for (name, parameter), grad in zip(chunk.named_parameters(), expected, strict=True):
        assert torch.equal(parameter.main_grad, grad), name
        assert parameter.grad is None


@pytest.mark.parametrize("data_parallel", ["ddp", "distributed_optimizer"])
def test_a_step_keeps_no_gradient_of_the_previous_step(data_parallel: str, one_rank_world: ProcessGroups):
    """Also without any gradient. A step of one micro-batch zeroes no buffer and adds nothing."""
    chunk, wrapped, _ = built(one_rank_world, data_parallel)
    parameters = list(chunk.parameters())
    wrapped.zero_grad_buffer()
    with torch.no_grad():
        for parameter in parameters:
            parameter.main_grad.fill_(torch.nan)
    parameters[0].requires_grad_(False)
    with CallCounter() as counter:
        wrapped.zero_grad_buffer()
        loss_of(wrapped, 1).backward()
    assert [counter.by_operation[name] for name in ("zero_", "_foreach_add_", "_foreach_copy_")] == [0, 0, 1]
    with CallCounter() as counter:
        wrapped.finish_grad_sync()
    assert counter.by_operation["_foreach_zero_"] == 1
    assert torch.equal(parameters[0].main_grad, torch.zeros_like(parameters[0]))
    expected = torch.autograd.grad(loss_of(chunk, 1), parameters[1:], allow_unused=True)
    for parameter, grad in zip(parameters[1:], expected, strict=True):
        assert torch.equal(parameter.main_grad, torch.zeros_like(parameter) if grad is None else grad)
    wrapped.zero_grad_buffer()
    wrapped.finish_grad_sync()
    assert not any(parameter.main_grad.any() for parameter in parameters)


class _Undefined(torch.autograd.Function):
    """Uses a parameter and returns a gradient for it, or None."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, parameter: torch.Tensor, gives: bool) -> torch.Tensor:
        ctx.gives = gives
        ctx.save_for_backward(parameter)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        (parameter,) = ctx.saved_tensors
        return grads[0], torch.ones_like(parameter) if ctx.gives else None, None


@pytest.mark.parametrize("overlap", [False, True])
def test_a_parameter_without_a_gradient_keeps_none_of_the_previous_step(overlap: bool, one_rank_world: ProcessGroups):
    """The parameter may be the last of a bucket, whose reduction then starts at once."""
    chunk, wrapped, _ = built(one_rank_world, "distributed_optimizer", overlap_grad_reduce=overlap)
    parameter = chunk.embed.weight
    reduced: list[float] = []

    def watched(start: Callable[..., None]) -> Callable[..., None]:
        def seen(**kwargs: Any) -> None:
            reduced.append(parameter.main_grad.mean().item())
            start(**kwargs)

        return seen

    bucket_group = wrapped.param_to_bucket_group[parameter]
    bucket_group.start_grad_sync = watched(bucket_group.start_grad_sync)
    for step in range(4):
        wrapped.zero_grad_buffer()
        rest = sum((p.sum() for p in chunk.parameters() if p is not parameter), torch.zeros(()))
        _Undefined.apply(rest, parameter, step < 3).backward()
        wrapped.finish_grad_sync()
    assert reduced == [1.0, 1.0, 1.0, 0.0]


def test_two_gradients_of_one_backward_pass_are_added(one_rank_world: ProcessGroups):
    """As with a weight that a reentrant checkpoint uses twice."""
    chunk, wrapped, _ = built(one_rank_world, "ddp")
    parameter = chunk.embed.weight
    wrapped.zero_grad_buffer()
    for _ in range(2):
        wrapped._pending.add(parameter, torch.ones_like(parameter))
    wrapped._add_pending()
    wrapped.finish_grad_sync()
    assert torch.equal(parameter.main_grad, torch.full_like(parameter, 2.0))


def test_a_failed_pass_leaves_no_gradient(one_rank_world: ProcessGroups):
    """Gradients that were pending when a backward pass failed are dropped."""
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
    wrapped.finish_grad_sync()
    found = [p.main_grad.clone() for p in chunk.parameters()]
    wrapped.zero_grad_buffer()
    loss_of(wrapped, 1).backward()
    wrapped.finish_grad_sync()
    assert all(torch.equal(a, p.main_grad) for a, p in zip(found, chunk.parameters(), strict=True))


@pytest.mark.parametrize("data_parallel", ["ddp", "distributed_optimizer"])
def test_the_optimizer_reads_the_main_gradients_themselves(data_parallel: str, one_rank_world: ProcessGroups):
    """In every step; from the second step on, this needs no torch call."""
    chunk, wrapped, parallel = built(one_rank_world, data_parallel)
    optimizer = build_optimizer(
        [wrapped], OptimizerConfig(), parallel, TrainingConfig(precision="fp32"), one_rank_world
    )
    calls, norms = [], []
    for seed in range(3):
        wrapped.zero_grad_buffer()
        optimizer.zero_grad()
        loss_of(wrapped, seed).backward()
        wrapped.finish_grad_sync()
        with CallCounter() as counter:
            optimizer.prepare_grads()
        calls.append(counter.calls)
        norms.append(math.sqrt(squared_gradient_norm(optimizer)))
        exact = torch.cat([p.main_grad.flatten().double() for p in chunk.parameters()]).norm().item()
        assert norms[-1] == pytest.approx(exact, rel=1e-6)
    assert calls[1:] == [0, 0]
    assert all(abs(a - b) > 1e-3 * a for a, b in pairwise(norms))


@pytest.mark.parametrize("name", ["jit", "dit_cross", "experts", "flux", "prx", "lumina2"])
def test_no_weight_is_read_before_its_gather_ends(
    name: str, one_rank_world: ProcessGroups, monkeypatch: pytest.MonkeyPatch
):
    """With one weight per bucket, and all gathers outstanding as after an update."""
    monkeypatch.setattr(build, "DistributedDataParallelConfig", partial(DistributedDataParallelConfig, bucket_size=1))
    overlap = {"overlap_grad_reduce": True, "overlap_param_gather": True}
    chunk, wrapped, _ = built(one_rank_world, "distributed_optimizer", config_of(name), **overlap)
    names = {id(p): key for key, p in chunk.named_parameters()}
    for group in wrapped.bucket_groups + wrapped.expert_parallel_bucket_groups:
        group.param_gather_dispatched = False
    early, read = set(), set()

    class Reads(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            for x in tree_iter((args, kwargs)):
                if id(x) in names:
                    group = wrapped.param_to_bucket_group[x]
                    read.add(names[id(x)])
                    if group.param_gather_handle is not None or not group.param_gather_dispatched:
                        early.add(names[id(x)])
            return func(*args, **(kwargs or {}))

    step = training_forward_step(FlowMatching(), config_of(name), 8, 0)
    with Reads():
        step(iter([pack(config_of(name), [0, 1, 2, 3])]), wrapped)
    assert not early
    assert read == set(names.values())


@pytest.mark.parametrize("data_parallel", ["ddp", "distributed_optimizer"])
@pytest.mark.parametrize("clip", [0.0, 0.05, 1e9])
def test_the_update_divides_by_the_tokens_and_clips(data_parallel: str, clip: float, one_rank_world: ProcessGroups):
    """Over steps with different numbers of tokens: equal to torch's AdamW on divided and clipped gradients."""
    chunk, wrapped, parallel = built(one_rank_world, data_parallel)
    settings = OptimizerConfig(lr=1e-2, eps=1e-2, weight_decay=0.0, clip_grad=clip)  # eps: AdamW sees the scale
    optimizer = build_optimizer([wrapped], settings, parallel, TrainingConfig(precision="fp32"), one_rank_world)
    plain = [p.detach().clone().requires_grad_() for p in chunk.parameters()]
    adamw = torch.optim.AdamW(plain, lr=1e-2, betas=(settings.beta1, settings.beta2), eps=1e-2, weight_decay=0.0)
    set_rates(optimizer, 1e-2, settings.beta1)
    shards, target = master_shards(optimizer, [chunk]), Target(torch.device("cpu"), torch.float32)
    update = Update(optimizer, shards, None, settings, one_rank_world, target, "eager")
    for seed, tokens in ((0, 7), (1, 300), (2, 1)):
        found = torch.autograd.grad(loss_of(chunk, seed), list(chunk.parameters()), allow_unused=True)
        for parameter, grad in zip(plain, found, strict=True):
            parameter.grad = torch.zeros_like(parameter) if grad is None else grad / tokens
        expected = torch.nn.utils.clip_grad_norm_(plain, clip or torch.inf).item()
        adamw.step()
        wrapped.zero_grad_buffer()
        optimizer.zero_grad()
        loss_of(wrapped, seed).backward()
        finalize_gradients([wrapped], None, one_rank_world.collection)
        numbers = StepNumbers(optimizer, one_rank_world, torch.tensor([1.0, tokens]), 1)
        assert numbers.host.grad_norm == pytest.approx(expected, rel=1e-5)
        update(numbers, seed + 1)
        update.end(seed + 1, is_good=True)
        for parameter, reference in zip(chunk.parameters(), plain, strict=True):
            torch.testing.assert_close(parameter, reference, rtol=1e-5, atol=1e-6)
