"""A global stream, read by Energon."""

import struct
import tarfile
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Optional

from megatron.energon import SavableDataset, WorkerConfig, get_train_dataset, get_val_dataset
from megatron.energon.flavors.base_dataset import FlexState
from megatron.energon.savable_loader import SimpleSavableDatasetWrapper

from dit.data_api import BatchSpec
from dit.errors import DataError, UserError
from dit.patches import patches
from energon_data.skip_log import SkipCounter, TooManyDroppedError
from energon_data.state_codec import from_plain, to_plain
from energon_data.streams import Position, Source, StreamItem, check_settings_changed, read_up_to
from energon_data.task_encoder import DiffusionTaskEncoder, EncoderOptions, worker_config

_DATA_ERRORS = (OSError, EOFError, ValueError, tarfile.TarError, struct.error)
_OUTER = "SimpleSavableDatasetWrapper"
_WRAPPERS = ("WatchdogDataset", "_Deliveries")
"""Names of wrappers around the state of the data set in a saved position, from outside; kept for its format."""


def _items(dataset: SimpleSavableDatasetWrapper, ledger: SkipCounter) -> Iterator[StreamItem]:
    """Yield each micro-batch with the samples dropped before it; an error becomes the last item."""
    try:
        for _, _, batch in dataset:
            yield StreamItem(batch, ledger.drain())
    except TooManyDroppedError:
        yield StreamItem(None, ledger.drain(), "too many samples were dropped")
    except _DATA_ERRORS as error:
        yield StreamItem(None, ledger.drain(), f"{type(error).__name__}: {error}")
    except Exception:
        yield StreamItem(None, ledger.drain(), traceback.format_exc(), is_bug=True)


@patches(
    "megatron-energon 7.4",
    "megatron/energon/savable_loader.py: SimpleSavableDatasetWrapper",
    why="its loader pins memory, and draws a seed from the global generator, which changes later draws",
)
def _opened(
    get_dataset: Callable[..., SavableDataset],
    path: str,
    encoder: DiffusionTaskEncoder,
    config: WorkerConfig,
    **options: Any,
) -> SimpleSavableDatasetWrapper:
    """Open a data set whose samples an encoder converts to micro-batches."""
    packed = encoder.options.max_tokens_per_pack is not None
    options |= {"worker_config": config, "batch_size": None if packed else encoder.spec.micro_batch_size}
    try:
        dataset = get_dataset(path, task_encoder=encoder, **options)
    except UserError:
        raise
    except Exception as error:
        why = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise DataError(
            f"Energon cannot open {path}: {why}; compare its .nv-meta with one that `energon prepare` writes"
        ) from error
    return SimpleSavableDatasetWrapper(dataset, config, cache_pool=None)


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
        packed = options.max_tokens_per_pack is not None
        self._batch_size = None if packed else spec.micro_batch_size
        self._spec, self._options, self._reopen = spec, options, reopen
        self._encoder = DiffusionTaskEncoder(spec, options, SkipCounter(budget))
        self._dataset = _opened(
            get_train_dataset,
            path,
            self._encoder,
            worker_config(stream=stream, num_streams=num_streams, seed=seed),
            split_part=split,
            shuffle_buffer_size=shuffle_buffer,
            max_samples_per_sequence=None,  # complete shards
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
        self._iterator: Optional[Iterator[StreamItem]] = None

    def next(self) -> StreamItem:
        if self._iterator is None:
            self._iterator = _items(self._dataset, self._encoder.ledger)
        return next(self._iterator, StreamItem(None, [], None))

    def state(self) -> Position:
        saved = self._dataset.save_state()
        (inner,) = saved["datasets"]
        for name in reversed(_WRAPPERS):
            inner = FlexState({"datasets": [inner], "__class__": name})
        return Position({"settings": self._settings, "dataset": to_plain(inner), "index": saved["_sample_index"]})

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
        "megatron/energon/savable_loader.py: state of SimpleSavableDatasetWrapper",
        why="a position of one stream is restored under another layout",
    )
    def load(self, state: dict[str, Any]) -> None:
        inner = from_plain(state["dataset"])
        for _ in _WRAPPERS:
            (inner,) = inner["datasets"]
        self._dataset.restore_state(
            FlexState({"datasets": [inner], "__class__": _OUTER, "_sample_index": state["index"]})
        )

    def close(self) -> None:
        self._iterator = None
        self._encoder.close()


def validation_pass(
    path: str, spec: BatchSpec, options: EncoderOptions, *, split: str, budget: int
) -> Iterator[StreamItem]:
    """Read a split, or `max_samples` spread over it, once, and close its shards; it is opened immediately."""
    encoder = DiffusionTaskEncoder(spec, options, SkipCounter(budget))
    config = worker_config(stream=0, num_streams=1, seed=0)
    dataset = _opened(get_val_dataset, path, encoder, config, split_part=split, batch_drop_last=False)

    def read() -> Iterator[StreamItem]:
        try:
            yield from _items(dataset, encoder.ledger)
        finally:
            encoder.close()

    return read()
