"""Runs whose pipelines are compared with diffusers: models, autoencoders and text encoders with random weights."""

import re
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from diffusers import (
    AutoencoderDC,
    AutoencoderKL,
    AutoencoderKLFlux2,
    AutoencoderKLHunyuanVideo15,
    AutoencoderKLQwenImage,
    AutoencoderKLWan,
)

from dit.checkpoint.full_weights import write_imported
from dit.convert.diffusers_format import TrainedModel
from dit.convert.run_record import build
from dit.encoders.text_config import check_text_encoder
from dit.models.base import ModelConfig
from dit.models.dit.config import DiTConfig
from dit.models.flux.config import FluxConfig
from dit.models.hunyuan_video.config import HunyuanVideoConfig
from dit.models.ldm_unet.config import LDMUNetConfig
from dit.models.prx.config import PRXConfig
from dit.models.sana.config import SanaConfig
from dit.models.stdit.config import STDiTConfig
from dit.models.streams.families import (
    ChromaConfig,
    Flux2Config,
    Lumina2Config,
    QwenImageConfig,
    SD3Config,
    ZImageConfig,
)
from dit.models.wan.config import WanConfig
from dit.objectives.base import Objective
from dit.objectives.ddpm import DDPM
from dit.objectives.flow_matching import FlowMatching
from dit.parallel.build import parameter_shapes
from dit.settings import SamplingConfig
from tests.parity.convert_cases import random_weights
from tests.support.encoders import (
    CLIP_WIDTH,
    DC_AUTOENCODER,
    LANGUAGE_MODELS,
    LANGUAGE_WIDTH,
    PROJECTION,
    T5_WIDTH,
    autoencoder_blocks,
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
BY_TOKENS = FlowMatching(shift_by_tokens=[0.5, 1.15, 8, 64])
STEPS_1000 = DDPM(discrete_steps=1000)
V = DDPM(discrete_steps=1000, schedule="scaled_linear", prediction="v")


@dataclass(frozen=True)
class Case:
    """A model, its objective, and its text encoders, in which `{t5}` and `{clip}` are replaced by folders.

    Attributes:
        guidance_norm: rescale guided tokens to the norm without guidance.
        rescale: `sampling.guidance_rescale`.
        shift: `shift_factor` of the autoencoder.
        quant: the autoencoder has convolutions before and after the latents.
        blocks: number of blocks of the autoencoder, which halves the sides between blocks.
        vae: key of `VAES`, if it is not the name of the pipeline.
        size, frames: of the latents.
        clean_parts: see `TrainedModel`.
    """

    pipeline: str
    model: ModelConfig
    objective: Objective
    encoders: str | None = None
    guidance: float = 2.5
    guidance_norm: bool = False
    rescale: float = 0.0
    shift: float | None = None
    quant: bool = True
    blocks: int = 3
    vae: str | None = None
    size: tuple[int, int] = (8, 8)
    frames: int = 1
    prompts: tuple[str, ...] = PROMPTS
    clean_parts: tuple[str, ...] = ()


FLUX1 = Case(
    "FluxPipeline",
    FluxConfig(**FLUX, rope_axes=[2, 4, 6], guidance=3.5),
    BY_TOKENS,
    "text={t5}:max_tokens=9:padded,pooled={clip}",
    guidance=1.0,
    quant=False,
)
KLEIN = Case(
    "Flux2KleinPipeline", Flux2Config(**FLUX2), BY_TOKENS, "{qwen3}:prompt=chat:layer=9+18+27:padded:max_tokens=40"
)
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
        "StableDiffusionXLPipeline", LDMUNetConfig(**UNET_XL), STEPS_1000, JOINED, rescale=0.7, shift=0.3, size=(8, 12)
    ),
    "stable diffusion xl, empty text": Case(
        "StableDiffusionXLPipeline",
        LDMUNetConfig(**{**UNET_XL, "null_text": "empty"}),
        replace(V, zero_terminal_snr=True),
        JOINED,
        rescale=0.7,
        quant=False,
    ),
    "dit": Case(
        "DiTPipeline",
        DiTConfig(**SIZES, in_channels=4, num_classes=3, time_frequency_shift=1),
        STEPS_1000,
        shift=-0.4,
        quant=False,
    ),
    "flux": FLUX1,
    "flux control": replace(
        FLUX1,
        pipeline="FluxControlPipeline",
        model=replace(FLUX1.model, control_channels=4),
        shift=0.2,
        size=(8, 12),
    ),
    "flux kontext": replace(FLUX1, pipeline="FluxKontextPipeline", shift=0.2, size=(8, 12), clean_parts=("reference",)),
    "chroma": Case(
        "ChromaPipeline",
        ChromaConfig(**CHROMA, approximator=[16, 24, 2], rope_axes=[2, 4, 6]),
        BY_TOKENS,
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
    "flux2 klein": KLEIN,
    # The pipeline edits pictures of at least 64 pixels.
    "flux2 klein edit": replace(KLEIN, size=(16, 16), clean_parts=("reference",)),
    "flux2 klein distilled": replace(KLEIN, objective=SHIFTED, guidance=1.0),
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
    "SanaPipeline": (AutoencoderDC, DC_AUTOENCODER),
}
"""Autoencoders of other classes than `AutoencoderKL`, by pipeline."""


def save_vae(folder: Path, case: Case) -> Path:
    """Save an autoencoder of 4 channels, or one of the class that the pipeline requires."""
    torch.manual_seed(3)
    if (name := case.vae or case.pipeline) in VAES:
        kind, settings = VAES[name]
        kind(**settings).eval().save_pretrained(folder)
        return folder
    sizes = {**autoencoder_blocks(*(8,) * case.blocks), "norm_num_groups": 4, "latent_channels": 4}
    if case.pipeline.startswith("Flux2"):
        model = AutoencoderKLFlux2(**sizes).eval()
        model.bn.running_mean.normal_()
        model.bn.running_var.uniform_(0.5, 2.0)
    else:
        convolutions = {"use_quant_conv": case.quant, "use_post_quant_conv": case.quant}
        model = AutoencoderKL(**sizes, **convolutions, scaling_factor=0.3611, shift_factor=case.shift).eval()
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
        clean_parts=list(case.clean_parts),
    )
    own = {"guidance_scale": case.guidance, "guidance_norm": case.guidance_norm, "seed": SEED, "vae": str(vae)}
    own["guidance_rescale"] = case.rescale
    sampling = build(SamplingConfig, {**trained.sampling, **own}, "sampling")
    write_imported(folder / "run", random_weights(parameter_shapes(case.model)), trained, sampling, "a test")
    return folder / "run"
