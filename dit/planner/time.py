"""How long an optimizer step takes: what a rank does, as it was traced, divided by the rates of a device.

Each count of a trace becomes seconds of one kind, which is linear. Then the kinds are laid over each other as the
program lays them:

```
    one micro-batch  =  matmul + attention + memory + tensor parallel + exchanges of context and experts
                        + what the ring of context parallelism does not hide behind attention
                        + what FSDP does not hide behind all of this
                        + what the host needs longer than the device
    a step           =  (micro-batches + bubble) x one micro-batch
                        + what gradients and weights need longer than the last backward and the first forward pass
                        + optimizer                                                       all x FIXED_FACTOR
```

Where the model was compared with published measurements, and where not, is in docs/planner.md.
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
"""What a step's time is made of; of communication, the exposed part."""


@dataclass(frozen=True)
class Cluster:
    """Where the ranks of a layout are.

    Rank order is Megatron's: tensor, context, data, pipeline, the first the closest.

    Attributes:
        device: every rank's.
        world_size: ranks.
        parallel: the layout.
        node_size: GPUs joined by NVLink.
    """

    device: Device
    world_size: int
    parallel: ParallelConfig
    node_size: int = 8

    def group(self, name: str) -> tuple[int, int]:
        """Return the size of a group of ranks, and how far its neighbours are apart."""
        layout = self.parallel
        tp, cp, pp = (
            layout.tensor_model_parallel_size,
            layout.context_parallel_size,
            layout.pipeline_model_parallel_size,
        )
        ep = layout.expert_model_parallel_size
        stage = self.world_size // pp
        return {
            "tp": (tp, 1),
            "cp": (cp, tp),
            "tp_cp": (tp * cp, 1),
            "dp": (stage // (tp * cp), tp * cp),
            "dp_cp": (stage // tp, tp),
            "ep": (ep, 1),
            "tp_ep": (ep, 1),
            "expt_dp": (stage // ep, ep),
            "pp": (pp, stage),
        }.get(name, (self.world_size, 1))

    def bandwidth(self, name: str) -> float:
        """Return the bytes per second that a rank sends in a group: NVLink's, or its share of the node's NICs.

        A ring over nodes enters and leaves each node once; the ranks of the group in a node share their NICs for it.
        """
        size, stride = self.group(name)
        inside = max(1, min(size, self.node_size // stride))
        if size <= inside and size * stride <= max(stride, self.node_size):
            return self.device.nvlink
        return min(self.device.nvlink, self.device.nic * inside)

    def seconds(self, name: str, nbytes: float, calls: float) -> float:
        """Return the time of collectives, by what a rank sends."""
        size = self.group(name)[0]
        return nbytes / self.bandwidth(name) + calls * LATENCY_S * max(1.0, math.log2(max(1, size)))


def _kind(collective: str, group: str) -> int:
    """Return the kind of seconds that a collective inside a micro-batch takes."""
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
    """Return the seconds that a trace takes by kind, each as if nothing else ran.

    Args:
        once: it is what a step does once: its collectives are those of gradients and weights. Only gradients that
            tensor-parallel ranks have shares of stay in their group.
    """
    device, work = cluster.device, trace.work
    found = np.zeros(len(KINDS))
    found[K_MATMUL] = work[MATMUL] / device.matmul_flops
    found[K_ATTENTION] = (work[ATTENTION] + work[BACKWARD] / ATTENTION_BACKWARD) / device.attention_flops
    found[K_MEMORY] = (trace.moved_bytes + work[NARROW]) / device.memory_bandwidth
    found[K_HOST] = work[OPS] * LAUNCH_S
    for (collective, group), sent in trace.sent_bytes.items():
        kind = _kind(collective, "dp" if once and group != "tp" else group)
        found[kind] += cluster.seconds(group, sent, trace.calls[collective, group])
    return found


Cost = npt.NDArray[np.float64]
"""Seconds of one rank: rows `ROWS`, columns `KINDS`. Costs of layers and of micro-batches add up."""
MICRO_BATCH, FORWARD, ONCE, UPDATE = range(4)
"""Rows of a cost: a micro-batch, its forward pass; what a step does once: beside its micro-batches, and after them."""


def cost_of(trace: StepTrace, micro_batches: int, cluster: Cluster) -> Cost:
    """Return the cost of a traced rank.

    Args:
        trace: of a step of `micro_batches`.
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
    hidden = seconds[K_ATTENTION] * (cp - 1) / cp  # the first block of keys and values is the rank's own
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
    """Return for how many micro-batches each rank of a pipeline of equal stages waits.

    Source: Narayanan et al. 2021, arXiv:2104.04473, section 2.2.
    """
    chunks = parallel.virtual_pipeline_model_parallel_size or 1
    return (parallel.pipeline_model_parallel_size - 1) / chunks


def step_time(cost: Cost, micro_batches: int, cluster: Cluster, waits: Optional[float] = None) -> StepTime:
    """Return the time of a step of one rank with this cost.

    Args:
        cost: of the slowest stage.
        waits: seconds that it waits for others, from replaying the pipeline; None for `bubble_passes`.
    """
    layout = cluster.parallel
    each = pass_parts(cost[MICRO_BATCH], cluster)
    forward = min(sum(pass_parts(cost[FORWARD], cluster).values()), sum(each.values()))
    backward = sum(each.values()) - forward
    parts = {name: micro_batches * each.get(name, 0.0) for name in PARTS}
    bubble = bubble_passes(layout) * (forward + backward)
    parts["pipeline bubble"] = bubble if waits is None else waits
    reduce, gather = cost[ONCE, K_REDUCE], cost[ONCE, K_GATHER]
    parts["data parallel"] += max(0.0, reduce - backward) if layout.overlap_grad_reduce else reduce
    parts["data parallel"] += max(0.0, gather - forward) if layout.overlap_param_gather else gather
    parts["tensor parallel"] += cost[ONCE, K_TENSOR]
    parts["optimizer"] = cost[ONCE, K_MEMORY] + max(cost[UPDATE, K_MEMORY], cost[UPDATE, K_HOST]) + _sent(cost[UPDATE])
    parts["other"] = (FIXED_FACTOR - 1) * sum(parts.values())
    return StepTime({name: float(seconds) for name, seconds in parts.items()}, (float(forward), float(backward)))


def _sent(seconds: Seconds) -> float:
    return float(seconds[K_GATHER] + seconds[K_REDUCE])
