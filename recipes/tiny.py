"""Synthetic data and small networks: a DiT of width 64, also under parallel layouts, and the UNet of EDM2."""

import nemo_run as run

from dit.models.dit.config import DiTConfig
from dit.objectives.alignment import Alignment
from dit.objectives.contrastive import ContrastiveFlowMatching
from dit.objectives.flow_matching import FlowMatching
from dit.parallel.dims import ParallelConfig
from energon_data.mock import MockData
from recipes.base import registered, short_run, small_run, variant
from recipes.imagenet import edm2_s_imagenet
from recipes.models import sprint


@registered
def tiny_dit() -> run.Partial:
    """Check of an installation: a 2-layer DiT on synthetic images trains in seconds.

    One CPU core is enough. Labels and texts condition it. The synthetic latents have little structure: in 20 steps the
    loss falls from 1.7 to 1.5.
    """
    recipe = small_run(
        "runs/tiny_dit",
        model=run.Config(
            DiTConfig,
            hidden_size=64,
            num_layers=2,
            num_attention_heads=4,
            in_channels=4,
            num_classes=10,
            context_size=32,
            position_embedding="sincos_3d",
        ),
        data=run.Config(MockData, num_streams=2),  # the same samples on one rank and on two
    )
    recipe.parallel.data_parallel = "ddp"
    recipe.optimizer.lr = 3e-3
    recipe.schedule.warmup_steps = 5
    return short_run(recipe)


tiny_dit_pack = variant(
    "tiny_dit_pack",
    tiny_dit,
    data={"shapes": ["1x8x8", "1x16x16", "2x8x16", "4x8x8", "6x8x8", "1x16x24"], "max_tokens_per_pack": 256},
    training={"micro_batch_size": 1},
)
"""As tiny_dit, on packs of 256 tokens of images and clips of 16 to 96: one CPU core.

A pack has three or four samples of different shape, label and text, and padding at its end.
"""


@registered
def tiny_jit() -> run.Partial:
    """As tiny_dit_pack, with the class tokens, SwiGLU, RMSNorm and objective of JiT, without texts: one CPU core.

    Three class tokens precede the tokens of each sample in the second layer.
    """
    recipe = tiny_dit_pack()
    recipe.model.context_size, recipe.model.class_tokens, recipe.model.bottleneck_size = None, [3, 1], 16
    recipe.model.activation, recipe.model.rms_norm, recipe.model.qk_layernorm = "swiglu", True, True
    recipe.objective = run.Config(FlowMatching, prediction="x0", time_distribution="logit_normal", logit_mean=0.8)
    return recipe


@registered
def tiny_reg() -> run.Partial:
    """As tiny_dit_pack, with the class token and the features of a teacher (REG), without texts: one CPU core.

    Each synthetic sample has a class token, which is noised and denoised with the latent.
    """
    recipe = tiny_dit_pack()
    recipe.model.context_size, recipe.model.teacher_token_size = None, 24
    alignment = run.Config(Alignment, layer=1, features=24, hidden_size=32)
    recipe.objective = run.Config(FlowMatching, alignment=alignment, teacher_token_weight=0.03)
    return recipe


@registered
def tiny_dit_dh() -> run.Partial:
    """As tiny_jit, with a wide head, SPRINT and the terms of LightningDiT and SR-DiT: one CPU core.

    The features of `dit_dh_xl_imagenet`, `sr_dit_b1_imagenet` and `lightningdit_xl_imagenet` in one network. The
    synthetic samples have features of a teacher.
    """
    recipe = tiny_jit()
    recipe.model.class_tokens, recipe.model.bottleneck_size, recipe.model.num_layers = None, None, 4
    recipe.model.wide_head, recipe.model.routing, recipe.model.value_residual = [1, 128, 4], sprint(), True
    recipe.model.routing.first_layers, recipe.model.routing.last_layers = 1, 1
    recipe.model.position_embedding, recipe.model.rope_axes = "rope_3d", [0, 8, 8]
    recipe.objective = run.Config(
        ContrastiveFlowMatching,
        time_distribution="logit_normal",
        loss_kind="l2_cosine",
        shift_dimension=1024,
        alignment=run.Config(Alignment, layer=1, features=8, hidden_size=32),
    )
    return recipe


@registered
def tiny_edm2() -> run.Partial:
    """EDM2 UNet with 16 and 32 channels, 8 x 8 latents: any machine.

    One block at each resolution, with attention at the lower one; the learning rate falls after the warm-up.
    """
    recipe = edm2_s_imagenet()
    recipe.model.num_classes, recipe.model.block_out_channels, recipe.model.layers_per_block = 10, [16, 32], 1
    recipe.model.attention_levels, recipe.model.head_size = [1], 8
    recipe.data = run.Config(MockData, shapes=["1x8x8"], num_streams=2)
    recipe.parallel = run.Config(ParallelConfig)
    recipe.optimizer.lr = 3e-3
    recipe.schedule.warmup_steps, recipe.schedule.reference_steps = 5, 10
    recipe.training.ema_decay = 0.9
    recipe.checkpoint.keep_every = 0
    recipe.sampling.num_steps = 10
    return short_run(recipe)


def _spread(*, tensor: int = 1, pipeline: int = 1, context: int = 1) -> run.Partial:
    """Return tiny_dit over some ranks, which compute the losses that one computes."""
    recipe = tiny_dit()
    recipe.parallel.tensor_model_parallel_size, recipe.parallel.sequence_parallel = tensor, tensor > 1
    recipe.parallel.pipeline_model_parallel_size, recipe.parallel.context_parallel_size = pipeline, context
    return recipe


tiny_dit_tp2sp = variant("tiny_dit_tp2sp", lambda: _spread(tensor=2))
"""As tiny_dit, TP 2 + SP: 2 ranks, CPU or GPU; the losses are those of tiny_dit.

Heads, MLP columns and rows of the residual stream are split.
"""


tiny_dit_cp2 = variant("tiny_dit_cp2", lambda: _spread(context=2))
"""As tiny_dit, CP 2 (ring): 2 ranks, CPU or GPU; the losses are those of tiny_dit.

Each rank has 32 of a sample's 64 tokens.
"""


tiny_dit_pp2 = variant("tiny_dit_pp2", lambda: _spread(pipeline=2))
"""As tiny_dit, PP 2: 2 ranks, CPU or GPU; the losses are those of tiny_dit.

Each rank has one of the two layers; two micro-batches are under way.
"""


tiny_dit_tp2pp2cp2 = variant("tiny_dit_tp2pp2cp2", lambda: _spread(tensor=2, pipeline=2, context=2))
"""As tiny_dit, TP 2 + SP, PP 2, CP 2: 8 ranks, CPU or GPU; the losses are those of tiny_dit.

Each rank has half of a layer and half of the tokens.
"""
