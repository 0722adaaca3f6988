"""The config says what the module has: every field, and the number of parameters."""

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from torch import nn

from dit.batch import PackedBatch
from dit.conditions import Conditions, per_sample
from dit.errors import ConfigError
from dit.kernels.attention import segment_sdpa
from dit.layout import SequenceLayout
from dit.models.base import Stage
from dit.models.dit.config import DiTConfig
from dit.models.registry import build_backbone
from dit.patchify import grid_positions
from tests.conftest import BuildModel
from tests.parity.costs import num_parameters

BASE = DiTConfig(hidden_size=48, num_layers=2, num_attention_heads=4, in_channels=4, num_classes=5)
# Fields that need experts, or rotary positions, are changed from here.
BASE_MOE = replace(BASE, num_experts=3, moe_ffn_hidden_size=64, moe_router="top_k")
BASE_ROPE = replace(BASE, position_embedding="rope_3d", rope_factors=[1.0, 2.0, 2.0])

# Read by the training step, which drops conditions; the network itself has nothing to build from them.
NOT_IN_THE_NETWORK = {"class_dropout", "context_dropout"}


def run(model: nn.Module, frame: int = 0) -> torch.Tensor:
    """Predict one 2 x 3 image that stands at the given time index."""
    layout = SequenceLayout.from_lengths([6])
    positions = grid_positions((1, 2, 3)) + torch.tensor([frame, 0, 0])
    inputs = torch.linspace(-1, 1, 6 * 16).view(6, 16)
    label = Conditions(label=per_sample(torch.tensor([2])))
    batch = PackedBatch(inputs, positions, layout, torch.tensor([1]), ((1, 2, 3),), ("a",), label)
    return model(inputs, torch.tensor([0.3]), batch).detach()


def sees_time_index(model: nn.Module) -> str:
    return "sincos_2d" if torch.equal(run(model), run(model, frame=3)) else "sincos_3d"


def embed_width(model: nn.Module) -> int:
    return model.embed.weight.shape[1]


# field: (another value, what shows it in the built model, how the shown value follows from the field's)
SHOWN: dict[str, tuple[Any, Callable[[Any], Any], Callable[[Any], Any]]] = {
    "in_channels": (6, embed_width, lambda value: 4 * value),
    "patch_spatial": (3, embed_width, lambda value: 4 * value**2),
    "patch_temporal": (2, embed_width, lambda value: 16 * value),
    "num_classes": (9, lambda m: m.conditioner.label.weight.shape[0], lambda value: value + 1),
    "context_size": (20, lambda m: m.conditioner.text and m.conditioner.text.linear_1.weight.shape[1], None),
    "hidden_size": (96, lambda m: m.embed.weight.shape[0], None),
    "num_layers": (3, lambda m: len(m.layers), None),
    "num_attention_heads": (6, lambda m: m.layers["1"].attention.local_heads, None),
    "ffn_hidden_size": (100, lambda m: m.layers["1"].mlp.linear_fc1.weight.shape[0], lambda value: value or 4 * 48),
    "out_channels": (8, lambda m: m.head.linear.weight.shape[0], lambda value: 4 * (value or 4)),
    "qk_layernorm": (True, lambda m: "layers.1.attention.k_layernorm.weight" in dict(m.named_parameters()), None),
    "add_bias": (
        False,
        lambda m: all(f"layers.1.{n}.bias" in dict(m.named_parameters()) for n in LAYER_LINEARS),
        None,
    ),
    "layernorm_epsilon": (1e-3, lambda m: {m.layers["1"].modulation.eps, m.head.eps}, lambda value: {value}),
    "position_embedding": ("sincos_3d", sees_time_index, None),
    "rope_theta": (50.0, lambda m: m.rotary.theta, None),
    "rope_scaling": ("linear", lambda m: m.rotary.scaling, None),
    "rope_factors": (None, lambda m: m.rotary.factors, lambda value: tuple(value or (1.0, 1.0, 1.0))),
    "time_scale": (7.0, lambda m: m.conditioner.time.time_scale, None),
    "time_frequency_shift": (1, lambda m: m.conditioner.time.frequency_shift, None),
    "num_experts": (3, lambda m: len(getattr(m.layers["1"].mlp, "experts", [])) or None, None),
    "moe_ffn_hidden_size": (
        None,
        lambda m: m.layers["1"].mlp.experts["2"].linear_fc2.weight.shape[1],
        lambda value: value or 4 * 48,
    ),
    "moe_router": ("expert_choice", lambda m: m.layers["1"].mlp.routing, None),
    "moe_capacity_factor": (0.5, lambda m: m.layers["1"].mlp.capacity_factor, None),
    "moe_top_k": (1, lambda m: m.layers["1"].mlp.top_k, None),
    "moe_aux_loss_coeff": (0.0, lambda m: m.layers["1"].mlp.aux_loss_coeff, None),
}
LAYER_LINEARS = (
    "modulation.linear",
    "attention.linear_qkv",
    "attention.linear_proj",
    "mlp.linear_fc1",
    "mlp.linear_fc2",
)


def base_of(name: str) -> DiTConfig:
    if name == "moe_capacity_factor":
        return replace(BASE_MOE, moe_router="expert_choice")
    return {"moe": BASE_MOE, "rope": BASE_ROPE}.get(name.split("_")[0], BASE)


def test_every_field_has_a_row():
    assert set(SHOWN) | NOT_IN_THE_NETWORK == {field.name for field in fields(DiTConfig)}


@pytest.mark.parametrize("name", SHOWN)
def test_field_reaches_the_model(build_model: BuildModel, name: str):
    """Both values of a field show in the model that is built from them."""
    other, show, follows = SHOWN[name]
    follows = follows or (lambda value: value)
    base = base_of(name)
    assert other != getattr(base, name)
    for config in (base, replace(base, **{name: other})):
        config.validate()
        assert show(build_model(config, perturb=0.1)) == follows(getattr(config, name))


WITHOUT_WEIGHTS = [
    *("layernorm_epsilon", "time_scale", "time_frequency_shift", "num_attention_heads"),
    *("moe_router", "moe_top_k", "position_embedding", "rope_theta", "rope_scaling", "rope_factors"),
]


@pytest.mark.parametrize("name", WITHOUT_WEIGHTS)
def test_field_without_weights_changes_the_prediction(build_model: BuildModel, name: str):
    """Fields that shape no weight still act: the same weights predict something else."""
    base = base_of(name)
    models = [build_model(c, perturb=0.1) for c in (base, replace(base, **{name: SHOWN[name][0]}))]
    for one, other in zip(models[0].parameters(), models[1].parameters()):
        assert torch.equal(one, other)
    assert not torch.allclose(run(models[0]), run(models[1]), rtol=1e-3)


def count_on_meta(config: DiTConfig) -> int:
    """Count the parameters of the whole model without memory for them."""
    from megatron.core.transformer import TransformerConfig

    from dit.backends.provider import LayerProvider

    with torch.device("meta"):
        megatron = TransformerConfig(
            **config.megatron_sizes().arguments(),
            use_cpu_initialization=True,
            perform_initialization=False,
            gradient_accumulation_fusion=False,
            params_dtype=torch.float32,
        )
        model = build_backbone(config, LayerProvider(megatron), segment_sdpa, Stage(range(config.num_layers)))
    assert all(parameter.is_meta for parameter in model.parameters())
    return sum(parameter.numel() for parameter in model.parameters())


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
def test_counts_are_those_of_the_papers_code(
    hidden_size: int, num_layers: int, num_attention_heads: int, published: int
):
    """The published models also count a frozen table of 16 x 16 positions, which we compute instead."""
    config = DiTConfig(
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_attention_heads=num_attention_heads,
        in_channels=4,
        out_channels=8,
        num_classes=1000,
    )
    assert count_on_meta(config) + 256 * hidden_size == published
    assert num_parameters(config) == count_on_meta(config)


@pytest.mark.usefixtures("one_rank_world")
@pytest.mark.parametrize("name", SHOWN)
def test_count_follows_every_field(name: str):
    base = base_of(name)
    for config in (base, replace(base, **{name: SHOWN[name][0]})):
        assert num_parameters(config) == count_on_meta(config)


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
