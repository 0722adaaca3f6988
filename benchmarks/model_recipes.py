"""Runs to measure backbones: ST-DiT under context parallelism, and rows of published tables for Imagen, FLUX and Wan.

All feed synthetic data; `benchmarks.recipes` says how to time one.
"""

import nemo_run as run

from benchmarks.recipes import CLIP_74K
from dit.models.base import ModelConfig
from dit.parallel.dims import ParallelConfig
from recipes import flux, imagen, stdit, wan
from recipes.base import registered, variant
from recipes.dit import as_large_model, as_mock, flow_conditional, on_tensor_parallel, with_fsdp
from recipes.models import flux_dev, stdit_3b, stdit_s, stdit_xl, wan_1_3b, wan_2_2_ti2v_5b, wan_14b

CLIP_1K = (4, 32, 32)
"""Latent (frames, height, width) of 1024 tokens: 4 x 16 x 16 patches."""
CLIP_25K = (24, 64, 64)
"""Latent of 24,576 tokens: 24 x 32 x 32 patches."""
CLIP_480P = (24, 104, 60)
"""Latent (frames, height, width) of 37,440 tokens: about 93 frames of 832 x 480 through an autoencoder of 4 x 8 x 8."""
CLIP_720P = (31, 44, 80)
"""Latent (frames, height, width) of 27,280 tokens: 121 frames of 704 x 1280 through an autoencoder of 4 x 16 x 16."""


mock_stdit_s = variant("mock_stdit_s", lambda: as_mock(stdit.open_sora(stdit_s()), CLIP_1K))
"""ST-DiT-S (59 M) on synthetic clips of 4 x 16 x 16 patches, 15 steps: one GPU.

One sample to a micro-batch, 32 per step; --dryrun estimates 1.5 GiB.
"""


@registered
def mock_stdit_xl() -> run.Partial:
    """ST-DiT-XL (1.20 B) on synthetic clips of 24 x 32 x 32 patches, 15 steps: one GPU of 80 GB or more, 68 GiB of it.

    24 of its 56 layers are recomputed; the memory is what --dryrun estimates.
    """
    recipe = as_mock(stdit.open_sora(stdit_xl()), CLIP_25K)
    recipe.training.recompute, recipe.training.recompute_layers = "full", 24
    return recipe


@registered
def mock_stdit3b() -> run.Partial:
    """ST-DiT-3B (3.26 B) of the NeMo proposal on synthetic clips of 1024 tokens, TP 4 + SP, 15 steps: 4 x 80 GB.

    --dryrun estimates 16 GiB on each. The proposal's recipe of this name builds XL.
    """
    return on_tensor_parallel(as_mock(as_large_model(stdit.open_sora(stdit_3b())), CLIP_1K), 4)


def _wan(model: run.Config[ModelConfig], samples: int) -> run.Partial:
    """Return 15 steps of synthetic clips under DFM's layout."""
    recipe = on_tensor_parallel(as_mock(as_large_model(flow_conditional(model, **wan.FLOW)), CLIP_480P), 2)
    recipe.parallel.context_parallel_size = 4
    recipe.training.global_batch_size = samples
    return recipe


wan_1_3b_mock = variant("wan_1_3b_mock", lambda: _wan(wan_1_3b(), 8), training={"recompute": "selective"})
"""Wan 2.1 1.3B (1.42 B) on synthetic clips of 37,440 tokens, TP 2 + SP, CP 4, 15 steps: 8 x 40 GB.

Every GPU works on 9360 tokens of a clip. Cheap activations are recomputed; `--dryrun` estimates 22 GiB on each, 23
without.
"""


wan_14b_mock = variant("wan_14b_mock", lambda: with_fsdp(_wan(wan_14b(), 16)))
"""Wan 2.1 14B (14.3 B) on synthetic clips of 37,440 tokens, TP 2 + SP, CP 4, FSDP: 32 x 141 GB or more.

15 steps. `--dryrun` estimates 75 GiB on each GPU, 70 with `training.recompute=selective`.
DFM publishes 325.8 TFLOP/s for each of 128 H100 with this model, clip and layout: 1974 tokens/s.
"""


@registered
def wan_2_2_ti2v_5b_mock() -> run.Partial:
    """Wan 2.2 TI2V 5B (5.00 B) on synthetic clips of 27,280 tokens, TP 2 + SP, CP 4, FSDP, 15 steps: 16 x 80 GB.

    The first frame of half of the clips is clean, so that one model draws clips from a text, and from a text and a
    picture. Clips have the published size: 121 frames of 1280 x 704 through an autoencoder of 4 x 16 x 16.
    """
    recipe = with_fsdp(_wan(wan_2_2_ti2v_5b(), 16))
    recipe.data.frames, recipe.data.height, recipe.data.width = CLIP_720P
    recipe.data.clean_first_frame = 0.5
    recipe.objective.time_shift = 5.0
    return recipe


def _stdit(comm: str, context_size: int) -> run.Partial:
    """Return four pairs of ST-DiT-3B on one clip of 73,728 tokens, with context parallelism only.

    For 8192 tokens: `data.height=32 data.width=32`.
    """
    recipe = as_mock(stdit.open_sora(stdit_3b()), CLIP_74K, text_tokens=300)
    recipe.model.num_layers = 8
    recipe.training.global_batch_size = 1
    recipe.training.recompute = "selective"
    recipe.parallel = run.Config(
        ParallelConfig, context_parallel_size=context_size, spatial_temporal_comm=comm, overlap_grad_reduce=True
    )
    return recipe


bench_stdit_hybrid_cp1 = variant("bench_stdit_hybrid_cp1", lambda: _stdit("hybrid", 1))
"""4 pairs of ST-DiT-3B (578 M) at 73,728 tokens, CP 1, attention made local by all-to-all: one GPU of 80 GB.

No communication; the baseline for the others. --dryrun estimates 56 GiB.
"""


bench_stdit_ring_cp1 = variant("bench_stdit_ring_cp1", lambda: _stdit("context", 1))
"""4 pairs of ST-DiT-3B (578 M) at 73,728 tokens, CP 1, attention on the ring: one GPU of 80 GB.

The same as bench_stdit_hybrid_cp1, so that both columns start at the same point.
"""


bench_stdit_hybrid_cp2 = variant("bench_stdit_hybrid_cp2", lambda: _stdit("hybrid", 2))
"""4 pairs of ST-DiT-3B (578 M) at 73,728 tokens, CP 2, attention made local by all-to-all: 2 x 80 GB.

A forward pass sends 151 MB (bf16) per GPU and temporal attention, 1/2 of the ring, and nothing for spatial
attention. --dryrun estimates 29 GiB on each.
"""


bench_stdit_ring_cp2 = variant("bench_stdit_ring_cp2", lambda: _stdit("context", 2))
"""4 pairs of ST-DiT-3B (578 M) at 73,728 tokens, CP 2, attention on the ring: 2 x 80 GB.

A forward pass sends 302 MB (bf16) per GPU and self-attention, spatial or temporal; a backward pass twice that.
"""


bench_stdit_hybrid_cp4 = variant("bench_stdit_hybrid_cp4", lambda: _stdit("hybrid", 4))
"""4 pairs of ST-DiT-3B (578 M) at 73,728 tokens, CP 4, attention made local by all-to-all: 4 x 80 GB.

A forward pass sends 113 MB (bf16) per GPU and temporal attention, 1/4 of the ring, and nothing for spatial
attention. --dryrun estimates 16 GiB on each.
"""


bench_stdit_ring_cp4 = variant("bench_stdit_ring_cp4", lambda: _stdit("context", 4))
"""4 pairs of ST-DiT-3B (578 M) at 73,728 tokens, CP 4, attention on the ring: 4 x 80 GB.

A forward pass sends 453 MB (bf16) per GPU and self-attention, spatial or temporal; a backward pass twice that.
"""


bench_stdit_hybrid_cp8 = variant("bench_stdit_hybrid_cp8", lambda: _stdit("hybrid", 8))
"""4 pairs of ST-DiT-3B (578 M) at 73,728 tokens, CP 8, attention made local by all-to-all: 8 x 80 GB.

A forward pass sends 66 MB (bf16) per GPU and temporal attention, 1/8 of the ring, and nothing for spatial
attention. --dryrun estimates 9.7 GiB on each.
"""


bench_stdit_ring_cp8 = variant("bench_stdit_ring_cp8", lambda: _stdit("context", 8))
"""4 pairs of ST-DiT-3B (578 M) at 73,728 tokens, CP 8, attention on the ring: 8 x 80 GB.

A forward pass sends 528 MB (bf16) per GPU and self-attention, spatial or temporal; a backward pass twice that.
"""


def _imagen(recipe: run.Partial, pixels: int, batch: int, micro_batch: int) -> run.Partial:
    """Return 15 steps on synthetic pictures, with the batch of the published speed on 32 GPUs."""
    as_mock(recipe, (1, pixels, pixels), text_tokens=imagen.TEXT_TOKENS)
    recipe.training.global_batch_size, recipe.training.micro_batch_size = batch, micro_batch
    return recipe


@registered
def bench_imagen_500m_res_64() -> run.Partial:
    """Imagen's base model (525 M) on synthetic pictures of 64 px, 2048 per step: 32 x 80 GB.

    15 steps. NeMo publishes 1.489 steps/s on 32 A100 and 3.162 on 32 H100.
    """
    return _imagen(imagen.imagen_500m_res_64(), 64, 2048, 64)


bench_imagen_2b_res_64 = variant("bench_imagen_2b_res_64", lambda: _imagen(imagen.imagen_2b_res_64(), 64, 512, 16))
"""Imagen's larger base model (2.17 B) on synthetic pictures of 64 px, 512 per step: 32 x 80 GB.

15 steps. NeMo publishes 1.661 steps/s on 32 A100 and 3.631 on 32 H100.
"""


@registered
def bench_imagen_400m_res_256() -> run.Partial:
    """Imagen's regular super-resolution (408 M) on synthetic pictures of 256 px, 512 per step: 32 x 80 GB.

    15 steps. NeMo publishes 1.609 steps/s on 32 A100 and 3.166 on 32 H100.
    """
    return _imagen(imagen.imagen_400m_res_256(), 256, 512, 16)


@registered
def bench_imagen_600m_res_256() -> run.Partial:
    """Imagen's Efficient UNet (646 M) on synthetic pictures of 256 px, 2048 per step: 32 x 80 GB.

    15 steps. NeMo publishes 1.264 steps/s on 32 A100 and 2.668 on 32 H100.
    """
    return _imagen(imagen.imagen_600m_res_256(), 256, 2048, 64)


@registered
def bench_imagen_600m_res_1024() -> run.Partial:
    """Imagen's Efficient UNet (639 M) on synthetic crops of 256 px, 2048 per step: 32 x 80 GB.

    15 steps. NeMo publishes 1.319 steps/s on 32 A100 and 2.837 on 32 H100.
    """
    return _imagen(imagen.imagen_600m_res_1024(), 256, 2048, 64)


@registered
def bench_flux12b_1024() -> run.Partial:
    """FLUX.1 (11.9 B) on synthetic images of 1024 px (4096 tokens), FSDP: 4 x 141 GB, 87 GiB each.

    torchtitan's row: 9294 tokens/s and 490 TFLOP/s in its own convention for each of 4 GB200. Its batch is unknown; one
    image to a micro-batch and two per step on each GPU are assumed; texts have 512 tokens.
    """
    recipe = with_fsdp(as_mock(flux.flux(flux_dev()), flux.IMAGE_1024))
    recipe.training.global_batch_size = 8
    return recipe


def _flux_on_one_gpu(blocks: int) -> run.Partial:
    """Return FLUX.1 with fewer joint blocks, and twice the number of single-stream blocks, as in the full model."""
    recipe = as_mock(flux.flux(flux_dev()), flux.IMAGE_1024)
    recipe.model.num_joint_layers, recipe.model.num_single_layers = blocks, 2 * blocks
    recipe.training.global_batch_size = 1
    recipe.parallel = run.Config(ParallelConfig, data_parallel="ddp")
    return recipe


bench_flux12b_1024_1gpu_l3 = variant("bench_flux12b_1024_1gpu_L3", lambda: _flux_on_one_gpu(1))
"""1 joint and 2 single-stream blocks of FLUX.1 (677 M) on images of 1024 px: one 24 GB GPU, 13 GiB.

The time of bench_flux12b_1024_1gpu_L6 minus this one's, times 19, is that of all blocks of FLUX.1.
"""


bench_flux12b_1024_1gpu_l6 = variant("bench_flux12b_1024_1gpu_L6", lambda: _flux_on_one_gpu(2))
"""2 joint and 4 single-stream blocks of FLUX.1 (1.30 B) on images of 1024 px: one 40 GB GPU, 25 GiB.

See bench_flux12b_1024_1gpu_L3; nothing is recomputed, and one image is a step.
"""


bench_wan14b_37k_tp2sp_cp4 = variant(
    "bench_wan14b_37k_tp2sp_cp4", lambda: _wan(wan_14b(), 128), training={"recompute": "full", "recompute_layers": 24}
)
"""Wan 2.1 14B (14.3 B) at 37,440 tokens, TP 2 + SP, CP 4, 24 of 40 layers recomputed: 128 x 80 GB, 69 GiB each.

DFM's row: 325.8 TFLOP/s for each of 128 H100, with 128 clips per step, where 8 layers recomputed are enough.
Weights are replicated over data-parallel ranks, the optimizer's states are not.
"""
