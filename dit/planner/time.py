"""Time of an optimizer step: the traced work of a rank divided by the rates of a device.

Each count of a trace is converted to seconds of one kind, which is linear. Then the kinds are overlapped as in the
program:

```
    one micro-batch  =  matmul + attention + memory + tensor parallel + exchanges of context and experts
                        + ring of context parallelism, as far as attention does not hide it
                        + FSDP traffic, as far as all of this does not hide it
                        + launch time of the host, as far as it exceeds the device time
    a step           =  (micro-batches + bubble) x one micro-batch
                        + exchange of gradients and weights beyond the last backward and the first forward pass
                        + optimizer                                                       all x FIXED_FACTOR
```

docs/planner.md lists comparisons with published measurements.
"""

import math
from dataclasses import dataclass
from typing import Optional

import numpy as np
import numpy.typing as npt

from dit.parallel.dims import ParallelConfig
from dit.planner.devices import ATTENTION_BACKWARD, FIXED_FACTOR, LATENCY_S, LAUNCH_S, Device
from dit.tracing.counter import ATTENTION, MATMUL, NARROW, OPS, StepTrace, combined
from dit.tracing.counter import ATTENTION_BACKWARD as BACKWARD

Seconds = npt.NDArray[np.float64]
"""Seconds by kind, in the order of `KINDS`."""
KINDS = (
    *("matmul", "attention", "memory", "tensor", "ring", "context", "expert", "send", "gather", "reduce"),
    "host",
)
(
    K_MATMUL,
    K_ATTENTION,
    K_MEMORY,
    K_TENSOR,
    K_RING,
    K_CONTEXT,
    K_EXPERT,
    K_SEND,
    K_GATHER,
    K_REDUCE,
    K_HOST,
) = range(len(KINDS))
PARTS = (
    *("matmul", "attention", "memory-bound", "tensor parallel", "context parallel", "expert parallel"),
    *("pipeline sends", "pipeline bubble", "data parallel", "optimizer", "launches", "other"),
)
"""Parts of a step's time; communication counts only if exposed."""


@dataclass(frozen=True)
class Cluster:
    """Placement of a layout's ranks.

    Ranks are in Megatron's order: tensor, context, data, pipeline; tensor-parallel ranks are neighbours.

    Attributes:
        device: device of every rank.
        world_size: number of ranks.
        parallel: parallel layout.
        node_size: GPUs joined by NVLink.
    """

    device: Device
    world_size: int
    parallel: ParallelConfig
    node_size: int = 8

    def group(self, name: str) -> tuple[int, int]:
        """Return the size of a group and the distance between neighbouring ranks."""
        layout = self.parallel
        tp, cp, pp = (
            layout.tensor_model_parallel_size,
            layout.context_parallel_size,
            layout.pipeline_model_parallel_size,
        )
        ep, instances = layout.expert_model_parallel_size, layout.num_distributed_optimizer_instances
        stage = self.world_size // pp
        return {
            "tp": (tp, 1),
            "cp": (cp, tp),
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
        size, stride = self.group(name)
        inside = max(1, min(size, self.node_size // stride))
        if size <= inside and size * stride <= max(stride, self.node_size):
            return self.device.nvlink
        return min(self.device.nvlink, self.device.nic * inside)

    def seconds(self, name: str, nbytes: float, calls: float) -> float:
        """Return the time of collectives in which a rank sends `nbytes` in `calls` calls."""
        size = self.group(name)[0]
        return nbytes / self.bandwidth(name) + calls * LATENCY_S * max(1.0, math.log2(max(1, size)))


def _kind(collective: str, group: str) -> int:
    """Return the kind of time that a collective inside a micro-batch counts as."""
    if group == "pp":
        return K_SEND
    if group == "cp":
        return K_RING if collective == "send" else K_CONTEXT
    if collective == "all_to_all" or group in ("ep", "tp_ep"):
        return K_EXPERT
    if group == "tp":
        return K_TENSOR
    return K_GATHER if collective == "all_gather" else K_REDUCE


def seconds_of(trace: StepTrace, cluster: Cluster, *, once: bool = False) -> Seconds:
    """Return the seconds of a trace by kind, without any overlap.

    Args:
        once: the trace is of work done once per step, whose collectives are those of gradients and weights; only
            gradients that are shared by tensor-parallel ranks stay in their group.
    """
    device, work = cluster.device, trace.work
    seconds = np.zeros(len(KINDS))
    seconds[K_MATMUL] = work[MATMUL] / device.matmul_flops
    seconds[K_ATTENTION] = (work[ATTENTION] + work[BACKWARD] / ATTENTION_BACKWARD) / device.attention_flops
    seconds[K_MEMORY] = (trace.moved_bytes + work[NARROW]) / device.memory_bandwidth
    seconds[K_HOST] = work[OPS] * LAUNCH_S
    for (collective, group), sent in trace.sent_bytes.items():
        kind = _kind(collective, "dp" if once and group != "tp" else group)
        seconds[kind] += cluster.seconds(group, sent, trace.calls[collective, group])
    return seconds


Cost = npt.NDArray[np.float64]
"""Seconds of one rank: rows `ROWS`, columns `KINDS`. Costs of layers and micro-batches are additive."""
MICRO_BATCH, FORWARD, ONCE, UPDATE = range(4)
"""Rows of a cost: a micro-batch; its forward pass; work once per step, during the micro-batches; work after them."""


def cost_of(trace: StepTrace, micro_batches: int, cluster: Cluster) -> Cost:
    """Return the cost of a traced rank.

    Args:
        trace: trace of a step with `micro_batches` micro-batches.
    """
    update = trace.parts["update"]
    rest = trace.since(update)
    micro_batch = trace.parts.get("micro-batch")
    if micro_batch is None:  # all gradients and weights are exchanged once, except by FSDP
        traffic = seconds_of(rest, cluster)
        once = np.zeros(len(KINDS))
        if cluster.parallel.data_parallel != "fsdp":
            once[[K_GATHER, K_REDUCE]] = traffic[[K_GATHER, K_REDUCE]]
        micro = (traffic - once) / micro_batches
    else:
        micro = seconds_of(micro_batch, cluster)
        once = seconds_of(combined([rest, micro_batch], [1, -micro_batches]), cluster, once=True)
    forward = seconds_of(trace.parts["forward"], cluster) if "forward" in trace.parts else micro / 3
    return np.stack([micro, forward, once.clip(min=0.0), seconds_of(update, cluster, once=True)])


def pass_parts(seconds: Seconds, cluster: Cluster) -> dict[str, float]:
    """Return the parts of one micro-batch, or of one pass of it, on one rank."""
    layout = cluster.parallel
    cp = layout.context_parallel_size
    hidden = seconds[K_ATTENTION] * (cp - 1) / cp  # the first block of keys and values is local
    parts = {
        "matmul": seconds[K_MATMUL],
        "attention": seconds[K_ATTENTION],
        "memory-bound": seconds[K_MEMORY],
        "tensor parallel": seconds[K_TENSOR],
        "context parallel": seconds[K_CONTEXT] + max(0.0, seconds[K_RING] - hidden),
        "expert parallel": seconds[K_EXPERT],
        "pipeline sends": 0.0 if layout.virtual_pipeline_model_parallel_size else seconds[K_SEND],
    }
    busy = sum(parts.values())
    exchanged = seconds[K_GATHER] + seconds[K_REDUCE]  # FSDP's
    parts["data parallel"] = max(0.0, exchanged - busy)
    parts["launches"] = max(0.0, seconds[K_HOST] - busy - parts["data parallel"])
    return parts


@dataclass(frozen=True)
class StepTime:
    """The time of an optimizer step.

    Attributes:
        parts: seconds by part (`PARTS`).
        passes: seconds of one micro-batch's forward and backward pass, without the fixed factor.
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
        cost: cost of the slowest stage.
        waits: idle seconds from simulating the pipeline; None to use `bubble_passes`.
    """
    layout = cluster.parallel
    each = pass_parts(cost[MICRO_BATCH], cluster)
    forward = min(sum(pass_parts(cost[FORWARD], cluster).values()), sum(each.values()))
    backward = sum(each.values()) - forward
    parts = {name: micro_batches * each.get(name, 0.0) for name in PARTS}
    bubble = bubble_passes(layout) * (forward + backward)
    parts["pipeline bubble"] = bubble if waits is None else waits
    reduce, gather = cost[ONCE, K_REDUCE], cost[ONCE, K_GATHER]
    sharded = layout.data_parallel == "fsdp" and layout.fsdp_sharding != "optim"  # it always overlaps the reduction
    parts["data parallel"] += max(0.0, reduce - backward) if layout.overlap_grad_reduce or sharded else reduce
    parts["data parallel"] += max(0.0, gather - forward) if layout.overlap_param_gather else gather
    parts["tensor parallel"] += cost[ONCE, K_TENSOR]
    parts["optimizer"] = cost[ONCE, K_MEMORY] + max(cost[UPDATE, K_MEMORY], cost[UPDATE, K_HOST]) + _sent(cost[UPDATE])
    parts["other"] = (FIXED_FACTOR - 1) * sum(parts.values())
    return StepTime({name: float(seconds) for name, seconds in parts.items()}, (float(forward), float(backward)))


def _sent(seconds: Seconds) -> float:
    return float(seconds[K_GATHER] + seconds[K_REDUCE])
