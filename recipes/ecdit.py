"""EC-DiT: diffusion transformers whose MLPs are mixtures of experts with expert-choice routing."""

import nemo_run as run

from dit.training.pretrain import pretrain
from recipes.letters import tiny_dit


@run.cli.factory(target=pretrain)
def tiny_ecdit() -> run.Partial:
    """Made-up data, a 2-layer DiT with 4 experts per layer: proves in seconds that experts train, on any machine.

    Each expert takes half of every sample's tokens (capacity factor 2), as in EC-DiT. On two ranks the experts can be
    shared: `parallel.expert_model_parallel_size=2`. The shares of tokens that no expert took are logged as
    `experts/layer_i/never_chosen`. `model.moe_router=top_k` lets the tokens choose instead, with a balancing loss.

    Source: Sun et al. 2024, arXiv:2410.02098.
    """
    recipe = tiny_dit()
    recipe.model.num_experts = 4
    recipe.model.moe_ffn_hidden_size = 128
    recipe.training.run_dir = "runs/tiny_ecdit"
    return recipe
