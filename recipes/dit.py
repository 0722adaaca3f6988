"""DiT: the original class-conditional sizes on ImageNet, and DiT with text cross-attention from S to 7B.

The second family has NeMo's names, sizes and settings: EDM on latents of 16 channels, patch 2, text embeddings of width
1024 (T5-large). Counts of GPUs follow from the layout and from the memory that `--dryrun` estimates; none of these runs
has been made at full size here. More GPUs raise the data-parallel size.
"""

import math

import nemo_run as run

from dit.models.base import ModelConfig
from dit.models.dit.config import DiTConfig
from dit.objectives.alignment import Alignment
from dit.objectives.ddpm import DDPM
from dit.objectives.edm import EDM
from dit.objectives.flow_matching import FlowMatching
from dit.optimizer.schedules import Constant, Cosine
from dit.parallel.dims import ParallelConfig
from dit.settings import (
    CheckpointConfig,
    LoggingConfig,
    OptimizerConfig,
    SamplingConfig,
    TrainingConfig,
)
from dit.training.pretrain import pretrain
from energon_data.dataset import EnergonData
from energon_data.mock import MockData
from recipes.models import (
    dit_b,
    dit_cross_7b,
    dit_cross_b,
    dit_cross_l,
    dit_cross_s,
    dit_cross_xl,
    dit_l,
    dit_s,
    dit_xl,
    jit_b16,
    lightningdit_xl,
)


def _imagenet(name: str, model: run.Config[DiTConfig]) -> run.Partial:
    """Return the published training setting of class-conditional DiT at patch 2 for one model size.

    Latents 4 x 32 x 32 (256 px through the Stable Diffusion VAE, times 0.18215), 256 tokens, AdamW at a constant 1e-4,
    EMA 0.9999, label dropout 0.1, batch 256, noise prediction on the linear 1000-step table. Deviations: the network
    predicts the noise only, the original also learns the variance; and nothing flips pictures at random, for the latent
    of a mirrored picture is not the mirrored latent. For the original's flips (probability 0.5) the data need every
    picture twice, encoded as it is and mirrored (energon_data/README.md).

    Source: Peebles and Xie 2023, arXiv:2212.09748, Section 4; facebookresearch/DiT for the constants.
    """
    return run.Partial(
        pretrain,
        model=model,
        data=run.Config(EnergonData, path="data/imagenet_latents_256"),
        objective=run.Config(DDPM, schedule="linear", discrete_steps=1000, prediction="noise"),
        optimizer=run.Config(OptimizerConfig, lr=1e-4, weight_decay=0.0),
        schedule=run.Config(Constant),
        parallel=run.Config(ParallelConfig, overlap_grad_reduce=True, overlap_param_gather=True),
        training=run.Config(
            TrainingConfig,
            run_dir=f"runs/{name}",
            num_steps=400_000,
            micro_batch_size=32,
            global_batch_size=256,
            precision="bf16",
            ema_decay=0.9999,
            log_interval=100,
            validation_interval=5_000,
            sample_interval=10_000,
        ),
        checkpoint=run.Config(CheckpointConfig, interval=5_000, keep_every=50_000),
        logging=run.Config(LoggingConfig),
        sampling=run.Config(SamplingConfig, solver="ddim", num_steps=50, guidance_scale=4.0),
    )


@run.cli.factory(target=pretrain)
def dit_s2_imagenet() -> run.Partial:
    """DiT-S/2 (33 M) on ImageNet 256 px latents: one GPU or more.

    Deviations of all four sizes: noise prediction without the learned variance, and random flips only if the data hold
    every picture twice, encoded as it is and mirrored. The smallest published size; the paper reports FID 68.4 after
    400 k steps without guidance.
    """
    return _imagenet("dit_s2_imagenet", dit_s())


@run.cli.factory(target=pretrain)
def dit_b2_imagenet() -> run.Partial:
    """DiT-B/2 (130 M) on ImageNet 256 px latents: one GPU or more.

    The paper reports FID 43.5 after 400 k steps without guidance. Deviations: see dit_s2_imagenet.
    """
    return _imagenet("dit_b2_imagenet", dit_b())


@run.cli.factory(target=pretrain)
def dit_l2_imagenet() -> run.Partial:
    """DiT-L/2 (458 M) on ImageNet 256 px latents: 8 GPUs, 11 GiB each.

    The paper reports FID 23.3 after 400 k steps without guidance. Deviations: see dit_s2_imagenet.
    """
    return _imagenet("dit_l2_imagenet", dit_l())


@run.cli.factory(target=pretrain)
def dit_xl2_imagenet() -> run.Partial:
    """DiT-XL/2 (675 M) on ImageNet 256 px latents: 8 GPUs, 15 GiB each.

    The paper reports FID 19.5 after 400 k steps without guidance, 2.27 after 7 M steps with guidance 1.5.
    Deviations: see dit_s2_imagenet.
    """
    return _imagenet("dit_xl2_imagenet", dit_xl())


@run.cli.factory(target=Alignment)
def repa() -> run.Config[Alignment]:
    """Align the tokens after layer 8 with DINOv2-B (REPA), `objective.alignment=repa` of flow matching."""
    return run.Config(Alignment)


@run.cli.factory(target=pretrain)
def sit_xl2_imagenet() -> run.Partial:
    """SiT-XL/2 (675 M) on ImageNet 256 px latents: 8 GPUs, 15 GiB each.

    DiT-XL/2 with flow matching. REPA's paper quotes FID 8.61 for it after 7 M steps (1,400 epochs), without guidance.
    The published samples are of 250 Euler-Maruyama steps; those here are of 50 steps of Heun's method. Flips: see
    dit_s2_imagenet. An epoch takes 912 PFLOP, or 350 s on 8 H100 (planned: `--dryrun --world-size 8 --device h100`).

    Source: Ma et al. 2024, arXiv:2401.08740.
    """
    recipe = _imagenet("sit_xl2_imagenet", dit_xl())
    recipe.objective = run.Config(FlowMatching)
    recipe.sampling.solver = "heun"
    return recipe


@run.cli.factory(target=pretrain)
def sit_xl2_repa() -> run.Partial:
    """SiT-XL/2 (675 M) aligned with DINOv2-B (REPA) on ImageNet 256 px latents: 8 GPUs, 15 GiB each.

    The samples need features of the teacher (`energon_data.prepare --teacher`, 384 KiB each). The paper reports FID 7.9
    after 400 k steps (80 epochs) without guidance, which take 7.8 hours on 8 H100 (planned, 70 ms per step).

    Source: Yu et al. 2024, arXiv:2410.06940.
    """
    recipe = sit_xl2_imagenet()
    recipe.objective.alignment = repa()
    recipe.training.run_dir = "runs/sit_xl2_repa"
    return recipe


@run.cli.factory(target=pretrain)
def lightningdit_xl_imagenet() -> run.Partial:
    """LightningDiT-XL/1 (675 M) on ImageNet latents of VA-VAE (16 x 16, 32 channels), 256 px: 8 GPUs, 18 GiB each.

    The authors report FID 5.14 after 64 epochs (80,000 steps) without guidance, and 2.17 after 800 epochs; with
    guidance 2.11 and 1.35. The steps take 8.6 hours on 8 H100 (planned, 386 ms each); the authors report about 10 on 8
    H800. Deviations: the published network has sine-cosine positions in addition to the rotary ones, its time is 1
    minus the time here, its sampling has a shift of 0.3, and its guidance of 10 or 6.7 changes only three channels.
    Samples here are drawn without guidance.

    Source: Yao and Wang 2025, arXiv:2501.01423, and the published code.
    """
    recipe = _imagenet("lightningdit_xl_imagenet", lightningdit_xl())
    recipe.data = run.Config(EnergonData, path="data/imagenet_va_vae_256")
    recipe.objective = run.Config(FlowMatching, time_distribution="logit_normal", loss_kind="l2_cosine")
    recipe.optimizer = run.Config(OptimizerConfig, lr=2e-4, beta2=0.95, clip_grad=0.0)
    recipe.training.num_steps, recipe.training.global_batch_size = 80_000, 1024
    recipe.sampling = run.Config(SamplingConfig, solver="euler", num_steps=250, guidance_scale=1.0)
    return recipe


@run.cli.factory(target=pretrain)
def jit_b16_imagenet() -> run.Partial:
    """JiT-B/16 (131 M) on ImageNet pixels, 256 px: one GPU or more.

    The network predicts the clean picture, and the loss is the error of the velocity. The paper reports FID 4.37 after
    200 epochs and 3.66 after 600, with guidance. Deviations: the published network has sine-cosine positions in
    addition to the rotary ones; the time here is 1 minus that of the paper, also as input of the network.

    Source: Li and He 2025, arXiv:2511.13720, and its published code.
    """
    recipe = _imagenet("jit_b16_imagenet", jit_b16())
    recipe.data = run.Config(EnergonData, path="data/imagenet_pixels_256")
    recipe.objective = run.Config(
        FlowMatching, prediction="x0", time_distribution="logit_normal", logit_mean=0.8, logit_std=0.8
    )
    recipe.optimizer = run.Config(OptimizerConfig, lr=2e-4, beta2=0.95, clip_grad=0.0)
    recipe.schedule = run.Config(Constant, warmup_steps=6_255)
    recipe.training.num_steps, recipe.training.global_batch_size = 750_600, 1024
    recipe.sampling = run.Config(
        SamplingConfig, solver="heun", num_steps=50, guidance_scale=2.9, guidance_interval=[0.0, 9.0]
    )
    return recipe


def text_conditional(name: str, model: run.Config[ModelConfig]) -> run.Partial:
    """Return NeMo's base setting for one model: EDM, up to 2048 tokens a sample, batch 32, AdamW at a constant 1e-4.

    NeMo divides latents of unit variance by 2, draws log sigma from N(0, 1), and samples from sigma = 80 to 0.002. Here
    latents are not divided, so every sigma is doubled. NeMo computes cond + 7 (cond - uncond), which is
    uncond + 8 (cond - uncond), so `guidance_scale` is 8. One sample in five is trained without text, as in NeMo.
    Deviation: samples are drawn with averaged weights (decay 0.9999).

    Source: NeMo diffusion collection v2.1.0, recipe `pretrain`; its other recipes change this one.
    """
    model.context_dropout = 0.2
    return run.Partial(
        pretrain,
        model=model,
        data=run.Config(EnergonData, path="data/latents", max_tokens_per_sample=2048),
        objective=run.Config(EDM, sigma_data=1.0, p_mean=math.log(2), p_std=1.0, sigma_min=0.004, sigma_max=160.0),
        optimizer=run.Config(OptimizerConfig, lr=1e-4, weight_decay=0.0),
        schedule=run.Config(Constant),
        parallel=run.Config(ParallelConfig, overlap_grad_reduce=True, overlap_param_gather=True),
        training=run.Config(
            TrainingConfig,
            run_dir=f"runs/{name}",
            num_steps=500_000,
            micro_batch_size=1,
            global_batch_size=32,
            precision="bf16",
            ema_decay=0.9999,
            log_interval=10,
            validation_interval=1_000,
        ),
        checkpoint=run.Config(CheckpointConfig, interval=1_000, keep_last=3),
        logging=run.Config(LoggingConfig),
        sampling=run.Config(SamplingConfig, solver="heun", num_steps=35, guidance_scale=8.0),
    )


def as_large_model(recipe: run.Partial, *, lr: float = 1e-4) -> run.Partial:
    """Give a recipe the optimizer of NeMo's large models: warm-up over 100 steps, betas 0.9 and 0.95, decay 0.1."""
    recipe.optimizer = run.Config(OptimizerConfig, lr=lr, beta1=0.9, beta2=0.95, weight_decay=0.1)
    recipe.schedule = run.Config(Constant, warmup_steps=100)
    return recipe


def as_mock(recipe: run.Partial, latent: tuple[int, int, int], *, text_tokens: int = 512) -> run.Partial:
    """Feed a recipe 15 steps of synthetic latents (frames, height, width) at a constant rate, without checkpoints."""
    frames, height, width = latent
    recipe.data = run.Config(
        MockData, frames=frames, height=height, width=width, text_tokens=text_tokens, dataset_size=16
    )
    recipe.schedule = run.Config(Constant)
    recipe.training.num_steps = 15
    recipe.training.log_interval = 1
    recipe.training.validation_interval = 0
    recipe.training.ema_decay = None
    recipe.checkpoint = run.Config(CheckpointConfig, interval=0, resume="never")
    return recipe


def on_tensor_parallel(recipe: run.Partial, size: int) -> run.Partial:
    """Spread a recipe's layers over `size` GPUs with sequence parallelism."""
    recipe.parallel.tensor_model_parallel_size = size
    recipe.parallel.sequence_parallel = True
    return recipe


def with_fsdp(recipe: run.Partial) -> run.Partial:
    """Shard a recipe's weights, gradients and optimizer over the data-parallel GPUs (Megatron-FSDP)."""
    recipe.parallel.data_parallel = "fsdp"
    return recipe


@run.cli.factory(target=pretrain, name="pretrain")
def pretrain_s() -> run.Partial:
    """DiT-S with text (51 M), NeMo's base recipe: EDM on images and clips of up to 2048 tokens: one GPU or more.

    Micro-batches of one sample, 32 per step. For samples of mixed length set `data.max_tokens_per_pack`.
    """
    return text_conditional("pretrain", dit_cross_s())


@run.cli.factory(target=pretrain)
def pretrain_b() -> run.Partial:
    """DiT-B with text (185 M), otherwise as pretrain: one GPU or more.

    Weights, gradients, optimizer and average take 4 GiB, 3 of them spread over the GPUs.
    """
    return text_conditional("pretrain_b", dit_cross_b())


@run.cli.factory(target=pretrain)
def pretrain_l() -> run.Partial:
    """DiT-L with text (634 M), otherwise as pretrain: one 80 GB GPU or more.

    Weights, gradients, optimizer and average take 13 GiB, 9 of them spread over the GPUs.
    """
    return text_conditional("pretrain_l", dit_cross_l())


@run.cli.factory(target=pretrain)
def pretrain_xl() -> run.Partial:
    """DiT-XL with text (927 M), otherwise as pretrain: one 80 GB GPU or more.

    Weights, gradients, optimizer and average take 19 GiB, 14 of them spread over the GPUs.
    """
    return text_conditional("pretrain_xl", dit_cross_xl())


@run.cli.factory(target=pretrain)
def pretrain_xl_dfm() -> run.Partial:
    """DiT-XL with text and low-rank adaLN (675 M), packs of 8000 tokens, two per step: one or two 80 GB GPUs.

    The modulation goes through 256 features, which takes 252 M parameters off DiT-XL and no work off its tokens.
    Cosine schedule over 10,000 steps, warm-up 2000.

    Source: NVIDIA-NeMo/DFM, recipe `dit`.
    """
    recipe = text_conditional("pretrain_xl_dfm", dit_cross_xl())
    recipe.model.adaln_lora_rank = 256
    recipe.data = run.Config(EnergonData, path="data/latents", max_tokens_per_pack=8000, packing_buffer_size=40)
    recipe.optimizer = run.Config(OptimizerConfig, lr=0.9e-4, beta1=0.9, beta2=0.95, weight_decay=0.1, clip_grad=1.0)
    recipe.schedule = run.Config(Cosine, warmup_steps=2000)
    recipe.training.num_steps = 10_000
    recipe.training.global_batch_size = 2
    return recipe


@run.cli.factory(target=pretrain)
def pretrain_7b() -> run.Partial:
    """DiT-7B with text (7.19 B) on images of 256 px: 16 x 80 GB or more.

    Weights and gradients take 40 GiB on every GPU; the optimizer (80 GiB) and the average (27 GiB) are spread over all
    of them. Steps have 512 micro-batches: on 128 GPUs each makes 4.
    """
    recipe = as_large_model(text_conditional("pretrain_7b", dit_cross_7b()))
    recipe.data = run.Config(EnergonData, path="data/latents_256", max_tokens_per_sample=260, bucket_by_shape=True)
    recipe.training.micro_batch_size = 9
    recipe.training.global_batch_size = 4608
    return recipe


@run.cli.factory(target=pretrain)
def pretrain_7b_pack() -> run.Partial:
    """DiT-7B with text (7.19 B) on packs of 2304 tokens (9 images): 16 x 80 GB or more.

    As pretrain_7b, but images of any shape share a pack and no token is padding.
    """
    recipe = pretrain_7b()
    recipe.training.run_dir = "runs/pretrain_7b_pack"
    recipe.data = run.Config(EnergonData, path="data/latents_256", max_tokens_per_pack=2304, packing_buffer_size=1000)
    recipe.training.micro_batch_size = 1
    recipe.training.global_batch_size = 512
    return recipe


@run.cli.factory(target=pretrain)
def pretrain_7b_256p_joint() -> run.Partial:
    """DiT-7B with text (7.19 B) on 256 px images and clips of up to 8192 tokens: 16 x 80 GB or more.

    The second stage: it starts from the weights of pretrain_7b. Learning rate 6e-5, 256 samples per step.
    """
    recipe = on_tensor_parallel(as_large_model(text_conditional("pretrain_7b_256p_joint", dit_cross_7b()), lr=6e-5), 2)
    recipe.data = run.Config(EnergonData, path="data/latents_256_joint", max_tokens_per_sample=8192)
    recipe.checkpoint.start_from = "runs/pretrain_7b"
    recipe.training.global_batch_size = 256
    return recipe


@run.cli.factory(target=pretrain)
def pretrain_7b_256p_joint_pack() -> run.Partial:
    """DiT-7B with text (7.19 B) on packs of 10,240 tokens, 256 px: 16 x 80 GB or more, 55 GiB each.

    As pretrain_7b_256p_joint, images and clips, but images fill the room that clips leave. 128 packs per step.
    """
    recipe = pretrain_7b_256p_joint()
    recipe.training.run_dir = "runs/pretrain_7b_256p_joint_pack"
    recipe.data = run.Config(
        EnergonData, path="data/latents_256_joint", max_tokens_per_pack=10_240, packing_buffer_size=1000
    )
    recipe.training.global_batch_size = 128
    return recipe


@run.cli.factory(target=pretrain)
def tiny_dit_cross() -> run.Partial:
    """2-layer DiT with cross-attention, images and clips with texts: any machine.

    Packs of 128 tokens, 20 steps; the loss falls by a tenth or more.
    """
    recipe = text_conditional("tiny_dit_cross", dit_cross_s())
    return as_tiny(recipe)


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
    recipe.training.num_steps = 20
    recipe.training.global_batch_size = 4
    recipe.training.precision = "fp32"
    recipe.training.ema_decay = 0.99
    recipe.training.log_interval = 1
    recipe.training.validation_interval = 0
    recipe.checkpoint = run.Config(CheckpointConfig, interval=10)
    return recipe
