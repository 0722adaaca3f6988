"""Cost of an optimizer step on each kind of rank, from traces of a few layers and micro-batches.

Layers of one kind cost the same, so a rank's stage is traced with few layers, and once more with one more layer of each
kind; the difference is the cost of one layer. Micro-batches cost the same once the pipeline is full, so one of them is
traced and multiplied. Memory, operations and traffic of the full depth and number follow by counting.
"""

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Optional

import numpy as np

from dit.models.base import ModelConfig, Stage
from dit.parallel.build import build_on_meta
from dit.parallel.dims import ParallelConfig, ParallelDims
from dit.parallel.pipeline import stages
from dit.planner.job import Job
from dit.planner.time import Cluster, StepTime, cost_of, step_time
from dit.planner.trace import Trace, trace
from dit.settings import TrainingConfig
from dit.tracing.counter import StepTrace, combined

FEWEST_LAYERS = 2
"""Number of layers above which memory grows linearly, if no weights are prefetched."""
FSDP_WINDOW = 1_500_000_000
"""Elements that Megatron-FSDP keeps unsharded, at least: gradients waiting for their reduction, and half as many
prefetched weights."""


@dataclass(frozen=True)
class Plan:
    """Cost of a step.

    Attributes:
        ranks: traces by pipeline rank: of the first and last stage, and of the middle stage with most layers.
    """

    ranks: dict[int, StepTrace]

    @property
    def fullest(self) -> StepTrace:
        """The rank that needs the most memory."""
        return max(self.ranks.values(), key=lambda step: step.peak)


@dataclass(frozen=True)
class Probe:
    """A stage with fewer layers, and the weight of its cost in the cost of the full stage."""

    stages: tuple[Stage, ...]
    recompute_layers: Optional[int]
    weight: float


def plan(job: Job, dims: ParallelDims, *, tracer: Optional[Trace] = None) -> Plan:
    """Trace a step of a run on every kind of rank, without ranks, data or memory.

    Args:
        job: the step; its `rank`, `world_size` and `micro_batches` are replaced by those of each traced rank and of
            `dims`.
        tracer: None for a new process.
    """
    model, parallel, training = job.model, job.parallel, job.training
    sizes = model.megatron_sizes().num_layers
    pp, vpp = parallel.pipeline_model_parallel_size, parallel.virtual_pipeline_model_parallel_size
    stages_of_rank = [tuple(stages(sizes, pp, rank, vpp, parallel.pipeline_layers)) for rank in range(pp)]
    between = max(range(1, pp - 1), key=lambda rank: _num_layers(stages_of_rank[rank]), default=0)
    jobs: list[Job] = []
    probes: dict[int, list[Probe]] = {}
    fewest = fewest_layers(model, parallel, dims)
    job = replace(job, world_size=dims.world_size, micro_batches=dims.micro_batches)
    for rank in sorted({0, between, pp - 1}):
        probes[rank] = shallower(model, stages_of_rank[rank], training, fewest)
        of_rank = replace(job, rank=rank * dims.world_size // pp)
        jobs += probing(of_rank, stages_of_rank[rank], probes[rank])
    traced = iter((tracer or trace)(jobs))
    return Plan(
        {
            rank: combined(list(islice(traced, 1, 1 + len(parts))), [probe.weight for probe in parts])
            for rank, parts in probes.items()
        }
    )


def planned_step(plan: Plan, dims: ParallelDims, cluster: Cluster) -> StepTime:
    """Return the time of a plan's step at full depth, that of the pipeline rank that ends last.

    The slowest rank is idle while the first micro-batch passes the ranks before it, and the last gradient returns
    through them. The first and the last micro-batch also pass the ranks after it; meanwhile, it computes as many
    micro-batches as there are such ranks. Interleaved chunks divide the idle time by their number.

    Source: the 1F1B schedule; for equal stages Narayanan et al. 2021, arXiv:2104.04473, section 2.2.
    """
    layout = cluster.parallel
    pp, chunks = layout.pipeline_model_parallel_size, layout.virtual_pipeline_model_parallel_size or 1
    costs = {rank: cost_of(trace, dims.micro_batches, cluster) for rank, trace in plan.ranks.items()}
    busy = {rank: sum(step_time(cost, 1, cluster, waits=0.0).passes) for rank, cost in costs.items()}
    between = next((rank for rank in busy if 0 < rank < pp - 1), 0)
    passes = [busy.get(rank, busy[between]) for rank in range(pp)]
    slowest = max(busy, key=lambda rank: busy[rank])
    after = passes[slowest + 1 :]
    waits = sum(passes[:slowest]) + max(0.0, 2 * sum(after) - passes[slowest] * len(after))
    seconds = dims.micro_batches * passes[slowest] + waits / chunks
    # A faster rank waits longer; its exchange of gradients and its update may still be the last to end.
    steps = [
        step_time(costs[rank], dims.micro_batches, cluster, seconds - dims.micro_batches * passes[rank])
        for rank in sorted(busy, key=lambda rank: -busy[rank])
    ]
    return max(steps, key=lambda step: step.total)


def probing(job: Job, chunks: Sequence[Stage], probes: Sequence[Probe]) -> list[Job]:
    """Return a job of as few layers as possible, which only fills the program's caches, and one for each probe."""
    shortest = shallower(job.model, chunks, job.training, 1)[0]
    filling = replace(job, micro_batches=0, fills_caches=True)
    jobs = [filling, *(replace(job, fills_caches=False) for _ in probes)]
    return [
        replace(each, stages=probe.stages, training=replace(job.training, recompute_layers=probe.recompute_layers))
        for each, probe in zip(jobs, (shortest, *probes), strict=True)
    ]


def fewest_layers(model: ModelConfig, parallel: ParallelConfig, dims: ParallelDims) -> int:
    """Return the number of layers above which memory grows linearly.

    Under FSDP over several ranks, each layer adds its unsharded weights and gradients until they fill the window;
    further layers add only their shards. Gradient reduction of a layer starts when at most a window of other gradients
    waits, while the next layer computes its gradients.

    Source: `MegatronFSDP._init_fsdp_param_and_grad_buffer` and `GradReducePipeline` of Megatron-Core 0.16.1.
    """
    is_unsharded = dims.data_parallel_size * parallel.context_parallel_size == 1
    if parallel.data_parallel != "fsdp" or parallel.fsdp_sharding == "optim" or is_unsharded:
        return FEWEST_LAYERS
    sizes = [sum(p.numel() for p in unit.parameters()) for unit in build_on_meta(model).units()]
    share = parallel.tensor_model_parallel_size * parallel.expert_model_parallel_size
    window = max(FSDP_WINDOW * share, 3 * sum(sizes) // len(sizes)) // min(sizes)
    return max(FEWEST_LAYERS, window + 2)


def _num_layers(chunks: Sequence[Stage]) -> int:
    return sum(len(chunk.layers) for chunk in chunks)


def shallower(model: ModelConfig, chunks: Sequence[Stage], training: TrainingConfig, fewest: int) -> list[Probe]:
    """Return stages with few layers whose weighted costs sum to the cost of a rank's stages."""
    recomputed = training.recompute_layers

    def kind(chunk: Stage, layer: int) -> Hashable:
        return model.layer_kind(layer), recomputed is not None and layer - chunk.layers.start < recomputed

    def counts(part: Sequence[Stage], full: Sequence[Stage]) -> Counter[Hashable]:
        return Counter(kind(w, layer) for p, w in zip(part, full) for layer in p.layers)

    target = counts(chunks, chunks)
    full_probe = Probe(tuple(chunks), recomputed, 1.0)
    if len(chunks) > 1 and len(target) > 1:
        return [full_probe]
    chosen: list[tuple[tuple[Stage, ...], Counter[Hashable]]] = []
    for length in range(max(fewest, len(target)), len(chunks[0].layers)):
        for start in range(len(chunks[0].layers) - length + 1):
            part = tuple(replace(chunk, layers=chunk.layers[start : start + length]) for chunk in chunks)
            part_counts = counts(part, chunks)
            if set(part_counts) != set(target) or not _is_new(part_counts, [c for _, c in chosen], target):
                continue
            chosen.append((part, part_counts))
            if not _is_new(target, [c for _, c in chosen], target):
                weights = np.linalg.lstsq(
                    np.array([_row(c, target) for _, c in chosen]).T, np.array(_row(target, target)), rcond=None
                )[0]
                probes = [
                    Probe(
                        part,
                        None if recomputed is None else _recomputed_layers(part, chunks, recomputed),
                        float(weight),
                    )
                    for (part, _), weight in zip(chosen, weights)
                ]
                probed = sum(_num_layers(probe.stages) for probe in probes)
                return probes if probed < _num_layers(chunks) else [full_probe]
    return [full_probe]


def _recomputed_layers(part: Sequence[Stage], chunks: Sequence[Stage], recomputed: int) -> int:
    """Return the number of recomputed layers at the start of a part, as in the full stage."""
    first = part[0].layers.start - chunks[0].layers.start
    return max(1, min(len(part[0].layers), recomputed - first))


def _row(counts: Counter[Hashable], kinds: Counter[Hashable]) -> list[int]:
    """Return the composition of a stage: 1 for its ends, and the number of layers of each kind."""
    return [1, *(counts[kind] for kind in kinds)]


def _is_new(counts: Counter[Hashable], existing: Sequence[Counter[Hashable]], kinds: Counter[Hashable]) -> bool:
    """Return whether a stage is not a linear combination of the existing stages."""
    rows = [_row(c, kinds) for c in existing]
    return not rows or np.linalg.matrix_rank([*rows, _row(counts, kinds)]) > np.linalg.matrix_rank(rows)
