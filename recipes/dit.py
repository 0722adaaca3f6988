"""DiT with text cross-attention from S to 7B.

Names, sizes and settings are those of NeMo: EDM on latents of 16 channels, patch 2, text embeddings of width 1024
(T5-large).
"""

import math
from typing import Optional

import nemo_run as run

from dit.models.base import ModelConfig
from dit.objectives.base import Objective
from dit.objectives.edm import EDM
from dit.objectives.flow_matching import FlowMatching
from dit.optimizer.schedules import Constant, Cosine
from dit.parallel.dims import ParallelConfig
from dit.settings import CheckpointConfig, OptimizerConfig, SamplingConfig
from energon_data.dataset import EnergonData
from energon_data.mock import MockData
from recipes.base import base_run, registered, variant
from recipes.models import dit_cross_7b, dit_cross_b, dit_cross_l, dit_cross_s, dit_cross_xl


def _on_texts(
    model: run.Config[ModelConfig],
    objective: run.Config[Objective],
    sampling: run.Config[SamplingConfig],
    *,
    dropout: float,
) -> run.Partial:
    """Return NeMo's length, batch and checkpoints for an objective; `dropout` is the share of texts left out."""
    model.context_dropout = dropout
    data = run.Config(EnergonData, path="data/latents", max_tokens_per_sample=2048)
    recipe = base_run(model, data, objective, sampling)
    recipe.training.num_steps, recipe.training.global_batch_size = 500_000, 32
    recipe.training.validation_interval = recipe.checkpoint.interval = 1_000
    recipe.checkpoint.keep_last = 3
    return recipe


def text_conditional(model: run.Config[ModelConfig]) -> run.Partial:
    """Return NeMo's base setting for one model: EDM, up to 2048 tokens a sample, batch 32, AdamW at a constant 1e-4.

    NeMo divides latents of unit variance by 2, draws log sigma from N(0, 1), and samples from sigma = 80 to 0.002. Here
    latents are not divided, so every sigma is doubled. NeMo computes cond + 7 (cond - uncond), which is
    uncond + 8 (cond - uncond), so `guidance_scale` is 8. One sample in five is trained without text, and the network
    reads log(sigma) / 4 without a factor of 1000, as in NeMo; an objective whose times are in [0, 1], such as
    `objective=flow_matching`, needs `model.time_scale=1000`. Deviation: samples are drawn with averaged weights (decay
    0.9999).

    Source: NeMo diffusion collection v2.1.0, recipe `pretrain`; its other recipes change this one.
    """
    model.time_scale = 1.0
    objective = run.Config(EDM, sigma_data=1.0, p_mean=math.log(2), p_std=1.0, sigma_min=0.004, sigma_max=160.0)
    sampling = run.Config(SamplingConfig, solver="heun", num_steps=35, guidance_scale=8.0)
    return _on_texts(model, objective, sampling, dropout=0.2)


def flow_conditional(
    model: run.Config[ModelConfig], *, guidance_scale: float, num_steps: int = 50, time_shift: float = 1.0
) -> run.Partial:
    """Return flow matching with logit-normal times and Euler steps; one text in ten is dropped."""
    objective = run.Config(FlowMatching, time_distribution="logit_normal", time_shift=time_shift)
    sampling = run.Config(SamplingConfig, solver="euler", num_steps=num_steps, guidance_scale=guidance_scale)
    return _on_texts(model, objective, sampling, dropout=0.1)


def as_large_model(recipe: run.Partial, *, lr: float = 1e-4) -> run.Partial:
    """Give a recipe the optimizer of NeMo's large models: warm-up over 100 steps, betas 0.9 and 0.95, decay 0.1."""
    recipe.optimizer = run.Config(OptimizerConfig, lr=lr, beta1=0.9, beta2=0.95, weight_decay=0.1)
    recipe.schedule = run.Config(Constant, warmup_steps=100)
    return recipe


def on_images(
    model: run.Config[ModelConfig], micro_batch: int, batch: int, *, min_score: Optional[float] = None
) -> run.Partial:
    """Return the recipe of a large model on images of up to 260 tokens; the images of a micro-batch have one shape.

    Images with an aesthetic score below `min_score` are left out.
    """
    recipe = as_large_model(text_conditional(model))
    recipe.data = run.Config(EnergonData, path="data/latents_256", max_tokens_per_sample=260, bucket_by_shape=True)
    recipe.data.min_aesthetic_score = min_score
    recipe.training.micro_batch_size, recipe.training.global_batch_size = micro_batch, batch
    return recipe


def as_mock(recipe: run.Partial, latent: tuple[int, int, int], *, text_tokens: int = 512) -> run.Partial:
    """Feed a recipe 15 steps of synthetic latents (frames, height, width) at a constant rate, without checkpoints."""
    frames, height, width = latent
    recipe.data = run.Config(
        MockData, frames=frames, height=height, width=width, text_tokens=text_tokens, dataset_size=16
    )
    recipe.schedule = run.Config(Constant)
    recipe.training.num_steps, recipe.training.log_interval, recipe.training.validation_interval = 15, 1, 0
    recipe.training.ema_decay = None
    recipe.checkpoint = run.Config(CheckpointConfig, interval=0, resume="never")
    return recipe


def on_tensor_parallel(recipe: run.Partial, size: int) -> run.Partial:
    """Spread a recipe's layers over `size` GPUs with sequence parallelism."""
    recipe.parallel.tensor_model_parallel_size, recipe.parallel.sequence_parallel = size, True
    return recipe


def with_fsdp(recipe: run.Partial) -> run.Partial:
    """Shard a recipe's weights, gradients and optimizer over the data-parallel GPUs (Megatron-FSDP)."""
    recipe.parallel.data_parallel = "fsdp"
    return recipe


pretrain_s = variant("pretrain", lambda: text_conditional(dit_cross_s()))
"""DiT-S with text (51 M), NeMo's base recipe: EDM on images and clips of up to 2048 tokens: one GPU or more.

Micro-batches of one sample, 32 per step. For samples of mixed length set `data.max_tokens_per_pack`.
"""


pretrain_b = variant("pretrain_b", lambda: text_conditional(dit_cross_b()))
"""DiT-B with text (185 M), otherwise as pretrain: one GPU or more.

Weights, gradients, optimizer and average take 4 GiB, 3 of them spread over the GPUs.
"""


pretrain_l = variant("pretrain_l", lambda: text_conditional(dit_cross_l()))
"""DiT-L with text (634 M), otherwise as pretrain: one 80 GB GPU or more.

Weights, gradients, optimizer and average take 13 GiB, 9 of them spread over the GPUs.
"""


pretrain_xl = variant("pretrain_xl", lambda: text_conditional(dit_cross_xl()))
"""DiT-XL with text (927 M), otherwise as pretrain: one 80 GB GPU or more.

Weights, gradients, optimizer and average take 19 GiB, 14 of them spread over the GPUs.
"""


@registered
def pretrain_xl_dfm() -> run.Partial:
    """DiT-XL with text and low-rank adaLN (675 M), packs of 8000 tokens, two per step: one or two 80 GB GPUs.

    The modulation goes through 256 features, which takes 252 M parameters off DiT-XL and no work off its tokens.
    Cosine schedule over 10,000 steps to a tenth of the rate, warm-up 2000. The weight decay is that of the published
    schedule, 0.033, which replaces the optimizer's 0.1.

    Source: NVIDIA-NeMo/DFM, recipe `dit`, and NVIDIA-NeMo/Megatron-Bridge, recipes/utils/optimizer_utils.py.
    """
    recipe = text_conditional(dit_cross_xl())
    recipe.model.adaln_lora_rank = 256
    recipe.data = run.Config(EnergonData, path="data/latents", max_tokens_per_pack=8000, packing_buffer_size=40)
    recipe.optimizer = run.Config(OptimizerConfig, lr=0.9e-4, beta2=0.95, eps=1e-5, weight_decay=0.033)
    recipe.schedule = run.Config(Cosine, warmup_steps=2000, min_lr=0.9e-5)
    recipe.training.num_steps, recipe.training.global_batch_size = 10_000, 2
    return recipe


pretrain_7b = variant("pretrain_7b", lambda: on_images(dit_cross_7b(), 9, 4608))
"""DiT-7B with text (7.19 B) on images of 256 px: 16 x 80 GB or more.

Weights and gradients take 40 GiB on every GPU; the optimizer (80 GiB) and the average (27 GiB) are spread over all
of them. Steps have 512 micro-batches: on 128 GPUs each makes 4.
"""


@registered
def pretrain_7b_pack() -> run.Partial:
    """DiT-7B with text (7.19 B) on packs of 2304 tokens (9 images): 16 x 80 GB or more.

    As pretrain_7b, but images of any shape share a pack and no token is padding.
    """
    recipe = pretrain_7b()
    recipe.data = run.Config(EnergonData, path="data/latents_256", max_tokens_per_pack=2304, packing_buffer_size=1000)
    recipe.training.micro_batch_size, recipe.training.global_batch_size = 1, 512
    return recipe


@registered
def pretrain_7b_256p_joint() -> run.Partial:
    """DiT-7B with text (7.19 B) on 256 px images and clips of up to 8192 tokens: 16 x 80 GB or more.

    The second stage: it starts from the weights of pretrain_7b. Learning rate 6e-5, 256 samples per step.
    """
    recipe = on_tensor_parallel(as_large_model(text_conditional(dit_cross_7b()), lr=6e-5), 2)
    recipe.data = run.Config(EnergonData, path="data/latents_256_joint", max_tokens_per_sample=8192)
    recipe.checkpoint.start_from = "runs/pretrain_7b"
    recipe.training.global_batch_size = 256
    return recipe


pretrain_7b_256p_joint_pack = variant(
    "pretrain_7b_256p_joint_pack",
    pretrain_7b_256p_joint,
    data=run.Config(EnergonData, path="data/latents_256_joint", max_tokens_per_pack=10_240, packing_buffer_size=1000),
    training={"global_batch_size": 128},
)
"""DiT-7B with text (7.19 B) on packs of 10,240 tokens, 256 px: 16 x 80 GB or more, 55 GiB each.

As pretrain_7b_256p_joint, images and clips, but images fill the room that clips leave. 128 packs per step.
"""


tiny_dit_cross = variant("tiny_dit_cross", lambda: as_tiny(text_conditional(dit_cross_s())))
"""2-layer DiT with cross-attention, images and clips with texts: any machine.

Packs of 128 tokens, 20 steps; the loss falls by a tenth or more.
"""


def as_tiny(recipe: run.Partial) -> run.Partial:
    """Shrink a text recipe to two layers of width 64 and 20 steps on packs of synthetic images and clips."""
    model = recipe.model
    model.hidden_size, model.num_layers, model.num_attention_heads = 64, 2, 4
    model.in_channels, model.context_size = 4, 32
    return in_seconds(recipe)


def in_seconds(recipe: run.Partial) -> run.Partial:
    """Give a recipe of a tiny model 20 steps on packs of synthetic images and clips."""
    recipe.data = run.Config(
        MockData,
        shapes=["1x8x8", "4x8x8", "1x8x12"],
        text_tokens=8,
        max_tokens_per_pack=128,
        pack_multiple_of=8,
        num_streams=2,
    )
    recipe.optimizer = run.Config(OptimizerConfig, lr=1e-3)
    recipe.schedule = run.Config(Cosine, warmup_steps=5)
    recipe.parallel = run.Config(ParallelConfig)
    recipe.training.num_steps, recipe.training.global_batch_size, recipe.training.precision = 20, 4, "fp32"
    recipe.training.ema_decay, recipe.training.log_interval, recipe.training.validation_interval = 0.99, 1, 0
    recipe.checkpoint = run.Config(CheckpointConfig, interval=10)
    return recipe
