"""ST-DiT: attention inside frames and along time, up to 1.2 B.

Models are Open-Sora's and those proposed for NeMo; a "pair" is a spatial and a temporal layer. Rectified flow on
latents of 4 channels, patch 2, text embeddings of width 1024. Under context parallelism spatial and temporal attention
become local by one all-to-all in and one out (`parallel.spatial_temporal_comm=hybrid`).
"""

import nemo_run as run

from energon_data.dataset import EnergonData
from recipes.base import variant
from recipes.dit import as_large_model, as_tiny, flow_conditional
from recipes.models import stdit_s, stdit_xl, stdit_xl_full


def open_sora(model: run.Config) -> run.Partial:
    """Return Open-Sora's setting for one model: rectified flow with logit-normal times, 30 Euler steps, guidance 7.

    Times are shifted by the square root of the size of a latent relative to that of a picture of 512 px
    (`objective.shift_dimension`), and texts are left out for one sample in ten, as there. Deviations of the model: see
    `dit.models.stdit.model.STDiT`.

    Source: hpcaitech/Open-Sora v1.2.0.
    """
    recipe = flow_conditional(model, guidance_scale=7.0, num_steps=30)
    recipe.objective.shift_dimension = 4 * 64 * 64
    return recipe


tiny_stdit = variant("tiny_stdit", lambda: as_tiny(open_sora(stdit_s())))
"""ST-DiT of one pair of layers of width 64, images and clips with texts: any machine.

With context parallelism: torchrun --standalone --nproc-per-node 2 ... parallel.context_parallel_size=2.
"""


tiny_stdit_full = variant("tiny_stdit_full", lambda: as_tiny(open_sora(stdit_xl_full())))
"""As tiny_stdit, with spatial, full and temporal attention in each of two layers: any machine.

With context parallelism (torchrun --standalone --nproc-per-node 2 ... parallel.context_parallel_size=2) full
attention runs on the ring, spatial and temporal attention become local by one all-to-all each way.
"""


def _on_packs(model: run.Config) -> run.Partial:
    """Return one model on packs of images and clips of 24,576 tokens, 64 packs per step, with NeMo's optimizer.

    Deviations: Open-Sora uses no weight decay, a warm-up of 1000 steps, epsilon 1e-15 and an average of decay 0.99.
    """
    recipe = as_large_model(open_sora(model))
    recipe.data = run.Config(
        EnergonData, path="data/latents_clips", max_tokens_per_pack=24_576, packing_buffer_size=1000
    )
    recipe.training.global_batch_size, recipe.training.recompute = 64, "selective"
    return recipe


pretrain_stdit_xl = variant("pretrain_stdit_xl", lambda: _on_packs(stdit_xl()))
"""ST-DiT-XL (1.20 B) on packs of 24,576 tokens of images and clips: 8 x 141 GB or more, 87 GiB each.

A clip of 24 x 32 x 32 patches fills a pack; images fill the room that shorter clips leave. 64 packs per step at lr
1e-4; cheap activations are recomputed; `training.recompute=full` takes 16 GiB. Operations are counted by
--dryrun --tokens 24x32x32.
"""


pretrain_stdit_xl_full = variant(
    "pretrain_stdit_xl_full", lambda: _on_packs(stdit_xl_full()), parallel={"context_parallel_size": 2}
)
"""ST-DiT-XL with full attention (915 M) on packs of 24,576 tokens: 8 x 80 GB or more.

28 layers with spatial, full and temporal attention in each. The hybrid of context parallelism: full attention
runs on the ring, spatial and temporal attention become local by one all-to-all each way. Data and settings of
pretrain_stdit_xl; --dryrun --tokens 24x32x32 --world-size 8 estimates 39 GiB on each.
"""
