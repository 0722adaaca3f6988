"""Task encoder for all backbones: cook, filter, encode, pack."""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Optional

from megatron.energon import (
    BatchDataset,
    Cooker,
    DefaultTaskEncoder,
    GroupBatchDataset,
    LimitDataset,
    MapDataset,
    PackingDataset,
    SavableDataset,
    ShuffleBufferDataset,
    SkipSample,
    WorkerConfig,
    stateless,
)
from megatron.energon.errors import reraise_exception
from torch import Tensor

from dit.batch import PackedBatch
from dit.data_api import BatchSpec, sample_id
from dit.encoders.vae import Geometry
from dit.patches import patches
from dit.patchify import Grid, frames_to_patch
from energon_data.augment import Augmentation, Visit
from energon_data.cookers import cook_clip, read_caption, read_condition
from energon_data.decoder import decode_sample
from energon_data.filters import Filters, check_finite
from energon_data.folder import is_mixed
from energon_data.packing import (
    BUFFERED,
    CostLimit,
    balanced_packs,
    buffer_limit,
    collate,
    greedy_knapsack,
    padded_length,
)
from energon_data.samples import CAPTIONS, Clip, DroppedError, SampleError
from energon_data.skip_log import Skip, SkipCounter
from energon_data.tar_index import READ_ERROR, SampleReader


@dataclass(frozen=True, kw_only=True)
class EncoderOptions:
    """Options of the conversion of samples to micro-batches. Fields that are not listed are settings of `EnergonData`.

    Attributes:
        max_samples: number of samples of a held-out pass, spread over the split; None for the complete split.
        shuffled_in_pass: size of the buffer that shuffles the samples of a pass (`_ShuffledPasses`); 0 for none.
        cost_limit: limit of the work of a pack; None for no limit.
        vae: sizes of the online autoencoder; None if samples contain latents.
        embedded: conditions that the training device computes from the captions.
    """

    filters: Filters = field(default_factory=Filters)
    augmentation: Optional[Augmentation] = None
    vary_captions: bool = False
    require_checksums: bool = True
    max_text_tokens: Optional[int] = None
    max_samples: Optional[int] = None
    shuffled_in_pass: int = 0
    max_tokens_per_pack: Optional[int] = None
    packing_buffer_size: Optional[int] = None
    pack_multiple_of: int = 1
    cost_limit: Optional[CostLimit] = None
    pad_packs: bool = False
    bucket_by_shape: bool = False
    vae: Optional[Geometry] = None
    embedded: frozenset[str] = frozenset()
    references: bool = False


class _ShuffledPasses(ShuffleBufferDataset):
    """Endless passes over a data set, each shuffled separately.

    Near the end of a pass, samples of the next pass are already read, but they are drawn only when it has ended:

        buffer   7 7 7 7 8 8 8      pass of each sample: one of the 7s is drawn, then one more 8 is read
    """

    _savable_fields = ("_active_buffer", "_worker_rng", "_passes", "_pass")

    def reset_state_own(self) -> None:
        super().reset_state_own()
        self._passes, self._pass = list[int](), 0  # of each buffered sample, and of the sample that is read next

    @property
    def current(self) -> int:
        """Pass of the sample that is drawn next."""
        return self._passes[0] if self._passes else self._pass

    @patches(
        "megatron-energon 7.4",
        "megatron/energon/wrappers/shuffle_buffer_dataset.py: ShuffleBufferDataset._active_buffer, _worker_rng",
        why="its buffer mixes as many passes over a small data set as fit into it",
    )
    def __iter__(self) -> Iterator[Any]:
        buffer, passes = self._active_buffer, self._passes
        buffer.worker_start()
        while True:
            for _ in buffer.append_iter():
                passes.append(self._pass)
                if len(passes) >= self.size or passes[0] < self._pass:
                    index = self._worker_rng.randbelow(passes.count(passes[0]))
                    del passes[index]
                    yield buffer.pop(index)
            self._pass += 1


class _Packing(PackingDataset):
    """Energon's packing without its progress bar."""

    @patches(
        "megatron-energon 7.4",
        "megatron/energon/wrappers/packing_dataset.py: _fill_reading_buffer",
        why="its progress bar cannot be disabled",
    )
    def _fill_reading_buffer(self, source_iter: Iterator[object], log_progress: bool = False) -> bool:
        return super()._fill_reading_buffer(source_iter, log_progress=False)


class _PackedPasses(_Packing):
    """Packing whose buffer never crosses the end of a pass, unless several complete passes fit into one pack.

    A pass over a blend ends when its slowest member ends its own pass.

    Args:
        shuffles: data set of each member of the blend.
        fits: `DiffusionTaskEncoder.another_pass_fits`.
    """

    _savable_fields = (*_Packing._savable_fields, "buffer_size", "_first", "_last")

    def __init__(
        self, *args: Any, shuffles: list[_ShuffledPasses], fits: Callable[[int, list[Clip]], bool], **options: Any
    ) -> None:
        super().__init__(*args, **options)
        self._shuffles, self._fits = shuffles, fits

    def reset_state_own(self) -> None:
        super().reset_state_own()
        self._first = 0  # first pass that can be complete in the reading buffer
        self._last = -1  # pass of the last sample that was read

    def _current(self) -> int:
        return min(shuffle.current for shuffle in self._shuffles)

    @patches(
        "megatron-energon 7.4",
        "megatron/energon/wrappers/packing_dataset.py: _fill_reading_buffer",
        why="its buffer mixes as many passes over a small data set as fit into it",
    )
    def _fill_reading_buffer(self, source_iter: Iterator[object], log_progress: bool = False) -> bool:
        reading, selected = self._reading_buffer, self._pre_packing_buffer
        if not reading.len_worker():
            self.buffer_size, self._first = buffer_limit(self.dataset.len_worker()), self._last + 1
        while reading.len_worker() + selected.len_worker() < self.buffer_size:
            self._last = self._current()
            reading.append(next(source_iter))
            if self._current() > self._last and not self._fits(self._current() - self._first, reading.buffer):
                self.buffer_size = reading.len_worker()
        return True


class _First(LimitDataset):
    """The first samples of a pass; Energon's limit reads one more, which may be damaged."""

    def __iter__(self) -> Iterator[Any]:
        return islice(self.dataset, self.length)


class DiffusionTaskEncoder(DefaultTaskEncoder):
    """Turns raw samples into `PackedBatch`es; its only state is the ledger."""

    cookers = (Cooker(cook_clip),)  # Energon requires one; `_cooked` calls the function
    decoder = None  # `load_clip` decodes; Energon's decoder would execute pickles.
    __default_failure_tolerance__ = 0  # Energon's limit is off, because the ledger has the error budget.

    def __init__(self, spec: BatchSpec, options: EncoderOptions, ledger: SkipCounter) -> None:
        super().__init__()
        stored = tuple(c for c in spec.conditions if c.name not in options.embedded)
        self.spec, self.options, self.ledger = replace(spec, conditions=stored), options, ledger
        self.readers: list[SampleReader] = []
        self._shuffles: list[_ShuffledPasses] = []

    def close(self) -> None:
        """Close the shards of all data sets that were built with this encoder; they are reopened if read."""
        for reader in self.readers:
            reader.close()

    @patches(
        "megatron-energon 7.4",
        "megatron/energon/flavors/webdataset/sample_loader.py: join_readers; task_encoder/base.py: "
        "build_cook_crude_sample",
        why="its reader takes more time than decoding a small sample",
    )
    def build_cook_crude_sample(self, dataset: SavableDataset, **kwargs: Any) -> SavableDataset[Clip]:
        """Read by `SampleReader`, in one `MapDataset` instead of Energon's three, which take as long as the work."""
        raw = dataset.dataset
        spread = self.options.max_samples is not None
        config, size = kwargs["worker_config"], self.options.shuffled_in_pass
        (reader,) = raw.join_readers
        streams = 1 if is_mixed(Path(str(reader.base_path))) else config.world_size
        raw.join_readers = [SampleReader(reader, spread=spread, streams=streams)]
        self.readers += raw.join_readers
        clips = MapDataset(
            raw,
            partial(self.load_clip, worker_config=config),
            stateless_map_fn=True,
            failure_tolerance=0,
            worker_config=config,
        )
        if not size:
            return clips
        self._shuffles.append(_ShuffledPasses(clips, size, worker_config=config))
        return self._shuffles[-1]

    def load_clip(self, raw: Any, *, worker_config: WorkerConfig) -> Clip:
        """Return `clip_of` a raw sample; raise `SkipSample` if it is dropped."""
        sample = raw.data[0]
        # Energon restores the number of a sample with the sample, so a resumed run makes the same draws.
        number = worker_config.active_worker_sample_index
        visit = Visit(worker_config.seed_offset, worker_config.rank, number, sample_id(sample["__key__"]))
        clip = self.clip_of(sample, visit)
        if clip is None:
            raise SkipSample
        return clip

    def clip_of(self, sample: dict[str, Any], visit: Visit) -> Optional[Clip]:
        """Decode, augment, cook, filter and encode one sample; None if it is dropped, with the reason in the ledger."""
        return self.encoded_clip(sample["__key__"], sample["__shard__"], partial(self._cooked, sample, visit))

    def encoded_clip(self, key: str, shard: str, make: Callable[[], Clip]) -> Optional[Clip]:
        """Create, filter and encode one sample; None if it is dropped, with the reason in the ledger."""
        clip: Optional[Clip] = None

        def drop(reason: str, detail: str, *, damaged: bool) -> None:
            kind, tokens = "", 0
            if clip is not None:
                kind = "clip" if clip.latent.shape[1] > self.spec.patch_temporal else "image"
                tokens = clip.num_tokens
            self.ledger.skip(Skip(reason, key, shard, detail, lost=damaged, kind=kind, tokens=tokens))

        try:
            clip = make()
            self.options.filters.check(clip)
            encoded = self.encode_sample(clip)
        except DroppedError as error:
            drop(error.reason, error.detail, damaged=isinstance(error, SampleError))
        except Exception as error:
            drop("error", f"{type(error).__name__}: {error}", damaged=True)
        else:
            self.ledger.used()
            return encoded
        return None

    def _cooked(self, sample: dict[str, Any], visit: Visit) -> Clip:
        if READ_ERROR in sample:
            raise SampleError("unreadable", sample[READ_ERROR])
        parts = {name: data for name, data in sample.items() if name[:2] != "__"}
        decoded = decode_sample(sample["__key__"], parts, require_checksums=self.options.require_checksums)
        decoded |= {name: data for name, data in sample.items() if name not in parts}
        change = None if self.options.augmentation is None else partial(self.options.augmentation, visit=visit)
        clip = cook_clip(decoded, vae=self.options.vae, change=change, references=self.options.references)
        captions = clip.metadata.get(CAPTIONS)
        if self.options.vary_captions and isinstance(captions, list) and captions:
            clip.wording = int(visit.generator("/caption").integers(len(captions)))
        return clip

    @stateless
    def encode_sample(self, clip: Clip) -> Clip:
        """Check a clip against the model, read its conditions, truncate its texts, and count its tokens.

        An image is repeated to fill one patch in time (`frames_to_patch`).

        Raises:
            SampleError: the clip does not fit the model.
            FilteredOutError: the settings exclude the clip.
        """
        spec = self.spec
        clip.latent, clip.grid = self._fitting(clip.latent, "latent")
        fitted = [self._fitting(reference, "reference") for reference in clip.references]
        clip.references, clip.reference_grids = [x for x, _ in fitted], tuple(grid for _, grid in fitted)
        for reference in clip.references:
            check_finite(reference, "values of the reference")
        self.options.filters.check_length(clip.num_tokens)
        check_finite(clip.latent, "latent values")
        for condition in spec.conditions:
            value = read_condition(condition, clip)
            if isinstance(value, Tensor):
                if condition.axis == "text" and not condition.of_picture:
                    value = value[: self.options.max_text_tokens]
                check_finite(value, condition.description, limited=condition.is_per_token)
            if value is not None:
                clip.conditions[condition.name] = value
        if self.options.embedded:
            clip.caption = read_caption(clip)
        clip.parts = {}
        return clip

    def _fitting(self, latent: Tensor, name: str) -> tuple[Tensor, Grid]:
        """Return a latent, repeated to fill one patch in time, and its (t, h, w) in patches."""
        spec = self.spec
        latent = latent.expand(-1, frames_to_patch(latent.shape[1], spec.patch_temporal), -1, -1)
        channels, frames, height, width = latent.shape
        if channels != spec.latent_channels:
            raise SampleError("wrong_shape", f"the {name} has {channels} channels, the model {spec.latent_channels}")
        side = spec.patch_spatial * spec.side_multiple
        if frames % spec.patch_temporal or height % side or width % side:
            multiple = spec.side_multiple
            levels = "" if multiple == 1 else f", whose numbers along H and W must be multiples of {multiple}"
            raise SampleError(
                "wrong_shape",
                f"a {name} of {frames} x {height} x {width} (T x H x W) cannot be cut into patches of "
                f"{spec.patch_temporal} x {spec.patch_spatial} x {spec.patch_spatial}{levels}",
            )
        return latent, (frames // spec.patch_temporal, height // spec.patch_spatial, width // spec.patch_spatial)

    def build_encode_sample(self, dataset: SavableDataset, *, worker_config: WorkerConfig) -> SavableDataset:
        """Return `dataset` unchanged, because `load_clip` encodes."""
        return dataset

    def build_batch(
        self,
        dataset: SavableDataset,
        *,
        batch_size: Optional[int],
        batch_drop_last: bool = False,
        packing_buffer_size: Optional[int] = None,
        worker_config: WorkerConfig,
    ) -> SavableDataset:
        if self.options.max_samples is not None:
            dataset = _First(dataset, self.options.max_samples, worker_config=worker_config)
        if self.options.max_tokens_per_pack is not None:
            packing: Callable[..., SavableDataset] = _Packing
            if self.options.packing_buffer_size is None and self._shuffles:
                packing = partial(_PackedPasses, shuffles=self._shuffles, fits=self.another_pass_fits)
            return packing(
                dataset,
                self.options.packing_buffer_size or BUFFERED,
                self.select_samples_to_pack,
                self.pack_selected_samples,
                final_packer_stateless=True,
                worker_config=worker_config,
            )
        common: dict[str, Any] = {"batcher_stateless": True, "drop_last": batch_drop_last}
        if self.options.bucket_by_shape:
            return GroupBatchDataset(
                dataset, batch_size, self.batch_group_criterion, self.batch, worker_config=worker_config, **common
            )
        assert batch_size is not None
        return BatchDataset(dataset, batch_size, self.batch, worker_config=worker_config, **common)

    def select_samples_to_pack(self, samples: list[Clip]) -> list[list[Clip]]:
        """Fill packs from a full buffer; no pack exceeds the limit, every sample is in exactly one."""
        capacity, limit = self.options.max_tokens_per_pack, self.options.cost_limit
        assert capacity is not None
        lengths = self._lengths(samples)
        bins = greedy_knapsack(lengths, capacity) if limit is None else balanced_packs(lengths, capacity, limit)
        packs = [[samples[i] for i in items] for items in bins]
        # Packs of long samples come first; sorting by the sum of the sample ids removes this trend from the stream. A
        # large buffer of few samples gives the same pack many times; copies have other ids, so they are not adjacent.
        seen: Counter[tuple[str, ...]] = Counter()
        order = []
        for i, pack in enumerate(packs):
            members = tuple(c.__key__ for c in pack)
            pack_id = sum(c.id for c in pack) & (2**63 - 1)
            order.append((sample_id(f"{pack_id}/{seen[members]}") if seen[members] else pack_id, members[0], i))
            seen[members] += 1
        return [packs[i] for _, _, i in sorted(order)]

    def another_pass_fits(self, passes: int, clips: list[Clip]) -> bool:
        """Return whether the `passes` complete passes in `clips` and one more fit into one pack and into the buffer."""
        assert self.options.max_tokens_per_pack is not None
        tokens, more = sum(self._lengths(clips)), passes + 1
        return tokens * more <= self.options.max_tokens_per_pack * passes and len(clips) * more <= BUFFERED * passes

    def _lengths(self, clips: list[Clip]) -> list[int]:
        return [padded_length(c.num_tokens, self.options.pack_multiple_of) for c in clips]

    @stateless
    def pack_selected_samples(self, samples: list[Clip]) -> PackedBatch:
        total = self.options.max_tokens_per_pack if self.options.pad_packs else None
        return collate(samples, self.spec, total_tokens=total)

    def batch_group_criterion(self, sample: Clip) -> tuple[str, None]:
        """Return the bucket of a sample: its latent shape."""
        return "x".join(map(str, sample.latent.shape)), None

    @stateless
    def batch(self, samples: list[Clip]) -> PackedBatch:
        return collate(samples, self.spec)


def worker_config(*, stream: int, num_streams: int, seed: int) -> WorkerConfig:
    """Return Energon's worker configuration of one global stream, without worker processes; errors are raised."""
    config = WorkerConfig(rank=stream, world_size=num_streams, num_workers=0, seed_offset=seed)
    return replace(config, global_error_handler=reraise_exception, restore_error_handler=reraise_exception)
