"""Every backbone with cross-attention gives the numbers of one rank under any layout, packs with texts of any length.

Text, null text, norms, position tables and low-rank modulation each meet other rows on another rank; a wrong sum over
ranks shows in that parameter alone.
"""

import pytest

from tests.parallel.test_layouts import assert_equal_training
from tests.parallel.world import run_world

MODELS = {
    "dit_cross": {"backbone": "dit_cross", "num_query_groups": 2, "size_conditioning": True, "num_classes": 5},
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
    "distributed_optimizer2": {},
    "cp2": {"context_parallel_size": 2},
    "fsdp2": {"data_parallel": "fsdp"},
    "pp2": {"pipeline_model_parallel_size": 2},
}
# Positions of another kind meet the layouts that share out rows.
FEWER = {"dit_cross_rope": ("tp2_sp", "cp2"), "dit_rope": ("tp2_sp", "cp2"), "wan_sincos": ("tp2_sp",)}
CASES = [(model, layout) for model in MODELS for layout in LAYOUTS if layout in FEWER.get(model, LAYOUTS)]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Every case's numbers, and those of one rank; each world size starts once."""
    folder = tmp_path_factory.mktemp("backbones")
    cases = [{"parallel": {"data_parallel": "ddp"}, "model": model, "packed": True} for model in MODELS.values()]
    found = dict(zip(MODELS, run_world(1, cases, folder / "1")))
    cases = [{"parallel": LAYOUTS[layout], "model": MODELS[model], "packed": True} for model, layout in CASES]
    return found | dict(zip(CASES, run_world(2, cases, folder / "2")))


@pytest.mark.parametrize(("model", "layout"), CASES)
def test_layout_equals_one_rank(results, model, layout):
    assert_equal_training(results[model], results[model, layout])
