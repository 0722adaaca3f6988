"""Initial weights of a run, and the base model of a run that trains adapters (LoRA).

A checkpoint of an adapter run stores only the adapters, with their average and optimizer state. The base weights stay
in their own checkpoint; the manifest records its folder or hub address and a digest of its files, so that other
weights are rejected.
"""

import hashlib
import json
import logging
import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Optional, TypeAlias

from torch import Tensor, nn

from dit.auxiliary import PREFIXES
from dit.backends.process_groups import ProcessGroups
from dit.checkpoint.added_inputs import WithAddedInputs, with_added_inputs
from dit.checkpoint.diffusers_folder import NOT_SIZES, Network, is_network, local_path, read_network
from dit.checkpoint.full_weights import read_all, read_full_weights
from dit.checkpoint.manifest import check_same_model, read_manifest, stored_shapes
from dit.checkpoint.reading import candidates, find_checkpoint, read_settings
from dit.checkpoint.records import read_metadata, read_record
from dit.checkpoint.sharded_state import global_shapes, load_weights
from dit.checkpoint.state_files import SlotWeights, Weights
from dit.checkpoint.verify_together import fails_together, on_first_rank
from dit.convert.sliced_weights import SlicedWeights
from dit.errors import CheckpointError, ConfigError, UserError, first_few
from dit.hub import PREFIX, pinned
from dit.models.base import ModelConfig
from dit.models.lora import merge_adapters
from dit.models.lora_config import LoRAConfig
from dit.run_config import RunConfig

MAY_DIFFER = (
    *(*NOT_SIZES, "routing", "dropout", "base_width", "moe_capacity_factor", "moe_aux_loss_coeff", "stable_attention"),
    *("guidance", "control_channels", "interval_conditioning", "rope_scaling", "rope_factors"),
    *("scaling_factor", "shift_factor"),
    *("ffn_hidden_size", "moe_ffn_hidden_size", "num_query_groups", "out_channels"),
)
"""Settings of a model that may differ from those of the weights that it starts from.

They are settings of training, changes that fine-tuning makes on purpose, statistics of latents that an export measures,
and sizes, of which None is a default: `check_start` compares the shapes.
"""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class CheckpointStart:
    """The weights of a verified checkpoint; `Network` has the same interface for a folder of diffusers."""

    folder: Path

    @property
    def model(self) -> ModelConfig:
        """The settings with which the weights were trained."""
        return read_settings(self.folder)[0].model

    @property
    def encoders(self) -> tuple[Optional[str], Optional[str]]:
        """The names of autoencoder and text encoders of the training data; None if unknown."""
        metadata = read_metadata(self.folder)
        return metadata.get("autoencoder"), metadata.get("text_encoder")

    @property
    def base(self) -> Optional[Mapping[str, str]]:
        """The base weights if these are adapters, as in `Manifest.base`."""
        return read_manifest(self.folder).base

    def digest(self, groups: Optional[ProcessGroups]) -> str:
        """Return a digest of the files; with `groups`, every rank calls this."""
        files = sorted((name, record.sha256) for name, record in read_manifest(self.folder).files.items())
        return hashlib.sha256(repr(files).encode()).hexdigest()

    def weights(
        self, model: ModelConfig, shapes: Optional[Mapping[str, Sequence[int]]] = None, *, adapters: bool = False
    ) -> Weights:
        """Open the weights for a run; with `adapters` its adapters, not the weights that they belong to.

        Args:
            shapes: see `check_start`; None for no check.
        """
        averaged = read_record(self.folder)["training"]["ema_decay"] is not None
        stored = SlotWeights(self.folder, "ema" if averaged else "weight")
        weights = stored if adapters else with_added_inputs(stored, model)
        if shapes is not None:
            narrower = {name: shape for name, shape in stored.shapes.items() if shape != weights.shapes[name]}
            added = weights.shapes.keys() - stored.shapes.keys()
            expected = {name: shape for name, shape in shapes.items() if name not in added}
            check_start(self.folder, expected | narrower, adapters=adapters, lora=model.adapters is not None)
        return weights


Start: TypeAlias = CheckpointStart | Network
"""Weights of `checkpoint.start_from`."""


def find_start(
    path: str,
    reading: Optional[ExitStack] = None,
    groups: Optional[ProcessGroups] = None,
    setting: str = "checkpoint.start_from",
) -> Start:
    """Find the weights of a setting.

    Args:
        reading: a checkpoint is not deleted until this stack is closed; None for no protection, in one process only.
        groups: process groups of the ranks, which all call this; None for one process.

    Raises:
        CheckpointError: there is no valid checkpoint and no folder of diffusers.
        ConfigError: the folder of diffusers cannot be read.
    """
    folder = on_first_rank(lambda: local_path(path), groups)
    if on_first_rank(lambda: is_network(folder), groups):
        with fails_together(groups):
            return read_network(folder)
    return CheckpointStart(find_checkpoint(folder, reading, groups, setting, starts=True)[0])


def check_start(
    folder: Path, shapes: Mapping[str, Sequence[int]], *, adapters: bool = False, lora: bool = False
) -> None:
    """Check that a run can start from a checkpoint.

    Args:
        shapes: unsharded shapes of the model without adapters and without auxiliary networks, or of the adapters.
        adapters: whether `shapes` are those of adapters.
        lora: whether the run trains adapters.
    """
    manifest = read_manifest(folder)
    if manifest.base is not None and not adapters:
        raise ConfigError(
            f"checkpoint.start_from: {folder} has only adapters (LoRA) for the weights of "
            f"{manifest.base['folder']}; start from those, or from the merged model in the folder that "
            "launch.export --format diffusers writes"
        )
    cure = f"set model to the settings it was trained with, as {_factory(folder, lora=lora)} does"
    check_same_model(stored_parameters(folder), shapes, f"checkpoint.start_from: {folder}", cure=cure)


def _factory(folder: Path, *, lora: bool) -> str:
    """Return the option of `launch.train` that takes the settings of the model from a folder."""
    return f"--factory \"finetune{'_lora' * lora}(base='{folder}')\""


def check_settings(start: Start, config: RunConfig) -> None:
    """Check the settings of the model that no shape depends on, such as axes of rotary positions, scale of adapters.

    Raises:
        ConfigError: a setting differs that neither `MAY_DIFFER` nor `checkpoint.accept_changes` lists.
    """
    ours, theirs, accepted = vars(config.model), vars(start.model), config.checkpoint.accept_changes or []
    factory = _factory(start.folder, lora=start.base is not None or config.model.adapters is not None)
    may_differ = {*MAY_DIFFER} if start.base is None else {*MAY_DIFFER} - {"lora"}
    names = [name for name in ours if name in theirs and name not in may_differ and f"model.{name}" not in accepted]
    changed = [name for name in names if _effect(ours[name]) != _effect(theirs[name])]
    if changed and "model" not in accepted:
        stored, new = (first_few([f"{name}={values[name]!r}" for name in changed]) for values in (theirs, ours))
        accept = json.dumps([*accepted, *(f"model.{name}" for name in changed)], separators=(",", ":"))
        raise ConfigError(
            f"checkpoint.start_from: {start.folder} has {stored}, but the model of the run has {new}; set these "
            f"settings of model to the former, as {factory} does, or accept the latter: "
            f"'checkpoint.accept_changes={accept}'"
        )


def _effect(value: object) -> object:
    """Return the part of a setting that no shape shows: of adapters only their scale."""
    return value.scale if isinstance(value, LoRAConfig) else value


def stored_parameters(folder: Path) -> dict[str, list[int]]:
    """Return the shape of every parameter of a checkpoint, except those of auxiliary networks."""
    stored = stored_shapes(read_manifest(folder))
    return {name: shape for name, shape in stored.items() if not name.startswith(PREFIXES)}


def load_base(config: RunConfig, chunks: Sequence[nn.Module], groups: ProcessGroups) -> Optional[dict[str, str]]:
    """Read the frozen weights of a model with adapters from `checkpoint.start_from`, on any layout.

    If that checkpoint has adapters that the run continues to train, the base is the one that it names.

    Every rank calls this before the model is wrapped, because optimizers hold no master copy of frozen weights.

    Returns:
        The entry of the base in manifests, see `base_entry`; None for a model without adapters.
    """
    if config.model.adapters is None:
        return None
    path = config.checkpoint.start_from
    assert path is not None  # `RunConfig.check`
    with ExitStack() as reading:
        start = find_start(path, reading, groups)
        if (base := start.base) is not None:  # the adapters themselves: `warm_start`
            path = base["folder"]
            start = find_start(path, reading, groups, f"the base of {start.folder}")
        entry = base_entry(path, start, groups)
        if base is not None and entry["digest"] != base["digest"]:
            raise CheckpointError(
                f"checkpoint.start_from: {start.folder} has changed since the adapters of "
                f"{config.checkpoint.start_from} were trained on it; restore its files"
            )
        frozen = [(n, p) for chunk in chunks for n, p in chunk.named_parameters() if not p.requires_grad]
        shapes = global_shapes(frozen, groups)
        with fails_together(groups):
            weights = start.weights(config.model, shapes)
            check_settings(start, config)
            log_start(weights, groups)
            load_weights(weights, chunks, groups, frozen=True)
        return entry


def base_entry(path: str, start: Start, groups: Optional[ProcessGroups] = None) -> dict[str, str]:
    """Return the entry of a base in manifests; with `groups`, every rank calls this.

    `folder` is that of the weights of `path`, or their address on the Hugging Face hub, because a local cache may be
    deleted. `digest` is that of the files.
    """
    folder = pinned(path, start.folder) if path.startswith(PREFIX) else str(start.folder.resolve())
    return {"folder": folder, "digest": start.digest(groups)}


def unverified_start(path: str) -> Optional[Start]:
    """Return the newest weights of `checkpoint.start_from` without verifying them; None if there are none yet."""
    folder = local_path(path)
    if is_network(folder):
        return read_network(folder)
    return next(map(CheckpointStart, candidates(folder)), None)


def start_line(config: RunConfig) -> str:
    """Return a line about what a run will read from `checkpoint.start_from`, without reading weights."""
    path = str(config.checkpoint.start_from)
    start = unverified_start(path)
    if start is None:
        return f"{path}, which {'has no checkpoint' if Path(path).exists() else 'does not exist'} yet"
    if isinstance(start, CheckpointStart):
        line = f"{sum(map(math.prod, stored_parameters(start.folder).values())):,} parameters of {start.folder}"
    else:
        line = str(start.weights(config.model))
    check_settings(start, config)
    return line


def log_start(weights: Weights, groups: ProcessGroups) -> None:
    """Log on rank 0 what a run reads from a folder of diffusers, or for a model that reads more than the weights'."""
    stored = weights
    while isinstance(stored, WithAddedInputs):
        stored = stored.stored
    if groups.rank == 0 and (stored is not weights or isinstance(stored, SlicedWeights)):
        logger.info("checkpoint.start_from reads %s", weights)
        for note in getattr(stored, "notes", ()):
            logger.info("%s", note)


def find_base(
    folder: Path, config: RunConfig, reading: ExitStack, groups: Optional[ProcessGroups] = None
) -> Optional[Weights]:
    """Return the base weights of an adapter run; None for a full model.

    The folder or address in the manifest is tried first, then `checkpoint.start_from`. Arguments: see `find_start`.
    """
    saved = read_manifest(folder).base
    if saved is None:
        return None
    paths, problems = dict.fromkeys([saved["folder"], config.checkpoint.start_from or saved["folder"]]), list[str]()
    for path in paths:
        try:
            start = find_start(path, reading, groups)
            if start.digest(groups) == saved["digest"]:
                return start.weights(config.model)
            problems.append(f"{path} has other weights now")
        except UserError as error:
            problems.append(str(error))
    raise CheckpointError(
        f"{folder} has adapters (LoRA) for the weights of {saved['folder']}, which cannot be read: "
        f"{'; '.join(problems)}. Restore that folder, or connect to the Hugging Face hub if it is an address"
    )


def download_base(path: Path | str) -> None:
    """Download the base of the adapters in a run folder or checkpoint if it is not on this machine.

    `find_base` tries the same two places, and reports errors.
    """
    with suppress(UserError):
        for folder in candidates(path)[:1]:
            if (base := read_manifest(folder).base) is None:
                continue
            with suppress(UserError):
                if local_path(base["folder"]).exists():
                    continue
            local_path(read_settings(folder)[0].checkpoint.start_from or "")


def load_run(folder: Path, config: RunConfig, chunks: Sequence[nn.Module], groups: ProcessGroups, slot: str) -> None:
    """Read the weights of a run into unwrapped model chunks: all of them, or base and adapters."""
    with ExitStack() as reading:
        if (base := find_base(folder, config, reading, groups)) is not None:
            load_weights(base, chunks, groups, frozen=True)
    load_weights(SlotWeights(folder, slot), chunks, groups, frozen=None if base is None else False)


def read_run(folder: Path, config: RunConfig, slot: str) -> dict[str, Tensor]:
    """Read every parameter of a run in full, float32, with adapters merged into the base weights."""
    weights = read_full_weights(folder, slot)
    with ExitStack() as reading:
        base = find_base(folder, config, reading)
        if base is None:
            return weights
        assert config.model.adapters is not None
        return merge_adapters(read_all(base), weights, config.model.adapters)
