"""Search for the fastest layout: every candidate's cost is computed from traces of a few layers.

Differences in pipeline, number of replicas and optimizer sharding are computed, not traced: a stage costs its layers
plus the model's ends; a recomputed layer costs one more forward pass and saves only its input. So each stage shape
(tensor, sequence, context and expert parallelism, FSDP or not) is traced with only two depths:

```
                    2 layers     3 layers
     1 sample          x            x          per layer: the difference along the rows
     2 samples         x            x          for other micro-batches: linear interpolation between traced sizes,
     4 samples         x            x          and extrapolation after the largest one
```

Costs are not affine in the number of samples. A single sample needs no sum over samples, so going from one to two adds
operations that further samples do not add. Products with few rows take the time to read their weights, products with
many rows that of their operations. torch selects other operations for other sizes. Larger micro-batches are therefore
traced as long as candidates with them fit into memory: each twice as large as the one before, or eight times from
16,384 tokens on (which changes predicted times of a 7B model by at most 0.7 %).

Shapes with the least tensor and context parallelism are traced first. A larger one is traced only if its passes may
take less time than a step of the best layout so far, see `Prices.shortest`.

`tests/unit/planner/test_search.py` compares these costs with traces of full layouts.
"""

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from dit.models.base import ModelConfig, Stage
from dit.parallel.dims import ParallelConfig, ParallelDims, check_parallel
from dit.parallel.pipeline import layers_in_flight, stages
from dit.planner.devices import MEMORY_SHARE
from dit.planner.job import Job
from dit.planner.layouts import Candidate, DataParallel, Problem, Shape, shapes
from dit.planner.plan import fewest_layers, probing, shallower
from dit.planner.time import (
    FORWARD,
    MICRO_BATCH,
    ONCE,
    PARTS,
    UPDATE,
    Cluster,
    Kind,
    StepTime,
    cost_of,
    pass_parts,
    slowest_of,
    step_time,
)
from dit.planner.trace import Trace, Tracer
from dit.tracing.counter import PHASES, STATE, StepTrace, combined

Numbers = npt.NDArray[np.float64]
TRACED_MICRO_BATCHES = 3
"""Enough to reach a steady state between micro-batches."""
BYTES = (*STATE, "forward and backward", "update", "reduced", "gathered")
"""Bytes of a traced rank: its state, the peak above the state in two phases, and traffic once per step."""
B_WEIGHTS, B_OPTIMIZER, B_AVERAGE, B_ACTIVATIONS, B_UPDATE, B_REDUCED, B_GATHERED = range(len(BYTES))
STEP, LARGE_STEP, LARGE = 2, 8, 16384
"""Largest ratio of consecutive traced micro-batch sizes, and the ratio from micro-batches of `LARGE` tokens on."""
BUCKET_BYTES = 160e6
"""Size of gradient buckets: 40 M fp32 elements or more."""
MEMORY_ERROR = 1.07
"""Largest ratio of the traced memory of a full layout and that of its price."""


@dataclass(frozen=True)
class Costs:
    """Costs of a stage shape: arrays indexed by (model ends or layer, traced micro-batch).

    Attributes:
        seconds: [2, sizes, 4, kinds], see `dit.planner.time.Cost`.
        nbytes: [2, sizes, `BYTES`].
        shards: ranks over which the traced optimizer was sharded.
    """

    seconds: Numbers
    nbytes: Numbers
    shards: int
    sizes: tuple[int, ...] = (1, 2)

    def of(self, layers: float, samples: int) -> tuple[Numbers, Numbers]:
        """Return the seconds and bytes of a stage."""
        upper = min(max(1, bisect_left(self.sizes, samples)), len(self.sizes) - 1)
        low, high = self.sizes[upper - 1 : upper + 1]
        share = (samples - low) / (high - low)
        seconds, nbytes = ((1 - share) * x[:, upper - 1] + share * x[:, upper] for x in (self.seconds, self.nbytes))
        return seconds[0] + layers * seconds[1], nbytes[0] + layers * nbytes[1]

    def and_then(self, larger: "Costs") -> "Costs":
        """Append the costs of larger micro-batches."""
        seconds, nbytes = (
            np.concatenate(x, axis=1) for x in zip((self.seconds, self.nbytes), (larger.seconds, larger.nbytes))
        )
        return replace(self, seconds=seconds, nbytes=nbytes, sizes=self.sizes + larger.sizes)


@dataclass(frozen=True)
class Priced:
    """A candidate with its time and its memory."""

    candidate: Candidate
    dims: ParallelDims
    time: StepTime
    memory: dict[str, float]

    @property
    def peak(self) -> float:
        """Bytes of the fullest rank."""
        return sum(self.memory.values())


def costs(problem: Problem, shape: Shape, trace: Trace, found: Sequence[tuple[Candidate, ParallelDims]] = ()) -> Costs:
    """Trace a stage shape with micro-batches of one and two samples, and larger ones that fit."""
    with_shape = [(candidate, dims) for candidate, dims in found if candidate.shape == shape]
    with_shape.sort(key=lambda pair: -pair[0].micro_batch_size)
    traced = _traced(problem, shape, (1, 2), trace)
    while True:
        prices = Prices(problem, {shape: traced})
        larger = (pair for pair in with_shape if pair[0].micro_batch_size > traced.sizes[-1])
        most = next((pair[0].micro_batch_size for pair in larger if fits(problem, prices.of(*pair))), None)
        if most is None:
            return traced
        last = traced.sizes[-1]
        step = LARGE_STEP if last * problem.tokens >= LARGE else STEP
        traced = traced.and_then(_traced(problem, shape, (min(most, step * last),), trace))


def _traced(problem: Problem, shape: Shape, sizes: tuple[int, ...], trace: Trace) -> Costs:
    """Trace a stage shape with micro-batches of the given sizes."""
    layout, model = _traced_layout(problem, shape), problem.model
    num_layers = model.megatron_sizes().num_layers
    one_each = replace(problem.training, global_batch_size=problem.world_size)
    dims = check_parallel(model, layout, one_each, problem.world_size)
    training = replace(problem.training, recompute=shape.recompute, recompute_layers=None)
    full = tuple(stages(num_layers, 1, 0))
    probes = shallower(model, full, training, fewest_layers(model, layout, dims))
    job = Job(
        model,
        problem.objective,
        problem.optimizer,
        layout,
        training,
        problem.pack_of(1, dims.token_multiple),
        problem.world_size,
        micro_batches=TRACED_MICRO_BATCHES,
    )
    jobs = probing(job, full, probes)
    packs = [problem.pack_of(samples, dims.token_multiple) for samples in sizes]
    traces = trace([replace(job, pack=pack) for pack in packs for job in jobs])
    del traces[:: len(jobs)]  # of jobs that fill caches
    weights = _ends_and_layer(model, [probe.stages for probe in probes], num_layers)
    cluster = problem.cluster(layout)
    of_traces = [
        np.stack([cost_of(step, TRACED_MICRO_BATCHES, cluster) for step in traces]),
        np.stack([_bytes_of(step) for step in traces]),
    ]
    seconds, nbytes = (
        np.stack([np.tensordot(weights, part, axes=1) for part in np.split(values, len(sizes))], axis=1)
        for values in of_traces
    )
    nbytes[0, :, B_ACTIVATIONS] += np.reshape([step.dq_bytes for step in traces], (len(sizes), -1)).max(1)
    return Costs(seconds, nbytes, problem.world_size // shape.tensor, sizes)


def _traced_layout(problem: Problem, shape: Shape) -> ParallelConfig:
    """Return the layout in which a stage shape is traced."""
    kind: DataParallel = "fsdp" if shape.fsdp else "distributed_optimizer"
    return problem.layout_of(Candidate(shape, 1, None, kind, 1))


def _ends_and_layer(model: ModelConfig, traced: Sequence[Sequence[Stage]], num_layers: int) -> Numbers:
    """Return weights that combine traced stages into the model's ends, and into an average layer."""
    counts = [Counter(model.layer_kind(layer) for stage in part for layer in stage.layers) for part in traced]
    kinds = Counter(model.layer_kind(layer) for layer in range(num_layers))
    if len(traced) == 1:  # the full model: the cost of its ends is spread over its layers
        return np.array([[0.0], [1 / num_layers]])
    rows = np.array([[1, *(count[kind] for kind in kinds)] for count in counts], dtype=float).T
    target = np.array([[1, *(0.0 for _ in kinds)], [0, *(kinds[kind] / num_layers for kind in kinds)]]).T
    return np.linalg.lstsq(rows, target, rcond=None)[0].T


def _bytes_of(step: StepTrace) -> Numbers:
    """Return the bytes of a trace in the order of `BYTES`."""
    once = combined([step.since(step.parts["update"]), step.parts["micro-batch"]], [1, -TRACED_MICRO_BATCHES])
    sent = Counter[str]()
    for (collective, group), nbytes in once.sent_bytes.items():
        if group != "tp":
            sent[collective] += nbytes
    state = [step.state_bytes[name] for name in STATE]
    first, *others = (step.peak_bytes[name] - step.live for name in PHASES)
    return np.array([*state, first, max(others), sent["reduce_scatter"], sent["all_gather"]], dtype=float)


class Prices:
    """Computes time and memory of candidates from traces."""

    def __init__(self, problem: Problem, traced: Mapping[Shape, Costs]) -> None:
        self.problem, self.traced = problem, traced
        self._sizes = problem.model.megatron_sizes()

    def of(self, candidate: Candidate, dims: ParallelDims) -> Priced:
        """Return the time and the memory of a candidate."""
        layout = self.problem.layout_of(candidate)
        cluster = self.problem.cluster(layout)
        split = self._sizes.num_layers / (candidate.pipeline * (candidate.chunks or 1))
        stages_of_all = [split] * round(self._sizes.num_layers / split)
        in_flight = layers_in_flight(stages_of_all, candidate.pipeline, 0, dims.micro_batches)
        costs = self._costs(candidate, in_flight)
        layers = self._sizes.num_layers / candidate.pipeline
        seconds, nbytes = costs.of(layers, candidate.micro_batch_size)
        shards = dims.world_size // (candidate.shape.tensor * candidate.pipeline)
        if candidate.shape.fsdp:
            self._share_stage(candidate.pipeline, cluster, seconds, nbytes)
        else:
            self._share_state(candidate, seconds, nbytes, costs.shards, shards)
            seconds[ONCE, [Kind.GATHER, Kind.REDUCE]] = [
                cluster.seconds("dp_cp", nbytes[i], 1 + nbytes[i] / BUCKET_BYTES) if shards > 1 else 0.0
                for i in (B_GATHERED, B_REDUCED)
            ]
        if candidate.pipeline > 1:
            self._add_sends(candidate, cluster, seconds)
        time = step_time(seconds, dims.micro_batches, cluster)
        return Priced(candidate, dims, time, self._memory(candidate, costs, nbytes, in_flight))

    def shortest(self, shape: Shape) -> float:
        """Return an estimate of the shortest step with a stage shape, from traces of shapes with fewer ranks.

        More tensor or context parallelism makes products narrower and adds traffic, so the passes of all layers take
        longer than with less of it, at the largest micro-batch of the new shape without a pipeline. The exchange of
        gradients and weights, the update and bubbles are not counted, which leaves a margin for errors.
        """
        smaller = [other for other in self.traced if _extends(shape, other)]
        batch = self.problem.training.global_batch_size / self.problem.world_size
        samples = max(1, int(batch * shape.tensor * shape.context))
        return max((batch * self._passes(other, samples) for other in smaller), default=0.0)

    def _passes(self, shape: Shape, samples: int) -> float:
        """Return rank-seconds per sample of the passes of all layers, without exchanges of gradients and weights.

        Extrapolated times may be too long, so those of the largest traced micro-batch count if they are shorter.
        """
        cluster, times = self.problem.cluster(_traced_layout(self.problem, shape)), []
        for size in {samples, min(samples, self.traced[shape].sizes[-1])}:
            seconds = self.traced[shape].of(self._sizes.num_layers, size)[0][MICRO_BATCH]
            seconds[[Kind.GATHER, Kind.REDUCE]] = 0.0
            times.append(sum(pass_parts(seconds, cluster).values()) / size)
        delay = slowest_of(self.problem.world_size, self.problem.device.fitted.jitter)
        return (1 + delay) * shape.tensor * shape.context * min(times)

    def _costs(self, candidate: Candidate, layers: float) -> Costs:
        """Return the costs of a candidate's shape, adjusted for layers with full recompute.

        Args:
            layers: largest number of layers whose activations a rank stores.
        """
        plain, share = self.traced[candidate.shape], candidate.recomputed
        if not share:
            return plain
        seconds, nbytes = plain.seconds.copy(), plain.nbytes.copy()
        seconds[1, :, MICRO_BATCH] += share * seconds[1, :, FORWARD]
        layer = nbytes[1, :, B_ACTIVATIONS].copy()
        nbytes[1, :, B_ACTIVATIONS] *= 1 - share
        nbytes[1, :, B_ACTIVATIONS] += share * self._passed_on(candidate) * np.array(plain.sizes)
        # While the first layers are recomputed, later layers have already freed their activations.
        nbytes[0, :, B_ACTIVATIONS] += layer * max(0.0, 1 - (1 - share) * layers)
        return replace(plain, seconds=seconds, nbytes=nbytes)

    def _passed_on(self, candidate: Candidate) -> float:
        """Return the bytes per sample of the activations passed from one layer to the next."""
        share = candidate.shape.context * (candidate.shape.tensor if candidate.shape.sequence else 1)
        width = 2 if self.problem.training.precision != "fp32" else 4
        return width * self.problem.tokens * self._sizes.hidden_size / share

    def _share_state(
        self, candidate: Candidate, seconds: Numbers, nbytes: Numbers, traced_shards: int, shards: int
    ) -> None:
        """Adjust, in place, the costs that depend on the number of ranks sharing the optimizer."""
        sent = ((shards - 1) / shards) / ((traced_shards - 1) / traced_shards) if traced_shards > 1 else 0.0
        nbytes[[B_REDUCED, B_GATHERED]] *= sent
        times = float(traced_shards)
        if candidate.data_parallel == "ddp":
            nbytes[B_REDUCED] *= 2  # an all-reduce
            nbytes[B_GATHERED] = 0.0
        else:
            times = traced_shards / shards
        nbytes[[B_OPTIMIZER, B_AVERAGE]] *= times
        seconds[UPDATE, [Kind.MEMORY, Kind.EXPERT]] *= times
        seconds[UPDATE, Kind.MATMUL] *= traced_shards / shards  # Muon's, shared also by ranks with copies

    def _share_stage(self, pipeline: int, cluster: Cluster, seconds: Numbers, nbytes: Numbers) -> None:
        """Adjust, in place, the costs of FSDP inside a stage, whose state fewer ranks share than that of one stage.

        Every micro-batch gathers the weights of its stage in both passes and reduces its gradients, as traced.
        """
        nbytes[[B_WEIGHTS, B_OPTIMIZER, B_AVERAGE]] *= pipeline
        seconds[UPDATE, [Kind.MEMORY, Kind.EXPERT, Kind.MATMUL]] *= pipeline
        of_all = replace(cluster, parallel=replace(cluster.parallel, pipeline_model_parallel_size=1))
        seconds[:UPDATE, [Kind.GATHER, Kind.REDUCE]] *= of_all.bandwidth("dp_cp") / cluster.bandwidth("dp_cp")

    def _add_sends(self, candidate: Candidate, cluster: Cluster, seconds: Numbers) -> None:
        """Add pipeline traffic: each chunk's output, and the gradient of its input."""
        chunks = candidate.chunks or 1
        one_way = cluster.seconds("pp", chunks * candidate.micro_batch_size * self._passed_on(candidate), chunks)
        seconds[MICRO_BATCH, Kind.SEND] = 2 * one_way
        seconds[FORWARD, Kind.SEND] = one_way

    def _memory(self, candidate: Candidate, costs: Costs, nbytes: Numbers, in_flight: float) -> dict[str, float]:
        """Return the bytes of the fullest rank, the first of a pipeline."""
        saved = costs.of(in_flight, candidate.micro_batch_size)[1][B_ACTIVATIONS]
        state = dict(zip(STATE, nbytes[[B_WEIGHTS, B_OPTIMIZER, B_AVERAGE]].tolist()))
        return {**state, "activations and temporaries": float(max(saved, nbytes[B_UPDATE]))}


def price_layouts(
    problem: Problem,
    layouts: Sequence[tuple[Candidate, ParallelDims]],
    tracer: Tracer,
    begin: Callable[[Shape], None],
) -> tuple[list[Priced], list[Candidate]]:
    """Trace the stage shapes of candidates; return prices, and the candidates that are too slow to be traced.

    A layout surely fits if it has room for the error of its memory, so a trace of its full depth fits, too.

    Args:
        begin: called with a shape before its first trace.
    """
    room = MEMORY_SHARE * problem.device.memory_bytes / MEMORY_ERROR
    prices, results, slower = Prices(problem, {}), list[Priced](), list[Shape]()
    found = shapes(layouts)

    def traced_costs(shape: Shape, trace: Trace) -> Costs:
        begin(shape)
        return costs(problem, shape, trace, layouts)

    for size in sorted({_size(shape) for shape in found}):
        best = min((one.time.total for one in results if one.peak <= room), default=math.inf)
        faster = list[Shape]()
        for shape in found:
            if _size(shape) != size:
                continue
            # The estimate falls with the micro-batch, so it may be shorter for a shape that extends a slower one.
            if any(_extends(shape, other) for other in slower) or prices.shortest(shape) > best:
                slower.append(shape)
            else:
                faster.append(shape)
        traced = tracer.for_each(traced_costs, faster)
        prices = Prices(problem, {**prices.traced, **traced})
        results += [prices.of(candidate, dims) for candidate, dims in layouts if candidate.shape in traced]
    return results, [candidate for candidate, _ in layouts if candidate.shape in slower]


def _size(shape: Shape) -> tuple[int, bool]:
    """Return the place of a stage shape in the order of traces."""
    return shape.tensor * shape.context, shape.fsdp


def _extends(shape: Shape, smaller: Shape) -> bool:
    """Return whether a shape has at least the tensor and context parallelism of another, and FSDP if that has it."""
    same = smaller.expert == shape.expert and (shape.fsdp or not smaller.fsdp)
    return same and smaller.tensor <= shape.tensor and smaller.context <= shape.context


@dataclass(frozen=True)
class Verdict:
    """Candidates in order of time."""

    fitting: list[Priced]
    too_large: list[Priced]

    def by_item(self) -> dict[str, list[Priced]]:
        """Group candidates that do not fit by their largest item of memory."""
        return _grouped(self.too_large, lambda priced: max(priced.memory, key=lambda item: priced.memory[item]))

    def by_loss(self) -> dict[str, list[Priced]]:
        """Group slower candidates by the part of the step that grew most compared with the best candidate."""
        if not self.fitting:
            return {}
        best, *others = self.fitting

        def grown(priced: Priced) -> str:
            return max(PARTS[:-1], key=lambda part: priced.time.parts[part] - best.time.parts[part])

        return _grouped(others, grown)


def _grouped(priced: Sequence[Priced], key: Callable[[Priced], str]) -> dict[str, list[Priced]]:
    groups: dict[str, list[Priced]] = {}
    for one in priced:
        groups.setdefault(key(one), []).append(one)
    return dict(sorted(groups.items(), key=lambda group: -len(group[1])))


def fits(problem: Problem, priced: Priced) -> bool:
    """Return whether a candidate fits into the memory of the device."""
    return priced.peak <= MEMORY_SHARE * problem.device.memory_bytes


def judged(problem: Problem, priced: Sequence[Priced]) -> Verdict:
    """Sort candidates that fit by time, and the others by memory."""
    return Verdict(
        sorted((one for one in priced if fits(problem, one)), key=lambda one: one.time.total),
        sorted((one for one in priced if not fits(problem, one)), key=lambda one: one.peak),
    )


def with_traced_memory(priced: Priced, rank: StepTrace) -> Priced:
    """Return a candidate with the memory of its fullest rank in a trace of the full depth."""
    state = {name: float(rank.state_bytes[name]) for name in STATE}
    return replace(priced, memory={**state, "activations and temporaries": rank.peak - sum(state.values())})
