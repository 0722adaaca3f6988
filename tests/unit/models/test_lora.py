"""Low-rank adapters: identity at the start, merging into the weights, and the layers that have them."""

import math
from dataclasses import replace

import pytest
import torch

from benchmarks.parallel_training import micro_batch, tiny_model
from dit.backends.provider import LayerProvider
from dit.batch import PackedBatch
from dit.errors import ConfigError
from dit.models.base import Backbone, Stage
from dit.models.lora import adapter_pairs, merge_adapters
from dit.models.lora_config import LoRAConfig
from dit.monitoring.flops import PackFlops, shape_of
from dit.parallel.build import build_on_meta
from recipes.ddpm import tiny_ddpm_unet
from recipes.finetune import finetune_lora
from tests.conftest import BuildModel
from tests.laws.backbones import config_of, pack
from tests.parity.convert_cases import relative_error

LORA = LoRAConfig(rank=3, alpha=6.0, targets=["*"])
NAMES = (
    *("dit", "dit_cross", "stdit", "flux", "chroma", "flux2", "hunyuan_video", "qwen_image", "sd3", "lumina2"),
    *("moviegen", "prx", "sana", "wan", "z_image"),
)
MERGED = 1e-5  # float32: W x + s B (A x) and (W + s B A) x are rounded differently


@torch.no_grad()
def predict(network: Backbone, batch: PackedBatch) -> torch.Tensor:
    return network(batch.latents_TC, torch.tensor([0.3, 0.7]), batch)


def parameters(network: Backbone) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in network.named_parameters()}


def give(network: Backbone, values: dict[str, torch.Tensor]) -> None:
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            parameter.copy_(values.get(name, parameter))


@pytest.mark.parametrize("name", NAMES)
def test_adapters_start_at_zero_and_merge_into_the_weights(build_model: BuildModel, name: str) -> None:
    """At first, predictions are equal to the bit; after training, merged weights give the same ones, to rounding."""
    model = config_of(name)
    batch = pack(model, [0, 1], multiple_of=4)
    base = build_model(model, perturb=0.1)
    adapted = build_model(replace(model, lora=LORA))
    give(adapted, parameters(base))
    assert torch.equal(predict(adapted, batch), predict(base, batch))

    adapters = {name: x for name, x in parameters(adapted).items() if "lora_" in name}
    trained = {name: x + 0.1 * torch.randn(x.shape) for name, x in adapters.items()}
    give(adapted, trained)
    changed = predict(adapted, batch)
    assert relative_error(changed, predict(base, batch)) > 1e-2
    before = parameters(base)
    merged = merge_adapters(before, trained, LORA)
    for layer, (a, b) in adapter_pairs(trained).items():
        torch.testing.assert_close(merged[f"{layer}.weight"], before[f"{layer}.weight"] + 6.0 / 3 * b @ a)
    give(base, merged)
    assert relative_error(predict(base, batch), changed) <= MERGED


def test_only_adapters_are_trained_and_those_named(build_model: BuildModel) -> None:
    lora = LoRAConfig(rank=2, targets=["layers.*.linear_qkv", "layers.1.mlp.linear_fc?"])
    model = build_model(tiny_model(lora=lora))
    layers = [f"layers.{i}.attention.linear_qkv" for i in range(4)] + [f"layers.1.mlp.linear_fc{n}" for n in (1, 2)]
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained == {f"{layer}.lora_{kind}.weight" for layer in layers for kind in "AB"}
    bounds = [p.abs().max() for n, p in model.named_parameters() if n.endswith("linear_qkv.lora_A.weight")]
    assert all(0.9 / 32**0.5 < bound <= 1 / 32**0.5 for bound in bounds)


def test_names_that_nothing_has_are_refused(build_model: BuildModel) -> None:
    with pytest.raises(ConfigError, match=r"to_q.* matches no linear layer.*layers\.0\.attention\.linear_qkv"):
        build_model(tiny_model(lora=LoRAConfig(targets=["*.to_q"])))


def test_a_pipeline_stage_may_have_no_adapter() -> None:
    model = tiny_model(lora=LoRAConfig(targets=["layers.3.*"]))
    stages = [build_on_meta(model, Stage(range(2), last=False)), build_on_meta(model, Stage(range(2, 4), first=False))]
    assert [any(p.requires_grad for p in stage.parameters()) for stage in stages] == [False, True]


def test_the_operations_of_a_model_are_counted_if_only_its_last_layer_has_adapters() -> None:
    """They are those of its first layer, times the number of layers."""
    batch = micro_batch(0, packed=True, multiple_of=4)
    base, adapted = tiny_model(), tiny_model(lora=LoRAConfig(targets=["layers.3.*"]))
    assert PackFlops(adapted).forward(*shape_of(batch)) == PackFlops(base).forward(*shape_of(batch))


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        *(({"rank": value}, f"rank={value}") for value in (0, -1, 0.5, 10**30)),
        *(({"alpha": value}, f"alpha={value}") for value in (0.0, -1.0, math.inf, math.nan)),
        ({"targets": []}, "targets is empty"),
    ],
)
def test_impossible_adapters_are_refused(wrong: dict, named: str) -> None:
    with pytest.raises(ConfigError, match=rf"model\.lora\.{named}"):
        tiny_model(lora=LoRAConfig(**wrong)).validate()


def test_a_recipe_of_a_model_without_adapters_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("recipes.finetune._on_base", lambda name, base: tiny_ddpm_unet())
    with pytest.raises(ConfigError, match=r"^DDPMUNetConfig has no adapters \(LoRA\); train all .* finetune$"):
        finetune_lora()


def test_the_router_of_experts_has_no_adapter(build_model: BuildModel) -> None:
    """The weight of the router is used without its forward, so an adapter would get no gradient."""
    experts = {"num_experts": 4, "moe_ffn_hidden_size": 48, "moe_capacity_factor": 1.5}
    model = build_model(tiny_model(**experts, lora=LORA))
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert sum(".experts." in name for name in names) == 4 * 4 * 2 * 2  # layers, experts, linears, A and B
    assert not any("router" in name for name in names)
    batch = micro_batch(0, packed=True, multiple_of=4)
    model(batch.latents_TC, torch.tensor([0.3, 0.7]), batch).square().sum().backward()
    assert isinstance(model.provider, LayerProvider)
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)
