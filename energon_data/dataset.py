"""Energon data sets as a `DataConfig`, checked before anything is built."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Optional

from dit.batch import PackedBatch
from dit.condition_table import CONTEXT, LABEL
from dit.data_api import BatchSpec, DataConfig, OnlineEncoding
from dit.encoders.text_config import as_conditions, check_text_encoder
from dit.encoders.vae import Geometry
from dit.errors import ConfigError, DataError
from dit.ranges import COUNT, COUNT_OR_NONE, FINITE, POSITIVE, RANKS, check_choice, check_ranges
from energon_data.folder import check_dataset, stored_names
from energon_data.packing import padded_length
from energon_data.skip_log import SkipLog
from energon_data.streams import Delivery, StreamGroup, check_streams

if TYPE_CHECKING:
    from energon_data.task_encoder import EncoderOptions

SKIP_FILE = "data_skipped.jsonl"


@dataclass(kw_only=True)
class EnergonData(DataConfig):
    """Samples from WebDataset shards, read by Megatron-Energon.

    Attributes:
        path: a data set folder with `.nv-meta`, or a metadataset `.yaml` that blends several.
        num_streams: global streams of the run; None for one per data-parallel rank. With a fixed number, the order of
            the data does not depend on the number of ranks.
        background: read every stream in a worker process of its own.
        shuffle_buffer: samples shuffled in memory before batching; 0 for none.
        max_samples_per_sequence: split shards into runs of about this many samples and shuffle the runs; None for
            complete shards.
        max_tokens_per_pack: pack samples of any length up to this many tokens (micro_batch_size must then be 1); None
            for dense batches.
        packing_buffer_size: samples from which packs are filled.
        pad_packs: pad every pack to `max_tokens_per_pack`, so all have one shape.
        bucket_by_shape: batch only samples of one latent shape together, as convolutional backbones need.
        max_text_tokens: longer texts are truncated; None for no limit.
        max_tokens_per_sample: longer samples are dropped and counted; None for the length of a pack.
        max_abs_latent: a latent with a larger absolute value counts as damaged.
        min_aesthetic_score: samples with a lower score, or none, are dropped and counted; None for no limit.
        max_lost_samples: damaged samples the streams of one data-parallel rank may lose before the run ends.
        require_checksums: samples whose metadata does not name the CRC32 of every part count as damaged. Existing
            checksums are always verified.
        online_vae: an autoencoder (`--vae` of `energon_data.prepare`) that encodes the stored pixels on the training
            device in every step; None for stored latents, or pixels that are the latents.
        online_text_encoder: encoders, such as `text=google/t5-v1_1-xl,pooled=openai/clip-vit-large-patch14`, that embed
            the stored captions on the training device in every step; None for stored embeddings.
        online_precision: of these encoders' weights and activations; what they make is float32 either way.
        train_split, validation_split: names of the splits.
        validation_micro_batches: held-out micro-batches of one pass over all ranks; None for the full split.
    """

    path: str = ""
    num_streams: Optional[int] = None
    background: bool = False
    shuffle_buffer: int = 1000
    max_samples_per_sequence: Optional[int] = None
    max_tokens_per_pack: Optional[int] = None
    packing_buffer_size: int = 256
    pad_packs: bool = False
    bucket_by_shape: bool = False
    max_text_tokens: Optional[int] = 512
    max_tokens_per_sample: Optional[int] = None
    max_abs_latent: float = 1e3
    min_aesthetic_score: Optional[float] = None
    max_lost_samples: int = 0
    require_checksums: bool = True
    online_vae: Optional[str] = None
    online_text_encoder: Optional[str] = None
    online_precision: Literal["fp32", "bf16"] = "fp32"
    train_split: str = "train"
    validation_split: str = "val"
    validation_micro_batches: Optional[int] = 64

    def mixes_shapes(self, spec: BatchSpec) -> bool:
        """Return whether samples of different shapes may share a micro-batch; depends on the settings only."""
        return self.max_tokens_per_pack is not None or (spec.micro_batch_size > 1 and not self.bucket_by_shape)

    def validate(self, spec: BatchSpec, dp_size: int, micro_batches_per_step: int) -> None:
        """Check settings, streams, folder and every shard's size against its index.

        Raises:
            ConfigError: settings do not fit each other, the model, or the layout.
            DataError: the data set is missing, incomplete, or could execute code.
        """
        self.check_settings(spec, dp_size, micro_batches_per_step)
        num_streams = self.num_streams or dp_size
        infos = check_dataset(self.path, self.train_split)
        stored_channels = spec.latent_channels if self.online_vae is None else self._check_vae(spec)
        text, label = spec.condition(CONTEXT.name), spec.condition(LABEL.name)
        if self.online_text_encoder is not None:
            self._check_text_encoder(spec)
            text = None  # stored texts are not read
        for info in infos:
            if info.samples < num_streams:
                raise ConfigError(
                    f"{info.path} has {info.samples} samples in split {info.split!r}, fewer than data.num_streams="
                    f"{num_streams}; use fewer streams or ranks, or more data"
                )
            shape = info.description.get("latent_shape")
            if shape and shape[0] != stored_channels:
                cure = f"model.in_channels is {stored_channels}; set model.in_channels={shape[0]}"
                if self.online_vae is not None:
                    cure = "data.online_vae encodes pixels, which have 3; set data.online_vae=none"
                raise ConfigError(f"{info.path} holds latents of {shape[0]} channels, {cure}")
            width = info.description.get("context_size")
            if width and text is not None and text.shape not in (None, (width,)):
                raise ConfigError(
                    f"{info.path} holds text embeddings of width {width}, model.context_size is {text.shape[0]}; "
                    f"set it to {width}"
                )
        if text is not None:
            self.text_encoder()
        known = None if label is None else label.num_classes
        names = None if known is None else self.class_names()
        if names is not None and known is not None and len(names) > known:
            raise ConfigError(
                f"{self.path} has {len(names)} classes, model.num_classes is {known}; raise it to {len(names)}"
            )

    def _check_vae(self, spec: BatchSpec) -> int:
        """Check the latents of the online autoencoder against the model; return the channels of what is stored.

        Raises:
            ConfigError: they have another number of channels, or there is no such autoencoder.
        """
        found = Geometry.read(str(self.online_vae)).channels
        if found != spec.latent_channels:
            raise ConfigError(
                f"data.online_vae={self.online_vae} makes latents of {found} channels, model.in_channels is "
                f"{spec.latent_channels}; set model.in_channels={found}"
            )
        return 3

    def _check_text_encoder(self, spec: BatchSpec) -> None:
        """Check what the online text encoders make against the model.

        Raises:
            ConfigError: the model takes nothing of it or of another width, or there are no such encoders.
        """
        made = self._embedded(spec)
        if not made:
            raise ConfigError(
                f"data.online_text_encoder={self.online_text_encoder} makes nothing that the model takes; set "
                "data.online_text_encoder=none"
            )
        for condition in spec.conditions:
            width = made.get(condition.name)
            if width is not None and condition.shape not in (None, (width,)):
                raise ConfigError(
                    f"data.online_text_encoder={self.online_text_encoder} makes a {condition.what} of {width} "
                    f"features, the model takes {list(condition.shape)}; set {condition.setting or 'its size'} to "
                    f"{width}"
                )

    def _embedded(self, spec: BatchSpec) -> dict[str, int]:
        """Return the width of each of the model's conditions that is made online."""
        if self.online_text_encoder is None:
            return {}
        return as_conditions(check_text_encoder(self.online_text_encoder).widths, spec.conditions)

    def online_encoding(self) -> Optional[OnlineEncoding]:
        """Return what the training device encodes; None if the samples hold latents and embeddings."""
        if self.online_vae is None and self.online_text_encoder is None:
            return None
        return OnlineEncoding(
            vae=self.online_vae,
            text_encoder=self.online_text_encoder,
            precision=self.online_precision,
            max_text_tokens=self.max_text_tokens,
        )

    def check_settings(self, spec: BatchSpec, dp_size: int, micro_batches_per_step: int) -> None:
        """Check the settings without reading data.

        Raises:
            ConfigError: settings are outside their ranges, or do not fit each other or the layout.
        """
        counts = ("max_samples_per_sequence", "max_tokens_per_pack", "packing_buffer_size", "max_text_tokens")
        check_ranges(
            "data",
            self,
            {
                **dict.fromkeys(("shuffle_buffer", "max_lost_samples"), COUNT_OR_NONE),
                **dict.fromkeys((*counts, "max_tokens_per_sample", "validation_micro_batches"), COUNT),
                "num_streams": RANKS,
                "max_abs_latent": POSITIVE,
                "min_aesthetic_score": FINITE,
            },
        )
        check_choice("data.online_precision", self.online_precision, Literal["fp32", "bf16"])
        check_streams(self.num_streams, dp_size, micro_batches_per_step)
        if self.max_tokens_per_pack is None:
            if self.pad_packs:
                raise ConfigError("data.pad_packs needs data.max_tokens_per_pack")
            return
        if spec.micro_batch_size != 1:
            raise ConfigError(
                f"with data.max_tokens_per_pack a micro-batch is one pack, but micro_batch_size is "
                f"{spec.micro_batch_size}; set micro_batch_size=1 and a longer pack"
            )
        if self.bucket_by_shape:
            raise ConfigError("data.bucket_by_shape and data.max_tokens_per_pack exclude each other; choose one")
        if self.max_tokens_per_pack % spec.multiple_of:
            raise ConfigError(
                f"data.max_tokens_per_pack={self.max_tokens_per_pack} must be a multiple of {spec.multiple_of} "
                f"(context and sequence parallel); use {padded_length(self.max_tokens_per_pack, spec.multiple_of)}"
            )

    def _options(self, spec: BatchSpec) -> "EncoderOptions":
        from energon_data.filters import Filters
        from energon_data.task_encoder import EncoderOptions

        limits = [n for n in (self.max_tokens_per_sample, self.max_tokens_per_pack) if n is not None]
        return EncoderOptions(
            filters=Filters(
                max_abs=self.max_abs_latent,
                min_aesthetic_score=self.min_aesthetic_score,
                max_tokens=min(limits) if limits else None,
            ),
            require_checksums=self.require_checksums,
            max_text_tokens=self.max_text_tokens,
            max_tokens_per_pack=self.max_tokens_per_pack,
            pad_packs=self.pad_packs,
            bucket_by_shape=self.bucket_by_shape,
            vae=None if self.online_vae is None else Geometry.read(self.online_vae),
            embedded=frozenset(self._embedded(spec)),
        )

    def build_train(
        self, spec: BatchSpec, *, dp_rank: int, dp_size: int, seed: int, log_dir: Optional[str]
    ) -> StreamGroup:
        """Build this rank's streams; skipped samples are appended to `log_dir/data_skipped.jsonl`.

        Raises:
            ConfigError: the stream count does not fit the data-parallel size.
            DataError: the data set is missing, incomplete, or could execute code.
        """
        from energon_data.energon_source import EnergonSource

        check_dataset(self.path, self.train_split)
        num_streams = check_streams(self.num_streams, dp_size, self.num_streams or dp_size)
        sources = {
            stream: EnergonSource(
                self.path,
                spec,
                self._options(spec),
                split=self.train_split,
                stream=stream,
                num_streams=num_streams,
                background=self.background,
                seed=seed,
                budget=self.max_lost_samples,
                shuffle_buffer=self.shuffle_buffer,
                max_samples_per_sequence=self.max_samples_per_sequence,
                packing_buffer_size=self.packing_buffer_size,
            )
            for stream in range(dp_rank, num_streams, dp_size)
        }
        log = SkipLog(self.max_lost_samples, Path(log_dir) / SKIP_FILE if log_dir is not None else None)
        return StreamGroup(sources, num_streams=num_streams, dp_size=dp_size, log=log, origin=self.path)

    def build_validation(self, spec: BatchSpec, *, dp_rank: int, dp_size: int) -> Iterator[PackedBatch]:
        """Build a pass over the held-out split.

        The micro-batches have one global order for every number of ranks; rank `r` gets `r`, `r + dp_size`, ... Every
        rank reads all samples, and discards those of other ranks. If the number of micro-batches is no multiple of
        the ranks, the first ones are repeated.

        Raises:
            DataError: the split is missing or damaged, or a sample is lost beyond the budget.
        """
        from energon_data.energon_source import validation_pass

        check_dataset(self.path, self.validation_split)

        def read() -> Iterator[Delivery]:
            return validation_pass(
                self.path,
                spec,
                self._options(spec),
                split=self.validation_split,
                budget=self.max_lost_samples,
                packing_buffer_size=self.packing_buffer_size,
            )

        return share_validation(
            read, self.validation_micro_batches, dp_rank, dp_size, SkipLog(self.max_lost_samples), self.path
        )

    def stored_conditions(self) -> Optional[set[str]]:
        """Return the names of parts and metadata in the first samples, and of what is made of them online.

        Returns:
            None if no sample can be read.

        Raises:
            ConfigError: captions are to be embedded, and none of the first samples has one.
        """
        stored = stored_names(check_dataset(self.path, self.train_split))
        if stored is None or self.online_text_encoder is None:
            return stored
        if "caption" not in stored:
            raise ConfigError(
                f"data.online_text_encoder embeds captions, and none of the first samples of {self.path} has one; "
                "prepare the data with captions, or set data.online_text_encoder=none"
            )
        return stored | set(check_text_encoder(self.online_text_encoder).widths)

    def class_names(self) -> Optional[list[str]]:
        """Return the class names that `dataset.json` lists, or None.

        Raises:
            DataError: the members of a blend name different classes.
        """
        return self._agreed("class_names", "a label must mean one thing")

    def text_encoder(self) -> Optional[str]:
        """Return the encoders of the texts: the online ones, else those that `dataset.json` names, or None.

        Raises:
            DataError: the members of a blend were embedded by different encoders.
        """
        if self.online_text_encoder is not None:
            return check_text_encoder(self.online_text_encoder).recorded
        return self._agreed("text_encoder", "the model reads the numbers of one encoder")

    def _agreed(self, name: str, why: str) -> Any:
        """Return an entry of `dataset.json` on which all members that have it must agree."""
        infos = check_dataset(self.path, self.train_split)
        stated = {str(i.path): i.description[name] for i in infos if i.description.get(name)}
        values = list(stated.values())
        if any(value != values[0] for value in values):
            raise DataError(f"the members of {self.path} differ in {name}: {stated}; {why}")
        return values[0] if values else None


def share_validation(
    read: Callable[[], Iterator[Delivery]], limit: Optional[int], dp_rank: int, dp_size: int, log: SkipLog, origin: str
) -> Iterator[PackedBatch]:
    """Split a finite pass over the data-parallel ranks, with equally many micro-batches each.

    Args:
        read: starts the pass.
        limit: micro-batches of the pass over all ranks; None for all.

    Raises:
        DataError: the pass is empty or broken.
    """

    def batches(count: Optional[int]) -> Iterator[PackedBatch]:
        for delivery in islice(read(), count):
            log.record(0, delivery.skips)
            if delivery.is_bug:
                raise RuntimeError(f"reading {origin} failed:\n{delivery.failure}")
            if delivery.batch is None:
                raise DataError(
                    f"validation on {origin} ended: {delivery.failure}; skipped: {log.counts() or 'nothing'}"
                )
            yield delivery.batch

    total = 0
    for number, batch in enumerate(batches(limit)):
        total = number + 1
        if number % dp_size == dp_rank:
            yield batch
    if total == 0:
        raise DataError(f"validation on {origin} gives no micro-batch; skipped: {log.counts() or 'nothing'}")
    if total % dp_size and dp_rank >= total % dp_size:
        again = (total // dp_size * dp_size + dp_rank) % total
        log = SkipLog(log.budget)
        yield next(islice(batches(again + 1), again, None))
