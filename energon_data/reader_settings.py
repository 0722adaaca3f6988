"""Settings of data sources that read stored samples, and the streams that they open."""

import logging
import math
import sys
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import ClassVar, Optional

from dit.data_api import BatchSpec
from dit.errors import ConfigError
from energon_data.skip_log import SKIP_FILE, SkipLog
from energon_data.streams import Source, StreamGroup, StreamSettings, open_streams

logger = logging.getLogger(__name__)


@dataclass(kw_only=True)
class ReaderSettings(StreamSettings):
    """Streams of a data source that reads stored samples, which may be damaged.

    Attributes:
        background: read every stream in a worker process (only on Linux).
        max_lost_samples: damaged samples that a data-parallel rank may drop before the run ends.
        references: read latents or pictures from which samples are edited (parts `reference`, `reference-1`, ...).
    """

    worker_modules: ClassVar[tuple[str, ...]] = ()
    """Modules that the workers' fork server imports, see `BackgroundSource`."""

    background: bool = True
    max_lost_samples: int = 0
    references: bool = False

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
    @abstractmethod
    def origin(self) -> str:
        """Name of the data, for messages."""

    @abstractmethod
    def source_opener(self, spec: BatchSpec, seed: int, micro_batches_per_step: int) -> Callable[..., Source]:
        """Return a function that opens the source of the stream `stream` of `num_streams`; picklable."""

    def build_train(
        self,
        spec: BatchSpec,
        *,
        dp_rank: int,
        dp_size: int,
        seed: int,
        log_dir: Optional[str],
        micro_batches_per_step: int = 1,
    ) -> StreamGroup:
        """Build this rank's endless streams; dropped samples are appended to `log_dir/data_skipped.jsonl`."""
        from energon_data.workers.background import BackgroundSource

        open_source = self.source_opener(spec, seed, micro_batches_per_step)

        def open_stream(stream: int, num_streams: int) -> Source:
            shared_by = dp_size // math.gcd(num_streams, dp_size)
            if dp_rank == stream == 0 and shared_by > 1:
                logger.info(
                    "%d replicas share %d data streams and read the data %d times; in a new run, set "
                    "data.num_streams=%d",
                    dp_size,
                    num_streams,
                    shared_by,
                    math.lcm(num_streams, dp_size),
                )
            opens = partial(open_source, stream=stream, num_streams=num_streams)
            if self.background and sys.platform == "linux":
                return BackgroundSource(opens, f"stream {stream} of {self.origin}", self.worker_modules)
            return opens()

        return open_streams(
            open_stream,
            self.num_streams,
            spec,
            dp_rank=dp_rank,
            dp_size=dp_size,
            micro_batches_per_step=micro_batches_per_step,
            log=SkipLog(self.max_lost_samples, Path(log_dir) / SKIP_FILE if log_dir is not None else None),
            origin=self.origin,
            levels=self.levels_of_frames,
        )
