"""FLUX.1: text and image as two streams, then as one; flow matching on images of 1024 px (4096 tokens).

Sizes and settings are NeMo's. Counts of GPUs follow from the layout and from the memory that `--dryrun` estimates; none
of these runs has been made at full size here. A sample needs a pooled text embedding (`pooled.npy`) besides its text.
"""

import nemo_run as run

from dit.models.base import ModelConfig
from dit.models.flux.config import FluxConfig
from dit.objectives.flow_matching import FlowMatching
from dit.settings import SamplingConfig
from dit.training.pretrain import pretrain
from energon_data.dataset import EnergonData
from recipes.components import flux_dev, flux_two_layers
from recipes.dit import as_mock, in_seconds, on_tensor_parallel, text_conditional, with_fsdp

IMAGE_1024 = (1, 128, 128)
"""Latent (frames, height, width) of 4096 tokens."""


def _flux(name: str, model: run.Config[ModelConfig]) -> run.Partial:
    """Return NeMo's setting: one sample to a micro-batch, two to a step, AdamW at a constant 1e-4; logit-normal times.

    Deviation: texts are left out for one sample in ten, this project's choice.

    Source: NeMo 2.x, recipes `flux_12b` and `flux_535m`; times: Esser et al. 2024, arXiv:2403.03206, section 3.1.
    """
    recipe = text_conditional(name, model)
    recipe.model.context_dropout = 0.1
    recipe.objective = run.Config(FlowMatching, time_distribution="logit_normal")
    recipe.sampling = run.Config(SamplingConfig, solver="euler", num_steps=50, guidance_scale=3.5)
    recipe.training.num_steps = 1_168_251
    recipe.training.global_batch_size = 2
    return recipe


@run.cli.factory(target=pretrain)
def tiny_flux() -> run.Partial:
    """Synthetic images and clips with texts, a FLUX of width 64, one block of each kind: trains in seconds anywhere.

    Packs of 128 tokens, 20 steps; the loss falls by a tenth or more.
    """
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "ffn_hidden_size": 128, "rope_axes": [4, 6, 6]}
    conditions = {"in_channels": 4, "context_size": 32, "pooled_size": 16}
    model = run.Config(FluxConfig, num_joint_layers=1, num_single_layers=1, **sizes, **conditions)
    return in_seconds(_flux("tiny_flux", model))


@run.cli.factory(target=pretrain)
def flux_535m() -> run.Partial:
    """FLUX.1 cut to one block of each kind (535 M) on synthetic images of 1024 px, 15 steps: one 24 GB GPU.

    For measurements, and to check a machine. `--dryrun` estimates 10 GiB.
    """
    return as_mock(_flux("flux_535m", flux_two_layers()), IMAGE_1024, text_tokens=256)


@run.cli.factory(target=pretrain)
def flux_12b() -> run.Partial:
    """FLUX.1 (11.9 B) on images of 1024 px, TP 2 + SP, CP 2, FSDP, two to a step: 8 x 80 GB.

    `--dryrun` estimates 49 GiB on each GPU. The modulations, 3.2 B, are replicated over tensor-parallel
    rank; FSDP spreads them over the other four.
    """
    recipe = with_fsdp(on_tensor_parallel(_flux("flux_12b", flux_dev()), 2))
    recipe.data = run.Config(EnergonData, path="data/latents_1024", max_tokens_per_sample=4096, bucket_by_shape=True)
    recipe.parallel.context_parallel_size = 2
    return recipe
