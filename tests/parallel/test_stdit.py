"""ST-DiT computes the numbers of one rank under every layout, and the bytes sent match the formulas.

Packs are ragged, with images and clips: the context-parallel split cuts frames and columns, ranks have unequal shares,
and some have no frame. `tests/laws` has data and pipeline parallelism.
"""

from pathlib import Path

import pytest

from benchmarks.parallel_world import run_world
from tests.support.ranks import selected
from tests.support.reference import assert_equal_training

pytestmark = pytest.mark.slow

MODELS = {
    "alternating": {"backbone": "stdit", "num_classes": 5, "position_span": 4.0},
    "all_in_one": {
        **{"backbone": "stdit", "layer_pattern": ["spatial+full+temporal"], "position_embedding": "rope_3d"},
        **{"num_query_groups": 2, "size_conditioning": True},
    },
}
BALANCED = {"context_split": "load_balanced"}
SEGMENTS_CUT = {"spatial_temporal_comm": "context"}
TP2 = {"tensor_model_parallel_size": 2}
TP2SP = {**TP2, "sequence_parallel": True}
CP2, CP4 = ({"context_parallel_size": size} for size in (2, 4))
LAYOUTS = {
    2: {
        "tp2": TP2,
        "tp2_sp": TP2SP,
        "cp2_hybrid": CP2,
        "cp2_hybrid_balanced": {**CP2, **BALANCED},
        "cp2_ring": {**CP2, **SEGMENTS_CUT},
        "cp2_all_gather_balanced": {**CP2, **SEGMENTS_CUT, **BALANCED, "context_comm": "all_gather"},
        "cp2_a2a": {**CP2, **SEGMENTS_CUT, "context_comm": "a2a"},
    },
    4: {
        "cp4_hybrid_balanced": {**CP4, **BALANCED},
        "cp4_ring": {**CP4, **SEGMENTS_CUT},
        "cp4_two_level": {**CP4, **SEGMENTS_CUT, "context_comm": "a2a+p2p", "context_a2a_size": 2},
        "cp2_tp2_sp_hybrid": {**CP2, **TP2SP},
        "cp2_tp2_sp_hybrid_balanced": {**CP2, **TP2SP, **BALANCED},
        "cp2_tp2_sp_ring": {**CP2, **TP2SP, **SEGMENTS_CUT},
        "cp2_pp2_hybrid": {**CP2, "pipeline_model_parallel_size": 2},
        "cp2_dp2_hybrid": CP2,
    },
}
# Layouts of the second model, which exchanges rotary positions, has grouped queries and mixes kinds of attention.
BOTH = {"tp2_sp", "cp2_ring", "cp2_tp2_sp_hybrid"}
CASES = [
    (world, model, layout)
    for world, layouts in LAYOUTS.items()
    for layout in layouts
    for model in MODELS
    if model == "alternating" or layout in BOTH
]

# Full recompute repeats the exchanges; selective recompute saves their results.
RECOMPUTED = {(2, "all_in_one", f"cp2_hybrid_{choice}"): {"recompute": choice} for choice in ("selective", "full")}
# The last two of a step's four packs have two samples of one token: all context-parallel ranks except the first have
# only padding and no frame.
PADDING_LAYOUTS = {
    2: {
        "cp2_ddp_overlap": {**CP2, "data_parallel": "ddp", "overlap_grad_reduce": True},
        "cp2_ring_overlap": {**CP2, **SEGMENTS_CUT, "overlap_grad_reduce": True, "overlap_param_gather": True},
        "cp2_fsdp": {**CP2, "data_parallel": "fsdp"},
    },
    4: {
        "cp2_dp2_fsdp": {**CP2, "data_parallel": "fsdp"},
        "cp4_balanced_overlap": {**CP4, **BALANCED, "overlap_grad_reduce": True, "overlap_param_gather": True},
    },
}
PADDING_CASES = [(world, "alternating", layout) for world, layouts in PADDING_LAYOUTS.items() for layout in layouts]
PADDING_ROW = ("world", "model", "padding_layout")
ROW = ("world", "model", "layout")

HIDDEN, FP32_BYTES = 32, 4
PACKS = {
    "clip": ((8, 2, 4),),  # the number of ranks divides frames and columns
    "odd_frames": ((6, 2, 4),),  # the split cuts frames
    "mixed": ((5, 2, 3), (1, 4, 4), (3, 3, 3), (1, 2, 2)),
}
TRAFFIC = [
    (kind, comm, split, pack)
    for kind in ("spatial", "temporal")
    for split in ("contiguous", "load_balanced")
    for pack in PACKS
    for comm in ("hybrid", "context")
]
TOPOLOGIES = {"cp4": CP4, "cp2_tp2_sp": {**CP2, **TP2SP}}


@pytest.fixture(scope="module")
def results(request, tmp_path_factory):
    """Numbers of each selected case and of one rank; each world size starts once."""
    folder, found, wanted = tmp_path_factory.mktemp("stdit"), {}, selected(request, ROW)
    padding = [case for case in PADDING_CASES if case in selected(request, PADDING_ROW)]
    one = {
        (model, packs): {**_packed(model, {"data_parallel": "ddp"}), "one_token_packs": packs}
        for model, packs in (("alternating", 0), ("all_in_one", 0), ("alternating", 2))
    }
    found |= zip(one, run_world(1, list(one.values()), folder / "1"))
    for world in LAYOUTS:
        keys = [case for case in CASES if case[0] == world and case in wanted]
        cases = [_packed(model, LAYOUTS[world][name]) for _, model, name in keys]
        if world == 2:
            again = [case for case in RECOMPUTED if case in wanted]
            keys += again
            cases += [{**_packed(case[1], CP2), "recompute": RECOMPUTED[case]} for case in again]
        for case in (case for case in padding if case[0] == world):
            keys.append(case)
            cases.append({**_packed(case[1], PADDING_LAYOUTS[world][case[2]]), "one_token_packs": 2})
        if world == 4:
            keys += TOPOLOGIES
            cases += [_traffic(parallel) for parallel in TOPOLOGIES.values()]
        found |= zip(keys, run_world(world, cases, Path(folder / str(world)), timeout_s=300.0))
    return found


def _packed(model: str, parallel: dict) -> dict:
    return {"parallel": parallel, "model": MODELS[model], "packed": True}


def _traffic(parallel: dict) -> dict:
    return {"task": "tests.parallel.stdit_worker:traffic", "parallel": parallel, "keys": TRAFFIC, "packs": PACKS}


@pytest.mark.parametrize(ROW, [*CASES, *RECOMPUTED])
def test_layout_equals_one_rank(results, world, model, layout):
    """Compare losses, gradient norms, every parameter's gradient, and the parameters after the last step."""
    assert_equal_training(results[model, 0], results[world, model, layout])


@pytest.mark.parametrize(PADDING_ROW, PADDING_CASES)
def test_a_rank_with_nothing_but_padding_equals_one_rank(results, world, model, padding_layout):
    """Every parameter gets a zero gradient there, because overlapped reductions and FSDP wait for all gradients."""
    assert_equal_training(results[model, 2], results[world, model, padding_layout])


@pytest.mark.parametrize("kind", ["spatial", "temporal"])
@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_bytes_sent_equal_the_formulas(results, topology, kind):
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
    for split in ("contiguous", "load_balanced"):
        for direction, way in enumerate(("forward", "backward")):
            hybrid, ring = (results[topology][kind, comm, split, pack][direction] for comm in ("hybrid", "context"))
            print(f"{topology} {kind} {pack} {split} {way}: hybrid {hybrid}, ring {ring} (most of a rank, sum)")
            assert hybrid[1] * ranks <= ring[1]
