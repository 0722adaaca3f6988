"""The interface of data sources, implemented by `energon_data`."""

import hashlib
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NoReturn, Optional, Protocol

from torch import Tensor

from dit.batch import PackedBatch
from dit.conditions import Condition
from dit.errors import ConfigError, DataError


@dataclass(frozen=True, kw_only=True)
class BatchSpec:
    """The properties of micro-batches that the model and the layout require.

    Attributes:
        patch_temporal, patch_spatial: patch sizes, from the model.
        latent_channels: channels of a latent before patchifying, from the model.
        conditions: those of the model.
        micro_batch_size: samples per micro-batch when not packing.
        multiple_of: every sample is padded to a multiple of this many tokens (context and sequence parallel).
        attention_tokens: tokens of a sample whose attention costs about as much as the rest of the model.
    """

    patch_temporal: int
    patch_spatial: int
    latent_channels: int
    conditions: tuple[Condition, ...] = ()
    micro_batch_size: int
    multiple_of: int = 1
    attention_tokens: int = 1

    @property
    def patch(self) -> tuple[int, int]:
        """Sides of a patch in time and in space."""
        return self.patch_temporal, self.patch_spatial

    @property
    def patch_volume(self) -> int:
        """Latent positions in a patch."""
        return self.patch_temporal * self.patch_spatial**2

    def condition(self, name: str) -> Optional[Condition]:
        """Return the condition of this name, None if the model does not take it."""
        return next((condition for condition in self.conditions if condition.name == name), None)


@dataclass(frozen=True, kw_only=True)
class OnlineEncoding:
    """What is encoded on the training device, between stream and objective.

    Attributes:
        vae: autoencoder of the pixels, see `dit.encoders.vae.Geometry.read`; None if the samples hold latents.
        text_encoder: encoders of the captions, see `dit.encoders.text_config`; None if the samples hold embeddings.
        precision: of the encoders' weights and activations.
        max_text_tokens: longer texts are truncated; None for no limit.
    """

    vae: Optional[str] = None
    text_encoder: Optional[str] = None
    precision: Literal["fp32", "bf16"] = "fp32"
    max_text_tokens: Optional[int] = None


@dataclass
class SampleCounts:
    """Samples that were read so far, by kind: `image`, or `clip` for those longer than a patch in time.

    Attributes:
        used: number by kind.
        dropped: number by reason and kind; the kind is empty if the sample was not decoded.
        examples: the first dropped sample of each reason, in words.
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
    streams of a run are therefore the same on any number of ranks; `check_resumed_streams` refuses others.
    """

    def __next__(self) -> PackedBatch: ...

    def state_dict(self) -> dict[str, Any]:
        """Return positions under `streams`, by global stream number, in plain containers; every stream on some rank."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a union of `state_dict`s; called before the first `next`."""

    def sample_counts(self) -> SampleCounts:
        """Return how many samples were used and dropped so far; none of streams that another rank counts."""

    def samples_per_s(self) -> float:
        """Return how many samples this rank's loader makes in a second of work, since the last call."""

    def late(self) -> int:
        """Return how many micro-batches since the last call were not there when they were asked for."""

    def close(self) -> None: ...


@dataclass(kw_only=True)
class DataConfig(ABC):
    """A data source. `validate` and the builders raise `DataError` or `ConfigError` with the cure."""

    @abstractmethod
    def check_settings(self, spec: BatchSpec, dp_size: int, micro_batches_per_step: int) -> None:
        """Check the settings without reading data, as a dry run does; arguments as in `validate`."""

    def mixes_shapes(self, spec: BatchSpec) -> bool:
        """Return whether samples of different shapes may share a micro-batch; not every backbone supports it."""
        return True

    @abstractmethod
    def validate(self, spec: BatchSpec, dp_size: int, micro_batches_per_step: int) -> None:
        """Check settings, folder, sizes and stream count before anything is built.

        Args:
            micro_batches_per_step: micro-batches of one optimizer step over all data-parallel ranks.
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
        """Build this rank's endless stream; dropped samples are logged to `log_dir` if it is given.

        Args:
            micro_batches_per_step: as in `validate`.
        """

    @abstractmethod
    def build_validation(self, spec: BatchSpec, *, dp_rank: int, dp_size: int) -> Iterator[PackedBatch]:
        """Build a finite pass over the held-out part, with the same samples at every call and on any layout.

        The samples are split over the ranks. Every rank gets the same number of micro-batches; those that only make the
        number equal are marked as `PackedBatch.repeated`.
        """

    @abstractmethod
    def class_names(self) -> Optional[list[str]]:
        """Return the name of each class, or None for an unlabelled source."""

    def remarks(self, spec: BatchSpec) -> list[str]:
        """Return which samples the settings will drop and which settings have no effect, one line each; reads a few."""
        return []

    def stored_conditions(self) -> Optional[Collection[str]]:
        """Return the names under which samples store values; None if they have all conditions of the model."""
        return None

    def text_encoder(self) -> Optional[str]:
        """Return the encoders of the texts, see `dit.encoders.text_config`, or None if they are not known."""
        return None

    def empty_text(self, condition: Condition) -> Optional[Tensor]:
        """Return the embedding of the empty text, `[k, D]`; None if the encoders of `text_encoder` make it."""
        return None

    def online_encoding(self) -> Optional[OnlineEncoding]:
        """Return what the training device encodes; None if the samples hold latents and embeddings."""
        return None

    def identity(self) -> Mapping[str, Mapping[str, str]]:
        """Return a text for each data set that changes with its samples, by field of this class and name of the set.

        Every checkpoint stores these texts. A resume treats another text as a change of the field. Return an empty
        dictionary if the settings determine the samples.
        """
        return {}

    def epoch_samples(self) -> Optional[int]:
        """Return the number of training samples; None where there is no such number."""
        return None

    def attributions(self) -> list[str]:
        """Return the lines that name the authors of the data, to be shown with samples; none if nobody asks for one."""
        return []

    def autoencoder(self) -> Optional[str]:
        """Return the autoencoder of `dit.encoders.vae` whose latents are trained on, or None if it is not known."""
        return None


@dataclass(kw_only=True)
class NoData(DataConfig):
    """The data of imported weights: none."""

    def check_settings(self, spec: BatchSpec, dp_size: int, micro_batches_per_step: int) -> NoReturn:
        """Refuse to train.

        Raises:
            ConfigError: always.
        """
        raise ConfigError("imported weights have no data; select a recipe, and start from them in another run")

    validate = check_settings

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
        """Never called: `check_settings` refuses to train."""
        raise AssertionError("no data to train on")

    def build_validation(self, spec: BatchSpec, *, dp_rank: int, dp_size: int) -> Iterator[PackedBatch]:
        """Return an empty pass."""
        return iter(())

    def class_names(self) -> None:
        """Return None: the classes have no names."""


def sample_id(key: str) -> int:
    """Return the 63-bit id of a sample: a hash of its key, the same on every machine."""
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "little") >> 1


def merge_states(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the union of the `state_dict`s of all data-parallel ranks, to be loaded on any number of ranks.

    Raises:
        DataError: the states do not belong together.
    """
    heads = [{k: v for k, v in state.items() if k != "streams"} for state in states]
    if any(head != heads[0] for head in heads):
        raise DataError(f"the data states of the ranks do not belong together: {heads}")
    return heads[0] | {"streams": {s: v for state in states for s, v in state.get("streams", {}).items()}}


def check_resumed_streams(saved: Mapping[str, Any], resumed: Iterable[Collection[int]]) -> None:
    """Check that the ranks of a resumed run continue the streams that were saved.

    Args:
        saved: the union of the `state_dict`s that were loaded.
        resumed: streams in the `state_dict` of each rank after loading.

    Raises:
        DataError: some are missing, or there are others, as when a data source has one stream for each rank.
    """
    before, after = sorted(saved.get("streams", {})), sorted(set().union(*resumed))
    if before != after:
        raise DataError(
            f"the data source saved the streams {before} and continues with {after}, so samples would be repeated or "
            "lost; a data source must have the same streams on any number of ranks (see dit.data_api.DataStream), or "
            "resume on as many ranks as before"
        )
