"""Runs to measure backbones: ST-DiT under context parallelism, and rows of published tables for Imagen and Wan.

All feed synthetic data; `benchmarks.recipes` says how to time one.
"""

import nemo_run as run

from dit.parallel.dims import ParallelConfig
from dit.training.pretrain import pretrain
from recipes import imagen, stdit, wan
from recipes.components import stdit_3b, wan_14b
from recipes.dit import as_large_model, as_mock


def _stdit(name: str, comm: str, context_size: int) -> run.Partial:
    """Return four pairs of ST-DiT-3B on one clip of 73,728 tokens, with context parallelism only.

    For 8192 tokens: `data.height=32 data.width=32`.
    """
    recipe = as_mock(stdit.open_sora(name, stdit_3b()), stdit.CLIP_74K, text_tokens=300)
    recipe.model.num_layers = 8
    recipe.training.global_batch_size = 1
    recipe.training.recompute = "selective"
    recipe.parallel = run.Config(
        ParallelConfig, context_parallel_size=context_size, spatial_temporal_comm=comm, overlap_grad_reduce=True
    )
    return recipe


@run.cli.factory(target=pretrain)
def bench_stdit_hybrid_cp1() -> run.Partial:
    """4 pairs of ST-DiT-3B (578 M) at 73,728 tokens, CP 1, attention made local by all-to-all: one GPU of 80 GB.

    No communication; the baseline for the others. --dryrun estimates 56 GiB.
    """
    return _stdit("bench_stdit_hybrid_cp1", "hybrid", 1)


@run.cli.factory(target=pretrain)
def bench_stdit_ring_cp1() -> run.Partial:
    """4 pairs of ST-DiT-3B (578 M) at 73,728 tokens, CP 1, attention on the ring: one GPU of 80 GB.

    The same as bench_stdit_hybrid_cp1, for both columns to start at the same point.
    """
    return _stdit("bench_stdit_ring_cp1", "context", 1)


@run.cli.factory(target=pretrain)
def bench_stdit_hybrid_cp2() -> run.Partial:
    """4 pairs of ST-DiT-3B (578 M) at 73,728 tokens, CP 2, attention made local by all-to-all: 2 x 80 GB.

    A forward pass sends 151 MB (bf16) per GPU and temporal attention, 1/2 of the ring, and nothing for spatial
    attention. --dryrun estimates 29 GiB on each.
    """
    return _stdit("bench_stdit_hybrid_cp2", "hybrid", 2)


@run.cli.factory(target=pretrain)
def bench_stdit_ring_cp2() -> run.Partial:
    """4 pairs of ST-DiT-3B (578 M) at 73,728 tokens, CP 2, attention on the ring: 2 x 80 GB.

    A forward pass sends 302 MB (bf16) per GPU and self-attention, spatial or temporal; a backward pass twice that.
    """
    return _stdit("bench_stdit_ring_cp2", "context", 2)


@run.cli.factory(target=pretrain)
def bench_stdit_hybrid_cp4() -> run.Partial:
    """4 pairs of ST-DiT-3B (578 M) at 73,728 tokens, CP 4, attention made local by all-to-all: 4 x 80 GB.

    A forward pass sends 113 MB (bf16) per GPU and temporal attention, 1/4 of the ring, and nothing for spatial
    attention. --dryrun estimates 16 GiB on each.
    """
    return _stdit("bench_stdit_hybrid_cp4", "hybrid", 4)


@run.cli.factory(target=pretrain)
def bench_stdit_ring_cp4() -> run.Partial:
    """4 pairs of ST-DiT-3B (578 M) at 73,728 tokens, CP 4, attention on the ring: 4 x 80 GB.

    A forward pass sends 453 MB (bf16) per GPU and self-attention, spatial or temporal; a backward pass twice that.
    """
    return _stdit("bench_stdit_ring_cp4", "context", 4)


@run.cli.factory(target=pretrain)
def bench_stdit_hybrid_cp8() -> run.Partial:
    """4 pairs of ST-DiT-3B (578 M) at 73,728 tokens, CP 8, attention made local by all-to-all: 8 x 80 GB.

    A forward pass sends 66 MB (bf16) per GPU and temporal attention, 1/8 of the ring, and nothing for spatial
    attention. --dryrun estimates 9.7 GiB on each.
    """
    return _stdit("bench_stdit_hybrid_cp8", "hybrid", 8)


@run.cli.factory(target=pretrain)
def bench_stdit_ring_cp8() -> run.Partial:
    """4 pairs of ST-DiT-3B (578 M) at 73,728 tokens, CP 8, attention on the ring: 8 x 80 GB.

    A forward pass sends 528 MB (bf16) per GPU and self-attention, spatial or temporal; a backward pass twice that.
    """
    return _stdit("bench_stdit_ring_cp8", "context", 8)


def _imagen(recipe: run.Partial, name: str, pixels: int, batch: int, micro_batch: int) -> run.Partial:
    """Return 15 steps on synthetic pictures, with the batch of the published speed on 32 GPUs."""
    as_mock(recipe, (1, pixels, pixels), text_tokens=imagen.TEXT_TOKENS)
    recipe.training.run_dir = f"runs/{name}"
    recipe.training.global_batch_size, recipe.training.micro_batch_size = batch, micro_batch
    return recipe


@run.cli.factory(target=pretrain)
def bench_imagen_500m_res_64() -> run.Partial:
    """Imagen's base model (525 M) on synthetic pictures of 64 px, 2048 per step: 32 x 80 GB.

    15 steps. NeMo publishes 1.489 steps/s on 32 A100 and 3.162 on 32 H100.
    """
    return _imagen(imagen.imagen_500m_res_64(), "bench_imagen_500m_res_64", 64, 2048, 64)


@run.cli.factory(target=pretrain)
def bench_imagen_2b_res_64() -> run.Partial:
    """Imagen's larger base model (2.17 B) on synthetic pictures of 64 px, 512 per step: 32 x 80 GB.

    15 steps. NeMo publishes 1.661 steps/s on 32 A100 and 3.631 on 32 H100.
    """
    return _imagen(imagen.imagen_2b_res_64(), "bench_imagen_2b_res_64", 64, 512, 16)


@run.cli.factory(target=pretrain)
def bench_imagen_400m_res_256() -> run.Partial:
    """Imagen's regular super-resolution (408 M) on synthetic pictures of 256 px, 512 per step: 32 x 80 GB.

    15 steps. NeMo publishes 1.609 steps/s on 32 A100 and 3.166 on 32 H100.
    """
    return _imagen(imagen.imagen_400m_res_256(), "bench_imagen_400m_res_256", 256, 512, 16)


@run.cli.factory(target=pretrain)
def bench_imagen_600m_res_256() -> run.Partial:
    """Imagen's Efficient UNet (646 M) on synthetic pictures of 256 px, 2048 per step: 32 x 80 GB.

    15 steps. NeMo publishes 1.264 steps/s on 32 A100 and 2.668 on 32 H100.
    """
    return _imagen(imagen.imagen_600m_res_256(), "bench_imagen_600m_res_256", 256, 2048, 64)


@run.cli.factory(target=pretrain)
def bench_imagen_600m_res_1024() -> run.Partial:
    """Imagen's Efficient UNet (639 M) on synthetic crops of 256 px, 2048 per step: 32 x 80 GB.

    15 steps. NeMo publishes 1.319 steps/s on 32 A100 and 2.837 on 32 H100.
    """
    return _imagen(imagen.imagen_600m_res_1024(), "bench_imagen_600m_res_1024", 256, 2048, 64)


@run.cli.factory(target=pretrain)
def bench_wan14b_37k_tp2sp_cp4() -> run.Partial:
    """Wan 2.1 14B (14.3 B) at 37,440 tokens, TP 2 + SP, CP 4, 24 of 40 layers recomputed: 128 x 80 GB, 69 GiB each.

    DFM's row: 325.8 TFLOP/s for each of 128 H100, where 8 layers recomputed are enough. Its batch is not published, 64
    clips are assumed. Weights are replicated over data-parallel ranks, the optimizer's states are not.
    """
    recipe = wan.mock("bench_wan14b_37k_tp2sp_cp4", wan_14b(), 64)
    recipe.training.recompute, recipe.training.recompute_layers = "full", 24
    return recipe


def _on_one_gpu(name: str, num_layers: int) -> run.Partial:
    """Return layers of Wan 14B that fit one GPU: two numbers give the time of a layer, and of the ends."""
    recipe = as_mock(as_large_model(wan.wan(name, wan_14b())), wan.CLIP_480P)
    recipe.model.num_layers = num_layers
    recipe.training.global_batch_size = 1
    recipe.training.recompute = "selective"
    recipe.parallel = run.Config(ParallelConfig, data_parallel="ddp")
    return recipe


@run.cli.factory(target=pretrain, name="bench_wan14b_37k_1gpu_L2")
def bench_wan14b_37k_1gpu_l2() -> run.Partial:
    """2 layers of Wan 14B (936 M) at 37,440 tokens on one GPU of 80 GB, 39 GiB: with ..._L4, the time of a layer.

    Cheap activations are recomputed. The time of bench_wan14b_37k_1gpu_L4 minus this one's is that of two layers.
    """
    return _on_one_gpu("bench_wan14b_37k_1gpu_L2", 2)


@run.cli.factory(target=pretrain, name="bench_wan14b_37k_1gpu_L4")
def bench_wan14b_37k_1gpu_l4() -> run.Partial:
    """4 layers of Wan 14B (1.64 B) at 37,440 tokens on one GPU of 141 GB, 72 GiB.

    See bench_wan14b_37k_1gpu_L2; cheap activations are recomputed here, too, and attention is most of the work.
    """
    return _on_one_gpu("bench_wan14b_37k_1gpu_L4", 4)
