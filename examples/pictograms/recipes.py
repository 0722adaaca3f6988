"""Colour pictograms by name: autoencoders, and a text-conditional DiT on latents; no download."""

import nemo_run as run

from dit.models.autoencoder.config import AutoencoderConfig
from dit.objectives.autoencoding import Autoencoding
from dit.objectives.vq_autoencoding import VQAutoencoding
from dit.training.pretrain import pretrain
from examples.letters.recipes import demo_data, letters_run, text_dit


@run.cli.factory(target=pretrain)
def pictogram_autoencoder() -> run.Partial:
    """Pictograms of 64 px to latents of 16x8x8 and back, KL autoencoder (1.0 M): two CPU cores.

    `python -m energon_data.prepare pictograms --size 64 --out data/pictograms` draws the data (needs pip install -e
    '.[pictograms]'). `python -m launch.export --checkpoint runs/pictogram_autoencoder --format diffusers --out
    runs/pictogram_vae` exports the model as an AutoencoderKL of diffusers, for `energon_data.prepare --vae` and other
    programs. One rank and two give the same losses.
    """
    recipe = letters_run()
    recipe.model = run.Config(
        AutoencoderConfig,
        latent_channels=16,
        block_out_channels=[16, 32, 64, 64],
        layers_per_block=1,
        norm_num_groups=8,
    )
    recipe.objective = run.Config(Autoencoding, kl_weight=1e-4)
    recipe.data = demo_data("data/pictograms", bucket_by_shape=True)
    # With few pictures and little time, small batches give more updates per picture.
    recipe.optimizer.lr = 3e-3
    recipe.training.run_dir = "runs/pictogram_autoencoder"
    recipe.training.num_steps = 2400
    recipe.training.micro_batch_size = 4
    recipe.training.global_batch_size = 8
    recipe.training.ema_decay = 0.98
    recipe.training.validation_interval = 0
    recipe.training.sample_interval = 0
    recipe.checkpoint.interval = 600
    return recipe


@run.cli.factory(target=pretrain)
def pictogram_vq_autoencoder() -> run.Partial:
    """Pictograms of 64 px to 16x16 codes and back, VQ autoencoder (0.7 M): two CPU cores.

    The data and the commands are those of `pictogram_autoencoder`. The exported model is a VQModel of diffusers; models
    of its latents train on those before quantisation.
    """
    recipe = pictogram_autoencoder()
    recipe.model = run.Config(
        AutoencoderConfig,
        patch_spatial=4,
        latent_channels=4,
        block_out_channels=[16, 32, 64],
        layers_per_block=1,
        norm_num_groups=8,
        codebook_size=256,
    )
    recipe.objective = run.Config(VQAutoencoding)
    recipe.training.run_dir = "runs/pictogram_vq_autoencoder"
    return recipe


@run.cli.factory(target=pretrain)
def pictograms_latent() -> run.Partial:
    """Pictograms by text in latents of 16x8x8, DiT with cross-attention (6.2 M): two CPU cores.

    The data are the latents of `pictogram_autoencoder`, and embeddings of the pictograms' Unicode names by a small
    frozen encoder: `python -m energon_data.prepare pictograms --size 64 --vae runs/pictogram_vae --text-encoder
    all-minilm-l6-v2 --out data/pictograms_latent`. `python -m launch.evaluate --checkpoint runs/pictograms_latent
    --metric pictograms` decodes a sample for each of 200 names and ranks all drawings by their distance to it.
    """
    recipe = letters_run()
    recipe.model = text_dit(in_channels=16, patch_spatial=2, hidden_size=192, num_attention_heads=6)
    recipe.data = demo_data("data/pictograms_latent")
    recipe.optimizer.lr = 1.5e-3
    recipe.training.run_dir = "runs/pictograms_latent"
    recipe.training.num_steps = 1800
    recipe.training.validation_interval = 0
    recipe.training.sample_interval = 0
    recipe.checkpoint.interval = 600
    recipe.sampling.guidance_scale = 3.0
    recipe.sampling.prompts = [
        "red heart",
        "green apple",
        "sun with face",
        "tiger",
        "sailboat",
        "umbrella",
        "bus",
        "key",
    ]
    return recipe
