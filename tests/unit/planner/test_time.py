"""The model of time against numbers calculated by hand."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from dit.parallel.dims import ParallelConfig
from dit.planner.devices import ATTENTION_BACKWARD, DEVICES, H100, K_FILL, LATENCY_S, with_fp8
from dit.planner.time import (
    FORWARD,
    MICRO_BATCH,
    ONCE,
    PARTS,
    Cluster,
    Kind,
    cost_of,
    pass_parts,
    product_seconds,
    seconds_of,
    slowest_of,
    step_time,
)
from dit.tracing import counter
from dit.tracing.counter import Product, StepTrace

LAYOUT = ParallelConfig(tensor_model_parallel_size=2, context_parallel_size=2, pipeline_model_parallel_size=2)
CLUSTER = Cluster(H100, 64, LAYOUT)
LARGE = Product(1, 256 * 132, 128 * 10, 4096, 1)
"""Ten full waves of tiles of 256 x 128."""
LARGE_S = 2 * 256 * 132 * 128 * 10 * (4096 + K_FILL) / H100.matmul_flops


def work(**counts):
    """Return a trace with 1e12 operations of attention and a number of large products."""
    names = {"attention": counter.ATTENTION, "backward": counter.ATTENTION_BACKWARD}
    products = {LARGE: counts.pop("products")} if "products" in counts else {}
    return StepTrace(products=products, work=Counter({names[name]: int(1e12 * n) for name, n in counts.items()}))


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
    for node_size, expected in ((64, H100.nvlink), (1, H100.nic)):
        assert replace(CLUSTER, device=replace(H100, node_size=node_size)).bandwidth(group) == expected


def test_nvlink_joins_the_ranks_of_a_rack_of_gb200():
    assert Cluster(DEVICES["gb200"], 72, ParallelConfig()).bandwidth("dp_cp") == DEVICES["gb200"].nvlink
    assert Cluster(DEVICES["b200"], 72, ParallelConfig()).bandwidth("dp_cp") < DEVICES["b200"].nvlink


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


def test_two_levels_of_context_parallelism_are_an_exchange_of_heads_and_a_ring():
    """Four ranks exchange heads inside a node; attention hides only the ring over the two nodes."""
    layout = ParallelConfig(
        tensor_model_parallel_size=2, context_parallel_size=8, context_comm="a2a+p2p", context_a2a_size=4
    )
    cluster = Cluster(H100, 16, layout)
    assert cluster.group("cp_heads") == (4, 2)
    assert cluster.group("cp_ring") == (2, 8)
    assert (cluster.bandwidth("cp_heads"), cluster.bandwidth("cp_ring")) == (H100.nvlink, H100.nic)
    kinds = ("all_to_all", "cp_heads"), ("send", "cp_ring")
    trace = replace(work(attention=535), sent_bytes=Counter(dict.fromkeys(kinds, int(45e9))), calls=Counter())
    found = seconds_of(trace, cluster)
    assert found[Kind.CONTEXT] == pytest.approx(45e9 / H100.nvlink)
    assert found[Kind.RING] == pytest.approx(1)
    assert found[[Kind.EXPERT, Kind.REDUCE]].sum() == 0
    hidden = found[Kind.ATTENTION] / 2
    assert pass_parts(found, cluster)["context parallel"] == pytest.approx(found[Kind.CONTEXT] + 1 - hidden)


def test_times_are_counts_divided_by_rates():
    trace = replace(
        work(products=3, attention=535, backward=535),
        moved_bytes=int(2.9e12),
        sent_bytes=Counter({("all_gather", "tp"): int(340e9), ("send", "cp"): int(34e9)}),
        calls=Counter({("all_gather", "tp"): 1000, ("send", "cp"): 0}),
    )
    trace.work[counter.OPS] = 5
    found = seconds_of(trace, CLUSTER)
    assert found[Kind.MATMUL] == pytest.approx(3 * LARGE_S)
    assert found[Kind.ATTENTION] == pytest.approx((1 + 1 / ATTENTION_BACKWARD) * 535e12 / H100.attention_flops)
    assert found[Kind.MEMORY] == pytest.approx(1)
    assert found[Kind.OPERATIONS] == pytest.approx(5 * H100.fitted.operation_seconds)
    assert found[Kind.TENSOR] == pytest.approx(340e9 / H100.nvlink + 1000 * LATENCY_S)
    assert found[Kind.RING] == pytest.approx(34e9 / H100.nvlink)


@pytest.mark.parametrize(
    ("product", "waves", "k"),
    [
        (LARGE, 10, 4096),
        (Product(1, 256 * 132, 128 * 10 + 1, 4096, 1), 11, 4096),  # an additional column needs an additional wave
        (Product(1, 256 * 66, 128, 65_536, 1), 1, 32_768),  # half of the multiprocessors are idle, or k is split
        (Product(3, 256 * 44, 128, 4096, 1), 1, 4096),
    ],
)
def test_the_time_of_a_product_is_rounded_up_to_full_waves_of_tiles(product, waves, k):
    seconds = product_seconds(product, H100)
    expected = 2 * waves * 132 * 256 * 128 * (k + K_FILL) / H100.matmul_flops
    partial = 8 * product.m * product.n / H100.memory_bandwidth if k < product.k else 0
    assert seconds == pytest.approx(expected + partial)


def test_the_time_of_a_narrow_product_is_that_of_its_bytes():
    """The modulation of 8 samples reads its weights and computes little."""
    nbytes = 2 * (8 * 4096 + 4096 * 24_576 + 8 * 24_576)
    assert product_seconds(Product(1, 8, 24_576, 4096, nbytes), H100) == nbytes / H100.memory_bandwidth


def test_mxfp8_speeds_up_wide_products_and_quantises_their_factors():
    m = n = k = 8192
    wide = Product(1, m, n, k, 2 * (m * k + k * n + m * n))
    narrow = Product(1, 8, n, k, 2 * (8 * k + k * n + 8 * n))
    quantised = with_fp8(H100, "mxfp8")
    assert product_seconds(wide, quantised) == pytest.approx(product_seconds(wide, H100) / H100.fitted.fp8_speedup)
    assert product_seconds(narrow, quantised) == product_seconds(narrow, H100)
    trace = StepTrace(products={wide: 2, narrow: 5})
    memory = [seconds_of(trace, replace(CLUSTER, device=device))[Kind.MEMORY] for device in (H100, quantised)]
    assert memory == pytest.approx([0, 2 * 2 * (m * k + k * n) / H100.memory_bandwidth])


@pytest.mark.parametrize(("ring", "exposed"), [(0.4, 0.0), (0.5, 0.0), (0.8, 0.3)])
def test_ring_exchanges_overlap_attention_to_other_keys(ring, exposed):
    """With two ranks, the second block of keys is sent during attention to the first, half of the attention."""
    seconds = np.zeros(len(Kind))
    seconds[Kind.ATTENTION], seconds[Kind.RING] = 1.0, ring
    assert pass_parts(seconds, CLUSTER)["context parallel"] == pytest.approx(exposed)


@pytest.mark.parametrize(
    ("exchanged", "expected"), [(2.0, 2.0 * H100.fitted.interference), (4.0, 1.0 + 3.0 * H100.fitted.interference)]
)
def test_an_exchange_slows_down_overlapped_computation(exchanged, expected):
    seconds = np.zeros(len(Kind))
    seconds[[Kind.MATMUL, Kind.GATHER]] = 3.0, exchanged
    assert pass_parts(seconds, CLUSTER)["data parallel"] == pytest.approx(expected)


@pytest.mark.parametrize(
    ("ranks", "sent", "expected"), [(2, 1.0, 0.0), (2, 4.0, 4.0 - 3.0 / 2), (4, 4.0, 4.0 - 9.0 / 4)]
)
def test_products_hide_overlapped_tensor_parallel_communication(ranks, sent, expected):
    """All products of three seconds, except those of the local tokens."""
    seconds = np.zeros(len(Kind))
    seconds[[Kind.MATMUL, Kind.TENSOR]] = 3.0, sent
    layout = ParallelConfig(tensor_model_parallel_size=ranks, sequence_parallel=True)
    assert pass_parts(seconds, Cluster(H100, 8, layout))["tensor parallel"] == sent
    overlapped = Cluster(H100, 8, layout, overlaps_tensor=True)
    assert pass_parts(seconds, overlapped)["tensor parallel"] == pytest.approx(expected)


def cost(reduce=0.0, gather=0.0):
    """Return a cost of one second forward and two seconds backward."""
    found = np.zeros((4, len(Kind)))
    found[MICRO_BATCH, Kind.MATMUL], found[FORWARD, Kind.MATMUL] = 3.0, 1.0
    found[ONCE, Kind.REDUCE], found[ONCE, Kind.GATHER] = reduce, gather
    return found


@pytest.mark.parametrize(
    ("overlap", "expected"),
    [
        ((False, False), 5.0 + 4.0),
        ((True, False), 3.0 + 2.0 * H100.fitted.interference + 4.0),
        ((True, True), 3.0 + 2.0 * H100.fitted.interference + 3.0 + 1.0 * H100.fitted.interference),
    ],
)
def test_gradients_overlap_one_backward_pass_and_weights_one_forward_pass(overlap, expected):
    layout = ParallelConfig(overlap_grad_reduce=overlap[0], overlap_param_gather=overlap[1])
    time = step_time(cost(reduce=5.0, gather=4.0), 7, Cluster(H100, 8, layout))
    assert time.parts["data parallel"] == pytest.approx(expected)
    assert time.total == pytest.approx((7 * 3.0 + expected) * (1 + slowest_of(8, H100.fitted.jitter)))
    assert tuple(time.parts) == PARTS


@pytest.mark.parametrize("ranks", [1, 2, 16, 1024])
def test_the_time_of_the_slowest_rank_is_the_expected_maximum_of_normal_values(ranks):
    """Means of 4,000 drawn maxima; their standard error is at most 0.016 standard deviations."""
    drawn = np.random.default_rng(0).standard_normal((4000, ranks)).max(1).mean()
    assert slowest_of(ranks, 0.5) == pytest.approx(0.5 * drawn, abs=0.025)


@pytest.mark.parametrize(("chunks", "bubble"), [(None, 9.0), (3, 3.0)])
def test_a_pipeline_of_equal_stages_has_its_bubble(chunks, bubble):
    layout = ParallelConfig(pipeline_model_parallel_size=4, virtual_pipeline_model_parallel_size=chunks)
    time = step_time(cost(), 8, Cluster(H100, 8, layout))
    assert time.parts["pipeline bubble"] == pytest.approx(bubble)
    assert time.parts["matmul"] == pytest.approx(24.0)


def test_the_time_of_a_step_is_its_micro_batches_and_its_fixed_part():
    """If too few micro-batches were traced to separate the two, the sum is still the same."""
    micro, update = work(products=3), replace(work(), moved_bytes=10**12)
    once = Counter({("reduce_scatter", "dp_cp"): 10**11})
    step = replace(work(products=12), moved_bytes=10**12, sent_bytes=once, calls=Counter({next(iter(once)): 2}))
    with_parts = replace(step, parts={"micro-batch": micro, "forward": work(products=1), "update": update})
    without = replace(step, parts={"forward": work(products=1), "update": update})
    found = [cost_of(trace, 4, CLUSTER) for trace in (with_parts, without)]
    assert found[0] == pytest.approx(found[1])
    assert found[0][MICRO_BATCH, Kind.MATMUL] == pytest.approx(3 * LARGE_S)
    assert found[0][ONCE, Kind.REDUCE] > 0 == found[0][ONCE, Kind.MATMUL]
