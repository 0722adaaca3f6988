"""Imagen's UNets match their description."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from dit.batch import PackedBatch
from dit.conditions import Entry
from dit.errors import BatchError, ConfigError
from dit.layout import SequenceLayout
from dit.models.efficient_unet.config import EfficientUNetConfig
from dit.models.imagen_config import ImagenConfig
from dit.models.unet.config import UNetConfig
from energon_data.mock import MockData, MockSource
from energon_data.packing import collate
from tests.conftest import BuildModel
from tests.parity.reference_cross import Leaves
from tests.parity.reference_imagen import EfficientReference, UNetReference
from tests.support.reference import RTOL, relative_error

SIZES: dict[str, Any] = {
    **{"hidden_size": 16, "channel_multipliers": [1, 2, 3], "num_res_blocks": [1, 2, 1], "attention_levels": [1, 2]},
    **{"context_size": 12, "head_size": 8, "norm_num_groups": 4},
}
COMMON: dict[str, dict[str, Any]] = {
    "fused": {},
    "cross": {"attention_type": "cross"},
    "self": {"attention_type": "self"},
    "stacked": {"attention_type": "stacked"},
    "stable": {"stable_attention": True},
    "heads": {"head_size": None, "num_attention_heads": 2},
    "noised": {"low_resolution_factor": 4, "noise_augmentation": True},
}
REGULAR = {**COMMON, "no_text": {"context_size": None, "attention_type": "self"}}
EFFICIENT = {**COMMON, "base": {"low_resolution_factor": None}}
CASES = [
    *((UNetConfig, UNetReference, {"condition_size": 20, **changes}, name) for name, changes in REGULAR.items()),
    *((EfficientUNetConfig, EfficientReference, changes, name) for name, changes in EFFICIENT.items()),
]


def pack(config: ImagenConfig, texts: tuple[int, ...], *, multiple_of: int = 1) -> PackedBatch:
    """Pack synthetic pictures of 8 x 12, with texts of these lengths."""
    spec = config.batch_spec(multiple_of=multiple_of)
    source = MockSource(MockData(height=8, width=12), spec, seed=0, split="train", stream=0, num_streams=1)
    batch = collate([source.sample(number) for number in range(len(texts))], spec)
    changed = {}
    if config.context_size is not None:
        layout = SequenceLayout.from_lengths(texts, multiple_of=multiple_of)
        generator = torch.Generator().manual_seed(1)
        values = torch.randn(layout.total_tokens, config.context_size, generator=generator)
        changed["context"] = Entry("text", values.masked_fill(~layout.valid_T[:, None], torch.nan), layout)
    if config.noise_augmentation:
        changed["augmentation"] = Entry("sample", torch.tensor([0.3, 1.2, 0.02][: len(texts)]))
    return replace(batch, conditions=batch.conditions | changed)


def picture(tokens_TC: Tensor) -> Tensor:
    return tokens_TC.view(8, 12, -1).permute(2, 0, 1)[None].double()


@pytest.mark.parametrize(
    ("kind", "reference", "changes"), [pytest.param(*c[:3], id=f"{c[0].__name__}-{c[3]}") for c in CASES]
)
def test_a_pack_equals_the_formulas(
    build_model: BuildModel, kind: Any, reference: Any, changes: dict[str, Any]
) -> None:
    """Outputs and gradients equal those of single samples, for texts of different lengths and padding."""
    config = kind(**{**SIZES, **changes})
    config.validate()
    model = build_model(config, perturb=0.1)
    batch, leaves = pack(config, (3, 7, 1), multiple_of=10), Leaves(model)
    exact_network = reference(config, leaves)
    time_S = torch.tensor([-0.4, 0.1, 0.6])
    out_TC = model(batch.latents_TC, time_S, batch)
    cotangent_TC = torch.randn(out_TC.shape, generator=torch.Generator().manual_seed(6))
    total = torch.zeros((), dtype=torch.float64)
    for i, (start, length) in enumerate(zip(batch.layout.starts, batch.layout.lengths)):
        own = slice(start, start + length)
        text = batch.conditions.get("context")
        low, level = batch.conditions.get("low_resolution"), batch.conditions.get("augmentation")
        exact = exact_network.run(
            picture(batch.latents_TC[own]),
            float(time_S[i]),
            None if text is None else text.values[text.layout.starts[i] :][: text.layout.lengths[i]],
            None if low is None else picture(low.values[own]),
            None if level is None else float(level.values[i]),
        )
        exact_TC = exact[0].permute(1, 2, 0).flatten(0, 1)
        assert relative_error(out_TC[own], exact_TC) <= RTOL
        total = total + (exact_TC * cotangent_TC[own].double()).sum()
    total.backward()
    (out_TC * cotangent_TC)[batch.layout.valid_T].sum().backward()
    for name, parameter in model.named_parameters():
        grad = leaves[name].grad
        if config.attention_type == "self" and grad is None:
            assert name.startswith("caption.to_tokens")
            assert not parameter.grad.any(), f"{name} is not read, and a wrapper waits for its gradient"
            continue
        assert grad is not None, name
        assert relative_error(parameter.grad, grad) <= 2 * RTOL, name


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"num_res_blocks": [1]}, r"num_res_blocks=\[1\] must have an entry for each of the 3 levels"),
        ({"attention_levels": [3]}, r"attention_levels=\[3\] must be"),
        ({"attention_levels": [1, 1]}, r"attention_levels=\[1, 1\] names a level twice"),
        ({"head_size": 5}, "attention over 32 channels .* cannot be split into heads by model.head_size=5"),
        ({"norm_num_groups": 5}, "a level has .* channels .* not a multiple of model.norm_num_groups=5"),
        ({"condition_size": 10}, "width 10 of the text tokens is not a multiple of model.norm_num_groups=4"),
        ({"context_size": None}, "attention_type='fused' needs text, but model.context_size is None"),
        ({"noise_augmentation": True}, "adds noise to the low-resolution picture, but there is none"),
        ({"attention_type": "none"}, "attention_type='none' is unknown"),
        ({"dropout": 1.0}, "dropout=1.0 must be"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        UNetConfig(**{**SIZES, **changes}).validate()


def test_pictures_that_cannot_be_halved_are_refused(build_model: BuildModel) -> None:
    config = UNetConfig(**{**SIZES, "channel_multipliers": [1] * 4, "num_res_blocks": [1] * 4})
    with pytest.raises(BatchError, match=r"sides are multiples of 8 .* got 1 x 8 x 12 tokens"):
        build_model(config)(torch.zeros(96, 3), torch.zeros(1), pack(config, (2,)))
