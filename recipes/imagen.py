"""Imagen's UNets on pixels: a base model at 64 px, and super-resolution from 64 to 256 and from 256 to 1024 px.

Sizes and settings are those of NVIDIA NeMo's Imagen; a deviation is named where it is. The data are pictures with
embedded captions:

    python -m energon_data.prepare images PICTURES --text-encoder text=google-t5/t5-11b --out data/imagen_images

A super-resolution model makes its small picture from the large one while it reads.
"""

from typing import Any

import nemo_run as run

from dit.models.base import ModelConfig
from dit.models.efficient_unet.config import EfficientUNetConfig
from dit.models.unet.config import UNetConfig
from dit.objectives.ddpm import DDPM
from dit.objectives.edm import EDM
from dit.optimizer.schedules import Constant
from dit.parallel.dims import ParallelConfig
from dit.settings import SamplingConfig
from energon_data.dataset import EnergonData
from energon_data.mock import MockData
from recipes.base import base_run, part, registered, short_run, variant

TEXT_TOKENS = 128

imagen_base_500m = part(
    ModelConfig,
    "imagen_base_500m",
    UNetConfig,
    hidden_size=256,
    channel_multipliers=[1, 2, 3, 4],
    num_res_blocks=[3, 3, 3, 3],
    attention_levels=[1, 2, 3],
)
"""Imagen's regular UNet at 64 px (524,897,540): 256 to 1024 channels, fused attention at 8, 16, 32 px."""


imagen_base_2b = part(ModelConfig, "imagen_base_2b", imagen_base_500m, hidden_size=512, condition_size=2048)
"""Imagen's regular UNet at 64 px (2,171,162,116): 512 to 2048 channels; otherwise as imagen_base_500m."""

imagen_sr_400m = part(
    ModelConfig,
    "imagen_sr_400m",
    UNetConfig,
    hidden_size=128,
    channel_multipliers=[1, 2, 4, 6, 6],
    num_res_blocks=[2, 2, 3, 4, 3],
    attention_levels=[3, 4],
    low_resolution_factor=4,
    low_resolution_kernel="opencv",
    noise_augmentation=True,
)
"""Imagen's regular UNet from 64 to 256 px (408,350,468): 128 to 768 channels, fused attention at 16 and 32 px."""

imagen_sr_600m = part(
    ModelConfig, "imagen_sr_600m", EfficientUNetConfig, noise_augmentation=True, low_resolution_kernel="opencv"
)
"""Imagen's Efficient UNet, four times larger pictures (646,023,428): 128 to 1024 channels, fused attention."""


def _imagen(model: run.Config[ModelConfig], pixels: int, micro_batch: int, batch: int) -> run.Partial:
    """Return NeMo's setting for one model: EDM, AdamW at 1e-4 after a warm-up of 10,000 steps, 1.25 M steps.

    Source: NVIDIA NeMo 2.0, examples/multimodal/text_to_image/imagen; batches and steps: NeMo-Framework-Launcher.
    """
    data = run.Config(
        EnergonData,
        path="data/imagen_images",
        max_text_tokens=TEXT_TOKENS,
        bucket_by_shape=True,
        resize_side=pixels,
        crop_size=[pixels, pixels],
        random_crop=False,
    )
    sampling = run.Config(SamplingConfig, solver="heun", num_steps=30, guidance_scale=7.5, thresholding="dynamic")
    recipe = base_run(model, data, run.Config(EDM), sampling)
    recipe.optimizer.weight_decay, recipe.schedule.warmup_steps = 0.01, 10_000
    training = recipe.training
    training.num_steps, training.micro_batch_size, training.global_batch_size = 1_250_000, micro_batch, batch
    recipe.checkpoint.interval = 1_000
    return recipe


def _super_resolution(
    model: run.Config[ModelConfig], micro_batch: int, batch: int, *, pixels: int = 256
) -> run.Partial:
    """Return a super-resolution run: pictures of `pixels` on the smaller side, crops of 256 px, none smaller."""
    recipe = _imagen(model, pixels, micro_batch, batch)
    recipe.data.crop_size, recipe.data.min_side = [256, 256], pixels
    recipe.sampling.num_steps = 20
    recipe.sampling.guidance_scale = 8.0 if pixels == 256 else 7.5
    return recipe


def _tiny(kind: type[ModelConfig], **settings: Any) -> run.Config[ModelConfig]:
    """Return a UNet with 32 and 64 channels."""
    levels = {"channel_multipliers": [1, 2], "num_res_blocks": [1, 1], "attention_levels": [1]}
    return run.Config(kind, hidden_size=32, context_size=32, head_size=16, norm_num_groups=8, **levels, **settings)


@registered
def tiny_imagen() -> run.Partial:
    """Imagen's regular UNet with 32 and 64 channels, 16 px, texts: any machine.

    Both levels of the size, fused attention at the lower one; 20 steps, in which the loss falls by a third or more.
    """
    recipe = imagen_500m_res_64()
    recipe.model = _tiny(UNetConfig, condition_size=32)
    return _in_seconds(recipe)


@registered
def tiny_imagen_sr() -> run.Partial:
    """Imagen's Efficient UNet with 32 and 64 channels, from 4 to 16 px: any machine.

    The small picture is made from the large one and noised at a separate level; 20 steps, in which the loss falls.
    """
    recipe = imagen_600m_res_256()
    recipe.model = _tiny(EfficientUNetConfig, noise_augmentation=True)
    return _in_seconds(recipe)


def _in_seconds(recipe: run.Partial) -> run.Partial:
    recipe.data = run.Config(MockData, height=16, width=16, num_streams=2)
    recipe.schedule = run.Config(Constant, warmup_steps=5)
    recipe.optimizer.lr = 2e-3
    recipe.parallel = run.Config(ParallelConfig)
    recipe.sampling.num_steps = 4
    return short_run(recipe)


imagen_500m_res_64 = variant("imagen_500m_res_64", lambda: _imagen(imagen_base_500m(), 64, 128, 4096))
"""Imagen's base model (525 M) at 64 px, EDM: 32 x 80 GB.

1.25 M steps, as NeMo's launcher. On another number of GPUs the micro-batches of a step change, its pictures do not.
"""


imagen_500m_res_64_edm = variant("imagen_500m_res_64_edm", lambda: _imagen(imagen_base_500m(), 64, 48, 48))
"""Imagen's base model (525 M) at 64 px: one 80 GB GPU or two.

Otherwise as imagen_500m_res_64; the setting of NeMo's base64-500m-edm.
"""


imagen_500m_res_64_ddpm_online = variant(
    "imagen_500m_res_64_ddpm_online",
    lambda: _imagen(imagen_base_500m(), 64, 48, 48),
    model={"stable_attention": True},
    objective=run.Config(DDPM, schedule="cosine", prediction="noise", network_time="log_snr"),
    data={"online_text_encoder": "text=google-t5/t5-11b", "online_precision": "bf16"},
    sampling={"solver": "ancestral", "num_steps": 250},
)
"""Imagen's base model (525 M) by DDPM in continuous time, captions embedded in every step: one GPU.

Stable attention; the network predicts the noise on the cosine schedule and gets the log SNR. The GPU also has the
encoder of T5-11B (1024 wide, 4.8 B parameters in bf16). The setting of base64-500m_online_encoding.
"""


imagen_2b_res_64 = variant(
    "imagen_2b_res_64", lambda: _imagen(imagen_base_2b(), 64, 32, 2048), training={"num_steps": 2_500_000}
)
"""Imagen's larger base model (2.17 B) at 64 px, EDM: 64 x 80 GB.

2.5 M steps, as NeMo's launcher. Adam's states are sharded over the data-parallel GPUs.
"""


imagen_400m_res_256 = variant("imagen_400m_res_256", lambda: _super_resolution(imagen_sr_400m(), 16, 2048))
"""Imagen's regular super-resolution (408 M) from 64 to 256 px: 128 x 80 GB.

The published table claims 429 M for this structure; see imagen_400m_res_256_doc429m.
"""


@registered
def imagen_400m_res_256_doc429m() -> run.Partial:
    """Imagen's regular super-resolution (429 M) with more blocks: 128 x 80 GB.

    2, 4, 4, 4, 3 blocks: the nearest structure to the count that is claimed for imagen_400m_res_256.
    """
    recipe = _super_resolution(imagen_sr_400m(), 16, 2048)
    recipe.model.num_res_blocks = [2, 4, 4, 4, 3]
    return recipe


@registered
def imagen_450m_res_256_stacked() -> run.Partial:
    """Imagen's regular super-resolution (569 M) with stacked attention: one 80 GB GPU.

    No noise on the small picture. NeMo calls this setting sr256-450m-edm.
    """
    recipe = _super_resolution(imagen_sr_400m(), 16, 16)
    recipe.model.attention_type, recipe.model.noise_augmentation = "stacked", False
    return recipe


imagen_600m_res_256 = variant("imagen_600m_res_256", lambda: _super_resolution(imagen_sr_600m(), 64, 4096))
"""Imagen's Efficient UNet (646 M) from 64 to 256 px: 64 x 80 GB.

Fused attention, as in the published table; NeMo's launcher has stacked attention, see imagen_600m_res_256_stacked.
"""


@registered
def imagen_600m_res_256_stacked() -> run.Partial:
    """Imagen's Efficient UNet (700 M) with stacked attention: one 80 GB GPU.

    No noise on the small picture. The setting of NeMo's sr256-600m-edm.
    """
    recipe = _super_resolution(imagen_sr_600m(), 32, 32)
    recipe.model.attention_type, recipe.model.noise_augmentation = "stacked", False
    return recipe


@registered
def imagen_600m_res_1024() -> run.Partial:
    """Imagen's Efficient UNet (639 M) from 256 to 1024 px, trained on crops of 256 px: 64 x 80 GB.

    Cross-attention, with the backward pass for half precision; 4096 crops per step. The setting of NeMo's sr1024-600m.
    """
    recipe = _super_resolution(imagen_sr_600m(), 64, 4096, pixels=1024)
    recipe.model.attention_type, recipe.model.stable_attention = "cross", True
    return recipe


@registered
def imagen_400m_res_1024() -> run.Partial:
    """Imagen's Efficient UNet (288 M) with narrower levels from 256 to 1024 px, DDPM: 64 x 80 GB.

    Continuous time, the small picture clean. The published table claims 427 M for this structure; see
    imagen_400m_res_1024_doc427m.
    """
    recipe = _super_resolution(imagen_sr_600m(), 64, 4096, pixels=1024)
    recipe.model.channel_multipliers, recipe.model.num_res_blocks = [1, 1, 2, 4, 8], [1, 2, 4, 8, 8]
    recipe.model.attention_type, recipe.model.attention_levels = "cross", [4]
    recipe.model.noise_augmentation = False
    recipe.objective = run.Config(DDPM, schedule="cosine", prediction="noise", network_time="log_snr")
    recipe.sampling.solver = "ancestral"
    return recipe


@registered
def imagen_400m_res_1024_doc427m() -> run.Partial:
    """Imagen's Efficient UNet (427 M) with more blocks from 256 to 1024 px, EDM: 64 x 80 GB.

    3, 4, 4, 6, 8 blocks and cross-attention at the last level: a structure of the count that is claimed for
    imagen_400m_res_1024.
    """
    recipe = _super_resolution(imagen_sr_600m(), 64, 4096, pixels=1024)
    recipe.model.channel_multipliers, recipe.model.num_res_blocks = [1, 2, 4, 6, 8], [3, 4, 4, 6, 8]
    recipe.model.attention_type, recipe.model.attention_levels = "cross", [4]
    recipe.model.noise_augmentation = False
    return recipe
