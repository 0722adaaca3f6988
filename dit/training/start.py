"""Start a new run from the weights of another one: the next stage of a training, or fine-tuning."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import yaml
from megatron.core import dist_checkpointing

from dit.backends.process_groups import ProcessGroups
from dit.errors import CheckpointError
from dit.training.checkpoint import CONFIG_FILE, TrainState, global_shapes
from dit.training.checkpoint_store import check_same_model, model_fingerprint
from dit.training.generator import find_checkpoint
from dit.training.manifest import read_manifest
from dit.training.optim import publish_masters
from dit.training.reading import reading
from dit.training.sharded_state import sharded_tensor


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
    with reading(folder):
        record = yaml.safe_load((folder / CONFIG_FILE).read_text())
        slot = "weight" if record["training"]["ema_decay"] is None else "ema"
    request: dict[str, Any] = {}
    for shard in state.shards:
        empty = torch.empty(shard.parameter.shape, dtype=torch.float32, device=shard.parameter.device)
        request[shard.name] = sharded_tensor(f"{slot}.{shard.name}", empty, shard.parameter, state.groups)
    with reading(folder):
        loaded = dist_checkpointing.load(request, str(folder))
    for i, shard in enumerate(state.shards):
        values = shard.scatter(loaded[shard.name])
        shard.main.copy_(values)
        if state.ema is not None:
            state.ema.values[i].copy_(values)
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
