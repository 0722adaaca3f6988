"""FLUX, Qwen-Image, Stable Diffusion 3, Lumina 2, Z-Image: flow matching on images, most of 1024 px.

Sizes and settings of FLUX.1 are NeMo's, sizes of the others those of diffusers. A sample needs a text; of FLUX.1 and
Stable Diffusion 3 also a pooled text embedding (`pooled.npy`).
"""

import nemo_run as run

from dit.models.base import ModelConfig
from dit.models.flux.config import FluxConfig
from dit.models.streams.families import ChromaConfig
from dit.objectives.flow_matching import FlowMatching
from dit.optimizer.schedules import Constant
from dit.settings import OptimizerConfig
from energon_data.dataset import EnergonData
from recipes.base import part, registered, variant
from recipes.dit import as_mock, flow_conditional, in_seconds, on_tensor_parallel, with_fsdp
from recipes.models import (
    flux2_dev,
    flux2_klein_4b,
    flux2_klein_9b,
    flux_dev,
    flux_two_layers,
    lumina2_2b,
    qwen_image_20b,
    sd3_5_large,
    sd3_5_medium,
    z_image_6b,
)

IMAGE_1024 = (1, 128, 128)
"""Latent (frames, height, width) of 4096 tokens."""


chroma_9b = part(ModelConfig, "chroma_9b", ChromaConfig)
"""Chroma (8.90 B): FLUX.1 with a network of 278 M that computes all modulations; text of 4096."""


def flux(model: run.Config[ModelConfig]) -> run.Partial:
    """Return NeMo's setting of FLUX.1: micro-batches of one sample, two per step, AdamW at 1e-4, logit-normal times.

    Deviations: texts are left out for one sample in ten, and samples are drawn with averaged weights (decay 0.9999);
    both are this project's choice.

    Source: NeMo 2.x, recipes `flux_12b` and `flux_535m`; times: Esser et al. 2024, arXiv:2403.03206, section 3.1.
    """
    recipe = flow_conditional(model, guidance_scale=3.5)
    recipe.training.num_steps, recipe.training.global_batch_size = 1_168_251, 2
    return recipe


def _at_1024(
    model: run.Config[ModelConfig],
    data: str,
    *,
    tensor: int = 1,
    context: int = 1,
    batch: int = 8,
    time_shift: float = 1.0,
) -> run.Partial:
    """Return a recipe on images of 1024 px with FSDP; layers are spread over `tensor` GPUs, tokens over `context`."""
    recipe = with_fsdp(flux(model))
    if tensor > 1:
        on_tensor_parallel(recipe, tensor)
    recipe.parallel.context_parallel_size = context
    recipe.data = run.Config(EnergonData, path=f"data/{data}", max_tokens_per_sample=4096, bucket_by_shape=True)
    recipe.training.global_batch_size = batch
    recipe.objective.time_shift = time_shift
    return recipe


@registered
def tiny_flux() -> run.Partial:
    """FLUX of width 64, one block of each kind, images and clips with texts: any machine.

    Packs of 128 tokens, 20 steps; the loss falls by a tenth or more.
    """
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "ffn_hidden_size": 128, "rope_axes": [4, 6, 6]}
    conditions = {"in_channels": 4, "context_size": 32, "pooled_size": 16}
    model = run.Config(FluxConfig, num_joint_layers=1, num_single_layers=1, **sizes, **conditions)
    return in_seconds(flux(model))


flux_535m = variant("flux_535m", lambda: as_mock(flux(flux_two_layers()), IMAGE_1024, text_tokens=256))
"""FLUX.1 cut to one block of each kind (535 M) on synthetic images of 1024 px, 15 steps: one 24 GB GPU.

For measurements, and to check a machine. `--dryrun` estimates 10 GiB.
"""


flux_12b = variant("flux_12b", lambda: _at_1024(flux_dev(), "latents_1024", tensor=2, context=2, batch=2))
"""FLUX.1 (11.9 B) on images of 1024 px: 8 x 80 GB.

`--dryrun` estimates 43 GiB on each GPU.
"""


@registered
def flux_mlperf() -> run.Partial:
    """MLPerf Training's FLUX.1 (11.9 B): 256 px, 512 tokens with the text, 512 images per step, FSDP: 8 x 80 GB.

    Target: a loss of 0.586 at eight equally spaced times (`launch.evaluate --metric loss`) on 29,696 pictures of COCO,
    after 7.08 to 7.60 M samples in 20 runs of the reference in bf16. A checkpoint follows every 262,144 samples. Data:
    1,099,776 pictures of CC12M, prepared with `--size 256 --aspect square --vae models/flux --text-encoder
    text=models/flux/text_encoder_2:max_tokens=256:padded --text-encoder pooled=models/flux/text_encoder`, and COCO as
    their split `val`. Times are uniform, as in the reference. Deviations: a dropped text is a learned one, not the
    empty text; latents are the mean of the VAE's distribution, from which the reference draws in every step; biases and
    norms have no weight decay.

    Source: mlcommons/training, text_to_image, which trains with pytorch/torchtitan at 9603aa83; mlcommons/logging,
    rcps_flux1.json of training 6.0, row of batch 512.
    """
    recipe = with_fsdp(flux(flux_dev()))
    recipe.objective, recipe.sampling.guidance_scale = run.Config(FlowMatching), 5.0
    recipe.data = run.Config(
        EnergonData, path="data/cc12m_256", max_text_tokens=256, bucket_by_shape=True, validation_samples=29_696
    )
    recipe.optimizer = run.Config(OptimizerConfig, lr=2e-4, beta2=0.95, weight_decay=0.1)
    recipe.schedule = run.Config(Constant, warmup_steps=1600)
    training = recipe.training
    training.num_steps, training.global_batch_size, training.micro_batch_size = 20_480, 512, 8
    training.validation_interval = recipe.checkpoint.interval = 512
    training.ema_decay = None
    return recipe


flux2_32b = variant("flux2_32b", lambda: _at_1024(flux2_dev(), "latents_1024_flux2", tensor=4, batch=16))
"""FLUX.2 dev (32.2 B) on images of 1024 px: 16 x 80 GB.

`--dryrun` estimates 60 GiB on each GPU. The network gets a guidance scale of 4, as the published one. Texts: layers
10, 20 and 30 of Mistral-3, stacked.
"""

flux2_klein_9b_1024 = variant(
    "flux2_klein_9b_1024", lambda: _at_1024(flux2_klein_9b(), "latents_1024_klein_9b", tensor=2)
)
"""FLUX.2 klein 9B (9.08 B) on images of 1024 px: 8 x 80 GB.

`--dryrun` estimates 39 GiB on each GPU. Texts: three layers of Qwen3-8B, stacked.
"""

flux2_klein_4b_1024 = variant("flux2_klein_4b_1024", lambda: _at_1024(flux2_klein_4b(), "latents_1024_klein_4b"))
"""FLUX.2 klein 4B (3.88 B) on images of 1024 px: 8 x 80 GB.

`--dryrun` estimates 28 GiB on each GPU. Texts: three layers of Qwen3-4B, stacked.
"""

qwen_image_1024 = variant(
    "qwen_image_1024", lambda: _at_1024(qwen_image_20b(), "latents_1024_qwen_image", tensor=4, batch=16)
)
"""Qwen-Image (20.4 B) on images of 1024 px: 16 x 80 GB.

Texts: the last layer of Qwen2.5-VL 7B, without the tokens of the template.
"""

sd3_5_large_1024 = variant(
    "sd3_5_large_1024", lambda: _at_1024(sd3_5_large(), "latents_1024_sd3", tensor=2, time_shift=3.0)
)
"""Stable Diffusion 3.5 large (8.06 B) on images of 1024 px, TP 2 + SP, FSDP, 8 images per step: 8 x 80 GB.

`--dryrun` estimates 33 GiB on each GPU. Times are shifted by 3, as published. Texts: 77 tokens of both CLIP models,
joined along the width and padded to 4096, then those of T5-XXL.
"""

sd3_5_medium_1024 = variant("sd3_5_medium_1024", lambda: _at_1024(sd3_5_medium(), "latents_1024_sd3", time_shift=3.0))
"""Stable Diffusion 3.5 medium (2.24 B) on images of 1024 px, FSDP, 8 images per step: 8 x 80 GB.

`--dryrun` estimates 16 GiB on each GPU. Times and texts as in `sd3_5_large_1024`.
"""

lumina2_1024 = variant("lumina2_1024", lambda: _at_1024(lumina2_2b(), "latents_1024_lumina2", time_shift=6.0))
"""Lumina-Image 2.0 (2.61 B) on images of 1024 px, FSDP, 8 images per step: 8 x 80 GB.

`--dryrun` estimates 26 GiB on each GPU. Times are shifted by 6, as the published sampler. Texts: the layer
before the last of Gemma 2 2B.
"""

z_image_1024 = variant("z_image_1024", lambda: _at_1024(z_image_6b(), "latents_1024_z_image", time_shift=3.0))
"""Z-Image (6.15 B) on images of 1024 px, FSDP, 8 images per step: 8 x 80 GB.

`--dryrun` estimates 46 GiB on each GPU. Times are shifted by 3, as the published sampler. Texts: the layer before
the last of Qwen3-4B.
"""
