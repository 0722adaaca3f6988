"""Saving and resuming a run: sharded state, data position and settings in one verified folder."""

import io
import json
import logging
import pickle
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Optional

import torch
import yaml
from torch import Tensor

from dit.backends.process_groups import gather_objects
from dit.checkpoint.manifest import (
    BASE,
    CURE,
    DATA,
    MANIFEST,
    RUN,
    FileRecord,
    HeldOut,
    Manifest,
    check_same_base,
    check_same_model,
    model_fingerprint,
    read_manifest,
    stored_shapes,
)
from dit.checkpoint.reading import find_checkpoint
from dit.checkpoint.records import CONFIG_FILE, METADATA_FILE, read_metadata, read_record, usable
from dit.checkpoint.resume_check import changes, check_same_experiment, replaced_data
from dit.checkpoint.run_identity import join_run
from dit.checkpoint.sharded_state import (
    files_of,
    global_shapes,
    index_of,
    load_state,
    local_state,
    parameters_of,
)
from dit.checkpoint.state_files import write_files
from dit.checkpoint.store import CheckpointStore
from dit.checkpoint.train_state import TrainState
from dit.checkpoint.verify_together import fails_together, newest_valid_together, on_first_rank
from dit.data_api import check_resumed_streams, merge_states
from dit.errors import CheckpointError, ConfigError, DataError, on_a_screen
from dit.run_config import RunConfig
from dit.safe_files import read_torch

logger = logging.getLogger(__name__)

WRITE = "write its part of the checkpoint"
"""Task of a rank in `fails_together`."""
LONGEST_CHANGE = 300  # characters of a logged change


class Checkpointer:
    """Saves and loads the checkpoints of one run; every rank calls every method.

    Attributes:
        resumed_metadata: `metadata` of the resumed checkpoint, see `save`; empty for a new run.
    """

    def __init__(self, store: CheckpointStore, config: RunConfig) -> None:
        self.store = store
        self.config = config
        self.resumed_metadata: dict[str, Any] = {}
        self._fingerprint: Optional[dict[str, Any]] = None
        self._config_text: Optional[str] = None
        self._index: Optional[str] = None

    def save(self, state: TrainState, metadata: dict[str, Any]) -> Path:
        """Write a checkpoint of `state.step`, with plain JSON metadata for sampling, and make it current.

        Raises:
            CheckpointError: a rank could not write; earlier checkpoints are intact.
        """
        groups, step = state.groups, state.step
        records: dict[str, FileRecord] = {}
        meta, files = self.meta(state), self.files(state, metadata)
        with fails_together(groups, WRITE):
            if groups.rank == 0:
                self.store.begin(step)
        with fails_together(groups, WRITE), self.store.writing(step):
            records = write_files(self.store.partial_path(step), files)
        parts = gather_objects(records)
        with fails_together(groups, WRITE):
            if groups.rank == 0:
                self.store.publish(step, meta, {name: record for part in parts for name, record in part.items()})
        return self.store.path(step)

    def meta(self, state: TrainState) -> dict[str, Any]:
        """Return the metadata of the manifest; every rank calls this."""
        if self._fingerprint is None:
            self._fingerprint = model_fingerprint(global_shapes(parameters_of(state.shards), state.groups))
        return {
            "consumed_samples": state.consumed_samples,
            **held_out_meta(state.held_out),
            "fingerprint": self._fingerprint,
            "torch": torch.__version__,
            RUN: state.run,
            **({DATA: state.data} if state.data else {}),
            **({} if state.base is None else {BASE: state.base}),
        }

    def files(self, state: TrainState, metadata: dict[str, Any]) -> dict[str, list[bytes | Tensor]]:
        """Return the content of this rank's files: state and position in the data; on rank 0, also the records."""
        groups, local = state.groups, local_state(state.shards, state.ema, state.groups)
        if self._index is None:  # the layout of a run does not change
            index = ""
            with fails_together(groups, WRITE):
                index = index_of(local, groups)
            self._index = index  # set on all ranks or on none; if on none, the next save gathers again
        files = files_of(local, self._index, state.optimizer, groups)
        if groups.is_data_reader:
            position = io.BytesIO()  # torch's file writer hides disk errors
            torch.save(state.stream.state_dict(), position)
            files[f"loader/dp_{groups.dp_rank:05d}.pt"] = [position.getvalue()]
        if groups.rank == 0:
            if self._config_text is None:  # takes as long as copying the state of a small model
                self._config_text = yaml.safe_dump(self.config.to_record(), sort_keys=False)
            files[CONFIG_FILE] = [self._config_text.encode()]
            files[METADATA_FILE] = [json.dumps(metadata, indent=1).encode()]
        return files

    def resume(self, state: TrainState, mode: str) -> bool:
        """Continue from the newest valid checkpoint; if there is none, from `checkpoint.resume_from`.

        Returns whether the run was resumed. `mode` is `checkpoint.resume`.
        """
        path, groups = self.config.checkpoint.resume_from, state.groups
        state.run = on_first_rank(lambda: join_run(self.store, self.config), groups)
        steps, candidates = on_first_rank(lambda: (self.store.steps(), self.store.newest_first()), groups)
        with ExitStack() as reading:
            newest = newest_valid_together(candidates, groups, reading)
            if newest is not None and mode == "never":
                raise ConfigError(
                    f"checkpoint.resume=never but {self.store.root} holds checkpoints of steps {steps}, "
                    "which a later resume would take for this run's; use another training.run_dir or remove them"
                )
            if newest is None and steps and mode != "never":
                raise CheckpointError(
                    f"none of the checkpoints in {self.store.root} (steps {steps}) is valid, for the reasons logged "
                    "above; restore one, or train again from step 0 with checkpoint.resume=never"
                )
            if newest is None and path is not None:
                folder, _ = find_checkpoint(path, reading, groups, "checkpoint.resume_from")
                newest = folder, read_manifest(folder)
            if newest is None and mode == "must":
                raise CheckpointError(
                    f"checkpoint.resume=must but {self.store.root} holds no valid checkpoint; "
                    "use checkpoint.resume=auto to start from step 0"
                )
            if newest is None:
                return False
            folder, manifest = newest
            if manifest.is_imported:
                raise ConfigError(
                    f"{folder} holds imported weights, which have no optimizer and no data position to resume; start "
                    "from them: checkpoint.start_from=that run folder, with another training.run_dir"
                )
            self._restore(state, folder, manifest)
            return True

    def _restore(self, state: TrainState, folder: Path, manifest: Manifest) -> None:
        saved = read_record(folder)
        with usable(folder / CONFIG_FILE):
            of_model = [str(change) for change in changes(saved, self.config) if change.path.startswith("model")]
        shapes = global_shapes(parameters_of(state.shards), state.groups)
        check_same_model(stored_shapes(manifest), shapes, f"the checkpoint of step {manifest.step}", of_model)
        check_same_base(folder, manifest, state.base)
        if state.ema is not None and saved["training"]["ema_decay"] is None:
            raise CheckpointError(
                f"{folder} holds no weight average but training.ema_decay={state.ema.decay} needs one; "
                "set training.ema_decay=None or start in a new training.run_dir"
            )
        with usable(folder / MANIFEST):
            replaced = replaced_data(manifest.meta.get(DATA, {}), state.data or {})
        with usable(folder / CONFIG_FILE):
            lengths, stored = self.config.training.ema_sigma_rel or [], saved["training"].get("ema_sigma_rel") or []
            if missing := [length for length in lengths if length not in stored]:
                cure = json.dumps(stored, separators=(",", ":")) if stored else None
                raise CheckpointError(
                    f"training.ema_sigma_rel={lengths}, but {folder} has no power-function averages of lengths "
                    f"{missing}; set training.ema_sigma_rel={cure} or start in a new training.run_dir"
                )
            accepted = self.config.checkpoint.accept_changes or []
            differences = check_same_experiment(folder, saved, self.config, accepted, replaced)
        restarts_data = any(change.restarts_data for change in differences)
        if state.groups.rank == 0:
            for change in differences:
                logger.info("changed since step %d: %s", manifest.step, on_a_screen(str(change), LONGEST_CHANGE))
            if restarts_data:
                logger.info("the data start afresh at step %d", manifest.step)
        self._load(state, folder, manifest)
        if not restarts_data:
            with usable(folder / "loader"):
                position = read_loader_state(folder, state.groups.dp_rank, state.groups.dp_size)
                state.stream.load_state_dict(position)
                check_resumed_streams(position, gather_objects(list(state.stream.state_dict().get("streams", {}))))
        self.resumed_metadata = read_metadata(folder)
        if any(change.is_refused for change in differences):
            self.resumed_metadata.pop("guard", None)  # losses of another experiment show no spikes of this one

    def rewind(self, state: TrainState) -> Optional[dict[str, Any]]:
        """Go back to the newest valid checkpoint of this run, and return its metadata; keep the data position.

        Returns None, and does not change the state, if there is no valid checkpoint.
        """
        candidates = on_first_rank(self.store.newest_first, state.groups)
        with ExitStack() as reading:
            newest = newest_valid_together(candidates, state.groups, reading)
            if newest is None:
                return None
            self._load(state, *newest)
            return read_metadata(newest[0])

    @staticmethod
    def _load(state: TrainState, folder: Path, manifest: Manifest) -> None:
        """Load everything except the data position."""
        load_state(folder, state.shards, state.ema, state.optimizer, state.wrapped, state.groups)
        with usable(folder / MANIFEST):
            state.step = manifest.step
            state.consumed_samples = int(manifest.meta["consumed_samples"])
            state.held_out = manifest.held_out


def held_out_meta(held_out: Optional[HeldOut]) -> dict[str, Any]:
    """Return the manifest entries of a held-out loss."""
    return {
        "held_out_loss": None if held_out is None else held_out.loss,
        "held_out_step": None if held_out is None else held_out.step,
    }


def read_loader_state(folder: Path, dp_rank: int = 0, dp_size: int = 1) -> dict[str, Any]:
    """Return the data position in a checkpoint from which a data-parallel rank continues, see `merge_states`."""
    parts = []
    for path in sorted((folder / "loader").glob("dp_*.pt")):
        try:
            parts.append(read_torch(path))
        except (OSError, ValueError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
            raise CheckpointError(f"{path} cannot be read: {str(error).splitlines()[0]}; {CURE}") from error
    if not parts:
        raise CheckpointError(f"{folder / 'loader'} holds no position of the data; {CURE}")
    try:
        return merge_states(parts, dp_rank=dp_rank, dp_size=dp_size)
    except DataError as error:
        raise CheckpointError(f"{folder / 'loader'}: {error}; {CURE}") from error
