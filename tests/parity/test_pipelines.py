"""`launch.export --format pipeline`: diffusers opens the folder, and the pipeline draws the samples of our sampler."""

import ast
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from inspect import signature
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from diffusers import (
    AutoencoderDC,
    AutoencoderKL,
    AutoencoderKLFlux2,
    AutoencoderKLHunyuanVideo15,
    AutoencoderKLQwenImage,
    AutoencoderKLWan,
    DiffusionPipeline,
    FlowMatchEulerDiscreteScheduler,
    WanPipeline,
)
from torch import Tensor

from dit.batch import pixel_values
from dit.checkpoint.full_weights import read_full_weights, write_imported
from dit.checkpoint.reading import candidates, read_settings
from dit.convert.diffusers_format import TrainedModel
from dit.convert.diffusers_pipeline import PIPELINES
from dit.convert.diffusers_sampling import scheduler_config, spaced_scheduler
from dit.convert.run_record import build
from dit.encoders.text import load_text_encoders
from dit.encoders.text_config import as_conditions, check_text_encoder, config_of
from dit.encoders.vae import VAE
from dit.errors import ConfigError
from dit.inference.generator import Generator
from dit.models.base import ModelConfig
from dit.models.chroma.config import ChromaConfig
from dit.models.dit.config import DiTConfig
from dit.models.flux.config import FluxConfig
from dit.models.flux2.config import Flux2Config
from dit.models.hunyuan_video.config import HunyuanVideoConfig
from dit.models.ldm_unet.config import LDMUNetConfig
from dit.models.lumina2.config import Lumina2Config
from dit.models.prx.config import PRXConfig
from dit.models.qwen_image.config import QwenImageConfig
from dit.models.sana.config import SanaConfig
from dit.models.sd3.config import SD3Config
from dit.models.stdit.config import STDiTConfig
from dit.models.wan.config import WanConfig
from dit.models.z_image.config import ZImageConfig
from dit.objectives.base import Objective
from dit.objectives.ddpm import DDPM
from dit.objectives.flow_matching import FlowMatching
from dit.parallel.build import parameter_shapes
from dit.settings import SamplingConfig
from examples.flux2.compare import start_noise
from launch.export import main as export
from launch.export_pipeline import sampling_notes
from tests.conftest import BuildModel
from tests.parity.convert_cases import load, random_weights, relative_error
from tests.support.encoders import (
    CLIP_WIDTH,
    LANGUAGE_MODELS,
    LANGUAGE_WIDTH,
    PROJECTION,
    T5_WIDTH,
    save_byt5,
    save_clip,
    save_language_model,
    save_t5,
)

RTOL = 1e-5  # float32: scheduler coefficients of diffusers, padded texts, the autoencoder
SEED, STEPS = 5, 4
PROMPTS = ("a red circle", "blue")
SIZES = {"hidden_size": 48, "num_attention_heads": 4, "num_layers": 2}
PIXART = {**SIZES, "layer_pattern": ["full"], "qk_layernorm": False, "fps_conditioning": False, "in_channels": 4}
PIXART |= {"position_span": 6.0, "null_text": "empty"}
UNET = {"block_out_channels": [8, 16], "transformer_layers": [0, 1], "layers_per_block": 1, "num_attention_heads": 2}
UNET |= {"norm_num_groups": 4, "in_channels": 4, "context_size": CLIP_WIDTH, "null_text": "empty"}
UNET_XL = {**UNET, "context_size": 2 * CLIP_WIDTH, "pooled_size": PROJECTION, "num_attention_heads": 4}
UNET_XL |= {"head_size": 4, "transformer_layers": [0, 2], "mid_transformer_layers": 2, "null_text": "zeros"}
JOINED = "text={clip}:layer=penultimate:padded,text+pooled={projected}:layer=penultimate:padded:joined"
FLUX = {"in_channels": 4, "patch_spatial": 2, "context_size": T5_WIDTH, "pooled_size": CLIP_WIDTH, "hidden_size": 48}
FLUX |= {"num_attention_heads": 4, "num_joint_layers": 1, "num_single_layers": 2, "ffn_hidden_size": 192}
CHROMA = {name: size for name, size in FLUX.items() if name != "pooled_size"} | {"null_text": "empty"}
WAN = {**SIZES, "ffn_hidden_size": 96, "context_size": T5_WIDTH}
STREAMS = {"in_channels": 4, "hidden_size": 48, "num_attention_heads": 4, "num_joint_layers": 2, "null_text": "empty"}
FLUX2 = {**STREAMS, "num_single_layers": 2, "ffn_hidden_size": 96, "rope_axes": [2, 4, 4, 2]}
FLUX2 |= {"context_size": 3 * LANGUAGE_WIDTH}
QWEN = {**STREAMS, "in_channels": 16, "ffn_hidden_size": 192, "rope_axes": [4, 4, 4], "context_size": LANGUAGE_WIDTH}
SD3 = {**STREAMS, "position_crop": [12, 4], "pooled_size": 2 * PROJECTION, "context_size": 2 * CLIP_WIDTH + 4}
SANDWICH = {**STREAMS, "num_single_layers": 2, "rope_axes": [4, 4, 4], "context_size": LANGUAGE_WIDTH}
LUMINA2 = {**SANDWICH, "num_query_groups": 2, "ffn_hidden_size": 96}
PRX = {**SIZES, "in_channels": 4, "context_size": LANGUAGE_WIDTH, "rope_axes": [0, 6, 6], "null_text": "empty"}
SANA = {**SIZES, "in_channels": 4, "context_size": LANGUAGE_WIDTH, "num_cross_attention_heads": 2, "null_text": "empty"}
HUNYUAN_VIDEO = {**STREAMS, "context_size": LANGUAGE_WIDTH, "glyph_size": T5_WIDTH}
HUNYUAN_VIDEO |= {"image_context_size": 6, "rope_axes": [4, 4, 4]}
SD3_LINE = (
    "text+pooled={projected}:layer=penultimate:padded,text+pooled={projected}:layer=penultimate:padded:joined,"
    "text={wide_t5}:max_tokens=9:padded:appended"
)
SHIFTED = FlowMatching(time_shift=3.0)
STEPS_1000 = DDPM(discrete_steps=1000)
V = DDPM(discrete_steps=1000, schedule="scaled_linear", prediction="v")


@dataclass(frozen=True)
class Case:
    """A model, its objective, and its text encoders, in which `{t5}` and `{clip}` are replaced by folders.

    Attributes:
        guidance_norm: rescale guided tokens to the norm without guidance.
        shift: `shift_factor` of the autoencoder.
        quant: the autoencoder has convolutions before and after the latents.
        blocks: number of blocks of the autoencoder, which halves the sides between blocks.
        vae: key of `VAES`, if it is not the name of the pipeline.
        size, frames: of the latents.
    """

    pipeline: str
    model: ModelConfig
    objective: Objective
    encoders: str | None = None
    guidance: float = 2.5
    guidance_norm: bool = False
    shift: float | None = None
    quant: bool = True
    blocks: int = 3
    vae: str | None = None
    size: tuple[int, int] = (8, 8)
    frames: int = 1
    prompts: tuple[str, ...] = PROMPTS


CASES = {
    "pixart": Case("PixArtAlphaPipeline", STDiTConfig(**PIXART, context_size=T5_WIDTH), STEPS_1000, "{t5}"),
    "pixart bert": Case(
        "PixArtAlphaPipeline",
        STDiTConfig(**PIXART, context_size=384, out_channels=8),
        V,
        "all-minilm-l6-v2",
        shift=0.7,
        size=(8, 12),
    ),
    "stable diffusion": Case("StableDiffusionPipeline", LDMUNetConfig(**UNET), STEPS_1000, "{clip}:padded"),
    "stable diffusion xl": Case(
        "StableDiffusionXLPipeline", LDMUNetConfig(**UNET_XL), STEPS_1000, JOINED, shift=0.3, size=(8, 12)
    ),
    "stable diffusion xl, empty text": Case(
        "StableDiffusionXLPipeline", LDMUNetConfig(**{**UNET_XL, "null_text": "empty"}), V, JOINED, quant=False
    ),
    "dit": Case(
        "DiTPipeline",
        DiTConfig(**SIZES, in_channels=4, num_classes=3, time_frequency_shift=1),
        STEPS_1000,
        shift=-0.4,
        quant=False,
    ),
    "flux": Case(
        "FluxPipeline",
        FluxConfig(**FLUX, rope_axes=[2, 4, 6], guidance=3.5),
        FlowMatching(shift_by_tokens=[0.5, 1.15, 8, 64]),
        "text={t5}:max_tokens=9:padded,pooled={clip}",
        guidance=1.0,
        quant=False,
    ),
    "flux control": Case(
        "FluxControlPipeline",
        FluxConfig(**FLUX, rope_axes=[2, 4, 6], guidance=3.5, control_channels=4),
        FlowMatching(shift_by_tokens=[0.5, 1.15, 8, 64]),
        "text={t5}:max_tokens=9:padded,pooled={clip}",
        guidance=1.0,
        shift=0.2,
        quant=False,
        size=(8, 12),
    ),
    "chroma": Case(
        "ChromaPipeline",
        ChromaConfig(**CHROMA, approximator=[16, 24, 2], rope_axes=[2, 4, 6]),
        FlowMatching(shift_by_tokens=[0.5, 1.15, 8, 64]),
        "{t5}:max_tokens=9:padded_once",
        shift=0.2,
        quant=False,
    ),
    "wan": Case(
        "WanPipeline",
        WanConfig(**WAN, in_channels=16, null_text="empty"),
        FlowMatching(time_shift=3.0, last_time=0.2),
        "{t5}:max_tokens=9:zero_padded",
        size=(4, 6),
        frames=2,
    ),
    "wan 2.2": Case(
        "WanPipeline",
        WanConfig(**WAN, in_channels=6, null_text="empty"),
        FlowMatching(time_shift=5.0),
        "{t5}:max_tokens=9:prompt=wan:zero_padded",
        vae="wan 2.2",
        size=(4, 6),
        frames=2,
    ),
    "flux2": Case(
        "Flux2Pipeline",
        Flux2Config(**FLUX2, guidance=3.5),
        SHIFTED,
        "{mistral3}:prompt=flux2:layer=10+20+30:padded",
        guidance=1.0,
    ),
    "flux2 klein": Case(
        "Flux2KleinPipeline",
        Flux2Config(**FLUX2),
        FlowMatching(shift_by_tokens=[0.5, 1.15, 8, 64]),
        "{qwen3}:prompt=chat:layer=9+18+27:padded:max_tokens=40",
    ),
    "qwen image": Case(
        "QwenImagePipeline",
        QwenImageConfig(**QWEN),
        FlowMatching(shift_by_tokens=[0.5, 0.9, 8, 64], last_time=0.1),
        "{qwen2_5_vl}:prompt=qwen_image",
        guidance=50.0,
        guidance_norm=True,
    ),
    "sd3": Case("StableDiffusion3Pipeline", SD3Config(**SD3), SHIFTED, SD3_LINE, shift=0.2),
    "lumina2": Case(
        "Lumina2Pipeline", Lumina2Config(**LUMINA2), SHIFTED, "{gemma2}:prompt=lumina2:layer=-2", shift=0.2, blocks=4
    ),
    "z image": Case(
        "ZImagePipeline",
        ZImageConfig(**SANDWICH, ffn_hidden_size=128),
        SHIFTED,
        "{qwen3}:prompt=chat_thinking:layer=-2",
        shift=0.2,
    ),
    "prx": Case("PRXPipeline", PRXConfig(**PRX), SHIFTED, "{t5gemma}:prompt=lower_case", shift=0.2),
    "hunyuan video": Case(
        "HunyuanVideo15Pipeline",
        HunyuanVideoConfig(**HUNYUAN_VIDEO),
        FlowMatching(time_shift=5.0),
        "{qwen2_5_vl}:prompt=hunyuan_video:layer=-3:max_tokens=1000,text_2={byt5}:prompt=shown_texts",
        size=(4, 6),
        frames=2,
        prompts=('a sign "stop"', "blue"),
    ),
    "sana": Case("SanaPipeline", SanaConfig(**SANA), SHIFTED, "{gemma2}:prompt=sana:max_tokens=300", quant=False),
}
VAES = {
    "WanPipeline": (AutoencoderKLWan, {"base_dim": 8, "num_res_blocks": 1}),
    "wan 2.2": (
        AutoencoderKLWan,
        {
            **{"base_dim": 8, "decoder_base_dim": 8, "z_dim": 6, "num_res_blocks": 1, "is_residual": True},
            **{"in_channels": 12, "out_channels": 12, "patch_size": 2, "scale_factor_spatial": 16},
            **{"latents_mean": [0.1] * 6, "latents_std": [0.8] * 6},
        },
    ),
    "QwenImagePipeline": (AutoencoderKLQwenImage, {"base_dim": 8, "num_res_blocks": 1}),
    "HunyuanVideo15Pipeline": (
        AutoencoderKLHunyuanVideo15,
        {
            **{"latent_channels": 4, "block_out_channels": (8, 8, 8), "layers_per_block": 1},
            **{"spatial_compression_ratio": 4, "temporal_compression_ratio": 2},
        },
    ),
    "SanaPipeline": (
        AutoencoderDC,
        {
            **{f"{part}_block_out_channels": (8, 8, 8) for part in ("encoder", "decoder")},
            **{f"{part}_layers_per_block": (1, 1, 1) for part in ("encoder", "decoder")},
            **{f"{part}_qkv_multiscales": ((), (), ()) for part in ("encoder", "decoder")},
            **{"latent_channels": 4, "attention_head_dim": 4, "scaling_factor": 0.41407},
        },
    ),
}
"""Autoencoders of other classes than `AutoencoderKL`, by pipeline."""


def save_vae(folder: Path, case: Case) -> Path:
    """Save an autoencoder of 4 channels, or one of the class that the pipeline requires."""
    torch.manual_seed(3)
    if (name := case.vae or case.pipeline) in VAES:
        kind, settings = VAES[name]
        kind(**settings).eval().save_pretrained(folder)
        return folder
    down, up = ("DownEncoderBlock2D",) * case.blocks, ("UpDecoderBlock2D",) * case.blocks
    kinds = {"down_block_types": down, "up_block_types": up}
    sizes = {"block_out_channels": (8,) * case.blocks, "norm_num_groups": 4, "latent_channels": 4}
    if case.pipeline.startswith("Flux2"):
        model = AutoencoderKLFlux2(**sizes, **kinds).eval()
        model.bn.running_mean.normal_()
        model.bn.running_var.uniform_(0.5, 2.0)
    else:
        convolutions = {"use_quant_conv": case.quant, "use_post_quant_conv": case.quant}
        model = AutoencoderKL(**sizes, **kinds, **convolutions, scaling_factor=0.3611, shift_factor=case.shift).eval()
        if case.pipeline.startswith("Flux"):  # FluxControlPipeline samples the posterior, so its variance is ~0
            with torch.no_grad():
                model.encoder.conv_out.weight[4:], model.encoder.conv_out.bias[4:] = 0, -30
    model.save_pretrained(folder)
    return folder


ENCODERS = {
    "t5": save_t5,
    "wide_t5": partial(save_t5, width=2 * CLIP_WIDTH + 4),
    "clip": save_clip,
    "byt5": save_byt5,
    "projected": partial(save_clip, projected=True),
    **{kind: partial(save_language_model, kind) for kind in LANGUAGE_MODELS},
}


def a_run(folder: Path, case: Case) -> Path:
    """Write a run with random weights, an autoencoder and text encoders."""
    vae, names = save_vae(folder / "vae", case), set(re.findall(r"\{(\w+)\}", case.encoders or ""))
    folders = {name: ENCODERS[name](folder / name) for name in names}
    line = None if case.encoders is None else check_text_encoder(case.encoders.format(**folders)).recorded
    label = case.model.condition("label")
    classes = None if label is None else label.num_classes
    trained = TrainedModel(
        case.model,
        case.objective,
        (case.frames, *case.size),
        {"solver": "euler" if isinstance(case.objective, FlowMatching) else "ddim", "num_steps": STEPS},
        class_names=None if classes is None else [f"class {i}" for i in range(classes)],
        text_encoder=line,
    )
    own = {"guidance_scale": case.guidance, "guidance_norm": case.guidance_norm, "seed": SEED, "vae": str(vae)}
    sampling = build(SamplingConfig, {**trained.sampling, **own}, "sampling")
    write_imported(folder / "run", random_weights(parameter_shapes(case.model)), trained, sampling, "a test")
    return folder / "run"


def generator_of(run: Path, build_model: BuildModel) -> Generator:
    [folder] = candidates(run)
    config, metadata = read_settings(folder)
    return Generator(config, metadata, load(build_model(config.model), read_full_weights(folder, "weight")), 0)


def draw_samples(generator: Generator, case: Case, **sampling: Any) -> tuple[Tensor, Tensor]:
    """Return the noise for a scheduler, `[N, C, t, h, w]`, and our pictures in [0, 1], `[N, 3, T, H, W]`."""
    if case.encoders is None:
        given: Mapping[str, Any] = {"label": [2, 0]}
    else:
        encoders = load_text_encoders(generator.text_encoder or "")
        given = as_conditions(encoders.encode(case.prompts), case.model.conditions())
    vae = VAE(generator.config.sampling.vae or generator.autoencoder or "")
    if case.model.condition("control") is not None:
        given = {**given, "control": list(vae.encode(control_pictures(case)[:, :, None]))}
    latents = generator.generate(conditions=given, **sampling)
    tokens = prod(case.size) // generator.spec.patch_volume * case.frames
    objective = case.objective.at_size(tokens, case.model.token_channels)
    _, sigma = objective.path.alpha_sigma(objective.sampling_grid(STEPS)[0])
    return float(sigma) * start_noise(generator, given), vae.decode(latents) / 2 + 0.5


def control_pictures(case: Case) -> Tensor:
    """Return a control picture for each prompt, `[2, 3, H, W]` in [-1, 1], with 8-bit values."""
    height, width = (2 ** (case.blocks - 1) * side for side in case.size)
    return pixel_values(torch.randint(256, (2, 3, height, width), generator=torch.Generator().manual_seed(6)))


@pytest.fixture(autouse=True)
def on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dit.inference.generator.local_device", lambda: torch.device("cpu"))


def page_call(code: str) -> dict[str, Any]:
    """Return the keyword arguments of the pipeline call in the code of a README."""
    [call] = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Call) and node.keywords]
    return {
        str(word.arg): eval(ast.unparse(word.value), {"load_image": Path, "range": range}) for word in call.keywords
    }


@pytest.mark.parametrize("name", CASES)
def test_the_pipeline_draws_the_samples_of_the_sampler(
    build_model: BuildModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Run the code of the README in the folder, with the same noise, texts and guidance."""
    case, folder = CASES[name], tmp_path / "pipeline"
    run = a_run(tmp_path, case)
    assert export(["--checkpoint", str(run), "--raw-weights", "--format", "pipeline", "--out", str(folder)]) == 0
    generator = generator_of(run, build_model)
    noise, expected = draw_samples(generator, case)
    if case.guidance != 1:
        _, unguided = draw_samples(generator, case, guidance_scale=1.0)
        assert relative_error(unguided, expected) > 30 * RTOL  # otherwise wrong guidance would pass
    drawn = drawn_by_pipeline(folder, case, noise, monkeypatch)
    assert drawn.shape == expected.shape
    assert drawn.shape[-2:] == tuple(VAE(str(tmp_path / "vae")).geometry.space * side for side in case.size)
    assert expected.clamp(0, 1).std() > 0.01
    assert relative_error(drawn, expected.clamp(0, 1)) <= RTOL


def drawn_by_pipeline(folder: Path, case: Case, noise: Tensor, monkeypatch: pytest.MonkeyPatch) -> Tensor:
    """Return the pictures of an exported pipeline, called as in its README, `[N, 3, T, H, W]` in [0, 1]."""
    pipeline = DiffusionPipeline.from_pretrained(folder)
    assert type(pipeline).__name__ == case.pipeline
    if case.pipeline == "PRXPipeline":  # needs ftfy, which changes no prompt here
        as_it_is = SimpleNamespace(fix_text=lambda text: text)
        monkeypatch.setattr("diffusers.pipelines.prx.pipeline_prx.ftfy", as_it_is, raising=False)
    if case.pipeline == "ChromaPipeline":  # attention adds its float mask to the scores, which masks nothing
        mask_of = pipeline._prepare_attention_mask
        pipeline._prepare_attention_mask = lambda **words: mask_of(**words).bool()
    pipeline.set_progress_bar_config(disable=True)
    [code] = re.findall(r"```python\n(.*?)```", (folder / "README.md").read_text(), re.DOTALL)
    call = page_call(code)
    given = "prompt" if case.encoders else "class_labels"
    assert given in call
    call[given] = list(case.prompts) if case.encoders else [2, 0]  # a copy: ZImagePipeline writes into the list
    is_clip = case.frames > 1
    noise = noise if is_clip else noise[:, :, 0]
    if case.pipeline == "DiTPipeline":
        monkeypatch.setattr("diffusers.pipelines.dit.pipeline_dit.randn_tensor", lambda **_: noise)
        assert pipeline.get_label_ids(["class 2", "class 0"]) == [2, 0]
    else:
        call["latents"] = noise
        if case.pipeline in ("FluxPipeline", "FluxControlPipeline", "ChromaPipeline", "QwenImagePipeline"):
            call["latents"] = pipeline._pack_latents(noise, 2, case.model.in_channels, *case.size)
        elif case.pipeline.startswith("Flux2"):
            call["latents"] = pipeline._patchify_latents(noise)
    if "negative_prompt" in call:
        call["negative_prompt"] = [call["negative_prompt"]] * 2
    if "control_image" in call:
        call["control_image"] = control_pictures(case)
    calls = [call]
    if case.pipeline in ("PRXPipeline", "HunyuanVideo15Pipeline"):  # draws one prompt at a time
        calls = [{**call, "prompt": p, "latents": x[None]} for p, x in zip(call["prompt"], call["latents"])]
    outputs = [pipeline(**words, output_type="np") for words in calls]
    drawn = [torch.from_numpy(output.frames if is_clip else output.images) for output in outputs]
    pictures = torch.cat(drawn).movedim(-1, 1)
    return pictures if is_clip else pictures[:, :, None]


def refused(folder: Path, case: Case, capsys: pytest.CaptureFixture, *words: str) -> str:
    """Export; expect no output folder and one line of error, and return the line."""
    run = a_run(folder, case)
    capsys.readouterr()
    arguments = ["--checkpoint", str(run), "--raw-weights", "--format", "pipeline", "--out", str(folder / "out")]
    assert export([*arguments, *words]) == 2
    assert not (folder / "out").exists()
    [line] = capsys.readouterr().err.splitlines()
    return line


PIXART_T5, XL = CASES["pixart"], CASES["stable diffusion xl"]
OTHER_VAE = Case("", WanConfig(**WAN, in_channels=4, null_text="empty"), FlowMatching(), "{t5}:zero_padded")


@pytest.mark.parametrize(
    ("case", "said"),
    [
        (replace(PIXART_T5, objective=FlowMatching()), "runs DDPM of 1000 steps .* trained with FlowMatching"),
        (
            replace(CASES["dit"], objective=DDPM(discrete_steps=1000, network_time="log_snr")),
            "runs DDPM of 1000 steps .*network_time=time.* trained with .*network_time='log_snr'",
        ),
        *(
            (replace(CASES["sd3"], objective=FlowMatching(**times)), "runs flow matching of the velocity at all times")
            for times in ({"min_time": 0.875}, {"max_time": 0.875})
        ),
        (
            replace(PIXART_T5, model=replace(PIXART_T5.model, null_text="learned")),
            "uses the embedding of the empty text as unconditional.*null_text=empty",
        ),
        (replace(PIXART_T5, encoders=None), "needs a T5 or a BERT, and the run names no text encoder"),
        (replace(PIXART_T5, encoders="{t5}:padded"), "needs a T5 or a BERT that makes `text`, without `:padded`"),
        (replace(PIXART_T5, model=replace(PIXART_T5.model, in_channels=3)), "AutoencoderKL of 3 channels"),
        (OTHER_VAE, "WanPipeline needs an AutoencoderKLWan of 4 channels .*, and .* is a AutoencoderKL of 4"),
        (replace(CASES["wan"], encoders="{t5}"), "a UMT5 or a T5 that makes `text`, .*, with `:zero_padded`"),
        (
            replace(XL, model=replace(XL.model, null_text="learned")),
            "uses the embedding of the empty text or zeros as unconditional.*null_text=empty or zeros",
        ),
        (
            replace(XL, model=replace(XL.model, context_size=CLIP_WIDTH), encoders="text+pooled={clip}:padded"),
            "CLIP text model that makes `text`, with `:padded`, `:layer=penultimate`",
        ),
        (
            replace(XL, encoders=JOINED.replace("{projected}", "{clip}")),
            "with projection that makes `text` and `pooled`, with `:padded`, `:layer=penultimate`, `:joined`",
        ),
        (
            replace(XL, model=replace(XL.model, control_channels=2)),
            "StableDiffusionXLPipeline has no control, which this model takes",
        ),
        (
            replace(CASES["stable diffusion"], encoders="{clip}"),
            "StableDiffusionPipeline needs a CLIP text model that makes `text`, with `:padded`",
        ),
        (replace(CASES["flux"], encoders="text={t5}:padded"), "makes `pooled`"),
        (
            replace(CASES["flux2 klein"], model=Flux2Config(**{**FLUX2, "null_text": "learned"})),
            "Flux2KleinPipeline uses the embedding of the empty text as unconditional.*null_text=empty",
        ),
        (
            replace(CASES["z image"], encoders="{qwen3}:layer=-2"),
            "needs a Qwen3 that makes `text`, without `:padded`, `:prompt=chat_thinking`, `:layer=penultimate`",
        ),
        (replace(CASES["lumina2"], blocks=3), "that compresses 8 x 8 pixels, and .* compresses 4 x 4"),
    ],
    ids=[
        *(
            "objective",
            "log snr",
            "high noise",
            "low noise",
            "null",
            "no encoder",
            "padding",
            "channels",
            "vae of wan",
            "text of wan",
        ),
        *("null of xl", "one encoder", "no projection", "control", "unpadded", "no pooled text"),
        *("null of klein", "plain prompt", "compression"),
    ],
)
def test_a_run_whose_pipeline_would_draw_other_samples_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture, case: Case, said: str
) -> None:
    assert re.search(said, refused(tmp_path, case, capsys))


@pytest.mark.parametrize(("part", "cure"), [("vae", "--vae PATH"), ("t5", "--text-encoder")])
def test_a_part_that_has_moved_is_named_with_its_option(
    tmp_path: Path, capsys: pytest.CaptureFixture, part: str, cure: str
) -> None:
    run = a_run(tmp_path, PIXART_T5)
    (tmp_path / part).rename(tmp_path / "elsewhere")
    config_of.cache_clear()  # as in a new process
    capsys.readouterr()
    arguments = ["--checkpoint", str(run), "--raw-weights", "--format", "pipeline", "--out", str(tmp_path / "out")]
    assert export(arguments) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert str(tmp_path / part) in line
    assert line.endswith(f"has moved, give {cure}")


@pytest.mark.parametrize(("shift", "steps"), [(1.0, 1), (1.0, 2), (3.0, 1), (3.0, 4), (5.0, 50), (0.5, 10), (12.0, 30)])
def test_a_scheduler_without_noise_levels_gets_the_sampling_steps(shift: float, steps: int) -> None:
    """`WanPipeline` passes only the number of steps, and by default the last noise level would be 1/1000."""
    assert "sigmas" not in signature(WanPipeline.__call__).parameters
    objective = FlowMatching(time_shift=shift)
    for same in (objective, replace(objective, last_time=0.02)):
        scheduler = FlowMatchEulerDiscreteScheduler.from_config(spaced_scheduler(same, steps))
        scheduler.set_timesteps(steps)
        torch.testing.assert_close(scheduler.sigmas.double(), same.sampling_grid(steps), rtol=0, atol=1e-6)
    with pytest.raises(ConfigError, match="time_shift=60 is too large for the scheduler of diffusers in 50 steps"):
        spaced_scheduler(FlowMatching(time_shift=60.0), 50)


@pytest.mark.parametrize("steps", [1, 2, 7])
def test_a_scheduler_with_a_last_time_gets_the_sampling_steps(steps: int) -> None:
    """Stretching one step to a last time would divide by zero."""
    objective = FlowMatching(time_shift=3.0, last_time=0.02)
    scheduler = FlowMatchEulerDiscreteScheduler.from_config(scheduler_config(objective, steps))
    scheduler.set_timesteps(sigmas=[1 - i / steps for i in range(steps)])
    torch.testing.assert_close(scheduler.sigmas.double(), objective.sampling_grid(steps), rtol=0, atol=1e-6)


def test_settings_of_sampling_that_a_pipeline_lacks_are_noted() -> None:
    sampling = {"guidance_channels": 3, "guidance_rescale": 0.7, "guidance_interval": [0.2, 5.0]}
    note = "DiTPipeline is called without sampling.guidance_channels=3, guidance_rescale=0.7"
    for scale, thresholding, said in (
        (2.0, "none", [f"{note}, guidance_interval=[0.2, 5.0]"]),
        (1.0, "none", []),
        (1.0, "static", ["DiTPipeline is called without sampling.thresholding=static"]),
    ):
        settings = {**sampling, "guidance_scale": scale, "thresholding": thresholding}
        trained = TrainedModel(CASES["dit"].model, STEPS_1000, (1, 8, 8), settings)
        assert sampling_notes(PIPELINES["DiTTransformer2DModel"], trained) == said


def test_the_entry_for_an_empty_text_is_that_of_the_model(tmp_path: Path) -> None:
    """A pipeline with another null text would draw different pictures without an error."""
    for name, case in {"zeros": XL, "empty": CASES["stable diffusion xl, empty text"]}.items():
        run = a_run(tmp_path / name, case)
        folder = tmp_path / name / "out"
        assert export(["--checkpoint", str(run), "--raw-weights", "--format", "pipeline", "--out", str(folder)]) == 0
        index = json.loads((folder / "model_index.json").read_text())
        assert index["force_zeros_for_empty_prompt"] is (name == "zeros")
        assert index["text_encoder_2"] == ["transformers", "CLIPTextModelWithProjection"]


def test_a_run_without_an_autoencoder_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """`--vae identity` has no autoencoder that the pipeline could load."""
    assert "AutoencoderKL" in refused(tmp_path, PIXART_T5, capsys, "--vae", "identity")


def test_the_parts_can_be_imported_again(tmp_path: Path) -> None:
    """The folder of the transformer has the record of the export; the padded class table keeps the class names."""
    from launch.import_weights import main as import_weights

    run, folder = a_run(tmp_path, CASES["dit"]), tmp_path / "pipeline"
    assert export(["--checkpoint", str(run), "--raw-weights", "--format", "pipeline", "--out", str(folder)]) == 0
    words = ["--from", str(folder / "transformer"), "--format", "diffusers", "--out", str(tmp_path / "back")]
    assert import_weights(words) == 0
    [checkpoint] = candidates(tmp_path / "back")
    config, metadata = read_settings(checkpoint)
    assert (config.model.num_classes, metadata["class_names"]) == (1000, ["class 0", "class 1", "class 2"])
    index = json.loads((folder / "model_index.json").read_text())
    assert index["id2label"] == {"0": "class 0", "1": "class 1", "2": "class 2"}
