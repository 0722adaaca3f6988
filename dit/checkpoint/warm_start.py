"""Start a new run from the weights of another one: the next stage of a training, or fine-tuning."""

from dataclasses import replace
from pathlib import Path

import torch

from dit.backends.process_groups import ProcessGroups
from dit.checkpoint.checkpointer import global_shapes, read_record
from dit.checkpoint.manifest import Manifest, read_manifest
from dit.checkpoint.reading import candidates, no_checkpoint
from dit.checkpoint.sharded_state import load_masters
from dit.checkpoint.store import check_same_model, model_fingerprint
from dit.checkpoint.train_state import TrainState
from dit.checkpoint.verify_together import newest_valid_together, on_first_rank
from dit.errors import CheckpointError
from dit.models.base import UNCERTAINTY
from dit.optimizer.master_weights import copy_masters_to_model


@torch.no_grad()
def start_from(path: str, state: TrainState) -> None:
    """Read another run's weights into the masters, the average and the model, on any layout; every rank calls this.

    Step, optimizer state and data position do not change.

    An uncertainty that one of the two runs learns is left out: it is of an objective, and starts anew.

    Args:
        path: a run folder (its newest valid checkpoint is used) or one checkpoint folder; the average is read if
            that run has one.

    Raises:
        CheckpointError: there is no valid checkpoint.
        ConfigError: it belongs to another model.
    """
    folder = find_folder_together(path, state.groups)
    manifest = without_uncertainty(read_manifest(folder))
    shards = [shard for shard in state.shards if not shard.name.startswith(UNCERTAINTY)]
    check_same_model(manifest, model_fingerprint(global_shapes(shards, state.groups)))
    slot = "weight" if read_record(folder)["training"]["ema_decay"] is None else "ema"
    load_masters(folder, slot, shards, state.groups)
    if state.ema is not None:
        for average, shard in zip(state.ema.values, state.shards, strict=True):
            average.copy_(shard.main)
    copy_masters_to_model(state.optimizer, state.wrapped)


def without_uncertainty(manifest: Manifest) -> Manifest:
    """Return the manifest of a checkpoint as if the run's objective had learned no uncertainty."""
    stored = manifest.meta.get("fingerprint")
    if not stored:
        return manifest
    network = {name: shape for name, shape in stored["parameters"].items() if not name.startswith(UNCERTAINTY)}
    return replace(manifest, meta={**manifest.meta, "fingerprint": model_fingerprint(network)})


def find_folder_together(path: str, groups: ProcessGroups) -> Path:
    """Find the checkpoint and verify it; every rank hashes its share of the files.

    Raises:
        CheckpointError: there is no valid checkpoint.
    """
    found = newest_valid_together(on_first_rank(lambda: candidates(path), groups), groups)
    if found is None:
        raise CheckpointError(f"checkpoint.start_from: {no_checkpoint(path)}")
    return found[0]
