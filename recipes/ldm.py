"""Latent diffusion by text: the UNets of Stable Diffusion v1 and XL on prepared latents and CLIP embeddings.

`tiny_autoencoder` is a small form of the autoencoder that computes such latents.
"""

import nemo_run as run

from dit.models.autoencoder.config import AutoencoderConfig
from dit.models.ldm_unet.config import LDMUNetConfig
from dit.objectives.autoencoding import Autoencoding
from dit.parallel.dims import ParallelConfig
from dit.settings import SamplingConfig
from energon_data.dataset import EnergonData
from energon_data.mock import MockData
from recipes.base import base_run, registered, short_run, variant
from recipes.components import ddpm_latent
from recipes.models import ldm_unet, sdxl_unet

LATENT_SIDE = 256 // 8
CLIP_TOKENS = 77
# Only the first prompt is published; the others name published subjects in our words.
PROMPTS = [
    "A photo of a woman skiing on a white mountain.",
    "a squirrel eating a burger",
    "a red train on its way through the mountains",
    "a dog in a green field by a lake",
]


@registered
def ldm_cc3m_256() -> run.Partial:
    """Stable Diffusion v1's UNet (860 M) on Conceptual Captions, 256 px latents and CLIP texts: 8 x 80 GB.

    The data are made from pictures with captions by `python -m energon_data.prepare images --in pictures --size 256
    --aspect square --vae models/vae --text-encoder models/clip-vit-large-patch14:padded --out data/cc3m_latents_256`.
    Model, table of noise, warm-up and average are those of the published Stable Diffusion v1; the learning rate and the
    batch are ours. Weights go to diffusers and come from there (`launch.export`, `launch.import_weights`).
    """
    data = run.Config(
        EnergonData,
        path="data/cc3m_latents_256",
        bucket_by_shape=True,
        max_tokens_per_sample=LATENT_SIDE**2,
        max_text_tokens=CLIP_TOKENS,
    )
    sampling = run.Config(SamplingConfig, solver="ddim", num_steps=50, guidance_scale=7.5, prompts=PROMPTS)
    recipe = base_run(ldm_unet(), data, ddpm_latent(), sampling)
    recipe.optimizer.weight_decay, recipe.schedule.warmup_steps = 1e-2, 10_000
    recipe.parallel = run.Config(ParallelConfig)
    training = recipe.training
    training.num_steps, training.micro_batch_size, training.global_batch_size = 240_000, 32, 256
    training.validation_interval = training.sample_interval = recipe.checkpoint.interval = 5000
    return recipe


ldm_cc3m_256_small = variant("ldm_cc3m_256_small", ldm_cc3m_256, model={"block_out_channels": [128, 256, 512, 512]})
"""Latent-diffusion UNet of 128 to 512 channels (142 M), otherwise as ldm_cc3m_256: one 24 GB GPU or more.

The code is that of the large one: a model for one GPU, and for trying out data.
"""


sdxl_1024 = variant(
    "sdxl_1024",
    ldm_cc3m_256,
    model=sdxl_unet,
    data={"path": "data/sdxl_latents_1024", "max_tokens_per_sample": (1024 // 8) ** 2},
    parallel={"data_parallel": "fsdp"},
    training={"micro_batch_size": 2, "recompute": "full"},
    objective={"noise_offset": 0.05},
    sampling={"guidance_scale": 5.0},
)
"""Stable Diffusion XL's UNet (2.57 B) on 1024 px latents, two texts and a pooled one: 8 x 80 GB.

The data store for each picture `text`, the embeddings of SDXL's two encoders side by side (768 + 1,280 wide),
`pooled` (1,280 wide) and `size_and_crop`. They are made by `python -m energon_data.prepare images --in pictures
--size 1024 --aspect square --vae models/sdxl --text-encoder models/sdxl --out data/sdxl_latents_1024`. Model, table
of noise and offset noise are those of the published base model. Weights go to diffusers and come from there
(`launch.export`, `launch.import_weights`).
"""


@registered
def tiny_ldm_unet() -> run.Partial:
    """Latent-diffusion UNet with 16 and 32 channels, 8 x 8 latents with texts: any machine.

    One residual block at each resolution, a transformer at the higher one and at the bottom.
    """
    recipe = ldm_cc3m_256()
    recipe.model = run.Config(
        LDMUNetConfig,
        context_size=32,
        block_out_channels=[16, 32],
        layers_per_block=1,
        transformer_layers=[1, 0],
        num_attention_heads=4,
        norm_num_groups=4,
    )
    recipe.data = run.Config(MockData, shapes=["1x8x8"], num_streams=2)
    recipe.parallel.data_parallel = "ddp"
    recipe.optimizer.lr = 3e-3
    recipe.schedule.warmup_steps = 5
    recipe.training.ema_decay = 0.99
    recipe.sampling.prompts = None
    return short_run(recipe)


@registered
def tiny_sdxl_unet() -> run.Partial:
    """Small form of Stable Diffusion XL's UNet, 8 x 8 latents with texts: any machine.

    No transformer at the higher resolution, two layers at the lower one and at the bottom.
    """
    recipe = tiny_ldm_unet()
    recipe.model.transformer_layers, recipe.model.mid_transformer_layers, recipe.model.head_size = [0, 2], 2, 8
    recipe.model.pooled_size, recipe.model.null_text = 24, "zeros"
    return recipe


@registered
def tiny_autoencoder() -> run.Partial:
    """KL autoencoder with 8 and 16 channels, from 16 px to 8 x 8 latents: any machine.

    One residual block at each resolution, and attention at the lower one.
    """
    recipe = tiny_ldm_unet()
    recipe.model = run.Config(
        AutoencoderConfig, patch_spatial=2, block_out_channels=[8, 16], layers_per_block=1, norm_num_groups=4
    )
    recipe.objective = run.Config(Autoencoding)
    recipe.sampling.guidance_scale = 1.0
    recipe.data.shapes = ["1x16x16"]
    return recipe
