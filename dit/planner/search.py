"""Which layout trains a model fastest: every candidate priced from traces of a few layers.

What differs between two layouts only by their pipeline, their replicas, or how these share the optimizer is counted,
not traced: a stage costs its layers and the model's ends; a recomputed layer costs one more forward pass, and saves its
input. So one stage shape (tensor, sequence, context, expert parallel, FSDP or not) is traced with two depths:

```
                    2 layers     3 layers
     1 sample          x            x          per layer: the difference along the rows
     2 samples         x            x          of other micro-batches: a line between the two traced next to it,
     4 samples         x            x          and behind the last one the line goes on
```

Costs are not affine in the number of samples: one sample needs no sum over its tokens, so that the step from one to two
adds operations that no further sample adds; products of few rows take the time of their weights' bytes and those of
many rows that of their operations; torch changes the form of some operations with their size. Larger micro-batches are
traced as far as candidates have them that fit into memory.

`tests/unit/planner/test_search.py` compares what is counted so with traces of the full layouts.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from dit.models.base import ModelConfig, Stage
from dit.parallel.dims import ParallelDims, check_parallel
from dit.parallel.pipeline import layers_in_flight, stages
from dit.planner.devices import MEMORY_SHARE
from dit.planner.layouts import Candidate, DataParallel, Problem, Shape
from dit.planner.plan import fewest_layers, shallower
from dit.planner.time import (
    FORWARD,
    K_GATHER,
    K_MEMORY,
    K_REDUCE,
    K_SEND,
    MICRO_BATCH,
    ONCE,
    PARTS,
    UPDATE,
    Cluster,
    StepTime,
    cost_of,
    step_time,
)
from dit.planner.trace import Job, trace
from dit.tracing.counter import PHASES, STATE, StepTrace, combined

Numbers = npt.NDArray[np.float64]
TRACED_MICRO_BATCHES = 3
"""Enough for a step whose micro-batches follow each other evenly."""
BYTES = (*STATE, "forward and backward", "update", "reduced", "gathered")
"""Bytes of a traced rank: what it holds, at most beside it in two phases, and what it sends once a step."""
B_WEIGHTS, B_OPTIMIZER, B_AVERAGE, B_ACTIVATIONS, B_UPDATE, B_REDUCED, B_GATHERED = range(len(BYTES))
STEP = 2
"""Each traced micro-batch has at most so many times the samples of the one before: the sizes that candidates have."""
BUCKET_BYTES = 160e6
"""Gradients are reduced in buckets of 40 M numbers, or larger ones."""


@dataclass(frozen=True)
class Costs:
    """What a stage shape costs: arrays by (ends of the model or a layer, traced micro-batch).

    Attributes:
        seconds: [2, sizes, 4, kinds], as `dit.planner.time.Cost`.
        nbytes: [2, sizes, `BYTES`].
        shards: ranks over which the traced optimizer was sharded.
        sizes: samples of the traced micro-batches, ascending, at least two.
    """

    seconds: Numbers
    nbytes: Numbers
    shards: int
    sizes: tuple[int, ...] = (1, 2)

    def of(self, layers: float, samples: int) -> tuple[Numbers, Numbers]:
        """Return seconds and bytes of a stage."""
        upper = min(max(1, bisect_left(self.sizes, samples)), len(self.sizes) - 1)
        low, high = self.sizes[upper - 1 : upper + 1]
        share = (samples - low) / (high - low)
        seconds, nbytes = ((1 - share) * x[:, upper - 1] + share * x[:, upper] for x in (self.seconds, self.nbytes))
        return seconds[0] + layers * seconds[1], nbytes[0] + layers * nbytes[1]

    def and_then(self, larger: "Costs") -> "Costs":
        """Return these with those of larger micro-batches."""
        seconds, nbytes = (
            np.concatenate(x, axis=1) for x in zip((self.seconds, self.nbytes), (larger.seconds, larger.nbytes))
        )
        return replace(self, seconds=seconds, nbytes=nbytes, sizes=self.sizes + larger.sizes)


@dataclass(frozen=True)
class Priced:
    """A candidate with its time and its memory.

    Attributes:
        memory: bytes of the fullest rank by what they are for.
    """

    candidate: Candidate
    dims: ParallelDims
    time: StepTime
    memory: dict[str, float]

    @property
    def peak(self) -> float:
        """Bytes of the fullest rank."""
        return sum(self.memory.values())


def costs(problem: Problem, shape: Shape, found: Sequence[tuple[Candidate, ParallelDims]] = ()) -> Costs:
    """Trace a stage shape: micro-batches of one and of two samples, and larger ones that fit into memory.

    Args:
        found: candidates that need its costs, among others.
    """
    own = [(candidate, dims) for candidate, dims in found if candidate.shape == shape]
    traced = _traced(problem, shape, (1, 2))
    while True:
        prices = Prices(problem, {shape: traced})
        larger = [(candidate, dims) for candidate, dims in own if candidate.micro_batch_size > traced.sizes[-1]]
        fitting = judged(problem, [prices.of(candidate, dims) for candidate, dims in larger]).fitting
        if not fitting:
            return traced
        most = max(one.candidate.micro_batch_size for one in fitting)
        traced = traced.and_then(_traced(problem, shape, (min(most, STEP * traced.sizes[-1]),)))


def _traced(problem: Problem, shape: Shape, sizes: tuple[int, ...]) -> Costs:
    """Trace a stage shape with micro-batches of so many samples."""
    kind: DataParallel = "fsdp" if shape.fsdp else "distributed_optimizer"
    layout = Candidate(shape, 1, None, kind, 1).parallel(problem.parallel)
    model = problem.model
    num_layers = model.megatron_sizes().num_layers
    one_each = replace(problem.training, global_batch_size=problem.world_size)
    dims = check_parallel(model, layout, one_each, problem.world_size)
    training = replace(problem.training, recompute=shape.recompute, recompute_layers=None)
    few = shallower(model, tuple(stages(num_layers, 1, 0)), training, fewest_layers(model, layout, dims))
    jobs = [
        Job(
            model,
            problem.objective,
            problem.optimizer,
            layout,
            training,
            problem.pack_of(samples, dims.token_multiple),
            problem.world_size,
            micro_batches=TRACED_MICRO_BATCHES,
            stages=probe.stages,
            fills_caches=samples == sizes[0] and probe is few[0],
        )
        for samples in sizes
        for probe in few
    ]
    traces = trace(jobs)
    weights = _ends_and_layer(model, [probe.stages for probe in few], num_layers)
    cluster = Cluster(problem.device, problem.world_size, layout, problem.node_size)
    of_traces = [
        np.stack([cost_of(step, TRACED_MICRO_BATCHES, cluster) for step in traces]),
        np.stack([_bytes_of(step) for step in traces]),
    ]
    seconds, nbytes = (
        np.stack([np.tensordot(weights, part, axes=1) for part in np.split(values, len(sizes))], axis=1)
        for values in of_traces
    )
    return Costs(seconds, nbytes, problem.world_size // shape.tensor, sizes)


def _ends_and_layer(model: ModelConfig, traced: Sequence[Sequence[Stage]], num_layers: int) -> Numbers:
    """Return the weights with which traced stages add up to the model's ends, and to a layer of the mean kind."""
    counts = [Counter(model.layer_kind(layer) for stage in part for layer in stage.layers) for part in traced]
    kinds = Counter(model.layer_kind(layer) for layer in range(num_layers))
    if len(traced) == 1:  # the whole model: its ends are in its layers
        return np.array([[0.0], [1 / num_layers]])
    rows = np.array([[1, *(count[kind] for kind in kinds)] for count in counts], dtype=float).T
    wanted = np.array([[1, *(0.0 for _ in kinds)], [0, *(kinds[kind] / num_layers for kind in kinds)]]).T
    return np.linalg.lstsq(rows, wanted, rcond=None)[0].T


def _bytes_of(step: StepTrace) -> Numbers:
    """Return the bytes of a trace in the order of `BYTES`."""
    once = combined([step.since(step.parts["update"]), step.parts["micro-batch"]], [1, -TRACED_MICRO_BATCHES])
    sent = Counter[str]()
    for (collective, group), nbytes in once.sent_bytes.items():
        if group != "tp":
            sent[collective] += nbytes
    held = [step.state_bytes[name] for name in STATE]
    first, *others = (step.peak_bytes[name] - step.live for name in PHASES)
    return np.array([*held, first, max(others), sent["reduce_scatter"], sent["all_gather"]], dtype=float)


class Prices:
    """Prices candidates from what was traced.

    Args:
        traced: the costs of every shape that they need.
    """

    def __init__(self, problem: Problem, traced: Mapping[Shape, Costs]) -> None:
        self.problem, self.traced = problem, traced
        self._sizes = problem.model.megatron_sizes()

    def of(self, candidate: Candidate, dims: ParallelDims) -> Priced:
        """Return the time and the memory of a candidate."""
        layout = candidate.parallel(self.problem.parallel)
        cluster = Cluster(self.problem.device, dims.world_size, layout, self.problem.node_size)
        split = self._sizes.num_layers / (candidate.pipeline * (candidate.chunks or 1))
        stages_of_all = [split] * round(self._sizes.num_layers / split)
        in_flight = layers_in_flight(stages_of_all, candidate.pipeline, 0, dims.micro_batches)
        costs = self._costs(candidate, in_flight)
        layers = self._sizes.num_layers / candidate.pipeline
        seconds, nbytes = costs.of(layers, candidate.micro_batch_size)
        shards = dims.world_size // (candidate.shape.tensor * candidate.pipeline)
        if not candidate.shape.fsdp:
            self._share_state(candidate, seconds, nbytes, costs.shards, shards)
            seconds[ONCE, [K_GATHER, K_REDUCE]] = [
                cluster.seconds("dp_cp", nbytes[i], 1 + nbytes[i] / BUCKET_BYTES) if shards > 1 else 0.0
                for i in (B_GATHERED, B_REDUCED)
            ]
        if candidate.pipeline > 1:
            self._add_sends(candidate, cluster, seconds)
        time = step_time(seconds, dims.micro_batches, cluster)
        return Priced(candidate, dims, time, self._memory(candidate, costs, nbytes, in_flight))

    def _costs(self, candidate: Candidate, layers: float) -> Costs:
        """Return the costs of its shape where some layers run forward once more, and save nothing but their input.

        Args:
            layers: whose activations a rank holds at most.
        """
        plain, share = self.traced[candidate.shape], candidate.recomputed
        if not share:
            return plain
        seconds, nbytes = plain.seconds.copy(), plain.nbytes.copy()
        seconds[1, :, MICRO_BATCH] += share * seconds[1, :, FORWARD]
        layer = nbytes[1, :, B_ACTIVATIONS].copy()
        nbytes[1, :, B_ACTIVATIONS] *= 1 - share
        nbytes[1, :, B_ACTIVATIONS] += share * self._passed_on(candidate) * np.array(plain.sizes)
        # While the first layers run again, those behind them are done.
        nbytes[0, :, B_ACTIVATIONS] += layer * max(0.0, 1 - (1 - share) * layers)
        return replace(plain, seconds=seconds, nbytes=nbytes)

    def _passed_on(self, candidate: Candidate) -> float:
        """Return the bytes that one layer passes to the next, for a sample."""
        share = candidate.shape.context * (candidate.shape.tensor if candidate.shape.sequence else 1)
        width = 2 if self.problem.training.precision != "fp32" else 4
        return width * self.problem.tokens * self._sizes.hidden_size / share

    def _share_state(
        self, candidate: Candidate, seconds: Numbers, nbytes: Numbers, traced_shards: int, shards: int
    ) -> None:
        """Change what depends on how many ranks share the optimizer, in place."""
        sent = ((shards - 1) / shards) / ((traced_shards - 1) / traced_shards) if traced_shards > 1 else 0.0
        nbytes[[B_REDUCED, B_GATHERED]] *= sent
        times = float(traced_shards)
        if candidate.data_parallel == "ddp":
            nbytes[B_REDUCED] *= 2  # an all-reduce
            nbytes[B_GATHERED] = 0.0
        else:
            times = traced_shards / shards
        nbytes[[B_OPTIMIZER, B_AVERAGE]] *= times
        seconds[UPDATE, K_MEMORY] *= times

    def _add_sends(self, candidate: Candidate, cluster: Cluster, seconds: Numbers) -> None:
        """Add what a rank sends along the pipeline: each chunk's output, and the gradient of its input."""
        chunks = candidate.chunks or 1
        one_way = cluster.seconds("pp", chunks * candidate.micro_batch_size * self._passed_on(candidate), chunks)
        seconds[MICRO_BATCH, K_SEND] = 2 * one_way
        seconds[FORWARD, K_SEND] = one_way

    def _memory(self, candidate: Candidate, costs: Costs, nbytes: Numbers, in_flight: float) -> dict[str, float]:
        """Return the bytes of the fullest rank, the first of a pipeline."""
        saved = costs.of(in_flight, candidate.micro_batch_size)[1][B_ACTIVATIONS]
        held = dict(zip(STATE, nbytes[[B_WEIGHTS, B_OPTIMIZER, B_AVERAGE]].tolist()))
        return {**held, "activations and temporaries": float(max(saved, nbytes[B_UPDATE]))}


@dataclass(frozen=True)
class Verdict:
    """The candidates in the order of their time.

    Attributes:
        fitting: those whose memory fits, the fastest first.
        too_large: the others, the smallest first.
    """

    fitting: list[Priced]
    too_large: list[Priced]

    def by_item(self) -> dict[str, list[Priced]]:
        """Group what does not fit by what takes most of its memory."""
        return _grouped(self.too_large, lambda priced: max(priced.memory, key=lambda item: priced.memory[item]))

    def by_loss(self) -> dict[str, list[Priced]]:
        """Group what is slower than the best by the part of the step that has grown most."""
        if not self.fitting:
            return {}
        best, *others = self.fitting

        def grown(priced: Priced) -> str:
            return max(PARTS[:-1], key=lambda part: priced.time.parts[part] - best.time.parts[part])

        return _grouped(others, grown)


def _grouped(priced: Sequence[Priced], key: Callable[[Priced], str]) -> dict[str, list[Priced]]:
    found: dict[str, list[Priced]] = {}
    for one in priced:
        found.setdefault(key(one), []).append(one)
    return dict(sorted(found.items(), key=lambda group: -len(group[1])))


def judged(problem: Problem, priced: Sequence[Priced]) -> Verdict:
    """Order candidates by time, those that do not fit by memory."""
    limit = MEMORY_SHARE * problem.device.memory_bytes
    return Verdict(
        sorted((one for one in priced if one.peak <= limit), key=lambda one: one.time.total),
        sorted((one for one in priced if one.peak > limit), key=lambda one: one.peak),
    )
