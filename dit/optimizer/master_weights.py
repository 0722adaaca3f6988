"""A common view of fp32 master weights for all kinds of optimizers, with their step count, rates and gradient norm."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Optional

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from dit.backends.device import host_zeros, local_device
from dit.backends.gradients import GradientFactor
from dit.backends.megatron_types import MegatronOptimizer
from dit.backends.process_groups import ProcessGroups
from dit.backends.sharding import Matrices, sharding_of
from dit.boxes import Part
from dit.parallel.fsdp import local, sharded_parameters, use_updated_weights
from dit.parallel.loss_scale import sub_optimizers
from dit.patches import patches
from dit.settings import OptimizerConfig

SLOTS = ("exp_avg", "exp_avg_sq")
"""Adam's moments. Muon has only the first one, its momentum."""


@dataclass
class MasterShard:
    """The part of one parameter's fp32 master copy that this rank updates.

    Attributes:
        start, stop: range of the flattened parameter that this rank updates.
        owner: the tensor that the optimizer updates, with `stop - start` local elements in any shape; a DTensor under
            FSDP.
        state: Adam's state of `owner`; empty before the first step.
        group: ranks over which the parameter is sharded; None if it is not.
        host: host memory of the optimizer's moments, by slot; None if they are on the device.
        matrices: the matrices of a parameter that Muon updates; None for AdamW.
    """

    name: str
    parameter: nn.Parameter
    start: int
    stop: int
    owner: Tensor
    state: dict[str, Any]
    group: Optional[ProcessGroup]
    host: Optional[dict[str, Tensor]] = None
    factor: GradientFactor = field(default_factory=GradientFactor)
    matrices: Optional[Matrices] = None

    @property
    def main(self) -> Tensor:
        """The local master values, any shape with `stop - start` elements."""
        return local(self.owner)

    @property
    def grad(self) -> Tensor:
        """The gradient of `main` between `StepNumbers` and the update; zeros if there is none."""
        grad = self.owner.grad
        return torch.zeros_like(self.main) if grad is None else local(grad) * self.factor.value

    @property
    def slots(self) -> tuple[str, ...]:
        """Names of the optimizer's moments."""
        return SLOTS if self.matrices is None else SLOTS[:1]

    def slot(self, name: str) -> Tensor:
        """Return one of the optimizer's moments, in the shape of `main`; zeros before the first step."""
        return local(self.state[name]) if name in self.state else torch.zeros_like(self.main)

    def ensure_state(self) -> None:
        """Create the moments as zeros."""
        for slot in self.slots:
            if slot not in self.state:
                self.state[slot] = torch.zeros_like(self.owner) if self.host is None else self.host[slot]


def is_fsdp(optimizer: MegatronOptimizer) -> bool:
    """Return whether an optimizer updates parameters sharded by Megatron-FSDP."""
    return isinstance(optimizer, DistributedOptimizer) and optimizer.ddp_config.use_megatron_fsdp


def _flat(groups: Sequence[Sequence[Tensor]]) -> list[Any]:
    return [parameter for group in groups for parameter in group]


@patches(
    "megatron-core 0.16",
    "core/optimizer/distrib_optimizer.py: _get_model_param_range_map, model and main parameter groups",
    why="no public function returns the range of a parameter that this rank updates",
)
def _pairs(optimizer: MegatronOptimizer) -> Iterator[tuple[nn.Parameter, Tensor, int, int]]:
    """Yield (model parameter, master tensor, start, stop) of one Megatron-Core optimizer.

    `param_groups` has another order: Megatron-Core puts a group's fp32 parameters first.
    """
    if isinstance(optimizer, DistributedOptimizer):
        models = _flat(optimizer.model_float16_groups) + _flat(optimizer.model_fp32_groups)
        mains = _flat(optimizer.shard_fp32_from_float16_groups) + _flat(optimizer.shard_fp32_groups)
    elif isinstance(optimizer, Float16OptimizerWithFloat16Params):
        models = _flat(optimizer.float16_groups) + _flat(optimizer.fp32_from_fp32_groups)
        mains = _flat(optimizer.fp32_from_float16_groups) + _flat(optimizer.fp32_from_fp32_groups)
    else:
        models = mains = _flat([group["params"] for group in optimizer.optimizer.param_groups])
    for parameter, main in zip(models, mains, strict=True):
        if isinstance(optimizer, DistributedOptimizer):
            span = optimizer._get_model_param_range_map(parameter)["param"]
            yield parameter, main, span.start, span.end
        else:
            yield parameter, main, 0, parameter.numel()


def master_shards(
    optimizer: MegatronOptimizer, chunks: Sequence[nn.Module], settings: Optional[OptimizerConfig] = None
) -> list[MasterShard]:
    """List this rank's master shards in the order of the model's parameters, without frozen ones.

    Args:
        chunks: this rank's unwrapped model chunks. Their parameter names are global; a parameter of every pipeline
            stage is listed once per chunk, under the same name.
        settings: determine the parameters that Muon updates, and whether moments are in host memory; None for neither.
    """
    shards = _shards(optimizer, chunks)
    for shard in shards:
        shard.factor = optimizer.gradient_factor
        if settings is not None and settings.algorithm == "muon":
            shard.matrices = sharding_of(shard.parameter, shard.name).matrices
    if settings is not None and settings.offload:
        _move_moments_to_host(shards)
    return shards


def _move_moments_to_host(shards: Sequence[MasterShard]) -> None:
    """Give each shard its part of one allocation of host memory per slot."""
    pinned = any(shard.main.is_cuda for shard in shards)
    for slot in SLOTS:
        members = [shard for shard in shards if slot in shard.slots]
        sizes = [shard.main.numel() for shard in members]
        for shard, part in zip(members, host_zeros(sum(sizes), pinned=pinned).split(sizes)):
            shard.host = {**(shard.host or {}), slot: part.view(shard.main.shape)}


def _shards(optimizer: MegatronOptimizer, chunks: Sequence[nn.Module]) -> list[MasterShard]:
    names = {
        parameter: name for chunk in chunks for name, parameter in chunk.named_parameters() if parameter.requires_grad
    }
    shards: dict[nn.Parameter, MasterShard] = {}
    for part in sub_optimizers(optimizer):
        if is_fsdp(part):
            return _fsdp_shards(part, chunks)
        group = part.data_parallel_group if isinstance(part, DistributedOptimizer) else None
        for parameter, main, start, stop in _pairs(part):
            state = part.optimizer.state[main]
            shards[parameter] = MasterShard(names[parameter], parameter, start, stop, main, state, group)
    for part in sub_optimizers(optimizer):
        if isinstance(part, DistributedOptimizer):
            shards |= _absent_shards(part, names, shards)
    return [shards[parameter] for parameter in names]


def _fsdp_shards(optimizer: DistributedOptimizer, chunks: Sequence[nn.Module]) -> list[MasterShard]:
    shards = []
    for wrapped, chunk in zip(optimizer.model_chunks, chunks):
        by_name = {p.name: p for p in sharded_parameters(wrapped)}
        for p in (by_name[name] for name, parameter in chunk.named_parameters() if parameter.requires_grad):
            state = optimizer.optimizer.state[p.owner]
            shards.append(MasterShard(p.name, p.raw, p.start, p.stop, p.owner, state, p.group))
    return shards


def _absent_shards(
    optimizer: DistributedOptimizer, names: dict[nn.Parameter, str], shards: dict[nn.Parameter, MasterShard]
) -> dict[nn.Parameter, MasterShard]:
    """Add an empty shard for every parameter without local elements, so that all ranks run the same collectives."""
    empty = {}
    local_parameters = {parameter for buffer in optimizer.buffers for parameter in buffer.params}
    for parameter, name in names.items():
        if parameter in local_parameters and parameter not in shards:
            main = torch.empty(0, dtype=torch.float32, device=parameter.device)
            empty[parameter] = MasterShard(name, parameter, 0, 0, main, {}, optimizer.data_parallel_group)
    return empty


def part_of(parameter: nn.Parameter, groups: ProcessGroups, start: int = 0, stop: Optional[int] = None) -> Part:
    """Return the position of a range of this rank's part of a parameter; of the full part if no range is given.

    Each expert is a separate tensor, unsharded on the ranks that have it.
    """
    local = tuple(parameter.shape)
    stop = parameter.numel() if stop is None else stop
    sharding = sharding_of(parameter)
    shape = sharding.global_shape(local, groups.tp.size())
    return Part(shape, local, sharding.origin(local, groups.tp.rank()), start, stop)


def copy_of(shard: MasterShard, groups: ProcessGroups) -> tuple[int, int]:
    """Return the index of this rank's copy of its range, and the number of copies."""
    sharding, index, count = sharding_of(shard.parameter, shard.name), 0, 1
    for axis in sharding.replicated_over:
        is_sharded = axis == sharding.data_axis and shard.group is not None
        group = groups.shard_copies if is_sharded else groups.along(axis)
        if group is not None:  # otherwise all data-parallel ranks have different ranges
            index, count = index * group.size() + group.rank(), count * group.size()
    return index, count


def get_step_count(optimizer: MegatronOptimizer) -> int:
    """Return Adam's step count (for its bias correction), 0 before the first step."""
    return next((int(group["step"]) for group in optimizer.param_groups if "step" in group), 0)


def set_step_count(optimizer: MegatronOptimizer, step: int) -> None:
    """Set Adam's step count, one for each parameter group."""
    for group in optimizer.param_groups:
        group["step"] = step


@patches(
    "megatron-core 0.16",
    "core/optimizer/optimizer.py: _copy_main_params_to_model_params",
    why="no public function copies changed master weights to the model outside of an optimizer step",
)
def copy_masters_to_model(optimizer: MegatronOptimizer, wrapped: Sequence[Any]) -> None:
    """Copy the master weights into the model's chunks, and gather them; every rank calls this."""
    if any(is_fsdp(part) for part in sub_optimizers(optimizer)):
        for chunk in wrapped:
            use_updated_weights(chunk)
        return
    for part in sub_optimizers(optimizer):
        if hasattr(part, "_copy_main_params_to_model_params"):
            part._copy_main_params_to_model_params()
    if any(isinstance(part, DistributedOptimizer) for part in sub_optimizers(optimizer)):
        for chunk in wrapped:
            chunk.start_param_sync(force_sync=True)


def set_rates(optimizer: MegatronOptimizer, lr: float, beta1: float) -> None:
    """Set the learning rate, times the factor of each parameter group, and Adam's beta1."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group["lr_mult"]
        group["betas"] = (beta1, group["betas"][1])


@torch.no_grad()
def squared_gradient_norm(optimizer: MegatronOptimizer) -> Tensor:
    """Return the term of this rank in the squared norm of the gradients, `[1]`, float64; `prepare_grads` precedes it.

    The sum over all ranks is `gradient_copies` times the squared norm, before `gradient_factor`. The local part is
    infinite if it exceeds 3.4e38, the largest float32.
    """
    parts = optimizer.parts_in_norm
    gradients = [gradient for part in parts for gradient in part.get_main_grads_for_grad_norm()]
    if not gradients:
        return torch.zeros(1, dtype=torch.float64, device=local_device())
    return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients))).square().double().view(1)


def factor_of_update(factor: Tensor, grad_norm: Tensor, clip_grad: float) -> Tensor:
    """Return the gradient factor times that which clips the norm to `clip_grad`; `clip_grad=0` disables clipping."""
    return factor * (clip_grad / (grad_norm + 1e-6)).clamp(max=1.0) if clip_grad else factor  # as in Megatron-Core
