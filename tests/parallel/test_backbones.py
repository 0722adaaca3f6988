"""Every backbone with cross-attention computes the numbers of one rank under every layout, with texts of any length.

Text, null text, norms, position tables and low-rank modulation each process different rows on each rank; a wrong sum
over ranks changes the gradient of only that parameter.
"""

import pytest

from benchmarks.parallel_world import run_world
from tests.support.ranks import rows, selected
from tests.support.reference import assert_equal_training

MODELS = {
    "dit_cross": {
        **{"backbone": "dit_cross", "num_query_groups": 2, "size_conditioning": True, "num_classes": 5},
        "control_channels": 3,
    },
    "dit_cross_rope": {
        **{"backbone": "dit_cross", "position_embedding": "rope_3d", "rope_factors": [2.0, 1.0, 1.0]},
        **{"adaln_lora_rank": 4, "add_bias": True, "qk_layernorm": False},
    },
    "moviegen": {"backbone": "moviegen", "num_query_groups": 2, "ffn_hidden_size": 48, "max_grid": [4, 5, 6]},
    "dit_rope": {"position_embedding": "rope_3d"},
    "wan_sincos": {"backbone": "wan", "position_embedding": "sincos_3d", "ffn_hidden_size": 48},
}
LAYOUTS = {
    "tp2": {"tensor_model_parallel_size": 2},
    "tp2_sp": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "cp2": {"context_parallel_size": 2},
    "pp2": {"pipeline_model_parallel_size": 2},
}
# Other kinds of positions, on layouts that split rows; `tests/laws` has the other layouts of two ranks.
SPLIT_ROWS = ("tp2_sp", "cp2")
CASES = [(model, layout) for model in MODELS for layout in LAYOUTS if model == "dit_cross" or layout in SPLIT_ROWS]

# The last two of a step's four packs are two samples of one token: the second context-parallel rank has only padding.
MORE_MODELS = {
    "flux": {
        **{"backbone": "flux", "num_joint_layers": 1, "num_single_layers": 1, "ffn_hidden_size": 48, "pooled_size": 6},
        "rope_axes": [2, 4, 2],
    },
    "prx": {"backbone": "prx", "num_layers": 2, "ffn_hidden_size": 48, "rope_axes": [0, 4, 4]},
    "experts": {**MODELS["moviegen"], "num_experts": 4, "moe_ffn_hidden_size": 48, "moe_capacity_factor": 1.5},
    "experts_top_k": {**MODELS["moviegen"], "num_experts": 4, "moe_ffn_hidden_size": 48, "moe_router": "top_k"},
}
CP2, OVERLAP = {"context_parallel_size": 2}, {"overlap_grad_reduce": True}
PADDING_LAYOUTS = {
    "cp2_ddp": {**CP2, "data_parallel": "ddp"},
    "cp2_ddp_overlap": {**CP2, **OVERLAP, "data_parallel": "ddp"},
    "cp2_a2a_balanced_overlap": {**CP2, **OVERLAP, "context_comm": "a2a", "context_split": "load_balanced"},
    "cp2_distributed_optimizer_overlap": {**CP2, **OVERLAP, "overlap_param_gather": True},
    "cp2_fsdp": {**CP2, "data_parallel": "fsdp"},
    "cp2_ep2_overlap": {**CP2, **OVERLAP, "expert_model_parallel_size": 2},
}
PADDING_CASES = [
    (model, layout)
    for model in ("dit_cross", "moviegen", "wan_sincos", *MORE_MODELS)
    for layout in PADDING_LAYOUTS
    if "ep2" not in layout or "experts" in model
]
PADDING_QUICK = {
    **dict.fromkeys(("moviegen", "wan_sincos", "flux", "prx"), ("cp2_ddp_overlap",)),
    "dit_cross": ("cp2_distributed_optimizer_overlap", "cp2_fsdp"),
    "experts": ("cp2_ep2_overlap", "cp2_distributed_optimizer_overlap"),
}
ROW = ("model", "padding_layout")


def _case(model: str, parallel: dict, one_token_packs: int = 0) -> dict:
    sizes = {**MODELS, **MORE_MODELS}[model]
    return {"parallel": parallel, "model": sizes, "packed": True, "one_token_packs": one_token_packs}


@pytest.fixture(scope="module")
def results(request, tmp_path_factory):
    """Numbers of each selected case and of one rank; each world size starts once."""
    folder = tmp_path_factory.mktemp("backbones")
    padding = [case for case in PADDING_CASES if case in selected(request, ROW)]
    one = {model: _case(model, {"data_parallel": "ddp"}) for model in MODELS}
    one |= {("one", model): _case(model, {"data_parallel": "ddp"}, 2) for model, _ in padding}
    two = {(model, layout): _case(model, LAYOUTS[layout]) for model, layout in CASES}
    two |= {(model, layout): _case(model, PADDING_LAYOUTS[layout], 2) for model, layout in padding}
    found: dict = {}
    for world, cases in ((1, one), (2, two)):
        found |= zip(cases, run_world(world, list(cases.values()), folder / str(world), timeout_s=300.0))
    return found


@pytest.mark.parametrize(("model", "layout"), CASES)
def test_layout_equals_one_rank(results, model, layout):
    assert_equal_training(results[model], results[model, layout])


@pytest.mark.parametrize(
    ROW, rows(PADDING_CASES, lambda model, padding_layout: padding_layout in PADDING_QUICK.get(model, ()))
)
def test_a_rank_with_nothing_but_padding_equals_one_rank(results, model, padding_layout):
    """Every parameter gets a zero gradient there, because overlapped reductions and FSDP wait for all gradients."""
    assert_equal_training(results["one", model], results[model, padding_layout])
