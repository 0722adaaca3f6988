"""DiT: adaLN-Zero transformers on image latents, from DiT-S to DiT-XL."""

import nemo_run as run

from dit.models.dit.config import DiTConfig
from dit.objectives.ddpm import DDPM
from dit.objectives.edm import EDM
from dit.parallel.dims import ParallelConfig
from dit.training.pretrain import pretrain
from dit.training.settings import (
    CheckpointConfig,
    LoggingConfig,
    OptimizerConfig,
    SamplingConfig,
    ScheduleConfig,
    TrainingConfig,
)
from energon_data.dataset import EnergonData
from recipes.components import dit_b, dit_l, dit_s, dit_xl


def _imagenet(name: str, model: run.Config[DiTConfig]) -> run.Partial:
    """Return the published training setting of class-conditional DiT at patch 2 for one model size.

    Latents 4 x 32 x 32 (256 px through the Stable Diffusion VAE, times 0.18215), 256 tokens, AdamW at a constant 1e-4,
    EMA 0.9999, label dropout 0.1, batch 256, noise prediction on the linear 1000-step table. One deviation: the network
    predicts the noise only; the original also learns the variance.

    Source: Peebles and Xie 2023, arXiv:2212.09748, Section 4; facebookresearch/DiT for the constants.
    """
    return run.Partial(
        pretrain,
        model=model,
        data=run.Config(EnergonData, path="data/imagenet_latents_256"),
        objective=run.Config(DDPM, schedule="linear", discrete_steps=1000, prediction="noise"),
        optimizer=run.Config(OptimizerConfig, lr=1e-4, weight_decay=0.0),
        schedule=run.Config(ScheduleConfig, kind="constant"),
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

    The smallest published size; the paper reports FID 68.4 after 400 k steps without guidance.
    """
    return _imagenet("dit_s2_imagenet", dit_s())


@run.cli.factory(target=pretrain)
def dit_b2_imagenet() -> run.Partial:
    """DiT-B/2 (130 M) on ImageNet 256 px latents: one GPU or more.

    The paper reports FID 43.5 after 400 k steps without guidance.
    """
    return _imagenet("dit_b2_imagenet", dit_b())


@run.cli.factory(target=pretrain)
def dit_l2_imagenet() -> run.Partial:
    """DiT-L/2 (458 M) on ImageNet 256 px latents: 8 GPUs; --dryrun estimates 10 GiB on each.

    The paper reports FID 23.3 after 400 k steps without guidance.
    """
    return _imagenet("dit_l2_imagenet", dit_l())


@run.cli.factory(target=pretrain)
def dit_xl2_imagenet() -> run.Partial:
    """DiT-XL/2 (675 M) on ImageNet 256 px latents: 8 GPUs; --dryrun estimates 14 GiB on each.

    The paper reports FID 19.5 after 400 k steps without guidance, 2.27 after 7 M steps with guidance 1.5.
    """
    return _imagenet("dit_xl2_imagenet", dit_xl())


@run.cli.factory(target=pretrain, name="pretrain")
def pretrain_s() -> run.Partial:
    """DiT-S (32 M) with NeMo's settings: EDM on 16-channel latents, batch 32, lr 1e-4: one GPU or more.

    The base recipe of NeMo's diffusion collection, under its name.
    """
    recipe = _imagenet("pretrain", dit_s())
    recipe.model.in_channels = 16
    recipe.model.add_bias = False
    recipe.model.position_embedding = "sincos_3d"
    recipe.data.path = "data/latents"
    recipe.objective = run.Config(EDM)
    recipe.training.micro_batch_size = 1
    recipe.training.global_batch_size = 32
    recipe.sampling = run.Config(SamplingConfig, solver="heun", num_steps=35, guidance_scale=4.0)
    recipe.checkpoint.interval = 1_000
    recipe.training.validation_interval = 1_000
    return recipe
