"""ST-DiT: attention inside frames and along time, from a tiny form to 3 B.

Models are Open-Sora's and those proposed for NeMo; a "pair" is a spatial and a temporal layer. Rectified flow on
latents of 4 channels, patch 2, text embeddings of width 1024. Under context parallelism spatial and temporal attention
become local by one all-to-all in and one out (`parallel.spatial_temporal_comm=hybrid`). Counts of GPUs follow from the
layout and from the memory that `--dryrun` estimates; none of these runs has been made at full size here.
"""

import nemo_run as run

from dit.objectives.flow_matching import FlowMatching
from dit.settings import SamplingConfig
from dit.training.pretrain import pretrain
from energon_data.dataset import EnergonData
from recipes.components import stdit_3b, stdit_3b_opensora, stdit_s, stdit_xl, stdit_xl_full
from recipes.dit import as_large_model, as_mock, as_tiny, on_tensor_parallel, text_conditional

CLIP_1K = (4, 32, 32)
"""Latent (frames, height, width) of 1024 tokens: 4 x 16 x 16 patches."""
CLIP_25K = (24, 64, 64)
"""Latent of 24,576 tokens: 24 x 32 x 32 patches."""
CLIP_74K = (32, 96, 96)
"""Latent of 73,728 tokens: 32 x 48 x 48 patches."""


def open_sora(name: str, model: run.Config) -> run.Partial:
    """Return Open-Sora's setting for one model: rectified flow with logit-normal times, 30 Euler steps, guidance 7.

    Texts are left out for one sample in ten, as there. Deviations of the model: see `dit.models.stdit.model.STDiT`.
    """
    recipe = text_conditional(name, model)
    recipe.model.context_dropout = 0.1
    recipe.objective = run.Config(FlowMatching, time_distribution="logit_normal")
    recipe.sampling = run.Config(SamplingConfig, solver="euler", num_steps=30, guidance_scale=7.0)
    return recipe


@run.cli.factory(target=pretrain)
def tiny_stdit() -> run.Partial:
    """ST-DiT of one pair of layers of width 64, images and clips with texts: any machine.

    With context parallelism: torchrun --standalone --nproc-per-node 2 ... parallel.context_parallel_size=2.
    """
    return as_tiny(open_sora("tiny_stdit", stdit_s()))


@run.cli.factory(target=pretrain)
def tiny_stdit_full() -> run.Partial:
    """As tiny_stdit, with spatial, full and temporal attention in each of two layers: any machine.

    With context parallelism (torchrun --standalone --nproc-per-node 2 ... parallel.context_parallel_size=2) full
    attention runs on the ring, spatial and temporal attention become local by one all-to-all each way.
    """
    return as_tiny(open_sora("tiny_stdit_full", stdit_xl_full()))


@run.cli.factory(target=pretrain)
def mock_stdit_s() -> run.Partial:
    """ST-DiT-S (59 M) on synthetic clips of 4 x 16 x 16 patches, 15 steps: one GPU.

    One sample to a micro-batch, 32 per step; --dryrun estimates 1.5 GiB.
    """
    return as_mock(open_sora("mock_stdit_s", stdit_s()), CLIP_1K)


def _on_packs(name: str, model: run.Config) -> run.Partial:
    """Return one model on packs of images and clips of 24,576 tokens, 64 packs per step."""
    recipe = as_large_model(open_sora(name, model))
    recipe.data = run.Config(
        EnergonData, path="data/latents_clips", max_tokens_per_pack=24_576, packing_buffer_size=1000
    )
    recipe.training.global_batch_size = 64
    recipe.training.recompute = "selective"
    return recipe


@run.cli.factory(target=pretrain)
def pretrain_stdit_xl() -> run.Partial:
    """ST-DiT-XL (1.20 B) on packs of 24,576 tokens of images and clips: 8 x 141 GB or more, 84 GiB each.

    A clip of 24 x 32 x 32 patches fills a pack; images fill the room that shorter clips leave. 64 packs per step at lr
    1e-4; cheap activations are recomputed; `training.recompute=full` takes 12 GiB. Operations are counted by
    --dryrun --tokens 24x32x32.
    """
    return _on_packs("pretrain_stdit_xl", stdit_xl())


@run.cli.factory(target=pretrain)
def pretrain_stdit_xl_full() -> run.Partial:
    """ST-DiT-XL with full attention (915 M) on packs of 24,576 tokens: 8 x 80 GB or more.

    28 layers with spatial, full and temporal attention in each. The hybrid of context parallelism: full attention
    runs on the ring, spatial and temporal attention become local by one all-to-all each way. Data and settings of
    pretrain_stdit_xl; --dryrun --tokens 24x32x32 --world-size 8 estimates 39 GiB on each.
    """
    recipe = _on_packs("pretrain_stdit_xl_full", stdit_xl_full())
    recipe.parallel.context_parallel_size = 2
    return recipe


@run.cli.factory(target=pretrain)
def mock_stdit_xl() -> run.Partial:
    """ST-DiT-XL (1.20 B) on synthetic clips of 24 x 32 x 32 patches, 15 steps: one GPU of 80 GB or more, 68 GiB of it.

    24 of its 56 layers are recomputed; the memory is what --dryrun estimates.
    """
    recipe = as_mock(open_sora("mock_stdit_xl", stdit_xl()), CLIP_25K)
    recipe.training.recompute, recipe.training.recompute_layers = "full", 24
    return recipe


@run.cli.factory(target=pretrain)
def mock_stdit3b() -> run.Partial:
    """ST-DiT-3B (3.26 B) of the NeMo proposal on synthetic clips of 1024 tokens, TP 4 + SP, 15 steps: 4 x 80 GB.

    --dryrun estimates 14 GiB on each. The proposal's recipe of this name builds XL.
    """
    return on_tensor_parallel(as_mock(as_large_model(open_sora("mock_stdit3b", stdit_3b())), CLIP_1K), 4)


@run.cli.factory(target=pretrain)
def mock_stdit3b_opensora() -> run.Partial:
    """ST-DiT-3B (3.18 B) of Open-Sora on synthetic clips of 73,728 tokens, TP 2 + SP, CP 2, 15 steps: 4 x 80 GB.

    Each GPU has 16 complete frames, so spatial attention sends nothing; temporal attention sends its tokens once and
    gets them back. Every layer is recomputed; --dryrun estimates 22 GiB on each.
    """
    recipe = as_mock(as_large_model(open_sora("mock_stdit3b_opensora", stdit_3b_opensora())), CLIP_74K, text_tokens=300)
    recipe.parallel.context_parallel_size = 2
    recipe.training.recompute = "full"
    return on_tensor_parallel(recipe, 2)
