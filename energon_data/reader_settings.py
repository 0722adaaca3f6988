"""Settings of data sources that read stored samples."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Optional

from dit.data_api import BatchSpec
from dit.errors import ConfigError
from dit.ranges import COUNT, COUNT_OR_ZERO, ranged
from energon_data.streams import Source, StreamSettings


@dataclass(kw_only=True)
class ReaderSettings(StreamSettings):
    """Streams of a data source that reads stored samples, which may be damaged.

    Attributes:
        background: read every stream in a worker process (only on Linux).
        max_lost_samples: damaged samples that a data-parallel rank may drop.
        references: read latents or pictures that samples edit.
        packing_buffer_size: samples from which packs are filled; None for up to 256, of one pass without
            `shuffle_buffer`.
        max_text_tokens: truncate longer texts, also prompts of samples; None for no limit.
    """

    worker_modules: ClassVar[tuple[str, ...]] = ()
    """Modules that the workers' fork server imports, see `BackgroundSource`."""

    background: bool = True
    max_lost_samples: int = ranged(0, COUNT_OR_ZERO)
    references: bool = False
    packing_buffer_size: Optional[int] = ranged(None, COUNT)
    max_text_tokens: Optional[int] = ranged(None, COUNT)

    @property
    def longest_text(self) -> Optional[int]:
        return self.max_text_tokens

    def references_setting(self) -> Optional[str]:
        return "data.references=True" if self.references else None

    def check_references(self, spec: BatchSpec) -> None:
        """Check that references do not meet conditions along the latent, which have the size of the sample."""
        beside = [condition.name for condition in spec.conditions if condition.is_per_token]
        if self.references and beside:
            raise ConfigError(
                f"data.references=True adds tokens to a sample, and the model takes {', '.join(beside)} for every "
                "token of it; use a model without it, or data.references=False"
            )

    @property
    def damaged_samples_allowed(self) -> int:
        return self.max_lost_samples

    def open_stream(self, open_source: Callable[[], Source], stream: int) -> Source:
        """Open a stream for training, in a worker process if `background` is set."""
        from energon_data.workers.background import BackgroundSource

        if self.background and sys.platform == "linux":
            return BackgroundSource(open_source, f"stream {stream} of {self.origin}", self.worker_modules)
        return open_source()
