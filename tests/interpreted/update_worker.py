"""Functions that one rank runs in a test of the fused update; cases name them."""

import torch

from dit.backends import process_groups
from dit.optimizer.update import Update
from dit.parallel.implementations import target_of
from tests.parallel.fsdp_worker import start, state_of


def train(case: dict) -> dict:
    """Train with eager layers and the requested update; return the final state and the model's weights."""
    run = start(case)
    state, config = run.state, run.config
    target, built = target_of(config.model, config.training.precision), (state.optimizer, state.shards, state.ema)
    state.update = Update(*built, config.optimizer, run.groups, target, case["kernels"])
    loss_sums = torch.zeros(2)
    resumed_at = state.step
    norms = [run.step(loss_sums) for _ in range(case["steps"])]
    result = {"resumed_at": resumed_at, "grad_norms": norms, "after": state_of(run)}
    if config.parallel.data_parallel != "fsdp":
        # Full weights: sharded ones are gathered after the update.
        result["model"] = {s.name: s.parameter.detach().float().clone() for s in state.shards}
    if case.get("save"):
        run.save()
    run.close()
    process_groups.release()
    return result
