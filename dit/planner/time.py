"""Time of an optimizer step: the traced work of a rank divided by the rates of a device.

Each count of a trace is converted to seconds of one kind, which is linear. Then the kinds are overlapped as in the
program:

```
    one micro-batch  =  matmul + attention + memory + time per operation
                        + tensor parallel, as far as overlapped products do not hide it
                        + exchanges of context and experts
                        + ring of context parallelism, as far as attention does not hide it
                        + FSDP traffic, as far as all of this does not hide it
    a step           =  (micro-batches + bubble) x one micro-batch
                        + exchange of gradients and weights beyond the last backward and the first forward pass
                        + a share of the hidden exchanges, which slow down the computation
                        + optimizer
                        + the delay of the slowest rank                                   (`slowest_of`)
```

docs/planner.md lists comparisons with published measurements.
"""

import functools
import math
from dataclasses import dataclass
from enum import IntEnum
from statistics import NormalDist
from typing import Optional

import numpy as np
import numpy.typing as npt

from dit.parallel.dims import ParallelConfig
from dit.planner.devices import (
    ATTENTION_BACKWARD,
    FP8_FLOPS_PER_BYTE,
    K_FILL,
    LATENCY_S,
    SPLITS,
    TILES,
    Device,
)
from dit.tracing.counter import ATTENTION, OPS, Product, StepTrace, combined
from dit.tracing.counter import ATTENTION_BACKWARD as BACKWARD

Seconds = npt.NDArray[np.float64]
"""Seconds by `Kind`."""
Kind = IntEnum("Kind", "MATMUL ATTENTION MEMORY OPERATIONS TENSOR RING CONTEXT EXPERT SEND GATHER REDUCE", start=0)
"""Kinds of time: of the computation, and of the communication in each group."""
PARTS = (
    *("matmul", "attention", "memory-bound", "tensor parallel", "context parallel", "expert parallel"),
    *("pipeline sends", "pipeline bubble", "data parallel", "optimizer", "other"),
)
"""Parts of a step's time; communication counts only if exposed."""


@dataclass(frozen=True)
class Cluster:
    """Placement of a layout's ranks.

    Ranks are in Megatron's order: tensor, context, data, pipeline; tensor-parallel ranks are neighbours.

    Attributes:
        overlaps_tensor: tensor-parallel communication overlaps with matrix products (`training.linears=overlapped`).
    """

    device: Device
    world_size: int
    parallel: ParallelConfig
    overlaps_tensor: bool = False

    def group(self, name: str) -> tuple[int, int]:
        """Return the size of a group and the distance between neighbouring ranks."""
        layout = self.parallel
        tp, cp = layout.tensor_model_parallel_size, layout.context_parallel_size
        pp = layout.pipeline_model_parallel_size
        inner = layout.context_a2a_size or 1  # of the two levels of `a2a+p2p`
        ep, instances = layout.expert_model_parallel_size, layout.num_distributed_optimizer_instances
        stage = self.world_size // pp
        return {
            "tp": (tp, 1),
            "cp": (cp, tp),
            "cp_heads": (inner, tp),
            "cp_ring": (cp // inner, tp * inner),
            "tp_cp": (tp * cp, 1),
            "dp": (stage // (tp * cp), tp * cp),
            "dp_cp": (stage // tp, tp),
            "intra_dp_cp": (stage // tp // instances, tp),
            "inter_dist_opt": (instances, stage // instances),
            "ep": (ep, 1),
            "tp_ep": (ep, 1),
            "expt_dp": (stage // ep, ep),
            "pp": (pp, stage),
        }.get(name, (self.world_size, 1))

    def bandwidth(self, name: str) -> float:
        """Return the bytes per second that a rank sends in a group: NVLink's, or its share of the node's NICs.

        A ring over nodes enters and leaves each node once, and can use the NICs of all group members in the node.
        """
        (size, stride), node_size = self.group(name), self.device.node_size
        inside = max(1, min(size, node_size // stride))
        if size <= inside and size * stride <= max(stride, node_size):
            return self.device.nvlink
        return min(self.device.nvlink, self.device.nic * inside)

    def seconds(self, name: str, nbytes: float, calls: float) -> float:
        """Return the time of collectives in which a rank sends `nbytes` in `calls` calls."""
        size = self.group(name)[0]
        return nbytes / self.bandwidth(name) + calls * LATENCY_S * max(1.0, math.log2(max(1, size)))


def _kind(collective: str, group: str) -> Kind:
    """Return the kind of time that a collective inside a micro-batch counts as."""
    if group == "pp":
        return Kind.SEND
    if group in ("cp", "cp_heads", "cp_ring"):
        return Kind.RING if collective == "send" else Kind.CONTEXT
    if collective == "all_to_all" or group in ("ep", "tp_ep"):
        return Kind.EXPERT
    if group == "tp":
        return Kind.TENSOR
    return Kind.GATHER if collective == "all_gather" else Kind.REDUCE


def quantised_bytes(product: Product, device: Device) -> float:
    """Return the traffic of quantising the factors of a product to MXFP8; 0 for products that stay in bf16.

    Each matrix of a linear layer (input, weight, gradient of the output) is read in bf16 and written once by rows and
    once by columns, 4 bytes per element, and is a factor of two of its three products.
    """
    batch, m, n, k, nbytes = product
    wide = 2 * batch * m * n * k >= FP8_FLOPS_PER_BYTE * nbytes
    return 2 * batch * (m * k + k * n) if device.quantises and wide else 0


@functools.cache
def product_seconds(product: Product, device: Device) -> float:
    """Return the time of a matrix product: that of its operations in full waves of tiles, or of its bytes if longer.

    A multiprocessor computes one tile of the result at a time, so a product takes full waves of tiles. `K_FILL` is the
    time to fill and to drain the pipeline of a tile. With few tiles, k is split over several multiprocessors, which
    add up their tiles in memory. The library selects the fastest of these forms.

    ```
        4096 x 3072 by tiles of 256 x 128: 16 x 24 = 384 tiles = 2.9 waves of 132 multiprocessors, which take 3
    ```
    """
    batch, m, n, k, nbytes = product
    rate = device.matmul_flops * (device.fitted.fp8_speedup if quantised_bytes(product, device) else 1)
    times = []
    for rows, columns, efficiency in TILES:
        for split in SPLITS:
            tiles = batch * math.ceil(m / rows) * math.ceil(n / columns) * split
            waves = math.ceil(tiles / device.multiprocessors)
            flops = 2 * waves * device.multiprocessors * rows * columns * (k / split + K_FILL)
            partial = (split - 1) * 2 * 4 * batch * m * n  # written and read in fp32
            times.append(flops / (efficiency * rate) + partial / device.memory_bandwidth)
    return max(min(times), nbytes / device.memory_bandwidth)


def seconds_of(trace: StepTrace, cluster: Cluster, *, once: bool = False) -> Seconds:
    """Return the seconds of a trace by kind, without any overlap.

    Args:
        once: the trace is of work done once per step, whose collectives are those of gradients and weights; only
            gradients that are shared by tensor-parallel ranks stay in their group.
    """
    device, work = cluster.device, trace.work
    seconds = np.zeros(len(Kind))
    seconds[Kind.MATMUL] = sum(count * product_seconds(product, device) for product, count in trace.products.items())
    seconds[Kind.ATTENTION] = (work[ATTENTION] + work[BACKWARD] / ATTENTION_BACKWARD) / device.attention_flops
    quantised = sum(count * quantised_bytes(product, device) for product, count in trace.products.items())
    seconds[Kind.MEMORY] = (trace.moved_bytes + quantised) / device.memory_bandwidth
    seconds[Kind.OPERATIONS] = work[OPS] * device.fitted.operation_seconds
    for (collective, group), sent in trace.sent_bytes.items():
        kind = _kind(collective, "dp" if once and group != "tp" else group)
        seconds[kind] += cluster.seconds(group, sent, trace.calls[collective, group])
    return seconds


Cost = npt.NDArray[np.float64]
"""Seconds of one rank: rows `ROWS`, columns `Kind`. Costs of layers and micro-batches are additive."""
MICRO_BATCH, FORWARD, ONCE, UPDATE = range(4)
"""Rows of a cost: a micro-batch; its forward pass; work once per step, during the micro-batches; work after them."""


def cost_of(trace: StepTrace, micro_batches: int, cluster: Cluster) -> Cost:
    """Return the cost of a traced rank."""
    update = trace.parts["update"]
    rest = trace.since(update)
    micro_batch = trace.parts.get("micro-batch")
    if micro_batch is None:  # all gradients and weights are exchanged once, except by FSDP
        traffic = seconds_of(rest, cluster)
        once = np.zeros(len(Kind))
        if cluster.parallel.data_parallel != "fsdp":
            once[[Kind.GATHER, Kind.REDUCE]] = traffic[[Kind.GATHER, Kind.REDUCE]]
        micro = (traffic - once) / micro_batches
    else:
        micro = seconds_of(micro_batch, cluster)
        once = seconds_of(combined([rest, micro_batch], [1, -micro_batches]), cluster, once=True)
    forward = seconds_of(trace.parts["forward"], cluster) if "forward" in trace.parts else micro / 3
    return np.stack([micro, forward, once.clip(min=0.0), seconds_of(update, cluster, once=True)])


def pass_parts(seconds: Seconds, cluster: Cluster) -> dict[str, float]:
    """Return the parts of one micro-batch, or of one pass of it, on one rank."""
    layout = cluster.parallel
    ring, _ = cluster.group("cp_ring")
    hidden = seconds[Kind.ATTENTION] * (ring - 1) / ring  # the first block of keys and values is local
    tp = layout.tensor_model_parallel_size
    products = seconds[Kind.MATMUL] * (tp - 1) / tp if cluster.overlaps_tensor else 0.0  # the first tokens are local
    parts = {
        "matmul": seconds[Kind.MATMUL],
        "attention": seconds[Kind.ATTENTION],
        "memory-bound": seconds[Kind.MEMORY] + seconds[Kind.OPERATIONS],
        "tensor parallel": max(0.0, seconds[Kind.TENSOR] - products),
        "context parallel": seconds[Kind.CONTEXT] + max(0.0, seconds[Kind.RING] - hidden),
        "expert parallel": seconds[Kind.EXPERT],
        "pipeline sends": 0.0 if layout.virtual_pipeline_model_parallel_size else seconds[Kind.SEND],
    }
    busy = sum(parts.values())
    exchanged = seconds[Kind.GATHER] + seconds[Kind.REDUCE]  # FSDP's
    parts["data parallel"] = exposed(exchanged, busy, cluster)
    return parts


def exposed(exchanged: float, busy: float, cluster: Cluster) -> float:
    """Return the seconds that an exchange adds to the computation next to it.

    These are the seconds after the computation has ended, and those by which the exchange slows it down: its kernels
    occupy multiprocessors and the memory.
    """
    return max(0.0, exchanged - busy) + cluster.device.fitted.interference * min(exchanged, busy)


def slowest_of(ranks: int, jitter: float) -> float:
    """Return the expected delay of the slowest rank, relative to the mean time of a step.

    All ranks wait for it. Times are normally distributed; the largest of n is approximated as in Blom 1958,
    "Statistical Estimates and Transformed Beta-Variables".
    """
    return jitter * NormalDist().inv_cdf((ranks - 0.375) / (ranks + 0.25))


@dataclass(frozen=True)
class StepTime:
    """The time of an optimizer step.

    Attributes:
        passes: seconds of one micro-batch's forward and backward pass, without the delay of the slowest rank.
    """

    parts: dict[str, float]
    passes: tuple[float, float]

    @property
    def total(self) -> float:
        """Seconds of the step."""
        return sum(self.parts.values())


def bubble_passes(parallel: ParallelConfig) -> float:
    """Return the bubble of a pipeline of equal stages, in micro-batches.

    Source: Narayanan et al. 2021, arXiv:2104.04473, section 2.2.
    """
    chunks = parallel.virtual_pipeline_model_parallel_size or 1
    return (parallel.pipeline_model_parallel_size - 1) / chunks


def step_time(cost: Cost, micro_batches: int, cluster: Cluster, waits: Optional[float] = None) -> StepTime:
    """Return the time of a step from the cost of one rank.

    Args:
        waits: idle seconds of a rank of a pipeline; None to use `bubble_passes`.
    """
    layout = cluster.parallel
    each = pass_parts(cost[MICRO_BATCH], cluster)
    forward = min(sum(pass_parts(cost[FORWARD], cluster).values()), sum(each.values()))
    backward = sum(each.values()) - forward
    parts = {name: micro_batches * each.get(name, 0.0) for name in PARTS}
    bubble = bubble_passes(layout) * (forward + backward)
    parts["pipeline bubble"] = bubble if waits is None else waits
    reduce, gather = cost[ONCE, Kind.REDUCE], cost[ONCE, Kind.GATHER]
    # FSDP always overlaps the reduction.
    overlaps = layout.overlap_grad_reduce or (layout.data_parallel == "fsdp" and layout.fsdp_sharding != "optim")
    parts["data parallel"] += exposed(reduce, backward if overlaps else 0.0, cluster)
    parts["data parallel"] += exposed(gather, forward if layout.overlap_param_gather else 0.0, cluster)
    parts["tensor parallel"] += cost[ONCE, Kind.TENSOR]
    computed = cost[ONCE:, [Kind.MEMORY, Kind.OPERATIONS]].sum() + cost[UPDATE, Kind.MATMUL]  # Muon has products
    parts["optimizer"] = float(computed) + _sent(cost[UPDATE])
    parts["other"] = slowest_of(cluster.world_size, cluster.device.fitted.jitter) * sum(parts.values())
    return StepTime({name: float(seconds) for name, seconds in parts.items()}, (float(forward), float(backward)))


def _sent(seconds: Seconds) -> float:
    """Return the seconds of exchanges after the micro-batches; Muon exchanges weights by all-to-all."""
    return float(seconds[Kind.GATHER] + seconds[Kind.REDUCE] + seconds[Kind.EXPERT])
