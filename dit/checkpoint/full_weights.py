"""Full (unsharded) weights by global name: read from a checkpoint, or imported into one.

A checkpoint of imported weights has only `weight`. Any layout can sample from it or start from it, but it cannot be
resumed, because it has no optimizer state and no data position.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Optional

import torch
import yaml
from torch import Tensor

from dit.auxiliary import PREFIXES
from dit.checkpoint.manifest import BASE, model_fingerprint
from dit.checkpoint.records import CONFIG_FILE, METADATA_FILE
from dit.checkpoint.state_files import SlotWeights, Weights, read_full, write_full_state
from dit.checkpoint.store import CheckpointStore
from dit.config_record import to_record
from dit.convert.diffusers_format import TrainedModel
from dit.errors import ConfigError
from dit.settings import CheckpointConfig, SamplingConfig, TrainingConfig


def read_full_weights(folder: Path, slot: str) -> dict[str, Tensor]:
    """Read every parameter of a verified checkpoint, unsharded, in float32, except those of auxiliary networks."""
    return read_all(SlotWeights(folder, slot))


def read_all(weights: Weights) -> dict[str, Tensor]:
    """Read every parameter, unsharded, in float32, except those of auxiliary networks."""
    return {name: read_full(weights, name) for name in weights.shapes if not name.startswith(PREFIXES)}


def write_imported(
    run_dir: Path,
    weights: Mapping[str, Tensor],
    trained: TrainedModel,
    sampling: SamplingConfig,
    source: str,
    *,
    base: Optional[Mapping[str, str]] = None,
) -> Path:
    """Write a run folder of full weights, which `launch.sample` and `checkpoint.start_from` accept on any layout.

    Args:
        source: origin of the weights, recorded in the manifest.
        base: base of the adapters, as in `Manifest.base`.
    """
    store = CheckpointStore(run_dir / "checkpoints", CheckpointConfig())
    if store.steps():
        raise ConfigError(
            f"{run_dir} already has checkpoints of steps {store.steps()} and is not changed; choose another --out"
        )
    settings = {
        "model": trained.model,
        "data": None,
        "objective": trained.objective,
        "training": TrainingConfig(run_dir=str(run_dir), precision="fp32", ema_decay=None),
        "sampling": sampling,
    }
    metadata: dict[str, Any] = {
        "class_names": trained.class_names,
        "latent_size": list(trained.latent_size),
        "text_encoder": trained.text_encoder,
    }
    optional = ("fps", "autoencoder", "max_text_tokens", "attributions", "clean_parts", "reference_aspect")
    metadata |= {name: value for name in optional if (value := getattr(trained, name))}
    folder = store.begin(0)
    with store.writing(0):
        records = write_full_state(folder, {f"weight.{name}": tensor for name, tensor in weights.items()})
        (folder / CONFIG_FILE).write_text(yaml.safe_dump(to_record(settings), sort_keys=False))
        (folder / METADATA_FILE).write_text(json.dumps(metadata, indent=1))
    meta = {
        "imported_from": source,
        **({} if base is None else {BASE: dict(base)}),
        "consumed_samples": 0,
        "held_out_loss": None,
        "fingerprint": model_fingerprint({name: list(x.shape) for name, x in weights.items()}),
        "torch": torch.__version__,
    }
    store.publish(0, meta, records)
    return store.path(0)
