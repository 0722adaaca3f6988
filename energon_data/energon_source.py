"""A global stream, read by Energon."""

import struct
import tarfile
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Optional

import torch
from megatron.energon import SavableDataLoader, SavableDataset, get_train_dataset, get_val_dataset
from megatron.energon.flavors.base_dataset import FlexState
from megatron.energon.savable_loader import SavableDataLoaderState
from megatron.energon.wrappers.base import BaseWrapperDataset

from dit.data_api import BatchSpec
from dit.errors import DataError, UserError
from dit.patches import patches
from energon_data.skip_log import SkipCounter, TooManyDroppedError
from energon_data.state_codec import from_plain, to_plain
from energon_data.streams import Position, Source, StreamItem, check_settings_changed, read_up_to
from energon_data.task_encoder import DiffusionTaskEncoder, EncoderOptions, worker_config

_DATA_ERRORS = (OSError, EOFError, ValueError, tarfile.TarError, struct.error)
_OUTER = "SimpleSavableDatasetWrapper"


class _Deliveries(BaseWrapperDataset):
    """Outermost dataset: adds dropped samples to each micro-batch, and returns errors as items."""

    def __init__(self, dataset: SavableDataset, ledger: SkipCounter) -> None:
        super().__init__(dataset, worker_config=dataset.worker_config)
        self.ledger = ledger

    def reset_state_own(self) -> None:
        return

    def len_worker(self, worker_idx: Optional[int] = None) -> int:
        return self.dataset.len_worker(worker_idx)

    def config(self) -> dict[str, Any]:
        return self.dataset.config()

    def __iter__(self) -> Iterator[StreamItem]:
        try:
            for batch in self.dataset:
                yield StreamItem(batch, self.ledger.drain())
        except TooManyDroppedError:
            yield StreamItem(None, self.ledger.drain(), "too many samples were dropped")
        except _DATA_ERRORS as error:
            yield StreamItem(None, self.ledger.drain(), f"{type(error).__name__}: {error}")
        except Exception:
            yield StreamItem(None, self.ledger.drain(), traceback.format_exc(), is_bug=True)


@patches(
    "megatron-energon 7.4",
    "megatron/energon/savable_loader.py: SavableDataLoader.pin_memory, generator",
    why="pinning cannot be disabled; without a generator the base seed changes later draws",
)
def _loader(dataset: SavableDataset, ledger: SkipCounter) -> SavableDataLoader:
    loader = SavableDataLoader(_Deliveries(dataset, ledger), watchdog_timeout_seconds=None, gc_collect_every_n_steps=0)
    # Energon enables pinning, which warns without a GPU; `DeviceBatches` moves batches. Without its own generator the
    # loader would draw its base seed from the global one, which changes later draws.
    loader.pin_memory = False
    loader.generator = torch.Generator().manual_seed(0)
    return loader


def _opened(get_dataset: Callable[..., SavableDataset], path: str, **options: Any) -> SavableDataset:
    try:
        return get_dataset(path, **options)
    except UserError:
        raise
    except Exception as error:
        why = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise DataError(
            f"Energon cannot open {path}: {why}; compare its .nv-meta with one that `energon prepare` writes"
        ) from error


@patches(
    "megatron-energon 7.4",
    "megatron/energon/wrappers/packing_dataset.py: state of PackingDataset",
    why="selected samples return to the buffer if settings change",
)
def _with_unselected(state: Any) -> Any:
    """In a saved state, move samples of packs that were selected but not delivered back to the reading buffer."""
    if "_pre_packing_lengths" in state:
        keys = [*state["_pre_packing_buffer"]["_restore_keys"], *state["_reading_buffer"]["_restore_keys"]]
        if "buffer_size" in state:
            state["buffer_size"] = len(keys)
        state["_reading_buffer"]["_restore_keys"] = keys
        state["_pre_packing_buffer"]["_restore_keys"] = []
        state["_pre_packing_lengths"] = []
    for inner in state.get("datasets", []):
        _with_unselected(inner)
    return state


class EnergonSource(Source):
    """A training stream.

    Args:
        reopen: opens the same stream with another `BatchSpec` and `pack_multiple_of`.
        budget: number of damaged samples that the stream may drop.
    """

    def __init__(
        self,
        path: str,
        spec: BatchSpec,
        options: EncoderOptions,
        *,
        reopen: Callable[[BatchSpec, int], "EnergonSource"],
        split: str,
        stream: int,
        num_streams: int,
        seed: int,
        budget: int,
        shuffle_buffer: Optional[int],
    ) -> None:
        ledger = SkipCounter(budget)
        packed = options.max_tokens_per_pack is not None
        self._batch_size = None if packed else spec.micro_batch_size
        self._spec, self._options, self._reopen = spec, options, reopen
        self._encoder = DiffusionTaskEncoder(spec, options, ledger)
        dataset = _opened(
            get_train_dataset,
            path,
            split_part=split,
            worker_config=worker_config(stream=stream, num_streams=num_streams, seed=seed),
            batch_size=self._batch_size,
            shuffle_buffer_size=shuffle_buffer,
            max_samples_per_sequence=None,  # complete shards
            task_encoder=self._encoder,
        )
        self._settings = {
            "micro_batch_size": self._batch_size,
            "max_tokens_per_pack": options.max_tokens_per_pack,
            "pack_multiple_of": options.pack_multiple_of if packed else None,
            "pack_cost_tokens": None if options.cost_limit is None else options.cost_limit.tokens,
            "packing_buffer_size": options.packing_buffer_size if packed else None,
            "shuffle_buffer": shuffle_buffer,
            "bucket_by_shape": options.bucket_by_shape,
            "interleaved": [reader.streams > 1 for reader in self._encoder.readers],
            "seed": seed,
        }
        self._loader = _loader(dataset, ledger)
        self._iterator: Optional[Iterator[StreamItem]] = None

    def next(self) -> StreamItem:
        if self._iterator is None:
            self._iterator = iter(self._loader)
        return next(self._iterator, StreamItem(None, [], None))

    def state(self) -> Position:
        saved = self._loader.save_state_rank()
        assert saved is not None  # None only for workers that have not started, and this loader has no workers
        (worker,) = saved.worker_states
        (inner,) = worker["datasets"]
        state = {"settings": self._settings, "dataset": to_plain(inner), "index": worker["_sample_index"]}
        return Position(state)

    def adapt(self, position: Position) -> Position:
        """Convert a position; see `Source.adapt`.

        If settings that group samples changed, the items after the state are read with the former settings, and samples
        that were selected into packs but not delivered are selected again.
        """
        saved = position.state["settings"]
        # Settings that determine the grouping of samples, but not the samples after a position.
        grouping = {"pack_multiple_of"} if self._batch_size is None else {"micro_batch_size"}
        may_change = set[str]() if self._options.bucket_by_shape else grouping
        if not check_settings_changed(saved, self._settings, may_change):
            return position
        former_spec = replace(self._spec, micro_batch_size=saved["micro_batch_size"] or 1, multiple_of=1)
        former = self._reopen(former_spec, saved["pack_multiple_of"] or 1)
        state = read_up_to(former, position)
        former.close()
        dataset = _with_unselected(from_plain(state["dataset"]))
        return Position(state | {"settings": self._settings, "dataset": to_plain(dataset)})

    @patches(
        "megatron-energon 7.4",
        "megatron/energon/savable_loader.py: SavableDataLoaderState, _get_batch_size, state of "
        "SimpleSavableDatasetWrapper",
        why="a position of one stream is restored under another layout",
    )
    def load(self, state: dict[str, Any]) -> None:
        inner, batch_size = from_plain(state["dataset"]), self._loader._get_batch_size()
        if inner is not None:
            worker = FlexState({"datasets": [inner], "__class__": _OUTER, "_sample_index": state["index"]})
            self._loader.restore_state_rank(
                SavableDataLoaderState(worker_states=[worker], next_worker_id=0, micro_batch_size=batch_size)
            )

    def close(self) -> None:
        self._iterator = None
        self._encoder.close()


def validation_pass(
    path: str, spec: BatchSpec, options: EncoderOptions, *, split: str, budget: int
) -> Iterator[StreamItem]:
    """Read a split, or `max_samples` spread over it, once, and close its shards; it is opened immediately."""
    ledger = SkipCounter(budget)
    packed = options.max_tokens_per_pack is not None
    encoder = DiffusionTaskEncoder(spec, options, ledger)
    dataset = _opened(
        get_val_dataset,
        path,
        split_part=split,
        worker_config=worker_config(stream=0, num_streams=1, seed=0),
        batch_size=None if packed else spec.micro_batch_size,
        batch_drop_last=False,
        task_encoder=encoder,
    )

    def read() -> Iterator[StreamItem]:
        try:
            yield from _loader(dataset, ledger)
        finally:
            encoder.close()

    return read()
