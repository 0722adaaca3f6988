"""Small cascades of Imagen's UNets on two CPU cores: letters and colour pictograms at 16, 32 and 64 pixels.

Each model is a run of its own; `launch.sample --cascade base=RUN sr32=RUN sr64=RUN` draws through all of them.
"""

import nemo_run as run

from dit.models.efficient_unet.config import EfficientUNetConfig
from dit.models.unet.config import UNetConfig
from dit.objectives.edm import EDM
from dit.training.pretrain import pretrain
from energon_data.dataset import EnergonData
from examples.letters.recipes import letters_dit
from examples.pictograms.recipes import pictograms_latent

SIZES = {"channel_multipliers": [1, 2, 4], "num_res_blocks": [1, 1, 1], "attention_levels": [2]}
NARROW = {"head_size": 32, "norm_num_groups": 8}
CLASSES = {"in_channels": 1, "num_classes": 26, "class_dropout": 0.1, "context_size": None, "attention_type": "self"}
TEXTS = {"context_size": 384, "context_dropout": 0.1}
# Which letter it is, is decided where the noise is several times as strong as the strokes, and the paper's
# distribution of levels hardly trains there.
NOISY = {"p_mean": 0.5, "p_std": 1.4}
# Drawings also have colours and flat grounds, which small levels decide: with those of letters they stay speckled.
WIDE = {"p_mean": 0.0, "p_std": 1.8}
LARGER = {"low_resolution_factor": 2, "noise_augmentation": True}
# The models before make small errors only. Noised as strongly as the paper's levels do, small pictures teach little.
AUGMENTATION = {"augmentation_p_mean": -3.0}


def _run(recipe: run.Partial, name: str) -> run.Partial:
    """Set what all models have in common: EDM, an average over the last hundred steps, no samples in between."""
    recipe.objective = run.Config(EDM)
    recipe.optimizer.lr = 2e-3
    recipe.training.run_dir = f"runs/{name}"
    recipe.training.ema_decay = 0.99
    recipe.training.micro_batch_size = 16
    recipe.training.global_batch_size = 32
    recipe.training.validation_interval = 0
    recipe.training.sample_interval = 0
    recipe.checkpoint.interval = 300
    recipe.sampling.solver, recipe.sampling.num_steps = "heun", 15
    return recipe


def _letters(pixels: int, path: str) -> run.Partial:
    recipe = _run(letters_dit(), f"cascade_letters_{pixels}")
    recipe.data = run.Config(EnergonData, path=path, num_streams=2, bucket_by_shape=True)
    return recipe


def _pictograms(pixels: int) -> run.Partial:
    recipe = _run(pictograms_latent(), f"cascade_pictograms_{pixels}")
    recipe.data = run.Config(
        EnergonData, path="data/pictograms_64", num_streams=2, bucket_by_shape=True, resize_side=pixels
    )
    return recipe


def _enlarging(recipe: run.Partial) -> run.Partial:
    """Set the shorter training of a model that enlarges."""
    recipe.objective = run.Config(EDM, **AUGMENTATION)
    recipe.training.num_steps = 900
    recipe.sampling.guidance_scale = 1.0
    return recipe


@run.cli.factory(target=pretrain)
def cascade_letters_16() -> run.Partial:
    """Capital letters A-Z, 16 x 16 pixels, Imagen's regular UNet: two CPU cores. The first model of a cascade.

    The data are those of `letters_dit`; those of the next two models have `--size 32` and `--size 64`.
    Of 208 letters that it draws, 96 % are read correctly.
    """
    recipe = _letters(16, "data/letters")
    recipe.model = run.Config(UNetConfig, hidden_size=32, **SIZES, **NARROW, **CLASSES)
    recipe.objective = run.Config(EDM, **NOISY)
    recipe.training.num_steps = 1200
    return recipe


@run.cli.factory(target=pretrain)
def cascade_letters_32() -> run.Partial:
    """Letters from 16 to 32 pixels, Imagen's Efficient UNet: two CPU cores. The second model of a cascade.

    It makes its small pictures from the data, `python -m energon_data.prepare letters --size 32 --out data/letters_32`.
    Of the letters of `cascade_letters_16` that it enlarges, 95 % are read correctly.
    """
    recipe = _enlarging(_letters(32, "data/letters_32"))
    recipe.model = run.Config(EfficientUNetConfig, hidden_size=32, **SIZES, **NARROW, **CLASSES, **LARGER)
    return recipe


@run.cli.factory(target=pretrain)
def cascade_letters_64() -> run.Partial:
    """Letters from 32 to 64 pixels, Imagen's Efficient UNet: two CPU cores. The third model of a cascade.

    The data: `python -m energon_data.prepare letters --size 64 --out data/letters_64`. 92 % are read correctly.
    """
    recipe = cascade_letters_32()
    recipe.model.hidden_size, recipe.training.num_steps = 16, 1200
    recipe.data.path = "data/letters_64"
    recipe.training.run_dir = "runs/cascade_letters_64"
    return recipe


@run.cli.factory(target=pretrain)
def cascade_pictograms_16() -> run.Partial:
    """Colour pictograms by name, 16 x 16 pixels, Imagen's regular UNet: two CPU cores. The first model of a cascade.

    The data are drawings and embeddings of their Unicode names: `python -m energon_data.prepare pictograms --size 64
    --blocks pictographs transport supplemental extended --count 400 --text-encoder all-minilm-l6-v2 --out
    data/pictograms_64`, made smaller while they are read. Of all 400
    drawings, the one asked for is nearest to 95 % of 200 samples.
    """
    recipe = _pictograms(16)
    recipe.model = run.Config(UNetConfig, hidden_size=32, condition_size=64, **SIZES, **NARROW, **TEXTS)
    recipe.objective = run.Config(EDM, **WIDE)
    recipe.training.num_steps = 3000
    return recipe


@run.cli.factory(target=pretrain)
def cascade_pictograms_32() -> run.Partial:
    """Colour pictograms from 16 to 32 pixels, Imagen's Efficient UNet: two CPU cores. The second model of a cascade.

    The data are all drawings, one in twenty held out: `python -m energon_data.prepare pictograms --size 64
    --text-encoder all-minilm-l6-v2 --validation 0.05 --out data/all_pictograms_64`. Held-out drawings that it enlarges
    are nearer to the real ones than by bicubic interpolation, 19.5 and 18.7 dB.
    """
    recipe = _enlarging(_pictograms(32))
    recipe.data.path = "data/all_pictograms_64"
    recipe.model = run.Config(EfficientUNetConfig, hidden_size=32, **SIZES, **NARROW, **TEXTS, **LARGER)
    recipe.training.num_steps = 1600
    return recipe


@run.cli.factory(target=pretrain)
def cascade_pictograms_64() -> run.Partial:
    """Colour pictograms from 32 to 64 pixels, Imagen's Efficient UNet: two CPU cores. The third model of a cascade.

    The data are those of `cascade_pictograms_32`. Held-out drawings that it enlarges are nearer to the real ones than
    by bicubic interpolation, 23.8 and 19.8 dB. Of samples drawn through the cascade, the drawing asked for is nearest
    to 93.5 %.
    """
    recipe = cascade_pictograms_32()
    recipe.data.resize_side = None
    recipe.training.run_dir = "runs/cascade_pictograms_64"
    return recipe
