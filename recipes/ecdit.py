"""EC-DiT: diffusion transformers whose MLPs are mixtures of experts with expert-choice routing."""

import nemo_run as run

from energon_data.dataset import EnergonData
from recipes.base import registered, variant
from recipes.dit import as_large_model, text_conditional, with_fsdp
from recipes.models import ec_dit_1b
from recipes.tiny import tiny_dit

tiny_ecdit = variant("tiny_ecdit", tiny_dit, model={"num_experts": 4, "moe_ffn_hidden_size": 128})
"""2-layer DiT with 4 experts per layer: any machine.

Each expert takes half of every sample's tokens (capacity factor 2), as in EC-DiT. On two ranks the experts can be
shared: `parallel.expert_model_parallel_size=2`. The shares of tokens that no expert took are logged as
`experts/layer_i/never_chosen`. `model.moe_router=top_k` routes by token choice instead, with a balancing loss.

Source: Sun et al. 2024, arXiv:2410.02098.
"""


@registered
def pretrain_ecditllama1b() -> run.Partial:
    """EC-DiT-1B (7.18 B, 1.54 B per token) on images of 256 px: 32 x 141 GB.

    Micro-batches of 72 on each of 32 GPUs are one step (78 GiB each; 41 with micro-batches of 36).
    Every GPU gathers all 64 experts of a layer in turn. The shares of tokens that no expert took, and the load, are
    logged per layer. NeMo's recipe of this name cannot be built: its router is in no public Megatron-Core.
    """
    recipe = with_fsdp(as_large_model(text_conditional(ec_dit_1b())))
    recipe.data = run.Config(
        EnergonData,
        path="data/latents_256",
        max_tokens_per_sample=260,
        bucket_by_shape=True,
        min_aesthetic_score=5.0,
    )
    recipe.training.micro_batch_size, recipe.training.global_batch_size = 72, 2304
    recipe.training.validation_interval = recipe.checkpoint.interval = 3_000
    return recipe


@registered
def pretrain_ecditllama1b_ep8() -> run.Partial:
    """EC-DiT-1B (7.18 B, 1.54 B per token), as pretrain_ecditllama1b, experts shared by 8: 32 x 141 GB, 77 GiB each.

    Tokens are sent to the experts (8 of each layer per GPU), instead of gathering the experts; the distributed
    optimizer in place of FSDP. With micro-batches of 36 it takes 54 GiB.
    """
    recipe = pretrain_ecditllama1b()
    recipe.parallel.data_parallel, recipe.parallel.expert_model_parallel_size = "distributed_optimizer", 8
    return recipe
