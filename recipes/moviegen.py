"""Movie Gen: Llama-shaped diffusion transformers from 1B to 30B, in the stages of their training.

Stage 1 trains on images of 256 px (256 tokens), stage 2 on images and clips of 256 px (8192 tokens), stage 3 on images
and clips of 768 px (73,728 tokens). Names, sizes and layouts are NeMo's; a later stage starts from the weights of the
one before.
"""

import nemo_run as run

from dit.training.pretrain import pretrain
from energon_data.dataset import EnergonData
from recipes.base import registered, variant
from recipes.dit import as_large_model, as_tiny, on_images, on_tensor_parallel, text_conditional, with_fsdp
from recipes.models import moviegen_1b, moviegen_3b, moviegen_5b, moviegen_30b

tiny_moviegen = variant(
    "tiny_moviegen",
    lambda: as_tiny(text_conditional(moviegen_1b())),
    model={"num_query_groups": 2, "ffn_hidden_size": 128, "max_grid": [4, 6, 6]},
)
"""2-layer Movie Gen of width 64, images and clips with texts: any machine.

Packs of 128 tokens, 20 steps; the loss falls by a tenth or more.
"""


pretrain_ditllama1b = variant(
    "pretrain_ditllama1b",
    lambda: on_images(moviegen_1b(), 96, 1536, min_score=4.0),
    training={"validation_interval": 3_000},
    checkpoint={"interval": 3_000},
)
"""MovieGen-1B (1.54 B) on images of 256 px: 16 x 80 GB.

Deviation of all Movie Gen recipes: queries and keys are normalised; the paper and NeMo do not
(`model.qk_layernorm=False`). A micro-batch of 96 on each of 16 GPUs is one step. Images below an aesthetic
score of 4 are left out; checkpoint and held-out loss every 3000 steps.
"""

pretrain_ditllama3b = variant(
    "pretrain_ditllama3b",
    lambda: on_images(moviegen_3b(), 48, 1536, min_score=4.0),
    training={"validation_interval": 3_000, "recompute": "full", "recompute_layers": 12},
    checkpoint={"interval": 3_000},
)
"""MovieGen-3B (5.02 B) on images of 256 tokens: 32 x 80 GB, 66 GiB each.

28 layers of the width of MovieGen-5B, 12 of them recomputed; otherwise as pretrain_ditllama1b. A micro-batch of 48
on each of 32 GPUs is one step; --dryrun estimates 92 GiB with no layer recomputed.
"""


@run.cli.factory(target=pretrain)
def pretrain_ditllama5b_wide28() -> run.Partial:
    """MovieGen-3B (5.02 B), 28 layers of the width of 5B: an alias of pretrain_ditllama3b.

    It has the same run folder and also runs on 32 x 80 GB.
    """
    return pretrain_ditllama3b()


pretrain_ditllama5b = variant("pretrain_ditllama5b", lambda: on_images(moviegen_5b(), 12, 4608))
"""MovieGen-5B (5.74 B), stage 1: images of 256 px: 16 x 80 GB or more.

Weights and gradients take 32 GiB on every GPU; optimizer and average are spread over all of them.
"""


@registered
def pretrain_ditllama5b_stage2() -> run.Partial:
    """MovieGen-5B (5.74 B), stage 2: 256 px images and clips in packs of 8192 tokens: 8 x 80 GB or more.

    Images fill the room that clips leave in a pack; 256 packs per step at lr 6e-5.
    """
    recipe = as_large_model(text_conditional(moviegen_5b()), lr=6e-5)
    recipe.data = run.Config(
        EnergonData, path="data/latents_256_joint", max_tokens_per_pack=8192, packing_buffer_size=1000
    )
    recipe.training.global_batch_size = 256
    recipe.checkpoint.start_from = "runs/pretrain_ditllama5b"
    return on_tensor_parallel(recipe, 2)


@registered
def pretrain_ditllama5b_stage3() -> run.Partial:
    """MovieGen-5B (5.74 B), stage 3: packs of 73,728 tokens (768 px): 8 x 141 GB or more, 73 GiB each.

    Every GPU has 9216 tokens of a pack; 256 packs per step at lr 6e-5. Cheap activations are recomputed; with
    `training.recompute=full` --dryrun estimates 31 GiB.
    """
    recipe = pretrain_ditllama5b_stage2()
    recipe.data.path, recipe.data.max_tokens_per_pack = "data/latents_768_joint", 73_728
    recipe.checkpoint.start_from = "runs/pretrain_ditllama5b_stage2"
    recipe.parallel.context_parallel_size = 4
    recipe.training.recompute = "selective"
    return recipe


pretrain_ditllama30b = variant(
    "pretrain_ditllama30b", lambda: with_fsdp(on_images(moviegen_30b(), 6, 9216, min_score=4.0))
)
"""MovieGen-30B (33.4 B), stage 1: images of 256 px: 128 x 80 GB.

Images below an aesthetic score of 4 are left out. Weights, gradients, optimizer and average take 22 bytes per
parameter, spread over all GPUs: 5.4 GiB on each of 128.
"""


@registered
def pretrain_ditllama30b_stage2() -> run.Partial:
    """MovieGen-30B (33.4 B), stage 2: images and clips of 256 px: 64 x 80 GB.

    A blend of two folders: of four samples three are images of 256 tokens, one is a clip of up to 8192. They share
    packs of 8192 tokens, so images fill the room that shorter clips leave; 256 packs per step at lr 6e-5. Another
    share is
    `data.blend=[{path: data/latents_256, weight: 1}, {path: data/latents_256_clips, weight: 1}]`, and
    `data.blend_steps` changes it at given steps. Starts from `runs/pretrain_ditllama30b`. The ratio is this project's:
    NeMo has this stage on synthetic clips only (pretrain_ditllama30b_stage2_mock). --dryrun estimates 34 GiB on each of
    64 GPUs.
    """
    recipe = as_large_model(text_conditional(moviegen_30b()), lr=6e-5)
    blend = [{"path": "data/latents_256", "weight": 3}, {"path": "data/latents_256_clips", "weight": 1}]
    recipe.data = run.Config(EnergonData, blend=blend, max_tokens_per_pack=8192, packing_buffer_size=1000)
    recipe.training.global_batch_size = 256
    recipe.checkpoint.start_from = "runs/pretrain_ditllama30b"
    recipe.parallel.context_parallel_size = 4
    return with_fsdp(on_tensor_parallel(recipe, 2))


@registered
def pretrain_ditllama30b_stage3() -> run.Partial:
    """MovieGen-30B (33.4 B), stage 3: images and clips of 768 px: 128 x 80 GB.

    As stage 2, whose weights it starts from: of four samples three are images of 2304 tokens, one is a clip of up to
    73,728, in packs of 73,728. Every GPU works on 9216 tokens of a pack; cheap activations are recomputed, and
    --dryrun estimates 60 GiB on each of 128 GPUs.
    """
    recipe = pretrain_ditllama30b_stage2()
    recipe.data.blend = [{"path": "data/latents_768", "weight": 3}, {"path": "data/latents_768_clips", "weight": 1}]
    recipe.data.max_tokens_per_pack = 73_728
    recipe.checkpoint.start_from = "runs/pretrain_ditllama30b_stage2"
    recipe.parallel.context_parallel_size = 8
    recipe.training.recompute = "selective"
    return recipe
