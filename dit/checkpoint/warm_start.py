"""Start a new run from other weights: for the next stage of training, or for fine-tuning."""

import logging
from contextlib import ExitStack

import torch

from dit.auxiliary import DISCRIMINATOR, PREFIXES
from dit.checkpoint.base_model import check_settings, find_start, log_start
from dit.checkpoint.sharded_state import global_shapes, load_masters, parameters_of
from dit.checkpoint.train_state import TrainState
from dit.checkpoint.verify_together import fails_together
from dit.optimizer.master_weights import copy_masters_to_model
from dit.run_config import RunConfig

logger = logging.getLogger(__name__)


@torch.no_grad()
def start_from(config: RunConfig, state: TrainState) -> None:
    """Load the weights of `checkpoint.start_from` into master weights, averages and model; every rank calls this.

    Step, optimizer state and data position do not change. A run of adapters loads the adapters of another run, and
    nothing from a full model, which `load_base` has read. Parameters of auxiliary networks are not loaded, because they
    belong to the objective.

    Raises:
        CheckpointError: there are no valid weights.
        ConfigError: it belongs to another model, has only adapters, or has adapters of another rank or other layers.
    """
    path, groups = config.checkpoint.start_from, state.groups
    assert path is not None
    with ExitStack() as reading:
        start = find_start(path, reading, groups)
        adapters = state.base is not None
        if adapters and start.base is None:
            return
        shards = [shard for shard in state.shards if not shard.name.startswith(PREFIXES)]
        shapes = global_shapes(parameters_of(shards), groups)
        with fails_together(groups):
            weights = start.weights(config.model, shapes, adapters=adapters)
            check_settings(start, config)
            log_start(weights, groups)
            load_masters(weights, shards, groups)
    names = [name for chunk in state.chunks for name, _ in chunk.named_parameters()]
    if groups.rank == 0 and any(name.startswith(DISCRIMINATOR) for name in names):
        logger.info("checkpoint.start_from loads only the autoencoder; the discriminator starts untrained")
    if state.ema is not None:
        for values in state.ema.by_slot.values():
            for value, shard in zip(values, state.shards, strict=True):
                value.copy_(shard.main)
    copy_masters_to_model(state.optimizer, state.wrapped)
