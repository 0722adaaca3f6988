"""The interface of data sources, implemented by `energon_data`."""

import hashlib
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NoReturn, Optional, Protocol

from torch import Tensor

from dit.batch import PackedBatch
from dit.conditions import Condition
from dit.errors import ConfigError, DataError
from dit.fixed_packs import PackMaxima

WITHOUT_HELD_OUT = "or train with training.validation_interval=0"


@dataclass(frozen=True, kw_only=True)
class BatchSpec:
    """The properties of micro-batches that the model and the layout require.

    Attributes:
        patch_temporal, patch_spatial: patch sizes, from the model.
        latent_channels: channels of a latent before patchifying, from the model.
        conditions: conditions of the model, and in training those that the objective reads.
        micro_batch_size: samples per micro-batch without packing.
        multiple_of: every sample is padded to a multiple of this number of tokens (context and sequence parallelism).
        attention_tokens: sample length at which attention costs about as much as the rest of the model.
        largest_grid: largest numbers of patches along t, h and w; None for no limit.
        orders_frames: whether the model distinguishes the order of a clip's frames.
        side_multiple: patches that the sides of a sample must be multiples of.
    """

    patch_temporal: int
    patch_spatial: int
    latent_channels: int
    conditions: tuple[Condition, ...] = ()
    micro_batch_size: int
    multiple_of: int = 1
    attention_tokens: int = 1
    largest_grid: Optional[tuple[int, int, int]] = None
    orders_frames: bool = True
    side_multiple: int = 1

    def with_conditions(self, others: Sequence[Condition]) -> "BatchSpec":
        """Return the properties with conditions that the objective reads, in addition to those of the model."""
        return replace(self, conditions=(*self.conditions, *others))

    def check(self, batch: PackedBatch) -> PackedBatch:
        """Return a batch that has the conditions and sizes of the model; others are a `BatchError`."""
        return batch.validate(self.conditions, patch_volume=self.patch_volume, largest_grid=self.largest_grid)

    @property
    def patch(self) -> tuple[int, int]:
        """(temporal, spatial) patch size."""
        return self.patch_temporal, self.patch_spatial

    @property
    def patch_volume(self) -> int:
        """Latent positions in a patch."""
        return self.patch_temporal * self.patch_spatial**2

    def condition(self, name: str) -> Optional[Condition]:
        """Return the condition of this name, or None if the model does not have it."""
        return next((condition for condition in self.conditions if condition.name == name), None)


@dataclass(frozen=True, kw_only=True)
class OnlineEncoding:
    """Encoders that run on the training device, after the data stream and before the objective.

    Attributes:
        vae: autoencoder for pixels, see `dit.encoders.vae.Geometry.read`; None if the samples are latents.
        text_encoder: encoders for captions, see `dit.encoders.text_config`; None if the samples have embeddings.
        max_text_tokens: longer texts are truncated; None for no limit.
    """

    vae: Optional[str] = None
    text_encoder: Optional[str] = None
    precision: Literal["fp32", "bf16"] = "fp32"
    max_text_tokens: Optional[int] = None


@dataclass
class SampleCounts:
    """Number of samples read so far by kind: `image`, or `clip` for samples longer than one patch in time.

    Attributes:
        dropped: number by reason and kind; the kind is empty if the sample was not decoded.
        examples: description of the first dropped sample of each reason.
    """

    used: Counter[str] = field(default_factory=Counter)
    dropped: Counter[tuple[str, str]] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)

    def __add__(self, other: "SampleCounts") -> "SampleCounts":
        return SampleCounts(self.used + other.used, self.dropped + other.dropped, other.examples | self.examples)

    def by_reason(self) -> dict[str, int]:
        """Return the number of dropped samples by reason."""
        return self._dropped_by(0)

    def dropped_by_kind(self) -> dict[str, int]:
        """Return the number of dropped samples by kind."""
        return self._dropped_by(1)

    def _dropped_by(self, part: int) -> dict[str, int]:
        names = sorted({key[part] for key in self.dropped})
        return {name: sum(n for key, n in self.dropped.items() if key[part] == name) for name in names}


class DataStream(Protocol):
    """An endless, resumable sequence of micro-batches for one data-parallel rank.

    A state is keyed by global stream, and never by rank, because a run may resume on another number of ranks. The
    streams of a run are therefore the same on any number of ranks; `check_resumed_streams` refuses others. A state
    without `streams` resumes on the same number of data-parallel replicas only, each from its own (`merge_states`).
    """

    def __next__(self) -> PackedBatch: ...

    def state_dict(self) -> dict[str, Any]:
        """Return the positions under `streams`, by global stream number, in plain containers.

        The states of all ranks together must contain every stream. Other entries must be equal on all ranks.
        """

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state of `merge_states`; called before the first `next`."""

    def sample_counts(self) -> SampleCounts:
        """Return the counts of used and dropped samples so far, without streams that another rank counts."""

    def samples_per_s(self) -> float:
        """Return the samples that this rank's loader produced per second of work since the last call."""

    def late(self) -> int:
        """Return the number of micro-batches since the last call that the training loop had to wait for."""

    def close(self) -> None: ...


@dataclass(kw_only=True)
class DataConfig(ABC):
    """A data source. `validate` and the builders raise `DataError` or `ConfigError`; the message includes the cure."""

    @abstractmethod
    def check_settings(self, spec: BatchSpec, dp_size: int, micro_batches_per_step: int) -> None:
        """Check the settings without reading data, for dry runs; arguments as in `validate`."""

    @property
    def longest_text(self) -> Optional[int]:
        """Tokens to which texts are truncated, also prompts of samples; None for no limit."""
        return None

    def mixes_shapes(self, spec: BatchSpec) -> bool:
        """Return whether samples of different shapes may share a micro-batch, which some backbones do not support.

        It depends on the settings only, not on files.
        """
        return True

    def pack_maxima(self) -> Optional[PackMaxima]:
        """Return the sizes to which `training.cuda_graph` pads all packs; None if packs have no maximal size."""
        return None

    def levels_setting(self) -> Optional[str]:
        """Return the setting that gives samples several noise levels (`dit.levels`), with its value; None if none does.

        Some backbones and objectives do not support them.
        """
        return None

    def references_setting(self) -> Optional[str]:
        """Return the setting that adds clean references to samples, with its value; None if none does."""
        return None

    @abstractmethod
    def validate(self, spec: BatchSpec, dp_size: int, micro_batches_per_step: int) -> None:
        """Check the settings, folder, sizes and number of streams before anything is built.

        Args:
            micro_batches_per_step: micro-batches of one optimizer step over all data-parallel ranks.
        """

    def validate_held_out(self, otherwise: str = WITHOUT_HELD_OUT) -> None:  # noqa: B027, for data that always have some
        """Check that there are held-out data; called before they are read. Raises ConfigError or DataError.

        Args:
            otherwise: the part of the message that follows how to get held-out data.
        """

    @abstractmethod
    def build_train(
        self,
        spec: BatchSpec,
        *,
        dp_rank: int,
        dp_size: int,
        seed: int,
        log_dir: Optional[str],
        micro_batches_per_step: int = 1,
    ) -> DataStream:
        """Build this rank's endless stream; log dropped samples to `log_dir` unless it is None."""

    @abstractmethod
    def build_validation(self, spec: BatchSpec, *, dp_rank: int, dp_size: int) -> Iterator[PackedBatch]:
        """Build a finite pass over the validation samples, the same at every call and under every parallel layout.

        The samples are split over the ranks. Every rank gets the same number of micro-batches; micro-batches that only
        make the numbers equal have `PackedBatch.repeated` set.
        """

    def class_names(self) -> Optional[list[str]]:
        """Return the name of each class, or None if it is unknown."""
        return None

    def remarks(self, spec: BatchSpec) -> list[str]:
        """Return warnings about samples that will be dropped and settings without effect; reads a few samples."""
        return []

    def stored_conditions(self) -> Optional[Collection[str]]:
        """Return the names of the conditions in the samples; None if they have all conditions of the model."""
        return None

    def text_encoder(self) -> Optional[str]:
        """Return the text encoders, see `dit.encoders.text_config`, or None if unknown."""
        return None

    def empty_text(self, condition: Condition) -> Optional[Tensor]:
        """Return the embedding of the empty text, `[k, D]`; None if the encoders of `text_encoder` compute it."""
        return None

    def online_encoding(self) -> Optional[OnlineEncoding]:
        """Return the encoders that run on the training device; None if the samples have latents and embeddings."""
        return None

    def identity(self) -> Optional[Mapping[str, Mapping[str, str]]]:
        """Return a fingerprint of each data set's samples, by field of this class and name of the data set.

        The field is "" if no field names the data set. Every checkpoint stores the fingerprints. On resume, a different
        fingerprint counts as a change of the field. Called once when a run starts, so it should read few samples.

        Returns:
            An empty dictionary if the settings determine the samples. None if the samples cannot be identified: a log
            line then reports that a resumed run will not notice other samples.
        """
        return None

    def attributions(self) -> list[str]:
        """Return the attribution lines to show with samples; empty if no licence requires one."""
        return []

    def reference_aspect(self) -> Optional[str]:
        """Return `--aspect` of the preparation if samples have references, or None if unknown."""
        return None

    def autoencoder(self) -> Optional[str]:
        """Return the autoencoder of the latents, see `dit.encoders.vae`, or None if unknown."""
        return None


@dataclass(kw_only=True)
class NoData(DataConfig):
    """Placeholder for imported weights, which have no data."""

    def check_settings(self, spec: BatchSpec, dp_size: int, micro_batches_per_step: int) -> NoReturn:
        """Raise an error, because imported weights have no data to train on."""
        raise ConfigError("imported weights have no data; select a recipe and start a new run from the weights")

    validate = check_settings

    def build_train(self, *_: Any, **__: Any) -> NoReturn:
        """Never called, because `check_settings` always raises."""
        raise AssertionError("no data to train on")

    def build_validation(self, spec: BatchSpec, *, dp_rank: int, dp_size: int) -> Iterator[PackedBatch]:
        """Return an empty pass."""
        return iter(())


def sample_id(key: str) -> int:
    """Return the 63-bit id of a sample: a hash of its key, the same on every machine."""
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "little") >> 1


def merge_states(states: Sequence[Mapping[str, Any]], *, dp_rank: int = 0, dp_size: int = 1) -> dict[str, Any]:
    """Return the state from which a data-parallel replica continues: the union of all replicas' `state_dict`s.

    States without `streams` belong to their replicas, so a replica continues from its own.

    Args:
        states: `state_dict` of each replica of the run that saved them.
        dp_rank, dp_size: index of the replica that continues, and number of replicas.
    """
    streams = {s: v for state in states for s, v in state.get("streams", {}).items()}
    if not streams:
        if len(states) != dp_size:
            raise ConfigError(
                f"the data source saved states without `streams` on {len(states)} data-parallel replica(s), and this "
                f"run has {dp_size}, which would repeat or lose samples; resume on {len(states)} again, or start a new "
                "run with a source whose state is keyed by global stream (see dit.data_api.DataStream)"
            )
        return dict(states[dp_rank])
    heads = [{k: v for k, v in state.items() if k != "streams"} for state in states]
    if any(head != heads[0] for head in heads):
        raise DataError(f"the data states of the ranks differ in entries other than streams: {heads}")
    return heads[0] | {"streams": streams}


def check_resumed_streams(saved: Mapping[str, Any], resumed: Iterable[Collection[int]]) -> None:
    """Check that the ranks of a resumed run, after loading, continue exactly the streams of the saved state."""
    before, after = sorted(saved.get("streams", {})), sorted(set().union(*resumed))
    if before != after:
        raise DataError(
            f"the data source saved the streams {before} and resumes with {after}, so samples would be repeated or "
            "lost; a data source must have the same streams on any number of ranks (see dit.data_api.DataStream), or "
            "resume on the previous number of ranks"
        )
