"""Compare the planner with published measurements: `python -m benchmarks.planned`.

The matrix products, the attention and the traffic of a row are those of our recipe with the same model and layout,
traced on fake tensors. So is the memory-bound work, except in the rows of NeMo's adaLN models, whose kernels are known:
the passes over memory of an eager block as counted in plain PyTorch, and the unsharded adaLN weights, which every rank
stores, updates and exchanges with its replicas. Megatron-Core's data parallelism sets gradients to zero before a step
and divides them after it; ours does not. The batch size of these rows was not published: 256 samples are assumed, which
matters for the row with pipeline stages.

Nine constants are fitted (`dit.planner.devices.Fitted`). Errors of a system that the fit has not seen show its
quality: a row is predicted with constants fitted to the rows of the other systems.
"""

import argparse
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cache
from typing import TYPE_CHECKING, Any, Optional

import numpy as np

from benchmarks.step import recomputed_share
from dit.errors import EXIT_OK, one_line_errors
from dit.planner.devices import Fitted, devices, with_fp8
from dit.planner.time import (
    FORWARD,
    MICRO_BATCH,
    ONCE,
    UPDATE,
    Cluster,
    Kind,
    StepTime,
    cost_of,
    step_time,
)
from dit.terminal import echo
from launch import cli, environment

if TYPE_CHECKING:
    from dit.parallel.dims import ParallelDims
    from dit.planner.plan import Plan
    from dit.run_config import RunConfig
    from dit.tracing.counter import StepTrace

HEAD = "| published step | measured, ms | error of the plan |"
STEPS, DELTA, LARGEST_STEP, PENALTY = 12, 1e-3, 0.3, 0.02
"""Of the fit: iterations, difference for slopes, largest change of a logarithm in an iteration, penalty of a change."""
EAGER_PASSES, EAGER_FORWARD_PASSES = 178, 52
"""Reads and writes of tokens x hidden size in an eager layer of three sub-layers: in total, and in its forward pass.

Counted in plain PyTorch for two sub-layers, 30 and 73, and extrapolated to cross-attention and the norms of q and k.
"""
FP32_BYTES = 4
WEIGHT_BYTES = 2 + FP32_BYTES
"""A weight in bf16, and its gradient in fp32."""
GRADIENT_PASSES = 4
"""Reads and writes of a gradient in fp32 that Megatron-Core's data parallelism makes once in a step and ours does not.

Set to zero 1, read to be added to 1, divided by the tokens 2.
"""
MODULATION_BYTES = 12
"""Traffic of a modulation weight in a micro-batch: read in bf16 by both passes, added to in fp32."""


@dataclass(frozen=True)
class Row:
    """A published measurement.

    Attributes:
        name: as in the table.
        source: of the measurement, see `ROWS`.
        system: rows of a system are left out of the fit together.
        device: name of the device.
        gpus: number of GPUs.
        seconds: duration of a step.
        recipe, overrides: of this project, with the same model and layout.
        tokens, text_tokens: (t, h, w) patches of a sample and tokens of its text, if not those of the recipe.
        node_size: GPUs joined by NVLink, if not those of the device.
        fp8: whether matrix products are in MXFP8.
        fitted: whether the constants are fitted to it; later and partly unknown rows test the fit.
        modulation: weights of a layer's unsharded adaLN projections, divided by the squared hidden size, in NeMo's
            rows; 0 for rows whose memory-bound work is traced.
    """

    name: str
    source: str
    system: str
    device: str
    gpus: int
    seconds: float
    recipe: str
    overrides: tuple[str, ...] = ()
    tokens: Optional[tuple[int, int, int]] = None
    text_tokens: Optional[int] = None
    node_size: Optional[int] = None
    fp8: bool = False
    fitted: bool = True
    modulation: int = 0

    @property
    def cells(self) -> str:
        """The first cells of the table: the published step and its milliseconds."""
        return f"| {self.name} ({self.source}) | {self.seconds * 1e3:,.0f} |"


_REPLICATED = (
    "parallel.data_parallel=distributed_optimizer",
    "parallel.overlap_grad_reduce=True",
    "parallel.overlap_param_gather=True",
)
"""Overrides of a distributed optimizer whose exchanges overlap with computation."""


def _nemo(name: str, recipe: str, tokens: int, tokens_per_s: float) -> Row:
    """Return a row of NeMo: 256 samples on as many H100, tokens/s per GPU."""
    return Row(name, "NeMo", "NeMo, H100", "h100", 256, tokens / tokens_per_s, recipe, modulation=9)


def _flux(
    source: str, device: str, gpus: int, samples: int, ms: float, tensor: int = 1, node_size: Optional[int] = None
) -> Row:
    """Return a row of MLPerf's FLUX.1: images of 256 px and 256 text tokens, one micro-batch to a step; MXFP8 if TP 1.

    Version 6.0 is in no fit, because its precision is unknown.

    Args:
        samples: of a micro-batch.
    """
    batch = samples * gpus // tensor
    layout = f"TP {tensor}, {gpus} {device.upper()}" if tensor > 1 else f"{gpus} {device.upper()}"
    overrides = (
        *_REPLICATED,
        f"parallel.tensor_model_parallel_size={tensor}",
        f"training.micro_batch_size={samples}",
        f"training.global_batch_size={batch}",
    )
    name, sample = f"FLUX.1 x {samples}, {layout}", ((1, 16, 16), 256)
    system = f"MLPerf, {device.upper()}"
    row = name, source, system, device, gpus, ms / 1e3, "bench_flux12b_1024", overrides, *sample, node_size
    return Row(*row, fp8=tensor == 1, fitted=source != "MLPerf 6.0")


def _wan(
    source: str, system: str, device: str, gpus: int, samples: int, seconds: float, context: int, *more: str, **row: Any
) -> Row:
    """Return a row of Wan 2.1 14B on clips of 37,440 tokens."""
    overrides = (
        "parallel.tensor_model_parallel_size=1",
        "parallel.sequence_parallel=False",
        f"parallel.context_parallel_size={context}",
        f"training.global_batch_size={samples}",
        *more,
    )
    name = f"Wan 14B, CP {context}, {gpus} {device.upper()}"
    return Row(name, source, system, device, gpus, seconds, "wan_14b_mock", overrides, **row)


ROWS = (
    _nemo("DiT-7B 8k, TP 2 SP, 256 H100", "bench_dit7b_8k_tp2sp", 8192, 10_052),
    _nemo("DiT-7B 74k, TP 2 SP CP 4, 256 H100", "bench_dit7b_74k_tp2sp_cp4", 73_728, 3409),
    _nemo("DiT-28B 8k, TP 4 SP PP 4, 256 H100", "bench_dit28b_8k_tp4pp4", 8192, 2510),
    _nemo("DiT-28B 64k, FSDP, recomputed, 256 H100", "bench_dit28b_64k_fsdp_ckpt", 65_536, 1386),
    Row(
        "Wan 14B, TP 2 SP CP 4, 128 H100",
        "DFM",
        "DFM, H100",
        "h100",
        128,
        18.96,
        "wan_14b_mock",
        (
            *_REPLICATED[:1],
            "training.global_batch_size=128",
            "training.recompute=full",
            "training.recompute_layers=8",
        ),
    ),
    _flux("NVIDIA", "gb200", 16, 32, 567.3),
    _flux("NVIDIA", "gb200", 72, 32, 574.4),
    _flux("NVIDIA", "gb200", 512, 16, 184.0, 4, 64),
    _flux("NVIDIA", "gb200", 1152, 8, 133.4, 4, 64),
    _flux("NVIDIA", "gb300", 16, 64, 918.8),
    _flux("NVIDIA", "gb300", 72, 32, 511.0),
    _flux("Supermicro", "gb300", 72, 32, 517.0),
    _flux("NVIDIA", "gb300", 512, 16, 171.4, 4, 64),
    _flux("Oracle", "b200", 16, 32, 627.9),
    _flux("Oracle", "b200", 72, 32, 625.3),
    _flux("Nebius", "b200", 32, 32, 621.7),
    _flux("Florida", "b200", 16, 32, 620.6),
    _flux("Florida", "b200", 32, 32, 616.5),
    _flux("Florida", "b200", 64, 32, 630.2),
    _flux("Florida", "b200", 72, 32, 630.3),
    _flux("Florida", "b200", 128, 32, 649.9),
    _flux("MLPerf 6.0", "gb300", 32, 32, 433.0),
    _flux("MLPerf 6.0", "gb300", 72, 32, 433.0),
    _wan("Bridge", "Bridge, Blackwell", "b200", 32, 64, 15.37, 2),
    _wan("Bridge", "Bridge, Blackwell", "gb200", 32, 64, 13.73, 2, fitted=False),
    _wan("DFM", "Bridge, Blackwell", "gb200", 32, 64, 15.69, 4, *_REPLICATED),
    _wan("DFM", "Bridge, Blackwell", "gb300", 32, 64, 11.99, 2, *_REPLICATED),
    _wan("Automodel", "Automodel, H100", "h100", 8, 8, 35.1, 1, "training.recompute=full", fitted=False),
    _wan("Automodel", "Automodel, H100", "h100", 64, 64, 26.99, 1, "training.recompute=full", fitted=False),
)
"""Sources: README of NVIDIA NeMo's diffusion collection, November 2024; performance summaries of Megatron-Bridge and of
NVIDIA-NeMo/DFM, also for Automodel, whose layers are assumed to be recomputed; MLPerf Training v5.1, median step times
in the logs of NVIDIA, Supermicro, Oracle, Nebius and the University of Florida; v6.0, June 2026."""


@dataclass(frozen=True)
class Traced:
    """A row with the trace of our recipe.

    Attributes:
        micro_batches: of a step on one replica.
        memory: assumed traffic in bytes of the published system in a micro-batch and in its forward pass, by rank;
            empty for a row whose memory-bound work is traced.
        weights: number of weights of a rank of the published system, divided by ours, by rank.
        gradients: bytes of additional traffic of gradients in the published system, by rank.
        summed: bytes of adaLN gradients that its tensor-parallel ranks send to each other, by rank.
    """

    row: Row
    config: "RunConfig"
    plan: "Plan"
    micro_batches: int
    memory: dict[int, tuple[float, float]]
    weights: dict[int, float]
    gradients: dict[int, float]
    summed: dict[int, float]

    def predicted(self, fitted: Fitted) -> StepTime:
        """Return the time of the slowest rank."""
        row = self.row
        device = with_fp8(devices(fitted)[row.device], "mxfp8" if row.fp8 else None)
        if row.node_size:
            device = replace(device, node_size=row.node_size)
        cluster = Cluster(device, row.gpus, self.config.parallel)
        times = []
        for rank, trace in self.plan.ranks.items():
            published = with_unsharded_modulations(trace, self.weights[rank], self.summed[rank])
            cost = cost_of(published, self.micro_batches, cluster)
            if self.memory:  # of all operations that are not matrix products or attention
                cost[[MICRO_BATCH, FORWARD], Kind.OPERATIONS] = 0.0
                cost[[MICRO_BATCH, FORWARD], Kind.MEMORY] = np.array(self.memory[rank]) / device.memory_bandwidth
            cost[[ONCE, UPDATE], Kind.MEMORY] *= self.weights[rank]
            cost[ONCE, Kind.MEMORY] += self.gradients[rank] / device.memory_bandwidth
            times.append(step_time(cost, self.micro_batches, cluster))
        return max(times, key=lambda time: time.total)

    def error(self, fitted: Fitted) -> float:
        """Return the predicted time over the measured one, less one."""
        return self.predicted(fitted).total / self.row.seconds - 1


@cache
def planned(
    recipe: str,
    overrides: tuple[str, ...],
    gpus: int,
    tokens: Optional[tuple[int, int, int]],
    text_tokens: Optional[int],
) -> tuple["RunConfig", "ParallelDims", int, "Plan"]:
    """Return the settings of a row's recipe, its sizes, the tokens of a sample and its plan, for any device."""
    from dit.planner.job import Job
    from dit.planner.plan import plan
    from launch.config_file import built
    from launch.planned_sample import planned_sample
    from launch.train import resolve

    config = built(resolve(cli.Options(factory=recipe, overrides=list(overrides))))
    dims, _ = config.check(gpus)
    sample = planned_sample(config.data, config.model, tokens, text_tokens)
    parts = config.model, config.objective, config.optimizer, config.parallel, config.training
    return config, dims, sample.tokens, plan(Job(*parts, sample.shape(dims)), dims)


def traced(row: Row) -> Traced:
    """Trace a row's recipe."""
    from dit.parallel.pipeline import split_layers

    arguments = row.recipe, row.overrides, row.gpus, row.tokens, row.text_tokens
    config, dims, tokens, full_plan = planned(*arguments)
    sizes, layout = config.model.megatron_sizes(), config.parallel
    layers = split_layers(sizes.num_layers, layout.pipeline_model_parallel_size)
    recomputed = recomputed_share(config.training, layout, config.model)
    share = layout.tensor_model_parallel_size * layout.context_parallel_size
    one_pass = 2 * tokens * dims.micro_batch_size * sizes.hidden_size / share
    weights = row.modulation * sizes.hidden_size**2
    moved = (
        (EAGER_PASSES + recomputed * EAGER_FORWARD_PASSES) * one_pass + MODULATION_BYTES * weights,
        EAGER_FORWARD_PASSES * one_pass + 2 * weights,
    )
    memory = {rank: (moved[0] * layers[rank], moved[1] * layers[rank]) for rank in full_plan.ranks if row.modulation}
    elsewhere = 1 - 1 / layout.tensor_model_parallel_size
    counts = {rank: step.state_bytes["weights and gradients"] / WEIGHT_BYTES for rank, step in full_plan.ranks.items()}
    ratios = {rank: 1 + elsewhere * weights * layers[rank] / count for rank, count in counts.items()}
    passes = 0 if layout.data_parallel == "fsdp" else GRADIENT_PASSES
    gradients = {rank: passes * FP32_BYTES * count * ratios[rank] for rank, count in counts.items()}
    summed = {rank: 2 * elsewhere * FP32_BYTES * weights * layers[rank] for rank in counts}
    return Traced(row, config, full_plan, dims.micro_batches, memory, ratios, gradients, summed)


def with_unsharded_modulations(step: "StepTrace", weights: float, summed: float) -> "StepTrace":
    """Return a step of a rank with unsharded adaLN weights, as on all tensor-parallel ranks of NeMo.

    Args:
        weights: ratio of the weights exchanged with replicas to those in the step.
        summed: bytes of adaLN gradients that the rank sends to its tensor-parallel peers.
    """
    sent = Counter(
        {
            (kind, group): round(count * weights) if group in ("dp", "dp_cp") else count
            for (kind, group), count in step.sent_bytes.items()
        }
    )
    if summed:
        sent["all_reduce", "tp"] += round(summed)
    return replace(step, sent_bytes=sent)


def fitted(rows: Sequence[Traced]) -> Fitted:
    """Return constants that minimise the squared relative errors of rows.

    Newton's method on the logarithms. A small penalty keeps constants that no row determines near those of `Fitted`.
    """
    names = [field.name for field in fields(Fitted)]
    origin = np.log([getattr(Fitted(), name) for name in names])
    values = origin

    def residuals(logs: "np.ndarray[Any, Any]") -> "np.ndarray[Any, Any]":
        constants = Fitted(*np.exp(logs).tolist())
        return np.array([*(row.error(constants) for row in rows), *(PENALTY * (logs - origin))])

    for _ in range(STEPS):
        errors = residuals(values)
        slopes = np.array([residuals(values + move) - errors for move in DELTA * np.eye(len(names))]).T / DELTA
        values = values - np.linalg.lstsq(slopes, errors, rcond=None)[0].clip(-LARGEST_STEP, LARGEST_STEP)
    return Fitted(*np.exp(values).tolist())


def left_out(rows: Sequence[Traced], system: str) -> Fitted:
    """Return constants fitted to the rows of all other systems."""
    return fitted([row for row in rows if row.row.fitted and row.row.system != system])


def table(rows: Sequence[Traced]) -> str:
    """Return a table of the predictions, with the errors of all rows and of fits without the system of a row."""
    in_fit = [row for row in rows if row.row.fitted]
    unseen = {system: left_out(rows, system) for system in {row.row.system for row in in_fit}}
    errors = {
        f"{len(in_fit)} rows in the fit: median, largest error": [row.error(Fitted()) for row in in_fit],
        "the same in fits without the row's system": [row.error(unseen[row.row.system]) for row in in_fit],
        f"{len(rows) - len(in_fit)} rows in no fit": [row.error(Fitted()) for row in rows if not row.row.fitted],
    }
    lines = [f"{row.row.cells} {row.error(Fitted()):+.1%} |" for row in rows]
    lines += [
        f"| {title} | | {np.median(np.abs(row)):.1%}, {max(map(abs, row)):.1%} |" for title, row in errors.items()
    ]
    return "\n".join([HEAD, "|---|---|---|", *lines])


def constants(rows: Sequence[Traced]) -> str:
    """Return the constants of a fit to the rows, and those used."""
    best = asdict(fitted([row for row in rows if row.row.fitted]))
    used = asdict(Fitted())
    return "constants of the fit: " + ", ".join(f"{name} {best[name]:.4g} (used: {used[name]:.4g})" for name in best)


@one_line_errors
def main(argv: Optional[Sequence[str]] = None) -> int:
    """Run the command and return its exit code."""
    argparse.ArgumentParser(prog="python -m benchmarks.planned", description=__doc__).parse_args(argv)
    environment.prepare(quiet=True)
    rows = [traced(row) for row in ROWS]
    echo(table(rows) + "\n\n" + constants(rows))
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(main())
