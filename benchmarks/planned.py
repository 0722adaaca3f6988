"""Compare the planner with published measurements on H100: `python -m benchmarks.planned`.

The matrix products, the attention and the traffic of a row are those of our recipe with the same model and layout,
traced on fake tensors. The published systems have other memory-bound kernels, so this work is assumed, not traced: the
passes over memory of an eager adaLN block as counted in plain PyTorch, and the unsharded adaLN weights, which every
rank of NeMo stores, updates and exchanges with its replicas. Megatron-Core's data parallelism sets gradients to zero
before a step and divides them after it; ours does not. The batch size was not published: 256 samples are assumed, which
matters for the row with pipeline stages.

Two constants are fitted to the four rows of NeMo, the rates of matrix products and of attention; the row of Wan is not
fitted. Leave-one-out errors show the quality of the fit: a row is predicted with the rates of the other three.
"""

import argparse
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Optional

import numpy as np

from dit.errors import EXIT_OK, one_line_errors
from dit.planner.devices import H100, Device
from dit.planner.time import (
    FORWARD,
    K_HOST,
    K_MEMORY,
    MICRO_BATCH,
    ONCE,
    UPDATE,
    Cluster,
    StepTime,
    cost_of,
    step_time,
)
from dit.terminal import echo
from launch import cli, environment

if TYPE_CHECKING:
    from dit.planner.plan import Plan
    from dit.run_config import RunConfig
    from dit.tracing.counter import StepTrace

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
    """A published measurement on H100, 8 per node.

    Attributes:
        name: as in the table.
        recipe: of this project, with the same model and layout.
        gpus: number of GPUs.
        tokens_per_s: per GPU.
        fitted: whether the constants are fitted to it.
        overrides: of the recipe.
        modulation: weights of a layer's adaLN projections, divided by the squared hidden size.
    """

    name: str
    recipe: str
    gpus: int
    tokens_per_s: float
    fitted: bool = True
    overrides: tuple[str, ...] = ()
    modulation: int = 9


ROWS = (
    Row("7B 8k, TP2 SP", "bench_dit7b_8k_tp2sp", 256, 10_052),
    Row("7B 74k, TP2 SP CP4", "bench_dit7b_74k_tp2sp_cp4", 256, 3409),
    Row("28B 8k, TP4 PP4", "bench_dit28b_8k_tp4pp4", 256, 2510),
    Row("28B 64k, FSDP, recomputed", "bench_dit28b_64k_fsdp_ckpt", 256, 1386),
    Row(
        "Wan 14B 37k, TP2 SP CP4",
        "wan_14b_mock",
        128,
        1974,
        fitted=False,
        overrides=(
            "parallel.data_parallel=distributed_optimizer",
            "training.recompute=full",
            "training.recompute_layers=8",
        ),
        modulation=0,  # a table for each layer
    ),
)
"""Sources: README of NVIDIA NeMo's diffusion collection, November 2024; performance summary of NVIDIA-NeMo/DFM."""


@dataclass(frozen=True)
class Traced:
    """A row with the trace of our recipe.

    Attributes:
        tokens: of a step.
        micro_batches: of a step on one replica.
        memory: assumed traffic in bytes of the published system in a micro-batch and in its forward pass, by rank.
        weights: number of weights of a rank of the published system, divided by ours, by rank.
        gradients: bytes of additional traffic of gradients in the published system, by rank.
        summed: bytes of adaLN gradients that its tensor-parallel ranks send to each other, by rank.
    """

    row: Row
    config: "RunConfig"
    plan: "Plan"
    tokens: int
    micro_batches: int
    memory: dict[int, tuple[float, float]]
    weights: dict[int, float]
    gradients: dict[int, float]
    summed: dict[int, float]

    @property
    def measured(self) -> float:
        """Seconds of the published step."""
        return self.tokens / (self.row.gpus * self.row.tokens_per_s)

    def predicted(self, device: Device) -> StepTime:
        """Return the time of the slowest rank."""
        cluster = Cluster(device, self.row.gpus, self.config.parallel)
        times = []
        for rank, trace in self.plan.ranks.items():
            published = with_unsharded_modulations(trace, self.weights[rank], self.summed[rank])
            cost = cost_of(published, self.micro_batches, cluster)
            cost[[MICRO_BATCH, FORWARD], K_MEMORY] = np.array(self.memory[rank]) / device.memory_bandwidth
            cost[[ONCE, UPDATE], K_MEMORY] *= self.weights[rank]
            cost[ONCE, K_MEMORY] += self.gradients[rank] / device.memory_bandwidth
            cost[:, K_HOST] = 0.0  # of our program
            times.append(step_time(cost, self.micro_batches, cluster))
        return max(times, key=lambda time: time.total)

    def error(self, device: Device) -> float:
        """Return the predicted time over the measured one, less one."""
        return self.predicted(device).total / self.measured - 1


def traced(row: Row) -> Traced:
    """Trace a row's recipe."""
    from dit.monitoring.flops import recomputed_share
    from dit.parallel.pipeline import split_layers
    from dit.planner.plan import plan
    from launch.config_file import built
    from launch.planned_sample import planned_sample
    from launch.train import resolve

    task = resolve(cli.Options(factory=row.recipe, overrides=list(row.overrides)))
    config = built(task)
    dims, _ = config.check(row.gpus)
    sample = planned_sample(task, config.model)
    parts = config.model, config.objective, config.optimizer, config.parallel, config.training
    full_plan = plan(*parts, sample.shape(dims), dims)
    sizes, layout = config.model.megatron_sizes(), config.parallel
    layers = split_layers(sizes.num_layers, layout.pipeline_model_parallel_size)
    recomputed = recomputed_share(config.training, layout, sizes.num_layers)
    share = layout.tensor_model_parallel_size * layout.context_parallel_size
    one_pass = 2 * sample.tokens * dims.micro_batch_size * sizes.hidden_size / share
    weights = row.modulation * sizes.hidden_size**2
    moved = (
        (EAGER_PASSES + recomputed * EAGER_FORWARD_PASSES) * one_pass + MODULATION_BYTES * weights,
        EAGER_FORWARD_PASSES * one_pass + 2 * weights,
    )
    memory = {rank: (moved[0] * layers[rank], moved[1] * layers[rank]) for rank in full_plan.ranks}
    elsewhere = 1 - 1 / layout.tensor_model_parallel_size
    counts = {rank: step.state_bytes["weights and gradients"] / WEIGHT_BYTES for rank, step in full_plan.ranks.items()}
    ratios = {rank: 1 + elsewhere * weights * layers[rank] / count for rank, count in counts.items()}
    passes = 0 if layout.data_parallel == "fsdp" else GRADIENT_PASSES
    gradients = {rank: passes * FP32_BYTES * count * ratios[rank] for rank, count in counts.items()}
    summed = {rank: 2 * elsewhere * FP32_BYTES * weights * layers[rank] for rank in counts}
    tokens = sample.tokens * config.training.global_batch_size
    return Traced(row, config, full_plan, tokens, dims.micro_batches, memory, ratios, gradients, summed)


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


def fitted(rows: Sequence[Traced], start: Device = H100) -> Device:
    """Return a device with rates of matrix products and attention that minimise the squared relative errors.

    The errors are nearly linear in the inverse rates, so Newton's method on these converges in a few steps.
    """
    inverse = np.array([1 / start.matmul_flops, 1 / start.attention_flops])

    def device(values: "np.ndarray[tuple[int], np.dtype[np.float64]]") -> Device:
        return replace(start, matmul_flops=1 / values[0], attention_flops=1 / values[1])

    for _ in range(8):
        errors = np.array([row.error(device(inverse)) for row in rows])
        steps = np.diag(inverse * 1e-4)
        slopes = np.array([[row.error(device(inverse + step)) for step in steps] for row in rows]) - errors[:, None]
        inverse = inverse - np.linalg.lstsq(slopes / (inverse * 1e-4), errors, rcond=None)[0]
    return device(inverse)


def left_out(rows: Sequence[Traced], row: Traced) -> Device:
    """Return the device fitted to the rows that may be fitted, without this one."""
    return fitted([other for other in rows if other.row.fitted and other is not row])


def table(rows: Sequence[Traced]) -> str:
    """Return a table of the predictions, each with the prediction of a fit without the row."""
    lines = [f"{'':<26} {'published':>10} {'planned':>10} {'error':>7} {'left out':>9}  the fit without it"]
    for row in rows:
        device = left_out(rows, row)
        lines.append(
            f"{row.row.name:<26} {row.measured * 1e3:>7,.0f} ms {row.predicted(H100).total * 1e3:>7,.0f} ms "
            f"{row.error(H100):>+7.1%} {row.error(device):>+9.1%}  {_rates(device)}"
        )
    fitted_rows = [row for row in rows if row.row.fitted]
    not_fitted = [row.row.name for row in rows if not row.row.fitted]
    return "\n".join(
        [
            *lines,
            "",
            f"2 constants fitted to {len(fitted_rows)} rows: {_rates(fitted(fitted_rows))}; used: {_rates(H100)}",
            f"in no fit: {', '.join(not_fitted)}",
        ]
    )


def _rates(device: Device) -> str:
    return f"matmul {device.matmul_flops / 1e12:.0f}, attention {device.attention_flops / 1e12:.0f} TFLOP/s"


@one_line_errors
def main(argv: Optional[Sequence[str]] = None) -> int:
    """Run the command and return its exit code."""
    argparse.ArgumentParser(prog="python -m benchmarks.planned", description=__doc__).parse_args(argv)
    environment.prepare()
    environment.quiet_libraries()
    echo(table([traced(row) for row in ROWS]))
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(main())
