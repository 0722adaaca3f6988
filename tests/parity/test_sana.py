"""Our packed, parallel-ready SANA computes what its paper says: outputs, every gradient, sizes and work."""

from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from dit.errors import ConfigError
from dit.kernels.linear_attention import linear_attention
from dit.layout import SequenceLayout
from dit.models.sana.config import SanaConfig
from dit.monitoring.flops import PackFlops
from dit.parallel.build import count_parameters
from tests.conftest import BuildModel
from tests.parity.costs import forward_flops, num_parameters
from tests.parity.cross_cases import check_against_reference
from tests.parity.reference_sana import SanaReference
from tests.support.batches import DENSE, MIXED, Sample, draw, pack

SIZES: dict[str, Any] = {
    **{"hidden_size": 24, "num_layers": 2, "num_attention_heads": 2, "num_cross_attention_heads": 3, "in_channels": 3},
    **{"context_size": 10, "ffn_hidden_size": 28},
}
VARIANTS: dict[str, dict] = {
    "default": {},
    "sana 1.5": {"qk_layernorm": True, "out_channels": 5},
    "conditions": {"num_classes": 5, "fps_conditioning": True, "size_conditioning": True, "patch_spatial": 2},
    "positions": {"position_embedding": "sincos_2d", "layernorm_epsilon": 1e-2, "time_scale": 30.0},
}


def config(**changes: object) -> SanaConfig:
    made = SanaConfig(**{**SIZES, **changes})
    made.validate()
    return made


@pytest.mark.parametrize("name", VARIANTS)
def test_mixed_pack_is_the_formulas(build_model: BuildModel, name: str):
    """Images and clips of one pack differ in time, shape and text, and none feels another."""
    model_config = config(**VARIANTS[name])
    model = build_model(model_config, perturb=0.1)
    check_against_reference(model, model_config, MIXED, kind=SanaReference)


@pytest.mark.parametrize(
    "padding", [{"multiple_of": 8}, {"multiple_of": 4, "tail": 12, "context_multiple_of": 4}], ids=["rows", "all"]
)
def test_padded_pack_is_the_formulas(build_model: BuildModel, padding: dict):
    model_config = config()
    model = build_model(model_config, perturb=0.1)
    check_against_reference(model, model_config, MIXED, kind=SanaReference, **padding)


@pytest.mark.parametrize(
    "samples", [[*DENSE, Sample(DENSE[0].grid, None)], [*DENSE, Sample((2, 2, 3), None)]], ids=["one shape", "a run"]
)
def test_dense_batch_is_the_formulas(build_model: BuildModel, samples: list[Sample]):
    """Pictures of one size in a row are one batch of the convolution."""
    model_config = config()
    model = build_model(model_config, perturb=0.1)
    check_against_reference(model, model_config, samples, kind=SanaReference)


def test_blocks_start_as_the_identity(build_model: BuildModel):
    model_config = config()
    model, batch = build_model(model_config), pack(MIXED, model_config, multiple_of=4)
    out = model(*draw(batch), batch)
    assert torch.equal(out, torch.zeros_like(out))
    x = torch.randn(batch.layout.total_tokens, 24)
    inputs = model.layer_inputs(torch.randn(len(MIXED), 24), batch.positions_T3, batch.layout, batch)
    for layer in model.layers.values():
        assert torch.equal(layer(x, *inputs), x)


def test_sums_are_float32_in_half_precision_and_an_empty_sample_has_none():
    """A sum over 4096 equal keys in bf16 would stop at 256; padding has output zero, whatever it contains."""
    layout = SequenceLayout((0, 4096), (0, 4096), 4100)
    x = torch.ones(4100, 1, 2, dtype=torch.bfloat16)
    x[4096:] = torch.nan
    seen = []
    out = linear_attention(x, x, 3 * x, layout, lambda sums: seen.append(sums) or sums)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, torch.where(layout.valid_T[:, None, None], 3.0, 0.0).expand(-1, 1, 2).bfloat16())
    assert torch.equal(seen[0][0], torch.zeros(1, 2, 3))
    assert torch.equal(seen[0][1, 0], torch.tensor([[12288.0, 12288.0, 4096.0]] * 2))


NULL = 2304  # the null text


@pytest.mark.usefixtures("one_rank_world")
def test_the_published_size_has_its_parameters():
    """The checkpoint of SANA 1.6B counts 1,604,462,752; SANA 1.5 normalises queries and keys."""
    assert count_parameters(SanaConfig()) == num_parameters(SanaConfig()) == 1_604_462_752 + NULL
    deep = SanaConfig(num_layers=60, qk_layernorm=True)
    assert count_parameters(deep) == num_parameters(deep)


@pytest.mark.parametrize("samples", [DENSE, MIXED], ids=["dense", "mixed"])
@pytest.mark.parametrize("changes", [{}, {"qk_layernorm": True, "size_conditioning": True}], ids=["sana", "other"])
def test_flops_are_those_of_torch(build_model: BuildModel, samples: list[Sample], changes: dict):
    made = config(**changes)
    model, batch = build_model(made, perturb=0.1), pack(samples, made, multiple_of=8)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter, torch.no_grad():
        model(*draw(batch), batch)
    shape, flops = (batch.layout, batch.grids, batch.conditions["context"].layout), PackFlops(made)
    counted = flops.forward(*shape, convention="hardware")
    assert counter.get_total_flops() == counted == forward_flops(made, *shape, padding=True)


def test_work_is_linear_in_the_tokens():
    """Four times the tokens cost four times the work; 0.1 % is the null text and the time of the sample."""
    flops, grids = PackFlops(SanaConfig()), [(1, 32, 32), (1, 64, 64), (1, 128, 128)]
    small, medium, large = (flops.forward(SequenceLayout.from_lengths([h * w]), [(t, h, w)]) for t, h, w in grids)
    assert large - medium == 4 * (medium - small)
    # Per token and layer: projections, two matrices of 32 x 33 for each of 70 heads, 9 taps of 11200 channels.
    layer = 2 * (6 * 2240**2 + 3 * 5600 * 2240 + 2 * 70 * 32 * 33 + 9 * 11200) + 4 * 2240
    assert medium - small == 3072 * (20 * layer + 2 * 2 * 32 * 2240)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_query_groups": 2}, ["num_query_groups=2", "use None"]),
        ({"num_cross_attention_heads": 5}, ["hidden_size=24", "num_cross_attention_heads=5", "1, 2, 3, 4, 6, 8, 12"]),
        ({"position_embedding": "rope_3d"}, ["position_embedding='rope_3d'", "'none', 'sincos_2d', 'sincos_3d'"]),
        ({"rope_theta": 50.0}, ["rope_theta=50.0 has no effect"]),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else "",
)
def test_impossible_sizes_are_named_with_their_numbers(changes: dict, said: list[str]):
    with pytest.raises(ConfigError) as caught:
        config(**changes)
    assert all(text in str(caught.value) for text in said)
