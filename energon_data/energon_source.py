"""One global stream read by Energon, in this process or in a worker process of its own."""

import struct
import tarfile
import traceback
from collections.abc import Iterator
from typing import Any, Optional

import torch
from megatron.energon import SavableDataLoader, SavableDataset, get_train_dataset, get_val_dataset
from megatron.energon.flavors.base_dataset import FlexState
from megatron.energon.savable_loader import (
    SavableDataLoaderState,
    SavableDatasetCheckpoint,
    SavableDatasetState,
)
from megatron.energon.wrappers.base import BaseWrapperDataset

from dit.data_api import BatchSpec
from dit.errors import ConfigError
from energon_data.skip_log import GiveUp, Ledger
from energon_data.state_codec import from_plain, to_plain
from energon_data.streams import Delivery
from energon_data.task_encoder import DiffusionTaskEncoder, EncoderOptions, worker_config

_DATA_ERRORS = (OSError, EOFError, ValueError, tarfile.TarError, struct.error)
_OUTER = "SimpleSavableDatasetWrapper"
_PREFETCH = 2


class _Deliveries(BaseWrapperDataset):
    """Outermost dataset: sends the ledger's entries with each micro-batch, and errors as data.

    An exception that is raised in the worker process would be wrapped in the worker's traceback.
    """

    def __init__(self, dataset: SavableDataset, ledger: Ledger) -> None:
        super().__init__(dataset, worker_config=dataset.worker_config)
        self.ledger = ledger

    def reset_state_own(self) -> None:
        return

    def len_worker(self, worker_idx: Optional[int] = None) -> int:
        return self.dataset.len_worker(worker_idx)

    def config(self) -> dict[str, Any]:
        return self.dataset.config()

    def __iter__(self) -> Iterator[Delivery]:
        try:
            for batch in self.dataset:
                yield Delivery(batch, self.ledger.drain())
            return
        except GiveUp:
            failure, is_bug = "too many samples were skipped", False
        except _DATA_ERRORS as error:
            failure, is_bug = f"{type(error).__name__}: {error}", False
        except Exception:
            failure, is_bug = traceback.format_exc(), True
        yield Delivery(None, self.ledger.drain(), failure, is_bug)


def _loader(dataset: SavableDataset, ledger: Ledger) -> SavableDataLoader:
    loader = SavableDataLoader(
        _Deliveries(dataset, ledger),
        watchdog_timeout_seconds=None,
        gc_collect_every_n_steps=0,
        prefetch_factor=_PREFETCH,
    )
    # Energon enables pinning, which warns without a GPU; `DeviceBatches` moves batches. Without its own generator the
    # loader would draw its base seed from the global one, and so change later draws from it.
    loader.pin_memory = False
    loader.generator = torch.Generator().manual_seed(0)
    return loader


class EnergonSource:
    """A training stream.

    Args:
        path: data set folder or metadataset file, already checked.
        split: split of the data.
        stream: global number of the stream.
        num_streams: global streams of the run.
        background: read in a worker process.
        budget: number of lost samples that ends the stream.
        shuffle_buffer: samples shuffled before batching.
        max_samples_per_sequence: split shards into runs of about this many samples and shuffle those; None for
            complete shards.
        packing_buffer_size: samples from which packs are filled; None for dense batches.
    """

    def __init__(
        self,
        path: str,
        spec: BatchSpec,
        options: EncoderOptions,
        *,
        split: str,
        stream: int,
        num_streams: int,
        background: bool,
        seed: int,
        budget: int,
        shuffle_buffer: int,
        max_samples_per_sequence: Optional[int],
        packing_buffer_size: Optional[int],
    ) -> None:
        self._background = background
        ledger = Ledger(budget)
        packed = options.max_tokens_per_pack is not None
        self._batch_size = None if packed else spec.micro_batch_size
        dataset = get_train_dataset(
            path,
            split_part=split,
            worker_config=worker_config(stream=stream, num_streams=num_streams, background=background, seed=seed),
            batch_size=self._batch_size,
            shuffle_buffer_size=shuffle_buffer if shuffle_buffer > 1 else None,
            max_samples_per_sequence=max_samples_per_sequence,
            packing_buffer_size=packing_buffer_size if packed else None,
            task_encoder=DiffusionTaskEncoder(spec, options, ledger),
        )
        self._settings = {
            "micro_batch_size": self._batch_size,
            "max_tokens_per_pack": options.max_tokens_per_pack,
            "pack_cost_tokens": None if options.cost_limit is None else options.cost_limit.tokens,
            "packing_buffer_size": packing_buffer_size if packed else None,
            "shuffle_buffer": shuffle_buffer,
            "max_samples_per_sequence": max_samples_per_sequence,
            "bucket_by_shape": options.bucket_by_shape,
            "seed": seed,
        }
        self._loader = _loader(dataset, ledger)
        self._iterator: Optional[Iterator[Delivery]] = None
        self._behind = 0

    def next(self) -> Delivery:
        """Return the next delivery; do not call after a failure."""
        if self._iterator is None:
            self._iterator = iter(self._loader)
            for _ in range(self._behind):
                next(self._iterator)
            self._behind = 0
        return next(self._iterator, Delivery(None, [], None))

    def state(self) -> dict[str, Any]:
        """Return the position in plain containers; it does not depend on `background`.

        A worker runs ahead of training, so its state is an older position and the number of micro-batches to repeat.
        """
        inner: object = None
        index = behind = 0
        state = self._loader.save_state_rank()
        if state is not None:
            (worker,) = state.worker_states
            if isinstance(worker, SavableDatasetCheckpoint):
                behind = worker.offset
                if worker.state is not None:
                    inner, index = worker.state.dataset_state, worker.state.sample_index
            else:
                (inner,), index = worker["datasets"], worker["_sample_index"]
                behind = self._behind
        return {"settings": self._settings, "dataset": to_plain(inner), "index": index, "behind": behind}

    def load(self, state: dict[str, Any]) -> None:
        """Continue from `state`; called before the first `next`.

        Raises:
            ConfigError: the state was made with other data settings.
        """
        saved = state["settings"]  # older versions stored fewer
        changed = [f"{k} was {saved[k]} and is {v}" for k, v in self._settings.items() if k in saved and saved[k] != v]
        if changed:
            raise ConfigError(
                f"the position in the data was saved with other settings ({', '.join(changed)}), where it means other "
                "samples; set them back, or start a new run from these weights: another training.run_dir and "
                "checkpoint.start_from=this one"
            )
        inner, index, behind = from_plain(state["dataset"]), state["index"], state["behind"]
        if inner is None and not behind:
            return
        worker: SavableDatasetCheckpoint | FlexState
        if self._background:
            saved = SavableDatasetState(rng=None, dataset_state=inner, sample_index=index)
            worker = SavableDatasetCheckpoint(state=saved, offset=behind)
        else:
            worker = FlexState({"datasets": [inner], "__class__": _OUTER, "_sample_index": index})
            self._behind = behind
        batch_size = self._loader._get_batch_size()
        self._loader.restore_state_rank(
            SavableDataLoaderState(worker_states=[worker], next_worker_id=0, micro_batch_size=batch_size)
        )

    def close(self) -> None:
        """Stop the worker process."""
        workers = getattr(self._loader, "_iterator", None)
        if workers is not None and hasattr(workers, "_shutdown_workers"):
            # The worker joins its command thread, which polls once a second unless it gets an end command.
            for queue in self._loader.cmd_queues:
                queue.put((None,))
            workers._shutdown_workers()
        self._iterator = None


def validation_pass(
    path: str, spec: BatchSpec, options: EncoderOptions, *, split: str, budget: int, packing_buffer_size: Optional[int]
) -> Iterator[Delivery]:
    """Read a split once, in the order of its shards."""
    ledger = Ledger(budget)
    packed = options.max_tokens_per_pack is not None
    dataset = get_val_dataset(
        path,
        split_part=split,
        worker_config=worker_config(stream=0, num_streams=1, background=False, seed=0),
        batch_size=None if packed else spec.micro_batch_size,
        batch_drop_last=False,
        packing_buffer_size=packing_buffer_size if packed else None,
        task_encoder=DiffusionTaskEncoder(spec, options, ledger),
    )
    return iter(_loader(dataset, ledger))
