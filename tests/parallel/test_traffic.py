"""Bytes that ranks send under tensor, pipeline and context parallelism equal the formulas."""

import pytest

from benchmarks.parallel_training import run_world

TP2SP = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
STEPS = {
    "tp4_sp": {"tensor_model_parallel_size": 4, "sequence_parallel": True},
    "pp4": {"pipeline_model_parallel_size": 4},
    "pp2_tp2_sp": {"pipeline_model_parallel_size": 2, **TP2SP},
}
"""Layouts of one step of four micro-batches of 40 tokens, by the tiny model of 4 layers."""
TOKENS, SAMPLES, HIDDEN, LAYERS, MICRO_BATCHES, OUT_CHANNELS, FP32_BYTES = 40, 2, 32, 4, 4, 16, 4
COMMS = ("p2p", "all_gather", "a2a", "a2a+p2p")
CONTEXT_LAYERS = 2
TOPOLOGIES = {"cp4": {"context_parallel_size": 4}, "cp2_tp2_sp": {"context_parallel_size": 2, **TP2SP}}
PACKS = {
    "clip": ((8, 2, 4),),  # the number of ranks divides frames and columns
    "odd_frames": ((6, 2, 4),),  # the split cuts frames
    "mixed": ((5, 2, 3), (1, 4, 4), (3, 3, 3), (1, 2, 2)),
}
SPLITS = {"clip": "contiguous", "odd_frames": "load_balanced", "mixed": "contiguous"}
STDIT = [
    (kind, comm, split, pack)
    for kind in ("spatial", "temporal")
    for pack, split in SPLITS.items()
    for comm in ("hybrid", "context")
]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Bytes sent by case, all measured in one world of four ranks."""
    cases = {name: {"task": "tests.parallel.traffic:of_a_step", "parallel": p} for name, p in STEPS.items()}
    two_level = {"context_parallel_size": 4, "context_comm": COMMS[-1], "context_a2a_size": 2}
    cases["context"] = {"task": "tests.parallel.context_worker:traffic", "parallel": two_level, "comms": COMMS}
    stdit = {"task": "tests.parallel.stdit_worker:traffic", "keys": STDIT, "packs": PACKS}
    cases |= {name: {**stdit, "parallel": parallel} for name, parallel in TOPOLOGIES.items()}
    return dict(zip(cases, run_world(4, list(cases.values()), tmp_path_factory.mktemp("traffic"))))


def tensor_parallel_bytes(tp: int, layers: int, *, head: bool) -> dict[str, float]:
    """Return the bytes that a rank sends in one step.

    Per sub-layer: a gather and a scatter in each direction, and a gather to recompute an input. Per layer: a gather of
    six modulations of each sample, and a scatter of their gradients.
    """
    share = MICRO_BATCHES * FP32_BYTES * (tp - 1) / tp
    unit, modulations = share * TOKENS, layers * share * SAMPLES * 6 * HIDDEN
    gathers, scatters = 3 * 2 * layers * unit * HIDDEN, 2 * 2 * layers * unit * HIDDEN
    return {
        "tp all_gather_into_tensor": gathers + modulations + head * unit * OUT_CHANNELS,
        "tp reduce_scatter_tensor": scatters + modulations,
    }


def test_tensor_parallel_ranks_send_ten_collectives_per_layer(results):
    """TP + SP: each of the 10 collectives sends T h (t - 1) / t numbers; the prediction is gathered once."""
    expected = {**tensor_parallel_bytes(4, LAYERS, head=True), "pp p2p": 0}
    assert results["tp4_sp"] == [expected] * 4


def test_stages_send_activations_forward_and_gradients_backward(results):
    """T h numbers per stage boundary, direction and micro-batch, divided among the tensor-parallel ranks."""
    boundary = MICRO_BATCHES * TOKENS * HIDDEN * FP32_BYTES
    assert [sent["pp p2p"] for sent in results["pp4"]] == [boundary, 2 * boundary, 2 * boundary, boundary]
    for rank, sent in enumerate(results["pp2_tp2_sp"]):
        last = rank >= 2
        assert sent == {**tensor_parallel_bytes(2, LAYERS // 2, head=last), "pp p2p": boundary / 2}


def sent_in_context(tokens: int, comm: str) -> tuple[dict[str, float], dict[str, float]]:
    """Return the bytes sent per rank in a forward and a backward pass on four ranks."""
    unit = CONTEXT_LAYERS * tokens / 4 * HIDDEN * FP32_BYTES
    keys_and_values, exchange = 2 * unit * 3, 4 * unit * 3 / 4
    if comm == "p2p":
        return {"p2p": keys_and_values}, {"p2p": 2 * keys_and_values}
    if comm == "all_gather":
        gather = {"all_gather_into_tensor": keys_and_values}
        return gather, {**gather, "reduce_scatter_tensor": keys_and_values}
    if comm == "a2a":
        return ({"all_to_all_single": exchange},) * 2
    inside, across = {"all_to_all_single": 4 * unit / 2}, 2 * unit
    return {**inside, "p2p": across}, {**inside, "p2p": 2 * across}


@pytest.mark.parametrize("comm", COMMS)
def test_context_parallel_bytes_equal_the_formulas(results, comm):
    """Ring and all-gather: 2 (T/c) h (c-1) forward and twice that backward; all-to-all: 4 (T/c) h (c-1)/c each way."""
    assert results["context"][comm] == sent_in_context(results["context"]["tokens"], comm)


@pytest.mark.parametrize("kind", ["spatial", "temporal"])
@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_bytes_of_stdit_equal_the_formulas(results, topology, kind):
    """Hybrid: 2 (T/c) D (c-1)/c per rank and direction, 0 for complete frames; ring: c times that, twice in backward.

    With TP + SP both are divided by the tensor-parallel size.
    """
    ranks = 4 if topology == "cp4" else 2
    unit = 64 / 4 * HIDDEN * FP32_BYTES  # each of the four ranks has a quarter of the tokens
    ring, hybrid = 2 * unit * (ranks - 1), 2 * unit * (ranks - 1) / ranks
    found = results[topology]
    for direction, twice in ((0, 1), (1, 2)):
        most, total = found[kind, "context", "contiguous", "clip"][direction]
        assert (most, total) == (ring * twice, 4 * ring * twice)
        most, total = found[kind, "hybrid", "contiguous", "clip"][direction]
        expected = 0 if kind == "spatial" else hybrid
        assert (most, total) == (expected, 4 * expected)


@pytest.mark.parametrize("pack", PACKS)
@pytest.mark.parametrize("kind", ["spatial", "temporal"])
@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_hybrid_sends_a_share_of_the_ring(results, topology, kind, pack):
    """At most 1 / c of the ring's bytes, also if the split cuts frames and columns; `-s` prints the bytes."""
    ranks = 4 if topology == "cp4" else 2
    for direction, way in enumerate(("forward", "backward")):
        hybrid, ring = (results[topology][kind, comm, SPLITS[pack], pack][direction] for comm in ("hybrid", "context"))
        print(f"{topology} {kind} {pack} {way}: hybrid {hybrid}, ring {ring} (most of a rank, sum)")
        assert hybrid[1] * ranks <= ring[1]
