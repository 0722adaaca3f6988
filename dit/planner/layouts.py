"""Candidate layouts of a search: all sizes are powers of two, and settings are checked as a run checks them."""

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Literal, Optional

from dit.errors import ConfigError
from dit.models.base import ModelConfig
from dit.objectives.base import Objective
from dit.parallel.dims import ParallelConfig, ParallelDims, check_parallel
from dit.planner.devices import Device
from dit.planner.time import Cluster
from dit.settings import OptimizerConfig, TrainingConfig
from dit.tracing.packs import PackShape

DataParallel = Literal["ddp", "distributed_optimizer", "fsdp"]
Recompute = Literal["none", "selective"]
RECOMPUTED = (0.0, 0.25, 0.5, 0.75, 1.0)
"""Shares of layers with full recompute, rounded to whole layers."""
FSDP_TENSOR = 2
"""Largest tensor parallel size with FSDP, which already shards the weights."""
FEWEST_TOKENS = 2048
"""Smallest number of tokens of a sample per rank for which context parallelism is searched."""


@dataclass(frozen=True)
class Shape:
    """The part of a layout that determines a trace.

    Attributes:
        fsdp: whether weights, gradients and optimizer are sharded; otherwise only the optimizer is.
        instances: copies of the state under FSDP, each sharded inside a group of ranks.
    """

    tensor: int
    sequence: bool
    context: int
    expert: int
    recompute: Recompute
    fsdp: bool = False
    instances: int = 1


@dataclass(frozen=True)
class Candidate:
    """A layout, a micro-batch size and a kind of recompute.

    Attributes:
        recomputed: share of each stage's layers with full recompute; it replaces the recompute setting of the shape.
    """

    shape: Shape
    pipeline: int
    chunks: Optional[int]
    data_parallel: DataParallel
    micro_batch_size: int
    recomputed: float = 0.0

    def parallel(self, base: ParallelConfig, *, overlaps: bool = True) -> ParallelConfig:
        """Return the layout with the recipe's other settings.

        Args:
            overlaps: communicate gradients and weights during the passes.
        """
        return replace(
            base,
            tensor_model_parallel_size=self.shape.tensor,
            sequence_parallel=self.shape.sequence,
            context_parallel_size=self.shape.context,
            expert_model_parallel_size=self.shape.expert,
            pipeline_model_parallel_size=self.pipeline,
            virtual_pipeline_model_parallel_size=self.chunks,
            pipeline_layers=None,
            data_parallel=self.data_parallel,
            fsdp_sharding="optim_grads_params",
            num_distributed_optimizer_instances=self.shape.instances,
            overlap_grad_reduce=overlaps,
            overlap_param_gather=overlaps and self.data_parallel != "ddp",
        )

    def training(self, base: TrainingConfig, layers_of_chunk: int) -> TrainingConfig:
        """Return the settings of a run."""
        recomputed_layers = round(self.recomputed * layers_of_chunk)
        return replace(
            base,
            micro_batch_size=self.micro_batch_size,
            recompute="full" if recomputed_layers else self.shape.recompute,
            recompute_layers=recomputed_layers if recomputed_layers < layers_of_chunk and recomputed_layers else None,
        )


@dataclass(frozen=True)
class Problem:
    """A training run to plan, and its cluster.

    Attributes:
        pack_of: maps (number of samples, token multiple) to the shape of a micro-batch.
        check: checks a run with this layout and these settings, and returns its sizes; None to check the layout only.
    """

    model: ModelConfig
    objective: Objective
    optimizer: OptimizerConfig
    parallel: ParallelConfig
    training: TrainingConfig
    pack_of: Callable[[int, int], PackShape]
    tokens: int
    world_size: int
    device: Device
    check: Optional[Callable[[ParallelConfig, TrainingConfig], ParallelDims]] = None

    def layout_of(self, candidate: Candidate) -> ParallelConfig:
        """Return the layout of a candidate; a CUDA graph excludes overlaps."""
        return candidate.parallel(self.parallel, overlaps=not self.training.cuda_graph)

    def cluster(self, layout: ParallelConfig) -> Cluster:
        """Return the placement of a layout's ranks."""
        return Cluster(self.device, self.world_size, layout, self.training.linears == "overlapped")

    def layers_of_chunk(self, candidate: Candidate) -> int:
        """Return the number of layers of each model chunk of a candidate."""
        return self.model.megatron_sizes().num_layers // (candidate.pipeline * (candidate.chunks or 1))

    def dims_of(self, candidate: Candidate) -> ParallelDims:
        """Check a candidate without recomputed layers."""
        layout, training = self.layout_of(candidate), candidate.training(self.training, 1)
        if self.check is None:
            return check_parallel(self.model, layout, training, self.world_size)
        return self.check(layout, training)


def _powers(limit: int) -> list[int]:
    return [2**i for i in range(max(1, limit).bit_length())]


def _kinds(problem: Problem, tensor: int, context: int, pipeline: int) -> list[tuple[DataParallel, int]]:
    """Return kinds of data parallelism with numbers of instances.

    FSDP inside each node is searched without pipelines, if a ring over nodes is slower than NVLink, the job fills
    several nodes, and a node has several replicas.
    """
    kinds: list[tuple[DataParallel, int]] = [("distributed_optimizer", 1), ("ddp", 1)]
    if tensor > FSDP_TENSOR:
        return kinds
    kinds.append(("fsdp", 1))
    if pipeline > 1:
        return kinds
    layout = replace(problem.parallel, tensor_model_parallel_size=tensor, pipeline_model_parallel_size=pipeline)
    ring = problem.cluster(layout).bandwidth("dp_cp")
    nodes, rest = divmod(problem.world_size, problem.device.node_size)
    if ring < problem.device.nvlink and nodes > 1 and not rest and tensor * context < problem.device.node_size:
        kinds.append(("fsdp", nodes))
    return kinds


def candidates(problem: Problem) -> Iterator[Candidate]:
    """Yield every layout in powers of two, including those that the settings do not allow."""
    model, world = problem.model, problem.world_size
    sizes, supports = model.megatron_sizes(), model.supports
    layers, experts = sizes.num_layers, sizes.num_moe_experts or 1

    def upto(limit: int, *, supported: bool) -> list[int]:
        return _powers(min(limit, world)) if supported else [1]

    tensors = upto(problem.device.node_size, supported=supports.tensor)
    contexts = upto(problem.tokens // FEWEST_TOKENS, supported=supports.context)
    pipelines = upto(layers, supported=supports.pipeline)
    form: Recompute = "selective" if problem.training.recompute == "selective" else "none"
    for tensor, context, expert, pipeline in product(tensors, contexts, _powers(experts), pipelines):
        for chunks in [None, *_powers(layers // pipeline)[1:3]] if pipeline > 1 else [None]:
            each = layers // (pipeline * (chunks or 1))
            shares = sorted({math.floor(share * each + 0.5) / each for share in RECOMPUTED})
            for (data, instances), size, share in product(
                _kinds(problem, tensor, context, pipeline), _powers(problem.training.global_batch_size), shares
            ):
                if size <= max(1, problem.training.global_batch_size * tensor * context * pipeline // world):
                    sequence = tensor > 1 and supports.sequence
                    shape = Shape(tensor, sequence, context, expert, form, data == "fsdp", instances)
                    yield Candidate(shape, pipeline, chunks, data, size, share)


@dataclass(frozen=True)
class Allowed:
    """Candidates that the settings allow.

    Attributes:
        refused: by reason (without its numbers and cure): the number of refused candidates, and the first message.
    """

    layouts: list[tuple[Candidate, ParallelDims]]
    refused: dict[str, tuple[int, str]]


def allowed(problem: Problem, proposed: Iterator[Candidate]) -> Allowed:
    """Check candidates as a run checks its settings."""
    layouts: list[tuple[Candidate, ParallelDims]] = []
    refused: dict[str, tuple[int, str]] = {}
    checked: dict[Candidate, ParallelDims | str] = {}
    for candidate in proposed:
        plain = replace(candidate, recomputed=0.0)
        if plain not in checked:
            try:
                checked[plain] = problem.dims_of(plain)
            except ConfigError as error:
                checked[plain] = str(error)
        dims = checked[plain]
        if isinstance(dims, str):
            reason = re.sub(r"\d+", "N", dims.partition(";")[0])
            count, example = refused.get(reason, (0, dims))
            refused[reason] = count + 1, example
        elif dims.micro_batch_size == candidate.micro_batch_size:
            layouts.append((candidate, dims))
    return Allowed(layouts, refused)


def shapes(layouts: Sequence[tuple[Candidate, ParallelDims]]) -> list[Shape]:
    """Return the shapes to trace for some candidates."""
    return list(dict.fromkeys(candidate.shape for candidate, _ in layouts))
