"""The training state: everything that a step changes and a checkpoint saves."""

import logging
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Optional

from dit.backends.device import graph_stream
from dit.backends.graphs import runner
from dit.backends.megatron_types import MegatronOptimizer
from dit.backends.process_groups import ProcessGroups
from dit.checkpoint.base_model import load_base
from dit.checkpoint.manifest import HeldOut
from dit.checkpoint.verify_together import on_first_rank
from dit.data_api import BatchSpec, DataStream
from dit.models.base import Backbone
from dit.optimizer.ema import EMA
from dit.optimizer.master_weights import MasterShard, master_shards
from dit.optimizer.update import Update
from dit.parallel.build import build_model, build_optimizer, wrap
from dit.parallel.implementations import target_of
from dit.parallel.loss_scale import LossScale, loss_scale_of
from dit.run_config import RunConfig

logger = logging.getLogger(__name__)


@dataclass
class TrainState:
    """Everything that a training step changes.

    Attributes:
        chunks: unwrapped model chunks of this rank, one unless the pipeline is interleaved; same order as `wrapped`.
        held_out: newest held-out loss.
        base: checkpoint of the frozen weights, as in `Manifest.base`; None if all weights are trained.
        run: id of the run, see `dit.checkpoint.run_identity`; empty before `Checkpointer.resume`.
    """

    wrapped: Sequence[Any]
    chunks: Sequence[Backbone]
    optimizer: MegatronOptimizer
    shards: list[MasterShard]
    ema: Optional[EMA]
    stream: DataStream
    groups: ProcessGroups
    update: Update
    step: int = 0
    consumed_samples: int = 0
    held_out: Optional[HeldOut] = None
    loss_scale: Optional[LossScale] = None
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
    training = config.training
    chunks = build_model(config.model, config.parallel, training, groups, auxiliary=config.objective.auxiliary)
    base = load_base(config, chunks, groups)
    target = target_of(config.model, training.precision)
    with graph_stream() if training.cuda_graph else nullcontext():
        wrapped = wrap(chunks, config.parallel, groups, target, training.kernels)
    optimizer = build_optimizer(
        wrapped, config.optimizer, config.parallel, training, groups, auxiliary=config.objective.auxiliary
    )
    shards = master_shards(optimizer, chunks, config.optimizer)
    ema = None
    if training.ema_decay is not None:
        lengths, offload = training.ema_sigma_rel or (), training.ema_offload
        ema = EMA(shards, training.ema_decay, training.ema_start_step, offload=offload, sigma_rel=lengths)
    stream = config.data.build_train(
        spec,
        dp_rank=groups.dp_rank,
        dp_size=groups.dp_size,
        seed=training.seed,
        log_dir=training.run_dir if groups.is_data_reader else None,
        micro_batches_per_step=training.global_batch_size // spec.micro_batch_size,
    )
    run = runner(graphed=training.cuda_graph)
    update = Update(optimizer, shards, ema, config.optimizer, groups, target, training.kernels, run)
    data = on_first_rank(config.data.identity, groups)
    if data is None and groups.rank == 0:
        logger.info(
            "%s.identity returns None, so other samples will not be noticed when the run resumes; to refuse them, "
            "override it (docs/adding-a-data-source.md)",
            type(config.data).__name__,
        )
    scale = loss_scale_of(optimizer)
    return TrainState(
        wrapped, chunks, optimizer, shards, ema, stream, groups, update, loss_scale=scale, base=base, data=data
    )
