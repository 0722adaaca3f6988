"""Initial weights of a run, and the base model of a run that trains adapters (LoRA).

A checkpoint of an adapter run stores only the adapters, with their average and optimizer state. The base weights stay
in their own checkpoint; the manifest records its folder and a digest of its files, so that other weights are rejected.
"""

import hashlib
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, Optional

from torch import Tensor, nn

from dit.auxiliary import PREFIXES
from dit.backends.process_groups import ProcessGroups
from dit.checkpoint.full_weights import read_full_weights
from dit.checkpoint.manifest import Manifest, check_same_model, model_fingerprint, read_manifest
from dit.checkpoint.reading import candidates, find_checkpoint, no_checkpoint
from dit.checkpoint.records import read_record
from dit.checkpoint.sharded_state import global_shapes, load_weights
from dit.checkpoint.verify_together import newest_valid_together, on_first_rank
from dit.errors import CheckpointError, ConfigError
from dit.models.lora import merge_adapters
from dit.run_config import RunConfig


def find_folder_together(
    path: str, groups: ProcessGroups, reading: ExitStack, setting: str = "checkpoint.start_from"
) -> Path:
    """Find the checkpoint of a setting and verify it; every rank hashes its share of the files.

    Args:
        reading: the checkpoint is not deleted until this stack is closed.

    Raises:
        CheckpointError: there is no valid checkpoint.
    """
    checkpoint = newest_valid_together(on_first_rank(lambda: candidates(path), groups), groups, reading)
    if checkpoint is None:
        raise CheckpointError(f"{setting}: {no_checkpoint(path)}")
    return checkpoint[0]


def check_start(folder: Path, fingerprint: dict[str, Any], *, adapters: bool = False) -> str:
    """Check that a run can start from a checkpoint, and return the slot to read: the average if it has one.

    Args:
        fingerprint: fingerprint of the model without adapters and without auxiliary networks, or of the adapters.
        adapters: whether the checkpoint has these adapters.

    Raises:
        ConfigError: it has only adapters, or belongs to another model.
    """
    manifest = read_manifest(folder)
    if manifest.base is not None and not adapters:
        raise ConfigError(
            f"checkpoint.start_from: {folder} has only adapters (LoRA) for the weights of "
            f"{manifest.base['folder']}; start from those, or from the merged model that launch.export --format "
            "diffusers writes and launch.import_weights reads"
        )
    check_same_model(_without_auxiliary(manifest), fingerprint)
    return _slot(folder)


def _slot(folder: Path) -> str:
    """Return the slot of the weights that other runs start from."""
    return "weight" if read_record(folder)["training"]["ema_decay"] is None else "ema"


def _without_auxiliary(manifest: Manifest) -> Manifest:
    """Return the manifest without the parameters of auxiliary networks."""
    stored = manifest.meta.get("fingerprint")
    if not stored:
        return manifest
    network = {name: shape for name, shape in stored["parameters"].items() if not name.startswith(PREFIXES)}
    return replace(manifest, meta={**manifest.meta, "fingerprint": model_fingerprint(network)})


def load_base(config: RunConfig, chunks: Sequence[nn.Module], groups: ProcessGroups) -> Optional[dict[str, str]]:
    """Read the frozen weights of a model with adapters from the checkpoint of `checkpoint.start_from`, on any layout.

    If that checkpoint has adapters that the run continues to train, the base is the one that it names.

    Every rank calls this before the model is wrapped, because optimizers hold no master copy of frozen weights.

    Returns:
        The entry of the base in manifests, `folder` and `digest`; None for a model without adapters.

    Raises:
        CheckpointError: there is no valid checkpoint.
        ConfigError: it has only adapters, or belongs to another model.
    """
    if config.model.adapters is None:
        return None
    assert config.checkpoint.start_from is not None  # `RunConfig.check`
    with ExitStack() as reading:
        folder = find_folder_together(config.checkpoint.start_from, groups, reading)
        if (base := read_manifest(folder).base) is not None:  # the adapters themselves: `warm_start`
            folder = find_folder_together(base["folder"], groups, reading, f"the base of {folder}")
            if digest_of(read_manifest(folder)) != base["digest"]:
                raise CheckpointError(
                    f"checkpoint.start_from: {folder} has other weights than those that the adapters of "
                    f"{config.checkpoint.start_from} belong to; restore them"
                )
        frozen = [(n, p) for chunk in chunks for n, p in chunk.named_parameters() if not p.requires_grad]
        slot = check_start(folder, model_fingerprint(global_shapes(frozen, groups)))
        load_weights(folder, chunks, groups, slot=slot, frozen=True)
        return {"folder": str(folder.resolve()), "digest": digest_of(read_manifest(folder))}


def digest_of(manifest: Manifest) -> str:
    """Return a digest of a checkpoint's files."""
    files = sorted((name, record.sha256) for name, record in manifest.files.items())
    return hashlib.sha256(repr(files).encode()).hexdigest()


def find_base(folder: Path, config: RunConfig) -> Optional[tuple[Path, str]]:
    """Return the verified base checkpoint of an adapter run, and the slot of its weights; None for a full model.

    The folder recorded in the manifest is tried first, then `checkpoint.start_from`.

    Args:
        folder: a verified checkpoint of the run.
        config: its settings.

    Raises:
        CheckpointError: neither folder has the weights that the adapters were trained with.
    """
    saved = read_manifest(folder).base
    if saved is None:
        return None
    for path in (saved["folder"], config.checkpoint.start_from or saved["folder"]):
        try:
            checkpoint, _ = find_checkpoint(path)
        except CheckpointError:
            continue
        if digest_of(read_manifest(checkpoint)) == saved["digest"]:
            return checkpoint, _slot(checkpoint)
    raise CheckpointError(
        f"{folder} has adapters (LoRA) for the weights of {saved['folder']}, which no longer exist; restore that folder"
    )


def load_run(folder: Path, config: RunConfig, chunks: Sequence[nn.Module], groups: ProcessGroups, slot: str) -> None:
    """Read the weights of a run into unwrapped model chunks: all of them, or base and adapters.

    Raises:
        CheckpointError: a tensor or the base is missing.
    """
    base = find_base(folder, config)
    if base is not None:
        load_weights(base[0], chunks, groups, slot=base[1], frozen=True)
    load_weights(folder, chunks, groups, slot=slot, frozen=None if base is None else False)


def read_run(folder: Path, config: RunConfig, slot: str) -> dict[str, Tensor]:
    """Read every parameter of a run in full, float32, with adapters merged into the base weights.

    Raises:
        CheckpointError: they cannot be read, or the base is missing.
    """
    weights, base = read_full_weights(folder, slot), find_base(folder, config)
    if base is None:
        return weights
    assert config.model.adapters is not None
    return merge_adapters(read_full_weights(*base), weights, config.model.adapters)
