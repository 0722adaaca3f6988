"""Start a new run from the weights of another one: the next stage of a training, or fine-tuning."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dit.backends.process_groups import ProcessGroups
from dit.checkpoint.checkpointer import global_shapes, read_record
from dit.checkpoint.manifest import read_manifest
from dit.checkpoint.reading import find_checkpoint
from dit.checkpoint.sharded_state import load_masters
from dit.checkpoint.store import check_same_model, model_fingerprint
from dit.checkpoint.train_state import TrainState
from dit.errors import CheckpointError
from dit.optimizer.master_weights import publish_masters


@torch.no_grad()
def start_from(path: str, state: TrainState) -> None:
    """Read another run's weights into the masters, the average and the model, on any layout; every rank calls this.

    Step, optimizer and data stay as they are.

    Args:
        path: a run folder (its newest valid checkpoint is taken) or one checkpoint folder; the average is read if that
            run kept one.

    Raises:
        CheckpointError: there is no valid checkpoint.
        ConfigError: it belongs to another model.
    """
    folder = agree_on_folder(path, state.groups)
    check_same_model(read_manifest(folder), model_fingerprint(global_shapes(state.shards, state.groups)))
    slot = "weight" if read_record(folder)["training"]["ema_decay"] is None else "ema"
    load_masters(folder, slot, state.shards, state.groups)
    if state.ema is not None:
        for average, shard in zip(state.ema.values, state.shards, strict=True):
            average.copy_(shard.main)
    publish_masters(state.optimizer, state.wrapped)


def agree_on_folder(path: str, groups: ProcessGroups) -> Path:
    """Let the first rank find and verify the checkpoint; every rank learns of it, or of the failure.

    Raises:
        CheckpointError: there is no valid checkpoint.
    """
    found: list[Any] = [None]
    if groups.rank == 0:
        try:
            found = [find_checkpoint(path)[0]]
        except CheckpointError as error:
            found = [f"checkpoint.start_from: {error}"]
    dist.broadcast_object_list(found)
    if isinstance(found[0], str):
        raise CheckpointError(found[0])
    return found[0]
