"""A short training run under one layout; rank 0 reports the unsharded tensors.

`dit.verify.compare` compares the reports of two layouts.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Optional

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dit import boxes
from dit.backends import process_groups
from dit.backends.device import local_device
from dit.backends.init import init_of
from dit.backends.process_groups import ProcessGroups, gather_objects
from dit.backends.sharding import sharding_of
from dit.batch import PackedBatch
from dit.context_parallel.shard_batch import shard
from dit.errors import ConfigError
from dit.models.base import Backbone, ModelConfig
from dit.monitoring.expert_load import expert_layers, expert_load
from dit.objectives.addressed_noise import NoiseMixer
from dit.objectives.base import Objective
from dit.objectives.flow_matching import FlowMatching
from dit.optimizer.master_weights import MasterShard, copy_masters_to_model, part_of
from dit.optimizer.model_state import ModelState, build_model_state
from dit.optimizer.part_norms import PartNorms
from dit.parallel.build import build_model, wrap
from dit.parallel.dims import ParallelConfig, ParallelDims, check_parallel
from dit.parallel.implementations import target_of
from dit.settings import OptimizerConfig, TrainingConfig
from dit.step.balance import balanced
from dit.step.forward_step import ForwardStep, noise_kernel, training_forward_step
from dit.step.train_step import Action, Part, Step, StepFunctions, StepObserver, train_step

SEED = 5
TRAINING = TrainingConfig(global_batch_size=4, precision="fp32", seed=SEED, ema_decay=None)
# Gradients that are zero in exact arithmetic (a key bias does not change the softmax) are rounding errors, which Adam
# would scale to full steps if eps were smaller than these errors.
OPTIMIZER = OptimizerConfig(lr=1e-2, clip_grad=0.5, weight_decay=0.1, eps=1e-6)
# Rounding errors of half precision are much larger; with this eps, an update is proportional to its gradient.
HALF_OPTIMIZER = replace(OPTIMIZER, lr=1.0, eps=0.1)
EMA_DECAY = 0.75
"""Decay of the weight average: two updates change it, and it differs from the share of the new weights, 1 - decay."""
AVERAGE_RTOL = 1e-6
"""Tolerance of averages: the order of the operations of an update in fp32 differs."""
LARGE_LOSS_SCALE = 2.0**30
"""Loss scale with which fp16 gradients overflow."""

Stream = Callable[[int, int, int], Iterator[PackedBatch]]
"""Maps (data-parallel rank, data-parallel size, token multiple) to this rank's packs; picklable."""


@dataclass(kw_only=True)
class Trial:
    """A model, its data and the layout to train it under.

    Attributes:
        stream: the data; in each step, all ranks together get the same packs under every layout.
        training: micro-batches of a step over all replicas (`global_batch_size`), precision, seed, recompute, kernels,
            average and loss scale.
        alter: called with the built model before it is wrapped, for example to inject an error.
        by_rank: also report the local gradients of each rank.
    """

    model: ModelConfig
    parallel: ParallelConfig
    stream: Stream
    objective: Objective = field(default_factory=FlowMatching)
    training: TrainingConfig = field(default_factory=lambda: TRAINING)
    optimizer: OptimizerConfig = field(default_factory=lambda: OPTIMIZER)
    steps: int = 2
    alter: Optional[Callable[[list[Backbone]], None]] = None
    by_rank: bool = False


@dataclass(kw_only=True)
class Built(ModelState):
    """The model and optimizer of a trial on this rank."""

    trial: Trial
    dims: ParallelDims
    mix: NoiseMixer

    @property
    def model(self) -> ModelConfig:
        return self.trial.model


def named_parameters(chunks: Sequence[nn.Module]) -> list[tuple[str, nn.Parameter]]:
    """Return the named parameters of all chunks of this rank."""
    return [pair for chunk in chunks for pair in chunk.named_parameters()]


def place_of(groups: ProcessGroups) -> str:
    """Return this rank's coordinates in the layout, such as "tp 0 pp 1"."""
    return " ".join(
        f"{name} {group.rank()}"
        for name, group in (("tp", groups.tp), ("pp", groups.pp), ("cp", groups.cp), ("dp", groups.dp))
        if group.size() > 1
    )


LocalValues = tuple[str, boxes.Part, Any]
"""Name of a tensor, position of some of its values, and these values."""


def of_all_ranks(local: Iterable[LocalValues], groups: ProcessGroups) -> dict[str, list[LocalValues]]:
    """Return the values of all ranks on rank 0, by the rank's coordinates in the layout; nothing on other ranks."""
    # numpy has no bfloat16. Pickling a tensor takes 0.6 ms, much more than an array, and pickles its whole storage, so
    # a view of the buffer of all weights is copied first.
    local = [(name, part, x.detach().cpu().contiguous()) for name, part, x in local]
    sent = [(name, part, x.clone() if x.dtype == torch.bfloat16 else x.numpy()) for name, part, x in local]
    received: Optional[list[Any]] = [None] * groups.world_size if groups.rank == 0 else None
    dist.gather_object((place_of(groups), sent), received)
    return dict(received or ())


def assembled(by_rank: Mapping[str, Sequence[LocalValues]]) -> tuple[dict[str, Tensor], list[str]]:
    """Return unsharded tensors by name from the values of all ranks, and the names of tensors whose copies differ."""
    tensors, filled, differing = dict[str, Tensor](), dict[str, Tensor](), dict[str, None]()
    for name, part, values in itertools.chain(*by_rank.values()):
        values = torch.as_tensor(values)
        tensor = tensors.setdefault(name, torch.zeros(part.shape, dtype=values.dtype))
        if tensor.shape != part.shape:
            differing[name] = None
            continue
        is_filled = filled.setdefault(name, torch.zeros(part.shape, dtype=torch.bool))
        for box, copy in part.views(values, part.start):
            place = box.slices_in(boxes.Box.of(part.shape))
            first = torch.where(is_filled[place], tensor[place], copy)
            if not torch.allclose(first, copy, rtol=0.0, atol=0.0, equal_nan=True):
                differing[name] = None
            tensor[place], is_filled[place] = first, True
    return tensors, list(differing)


def global_values(
    named: Iterable[tuple[str, MasterShard, Tensor]], groups: ProcessGroups
) -> tuple[dict[str, Tensor], list[str]]:
    """Gather values that are sharded like the master weights; returns as `assembled`, on rank 0.

    Args:
        named: name, shard and local values of each tensor.
    """
    local = [(name, part_of(s.parameter, groups, s.start, s.stop), values) for name, s, values in named]
    return assembled(of_all_ranks(local, groups))


def global_weights(
    named: Iterable[tuple[str, nn.Parameter]], groups: ProcessGroups
) -> tuple[dict[str, Tensor], list[str]]:
    """Gather named parameters of the model; returns as `assembled`, on rank 0."""
    return assembled(of_all_ranks([(name, part_of(p, groups), p.detach()) for name, p in named], groups))


@torch.no_grad()
def disturb_constants(chunks: Sequence[nn.Module], groups: ProcessGroups) -> None:
    """Add noise to parameters that start as zeros or ones: in a zero-initialised network, many gradients are zero."""
    for name, parameter in named_parameters(chunks):
        if init_of(parameter, name).kind == "constant":
            sharding = sharding_of(parameter, name)
            shape = sharding.global_shape(parameter.shape, groups.tp.size())
            values = torch.randn(shape, generator=torch.Generator().manual_seed(sum(name.encode()))) * 0.1
            for dim, start in enumerate(sharding.origin(parameter.shape, groups.tp.rank())):
                values = values.narrow(dim, start, parameter.shape[dim])
            parameter.add_(values.to(parameter.device))


def build_chunks(trial: Trial) -> tuple[ProcessGroups, list[Backbone]]:
    """Build the groups and the model of a trial on this rank; no parameter has equal elements only."""
    model, parallel, training = trial.model, trial.parallel, trial.training
    groups = process_groups.initialize(parallel)
    chunks = build_model(model, parallel, training, groups, auxiliary=trial.objective.auxiliary)
    disturb_constants(chunks, groups)
    if trial.alter is not None:
        trial.alter(chunks)
    return groups, chunks


def build(trial: Trial) -> Built:
    """Build the groups, the model and the optimizer of a trial on this rank."""
    model, parallel, training = trial.model, trial.parallel, trial.training
    world_size = dist.get_world_size() if dist.is_initialized() else process_groups.world_size_from_environment()
    dims = check_parallel(model, parallel, training, world_size)
    groups, chunks = build_chunks(trial)
    target = target_of(model, training.precision)
    wrapped = wrap(chunks, parallel, groups, target, training.kernels)
    auxiliary = trial.objective.auxiliary
    state = build_model_state(chunks, wrapped, trial.optimizer, parallel, training, groups, target, auxiliary)
    return Built(**vars(state), trial=trial, dims=dims, mix=noise_kernel(model, training))


def gradients_of(session: Built) -> dict[str, Any]:
    """Return `gradients` of the first step by name, and `by_rank` if the trial requests it, on rank 0."""
    groups = session.groups
    local = [(s.name, part_of(s.parameter, groups, s.start, s.stop), s.grad) for s in session.shards]
    by_rank = of_all_ranks(local, groups)
    return {"gradients": assembled(by_rank)[0], **({"by_rank": by_rank} if session.trial.by_rank else {})}


def weights_of(session: Built) -> dict[str, Any]:
    """Return, on rank 0, `parameters` after the last step, `averages` if there are any, and `drifted`.

    `drifted` has the names of parameters and averages whose copies differ anywhere.
    """
    groups, shards, ema = session.groups, session.shards, session.ema
    weights, drifted = global_weights([(s.name, s.parameter) for s in shards], groups)
    result: dict[str, Any] = {"parameters": {name: x.float() for name, x in weights.items()}, "drifted": drifted}
    if ema is not None:
        named = [
            (f"{s.name} (power {number})" if number else s.name, s, values)
            for number, average in enumerate([ema, *ema.powers])
            for s, values in zip(shards, average.values)
        ]
        result["averages"], differing = global_values(named, groups)
        result["drifted"] += [f"{name} (average)" for name in differing]
    return result


class Exactness:
    """Relations between the weights of this rank that hold after every update, in any precision.

    The model's weights are the fp32 main weights rounded to its precision, to the bit. The average is in fp32 and
    equals one that is computed here from the main weights, on the host.

    Attributes:
        faults: a line for each parameter for which a relation does not hold.
    """

    def __init__(self, session: Built) -> None:
        self.session, self.faults = session, dict[str, None]()
        self._averages = [s.main.detach().cpu().clone() for s in session.shards if session.ema is not None]

    def check_weights(self) -> None:
        for s in self.session.shards:
            used = s.parameter.detach().flatten()[s.start : s.stop]
            rounded = s.main.detach().flatten().to(used.dtype)
            if not torch.allclose(used, rounded, rtol=0.0, atol=0.0, equal_nan=True):
                self.faults[f"{s.name}: the weight is not its fp32 main weight in {used.dtype}"] = None

    def check_averages(self) -> None:
        """Check the averages after an update; call after every one."""
        ema, decay = self.session.ema, self.session.trial.training.ema_decay
        if ema is None or decay is None:
            return
        for s, expected, average in zip(self.session.shards, self._averages, ema.values):
            expected.lerp_(s.main.detach().cpu(), 1.0 if self.session.step <= ema.start_step else 1.0 - decay)
            close = torch.allclose(
                average.detach().cpu(), expected, rtol=AVERAGE_RTOL, atol=AVERAGE_RTOL, equal_nan=True
            )
            if average.dtype != torch.float32 or not close:
                self.faults[f"{s.name}: the average in {average.dtype} is not that of the fp32 main weights"] = None


class Recorder(StepObserver):
    """Records losses and norms of every update, and reports the gradients of the first."""

    def __init__(self, session: Built) -> None:
        self.session = session
        self.result: dict[str, Any] = {"losses": [], "grad_norms": [], "loss_scales": []}
        self._loads = [layer.load for chunk in session.chunks for _, layer in expert_layers(chunk)]

    def enter(self, part: Part) -> None:
        if part == "forward and backward":
            for load in self._loads:
                load.begin_step()

    def discard(self, step: Step) -> None:
        for load in self._loads:
            load.drop_step()

    def judge(self, step: Step) -> Action:
        scale = self.session.loss_scale
        # The gradients of a loss that is not finite do not depend on the scale.
        if step.overflowed and scale is not None and math.isfinite(step.loss):
            raise ConfigError(f"step {step.number}: the gradients overflow {scale.exhausted()}")
        self.result["losses"].append(step.loss)
        self.result["grad_norms"].append(step.grad_norm)
        self.result["loss_scales"].append(1.0 if scale is None else scale.value)
        if step.number == 1:
            norms = PartNorms(self.session.optimizer, self.session.shards)
            norms.measure(step.number)
            self.result["part_norms"] = norms.take()
            self.result |= gradients_of(self.session)
        return "update"


def train(trial: Trial, then: Optional[Callable[[Built], None]] = None) -> dict[str, Any]:
    """Train a trial's steps; a step whose fp16 gradients overflow is repeated with a lower loss scale.

    Args:
        then: called with the trained model before its process groups are destroyed.

    Returns:
        `losses`, `grad_norms` and `loss_scales` of every step, `part_norms` of the first, `inexact`, the faults of all
        ranks found by `Exactness`, and the results of `gradients_of` and `weights_of`.
    """
    session = build(trial)
    groups, micro_batches = session.groups, session.dims.micro_batches
    stream = trial.stream(groups.dp_rank, groups.dp_size, session.dims.token_multiple)
    packs = balanced(stream, lambda pack: pack.layout.valid_tokens, micro_batches, groups)
    cp, split = groups.cp, trial.parallel.context_split

    def forward_step(step: int) -> ForwardStep:
        return training_forward_step(trial.objective, trial.model, trial.training.seed, step, session.mix)

    rates = trial.optimizer.lr, trial.optimizer.beta1
    functions = StepFunctions(trial.objective, forward_step, lambda _: rates, micro_batches)
    recorder = Recorder(session)
    exactness = Exactness(session)
    is_fsdp = trial.parallel.data_parallel == "fsdp"
    for _ in range(trial.steps):
        step_packs = [trial.objective.of_full_pack(next(packs)) for _ in range(micro_batches)]
        step_batches = [shard(pack, cp.rank(), cp.size(), split).to(local_device()) for pack in step_packs]
        while train_step(session, iter(step_batches), functions, recorder).action == "overflow":
            session.step -= 1
        exactness.check_averages()
    if not is_fsdp:  # which has no local weights between steps
        exactness.check_weights()
    result = recorder.result
    # With an overlapped gather the last update waits for the next forward pass.
    copy_masters_to_model(session.optimizer, session.wrapped)
    if is_fsdp:
        for chunk in session.wrapped:  # gather all weights, to see what a forward pass would use
            chunk.start_param_sync(force_sync=True)
        exactness.check_weights()
    result["inexact"] = list(dict.fromkeys(itertools.chain(*gather_objects(list(exactness.faults)))))
    result |= weights_of(session)
    if then is not None:
        then(session)
    result["expert_load"] = expert_load(session.chunks, local_device())
    process_groups.release()
    result["connections"] = len(list(Path("/proc/self/fd").glob("*")))
    return result


def run_case(case: dict[str, Any]) -> dict[str, Any]:
    """Train `case["trial"]`: a task of `dit.verify.ranks.run_world`."""
    return train(case["trial"])
