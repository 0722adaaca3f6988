"""Start a new run from the weights of another one: for the next stage of training, or for fine-tuning."""

import logging
from contextlib import ExitStack

import torch

from dit.auxiliary import DISCRIMINATOR, PREFIXES
from dit.checkpoint.base_model import check_start, find_folder_together
from dit.checkpoint.manifest import read_manifest
from dit.checkpoint.sharded_state import global_shapes, load_masters, parameters_of
from dit.checkpoint.store import model_fingerprint
from dit.checkpoint.train_state import TrainState
from dit.optimizer.master_weights import copy_masters_to_model

logger = logging.getLogger(__name__)


@torch.no_grad()
def start_from(path: str, state: TrainState) -> None:
    """Load another run's weights into master weights, average and model, under any layout; every rank calls this.

    A run of adapters loads the adapters of another run. It loads nothing from a full model, which `load_base` has read.

    Step, optimizer state and data position do not change.

    Parameters of auxiliary networks are not loaded: they belong to the objective, and are initialised again. A log line
    reports this of a discriminator.

    Args:
        path: a run folder (its newest valid checkpoint is used) or one checkpoint folder; the average is read if
            that run has one.

    Raises:
        CheckpointError: there is no valid checkpoint.
        ConfigError: it belongs to another model, has only adapters, or has adapters of another rank or other layers.
    """
    with ExitStack() as reading:
        folder = find_folder_together(path, state.groups, reading)
        adapters = state.base is not None
        if adapters and read_manifest(folder).base is None:
            return
        shards = [shard for shard in state.shards if not shard.name.startswith(PREFIXES)]
        fingerprint = model_fingerprint(global_shapes(parameters_of(shards), state.groups))
        slot = check_start(folder, fingerprint, adapters=adapters)
        load_masters(folder, slot, shards, state.groups)
    names = [name for chunk in state.chunks for name, _ in chunk.named_parameters()]
    if state.groups.rank == 0 and any(name.startswith(DISCRIMINATOR) for name in names):
        logger.info("checkpoint.start_from loads only the autoencoder; the discriminator starts untrained")
    if state.ema is not None:
        for average, shard in zip(state.ema.values, state.shards, strict=True):
            average.copy_(shard.main)
    copy_masters_to_model(state.optimizer, state.wrapped)
