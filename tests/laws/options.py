"""Recipes with options that several backbones share, for `backbones.py`: token routing, control pictures."""

import nemo_run as run

from dit.training.pretrain import pretrain
from recipes.dit import pretrain_7b
from recipes.flux import flux_12b
from recipes.models import sprint, tread
from recipes.tiny import tiny_dit


@run.cli.factory(target=pretrain)
def tread_cross() -> run.Partial:
    """DiT-7B with cross-attention; half of the tokens skip the middle layers."""
    recipe = pretrain_7b()
    recipe.model.routing = tread()
    return recipe


@run.cli.factory(target=pretrain)
def sprint_dit() -> run.Partial:
    """tiny_dit with a bottleneck; 3/4 of the tokens skip the middle layers, and half of the samples skip them fully."""
    recipe = tiny_dit()
    recipe.model.num_layers, recipe.model.routing = 5, sprint()
    recipe.model.routing.path_dropout, recipe.model.bottleneck_size = 0.5, 16
    recipe.data.clean_first_frame = 0.5
    return recipe


@run.cli.factory(target=pretrain)
def flux_control() -> run.Partial:
    """FLUX.1 with a control picture, as in FLUX.1 Canny and Depth."""
    recipe = flux_12b()
    recipe.model.control_channels = 16
    return recipe
