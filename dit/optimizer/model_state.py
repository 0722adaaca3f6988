"""The state that a step changes: this rank's model, optimizer and weight average.

Training, `dit.verify` and the planner build it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Optional

from dit.auxiliary import NO_NETWORKS, AuxiliaryNetworks
from dit.backends.graphs import runner
from dit.backends.megatron_types import MegatronOptimizer
from dit.backends.process_groups import ProcessGroups
from dit.kernels.choice import Target
from dit.models.base import Backbone
from dit.optimizer.ema import EMA
from dit.optimizer.master_weights import MasterShard, master_shards
from dit.optimizer.update import Update
from dit.parallel.build import build_optimizer
from dit.parallel.dims import ParallelConfig
from dit.parallel.loss_scale import LossScale, loss_scale_of
from dit.settings import OptimizerConfig, TrainingConfig


@dataclass(kw_only=True)
class ModelState:
    """This rank's part of a model, its optimizer and its average.

    Attributes:
        chunks: unwrapped model chunks, one unless the pipeline is interleaved; same order as `wrapped`.
    """

    groups: ProcessGroups
    chunks: Sequence[Backbone]
    wrapped: Sequence[Any]
    optimizer: MegatronOptimizer
    shards: list[MasterShard]
    ema: Optional[EMA]
    update: Update
    loss_scale: Optional[LossScale]
    step: int = 0


def build_model_state(
    chunks: Sequence[Backbone],
    wrapped: Sequence[Any],
    settings: OptimizerConfig,
    parallel: ParallelConfig,
    training: TrainingConfig,
    groups: ProcessGroups,
    target: Target,
    auxiliary: AuxiliaryNetworks = NO_NETWORKS,
) -> ModelState:
    """Build the optimizer, the average and the update of a wrapped model."""
    optimizer = build_optimizer(wrapped, settings, parallel, training, groups, auxiliary=auxiliary)
    shards, ema = master_shards(optimizer, chunks, settings), None
    if training.ema_decay is not None:
        lengths, offload = training.ema_sigma_rel or (), training.ema_offload
        ema = EMA(shards, training.ema_decay, training.ema_start_step, offload=offload, sigma_rel=lengths)
    run = runner(graphed=training.cuda_graph)
    return ModelState(
        groups=groups,
        chunks=chunks,
        wrapped=wrapped,
        optimizer=optimizer,
        shards=shards,
        ema=ema,
        update=Update(optimizer, shards, ema, settings, groups, target, training.kernels, run),
        loss_scale=loss_scale_of(optimizer),
    )
