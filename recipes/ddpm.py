"""Small pictures of a few classes: the conditional DDPM UNet on CIFAR-10 and on synthetic data."""

import nemo_run as run

from dit.models.ddpm_unet.config import DDPMUNetConfig
from dit.optimizer.schedules import TorchOneCycle
from dit.parallel.dims import ParallelConfig
from dit.settings import SamplingConfig
from energon_data.dataset import EnergonData
from energon_data.mock import MockData
from recipes.base import base_run, registered, short_run, variant
from recipes.components import ddpm

CIFAR10_EPOCH = 391  # steps of 128 for 50,000 pictures


@registered
def ddpm_cifar10() -> run.Partial:
    """CIFAR-10, class-conditional DDPM UNet (15.66 M), 25 epochs: one GPU.

    `python -m energon_data.prepare huggingface --in uoft-cs/cifar10 --out data/cifar10` writes the data. AdamW with one
    cycle of the learning rate and of beta1, as torch's OneCycleLR; the average starts at step 2000. Held-out loss after
    every epoch, a row of samples for each class after every tenth, by the average and by the raw weights. Deviations
    from the published run: bf16 instead of fp16 with loss scaling; the gradient norm is clipped; AdamW's epsilon is
    1e-8, not 1e-5; labels are dropped per sample, not per batch; crops of 32 pixels are cut out of pictures enlarged to
    34, where random sizes of 80 to 100 % of the area are cut there.
    """
    data = run.Config(EnergonData, path="data/cifar10", bucket_by_shape=True, resize_side=34, crop_size=[32, 32])
    # The published sampler: every step of the table, noise of variance beta.
    sampling = run.Config(
        SamplingConfig, solver="ancestral", num_steps=1000, variance="large", guidance_scale=3.0, raw_weights=True
    )
    recipe = base_run(run.Config(DDPMUNetConfig), data, ddpm(), sampling)
    recipe.optimizer.lr, recipe.optimizer.weight_decay = 5e-3, 1e-3
    recipe.schedule = run.Config(TorchOneCycle)
    recipe.parallel = run.Config(ParallelConfig)
    training = recipe.training
    training.num_steps, training.micro_batch_size, training.global_batch_size = 25 * CIFAR10_EPOCH, 128, 128
    training.seed, training.ema_decay, training.ema_start_step, training.log_interval = 42, 0.995, 2000, 50
    training.validation_interval = recipe.checkpoint.interval = CIFAR10_EPOCH
    training.sample_interval = 10 * CIFAR10_EPOCH
    return recipe


ddpm_cifar10_512 = variant("ddpm_cifar10_512", ddpm_cifar10, model={"mid_out_channels": [512, 512, 256]})
"""CIFAR-10, class-conditional DDPM UNet with 512 channels in the middle (23.34 M): one GPU.

Everything else is as in ddpm_cifar10.
"""


@registered
def tiny_ddpm_unet() -> run.Partial:
    """DDPM UNet with 8 and 16 channels, 16 x 16 pictures: any machine.

    Every step of ddpm_cifar10 in little: one cycle of the learning rate, an average that starts late.
    """
    recipe = ddpm_cifar10()
    recipe.model.block_out_channels, recipe.model.mid_out_channels, recipe.model.hidden_size = [8, 16], [16], 32
    recipe.data = run.Config(MockData, shapes=["1x16x16"], num_streams=2)
    recipe.parallel.data_parallel = "ddp"
    recipe.training.ema_start_step = 10
    recipe.sampling.num_steps, recipe.sampling.raw_weights = 10, False
    return short_run(recipe)
