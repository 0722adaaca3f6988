"""Imagen's UNets match their description and have the published numbers of parameters."""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from dit.batch import PackedBatch
from dit.conditions import per_sample, per_text_token
from dit.errors import BatchError, ConfigError
from dit.layout import SequenceLayout
from dit.models.efficient_unet.config import EfficientUNetConfig
from dit.models.imagen_config import ImagenConfig
from dit.models.unet.config import UNetConfig
from dit.parallel.build import build_on_meta
from energon_data.mock import MockData, MockSource
from energon_data.packing import collate
from launch.config_file import built
from launch.train import call_recipe
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
REGULAR = {
    **COMMON,
    "no_text": {"context_size": None, "attention_type": "self"},
}
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
        changed["context"] = per_text_token(values.masked_fill(~layout.valid_T[:, None], torch.nan), layout)
    if config.noise_augmentation:
        changed["augmentation"] = per_sample(torch.tensor([0.3, 1.2, 0.02][: len(texts)]))
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


def by_module(config: ImagenConfig) -> Counter[str]:
    """Count parameters under the names of the published table."""
    names = {
        "time": "time_embed",
        "augmentation": "lowres_time_embed",
        "caption.pooling": "attention_pooling",
        "caption.to_tokens": "text_to_cond",
        "first": "init_conv",
        "down": "input_blocks",
        "middle": "middle_block",
        "up": "output_blocks",
        "norm": "out",
        "last": "out",
    }
    found: Counter[str] = Counter()
    for name, parameter in build_on_meta(config).named_parameters():
        first, second, *_ = name.split(".")
        module = names.get(first) or names.get(f"{first}.{second}", "to_text_non_attn_cond")
        found[module] += parameter.numel()
    return found


MODULES = (
    *("time_embed", "lowres_time_embed", "attention_pooling", "text_to_cond", "to_text_non_attn_cond", "init_conv"),
    *("input_blocks", "middle_block", "output_blocks", "out"),
)
REGULAR_TABLE = {
    "imagen_500m_res_64": (
        *(1_312_768, 0, 527_873, 524_800, 1_575_936, 7_168),
        *(156_190_464, 47_213_568, 317_544_704, 7_427),
    ),
    "imagen_2b_res_64": (
        *(5_246_976, 0, 2_102_273, 2_099_200, 8_396_800, 14_336),
        *(652_793_344, 192_995_328, 1_307_513_344, 14_851),
    ),
    "imagen_400m_res_256": (
        *(328_704, 328_704, 527_873, 524_800, 526_336, 7_040),
        *(127_156_480, 25_973_248, 252_980_608, 3_715),
    ),
}


@pytest.mark.parametrize("recipe", REGULAR_TABLE)
def test_every_module_of_a_regular_unet_has_the_published_count(recipe: str) -> None:
    found = by_module(built(call_recipe(recipe)).model)
    found["input_blocks"] += found["init_conv"]  # the published number includes the first convolution
    assert tuple(found[name] for name in MODULES) == REGULAR_TABLE[recipe]


def test_every_level_of_the_efficient_unet_has_the_published_count() -> None:
    model = built(call_recipe("imagen_600m_res_256")).model
    found = by_module(replace(model, noise_augmentation=False))
    assert [found[name] for name in MODULES[:6]] == [328_704, 0, 1_052_673, 1_049_600, 789_504, 7_040]
    assert found["out"] == 387
    network = build_on_meta(model)
    levels = [[sum(p.numel() for p in level.parameters()) for level in way] for way in (network.down, network.up)]
    assert levels[0] == [1_149_312, 5_972_864, 43_814_656, 173_100_544, 174_149_632]
    assert levels[1] == [1_149_312, 2_200_448, 13_781_760, 52_998_656, 174_149_632]
    larger = by_module(built(call_recipe("imagen_600m_res_1024")).model)
    assert (larger["input_blocks"], larger["output_blocks"]) == (393_984_512, 241_652_224)


@pytest.mark.parametrize(
    ("recipe", "changes", "count"),
    [
        ("imagen_500m_res_64", {}, 524_897_540),
        ("imagen_500m_res_64", {"context_size": 512}, 524_371_716),
        ("imagen_2b_res_64", {}, 2_171_162_116),
        ("imagen_400m_res_256", {}, 408_350_468),
        ("imagen_500m_res_64_ddpm_online", {}, 524_897_540),
        ("imagen_2b_res_64", {"condition_size": 512}, 2_059_415_044),
        ("imagen_400m_res_256", {"noise_augmentation": False}, 408_021_764),
        ("imagen_400m_res_256_doc429m", {}, 428_948_228),
        ("imagen_400m_res_256_doc429m", {"noise_augmentation": False}, 428_619_524),
        ("imagen_450m_res_256_stacked", {}, 568_675_844),
        ("imagen_600m_res_256", {}, 646_023_428),
        ("imagen_600m_res_256", {"noise_augmentation": False}, 645_694_724),
        ("imagen_600m_res_256", {"noise_augmentation": False, "attention_type": "self"}, 638_332_164),
        ("imagen_600m_res_256_stacked", {}, 700_281_604),
        ("imagen_600m_res_256_stacked", {"noise_augmentation": True}, 700_610_308),
        ("imagen_600m_res_1024", {}, 639_193_348),
        ("imagen_600m_res_1024", {"noise_augmentation": False}, 638_864_644),
        ("imagen_400m_res_1024", {}, 287_789_828),
        ("imagen_400m_res_1024", {"noise_augmentation": True}, 288_118_532),
        ("imagen_400m_res_1024_doc427m", {}, 427_050_500),
    ],
)
def test_models_have_the_published_parameter_counts(recipe: str, changes: dict[str, Any], count: int) -> None:
    model = replace(built(call_recipe(recipe)).model, **changes)
    assert sum(by_module(model).values()) == count


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
