"""A short training under one layout, of which every rank reports global tensors.

`dit.verify.compare` compares what two layouts report.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Optional

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dit.backends import process_groups
from dit.backends.init import init_of
from dit.backends.megatron_types import MegatronOptimizer
from dit.backends.process_groups import ProcessGroups
from dit.backends.sharding import sharding_of
from dit.batch import PackedBatch
from dit.context_parallel.shard_batch import shard
from dit.models.base import Backbone, ModelConfig
from dit.monitoring.expert_load import expert_load
from dit.objectives.addressed_noise import Mix
from dit.objectives.base import Objective
from dit.objectives.flow_matching import FlowMatching
from dit.optimizer import master_weights as optim
from dit.optimizer.master_weights import MasterShard, master_shards
from dit.optimizer.part_norms import PartNorms
from dit.optimizer.update import Update, build_update
from dit.parallel.build import build_model, build_optimizer, wrap
from dit.parallel.dims import ParallelConfig, ParallelDims, check_parallel
from dit.parallel.implementations import target_of
from dit.parallel.loss_scale import loss_scale_of
from dit.parallel.schedule import forward_backward
from dit.settings import OptimizerConfig, TrainingConfig
from dit.training.step import noise_kernel, training_forward_step

SEED = 5
# Gradients that are zero in exact arithmetic (a bias of keys changes no softmax) are rounding errors, which Adam would
# scale to full steps if its eps were smaller than they are.
OPTIMIZER = OptimizerConfig(lr=1e-2, clip_grad=0.5, weight_decay=0.1, eps=1e-6)

Stream = Callable[[int, int, int], Iterator[PackedBatch]]
"""From (data-parallel rank, data-parallel size, token multiple) to this rank's global packs; picklable."""


@dataclass(kw_only=True)
class Trial:
    """What is trained, and under which layout.

    Attributes:
        stream: the data; the ranks of a step together get the same packs on every layout.
        micro_batches: of one optimizer step, over all data-parallel ranks.
        steps: optimizer steps.
        recompute: `recompute`, `recompute_layers` and `kernels` of `TrainingConfig`.
        alter: changes the built model before it is wrapped, such as to break it.
        by_rank: report each rank's gradients, too.
    """

    model: ModelConfig
    parallel: ParallelConfig
    stream: Stream
    objective: Objective = field(default_factory=FlowMatching)
    micro_batches: int = 4
    steps: int = 2
    precision: Literal["bf16", "fp16", "fp32"] = "fp32"
    recompute: Mapping[str, Any] = field(default_factory=dict)
    alter: Optional[Callable[[list[Backbone]], None]] = None
    by_rank: bool = False


@dataclass(kw_only=True)
class Built:
    """What a trial trains, on this rank."""

    trial: Trial
    dims: ParallelDims
    groups: ProcessGroups
    chunks: list[Backbone]
    wrapped: list[Any]
    optimizer: MegatronOptimizer
    shards: list[MasterShard]
    update: Update
    mix: Optional[Mix]

    @property
    def model(self) -> ModelConfig:
        return self.trial.model


def named_parameters(chunks: Sequence[nn.Module]) -> list[tuple[str, nn.Parameter]]:
    """Return the named parameters of all chunks of this rank."""
    return [pair for chunk in chunks for pair in chunk.named_parameters()]


def gathered(shard: MasterShard, values: Tensor) -> Tensor:
    """Join values that are split like a master shard into the parameter-shaped fp32 tensor, on every rank of its group.

    The shards are joined as integers: adding zero bits changes none, not even the sign of a zero.
    """
    if shard.group is None or shard.group.size() == 1:
        return values.detach().view(shard.parameter.shape).clone()
    flat = torch.zeros(shard.parameter.numel(), dtype=torch.float32, device=values.device)
    flat[shard.start : shard.stop] = values.detach().flatten()
    dist.all_reduce(flat.view(torch.int32), group=shard.group)
    return flat.view(shard.parameter.shape)


def whole(tensor: Tensor, parameter: Tensor, groups: ProcessGroups) -> Tensor:
    """Join a parameter-shaped tensor over the tensor-parallel ranks."""
    dim = sharding_of(parameter).split_dim
    if groups.tp.size() == 1 or dim is None:
        return tensor.detach().clone()
    parts = [torch.empty_like(tensor) for _ in range(groups.tp.size())]
    dist.all_gather(parts, tensor.contiguous(), group=groups.tp)
    return torch.cat(parts, dim)


def copies_differ(parameter: Tensor, groups: ProcessGroups) -> bool:
    """Return whether two ranks that should have the same values have different ones."""
    for group in map(groups.along, sharding_of(parameter).replicated_over):
        copies = [torch.empty_like(parameter) for _ in range(group.size())]
        dist.all_gather(copies, parameter.detach().contiguous(), group=group)
        if any(not torch.equal(copies[0], c) for c in copies[1:]):
            return True
    return False


def of_all_stages(named: list[tuple[str, Tensor]], groups: ProcessGroups) -> tuple[dict[str, Tensor], list[str]]:
    """Join (name, tensor) pairs over the stages and experts; also list the names whose copies differ."""
    parts: list[Any] = [None] * groups.different_parameters.size()
    dist.all_gather_object(parts, named, group=groups.different_parameters)
    found: dict[str, Tensor] = {}
    pairs = [pair for part in parts for pair in part]
    drifted = [name for name, tensor in pairs if not torch.equal(found.setdefault(name, tensor), tensor)]
    return found, drifted


@torch.no_grad()
def disturb_constants(chunks: Sequence[nn.Module], groups: ProcessGroups) -> None:
    """Add noise to what starts as zeros or ones: a zero-initialised network would hide most gradients."""
    for name, parameter in named_parameters(chunks):
        if init_of(parameter, name).kind == "constant":
            sharding = sharding_of(parameter, name)
            shape = sharding.global_shape(parameter.shape, groups.tp.size())
            values = torch.randn(shape, generator=torch.Generator().manual_seed(sum(name.encode()))) * 0.1
            for dim, start in enumerate(sharding.origin(parameter.shape, groups.tp.rank())):
                values = values.narrow(dim, start, parameter.shape[dim])
            parameter.add_(values)


def training_of(trial: Trial) -> TrainingConfig:
    """Return the training settings of a trial."""
    return TrainingConfig(
        global_batch_size=trial.micro_batches, precision=trial.precision, seed=SEED, **trial.recompute
    )


def build_chunks(trial: Trial) -> tuple[ProcessGroups, list[Backbone]]:
    """Build the groups and the model of a trial on this rank, in which nothing is zero."""
    model, parallel, training = trial.model, trial.parallel, training_of(trial)
    groups = process_groups.initialize(parallel)
    chunks = build_model(model, parallel, training, groups, uncertainty=trial.objective.learns_uncertainty)
    disturb_constants(chunks, groups)
    if trial.alter is not None:
        trial.alter(chunks)
    return groups, chunks


def build(trial: Trial) -> Built:
    """Build the groups, the model and the optimizer of a trial on this rank."""
    model, parallel, training = trial.model, trial.parallel, training_of(trial)
    world_size = dist.get_world_size() if dist.is_initialized() else process_groups.world_size_from_environment()
    dims = check_parallel(model, parallel, training, world_size)
    groups, chunks = build_chunks(trial)
    wrapped = wrap(chunks, parallel, groups)
    optimizer = build_optimizer(wrapped, OPTIMIZER, parallel, training, groups)
    shards, target = master_shards(optimizer, chunks), target_of(model, trial.precision)
    return Built(
        trial=trial,
        dims=dims,
        groups=groups,
        chunks=chunks,
        wrapped=wrapped,
        optimizer=optimizer,
        shards=shards,
        mix=noise_kernel(model, training),
        update=build_update(optimizer, shards, None, OPTIMIZER.clip_grad, target, training.kernels),
    )


class Report:
    """What a rank reports of its gradients and weights: the global tensors, which every rank gathers."""

    def gradients(self, it: Built) -> dict[str, Any]:
        """Return `gradients` of the first step by name, and, where asked for, `by_rank`."""
        local = [gathered(s, s.grad) for s in it.shards]
        named = [(s.name, whole(grad, s.parameter, it.groups)) for s, grad in zip(it.shards, local)]
        found, _ = of_all_stages(named, it.groups)
        by_rank = {"by_rank": _of_all_ranks(it.shards, local, it.groups)} if it.trial.by_rank else {}
        return {"gradients": found, **by_rank}

    def weights(self, it: Built) -> dict[str, Any]:
        """Return `parameters` after the last step by name, and `drifted`, those whose copies differ."""
        named = [(s.name, whole(s.parameter.data, s.parameter, it.groups)) for s in it.shards]
        found, drifted = of_all_stages(named, it.groups)
        return {"parameters": found, "drifted": drifted + drifted_copies(it)}


def drifted_copies(it: Built) -> list[str]:
    """Return the names of this rank's parameters of which other ranks have other values."""
    return [s.name for s in it.shards if copies_differ(s.parameter, it.groups)]


def train(
    trial: Trial, then: Optional[Callable[[Built], None]] = None, report: Optional[Report] = None
) -> dict[str, Any]:
    """Train a trial's steps; a step whose fp16 gradients overflow makes no update.

    Args:
        then: called with what was trained before it is torn down.
        report: of the gradients and the weights; `Report` if None.

    Returns:
        `losses`, `grad_norms` and `loss_scales` of every step, `part_norms` of the first, and what is reported.
    """
    report = report or Report()
    it = build(trial)
    groups, optimizer = it.groups, it.optimizer
    packs, scale = trial.stream(groups.dp_rank, groups.dp_size, it.dims.token_multiple), loss_scale_of(optimizer)
    if scale is not None:
        first = next(packs)
        scale.start(first.layout.valid_tokens)
        packs = itertools.chain([first], packs)
    batches = (shard(pack, groups.cp.rank(), groups.cp.size(), trial.parallel.context_split) for pack in packs)
    result: dict[str, Any] = {"losses": [], "grad_norms": [], "loss_scales": []}
    for step in range(trial.steps):
        for chunk in it.wrapped:
            chunk.zero_grad_buffer()
        optimizer.zero_grad()
        forward_step = training_forward_step(trial.objective, trial.model, SEED, step, it.mix)
        out = forward_backward(forward_step, batches, it.wrapped, it.dims.micro_batches, groups)
        nothing = torch.zeros(len(trial.objective.logged) + 1, dtype=torch.float64)
        sums = sum((o["sums"].double() for o in out), nothing).float()
        dist.all_reduce(sums, group=groups.dp_cp)
        dist.all_reduce(sums, group=groups.pp)
        result["losses"].append((sums[: len(trial.objective.terms)].sum() / sums[-1]).item())
        result["grad_norms"].append(optim.gradient_norm(optimizer))
        result["loss_scales"].append(1.0 if scale is None else scale.value)
        overflowed = scale is not None and scale.settle()
        if step == 0:
            norms = PartNorms(optimizer, it.shards)
            norms.measure(step)
            result["part_norms"] = norms.take()
            result |= report.gradients(it)
        if not overflowed:
            it.update(result["grad_norms"][-1], step + 1)
    # With an overlapped gather the last update waits for the next forward pass.
    optim.copy_masters_to_model(optimizer, it.wrapped)
    if trial.parallel.data_parallel == "fsdp":
        it.wrapped[0].start_param_sync(force_sync=True)  # gather all weights, to see what a forward pass would use
    result |= report.weights(it)
    if then is not None:
        then(it)
    result["expert_load"] = expert_load(it.chunks, torch.device("cpu"))
    process_groups.release()
    result["connections"] = len(list(Path("/proc/self/fd").glob("*")))
    return result


def _of_all_ranks(shards: Sequence[MasterShard], local: Sequence[Tensor], groups: ProcessGroups) -> dict[str, Any]:
    """Return the gradients of every rank, by the rank's place: the origin of its part by name, and the values."""
    mine = {
        s.name: (sharding_of(s.parameter, s.name).origin(s.parameter.shape, groups.tp.rank()), grad)
        for s, grad in zip(shards, local)
    }
    found: list[Any] = [None] * groups.world_size
    dist.all_gather_object(found, (place_of(groups), mine))
    return dict(found)


def place_of(groups: ProcessGroups) -> str:
    """Return this rank's place in the layout, such as "tp 0 pp 1"."""
    return " ".join(
        f"{name} {group.rank()}"
        for name, group in (("tp", groups.tp), ("pp", groups.pp), ("cp", groups.cp), ("dp", groups.dp))
        if group.size() > 1
    )


def run_case(case: dict[str, Any]) -> dict[str, Any]:
    """Train `case["trial"]`: a task of `dit.verify.ranks.run_world`."""
    return train(case["trial"])
