"""The training state: everything that a step changes and a checkpoint saves."""

import logging
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Optional

from dit.backends.device import graph_stream
from dit.backends.process_groups import ProcessGroups
from dit.checkpoint.base_model import load_base
from dit.checkpoint.manifest import HeldOut
from dit.checkpoint.verify_together import on_first_rank
from dit.data_api import BatchSpec, DataStream
from dit.optimizer.model_state import ModelState, build_model_state
from dit.parallel.build import build_model, wrap
from dit.parallel.implementations import target_of
from dit.run_config import RunConfig

logger = logging.getLogger(__name__)


@dataclass(kw_only=True)
class TrainState(ModelState):
    """Everything that a training step changes.

    Attributes:
        base: checkpoint of the frozen weights, as in `Manifest.base`; None if all weights are trained.
        run: id of the run, see `dit.checkpoint.run_identity`; empty before `Checkpointer.resume`.
    """

    stream: DataStream
    consumed_samples: int = 0
    held_out: Optional[HeldOut] = None
    base: Optional[Mapping[str, str]] = None
    data: Optional[Mapping[str, Mapping[str, str]]] = None
    run: str = ""

    @property
    def is_validated(self) -> bool:
        """Whether the newest held-out loss was measured with the current weights."""
        return self.held_out is not None and self.held_out.step == self.step

    def averaged(self) -> AbstractContextManager[None]:
        """Use the weight average in the model inside this context, if there is one."""
        return nullcontext() if self.ema is None else self.ema.applied(self.optimizer, self.wrapped)


def build_state(config: RunConfig, spec: BatchSpec, groups: ProcessGroups) -> TrainState:
    """Build the state of this rank at step 0; reads frozen weights from the base model."""
    parallel, training, auxiliary = config.parallel, config.training, config.objective.auxiliary
    chunks = build_model(config.model, parallel, training, groups, auxiliary=auxiliary)
    base = load_base(config, chunks, groups)
    target = target_of(config.model, training.precision)
    with graph_stream() if training.cuda_graph else nullcontext():
        wrapped = wrap(chunks, parallel, groups, target, training.kernels)
    model = build_model_state(chunks, wrapped, config.optimizer, parallel, training, groups, target, auxiliary)
    stream = config.data.build_train(
        spec,
        dp_rank=groups.dp_rank,
        dp_size=groups.dp_size,
        seed=training.seed,
        log_dir=training.run_dir if groups.is_data_reader else None,
        micro_batches_per_step=training.global_batch_size // spec.micro_batch_size,
    )
    data = on_first_rank(config.data.identity, groups)
    if data is None and groups.rank == 0:
        logger.info(
            "%s.identity returns None, so other samples will not be noticed when the run resumes; to refuse them, "
            "override it (docs/adding-a-data-source.md)",
            type(config.data).__name__,
        )
    return TrainState(**vars(model), stream=stream, base=base, data=data)
