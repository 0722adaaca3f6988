"""What an optimizer step of a run costs each kind of rank, from traces of a few layers and micro-batches.

Layers of one kind cost the same, so a rank's stage is traced with few of its layers, and once more with one more of
each kind; the difference is the cost of one. Micro-batches cost the same once the pipeline is full: one of them is
counted as often as it is made. Memory, operations and traffic of the real depth and number follow by counting.
"""

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Optional

import numpy as np
import torch

from dit.backends.device import ACCELERATOR
from dit.models.base import ModelConfig, Stage
from dit.objectives.base import Objective
from dit.parallel.build import build_on_meta
from dit.parallel.dims import ParallelConfig, ParallelDims
from dit.parallel.pipeline import stages
from dit.planner.trace import Job, trace
from dit.settings import OptimizerConfig, TrainingConfig
from dit.tracing.counter import StepTrace, combined
from dit.tracing.packs import PackShape

FEWEST_LAYERS = 2
"""Layers from which on memory grows evenly, where nothing is gathered ahead."""
FSDP_WINDOW = 1_500_000_000
"""Elements that Megatron-FSDP holds in full, at least: gradients waiting for their reduction, and half as many weights,
gathered ahead."""


@dataclass(frozen=True)
class Plan:
    """What a step costs.

    Attributes:
        ranks: of the first and the last pipeline stage, and of one between that has most layers, by pipeline rank.
    """

    ranks: dict[int, StepTrace]

    @property
    def fullest(self) -> StepTrace:
        """The rank that needs most memory."""
        return max(self.ranks.values(), key=lambda step: step.peak)


@dataclass(frozen=True)
class _Probe:
    """A stage with fewer layers, and how often its cost counts in that of the whole stage."""

    stages: tuple[Stage, ...]
    recompute_layers: Optional[int]
    weight: float


def plan(
    model: ModelConfig,
    objective: Objective,
    optimizer: OptimizerConfig,
    parallel: ParallelConfig,
    training: TrainingConfig,
    pack: PackShape,
    dims: ParallelDims,
    *,
    kernels: torch.device = ACCELERATOR,
) -> Plan:
    """Trace a step of a run on every kind of rank, without ranks, data or memory.

    Args:
        pack: shape of every micro-batch.
        dims: of the job, from `check_parallel`.
        kernels: the device whose attention runs.
    """
    sizes = model.megatron_sizes().num_layers
    pp, vpp = parallel.pipeline_model_parallel_size, parallel.virtual_pipeline_model_parallel_size
    own = [tuple(stages(sizes, pp, rank, vpp, parallel.pipeline_layers)) for rank in range(pp)]
    between = max(range(1, pp - 1), key=lambda rank: _num_layers(own[rank]), default=0)
    jobs: list[Job] = []
    probes: dict[int, list[_Probe]] = {}
    fewest = fewest_layers(model, parallel, dims)
    for rank in sorted({0, between, pp - 1}):
        probes[rank] = shallower(model, own[rank], training, fewest)
        if len(probes[rank]) > 1:  # one of fewest layers fills the program's caches for them, and does not count
            probes[rank].insert(0, replace(shallower(model, own[rank], training, 1)[0], weight=0.0))
        jobs += [
            Job(
                model,
                objective,
                optimizer,
                parallel,
                replace(training, recompute_layers=probe.recompute_layers),
                pack,
                dims.world_size,
                rank * dims.world_size // pp,
                dims.micro_batches,
                probe.stages,
                kernels,
                fills_caches=index == 0,
            )
            for index, probe in enumerate(probes[rank])
        ]
    traced = iter(trace(jobs))
    return Plan(
        {rank: combined([next(traced) for _ in few], [probe.weight for probe in few]) for rank, few in probes.items()}
    )


def fewest_layers(model: ModelConfig, parallel: ParallelConfig, dims: ParallelDims) -> int:
    """Return the number of layers from which on memory grows evenly.

    Under FSDP over several ranks each layer adds its full weights and gradients until they fill the window; then it
    adds its shards only.
    The reduction of a layer's gradients starts when at most a window of others waits, while the next layer's are made.

    Source: `MegatronFSDP._init_fsdp_param_and_grad_buffer` and `GradReducePipeline` of Megatron-Core 0.16.1.
    """
    alone = dims.data_parallel_size * parallel.context_parallel_size == 1
    if parallel.data_parallel != "fsdp" or parallel.fsdp_sharding == "optim" or alone:
        return FEWEST_LAYERS
    sizes = [sum(p.numel() for p in unit.parameters()) for unit in build_on_meta(model).units()]
    share = parallel.tensor_model_parallel_size * parallel.expert_model_parallel_size
    window = max(FSDP_WINDOW * share, 3 * sum(sizes) // len(sizes)) // min(sizes)
    return max(FEWEST_LAYERS, window + 2)


def _num_layers(chunks: Sequence[Stage]) -> int:
    return sum(len(chunk.layers) for chunk in chunks)


def shallower(model: ModelConfig, chunks: Sequence[Stage], training: TrainingConfig, fewest: int) -> list[_Probe]:
    """Return stages of few layers whose costs, weighted and added up, are those of a rank's stages.

    Args:
        chunks: the stages of the rank.
        fewest: layers from which on a cost grows evenly.
    """
    redone = training.recompute_layers

    def kind(chunk: Stage, layer: int) -> Hashable:
        return model.layer_kind(layer), redone is not None and layer - chunk.layers.start < redone

    def counts(part: Sequence[Stage], whole: Sequence[Stage]) -> Counter[Hashable]:
        return Counter(kind(w, layer) for p, w in zip(part, whole) for layer in p.layers)

    target = counts(chunks, chunks)
    everything = _Probe(tuple(chunks), redone, 1.0)
    if len(chunks) > 1 and len(target) > 1:
        return [everything]
    chosen: list[tuple[tuple[Stage, ...], Counter[Hashable]]] = []
    for length in range(max(fewest, len(target)), len(chunks[0].layers)):
        for start in range(len(chunks[0].layers) - length + 1):
            part = tuple(replace(chunk, layers=chunk.layers[start : start + length]) for chunk in chunks)
            found = counts(part, chunks)
            if set(found) != set(target) or not _is_new(found, [c for _, c in chosen], target):
                continue
            chosen.append((part, found))
            if not _is_new(target, [c for _, c in chosen], target):
                weights = np.linalg.lstsq(
                    np.array([_row(c, target) for _, c in chosen]).T, np.array(_row(target, target)), rcond=None
                )[0]
                few = [
                    _Probe(part, None if redone is None else _redone(part, chunks, redone), float(weight))
                    for (part, _), weight in zip(chosen, weights)
                ]
                probed = sum(_num_layers(probe.stages) for probe in few)
                return few if probed < _num_layers(chunks) else [everything]
    return [everything]


def _redone(part: Sequence[Stage], chunks: Sequence[Stage], redone: int) -> int:
    """Return how many of a part's first layers are recomputed, as in the whole stage."""
    first = part[0].layers.start - chunks[0].layers.start
    return max(1, min(len(part[0].layers), redone - first))


def _row(counts: Counter[Hashable], kinds: Counter[Hashable]) -> list[int]:
    """Return what a stage is made of: its ends once, and its layers of each kind."""
    return [1, *(counts[kind] for kind in kinds)]


def _is_new(counts: Counter[Hashable], known: Sequence[Counter[Hashable]], kinds: Counter[Hashable]) -> bool:
    """Tell whether a stage cannot be composed of those known."""
    rows = [_row(c, kinds) for c in known]
    return not rows or np.linalg.matrix_rank([*rows, _row(counts, kinds)]) > np.linalg.matrix_rank(rows)
