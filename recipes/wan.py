"""Wan-shaped video transformers: flow matching on synthetic clips of 480p, for measurements of long sequences.

Sizes are those of Wan 2.1's text-to-video models, clip and layout those of NVIDIA-NeMo/DFM. Counts of GPUs follow from
the layout and from the memory that `--dryrun` estimates; none of these runs has been made at full size here.
"""

import nemo_run as run

from dit.models.base import ModelConfig
from dit.models.wan.config import WanConfig
from dit.objectives.flow_matching import FlowMatching
from dit.settings import SamplingConfig
from dit.training.pretrain import pretrain
from recipes.components import wan_1_3b, wan_2_2_ti2v_5b, wan_14b
from recipes.dit import as_large_model, as_mock, as_tiny, on_tensor_parallel, text_conditional, with_fsdp

CLIP_480P = (24, 104, 60)
"""Latent (frames, height, width) of 37,440 tokens: about 93 frames of 832 x 480 through an autoencoder of 4 x 8 x 8."""
CLIP_720P = (31, 44, 80)
"""Latent (frames, height, width) of 27,280 tokens: 121 frames of 704 x 1280 through an autoencoder of 4 x 16 x 16."""


def wan(name: str, model: run.Config[ModelConfig]) -> run.Partial:
    """Return flow matching with times moved towards noise, as long sequences want them.

    Texts are left out for one sample in ten, this project's choice.
    """
    recipe = text_conditional(name, model)
    recipe.model.context_dropout = 0.1
    recipe.objective = run.Config(FlowMatching, time_distribution="logit_normal", time_shift=3.0)
    recipe.sampling = run.Config(SamplingConfig, solver="euler", num_steps=50, guidance_scale=5.0)
    return recipe


@run.cli.factory(target=pretrain)
def tiny_wan() -> run.Partial:
    """2-layer Wan of width 64, images and clips with texts: any machine.

    Packs of 128 tokens, 20 steps; the loss falls by a tenth or more.
    """
    recipe = as_tiny(wan("tiny_wan", run.Config(WanConfig)))
    recipe.model.ffn_hidden_size = 128
    return recipe


def mock(name: str, model: run.Config[ModelConfig], samples: int) -> run.Partial:
    """Return 15 steps of synthetic clips under DFM's layout."""
    recipe = on_tensor_parallel(as_mock(as_large_model(wan(name, model)), CLIP_480P), 2)
    recipe.parallel.context_parallel_size = 4
    recipe.training.global_batch_size = samples
    return recipe


@run.cli.factory(target=pretrain)
def wan_1_3b_mock() -> run.Partial:
    """Wan 2.1 1.3B (1.42 B) on synthetic clips of 37,440 tokens, TP 2 + SP, CP 4, 15 steps: 8 x 40 GB.

    Every GPU works on 9360 tokens of a clip. Cheap activations are recomputed; `--dryrun` estimates 22 GiB on each, 23
    without.
    """
    recipe = mock("wan_1_3b_mock", wan_1_3b(), 8)
    recipe.training.recompute = "selective"
    return recipe


@run.cli.factory(target=pretrain)
def wan_14b_mock() -> run.Partial:
    """Wan 2.1 14B (14.3 B) on synthetic clips of 37,440 tokens, TP 2 + SP, CP 4, FSDP: 32 x 141 GB or more.

    15 steps. `--dryrun` estimates 75 GiB on each GPU, 70 with `training.recompute=selective`.
    DFM publishes 325.8 TFLOP/s for each of 128 H100 with this model, clip and layout: 1974 tokens/s.
    """
    return with_fsdp(mock("wan_14b_mock", wan_14b(), 16))


@run.cli.factory(target=pretrain)
def tiny_wan_image_to_video() -> run.Partial:
    """tiny_wan, in which half of the clips have a clean first frame: any machine.

    Packs of 128 tokens, 20 steps; clean tokens do not count in the loss, which falls by a tenth or more.
    """
    recipe = as_tiny(wan("tiny_wan_image_to_video", run.Config(WanConfig)))
    recipe.model.ffn_hidden_size = 128
    recipe.data.clean_first_frame = 0.5
    return recipe


@run.cli.factory(target=pretrain)
def wan_2_2_ti2v_5b_mock() -> run.Partial:
    """Wan 2.2 TI2V 5B (5.00 B) on synthetic clips of 27,280 tokens, TP 2 + SP, CP 4, FSDP, 15 steps: 16 x 80 GB.

    The first frame of half of the clips is clean, so that one model draws clips from a text, and from a text and a
    picture. Clips have the published size: 121 frames of 1280 x 704 through an autoencoder of 4 x 16 x 16.
    """
    recipe = with_fsdp(mock("wan_2_2_ti2v_5b_mock", wan_2_2_ti2v_5b(), 16))
    recipe.data.frames, recipe.data.height, recipe.data.width = CLIP_720P
    recipe.data.clean_first_frame = 0.5
    recipe.objective.time_shift = 5.0
    return recipe
