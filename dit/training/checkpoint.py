"""Saving and resuming a run: sharded state, loader position and settings in one proven folder."""

import io
import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional

import torch
import torch.distributed as dist
import yaml

from dit.backends.device import local_device
from dit.backends.process_groups import ProcessGroups
from dit.data_api import DataStream
from dit.errors import CheckpointError, ConfigError
from dit.models.base import Backbone
from dit.training.checkpoint_store import CheckpointStore, Manifest, check_same_model, model_fingerprint
from dit.training.ema import EMA
from dit.training.optim import MasterShard
from dit.training.reading import reading
from dit.training.sharded_state import load_state, save_state

logger = logging.getLogger(__name__)

CONFIG_FILE = "config.yaml"
FACTS_FILE = "facts.json"


@dataclass
class TrainState:
    """Everything a step changes.

    Attributes:
        chunks: this rank's bare model chunks, one unless the pipeline is interleaved; `wrapped` in the same order.
        step: optimizer steps done.
        consumed_samples: samples trained on by all ranks.
    """

    wrapped: Sequence[Any]
    chunks: Sequence[Backbone]
    optimizer: Any
    shards: list[MasterShard]
    ema: Optional[EMA]
    stream: DataStream
    groups: ProcessGroups
    step: int = 0
    consumed_samples: int = 0


def global_shapes(shards: Sequence[MasterShard], groups: ProcessGroups) -> dict[str, list[int]]:
    """Return the shape of every whole parameter of all stages and experts by name, equal on every layout and rank."""
    shapes = {}
    for shard in shards:
        shape = list(shard.parameter.shape)
        if getattr(shard.parameter, "tensor_model_parallel", False):
            shape[shard.parameter.partition_dim] *= groups.tp.size()  # type: ignore[attr-defined]
        shapes[shard.name] = shape
    parts: list[Any] = [None] * groups.different_parameters.size()
    dist.all_gather_object(parts, shapes, group=groups.different_parameters)
    return {name: shape for part in parts for name, shape in part.items()}


class Checkpointer:
    """Writes and reads the checkpoints of one run; every rank calls every method.

    Args:
        store: the folder of checkpoints.
        settings: of the run, as plain values.
    """

    def __init__(self, store: CheckpointStore, settings: dict[str, Any]) -> None:
        self.store = store
        self.settings = settings

    def save(self, state: TrainState, facts: dict[str, Any], held_out_loss: Optional[float]) -> Path:
        """Write a checkpoint of `state.step` and make it current.

        Args:
            facts: what sampling must know beside the settings, plain JSON.

        Raises:
            CheckpointError: a rank could not write; the checkpoints before are untouched.
        """
        groups, step = state.groups, state.step
        fingerprint = model_fingerprint(global_shapes(state.shards, groups))
        failure: Optional[BaseException] = None
        if groups.rank == 0:
            try:
                self.store.begin(step)
            except CheckpointError as error:
                failure = error
        self._agree(failure)
        try:
            with self.store.writing(step):
                folder = self.store.partial_path(step)
                save_state(folder, state.shards, state.ema, state.optimizer, groups)
                if groups.is_data_reader:
                    (folder / "loader").mkdir(exist_ok=True)
                    position = io.BytesIO()  # torch's own file writer hides why the disk refused
                    torch.save(state.stream.state_dict(), position)
                    (folder / "loader" / f"dp_{groups.dp_rank:05d}.pt").write_bytes(position.getbuffer())
                if groups.rank == 0:
                    (folder / CONFIG_FILE).write_text(yaml.safe_dump(self.settings, sort_keys=False))
                    (folder / FACTS_FILE).write_text(json.dumps(facts, indent=1))
        except CheckpointError as error:
            failure = error
        self._agree(failure)
        if groups.rank == 0:
            meta = {
                "consumed_samples": state.consumed_samples,
                "held_out_loss": held_out_loss,
                "fingerprint": fingerprint,
                "torch": torch.__version__,
            }
            try:
                self.store.publish(step, meta)
            except CheckpointError as error:
                failure = error
        self._agree(failure)
        return self.store.path(step)

    def resume(self, state: TrainState, mode: str) -> bool:
        """Continue from the newest valid checkpoint.

        Args:
            mode: `auto`, `never` or `must`.

        Returns:
            Whether there was one.

        Raises:
            CheckpointError: `must` and there is none, or there are some and all of them are damaged.
            ConfigError: it belongs to another model, or holds imported weights; or `never` and there is one.
        """
        found: list[Any] = [None, None]
        if state.groups.rank == 0:
            found = [self.store.steps(), self.store.newest_valid()]
        dist.broadcast_object_list(found)
        steps, newest = found
        if newest is None:
            if steps and mode != "never":
                raise CheckpointError(
                    f"none of the checkpoints in {self.store.root} (steps {steps}) is valid, for the reasons given "
                    "above; restore one, or train again from step 0 with checkpoint.resume=never"
                )
            if mode == "must":
                raise CheckpointError(
                    f"checkpoint.resume=must but {self.store.root} holds no valid checkpoint; "
                    "use checkpoint.resume=auto to start anew"
                )
            return False
        if mode == "never":
            raise ConfigError(
                f"checkpoint.resume=never but {self.store.root} holds checkpoints of steps {steps}, "
                "which a later resume would take for this run's; use another training.run_dir or remove them"
            )
        folder, manifest = newest
        if manifest.is_imported:
            raise ConfigError(
                f"{folder} holds imported weights, which have no optimizer and no data position to resume; start from "
                "them: checkpoint.start_from=that run folder, with another training.run_dir"
            )
        self._restore(state, folder, manifest)
        return True

    def _restore(self, state: TrainState, folder: Path, manifest: Manifest) -> None:
        check_same_model(manifest, model_fingerprint(global_shapes(state.shards, state.groups)))
        with reading(folder):
            self._check_ema(state, folder)
            load_state(folder, state.shards, state.ema, state.optimizer, state.wrapped, state.groups)
            position = read_loader_state(folder)
        state.stream.load_state_dict(position)
        state.step = manifest.step
        state.consumed_samples = int(manifest.meta["consumed_samples"])

    def _check_ema(self, state: TrainState, folder: Path) -> None:
        saved = yaml.safe_load((folder / CONFIG_FILE).read_text())
        had_ema = saved["training"]["ema_decay"] is not None
        if state.ema is not None and not had_ema:
            raise CheckpointError(
                f"{folder} holds no weight average but training.ema_decay={state.ema.decay} asks for one; "
                "set training.ema_decay=None or start in a new training.run_dir"
            )

    def _agree(self, failure: Optional[BaseException]) -> None:
        """Raise on every rank if any rank failed, its own error first."""
        flag = torch.tensor([float(failure is not None)], device=local_device())
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        if failure is not None:
            raise failure
        if flag.item():
            raise CheckpointError("another rank could not write its part of the checkpoint; see its error")


def read_loader_state(folder: Path) -> dict[str, Any]:
    """Join the loader positions of all data-parallel ranks of a checkpoint, whatever ranks there are now."""
    merged: dict[str, Any] = {}
    for path in sorted((folder / "loader").glob("dp_*.pt")):
        part = torch.load(path, weights_only=True)
        streams = {**merged.get("streams", {}), **part.get("streams", {})}
        merged = {**merged, **part, "streams": streams}
    return merged
