"""Class-conditional models on ImageNet, DiT at 256 px and EDM2's UNet at 512 px, with published settings."""

import nemo_run as run

from dit.models.base import ModelConfig
from dit.objectives.alignment import Alignment
from dit.objectives.contrastive import ContrastiveFlowMatching
from dit.objectives.ddpm import DDPM
from dit.objectives.flow_matching import FlowMatching
from dit.optimizer.schedules import WSD, Constant, InverseSqrt
from dit.settings import OptimizerConfig, SamplingConfig
from energon_data.dataset import EnergonData
from recipes.base import base_run, part, registered, variant
from recipes.components import edm_uncertainty
from recipes.models import dit_b, dit_dh_xl, dit_l, dit_s, dit_xl, edm2_s, jit_b16, lightningdit_xl, rit_xl, sr_dit_b1


def _imagenet(
    model: run.Config[ModelConfig], data: str = "latents_256", steps: int = 400_000, batch: int = 256
) -> run.Partial:
    """Return the published training setting of DiT at patch 2, which other recipes change, on `data/imagenet_DATA`.

    Latents 4 x 32 x 32 (256 px through the Stable Diffusion VAE, times 0.18215), 256 tokens, AdamW at a constant 1e-4,
    no clipping, EMA 0.9999, label dropout 0.1, batch 256, noise prediction on the linear 1000-step table. For
    deviations see `dit_s2_imagenet`.

    Source: Peebles and Xie 2023, arXiv:2212.09748, Section 4; facebookresearch/DiT for the constants.
    """
    objective = run.Config(DDPM, schedule="linear", discrete_steps=1000, prediction="noise")
    sampling = run.Config(SamplingConfig, solver="ddim", num_steps=50, guidance_scale=4.0)
    latents = run.Config(EnergonData, path=f"data/imagenet_{data}")
    recipe = base_run(model, latents, objective, sampling)
    recipe.optimizer.clip_grad = 0.0
    training = recipe.training
    training.num_steps, training.micro_batch_size, training.global_batch_size = steps, 32, batch
    training.log_interval, training.validation_interval, training.sample_interval = 100, 5_000, 10_000
    recipe.checkpoint.interval, recipe.checkpoint.keep_every = 5_000, 50_000
    return recipe


dit_s2_imagenet = variant("dit_s2_imagenet", lambda: _imagenet(dit_s()))
"""DiT-S/2 (33 M) on ImageNet 256 px latents: one GPU or more.

The smallest published size; the paper reports FID 68.4 after 400 k steps without guidance. Deviations of all four
sizes: noise prediction without the learned variance; latents that are the mean of the VAE's distribution, from
which the original draws in every step; random flips, which the original makes with probability 0.5, only if the
data hold every picture twice, encoded as it is and mirrored; samples by 50 steps of DDIM, guided in all channels
(original: 250 ancestral steps, guided in three of four).
"""


dit_b2_imagenet = variant("dit_b2_imagenet", lambda: _imagenet(dit_b()))
"""DiT-B/2 (130 M) on ImageNet 256 px latents: one GPU or more.

The paper reports FID 43.5 after 400 k steps without guidance. Deviations: see dit_s2_imagenet.
"""


dit_l2_imagenet = variant("dit_l2_imagenet", lambda: _imagenet(dit_l()))
"""DiT-L/2 (458 M) on ImageNet 256 px latents: 8 GPUs, 11 GiB each.

The paper reports FID 23.3 after 400 k steps without guidance. Deviations: see dit_s2_imagenet.
"""


dit_xl2_imagenet = variant("dit_xl2_imagenet", lambda: _imagenet(dit_xl()))
"""DiT-XL/2 (675 M) on ImageNet 256 px latents: 8 GPUs, 15 GiB each.

The paper reports FID 19.5 after 400 k steps without guidance, 2.27 after 7 M steps with guidance 1.5.
Deviations: see dit_s2_imagenet.
"""


repa = part(Alignment, "repa", Alignment)
"""Align the tokens after layer 8 with DINOv2-B (REPA), `objective.alignment=repa` of flow matching."""


@registered
def sit_xl2_imagenet() -> run.Partial:
    """SiT-XL/2 (675 M) on ImageNet 256 px latents: 8 GPUs, 15 GiB each.

    DiT-XL/2 with flow matching. REPA's paper quotes FID 8.61 for it after 7 M steps (1,400 epochs), without guidance.
    The published samples are of 250 Euler-Maruyama steps; those here are of 50 steps of Heun's method. The published
    time is 1 minus the time here. Latents and flips: see dit_s2_imagenet. An epoch takes 912 PFLOP, or 350 s on 8 H100
    (planned: `--dryrun --world-size 8 --device h100`).

    Source: Ma et al. 2024, arXiv:2401.08740, and the published code, which embeds the time without a factor of 1000.
    """
    recipe = _imagenet(dit_xl())
    recipe.model.time_scale = 1.0
    recipe.objective = run.Config(FlowMatching)
    recipe.sampling.solver = "heun"
    return recipe


sit_xl2_repa = variant("sit_xl2_repa", sit_xl2_imagenet, objective={"alignment": repa()}, optimizer={"clip_grad": 1.0})
"""SiT-XL/2 (675 M) aligned with DINOv2-B (REPA) on ImageNet 256 px latents: 8 GPUs, 15 GiB each.

The samples need features of the teacher (`energon_data.prepare --teacher`, 384 KiB each). The paper reports FID 7.9
after 400 k steps (80 epochs) without guidance, which take 7.8 hours on 8 H100 (planned, 70 ms per step). Time and
clipping (1.0) are those of the published code.

Source: Yu et al. 2024, arXiv:2410.06940, and the published code.
"""


@registered
def lightningdit_xl_imagenet() -> run.Partial:
    """LightningDiT-XL/1 (675 M) on ImageNet latents of VA-VAE (16 x 16, 32 channels), 256 px: 8 GPUs, 18 GiB each.

    The authors report FID 5.14 after 64 epochs (80,000 steps) without guidance, and 2.17 after 800 epochs; with
    guidance 2.11 and 1.35. The steps take 8.6 hours on 8 H100 (planned, 386 ms each); the authors report about 10 on 8
    H800. Deviations: the published network has sine-cosine positions in addition to the rotary ones, its time is 1
    minus the time here, its sampling has a shift of 0.3, and its guidance of 10 or 6.7 changes only three channels.
    Gate and value of its MLPs start as one matrix, so with standard deviations 1.3 times smaller. Samples here are
    drawn without guidance.

    Source: Yao and Wang 2025, arXiv:2501.01423, and the published code.
    """
    recipe = _imagenet(lightningdit_xl(), "va_vae_256", 80_000, 1024)
    recipe.objective = run.Config(FlowMatching, time_distribution="logit_normal", loss_kind="l2_cosine")
    recipe.optimizer = run.Config(OptimizerConfig, lr=2e-4, beta2=0.95, clip_grad=0.0)
    recipe.sampling = run.Config(SamplingConfig, solver="euler", num_steps=250, guidance_scale=1.0)
    return recipe


jit_b16_imagenet = variant(
    "jit_b16_imagenet",
    lambda: _imagenet(jit_b16(), "pixels_256", 750_600, 1024),
    data={"flip": 0.5},
    objective=run.Config(
        FlowMatching, prediction="x0", time_distribution="logit_normal", logit_mean=0.8, logit_std=0.8
    ),
    optimizer=run.Config(OptimizerConfig, lr=2e-4, beta2=0.95, clip_grad=0.0),
    schedule=run.Config(Constant, warmup_steps=6_255),
    sampling=run.Config(SamplingConfig, solver="heun", num_steps=50, guidance_scale=2.9, guidance_interval=[0.0, 9.0]),
)
"""JiT-B/16 (131 M) on ImageNet pixels, 256 px: one GPU or more.

The network predicts the clean picture, and the loss is the error of the velocity. The paper reports FID 4.37 after
200 epochs and 3.66 after 600, with guidance. Deviations: positions, time, gate and value, see
lightningdit_xl_imagenet. The published sampler divides by at least 0.05, so its last step ends before the clean
picture that the network predicts; here it ends there.

Source: Li and He 2025, arXiv:2511.13720, and its published code.
"""


@registered
def rit_xl_imagenet() -> run.Partial:
    """RiT-XL (677 M) on ImageNet features of DINOv2-S (16 x 16, 384 channels), 256 px: 8 GPUs, 18 GiB each.

    The network predicts the clean features, and the loss is the error of the velocity. The authors report FID 1.45
    after 800 epochs without guidance, and 1.14 with. The 667,200 steps take 117 hours on 8 H100 (planned, 631 ms each).
    The network also predicts the noised class token of DINOv2-S, which the samples store, normalised as the features.
    Deviations: those of jit_b16_imagenet; the class token of the published network passes no LayerNorm, its output
    layer for that token starts with random weights, and a drawn token starts at the mean of the patches' noise.

    Source: Zhang et al. 2026, arXiv:2605.21981, and the published code.
    """
    recipe = _imagenet(rit_xl(), "dinov2_s_256", 667_200, 1536)
    recipe.objective = run.Config(FlowMatching, prediction="x0", time_distribution="logit_normal", shift_dimension=4096)
    recipe.objective.teacher_token_weight = 0.2
    recipe.optimizer = run.Config(OptimizerConfig, lr=3e-4, beta2=0.95)
    recipe.schedule = run.Config(Constant, warmup_steps=4_170)
    recipe.sampling = run.Config(
        SamplingConfig, solver="heun", num_steps=25, guidance_scale=3.7, guidance_interval=[0.0204, 9.0]
    )
    return recipe


@registered
def dit_dh_xl_imagenet() -> run.Partial:
    """DiT-DH-XL (839 M) on ImageNet features of DINOv2-B (16 x 16, 768 channels), 256 px: 8 GPUs, 21 GiB each.

    The latents are those of RAE. The authors report FID 2.16 after 80 epochs (100,000 steps) and 1.51 after 800,
    without guidance. 80 epochs take 13 hours on 8 H100 (planned, 473 ms per step). Deviations: the published network
    has sine-cosine positions in addition to the rotary ones, embeds the time by random Fourier features, and applies
    SiLU twice to the conditioning vector of its blocks; its linear layers start with torch's default weights; the inner
    width of the MLPs in its head is 5461, here 5504.

    Source: Zheng et al. 2025, arXiv:2510.11690, and the published code.
    """
    recipe = _imagenet(dit_dh_xl(), "dinov2_b_256", 1_000_000, 1024)
    recipe.objective = run.Config(FlowMatching, time_distribution="logit_normal", shift_dimension=4096)
    recipe.optimizer = run.Config(OptimizerConfig, lr=2e-4, beta2=0.95)
    recipe.schedule = run.Config(WSD, decay_steps=950_000, min_lr=2e-5)
    recipe.training.ema_decay = 0.9995
    recipe.sampling = run.Config(SamplingConfig, solver="euler", num_steps=50, guidance_scale=1.0)
    return recipe


@registered
def sr_dit_b1_imagenet() -> run.Partial:
    """SR-DiT-B/1 (133 M) on ImageNet latents of INVAE (16 x 16, 32 channels), 256 px: one GPU or more.

    Token routing (SPRINT), alignment with DINOv2-B after layer 2, and the contrastive term. The samples need features
    of the teacher (`energon_data.prepare --teacher`). The author reports FID 3.49 after 400,000 steps (80 epochs)
    without guidance and about 15 hours on 8 H100, in which the teacher also runs; here the steps take 2.9 hours
    (planned, 26 ms each). The network also predicts the noised class token of DINOv2-B (REG), and mixes the values of
    the first attention into later ones. Deviations: positions, see lightningdit_xl_imagenet; the published network
    (140 M with its projection) has RMSNorms without weights, one of them on the class token instead of a LayerNorm; the
    class token of some samples skips the middle layers, and the path of a whole batch is dropped; the vector in place
    of dropped tokens starts at zero. Samples here are drawn by Heun's method instead of 250 Euler-Maruyama steps.

    Source: Bhanded 2025, arXiv:2512.12386, and the published code.
    """
    recipe = _imagenet(sr_dit_b1(), "invae_256")
    recipe.objective = run.Config(
        ContrastiveFlowMatching, shift_dimension=4096, alignment=repa(), teacher_token_weight=0.03
    )
    recipe.objective.alignment.layer, recipe.optimizer.clip_grad = 2, 1.0
    recipe.sampling = run.Config(SamplingConfig, solver="heun", num_steps=50, guidance_scale=1.0)
    return recipe


@registered
def edm2_s_imagenet() -> run.Partial:
    """EDM2-S (280 M) on ImageNet 512 px latents (64 x 64, 4 channels): 8 GPUs, 30 GiB each.

    The paper reports FID 2.56 without guidance, drawn with the average of relative length 0.13 (`launch.average`), and
    2.23 with guidance by a smaller unconditional network, which is not available here. An epoch takes 775 PFLOP, or 350
    s on 8 H100, and the 1,048,576 steps (2,147.5 M pictures) take 162 hours (planned, 557 ms each). A checkpoint
    follows after every 8 Mi pictures, every eighth is retained. Deviations: bf16 instead of fp16; latents are the mean
    of the VAE's distribution; the frequencies of the noise level are not random, and the weights of its uncertainty
    start at zero and are not normalised; pictures during training are drawn with an average of decay 0.9999.

    Source: Karras et al. 2024, arXiv:2312.02696, config G and its settings for EDM2-S.
    """
    batch = 2048
    recipe = _imagenet(edm2_s(), "latents_512")
    recipe.model.class_dropout = 0.0
    recipe.data.bucket_by_shape, recipe.data.max_tokens_per_sample = True, 64**2
    recipe.objective = edm_uncertainty()
    recipe.optimizer = run.Config(OptimizerConfig, lr=1e-2, beta2=0.99, clip_grad=0.0)
    recipe.schedule = run.Config(InverseSqrt, warmup_steps=10_000_000 // batch, reference_steps=70_000)
    recipe.training.num_steps, recipe.training.global_batch_size = 2**31 // batch, batch
    recipe.training.micro_batch_size, recipe.training.ema_sigma_rel = 128, [0.05, 0.1]
    recipe.checkpoint.interval, recipe.checkpoint.keep_every = 2**23 // batch, 2**26 // batch
    recipe.sampling = run.Config(SamplingConfig, solver="heun", num_steps=32, guidance_scale=1.0)
    return recipe
