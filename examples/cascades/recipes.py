"""Cascades of Imagen's UNets on two CPU cores: letters and colour pictograms at 16, 32 and 64 pixels.

Each model is a separate run; `launch.sample --cascade base=RUN sr32=RUN sr64=RUN` samples from all of them.
"""

import nemo_run as run

from dit.models.efficient_unet.config import EfficientUNetConfig
from dit.models.unet.config import UNetConfig
from dit.objectives.edm import EDM
from dit.training.pretrain import pretrain
from examples.letters.recipes import demo_data, letters_run
from examples.pictograms.recipes import pictograms_latent

SIZES = {"channel_multipliers": [1, 2, 4], "num_res_blocks": [1, 1, 1], "attention_levels": [2]}
NARROW = {"head_size": 32, "norm_num_groups": 8}
CLASSES = {"in_channels": 1, "num_classes": 26, "class_dropout": 0.1, "context_size": None, "attention_type": "self"}
TEXTS = {"context_size": 384, "context_dropout": 0.1}
# The network decides which letter it draws where the noise is several times as strong as the strokes. The paper's
# distribution has few levels there.
NOISY = {"p_mean": 0.5, "p_std": 1.4}
# Drawings also have colours and flat areas, which need small levels: with the levels of letters they stay speckled.
WIDE = {"p_mean": 0.0, "p_std": 1.8}
LARGER = {"low_resolution_factor": 2, "noise_augmentation": True}
# The model before makes small errors only. The paper's levels would hide most of the small picture.
AUGMENTATION = {"augmentation_p_mean": -3.0}


def _run(recipe: run.Partial, name: str) -> run.Partial:
    """Set the common part of all models: EDM, a weight average over 100 steps, no samples during training."""
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
    recipe = _run(letters_run(), f"cascade_letters_{pixels}")
    recipe.data = demo_data(path, bucket_by_shape=True)
    return recipe


def _pictograms(pixels: int) -> run.Partial:
    recipe = _run(pictograms_latent(), f"cascade_pictograms_{pixels}")
    recipe.data = demo_data("data/pictograms_64", bucket_by_shape=True, resize_side=pixels)
    return recipe


def _enlarging(recipe: run.Partial) -> run.Partial:
    """Set the shorter training of a super-resolution model."""
    recipe.objective = run.Config(EDM, **AUGMENTATION)
    recipe.training.num_steps = 900
    recipe.sampling.guidance_scale = 1.0
    return recipe


@run.cli.factory(target=pretrain)
def cascade_letters_16() -> run.Partial:
    """Capital letters A-Z, 16 px, Imagen's regular UNet: two CPU cores.

    The data are those of `letters_dit`; the next two models read data with `--size 32` and `--size 64`. Of 208 letters,
    95 % are read correctly.
    """
    recipe = _letters(16, "data/letters")
    recipe.model = run.Config(UNetConfig, hidden_size=32, **SIZES, **NARROW, **CLASSES)
    recipe.objective = run.Config(EDM, **NOISY)
    recipe.training.num_steps = 1200
    recipe.sampling.guidance_scale = 3.0  # with 2.0, 90 % are read correctly
    return recipe


@run.cli.factory(target=pretrain)
def cascade_letters_32() -> run.Partial:
    """Letters from 16 to 32 pixels, Imagen's Efficient UNet: two CPU cores.

    It reduces the data, `python -m energon_data.prepare letters --size 32 --out data/letters_32`, to get its inputs. Of
    the enlarged letters of `cascade_letters_16`, 98 % are read correctly.
    """
    recipe = _enlarging(_letters(32, "data/letters_32"))
    recipe.model = run.Config(EfficientUNetConfig, hidden_size=32, **SIZES, **NARROW, **CLASSES, **LARGER)
    return recipe


@run.cli.factory(target=pretrain)
def cascade_letters_64() -> run.Partial:
    """Letters from 32 to 64 pixels, Imagen's Efficient UNet: two CPU cores.

    The data: `python -m energon_data.prepare letters --size 64 --out data/letters_64`. 96 % are read correctly.
    """
    recipe = cascade_letters_32()
    recipe.model.hidden_size, recipe.training.num_steps = 16, 1200
    recipe.data.path = "data/letters_64"
    recipe.training.run_dir = "runs/cascade_letters_64"
    return recipe


@run.cli.factory(target=pretrain)
def cascade_pictograms_16() -> run.Partial:
    """Colour pictograms by name, 16 px, Imagen's regular UNet: two CPU cores.

    The data are drawings and embeddings of their Unicode names: `python -m energon_data.prepare pictograms --size 64
    --blocks pictographs transport supplemental extended --count 400 --text-encoder all-minilm-l6-v2 --out
    data/pictograms_64`, reduced while they are read. For 95 % of 200
    samples, the requested drawing is the nearest of all 400 drawings.
    """
    recipe = _pictograms(16)
    recipe.model = run.Config(UNetConfig, hidden_size=32, condition_size=64, **SIZES, **NARROW, **TEXTS)
    recipe.objective = run.Config(EDM, **WIDE)
    recipe.training.num_steps = 3000
    return recipe


@run.cli.factory(target=pretrain)
def cascade_pictograms_32() -> run.Partial:
    """Colour pictograms from 16 to 32 pixels, Imagen's Efficient UNet: two CPU cores.

    The data are all drawings, one in twenty held out: `python -m energon_data.prepare pictograms --size 64
    --text-encoder all-minilm-l6-v2 --validation 0.05 --out data/all_pictograms_64`. Enlarged held-out drawings have a
    PSNR of 19.5 dB, and 18.7 dB with bicubic interpolation.
    """
    recipe = _enlarging(_pictograms(32))
    recipe.data.path = "data/all_pictograms_64"
    recipe.model = run.Config(EfficientUNetConfig, hidden_size=32, **SIZES, **NARROW, **TEXTS, **LARGER)
    recipe.training.num_steps = 1600
    return recipe


@run.cli.factory(target=pretrain)
def cascade_pictograms_64() -> run.Partial:
    """Colour pictograms from 32 to 64 pixels, Imagen's Efficient UNet: two CPU cores.

    The data are those of `cascade_pictograms_32`. Enlarged held-out drawings have a PSNR of 23.8 dB, and 19.8 dB with
    bicubic interpolation. For 93.5 % of the samples of the cascade, the requested drawing is the nearest.
    """
    recipe = cascade_pictograms_32()
    recipe.data.resize_side = None
    recipe.training.run_dir = "runs/cascade_pictograms_64"
    return recipe
