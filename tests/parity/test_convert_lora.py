"""Exported adapters, read by diffusers and peft or merged like the loader of ComfyUI, give our adapted prediction.

ComfyUI adds alpha / rank times up down to
the layers of the original code of the model; the tables below list their names and fused matrices.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from dit.convert.diffusers_cross import DiffusersPixArt, DiffusersWan
from dit.convert.diffusers_format import DiffusersFormat
from dit.convert.diffusers_hunyuan_video import DiffusersHunyuanVideo
from dit.convert.diffusers_pipeline import pipeline_class
from dit.convert.diffusers_sd3 import DiffusersSD3
from dit.convert.diffusers_unet import DiffusersUNet
from dit.convert.lora import Adapter, comfyui_tensors, to_external_layers, write_adapter_folder
from dit.errors import ConfigError
from dit.models.base import ModelConfig
from dit.models.lora_config import LoRAConfig
from dit.parallel.build import parameter_shapes
from dit.patchify import unpatchify
from dit.verify.public import CALLS, call_hunyuan_video
from tests.conftest import BuildModel
from tests.parity import test_convert_unet, test_hunyuan_video
from tests.parity.convert_cases import load, page_blocks, random_weights, relative_error, run
from tests.parity.test_convert_streams import FAMILIES

RTOL = 4e-5  # float32: W + B A and B (A x) round differently; equal models differ by 1e-5
LORA = LoRAConfig(rank=3, alpha=12.0, targets=["layers.*"])


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def pixart(network: Any, external: Any, model: ModelConfig) -> tuple[Tensor, Tensor]:
    images, texts, steps = normal(3, 4, 8, 8), normal(3, 5, 20), torch.tensor([0, 37, 999])
    here = run(network, model, images[:, :, None], steps / 1000, texts=list(texts))[:, :, 0]
    return here, external(images, texts, steps).sample


def unet(network: Any, external: Any, model: ModelConfig) -> tuple[Tensor, Tensor]:
    images, texts, steps = normal(2, 4, 8, 8), normal(2, 5, 10), torch.tensor([20.0, 700.0])
    here = run(network, model, images[:, :, None], steps / 1000, texts=list(texts))[:, :, 0]
    return here, external(images, steps, texts).sample


def unet_model() -> nn.Module:
    return test_convert_unet.diffusers_model(test_convert_unet.SIZES["v1"])


def stream(network: Any, external: Any, model: Any) -> tuple[Tensor, Tensor]:
    images, texts = normal(1, 4, 1, 8, 6), normal(1, 5, 20)
    pooled_size = getattr(model, "pooled_size", None)
    pooled = {} if pooled_size is None else {"pooled": normal(1, pooled_size)}
    here = run(network, model, images, torch.tensor([0.25]), texts=list(texts), others=pooled)
    conditions = {"context": texts[0], **pooled}
    (there,) = CALLS[type(external).__name__](external, images, torch.tensor([250.0]), conditions)
    return here, there


def video(network: Any, external: Any, model: Any) -> tuple[Tensor, Tensor]:
    """Predict for a clip with glyph text, without a picture."""
    batch, (clip,) = test_hunyuan_video.pack_of(model, slice(1))
    conditions = {name: entry.values for name, entry in batch.conditions.items()}
    with torch.no_grad():
        here = network(batch.latents_TC, torch.tensor([0.25]), batch)
    (there,) = call_hunyuan_video(external, clip[None], torch.tensor([250.0]), conditions)
    return unpatchify(here, batch.grids[0], 1, 1), there[0]


def native(count: int, block: str, rows: dict[str, str]) -> dict[str, list[str]]:
    """Return layers of the original code and the layers of diffusers that each fuses, for every number `#` of a block.

    Args:
        block: name of the block in diffusers.
        rows: layers of diffusers in the block, separated by spaces, by the layer of the original code.
    """
    return {
        layer.replace("#", str(i)): [f"{block}.{i}.{part}" for part in parts.split()]
        for i in range(count)
        for layer, parts in rows.items()
    }


JOINT_ATTENTION = {
    "double_blocks.#.img_attn.qkv": "attn.to_q attn.to_k attn.to_v",
    "double_blocks.#.txt_attn.qkv": "attn.add_q_proj attn.add_k_proj attn.add_v_proj",
    "double_blocks.#.img_attn.proj": "attn.to_out.0",
    "double_blocks.#.txt_attn.proj": "attn.to_add_out",
}
JOINT_MLP = {
    "double_blocks.#.img_mlp.0": "ff.net.0.proj",
    "double_blocks.#.img_mlp.2": "ff.net.2",
    "double_blocks.#.txt_mlp.0": "ff_context.net.0.proj",
    "double_blocks.#.txt_mlp.2": "ff_context.net.2",
}
SINGLE = {"single_blocks.#.linear1": "attn.to_q attn.to_k attn.to_v proj_mlp", "single_blocks.#.linear2": "proj_out"}
CHROMA = native(2, "transformer_blocks", {**JOINT_ATTENTION, **JOINT_MLP})
FLUX = {
    **CHROMA,
    **native(
        2,
        "transformer_blocks",
        {"double_blocks.#.img_mod.lin": "norm1.linear", "double_blocks.#.txt_mod.lin": "norm1_context.linear"},
    ),
    **native(2, "single_transformer_blocks", {**SINGLE, "single_blocks.#.modulation.lin": "norm.linear"}),
}
CHROMA |= native(3, "single_transformer_blocks", SINGLE)
GATED_MLP = {
    "double_blocks.#.img_mlp.0": "ff.linear_in",
    "double_blocks.#.img_mlp.2": "ff.linear_out",
    "double_blocks.#.txt_mlp.0": "ff_context.linear_in",
    "double_blocks.#.txt_mlp.2": "ff_context.linear_out",
}
FLUX2 = native(2, "transformer_blocks", {**JOINT_ATTENTION, **GATED_MLP}) | native(
    2,
    "single_transformer_blocks",
    {"single_blocks.#.linear1": "attn.to_qkv_mlp_proj", "single_blocks.#.linear2": "attn.to_out"},
)
QWEN_IMAGE = {
    f"transformer_blocks.{i}.{layer}": [f"transformer_blocks.{i}.{layer}"]
    for i in range(2)
    for layer in [
        *(f"attn.to_{part}" for part in ("q", "k", "v", "out.0", "add_out")),
        *(f"attn.add_{part}_proj" for part in "qkv"),
        *(f"{stream}_{layer}" for stream in ("img", "txt") for layer in ("mod.1", "mlp.net.0.proj", "mlp.net.2")),
    ]
}
SD3_LAST = {
    "joint_blocks.#.x_block.attn.qkv": "attn.to_q attn.to_k attn.to_v",
    "joint_blocks.#.x_block.attn.proj": "attn.to_out.0",
    "joint_blocks.#.x_block.mlp.fc1": "ff.net.0.proj",
    "joint_blocks.#.x_block.mlp.fc2": "ff.net.2",
    "joint_blocks.#.x_block.adaLN_modulation.1": "norm1.linear",
    "joint_blocks.#.context_block.attn.qkv": "attn.add_q_proj attn.add_k_proj attn.add_v_proj",
}
SD3 = native(3, "transformer_blocks", SD3_LAST) | native(
    2,
    "transformer_blocks",
    {
        "joint_blocks.#.x_block.attn2.qkv": "attn2.to_q attn2.to_k attn2.to_v",
        "joint_blocks.#.x_block.attn2.proj": "attn2.to_out.0",
        "joint_blocks.#.context_block.attn.proj": "attn.to_add_out",
        "joint_blocks.#.context_block.mlp.fc1": "ff_context.net.0.proj",
        "joint_blocks.#.context_block.mlp.fc2": "ff_context.net.2",
    },
)
PIXART = native(
    2,
    "transformer_blocks",
    {
        "blocks.#.attn.qkv": "attn1.to_q attn1.to_k attn1.to_v",
        "blocks.#.attn.proj": "attn1.to_out.0",
        "blocks.#.cross_attn.q_linear": "attn2.to_q",
        "blocks.#.cross_attn.kv_linear": "attn2.to_k attn2.to_v",
        "blocks.#.cross_attn.proj": "attn2.to_out.0",
        "blocks.#.mlp.fc1": "ff.net.0.proj",
        "blocks.#.mlp.fc2": "ff.net.2",
    },
)
WAN = native(
    2,
    "blocks",
    {
        **{f"blocks.#.self_attn.{part}": f"attn1.to_{part}" for part in "qkv"},
        **{f"blocks.#.cross_attn.{part}": f"attn2.to_{part}" for part in "qkv"},
        "blocks.#.self_attn.o": "attn1.to_out.0",
        "blocks.#.cross_attn.o": "attn2.to_out.0",
        "blocks.#.ffn.0": "ffn.net.0.proj",
        "blocks.#.ffn.2": "ffn.net.2",
    },
)
UNET_ATTENTIONS = [f"down_blocks.{i}.attentions.{j}" for i in range(2) for j in range(2)]
UNET_ATTENTIONS += ["mid_block.attentions.0", *(f"up_blocks.{i}.attentions.{j}" for i in (1, 2) for j in range(3))]
IN_LAYER = [f"attn{i}.to_{part}" for i in (1, 2) for part in ("q", "k", "v", "out.0")] + ["ff.net.0.proj", "ff.net.2"]
UNET = {  # kohya-ss/sd-scripts: the name of diffusers with underscores
    f"lora_unet_{layer.replace('.', '_')}": [layer]
    for block in UNET_ATTENTIONS
    for layer in [
        *(f"{block}.proj_{kind}" for kind in ("in", "out")),
        *(f"{block}.transformer_blocks.0.{name}" for name in IN_LAYER),
    ]
}


@dataclass(frozen=True)
class Case:
    """A model class of diffusers.

    Attributes:
        module: builds a small model.
        predict: returns the predictions of this package and of diffusers.
        native: layers of the original code with adapters, and the layers of diffusers that each fuses; empty if
            ComfyUI's names are not known.
        prefix: prefix of their names in ComfyUI.
        targets: layers with an adapter.
    """

    form: DiffusersFormat
    module: Callable[[], nn.Module]
    predict: Callable[[Any, Any, ModelConfig], tuple[Tensor, Tensor]]
    native: dict[str, list[str]]
    prefix: str = "diffusion_model."
    targets: tuple[str, ...] = ("layers.*.linear_*",)


CASES = {
    **{
        name: Case(FAMILIES[family].form, FAMILIES[family].small, stream, native, targets=("layers.*",))
        for name, family, native in (
            ("flux", "flux_schnell", FLUX),
            ("chroma", "chroma", CHROMA),
            ("flux2_klein", "flux2_klein", FLUX2),
            ("qwen_image", "qwen_image", QWEN_IMAGE),
        )
    },
    "sd3.5_medium": Case(
        DiffusersSD3(),
        FAMILIES["sd3.5_medium"].small,
        stream,
        SD3,
        targets=("layers.*.linear_*", "layers.*.image.modulation.linear"),
    ),
    "pixart": Case(DiffusersPixArt(), FAMILIES["pixart"].small, pixart, PIXART),
    **{
        name: Case(FAMILIES[name].form, FAMILIES[name].small, stream, {})
        for name in ("sana", "z_image", "lumina2", "prx")
    },
    "hunyuan_video": Case(DiffusersHunyuanVideo(), test_hunyuan_video.small, video, {}),
    "unet": Case(DiffusersUNet(), unet_model, unet, UNET, prefix="", targets=("*.attentions.*",)),
    "wan": Case(DiffusersWan(), FAMILIES["wan"].small, stream, WAN),
}


def product(b: Tensor, a: Tensor, weight: Tensor) -> Tensor:
    """Return B A in the shape of a weight; all three may be 1 x 1 convolutions."""
    assert a.dim() == b.dim() == weight.dim()
    return (b.flatten(1) @ a.flatten(1)).view_as(weight)


def as_comfyui(state: dict[str, Tensor], tensors: dict[str, Tensor], case: Case) -> dict[str, Tensor]:
    """Add alpha / rank times up down to the fused matrices of the original code, and split the sums."""
    found, used = dict(state), 0
    for layer, parts in case.native.items():
        key = f"{case.prefix}{layer}"
        up, down, alpha = (tensors[f"{key}.{name}"] for name in ("lora_up.weight", "lora_down.weight", "alpha"))
        weights = [state[f"{part}.weight"] for part in parts]
        matrix = torch.cat(weights)
        matrix = matrix + alpha.item() / down.shape[0] * product(up, down, matrix)
        pieces = matrix.split([len(weight) for weight in weights])
        found |= {f"{part}.weight": piece for part, piece in zip(parts, pieces)}
        used += 3
    assert used == len(tensors) > 0
    return found


def adapted(build_model: BuildModel, case: Case) -> tuple[nn.Module, ModelConfig, nn.Module, dict[str, Adapter]]:
    """Return our model with adapters, its settings, the base model of diffusers, and the exported adapters."""
    external = case.module()
    imported = case.form.read_settings(external.config)
    model, lora = imported.model, replace(LORA, targets=list(case.targets))
    rules = case.form.rules(model, parameter_shapes(model), imported.latent_size)
    base = random_weights(rules.shapes) | {n: torch.zeros(rules.shapes[n]) for n in rules.unmatched}
    shapes = parameter_shapes(replace(model, lora=lora))
    adapters = random_weights({n: shape for n, shape in shapes.items() if "lora_" in n}, seed=1, scale=0.2)
    network = load(build_model(replace(model, lora=lora)), {**base, **adapters})
    external.load_state_dict(rules.to_external(base))
    return network, model, external, to_external_layers(rules, adapters, lora.scale)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.native])
def test_exported_adapters_have_the_same_outputs(build_model: BuildModel, name: str) -> None:
    """In ComfyUI; see the last tests of this file for diffusers and peft."""
    case = CASES[name]
    network, model, external, layers = adapted(build_model, case)
    state = {name: x.clone() for name, x in external.state_dict().items()}
    external.load_state_dict(as_comfyui(state, comfyui_tensors(layers, case.form.comfyui_name), case))
    with torch.no_grad():
        here, there = case.predict(network, external, model)
    assert relative_error(here, there) <= RTOL
    external.load_state_dict(state)
    with torch.no_grad():
        here, there = case.predict(network, external, model)
    assert relative_error(here, there) > 1e-2


def test_a_layer_without_a_counterpart_is_named() -> None:
    """The patch embedding of diffusers is a convolution; the name of a text projection in ComfyUI is not known."""

    def exported(name: str, *targets: str) -> dict[str, Tensor]:
        case = CASES[name]
        imported = case.form.read_settings(case.module().config)
        rules = case.form.rules(imported.model, parameter_shapes(imported.model), imported.latent_size)
        shapes = parameter_shapes(replace(imported.model, lora=replace(LORA, targets=list(targets))))
        adapters = random_weights({n: shape for n, shape in shapes.items() if "lora_" in n})
        return comfyui_tensors(to_external_layers(rules, adapters, LORA.scale), case.form.comfyui_name)

    with pytest.raises(ConfigError, match=r"adapter of embed\.linear cannot be an adapter of pos_embed\.proj"):
        exported("pixart", "embed.linear")
    with pytest.raises(ConfigError, match=r"ComfyUI's name of caption_projection\.linear_1 is not known; train"):
        exported("pixart", "text_projection.linear_1", "layers.*")
    with pytest.raises(ConfigError, match=r"ComfyUI's name of .*to_q is not known; use --format diffusers-lora"):
        exported("sana", "layers.*")


@pytest.mark.parametrize("name", CASES)
def test_the_code_of_the_page_loads_the_adapters(
    build_model: BuildModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """The examples with a pipeline of diffusers (without its other parts) and with peft give our adapted prediction."""
    pytest.importorskip("peft")
    case, base = CASES[name], tmp_path / "base"
    network, model, external, layers = adapted(build_model, case)
    write_adapter_folder(layers, case.form, model, tmp_path / "lora")
    external.save_pretrained(base / case.form.part)
    pipeline = pipeline_class(case.form, model)
    if pipeline is not None and pipeline.reads_adapters:
        kind = getattr(diffusers, pipeline.class_name)
        parts = {**dict.fromkeys(kind._get_signature_types()), case.form.part: external}
        monkeypatch.setattr(kind, "from_pretrained", lambda folder: kind(**parts))
    blocks = page_blocks(tmp_path / "lora", base)
    loaded = [names.get(case.form.part) or names["pipeline"].components[case.form.part] for names in blocks]
    assert len(loaded) == 1 + (pipeline is not None and pipeline.reads_adapters)
    for adapted_there in loaded:
        with torch.no_grad():
            here, there = case.predict(network, adapted_there, model)
        assert relative_error(here, there) <= RTOL


def test_diffusers_reads_the_file_for_comfyui(build_model: BuildModel, tmp_path: Path) -> None:
    """The file of a UNet has the names of kohya-ss, which diffusers can read."""
    pytest.importorskip("peft")
    case = CASES["unet"]
    network, model, external, layers = adapted(build_model, case)
    save_file(comfyui_tensors(layers, case.form.comfyui_name), tmp_path / "comfyui.safetensors")
    state, _ = diffusers.StableDiffusionPipeline.lora_state_dict(str(tmp_path), weight_name="comfyui.safetensors")
    external.load_lora_adapter(state, prefix=case.form.part)
    with torch.no_grad():
        here, there = case.predict(network, external, model)
    assert relative_error(here, there) <= RTOL
