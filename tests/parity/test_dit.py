"""Our packed DiT has the outputs and gradients of the paper's formulas."""

from collections.abc import Sequence
from typing import Any, Optional

import pytest
import torch
from torch import Tensor, nn

from dit.batch import PackedBatch
from dit.errors import ConfigError
from dit.kernels.attention import segment_sdpa
from dit.layout import SequenceLayout
from dit.models.base import Stage
from dit.models.dit.config import DiTConfig
from dit.models.registry import build_backbone
from dit.models.routing_config import RoutingConfig
from tests.conftest import BuildModel
from tests.parity.reference_dit import ReferenceDiT
from tests.parity.weights import copy_weights, reference_gradients, reference_of
from tests.support.batches import Sample, pack
from tests.support.reference import RTOL, relative_error


def config(**changes: object) -> DiTConfig:
    sizes = {"hidden_size": 48, "num_layers": 3, "num_attention_heads": 4, "in_channels": 3, "num_classes": 7}
    return DiTConfig(**{**sizes, **changes})


def rows_of(layout: SequenceLayout) -> list[slice]:
    return [slice(start, start + length) for start, length in zip(layout.starts, layout.lengths)]


def check_gradients(model: nn.Module, reference: ReferenceDiT, heads: int) -> None:
    exact = reference_gradients(model, reference, heads)
    errors = {}
    for name, parameter in model.named_parameters():
        actual = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        errors[name] = relative_error(actual, exact[name])
    wrong = {name: error for name, error in errors.items() if not error <= RTOL}
    assert not wrong, wrong


def compare(model: nn.Module, model_config: DiTConfig, batch: PackedBatch, samples: list[Sample]) -> None:
    """Run the pack through our model and each sample through the reference; compare outputs and all gradients."""
    heads = model_config.num_attention_heads
    reference = reference_of(model_config)
    copy_weights(model, reference, heads)
    generator = torch.Generator().manual_seed(5)
    inputs = torch.randn(batch.latents_TC.shape, generator=generator)
    time = torch.rand(len(samples), generator=generator)
    out = model(inputs, time, batch)
    cotangent = torch.randn(out.shape, generator=generator)
    loss = torch.zeros((), dtype=torch.float64)
    for i, (sample, rows) in enumerate(zip(samples, rows_of(batch.layout))):
        exact = reference(
            inputs[None, rows].double(),
            time[i : i + 1],
            sample.grid,
            [sample.label] if model_config.num_classes else None,
            [None if sample.given is None else sample.given.double()] if model_config.context_size else None,
        )[0]
        assert relative_error(out[rows], exact) <= RTOL, f"sample {i}"
        loss = loss + (exact * cotangent[rows].double()).sum()
    loss.backward()
    valid = batch.layout.valid_T
    (out[valid] * cotangent[valid]).sum().backward()
    check_gradients(model, reference, heads)


def text(tokens: int, size: int, seed: int) -> Tensor:
    return torch.randn(tokens, size, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"qk_layernorm": True},
        {"add_bias": False},
        {"bottleneck_size": 5},
        {"num_classes": None, "ffn_hidden_size": 100, "out_channels": 6},
        {"layernorm_epsilon": 1e-2, "time_scale": 50.0, "patch_spatial": 1, "qk_layernorm": True},
        {"activation": "swiglu"},
        {"rms_norm": True},
        {"interval_conditioning": True},
        {"class_tokens": [3, 1]},
        {"class_tokens": [2, 0], "position_embedding": "rope_3d"},
        {"wide_head": [1, 64, 4], "interval_conditioning": True, "bottleneck_size": 5, "out_channels": 6},
    ],
    ids=lambda changes: ",".join(changes) or "default",
)
def test_dense_batch_equals_the_model_of_the_paper(build_model: BuildModel, changes: dict):
    model_config = config(**changes)
    samples = [Sample((1, 3, 4), label=i) for i in (2, 0, 6)]
    compare(build_model(model_config, perturb=0.1), model_config, pack(samples, model_config), samples)


JIT = {
    **{"qk_layernorm": True, "activation": "swiglu", "rms_norm": True, "bottleneck_size": 5, "class_tokens": [3, 1]},
    **{"position_embedding": "rope_3d", "rope_axes": [0, 6, 6], "time_scale": 1.0},
}


WIDE = {  # no two of the widths are equal
    **{"activation": "swiglu", "ffn_hidden_size": 128, "rms_norm": True, "wide_head": [2, 96, 4], "time_scale": 1.0},
    **{"position_embedding": "rope_3d", "rope_axes": [0, 6, 6]},
}


VALUES = {"value_residual": True, "wide_head": [2, 96, 4]}


@pytest.mark.parametrize(
    "changes", [{"qk_layernorm": True}, JIT, WIDE, VALUES], ids=["dit", "jit", "wide head", "values"]
)
@pytest.mark.parametrize(("multiple_of", "tail"), [(1, 0), (8, 16)])
def test_ragged_pack_equals_one_run_per_sample(build_model: BuildModel, multiple_of: int, tail: int, changes: dict):
    """Samples of a pack differ in label, time, length and shape; neighbours and padding do not affect them."""
    model_config = config(**changes)
    model_config.validate()
    samples = [
        Sample((1, 4, 4), label=3),
        Sample((1, 2, 5)),
        Sample((1, 1, 3), label=0),
        Sample((1, 4, 4), label=5),
        Sample((1, 5, 2), label=3),
    ]
    batch = pack(samples, model_config, multiple_of=multiple_of, tail=tail)
    compare(build_model(model_config, perturb=0.1), model_config, batch, samples)


def assert_last_stage_equals(model: Any, stages: Sequence[Any], sent: Tensor, *arguments: Any) -> None:
    """Compare output and gradients of two pipeline stages with those of the model; `sent` is the first one's output."""
    stages[1].set_input_tensor(sent)
    out, exact = stages[1](*arguments), model(*arguments)
    assert torch.equal(out, exact)
    for output in (out, exact):
        output.square().sum().backward()
    for name, parameter in model.named_parameters():
        parts = [dict(stage.named_parameters()).get(name) for stage in stages]
        total = sum(part.grad for part in parts if part is not None and part.grad is not None)
        assert relative_error(total, parameter.grad) <= RTOL, name


def two_stages(model_config: DiTConfig, model: Any, cut: int) -> list[Any]:
    """Return pipeline stages of the layers before and after the cut, with the weights of a model of three layers."""
    stages = [
        build_backbone(model_config, model.provider, segment_sdpa, Stage(layers, first=not i, last=bool(i)))
        for i, layers in enumerate((range(cut), range(cut, 3)))
    ]
    for stage in stages:
        stage.load_state_dict({name: model.state_dict()[name] for name in stage.state_dict()})
    return stages


@pytest.mark.parametrize("cut", [1, 2])
def test_class_tokens_begin_at_a_later_stage_or_cross_to_it(build_model: BuildModel, cut: int):
    """Two pipeline stages have the output and the gradients of one; the tokens begin at layer 1 of 3."""
    model_config = config(**JIT)
    model = build_model(model_config, perturb=0.1)
    stages = two_stages(model_config, model, cut)
    assert [stage.class_tokens.vectors is not None for stage in stages] == [cut == 2, cut == 1]
    samples = [Sample((1, 4, 4), label=3), Sample((1, 2, 5))]
    batch, time = pack(samples, model_config, tail=2), torch.tensor([0.3, 0.8])
    inputs = torch.randn(batch.latents_TC.shape, generator=torch.Generator().manual_seed(5))
    sent = stages[0](inputs, time, batch)
    assert len(sent) == 28 + 2 * 3  # the same rows before the class tokens
    assert_last_stage_equals(model, stages, sent, inputs, time, batch)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"class_tokens": [3]}, r"class_tokens=\[3\] must be a count"),
        ({"class_tokens": [0, 1]}, "must be a count of at least 1"),
        ({"class_tokens": [3, 3]}, "below model.num_layers=3"),
        ({"num_classes": None}, "needs classes; set model.num_classes, or model.class_tokens=null"),
        ({"num_experts": 4}, r"model.num_experts=4 is not supported with model.class_tokens=\[3, 1\]"),
        ({"routing": RoutingConfig(first_layers=1, last_layers=1)}, "model.routing=RoutingConfig.* is not supported"),
        ({"rope_axes": [0, 6, 4]}, "add up to 10, but a head has 12"),
        ({"activation": "relu"}, "model.activation='relu'"),
        ({"position_embedding": "sincos_2d"}, "model.rope_axes=.* has no effect"),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else "",
)
def test_settings_that_exclude_class_tokens_are_refused(changes: dict, says: str):
    with pytest.raises(ConfigError, match=says):
        config(**{**JIT, **changes}).validate()


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"wide_head": [2, 96]}, r"wide_head=\[2, 96\] must be a number of layers, their width"),
        ({"wide_head": [2, 96, 5]}, "a number of heads that divides it"),
        ({"wide_head": [2, 96, 0]}, "must be of numbers, each"),
        ({"wide_head": [2, 60, 4]}, "a head of 15 features"),
        ({"num_classes": 7, "class_tokens": [1, 0]}, r"model.class_tokens=\[1, 0\] is not supported"),
        ({"num_experts": 4}, "model.num_experts=4"),
        ({"base_width": 24}, "model.base_width=24"),
    ],
    ids=str,
)
def test_settings_that_exclude_a_wide_head_are_refused(changes: dict, says: str):
    with pytest.raises(ConfigError, match=says):
        config(**{**WIDE, **changes}).validate()


@pytest.mark.parametrize(
    "changes",
    [{"class_tokens": [3, 1]}, {"num_layers": 1}, {"routing": RoutingConfig(first_layers=0, last_layers=1)}],
    ids=lambda changes: next(iter(changes)),
)
def test_later_layers_have_the_tokens_of_the_first_values(changes: dict):
    says = "with model.value_residual=True" if "class_tokens" in changes else "value_residual=True needs a first layer"
    with pytest.raises(ConfigError, match=says):
        config(value_residual=True, **changes).validate()


def test_class_tokens_have_the_noise_level_of_their_sample():
    with pytest.raises(ConfigError, match=r"DiTConfig does not support .*, which data\.some=1 requires"):
        config(**JIT).check_supports("levels", "data.some=1", "data without it")


STRETCHED = {"position_embedding": "rope_3d", "rope_theta": 500.0, "rope_factors": [2.0, 1.5, 3.0]}
POSITIONS = {
    "sincos_2d": {"position_embedding": "sincos_2d"},
    "sincos_3d": {"position_embedding": "sincos_3d"},
    "rope_3d": {"position_embedding": "rope_3d"},
    "rope_ntk": STRETCHED,
    "rope_linear": {**STRETCHED, "rope_scaling": "linear"},
}
IMAGES_AND_CLIPS = [
    Sample((1, 4, 4), label=3),
    Sample((3, 2, 2)),
    Sample((1, 2, 3), label=0),
    Sample((2, 3, 4), label=5),
]


@pytest.mark.parametrize("padding", [{}, {"multiple_of": 8, "tail": 16}], ids=["ragged", "padded"])
@pytest.mark.parametrize("name", POSITIONS)
def test_positions_of_images_and_clips_equal_the_formulas(build_model: BuildModel, name: str, padding: dict):
    """A head of 16 features has more pairs for t than for h and w; the width of 64 has fewer sines for t."""
    model_config = config(hidden_size=64, qk_layernorm=True, **POSITIONS[name])
    model_config.validate()
    batch = pack(IMAGES_AND_CLIPS, model_config, **padding)
    compare(build_model(model_config, perturb=0.1), model_config, batch, IMAGES_AND_CLIPS)


@pytest.mark.parametrize("num_classes", [None, 7])
@pytest.mark.parametrize("context_multiple_of", [1, 4])
def test_pooled_text_conditions_each_sample(
    build_model: BuildModel, num_classes: Optional[int], context_multiple_of: int
):
    """Texts of different lengths are averaged over their valid tokens; a dropped text becomes the null vector."""
    model_config = config(num_classes=num_classes, context_size=10)
    texts = [text(5, 10, seed=1), text(1, 10, seed=2), None, text(8, 10, seed=3)]
    samples = [
        Sample((1, 3, 3), label=1, given=t) if i % 2 else Sample((1, 2, 4), label=4, given=t)
        for i, t in enumerate(texts)
    ]
    batch = pack(samples, model_config, multiple_of=4, tail=4, context_multiple_of=context_multiple_of)
    compare(build_model(model_config, perturb=0.1), model_config, batch, samples)


def test_adaln_zero_starts_as_the_identity(build_model: BuildModel):
    """At initialisation each block returns its input bit for bit, and the network predicts exactly zero."""
    model_config = config(qk_layernorm=True, context_size=10)
    model = build_model(model_config)
    samples = [Sample((1, 3, 3), label=1, given=text(3, 10, seed=1)), Sample((1, 2, 2))]
    batch = pack(samples, model_config, multiple_of=4)
    generator = torch.Generator().manual_seed(2)
    x, cond = torch.randn(16, 48, generator=generator), torch.randn(2, 48, generator=generator)
    for layer in model.layers.values():
        assert torch.equal(layer(x, cond, batch.layout), x)
    out = model(torch.randn(16, 12, generator=generator), torch.rand(2, generator=generator), batch)
    assert torch.equal(out, torch.zeros_like(out))
