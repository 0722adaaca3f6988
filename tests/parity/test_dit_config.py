"""Published sizes have the published parameter counts, and impossible sizes are refused."""

from dataclasses import replace

import pytest

from dit.errors import ConfigError
from dit.models.dit.config import DiTConfig
from dit.parallel.build import count_parameters

BASE = DiTConfig(hidden_size=48, num_layers=2, num_attention_heads=4, in_channels=4, num_classes=5)


@pytest.mark.usefixtures("one_rank_world")
@pytest.mark.parametrize(
    ("hidden_size", "num_layers", "num_attention_heads", "published"),
    [
        (384, 12, 6, 32_963_360),
        (768, 12, 12, 130_512_416),
        (1024, 24, 16, 458_102_816),
        (1152, 28, 16, 675_129_632),
    ],
    ids=["S/2", "B/2", "L/2", "XL/2"],
)
def test_parameter_counts_equal_those_of_the_published_code(
    hidden_size: int, num_layers: int, num_attention_heads: int, published: int
):
    """The published counts include a frozen table of 16 x 16 positions, which we compute instead."""
    config = DiTConfig(
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_attention_heads=num_attention_heads,
        in_channels=4,
        out_channels=8,
        num_classes=1000,
    )
    assert count_parameters(config) + 256 * hidden_size == published


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"num_layers": 0}, ["num_layers=0"]),
        ({"hidden_size": 50}, ["hidden_size=50", "num_attention_heads=4"]),
        ({"hidden_size": 6, "num_attention_heads": 2}, ["hidden_size=6", "sincos_2d"]),
        ({"class_dropout": 1.5}, ["class_dropout=1.5"]),
        ({"context_dropout": -0.1}, ["context_dropout=-0.1"]),
        ({"num_classes": 0}, ["num_classes=0"]),
        ({"context_size": 0}, ["context_size=0"]),
        ({"ffn_hidden_size": 0}, ["ffn_hidden_size=0"]),
        ({"out_channels": 0}, ["out_channels=0"]),
        ({"position_embedding": "rope"}, ["position_embedding='rope'"]),
        ({"moe_top_k": 1, "moe_router": "top_k"}, ["moe_top_k=1", "moe_router=top_k", "model.num_experts"]),
        ({"num_experts": 0}, ["num_experts=0"]),
        ({"num_experts": 4, "moe_ffn_hidden_size": 0}, ["moe_ffn_hidden_size=0"]),
        ({"num_experts": 4, "moe_router": "sinkhorn"}, ["moe_router='sinkhorn'", "'expert_choice'", "'top_k'"]),
        ({"num_experts": 4, "moe_capacity_factor": 5.0}, ["moe_capacity_factor=5.0", "num_experts=4"]),
        ({"num_experts": 4, "moe_router": "top_k", "moe_top_k": 5}, ["moe_top_k=5", "from 1 to 4"]),
        (
            {"num_experts": 4, "moe_router": "top_k", "moe_aux_loss_coeff": -1.0},
            ["moe_aux_loss_coeff=-1.0", "at least 0"],
        ),
        (
            {"num_experts": 4, "moe_top_k": 1},
            ["moe_top_k=1 has no effect", "moe_router=top_k", "leave model.moe_top_k=2"],
        ),
        ({"num_experts": 4, "moe_aux_loss_coeff": 0.0}, ["moe_aux_loss_coeff=0.0 has no effect"]),
        (
            {"num_experts": 4, "moe_router": "top_k", "moe_capacity_factor": 1.5},
            ["moe_capacity_factor=1.5 has no effect", "moe_router=expert_choice"],
        ),
        (
            {"rope_theta": 50.0},
            ["rope_theta=50.0 has no effect", "position_embedding='sincos_2d'", "rope_theta=10000.0"],
        ),
        (
            {"rope_scaling": "linear", "rope_factors": [2, 1, 1]},
            ["rope_scaling=linear", "rope_factors=[2, 1, 1] has no"],
        ),
        ({"rope_scaling": "yarn"}, ["rope_scaling='yarn' is unknown"]),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else "",
)
def test_impossible_sizes_are_named_with_their_numbers(changes: dict, names: list[str]):
    with pytest.raises(ConfigError) as caught:
        replace(BASE, **changes).validate()
    assert all(name in str(caught.value) for name in names)
