"""EC-DiT: diffusion transformers whose MLPs are mixtures of experts with expert-choice routing."""

from recipes.base import variant
from recipes.dit import on_images, with_fsdp
from recipes.models import ec_dit_1b
from recipes.tiny import tiny_dit

tiny_ecdit = variant("tiny_ecdit", tiny_dit, model={"num_experts": 4, "moe_ffn_hidden_size": 128})
"""2-layer DiT with 4 experts per layer: any machine.

Each expert takes half of every sample's tokens (capacity factor 2), as in EC-DiT. On two ranks the experts can be
shared: `parallel.expert_model_parallel_size=2`. The shares of tokens that no expert took are logged as
`experts/layer_i/never_chosen`. `model.moe_router=top_k` routes by token choice instead, with a balancing loss.

Source: Sun et al. 2024, arXiv:2410.02098.
"""


pretrain_ecditllama1b = variant(
    "pretrain_ecditllama1b",
    lambda: with_fsdp(on_images(ec_dit_1b(), 72, 2304, min_score=5.0)),
    training={"validation_interval": 3_000},
    checkpoint={"interval": 3_000},
)
"""EC-DiT-1B (7.18 B, 1.54 B per token) on images of 256 px: 32 x 141 GB.

Micro-batches of 72 on each of 32 GPUs are one step (78 GiB each; 41 with micro-batches of 36).
Every GPU gathers all 64 experts of a layer in turn. The shares of tokens that no expert took, and the load, are
logged per layer. NeMo's recipe of this name cannot be built: its router is in no public Megatron-Core.
"""

pretrain_ecditllama1b_ep8 = variant(
    "pretrain_ecditllama1b_ep8",
    pretrain_ecditllama1b,
    parallel={"data_parallel": "distributed_optimizer", "expert_model_parallel_size": 8},
)
"""EC-DiT-1B (7.18 B, 1.54 B per token), as pretrain_ecditllama1b, experts shared by 8: 32 x 141 GB, 77 GiB each.

Tokens are sent to the experts (8 of each layer per GPU), instead of gathering the experts; the distributed
optimizer replaces FSDP. With micro-batches of 36 it takes 54 GiB.
"""
