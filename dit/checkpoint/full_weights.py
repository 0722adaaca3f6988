"""Whole weights by global name, out of a run's checkpoint and into one of their own.

A checkpoint of imported weights holds `weight` alone: any layout can sample from it or start from it, none can resume
it, for it has no optimizer and no data position.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor

from dit.checkpoint.checkpointer import CONFIG_FILE, FACTS_FILE
from dit.checkpoint.state_files import StateReader, write_full_state
from dit.checkpoint.store import CheckpointStore, model_fingerprint
from dit.config_record import to_record
from dit.convert.diffusers_format import TrainedModel
from dit.errors import ConfigError
from dit.models.base import UNCERTAINTY
from dit.settings import CheckpointConfig, SamplingConfig, TrainingConfig


def read_whole_weights(folder: Path, slot: str) -> dict[str, Tensor]:
    """Read every parameter of a verified checkpoint in full, float32, on this one process; without an uncertainty.

    Args:
        slot: `ema` or `weight`.

    Raises:
        CheckpointError: they cannot be read.
    """
    reader, prefix = StateReader(folder), f"{slot}."
    names = [name.removeprefix(prefix) for name in reader.shapes if name.startswith(prefix)]
    return {name: reader.read_full(prefix + name) for name in names if not name.startswith(UNCERTAINTY)}


def write_imported(
    run_dir: Path,
    weights: Mapping[str, Tensor],
    trained: TrainedModel,
    sampling: SamplingConfig,
    source: str,
) -> Path:
    """Make a run folder of whole weights, which `launch.sample` and `checkpoint.start_from` accept on any layout.

    Args:
        weights: every parameter of `trained.model`, by global name.
        trained: the model, its objective, and what sampling must know beside them.
        sampling: defaults of the sample command.
        source: where they came from, for the record.

    Returns:
        The checkpoint's folder.

    Raises:
        ConfigError: `run_dir` holds checkpoints already.
        CheckpointError: the disk refused; nothing is left that looks like a checkpoint.
    """
    store = CheckpointStore(run_dir / "checkpoints", CheckpointConfig())
    if store.steps():
        raise ConfigError(
            f"{run_dir} holds checkpoints of steps {store.steps()} already and is left alone; choose another --out"
        )
    settings = {
        "model": trained.model,
        "data": None,
        "objective": trained.objective,
        "training": TrainingConfig(run_dir=str(run_dir), precision="fp32", ema_decay=None),
        "sampling": sampling,
    }
    facts: dict[str, Any] = {
        "class_names": trained.class_names,
        "latent_size": list(trained.latent_size),
        "text_encoder": trained.text_encoder,
    }
    if trained.fps is not None:
        facts["fps"] = trained.fps
    folder = store.begin(0)
    with store.writing(0):
        shapes = {f"weight.{name}": tensor.shape for name, tensor in weights.items()}
        records = write_full_state(folder, shapes, (x.float().contiguous() for x in weights.values()), {})
        (folder / CONFIG_FILE).write_text(yaml.safe_dump(to_record(settings), sort_keys=False))
        (folder / FACTS_FILE).write_text(json.dumps(facts, indent=1))
    meta = {
        "imported_from": source,
        "consumed_samples": 0,
        "held_out_loss": None,
        "fingerprint": model_fingerprint({name: list(x.shape) for name, x in weights.items()}),
        "torch": torch.__version__,
    }
    store.publish(0, meta, records)
    return store.path(0)
