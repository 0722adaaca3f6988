"""EDM2: the magnitude-preserving UNet on ImageNet latents, and a small form of it."""

import nemo_run as run

from dit.models.edm2_unet.config import EDM2UNetConfig
from dit.optimizer.schedules import InverseSqrt
from dit.parallel.dims import ParallelConfig
from dit.settings import CheckpointConfig, LoggingConfig, OptimizerConfig, SamplingConfig, TrainingConfig
from dit.training.pretrain import pretrain
from energon_data.dataset import EnergonData
from energon_data.mock import MockData
from recipes.components import edm_uncertainty
from recipes.small import short_run

BATCH = 2048


@run.cli.factory(target=pretrain)
def edm2_s_imagenet() -> run.Partial:
    """EDM2-S (280 M) on ImageNet 512 px latents (64 x 64, 4 channels): 8 GPUs, 30 GiB each.

    The paper reports FID 2.56 without guidance, drawn with the average of relative length 0.13 (`launch.average`), and
    2.23 with guidance by a smaller unconditional network, which is not available here. An epoch takes 775 PFLOP, or 350
    s on 8 H100, and the 1,048,576 steps (2,147.5 M pictures) take 162 hours (planned, 557 ms each). Deviations: bf16
    instead of fp16; the frequencies of the noise level are not random, and the weights of its uncertainty start at zero
    and are not normalised; pictures during training are drawn with an average of decay 0.9999.

    Source: Karras et al. 2024, arXiv:2312.02696, config G and its settings for EDM2-S.
    """
    return run.Partial(
        pretrain,
        model=run.Config(EDM2UNetConfig, class_dropout=0.0),
        data=run.Config(
            EnergonData, path="data/imagenet_latents_512", bucket_by_shape=True, max_tokens_per_sample=64**2
        ),
        objective=edm_uncertainty(),
        optimizer=run.Config(OptimizerConfig, lr=1e-2, beta2=0.99, clip_grad=0.0),
        schedule=run.Config(InverseSqrt, warmup_steps=10_000_000 // BATCH, reference_steps=70_000),
        parallel=run.Config(ParallelConfig, overlap_grad_reduce=True, overlap_param_gather=True),
        training=run.Config(
            TrainingConfig,
            run_dir="runs/edm2_s_imagenet",
            num_steps=2**31 // BATCH,
            micro_batch_size=128,
            global_batch_size=BATCH,
            precision="bf16",
            ema_decay=0.9999,
            ema_sigma_rel=[0.05, 0.1],
            log_interval=100,
            validation_interval=5_000,
            sample_interval=10_000,
        ),
        checkpoint=run.Config(CheckpointConfig, interval=5_000, keep_every=2**26 // BATCH),
        logging=run.Config(LoggingConfig),
        sampling=run.Config(SamplingConfig, solver="heun", num_steps=32, guidance_scale=1.0),
    )


@run.cli.factory(target=pretrain)
def tiny_edm2() -> run.Partial:
    """EDM2 UNet with 16 and 32 channels, 8 x 8 latents: any machine.

    One block at each resolution, with attention at the lower one; the learning rate falls after the warm-up.
    """
    recipe = edm2_s_imagenet()
    recipe.model.num_classes = 10
    recipe.model.block_out_channels = [16, 32]
    recipe.model.layers_per_block = 1
    recipe.model.attention_levels = [1]
    recipe.model.head_size = 8
    recipe.data = run.Config(MockData, shapes=["1x8x8"], num_streams=2)
    recipe.parallel = run.Config(ParallelConfig)
    recipe.optimizer.lr = 3e-3
    recipe.schedule.warmup_steps, recipe.schedule.reference_steps = 5, 10
    recipe.training.ema_decay = 0.9
    recipe.checkpoint.keep_every = 0
    recipe.sampling.num_steps = 10
    return short_run(recipe, "tiny_edm2")
