"""Named models and their parts for overrides: `model=dit_xl`, `model.routing=tread`."""

from functools import partial

import nemo_run as run

from dit.models.autoencoder.config import AutoencoderConfig
from dit.models.base import ModelConfig
from dit.models.ddpm_unet.config import DDPMUNetConfig
from dit.models.dit.config import DiTConfig
from dit.models.dit_cross.config import DiTCrossConfig
from dit.models.edm2_unet.config import EDM2UNetConfig
from dit.models.flux.config import FluxConfig
from dit.models.ldm_unet.config import LDMUNetConfig
from dit.models.lora_config import LoRAConfig
from dit.models.moviegen.config import MovieGenConfig
from dit.models.prx.config import PRXConfig
from dit.models.routing_config import RoutingConfig
from dit.models.sana.config import SanaConfig
from dit.models.stdit.config import STDiTConfig
from dit.models.streams.families import Flux2Config, Lumina2Config, QwenImageConfig, SD3Config, ZImageConfig
from dit.models.wan.config import WanConfig
from recipes.base import part

_model = partial(part, ModelConfig)

dit_s = _model("dit_s", DiTConfig, hidden_size=384, num_layers=12, num_attention_heads=6, num_classes=1000)
"""DiT-S: 12 layers of width 384, 6 heads; latents of 4 channels, patch 2, 1000 classes."""

dit_b = _model("dit_b", DiTConfig, hidden_size=768, num_layers=12, num_attention_heads=12, num_classes=1000)
"""DiT-B: 12 layers of width 768, 12 heads; otherwise as dit_s."""

dit_l = _model("dit_l", DiTConfig, hidden_size=1024, num_layers=24, num_attention_heads=16, num_classes=1000)
"""DiT-L: 24 layers of width 1024, 16 heads; otherwise as dit_s."""

dit_xl = _model("dit_xl", DiTConfig, hidden_size=1152, num_layers=28, num_attention_heads=16, num_classes=1000)
"""DiT-XL: 28 layers of width 1152, 16 heads; otherwise as dit_s."""


@run.cli.factory(target=ModelConfig)
def lightningdit_xl() -> run.Config[DiTConfig]:
    """LightningDiT-XL/1 (675 M): DiT-XL with RMSNorm, SwiGLU and rotary positions; 32 latent channels, patch 1."""
    model = dit_xl()
    model.in_channels, model.patch_spatial, model.time_scale = 32, 1, 1.0
    model.activation, model.ffn_hidden_size, model.rms_norm = "swiglu", 3072, True
    model.position_embedding, model.rope_axes = "rope_3d", [0, 36, 36]
    return model


rit_xl = _model(
    "rit_xl", lightningdit_xl, in_channels=384, qk_layernorm=True, class_tokens=[32, 8], teacher_token_size=384
)
"""RiT-XL (677 M): LightningDiT-XL on 384 channels, QK-layernorm, 32 class tokens from layer 8, teacher's token."""


dit_dh_xl = _model("dit_dh_xl", lightningdit_xl, in_channels=768, wide_head=[2, 2048, 16])
"""DiT-DH-XL (839 M) of RAE: LightningDiT-XL on 768 channels, with a head of 2 layers of width 2048, 16 heads."""


@run.cli.factory(target=ModelConfig)
def sr_dit_b1() -> run.Config[DiTConfig]:
    """SR-DiT-B/1 (133 M): DiT-B on 32 channels, patch 1, with SPRINT, value residual, RMSNorm and QK-layernorm."""
    model = dit_b()
    model.in_channels, model.patch_spatial, model.time_scale, model.routing = 32, 1, 1.0, sprint()
    model.rms_norm, model.qk_layernorm, model.teacher_token_size = True, True, 768
    model.value_residual = True
    model.position_embedding, model.rope_axes = "rope_3d", [0, 32, 32]
    return model


@run.cli.factory(target=ModelConfig)
def jit_b16() -> run.Config[DiTConfig]:
    """JiT-B/16 (131 M): DiT-B on patches of 16 x 16 pixels, with 32 class tokens from layer 4 on; 1000 classes."""
    model = dit_b()
    model.in_channels, model.patch_spatial, model.bottleneck_size, model.class_tokens = 3, 16, 128, [32, 4]
    model.activation, model.ffn_hidden_size, model.rms_norm, model.qk_layernorm = "swiglu", 2048, True, True
    model.position_embedding, model.rope_axes, model.time_scale = "rope_3d", [0, 32, 32], 1.0
    return model


dit_cross_s = _model("dit_cross_s", DiTCrossConfig, hidden_size=384, num_layers=12, num_attention_heads=6)
"""DiT-S with text cross-attention: 12 layers of width 384, 6 heads; 16 latent channels, text of 1024."""

dit_cross_b = _model("dit_cross_b", DiTCrossConfig, hidden_size=768, num_layers=12, num_attention_heads=12)
"""DiT-B with text cross-attention: 12 layers of width 768, 12 heads; otherwise as dit_cross_s."""

dit_cross_l = _model("dit_cross_l", DiTCrossConfig, hidden_size=1024, num_layers=24, num_attention_heads=16)
"""DiT-L with text cross-attention: 24 layers of width 1024, 16 heads; otherwise as dit_cross_s."""

dit_cross_xl = _model("dit_cross_xl", DiTCrossConfig, hidden_size=1152, num_layers=28, num_attention_heads=16)
"""DiT-XL with text cross-attention: 28 layers of width 1152, 16 heads; otherwise as dit_cross_s."""

dit_cross_7b = _model("dit_cross_7b", DiTCrossConfig, hidden_size=3072, num_layers=32, num_attention_heads=24)
"""DiT-7B with text cross-attention: 32 layers of width 3072, 24 heads; otherwise as dit_cross_s."""

dit_cross_28b = _model("dit_cross_28b", DiTCrossConfig, hidden_size=6144, num_layers=32, num_attention_heads=48)
"""DiT-28B with text cross-attention: 32 layers of width 6144, 48 heads; otherwise as dit_cross_s."""

moviegen_1b = _model(
    "moviegen_1b", MovieGenConfig, hidden_size=2048, num_layers=16, num_attention_heads=32, ffn_hidden_size=8192
)
"""MovieGen-1B (1.54 B): 16 layers of width 2048, 32 heads in 8 groups; 16 latent channels, text of 1024.

Deviation of all sizes: queries and keys are normalised (`qk_layernorm=True`), which neither the paper's nor NeMo's
Movie Gen does.
"""

moviegen_3b = _model(
    "moviegen_3b", MovieGenConfig, hidden_size=3072, num_layers=28, num_attention_heads=24, ffn_hidden_size=8192
)
"""MovieGen-3B (5.02 B): 28 layers of width 3072, 24 heads in 8 groups."""

moviegen_5b = _model(
    "moviegen_5b", MovieGenConfig, hidden_size=3072, num_layers=32, num_attention_heads=24, ffn_hidden_size=8192
)
"""MovieGen-5B (5.74 B): 32 layers of width 3072, 24 heads in 8 groups."""

moviegen_30b = _model(
    "moviegen_30b", MovieGenConfig, hidden_size=6144, num_layers=48, num_attention_heads=48, ffn_hidden_size=16384
)
"""MovieGen-30B (33.4 B): 48 layers of width 6144, 48 heads in 8 groups."""

flux_dev = _model("flux_dev", FluxConfig, num_joint_layers=19, num_single_layers=38)
"""FLUX.1 (11.9 B): 19 joint and 38 single-stream blocks of width 3072, 24 heads; text of 4096, pooled of 768."""

flux_two_layers = _model("flux_two_layers", FluxConfig, num_joint_layers=1, num_single_layers=1)
"""FLUX.1 cut to one block of each kind (535 M); otherwise as flux_dev."""

flux2_dev = _model("flux2_dev", Flux2Config, guidance=4.0)
"""FLUX.2 dev (32.2 B): 8 joint and 48 single-stream blocks of width 6144, 48 heads; text of 15360."""

flux2_klein_9b = _model(
    "flux2_klein_9b",
    Flux2Config,
    num_single_layers=24,
    hidden_size=4096,
    num_attention_heads=32,
    ffn_hidden_size=12288,
    context_size=12288,
)
"""FLUX.2 klein 9B (9.08 B): 8 joint and 24 single-stream blocks of width 4096, 32 heads; text of 12288."""

flux2_klein_4b = _model(
    "flux2_klein_4b",
    Flux2Config,
    num_joint_layers=5,
    num_single_layers=20,
    hidden_size=3072,
    num_attention_heads=24,
    ffn_hidden_size=9216,
    context_size=7680,
)
"""FLUX.2 klein 4B (3.88 B): 5 joint and 20 single-stream blocks of width 3072, 24 heads; text of 7680."""

qwen_image_20b = _model("qwen_image_20b", QwenImageConfig, num_joint_layers=60)
"""Qwen-Image (20.4 B): 60 joint blocks of width 3072, 24 heads; text of 3584."""

qwen_image_edit_20b = _model("qwen_image_edit_20b", QwenImageConfig, num_joint_layers=60, clean_reference_time=True)
"""Qwen-Image-Edit-2511 (20.4 B): as Qwen-Image, and references have the time 0."""

prx_1_2b = _model("prx_1_2b", PRXConfig)
"""PRX (1.17 B): 16 layers of width 1792, 28 heads; text of 2304."""

sana_1_6b = _model("sana_1_6b", SanaConfig)
"""SANA 1.6B (1.60 B): 20 layers of width 2240, 70 heads of linear attention; 32 latent channels, text of 2304."""

sd3_5_large = _model("sd3_5_large", SD3Config, num_joint_layers=38)
"""Stable Diffusion 3.5 large (8.06 B): 38 joint blocks of width 2432, 38 heads; texts of 4096, pooled 2048."""

sd3_5_medium = _model(
    "sd3_5_medium",
    SD3Config,
    hidden_size=1536,
    num_attention_heads=24,
    num_joint_layers=24,
    num_dual_layers=13,
    position_crop=[384, 64],
)
"""Stable Diffusion 3.5 medium (2.24 B): 24 joint blocks of width 1536, 13 with a second attention."""

lumina2_2b = _model("lumina2_2b", Lumina2Config, num_single_layers=26)
"""Lumina-Image 2.0 (2.61 B): 2 refiners and 26 blocks of width 2304, 24 heads in 8 groups; text of 2304."""

z_image_6b = _model("z_image_6b", ZImageConfig, num_single_layers=30)
"""Z-Image (6.15 B): 2 refiners and 30 blocks of width 3840, 30 heads; text of 2560."""

wan_1_3b = _model("wan_1_3b", WanConfig, hidden_size=1536, num_layers=30, num_attention_heads=12, ffn_hidden_size=8960)
"""Wan 2.1 1.3B (1.42 B): 30 layers of width 1536, 12 heads; 16 latent channels, text of 4096."""

wan_14b = _model("wan_14b", WanConfig, hidden_size=5120, num_layers=40, num_attention_heads=40, ffn_hidden_size=13824)
"""Wan 2.1 14B (14.3 B): 40 layers of width 5120, 40 heads; otherwise as wan_1_3b."""

wan_2_2_ti2v_5b = _model(
    "wan_2_2_ti2v_5b",
    WanConfig,
    in_channels=48,
    hidden_size=3072,
    num_layers=30,
    num_attention_heads=24,
    ffn_hidden_size=14336,
)
"""Wan 2.2 TI2V 5B (5.00 B): 30 layers of width 3072, 24 heads; 48 latent channels; clips from text or a picture."""


ec_dit_1b = _model("ec_dit_1b", moviegen_1b, num_experts=64, moe_ffn_hidden_size=1024, moe_capacity_factor=8.0)
"""EC-DiT-1B (7.18 B, of which a token meets 1.54 B): MovieGen-1B with 64 experts of width 1024 per layer.

Expert-choice routing at capacity factor 8: a layer has the work of one feed-forward of width 8192.
"""


stdit_s = _model("stdit_s", STDiTConfig, hidden_size=384, num_layers=24, num_attention_heads=6, position_span=32.0)
"""ST-DiT-S (59 M): 12 pairs of a spatial and a temporal layer of width 384, 6 heads; 4 latent channels.

As in Open-Sora, text comes through a projection and fixed positions span 32 indices at every resolution.
"""

stdit_xl = _model("stdit_xl", STDiTConfig, hidden_size=1152, num_layers=56, num_attention_heads=16, position_span=32.0)
"""ST-DiT-XL (1.20 B): 28 pairs of width 1152, 16 heads; otherwise as stdit_s."""


stdit_xl_full = _model("stdit_xl_full", stdit_xl, num_layers=28, layer_pattern=["spatial+full+temporal"])
"""ST-DiT-XL with full attention (915 M): 28 layers, each spatial, full and temporal; otherwise as stdit_xl.

The layer of NeMo's ST-DiT (release 2.1.0). Deviations: there cross-attention is between full and temporal
attention, and all sub-layers share one shift, scale and gate; here it follows the three, and each has its own.
"""


stdit_3b = _model("stdit_3b", STDiTConfig, hidden_size=2048, num_layers=48, num_attention_heads=16, position_span=32.0)
"""ST-DiT-3B (3.26 B) of the NeMo proposal: 24 pairs of width 2048, 16 heads; otherwise as stdit_s."""

stdit_3b_opensora = _model(
    "stdit_3b_opensora", STDiTConfig, hidden_size=1872, num_layers=56, num_attention_heads=26, position_span=32.0
)
"""ST-DiT-3B (3.18 B) of Open-Sora: 28 pairs of width 1872, 26 heads; otherwise as stdit_s."""

autoencoder_kl_f8 = _model("autoencoder_kl_f8", AutoencoderConfig)
"""KL-f8 autoencoder (83.7 M) of latent diffusion: 8 times smaller sides, 4 channels, width 128 to 512."""

autoencoder_vq_f4 = _model(
    "autoencoder_vq_f4",
    AutoencoderConfig,
    patch_spatial=4,
    latent_channels=3,
    block_out_channels=[128, 256, 512],
    codebook_size=8192,
)
"""VQ-f4 autoencoder (55.3 M) of latent diffusion: sides / 4, 3 channels, 8,192 codes, width 128 to 512."""

ddpm_unet = _model("ddpm_unet", DDPMUNetConfig)
"""Conditional DDPM UNet (15.66 M): pictures of 3 channels, 10 classes, 64 to 256 channels at 4 resolutions."""

ddpm_unet_512 = _model("ddpm_unet_512", DDPMUNetConfig, mid_out_channels=[512, 512, 256])
"""Conditional DDPM UNet with 512 channels in the middle (23.34 M); otherwise as ddpm_unet."""

edm2_s = _model("edm2_s", EDM2UNetConfig)
"""EDM2-S (280 M): latents of 4 channels, 1000 classes, 192 to 768 channels at 4 resolutions."""

lora = part(LoRAConfig, "lora", LoRAConfig)
"""Low-rank adapters of rank 16 in attention and MLP of every block; `model.lora=lora model.lora.rank=4`."""

tread = part(RoutingConfig, "tread", RoutingConfig)
"""In training, half of the tokens skip all layers but the first 2 and the last 3 (TREAD); `model.routing=tread`."""

sprint = part(RoutingConfig, "sprint", RoutingConfig, share=0.75, last_layers=2, rejoin="fused", path_dropout=0.05)
"""In training, 75 % of the tokens skip all layers but 2 and 2, then a linear layer fuses both paths (SPRINT)."""

ldm_unet = _model("ldm_unet", LDMUNetConfig, null_text="empty")
"""Latent-diffusion UNet (860 M), that of Stable Diffusion v1: 4 latent channels, text of 768, width 320 to 1280."""

ldm_unet_small = _model("ldm_unet_small", LDMUNetConfig, block_out_channels=[128, 256, 512, 512], null_text="empty")
"""Latent-diffusion UNet of 128 to 512 channels (142 M); otherwise as ldm_unet."""

sdxl_unet = _model(
    "sdxl_unet",
    LDMUNetConfig,
    context_size=2048,
    head_size=64,
    pooled_size=1280,
    null_text="zeros",
    block_out_channels=[320, 640, 1280],
    transformer_layers=[0, 2, 10],
    mid_transformer_layers=10,
)
"""Latent-diffusion UNet (2.57 B), that of Stable Diffusion XL: text of 2048, pooled of 1280, width 320 to 1280."""
