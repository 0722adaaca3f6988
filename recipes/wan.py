"""Wan-shaped video transformers: flow matching on synthetic clips.

The forms at full size measure systems and live in benchmarks/model_recipes.py.
"""

import nemo_run as run

from dit.models.base import ModelConfig
from dit.models.wan.config import WanConfig
from dit.training.pretrain import pretrain
from recipes.dit import as_tiny, flow_conditional


def wan(name: str, model: run.Config[ModelConfig]) -> run.Partial:
    """Return flow matching with times moved towards noise, as long sequences want them.

    Texts are left out for one sample in ten, this project's choice.
    """
    return flow_conditional(name, model, guidance_scale=5.0, time_shift=3.0)


@run.cli.factory(target=pretrain)
def tiny_wan() -> run.Partial:
    """2-layer Wan of width 64, images and clips with texts: any machine.

    Packs of 128 tokens, 20 steps; the loss falls by a tenth or more.
    """
    recipe = as_tiny(wan("tiny_wan", run.Config(WanConfig)))
    recipe.model.ffn_hidden_size = 128
    return recipe


@run.cli.factory(target=pretrain)
def tiny_wan_image_to_video() -> run.Partial:
    """tiny_wan, in which half of the clips have a clean first frame: any machine.

    Packs of 128 tokens, 20 steps; clean tokens do not count in the loss, which falls by a tenth or more.
    """
    recipe = tiny_wan()
    recipe.training.run_dir = "runs/tiny_wan_image_to_video"
    recipe.data.clean_first_frame = 0.5
    return recipe
