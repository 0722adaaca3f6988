"""A short training run under one layout; every rank reports unsharded tensors.

`dit.verify.compare` compares the reports of two layouts.
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
from dit.objectives.addressed_noise import NoiseMixer
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
# Gradients that are zero in exact arithmetic (a key bias does not change the softmax) are rounding errors, which Adam
# would
# scale to full steps if eps were smaller than these errors.
OPTIMIZER = OptimizerConfig(lr=1e-2, clip_grad=0.5, weight_decay=0.1, eps=1e-6)

Stream = Callable[[int, int, int], Iterator[PackedBatch]]
"""Maps (data-parallel rank, data-parallel size, token multiple) to this rank's packs; picklable."""


@dataclass(kw_only=True)
class Trial:
    """A model, its data and the layout to train it under.

    Attributes:
        stream: the data; in each step, all ranks together get the same packs under every layout.
        micro_batches: micro-batches of one optimizer step, over all data-parallel ranks.
        steps: number of optimizer steps.
        recompute: values of `recompute`, `recompute_layers` and `kernels` of `TrainingConfig`.
        alter: called with the built model before it is wrapped, for example to inject an error.
        by_rank: also report the local gradients of each rank.
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
    """The model, optimizer and groups of a trial on this rank."""

    trial: Trial
    dims: ParallelDims
    groups: ProcessGroups
    chunks: list[Backbone]
    wrapped: list[Any]
    optimizer: MegatronOptimizer
    shards: list[MasterShard]
    update: Update
    mix: NoiseMixer

    @property
    def model(self) -> ModelConfig:
        return self.trial.model


def named_parameters(chunks: Sequence[nn.Module]) -> list[tuple[str, nn.Parameter]]:
    """Return the named parameters of all chunks of this rank."""
    return [pair for chunk in chunks for pair in chunk.named_parameters()]


def gathered(shard: MasterShard, values: Tensor) -> Tensor:
    """Gather values that are sharded like a master weight into a parameter-shaped fp32 tensor, on every rank.

    Shards are summed as integers, because adding integer zeros changes no bit, not even the sign of a zero.
    """
    if shard.group is None or shard.group.size() == 1:
        return values.detach().view(shard.parameter.shape).clone()
    flat = torch.zeros(shard.parameter.numel(), dtype=torch.float32, device=values.device)
    flat[shard.start : shard.stop] = values.detach().flatten()
    dist.all_reduce(flat.view(torch.int32), group=shard.group)
    return flat.view(shard.parameter.shape)


def unshard(tensor: Tensor, parameter: Tensor, groups: ProcessGroups) -> Tensor:
    """Gather a parameter-shaped tensor over the tensor-parallel ranks."""
    dim = sharding_of(parameter).split_dim
    if groups.tp.size() == 1 or dim is None:
        return tensor.detach().clone()
    parts = [torch.empty_like(tensor) for _ in range(groups.tp.size())]
    dist.all_gather(parts, tensor.contiguous(), group=groups.tp)
    return torch.cat(parts, dim)


def copies_differ(parameter: Tensor, groups: ProcessGroups) -> bool:
    """Return whether the copies of a parameter differ between ranks."""
    for group in map(groups.along, sharding_of(parameter).replicated_over):
        copies = [torch.empty_like(parameter) for _ in range(group.size())]
        dist.all_gather(copies, parameter.detach().contiguous(), group=group)
        if any(not torch.equal(copies[0], c) for c in copies[1:]):
            return True
    return False


def of_all_stages(named: list[tuple[str, Tensor]], groups: ProcessGroups) -> tuple[dict[str, Tensor], list[str]]:
    """Gather (name, tensor) pairs over stages and experts; also return the names whose copies differ."""
    parts: list[Any] = [None] * groups.different_parameters.size()
    dist.all_gather_object(parts, named, group=groups.different_parameters)
    tensors: dict[str, Tensor] = {}
    pairs = [pair for part in parts for pair in part]
    drifted = [name for name, tensor in pairs if not torch.equal(tensors.setdefault(name, tensor), tensor)]
    return tensors, drifted


@torch.no_grad()
def disturb_constants(chunks: Sequence[nn.Module], groups: ProcessGroups) -> None:
    """Add noise to parameters that start as zeros or ones, because a zero-initialised network has few gradients."""
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
    """Build the groups and the model of a trial on this rank; no parameter is constant."""
    model, parallel, training = trial.model, trial.parallel, training_of(trial)
    groups = process_groups.initialize(parallel)
    chunks = build_model(model, parallel, training, groups, uncertainty=trial.objective.weighting is not None)
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
    """Gathers the unsharded gradients and weights on every rank."""

    def gradients(self, session: Built) -> dict[str, Any]:
        """Return `gradients` of the first step by name, and `by_rank` if the trial requests it."""
        local = [gathered(s, s.grad) for s in session.shards]
        named = [(s.name, unshard(grad, s.parameter, session.groups)) for s, grad in zip(session.shards, local)]
        gradients, _ = of_all_stages(named, session.groups)
        by_rank = {"by_rank": _of_all_ranks(session.shards, local, session.groups)} if session.trial.by_rank else {}
        return {"gradients": gradients, **by_rank}

    def weights(self, session: Built) -> dict[str, Any]:
        """Return `parameters` after the last step by name, and `drifted`, the names whose copies differ."""
        named = [(s.name, unshard(s.parameter.data, s.parameter, session.groups)) for s in session.shards]
        parameters, drifted = of_all_stages(named, session.groups)
        return {"parameters": parameters, "drifted": drifted + drifted_copies(session)}


def drifted_copies(session: Built) -> list[str]:
    """Return the names of this rank's parameters whose copies on other ranks differ."""
    return [s.name for s in session.shards if copies_differ(s.parameter, session.groups)]


def train(
    trial: Trial, then: Optional[Callable[[Built], None]] = None, report: Optional[Report] = None
) -> dict[str, Any]:
    """Train a trial's steps; a step whose fp16 gradients overflow makes no update.

    Args:
        then: called with the trained model before its process groups are destroyed.
        report: reports gradients and weights; `Report` if None.

    Returns:
        `losses`, `grad_norms` and `loss_scales` of every step, `part_norms` of the first, and the results of `report`.
    """
    report = report or Report()
    session = build(trial)
    groups, optimizer = session.groups, session.optimizer
    packs, scale = trial.stream(groups.dp_rank, groups.dp_size, session.dims.token_multiple), loss_scale_of(optimizer)
    if scale is not None:
        first = next(packs)
        scale.start(first.layout.valid_tokens)
        packs = itertools.chain([first], packs)
    batches = (shard(pack, groups.cp.rank(), groups.cp.size(), trial.parallel.context_split) for pack in packs)
    result: dict[str, Any] = {"losses": [], "grad_norms": [], "loss_scales": []}
    for step in range(trial.steps):
        for chunk in session.wrapped:
            chunk.zero_grad_buffer()
        optimizer.zero_grad()
        forward_step = training_forward_step(trial.objective, trial.model, SEED, step, session.mix)
        out = forward_backward(forward_step, batches, session.wrapped, session.dims.micro_batches, groups)
        nothing = torch.zeros(len(trial.objective.logged) + 1, dtype=torch.float64)
        sums = sum((o["sums"].double() for o in out), nothing).float()
        dist.all_reduce(sums, group=groups.dp_cp)
        dist.all_reduce(sums, group=groups.pp)
        result["losses"].append((sums[: len(trial.objective.terms)].sum() / sums[-1]).item())
        result["grad_norms"].append(optim.gradient_norm(optimizer))
        result["loss_scales"].append(1.0 if scale is None else scale.value)
        overflowed = scale is not None and scale.settle()
        if step == 0:
            norms = PartNorms(optimizer, session.shards)
            norms.measure(step)
            result["part_norms"] = norms.take()
            result |= report.gradients(session)
        if not overflowed:
            session.update(result["grad_norms"][-1], step + 1)
    # With an overlapped gather the last update waits for the next forward pass.
    optim.copy_masters_to_model(optimizer, session.wrapped)
    if trial.parallel.data_parallel == "fsdp":
        session.wrapped[0].start_param_sync(force_sync=True)  # gather all weights, to see what a forward pass would use
    result |= report.weights(session)
    if then is not None:
        then(session)
    result["expert_load"] = expert_load(session.chunks, torch.device("cpu"))
    process_groups.release()
    result["connections"] = len(list(Path("/proc/self/fd").glob("*")))
    return result


def _of_all_ranks(shards: Sequence[MasterShard], local: Sequence[Tensor], groups: ProcessGroups) -> dict[str, Any]:
    """Return for each rank, by its coordinates, the origin and values of its local gradients by name."""
    local_gradients = {
        s.name: (sharding_of(s.parameter, s.name).origin(s.parameter.shape, groups.tp.rank()), grad)
        for s, grad in zip(shards, local)
    }
    by_rank: list[Any] = [None] * groups.world_size
    dist.all_gather_object(by_rank, (place_of(groups), local_gradients))
    return dict(by_rank)


def place_of(groups: ProcessGroups) -> str:
    """Return this rank's coordinates in the layout, such as "tp 0 pp 1"."""
    return " ".join(
        f"{name} {group.rank()}"
        for name, group in (("tp", groups.tp), ("pp", groups.pp), ("cp", groups.cp), ("dp", groups.dp))
        if group.size() > 1
    )


def run_case(case: dict[str, Any]) -> dict[str, Any]:
    """Train `case["trial"]`: a task of `dit.verify.ranks.run_world`."""
    return train(case["trial"])
