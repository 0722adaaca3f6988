"""Imported adapters of other programs give the same predictions; adapters that we exported import to the bit."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import FluxPipeline, StableDiffusionPipeline, UNet2DConditionModel
from diffusers.loaders.lora_conversion_utils import _maybe_map_sgm_blocks_to_diffusers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from dit.convert.lora import comfyui_tensors, write_adapter_folder
from dit.convert.lora_import import METADATA_KEY, ImportedAdapters, layer_names, read_adapters
from dit.convert.rules import RuleBook
from dit.errors import ConfigError
from dit.models.base import ModelConfig
from dit.models.lora import A_WEIGHT
from dit.models.lora_config import LoRAConfig
from dit.parallel.build import parameter_shapes
from tests.conftest import BuildModel
from tests.parity.convert_cases import assert_same_bits, load, random_weights, relative_error
from tests.parity.test_convert_lora import CASES, LORA, Case, adapted
from tests.parity.test_convert_unet import SIZES

peft = pytest.importorskip("peft")
RTOL = 1e-5  # float32: another order of W x + B (A x)
# Adapted layers of each class, in attention and MLP; some fused layers are adapted in part, such as q and v without k.
TARGETS = {
    "flux": ["to_q", "to_v", "add_k_proj", "attn.to_out.0", "proj_mlp", "norm1.linear"],
    "chroma": ["to_q", "to_v", "add_k_proj", "attn.to_out.0", "proj_mlp"],
    "flux2_klein": ["attn.to_q", "to_v", "add_k_proj", "to_qkv_mlp_proj", "ff.linear_in"],
    "qwen_image": ["to_q", "to_v", "add_k_proj", "attn.to_out.0", "img_mlp.net.2", "txt_mod.1"],
    "sd3.5_medium": ["attn.to_q", "attn.to_v", "attn2.to_k", "add_k_proj", "attn.to_out.0", "ff.net.2", "norm1.linear"],
    "pixart": ["attn1.to_q", "attn1.to_v", "attn2.to_k", "attn2.to_out.0", "ff.net.0.proj"],
    "sana": ["attn1.to_q", "attn1.to_v", "attn2.to_k", "conv_inverted", "conv_point"],
    "z_image": ["attention.to_q", "attention.to_v", "attention.to_out.0", "feed_forward.w1", "feed_forward.w2"],
    "lumina2": ["attn.to_q", "attn.to_v", "attn.to_out.0", "feed_forward.linear_1", "feed_forward.linear_2"],
    "prx": ["img_qkv_proj", "txt_kv_proj", "to_out.0", "gate_proj", "down_proj"],
    "hunyuan_video": ["attn.to_q", "attn.to_v", "add_k_proj", "attn.to_out.0", "ff.net.2"],
    "unet": ["attn1.to_q", "attn1.to_k", "attn1.to_v", "attn2.to_v", "proj_in", "ff.net.2"],
    "wan": ["attn1.to_q", "attn1.to_k", "attn2.to_v", "ffn.net.2"],
}


def a_base(case: Case) -> tuple[nn.Module, ModelConfig, RuleBook, dict[str, Tensor]]:
    """Return the model of diffusers with random weights, our config, the rules, and the weights under our names."""
    external = case.module()
    imported = case.form.read_settings(external.config)
    rules = case.form.rules(imported.model, parameter_shapes(imported.model), imported.latent_size)
    base = random_weights(rules.shapes) | {n: torch.zeros(rules.shapes[n]) for n in rules.unmatched}
    external.load_state_dict(rules.to_external(base))
    return external, imported.model, rules, base


def imported_from(path: Path, case: Case, model: ModelConfig, rules: RuleBook) -> ImportedAdapters:
    every = parameter_shapes(replace(model, lora=LoRAConfig(rank=1, targets=["*"])))
    linears = [name.removesuffix(A_WEIGHT) for name in every if name.endswith(A_WEIGHT)]
    return read_adapters(path, case.form, model, rules, linears)


def with_peft(external: nn.Module, name: str, **settings: Any) -> Any:
    """Return a model of diffusers with adapters of peft, whose A and B are random."""
    config = {"r": 3, "lora_alpha": 5, "target_modules": TARGETS[name], "init_lora_weights": False, **settings}
    torch.manual_seed(7)
    return peft.get_peft_model(external, peft.LoraConfig(**config))


def same_prediction(build_model: BuildModel, case: Case, adapters: ImportedAdapters, base: Any, there: Any) -> None:
    """Compare predictions, and check that the adapters change them by far more than rounding."""
    _, model, _, weights = base
    network = load(build_model(replace(model, lora=adapters.config)), {**weights, **adapters.tensors})
    with torch.no_grad():
        here, expected = case.predict(network, there, model)
        plain, _ = case.predict(load(build_model(model), weights), there, model)
    assert relative_error(here, expected) <= RTOL
    assert relative_error(plain, expected) > 100 * RTOL


@pytest.mark.parametrize(
    ("name", "settings"), [*((name, {}) for name in CASES), ("flux", {"use_rslora": True})], ids=str
)
def test_adapters_of_peft_are_imported(build_model: BuildModel, tmp_path: Path, name: str, settings: dict) -> None:
    """Some layers have another rank or alpha."""
    case, base = CASES[name], a_base(CASES[name])
    patterns = {"rank_pattern": {TARGETS[name][1]: 2}, "alpha_pattern": {TARGETS[name][0]: 9}}
    there = with_peft(base[0], name, **patterns, **settings)
    there.save_pretrained(tmp_path)
    adapters = imported_from(tmp_path, case, base[1], base[2])
    assert any("extended to rank" in note for note in adapters.notes)
    same_prediction(build_model, case, adapters, base, there.base_model.model)


def test_an_adapter_of_only_the_wide_part_of_a_fused_layer_is_imported(build_model: BuildModel, tmp_path: Path) -> None:
    """In single-stream blocks of FLUX, only the MLP has adapters; it is wider than queries, keys and values."""
    case, base = CASES["flux"], a_base(CASES["flux"])
    there = with_peft(base[0], "flux", target_modules=["proj_mlp"])
    there.save_pretrained(tmp_path)
    adapters = imported_from(tmp_path, case, base[1], base[2])
    assert adapters.config.rank == 3
    same_prediction(build_model, case, adapters, base, there.base_model.model)


@pytest.mark.parametrize(("name", "pipeline"), [("flux", FluxPipeline), ("unet", StableDiffusionPipeline)])
def test_adapters_of_diffusers_pipelines_are_imported(
    build_model: BuildModel, tmp_path: Path, name: str, pipeline: Any
) -> None:
    """Files of `save_lora_weights` with metadata, and of `save_lora_adapter`, whose names have no prefix.

    The former also have adapters of a text encoder, with its own metadata, which are skipped.
    """
    case, base = CASES[name], a_base(CASES[name])
    external, model, rules, _ = base
    torch.manual_seed(7)
    config = peft.LoraConfig(r=3, lora_alpha=6, target_modules=TARGETS[name], init_lora_weights=False)
    external.add_adapter(config)
    layers = peft.get_peft_model_state_dict(external, adapter_name="default")
    words: dict[str, Any] = {}
    for part in (case.form.part, "text_encoder"):
        words[f"{part}_lora_layers"] = {layer: x.clone() for layer, x in layers.items()}
        words[f"{part}_lora_adapter_metadata"] = config.to_dict()
    pipeline.save_lora_weights(tmp_path / "pipeline", **words)
    external.save_lora_adapter(tmp_path / "model")
    both = [imported_from(tmp_path / folder, case, model, rules) for folder in ("pipeline", "model")]
    assert_same_bits(both[0].tensors, both[1].tensors)
    same_prediction(build_model, case, both[0], base, external)


@pytest.mark.parametrize("name", CASES)
def test_exported_adapters_are_imported_bitwise_unchanged(build_model: BuildModel, tmp_path: Path, name: str) -> None:
    """Imports of every file that we write have scale 1 and B multiplied by the scale."""
    case = CASES[name]
    network, model, external, layers = adapted(build_model, case)
    imported = case.form.read_settings(external.config)
    rules = case.form.rules(model, parameter_shapes(model), imported.latent_size)
    write_adapter_folder(layers, case.form, model, tmp_path / "lora")
    sources = ["lora", "lora/pytorch_lora_weights.safetensors"]
    if case.native:
        save_file(comfyui_tensors(layers, case.form.comfyui_name), tmp_path / "comfyui.safetensors")
        sources.append("comfyui.safetensors")
    trained = {n: p.detach().clone() for n, p in network.named_parameters() if "lora_" in n}
    scaled = {n: LORA.scale * x if "lora_B" in n else x for n, x in trained.items()}
    for source in sources:
        adapters = imported_from(tmp_path / source, case, model, rules)
        assert adapters.config.rank == LORA.rank
        assert adapters.config.scale == 1
        assert_same_bits(dict(sorted(adapters.tensors.items())), dict(sorted(scaled.items())))


def kohya(external: nn.Module, layers: dict[str, str], alpha: float = 2.0) -> dict[str, Tensor]:
    """Return tensors as in a file of kohya-ss; `layers` maps names in the file to layers of the model."""
    weights, tensors = dict(external.named_parameters()), {}
    for i, (stem, layer) in enumerate(layers.items()):
        shape, generator = weights[f"{layer}.weight"].shape, torch.Generator().manual_seed(i)
        sides = shape[2:]
        tensors[f"{stem}.lora_down.weight"] = torch.randn(4, *shape[1:], generator=generator)
        tensors[f"{stem}.lora_up.weight"] = torch.randn(shape[0], 4, *[1] * len(sides), generator=generator)
        tensors[f"{stem}.alpha"] = torch.tensor(alpha)
    return tensors


def test_adapters_of_kohya_are_imported(build_model: BuildModel, tmp_path: Path) -> None:
    """Predictions equal those of diffusers with the same file; adapters of the text encoder are skipped and counted."""
    case, base = CASES["unet"], a_base(CASES["unet"])
    external, model, rules, _ = base
    block = "down_blocks.0.attentions.1"
    names = [f"{block}.proj_in", f"{block}.transformer_blocks.0.attn1.to_q", f"{block}.transformer_blocks.0.attn2.to_k"]
    tensors = kohya(external, {f"lora_unet_{name.replace('.', '_')}": name for name in names})
    save_file(tensors, tmp_path / "unet.safetensors")
    text = {name.replace("lora_unet", "lora_te_text_model"): x.clone() for name, x in tensors.items()}
    save_file({**tensors, **text}, tmp_path / "both.safetensors")
    state, alphas = StableDiffusionPipeline.lora_state_dict(str(tmp_path / "unet.safetensors"))
    external.load_lora_adapter(state, network_alphas=alphas, prefix="unet")
    adapters = imported_from(tmp_path / "both.safetensors", case, model, rules)
    assert any(note.startswith("3 adapters of a text encoder are left out (lora_te") for note in adapters.notes)
    same_prediction(build_model, case, adapters, base, external)


def test_blocks_of_sdxl_are_numbered_as_kohya_numbers_them() -> None:
    """Compared with the translation of these names in diffusers."""
    form = CASES["unet"].form
    model = replace(SIZES["xl"], block_out_channels=[32, 64, 96], transformer_layers=[0, 2, 2], layers_per_block=2)
    model.mid_transformer_layers = 2
    settings, _ = form.write_settings(model, (1, 8, 8))
    external = UNet2DConditionModel.from_config(settings)
    layers = [
        name for name, module in external.named_modules() if isinstance(module, nn.Linear) and ".attentions." in name
    ]
    names = layer_names(form, model, layers)
    numbered = {name: found[0] for name, found in names.items() if "_blocks_" in name and "put_blocks" in name}
    assert len(numbered) == len([layer for layer in layers if not layer.startswith("mid")])

    class Config:
        layers_per_block = 2

    for name, layer in [*numbered.items(), *((n, f[0]) for n, f in names.items() if "middle_block_1" in n)]:
        [there] = _maybe_map_sgm_blocks_to_diffusers({f"{name}.alpha": torch.ones(1)}, Config())
        for old, new in (("input_blocks", "down_blocks"), ("output_blocks", "up_blocks"), ("middle_", "mid_")):
            there = there.replace(old, new)
        assert there == f"lora_unet_{layer.replace('.', '_')}.alpha"


@pytest.fixture(scope="module")
def of_unet() -> tuple[Case, nn.Module, ModelConfig, RuleBook]:
    """Case, model of diffusers, config and rules, for tests that do not change the model."""
    external, model, rules, _ = a_base(CASES["unet"])
    return CASES["unet"], external, model, rules


Change = Callable[[dict[str, Tensor]], dict[str, Tensor]]


def renamed(old: str, new: str) -> Change:
    return lambda tensors: {name.replace(old, new): x for name, x in tensors.items()}


def cut(part: str, axis: int) -> Change:
    """Return a change that removes the last entry along an axis."""
    return lambda tensors: {
        name: x.narrow(axis, 0, x.shape[axis] - 1).contiguous() if part in name else x for name, x in tensors.items()
    }


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: {**t, "unet.x.lora_magnitude_vector": torch.ones(2)}, r"has DoRA \(unet\.x"),
        (lambda t: {**t, "lora_unet_x.hada_w1_a": torch.ones(2)}, "LoHa or LoKr"),
        (lambda t: {n: x for n, x in t.items() if "lora_up" not in n}, "lack A or B"),
        (renamed("attentions_1", "attentions_7"), "1 of 1 layers are not of UNet2DConditionModel .*--base belong"),
        (cut("lora_down", 1), r"weight of the base is .* check --base"),
        (lambda t: {n: x / 0 for n, x in t.items()}, "not finite"),
        (lambda t: {**t, "other": torch.ones(1)}, "other are not LoRA tensors"),
        (renamed("lora_unet", "lora_te_text_model"), "has no adapter of UNet2DConditionModel"),
        (cut("lora_up", 1), "which have no product"),
        (
            lambda t: {n: x.repeat(2) if "alpha" in n else x for n, x in t.items()},
            r"alpha of .* is .2., not one number",
        ),
    ],
    ids=["dora", "loha", "half", "layer", "size", "nan", "unknown", "text", "product", "alpha"],
)
def test_adapters_without_a_counterpart_are_refused(of_unet: Any, tmp_path: Path, change: Change, message: str) -> None:
    case, external, model, rules = of_unet
    layer = "down_blocks.0.attentions.1.transformer_blocks.0.attn1.to_q"
    save_file(change(kohya(external, {f"lora_unet_{layer.replace('.', '_')}": layer})), tmp_path / "x.safetensors")
    with pytest.raises(ConfigError, match=message):
        imported_from(tmp_path / "x.safetensors", case, model, rules)


def test_a_folder_with_several_files_is_refused(of_unet: Any, tmp_path: Path) -> None:
    case, external, model, rules = of_unet
    tensors = kohya(external, {"lora_unet_time_embedding_linear_1": "time_embedding.linear_1"})
    save_file(tensors, tmp_path / "dog-000001.safetensors")
    assert imported_from(tmp_path, case, model, rules).config.targets == ["time.linear_1"]
    save_file(tensors, tmp_path / "dog.safetensors")
    with pytest.raises(ConfigError, match=r"has 2 files \(dog-000001.safetensors, dog.safetensors\); give one of them"):
        imported_from(tmp_path, case, model, rules)


def test_adapters_of_3_x_3_convolutions_are_refused(of_unet: Any, tmp_path: Path) -> None:
    case, external, model, rules = of_unet
    layers = {"lora_unet_down_blocks_0_resnets_0_conv1": "down_blocks.0.resnets.0.conv1"}
    save_file(kohya(external, layers), tmp_path / "x.safetensors")
    with pytest.raises(ConfigError, match="adapts a 3 x 3 convolution"):
        imported_from(tmp_path / "x.safetensors", case, model, rules)


def test_unsupported_settings_of_peft_are_refused(tmp_path: Path) -> None:
    case, (external, model, rules, _) = CASES["pixart"], a_base(CASES["pixart"])
    with_peft(external, "pixart").save_pretrained(tmp_path)
    settings = json.loads((tmp_path / "adapter_config.json").read_text())
    for change, message in (
        ({"lora_alpha": "5"}, "alpha='5'"),
        ({"use_dora": True}, "DoRA"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights=pissa_niter_4.*path_initial_model_for_weight_con"),
        ({"init_lora_weights": "OLoRA"}, "changed weights of the base"),
        ({"layer_replication": [[0, 1], [0, 2]]}, r"layers .layer_replication=\[\[0, 1.*of the base without it"),
        ({"alpha_pattern": {"(a+)+": 3}}, "only names"),
    ):
        (tmp_path / "adapter_config.json").write_text(json.dumps({**settings, **change}))
        with pytest.raises(ConfigError, match=message):
            imported_from(tmp_path, case, model, rules)
    for text, message in (("{", "cannot be read"), ("[]", "not settings by name")):
        save_file(load_file(tmp_path / "adapter_model.safetensors"), tmp_path / "x.safetensors", {METADATA_KEY: text})
        with pytest.raises(ConfigError, match=message):
            imported_from(tmp_path / "x.safetensors", case, model, rules)
