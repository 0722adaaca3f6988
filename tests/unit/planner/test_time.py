"""The model of time against numbers worked out by hand."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from dit.parallel.dims import ParallelConfig
from dit.planner.devices import (
    ATTENTION_BACKWARD,
    DEVICES,
    FIXED_FACTOR,
    H100,
    LATENCY_S,
    LAUNCH_S,
)
from dit.planner.time import (
    FORWARD,
    K_GATHER,
    K_MATMUL,
    K_REDUCE,
    KINDS,
    MICRO_BATCH,
    ONCE,
    PARTS,
    Cluster,
    cost_of,
    pass_parts,
    seconds_of,
    step_time,
)
from dit.tracing import counter
from dit.tracing.counter import StepTrace

LAYOUT = ParallelConfig(tensor_model_parallel_size=2, context_parallel_size=2, pipeline_model_parallel_size=2)
CLUSTER = Cluster(H100, 64, LAYOUT)


def work(**counts):
    """Return a trace of 1e12 operations or bytes of some kinds."""
    names = {"matmul": counter.MATMUL, "attention": counter.ATTENTION, "backward": counter.ATTENTION_BACKWARD}
    return StepTrace(work=Counter({names[name]: int(1e12 * n) for name, n in counts.items()}))


def test_rates_are_below_what_the_devices_can():
    """No fitted constant may say that a device is faster than its data sheet."""
    for device in DEVICES.values():
        assert 0.3 < device.matmul_flops / device.peak_flops < 0.85
        assert 0.3 < device.attention_flops / device.peak_flops < 0.7
    assert 2.0e12 < H100.memory_bandwidth < 3.35e12
    assert DEVICES["h200"].memory_bandwidth < 4.8e12
    assert DEVICES["b200"].memory_bandwidth < 8e12
    assert H100.nvlink < 450e9
    assert H100.nic < 50e9


@pytest.mark.parametrize(
    ("group", "bandwidth"),
    [
        ("tp", H100.nvlink),  # ranks 0 and 1
        ("cp", H100.nvlink),  # ranks 0 and 2
        ("tp_cp", H100.nvlink),  # ranks 0 to 3
        ("dp", 2 * H100.nic),  # ranks 0, 4, ... 28: two of them share a node's NICs
        ("dp_cp", 4 * H100.nic),  # ranks 0, 2, ... 30: four
        ("pp", H100.nic),  # ranks 0 and 32
        ("world", H100.nvlink),  # eight NICs are more than NVLink
    ],
)
def test_a_group_is_as_fast_as_its_slowest_link(group, bandwidth):
    assert CLUSTER.bandwidth(group) == bandwidth
    assert replace(CLUSTER, node_size=64).bandwidth(group) == H100.nvlink
    assert replace(CLUSTER, node_size=1).bandwidth(group) == H100.nic


@pytest.mark.parametrize(
    ("group", "size", "bandwidth"),
    [
        ("dp_cp", 16, 4 * H100.nic),
        ("intra_dp_cp", 4, H100.nvlink),  # ranks 0, 2, 4 and 6
        ("inter_dist_opt", 4, H100.nic),  # ranks 0, 8, 16 and 24
    ],
)
def test_an_instance_uses_nvlink_and_the_sum_over_instances_the_network(group, size, bandwidth):
    layout = ParallelConfig(tensor_model_parallel_size=2, data_parallel="fsdp", num_distributed_optimizer_instances=4)
    cluster = Cluster(H100, 32, layout)
    assert cluster.group(group)[0] == size
    assert cluster.bandwidth(group) == bandwidth
    assert cluster.seconds(group, 1e9, 3) == pytest.approx(1e9 / bandwidth + 3 * LATENCY_S * np.log2(size))


def test_seconds_are_counts_over_rates():
    trace = replace(
        work(matmul=707, attention=535, backward=535),
        moved_bytes=int(2.9e12),
        sent_bytes=Counter({("all_gather", "tp"): int(340e9), ("send", "cp"): int(34e9)}),
        calls=Counter({("all_gather", "tp"): 1000, ("send", "cp"): 0}),
    )
    trace.work[counter.NARROW], trace.work[counter.OPS] = int(2.9e12), 5
    found = dict(zip(KINDS, seconds_of(trace, CLUSTER)))
    assert found["matmul"] == pytest.approx(1)
    assert found["attention"] == pytest.approx(1 + 1 / ATTENTION_BACKWARD)
    assert found["memory"] == pytest.approx(2)
    assert found["tensor"] == pytest.approx(1 + 1000 * LATENCY_S)
    assert found["ring"] == pytest.approx(0.1)
    assert found["host"] == pytest.approx(5 * LAUNCH_S)


@pytest.mark.parametrize(("ring", "exposed"), [(0.4, 0.0), (0.5, 0.0), (0.8, 0.3)])
def test_a_ring_hides_behind_the_attention_of_other_ranks_keys(ring, exposed):
    """Of two ranks' blocks of keys, the second is sent while the first is attended to: half of the attention."""
    seconds = np.zeros(len(KINDS))
    seconds[KINDS.index("attention")], seconds[KINDS.index("ring")] = 1.0, ring
    assert pass_parts(seconds, CLUSTER)["context parallel"] == pytest.approx(exposed)


def test_a_host_that_is_slower_than_the_device_sets_the_pace():
    seconds = np.zeros(len(KINDS))
    seconds[[K_MATMUL, KINDS.index("host")]] = 1.0, 3.0
    assert sum(pass_parts(seconds, CLUSTER).values()) == pytest.approx(3.0)


def cost(reduce=0.0, gather=0.0):
    """Return a cost of a second forward and two backward."""
    found = np.zeros((4, len(KINDS)))
    found[MICRO_BATCH, K_MATMUL], found[FORWARD, K_MATMUL] = 3.0, 1.0
    found[ONCE, K_REDUCE], found[ONCE, K_GATHER] = reduce, gather
    return found


@pytest.mark.parametrize(
    ("overlap", "expected"),
    [((False, False), 5.0 + 4.0), ((True, False), 3.0 + 4.0), ((True, True), 3.0 + 3.0)],
)
def test_gradients_hide_behind_one_backward_pass_and_weights_behind_one_forward_pass(overlap, expected):
    layout = ParallelConfig(overlap_grad_reduce=overlap[0], overlap_param_gather=overlap[1])
    time = step_time(cost(reduce=5.0, gather=4.0), 7, Cluster(H100, 8, layout))
    assert time.parts["data parallel"] == pytest.approx(expected)
    assert time.total == pytest.approx((7 * 3.0 + expected) * FIXED_FACTOR)
    assert tuple(time.parts) == PARTS


@pytest.mark.parametrize(("chunks", "bubble"), [(None, 9.0), (3, 3.0)])
def test_a_pipeline_of_equal_stages_waits_for_the_others(chunks, bubble):
    layout = ParallelConfig(pipeline_model_parallel_size=4, virtual_pipeline_model_parallel_size=chunks)
    time = step_time(cost(), 8, Cluster(H100, 8, layout))
    assert time.parts["pipeline bubble"] == pytest.approx(bubble)
    assert time.parts["matmul"] == pytest.approx(24.0)


def test_a_step_is_its_micro_batches_and_what_it_does_once():
    """Also where too few micro-batches were traced to tell them apart: then the sum is the same."""
    micro, update = work(matmul=3), replace(work(), moved_bytes=10**12)
    once = Counter({("reduce_scatter", "dp_cp"): 10**11})
    step = replace(work(matmul=12), moved_bytes=10**12, sent_bytes=once, calls=Counter({next(iter(once)): 2}))
    with_parts = replace(step, parts={"micro-batch": micro, "forward": work(matmul=1), "update": update})
    without = replace(step, parts={"forward": work(matmul=1), "update": update})
    found = [cost_of(trace, 4, CLUSTER) for trace in (with_parts, without)]
    assert found[0] == pytest.approx(found[1])
    assert found[0][MICRO_BATCH, K_MATMUL] == pytest.approx(3e12 / H100.matmul_flops)
    assert found[0][ONCE, K_REDUCE] > 0 == found[0][ONCE, K_MATMUL]
