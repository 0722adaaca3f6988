"""One update of the weights and their average, instead of Megatron-Core's optimizer step.

    eager   torch's fused AdamW | copy to the model | average      three passes over the elements
    triton  one pass (`dit.kernels.fused.adamw`), unless the average is in host memory or rows are scaled

With `optimizer.algorithm=muon`, `Muon` updates the weights of blocks, and AdamW all others. The saved state is the same
for both kernels of AdamW, so a run may continue with the other kernel. The device omits the update of a
bad step (`HostNumbers.is_good`), so the host may queue an update before it knows the numbers of the step, unless the
average is in host memory. A CUDA graph can repeat the update; its inputs are the numbers of the step and the rates of
each group of parameters. Before the average, rows of weights can be scaled (`dit.optimizer.unit_rows`).

With `optimizer.offload`, the moments are in host memory. AdamW copies them to the device in batches, Muon copies the
momentum of one weight at a time.
"""

from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from functools import partial
from typing import Any, Optional

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor

from dit.backends.device import Stream, device_numbers
from dit.backends.graphs import Graphed, Runner, call
from dit.backends.megatron_types import MegatronOptimizer
from dit.backends.process_groups import ProcessGroups
from dit.kernels import adamw as reference
from dit.kernels.adamw import AdamW, Elements, Rates
from dit.kernels.choice import Target, choose
from dit.kernels.muon import iteration_dtype
from dit.kernels.resolve import OPTIMIZER
from dit.optimizer import master_weights
from dit.optimizer.ema import EMA
from dit.optimizer.master_weights import SLOTS, MasterShard, get_step_count, is_fsdp, set_step_count
from dit.optimizer.muon import Muon
from dit.optimizer.step_numbers import StepNumbers
from dit.optimizer.unit_rows import UnitRows
from dit.parallel.fsdp import local
from dit.parallel.loss_scale import sub_optimizers
from dit.patches import patches
from dit.settings import OptimizerConfig

PART = 1 << 23
"""Number of elements in a batch: their two moments fill one of two buffers of 64 MiB on the device."""


def with_moments_on_the_host(adamw: AdamW) -> AdamW:
    """Wrap an AdamW function so that it accepts moments in host memory.

    The moments of up to `PART` elements at a time, a batch, are copied to one of two buffers on the device. Copies in
    both directions and updates overlap; batches 0 to 3 on the buffers a and b:

        copies to the device    0 -> a | 1 -> b |        | 2 -> a | 3 -> b
        updates                        |   0    |   1    |        |   2    |   3
        copies to the host                      | a -> 0 | b -> 1 |        | a -> 2 | b -> 3

    The current stream waits for all copies. The host waits for none, so it must call `synchronize` before it reads
    moments.
    """
    to_device, to_host, current = Stream(), Stream(), Stream(current=True)

    def update(parameters: Sequence[Elements], rates: Rates) -> None:
        batches = list(batches_of(parameters))
        size = max((2 * sum(aligned(p.main) for p in batch) for batch in batches), default=0)
        buffers = [batch[0].main.new_empty(size) for batch in batches[:2]]
        free_events = [current.queue()] * 2
        for i, batch in enumerate(batches):
            moments = [moment for p in batch for moment in (p.exp_avg, p.exp_avg_sq)]
            sizes = [*map(aligned, moments)]
            places = buffers[i % 2][: sum(sizes)].split(sizes)
            copies = [place[: moment.numel()] for place, moment in zip(places, moments)]
            on_device = [replace(p, exp_avg=m, exp_avg_sq=v) for p, m, v in zip(batch, copies[::2], copies[1::2])]
            arrival = to_device.queue(partial(copy, moments, copies), after=free_events[i % 2])
            end_of_update = current.queue(partial(adamw, on_device, rates), after=arrival)
            free_events[i % 2] = to_host.queue(partial(copy, copies, moments), after=end_of_update)
        for event in free_events:
            current.queue(after=event)

    return update


def copy(sources: list[Tensor], targets: list[Tensor]) -> None:
    """Copy tensors between device and host; the host does not wait."""
    torch._foreach_copy_(targets, sources, non_blocking=True)


def aligned(values: Tensor) -> int:
    """Return the number of elements rounded up so that the next tensor allows vectorised accesses."""
    return -(-values.numel() // 4) * 4


def batches_of(parameters: Sequence[Elements]) -> Iterator[list[Elements]]:
    """Yield flat parts of the parameters, in batches of up to `PART` elements."""
    batch: list[Elements] = []
    for part in (part for parameter in parameters for part in parts(parameter, PART)):
        if sum(p.main.numel() for p in batch) + part.main.numel() > PART:
            yield batch
            batch = []
        batch.append(part)
    if batch:
        yield batch


def parts(elements: Elements, size: int) -> Iterator[Elements]:
    """Split the elements of a parameter into views of at most `size` elements."""
    tensors = {field.name: getattr(elements, field.name) for field in fields(elements)}
    flat = {name: values.view(-1) for name, values in tensors.items() if values is not None}
    for start in range(0, elements.main.numel(), size):
        yield replace(elements, **{name: values[start : start + size] for name, values in flat.items()})


class Update:
    """Updates the weights after the backward pass; every rank creates and calls it, with the step counted from 1.

    Parameters with the same weight decay and learning rate, and with or without a rounded copy in the model, share a
    call of the kernel. Torch's kernel multiplies the gradients in place by the factor that clips them and divides them
    by the number of tokens; Triton's does not change them.

    Args:
        target, kernels: device and `training.kernels`, which select the kernel.
        run: calls the operations of an update; a `Graphed` repeats them.

    Attributes:
        can_be_omitted: whether the host may queue an update before it knows whether the step is good; False if the
            average is in host memory.
    """

    def __init__(
        self,
        optimizer: MegatronOptimizer,
        shards: Sequence[MasterShard],
        ema: Optional[EMA],
        settings: OptimizerConfig,
        process_groups: ProcessGroups,
        target: Target,
        kernels: str,
        run: Runner = call,
    ) -> None:
        self.optimizer, self.shards, self.ema = optimizer, shards, ema
        self.clip_grad, self.run, self.repeated = settings.clip_grad, run, isinstance(run, Graphed)
        self.adamw = choose(OPTIMIZER, target, kernels).load()
        self.muon: Optional[Muon] = None
        if settings.algorithm == "muon":
            self.muon = Muon(shards, process_groups, settings.muon_momentum, iteration_dtype(target.device))
        self.unit_rows = UnitRows(shards)
        # The kernel can update the average only if the average is on the device and no later operation changes the
        # weights. In eager mode, one later operation on all parameters is faster, except in a graph.
        is_separate = self.adamw is reference.adamw and not self.repeated
        self.averages = not is_separate and ema is not None and not ema.offload and not self.unit_rows.shards
        self.can_be_omitted = ema is None or not ema.offload  # otherwise, the host waits for copies
        if any(shard.host is not None for shard in shards):
            self.adamw = with_moments_on_the_host(self.adamw)
        self.sub_optimizers = sub_optimizers(optimizer)
        groups = [group for part in self.sub_optimizers for group in part.optimizer.param_groups]
        owners = {id(owner): i for i, group in enumerate(groups) for owner in group["params"]}
        self.groups: list[tuple[Any, list[int]]] = [(group, []) for group in groups]  # and indices of their shards
        for i, shard in enumerate(shards):
            if shard.stop > shard.start:  # others have no local elements
                self.groups[owners[id(shard.owner)]][1].append(i)

    @torch.no_grad()
    def __call__(self, numbers: StepNumbers, step: int) -> None:
        weight = self.ema.weight(step) if self.ema is not None and self.averages else 1.0
        count = get_step_count(self.optimizer) + 1
        rates = [
            Rates(
                lr=group["lr"],
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                eps=group["eps"],
                weight_decay=group["weight_decay"],
                step=count,
                clip=self.optimizer.gradient_factor.value,  # `_apply` replaces it
                average=weight,
                repeated=self.repeated,
            )
            for group, _ in self.groups
        ]
        table = device_numbers([row.values() for row in rates])
        self.run(partial(self._apply, rates), numbers.on_device, table)

    def _apply(self, rates: Sequence[Rates], numbers: Tensor, table: Tensor) -> None:
        """Queue the operations of an update, with `StepNumbers.on_device` and `Rates.values` of each group."""
        _, grad_norm, _, guard, factor = numbers[:5].unbind()
        factor = master_weights.factor_of_update(factor, grad_norm, self.clip_grad) * guard
        of_muon: dict[str, tuple[Elements, Rates]] = {}
        for host_rates, row, (_, members) in zip(rates, table, self.groups, strict=True):
            group_rates = replace(host_rates, clip=factor, table=row)
            # The model has separate parameter tensors only in half precision.
            with_model: dict[bool, list[Elements]] = {True: [], False: []}
            for i in members:
                shard = self.shards[i]
                if shard.owner.grad is None and shard.matrices is None:
                    continue  # AdamW skips it
                elements = self._elements(i)
                if shard.matrices is None:
                    with_model[elements.model is not None].append(elements)
                else:
                    of_muon[shard.name] = elements, group_rates
            for batch in with_model.values():
                self.adamw(batch, group_rates)
        if self.muon is not None:
            self.muon(of_muon)
        if self.unit_rows.shards:
            self.unit_rows(~factor.isnan())
            for shard in self.unit_rows.shards:
                if (copy := self._copy_of(shard)) is not None:
                    copy.copy_(shard.main.view(-1))
        self._gather()

    def end(self, step: int, *, is_good: bool) -> None:
        """Finish a step before the next update is queued; the host now knows whether the device applied its update."""
        if is_good:
            set_step_count(self.optimizer, get_step_count(self.optimizer) + 1)
        if self.ema is not None:
            if is_good and not self.averages:
                self.ema.update(step)
            for average in self.ema.powers:
                average.update(step)

    def _elements(self, i: int) -> Elements:
        """Return the tensors of a shard; a missing gradient is 0."""
        shard = self.shards[i]
        shard.ensure_state()
        main = shard.main
        first, second = (shard.slot(name) if name in shard.slots else main.new_empty(0) for name in SLOTS)
        average = self.ema.values[i] if self.ema is not None and self.averages else None
        gradient = torch.zeros_like(main) if shard.owner.grad is None else local(shard.owner.grad)
        return Elements(gradient, main, first, second, average, self._copy_of(shard))

    def _copy_of(self, shard: MasterShard) -> Optional[Tensor]:
        """Return the part of the model's parameter that stores the rounded master weights."""
        parameter = shard.parameter
        if parameter.dtype == torch.float32 or any(map(is_fsdp, self.sub_optimizers)):
            return None  # shares memory with the master weights, or Megatron-FSDP copies them
        return parameter.detach().view(-1)[shard.start : shard.stop]

    @patches(
        "megatron-core 0.16",
        "core/optimizer/optimizer.py: _copy_main_params_to_model_params",
        why="Megatron-FSDP has no public function for this copy",
    )
    def _gather(self) -> None:
        """Gather the new weights of all ranks, as Megatron-Core does after its own update."""
        fsdp = [part for part in self.sub_optimizers if is_fsdp(part)]
        for part in fsdp:
            part._copy_main_params_to_model_params()
        sharded = [part for part in self.sub_optimizers if isinstance(part, DistributedOptimizer)]
        for chunk in {id(chunk): chunk for part in sharded for chunk in part.model_chunks}.values():
            if fsdp or not chunk.ddp_config.overlap_param_gather:
                chunk.start_param_sync()
