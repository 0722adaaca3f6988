"""Clips of moving letters: real video for the mixed image-video path."""

import nemo_run as run

from dit.models.stdit.config import STDiTConfig
from dit.training.pretrain import pretrain
from energon_data.dataset import EnergonData
from energon_data.prepare.moving_letters import DIRECTIONS, SPEEDS, caption
from recipes.letters_text import letters_text


@run.cli.factory(target=pretrain)
def moving_letters_dit() -> run.Partial:
    """Moving letters by text, 8 frames of 16 x 16 and stills, DiT with cross-attention (3.0 M): TODO minutes.

    TODO
    """
    recipe = letters_text()
    recipe.model.position_embedding = "sincos_3d"
    # Eight frames say a thing eight times over, so it takes more noise to hide it.
    recipe.objective.time_shift = 3.0
    # One clip is 128 tokens, as many as eight stills.
    recipe.data = run.Config(EnergonData, path="data/moving_letters", num_streams=2, max_tokens_per_pack=1088)
    recipe.training.run_dir = "runs/moving_letters_dit"
    recipe.training.num_steps = 2400
    recipe.training.micro_batch_size = 1
    recipe.training.global_batch_size = 2
    recipe.training.validation_interval = 600
    recipe.training.sample_interval = 600
    recipe.sampling.prompts = [caption(letter, d, speed) for letter in "AQS" for d in DIRECTIONS for speed in SPEEDS]
    return recipe


@run.cli.factory(target=pretrain)
def moving_letters_stdit() -> run.Partial:
    """Moving letters by text, ST-DiT that attends within frames, then through time (1.8 M): TODO minutes.

    TODO
    """
    recipe = moving_letters_dit()
    recipe.model = run.Config(
        STDiTConfig,
        hidden_size=128,
        num_layers=6,
        num_attention_heads=4,
        in_channels=1,
        patch_spatial=4,
        context_size=384,
        context_dropout=0.1,
        fps_conditioning=False,
        position_embedding="sincos_3d",
    )
    recipe.training.run_dir = "runs/moving_letters_stdit"
    return recipe
