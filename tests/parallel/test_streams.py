"""Joint attention, text streams and norms over all heads compute the numbers of one rank under every layout.

In FLUX the text is split over tensor-parallel ranks like the image, but replicated over context-parallel ranks; in Wan
the mean square of queries and keys runs over the heads of all tensor-parallel ranks.
"""

import pytest

from benchmarks.parallel_world import run_world
from dit.verify.compare import SUM_RTOL, relative_errors
from tests.parallel.stream_cases import forget_text_tokens, normalise_local_heads
from tests.support.ranks import selected
from tests.support.reference import assert_equal_training

pytestmark = pytest.mark.slow

MODELS = {
    "flux": {
        **{"backbone": "flux", "num_joint_layers": 2, "num_single_layers": 2, "ffn_hidden_size": 48, "pooled_size": 6},
        **{"rope_axes": [2, 4, 2], "guidance": 3.5},
    },
    "chroma": {
        **{"backbone": "chroma", "num_joint_layers": 2, "num_single_layers": 2, "ffn_hidden_size": 48},
        **{"approximator": [8, 12, 2], "rope_axes": [2, 4, 2]},
    },
    "flux2": {
        **{"backbone": "flux2", "num_joint_layers": 2, "num_single_layers": 2, "ffn_hidden_size": 48},
        **{"rope_axes": [2, 2, 2, 2], "guidance": 3.5},
    },
    # One single block, so that all weights of the last joint block have a gradient.
    "qwen_image": {
        **{"backbone": "qwen_image", "num_joint_layers": 3, "num_single_layers": 1, "ffn_hidden_size": 48},
        "rope_axes": [2, 4, 2],
    },
    # Samples with and without glyph text and a picture; the second stage has no conditions.
    "hunyuan_video": {
        **{"backbone": "hunyuan_video", "num_joint_layers": 3, "num_single_layers": 1, "ffn_hidden_size": 48},
        **{"patch_spatial": 2, "rope_axes": [2, 4, 2], "glyph_size": 10, "glyph_hidden_size": 24},
        **{"image_context_size": 6, "image_to_video": True},
    },
    # A second attention of the image, and a last block without text output. The text queries of this block are unused,
    # so their norm would have no gradient; `tests/laws` tests the norms.
    "sd3": {
        **{"backbone": "sd3", "num_joint_layers": 4, "num_dual_layers": 2, "pooled_size": 6, "position_crop": [24, 8]},
        "qk_layernorm": False,
    },
    "lumina2": {
        **{"backbone": "lumina2", "num_joint_layers": 2, "num_single_layers": 2, "ffn_hidden_size": 48},
        **{"rope_axes": [2, 4, 2], "num_query_groups": 2},
    },
    # Every text and image has learned tokens, up to 32. With four layers, the second step has rounding above the bound.
    "z_image": {
        **{"backbone": "z_image", "num_joint_layers": 1, "num_single_layers": 1, "ffn_hidden_size": 48},
        "rope_axes": [2, 4, 2],
    },
    # The text has keys and values, but no queries.
    "prx": {"backbone": "prx", "num_layers": 4, "ffn_hidden_size": 48, "rope_axes": [0, 4, 4]},
    "sana": {
        **{"backbone": "sana", "num_layers": 4, "num_cross_attention_heads": 2, "ffn_hidden_size": 48},
        **{"patch_spatial": 2, "qk_layernorm": True},
    },
    "wan": {"backbone": "wan", "ffn_hidden_size": 48},
}


def cp(size: int, comm: str, split: str = "contiguous", **others) -> dict:
    return {"context_parallel_size": size, "context_comm": comm, "context_split": split, **others}


TP = {"tensor_model_parallel_size": 2}
SP = {**TP, "sequence_parallel": True}
# ranks: {layout: (settings, packed or not)}; `tests/laws` has the other layouts of two ranks, on packs.
BOTH, PACKED, DENSE = (True, False), (True,), (False,)
LAYOUTS = {
    2: {
        "tp2": (TP, PACKED),
        "cp2_ring": (cp(2, "p2p", "load_balanced"), DENSE),
        "cp2_all_gather": (cp(2, "all_gather"), PACKED),
        "cp2_a2a": (cp(2, "a2a", "load_balanced"), PACKED),
    },
    4: {
        "cp2_tp2_sp": (cp(2, "p2p", **SP), BOTH),
        "cp2_a2a_tp2_sp": (cp(2, "a2a", **SP), PACKED),
    },
}
# Four layers, so that stages begin and end before, at and after the change from two streams to one.
FLUX_AND_PRX = {
    "cp4_two_level": (cp(4, "a2a+p2p", context_a2a_size=2), PACKED),
    "pp4": ({"pipeline_model_parallel_size": 4}, PACKED),
    "pp2_tp2_sp": ({"pipeline_model_parallel_size": 2, "overlap_grad_reduce": True, **SP}, PACKED),
}
# Shared or approximated modulations on every stage, refiners, other positions, linear attention, convolution.
RELATIVES = {
    2: {"tp2": (TP, PACKED)},
    4: {
        "cp2_tp2_sp": (cp(2, "p2p", "load_balanced", **SP), PACKED),
        "pp2_tp2_sp": ({"pipeline_model_parallel_size": 2, "overlap_grad_reduce": True, **SP}, PACKED),
    },
}


def layouts_of(model: str, ranks: int) -> dict:
    if model in ("chroma", "flux2", "hunyuan_video", "qwen_image", "sana", "sd3", "lumina2", "z_image"):
        return RELATIVES[ranks]
    return {**LAYOUTS[ranks], **(FLUX_AND_PRX if model in ("flux", "prx") and ranks == 4 else {})}


CASES = {
    ranks: {
        (model, layout, packed): {"parallel": parallel, "model": MODELS[model], "packed": packed}
        for model in MODELS
        for layout, (parallel, packs) in layouts_of(model, ranks).items()
        for packed in packs
    }
    for ranks in LAYOUTS
}
ROW = ("model", "layout", "packed")
BROKEN = {
    ("wan", "tp2", "normalise_local_heads"): {"parallel": TP, "break": normalise_local_heads},
    ("flux", "tp2_sp", "forget_text_tokens"): {"parallel": SP, "break": forget_text_tokens},
}


@pytest.fixture(scope="module")
def results(request, tmp_path_factory):
    """Numbers of each selected case and of one rank; each world size starts once."""
    folder, found, wanted = tmp_path_factory.mktemp("streams"), {}, selected(request, ROW)
    cases = {
        (model, packed): {"parallel": {"data_parallel": "ddp"}, "model": MODELS[model], "packed": packed}
        for model in MODELS
        for packed in BOTH
    }
    found |= zip(cases, run_world(1, list(cases.values()), folder / "1"))
    broken = {key: {**case, "model": MODELS[key[0]], "packed": True} for key, case in BROKEN.items()}
    for ranks, cases in CASES.items():
        cases = {key: case for key, case in cases.items() if key in wanted} | (broken if ranks == 2 else {})
        found |= zip(cases, run_world(ranks, list(cases.values()), folder / str(ranks)))
    return found


@pytest.mark.parametrize(ROW, [case for cases in CASES.values() for case in cases])
def test_layout_equals_one_rank(results, model, layout, packed):
    """Compare losses, gradient norms, every parameter's gradient, and the parameters after the last step."""
    assert_equal_training(results[model, packed], results[model, layout, packed])


@pytest.mark.parametrize("key", BROKEN, ids="-".join)
def test_a_missing_sum_is_detected(results, key):
    """Without one of the sums over ranks, the comparison reports the parameters concerned."""
    errors = relative_errors(results[key[0], True]["gradients"], results[key]["gradients"])
    seen = {name for name, error in errors.items() if error > 100 * SUM_RTOL}
    assert seen == {"embed_text.bias"} if key[0] == "flux" else "layers.1.attention.q_layernorm.weight" in seen
