"""The part that all recipes have in common."""

import nemo_run as run

from dit.data_api import DataConfig
from dit.models.base import ModelConfig
from dit.objectives.base import Objective
from dit.optimizer.schedules import Constant
from dit.parallel.dims import ParallelConfig
from dit.settings import CheckpointConfig, LoggingConfig, OptimizerConfig, SamplingConfig, TrainingConfig
from dit.training.pretrain import pretrain


def base_run(
    run_dir: str,
    model: run.Config[ModelConfig],
    data: run.Config[DataConfig],
    objective: run.Config[Objective],
    sampling: run.Config[SamplingConfig],
) -> run.Partial:
    """Return a run by AdamW at a constant 1e-4 without weight decay, in bf16, with an average of decay 0.9999."""
    return run.Partial(
        pretrain,
        model=model,
        data=data,
        objective=objective,
        optimizer=run.Config(OptimizerConfig, lr=1e-4, weight_decay=0.0),
        schedule=run.Config(Constant),
        parallel=run.Config(ParallelConfig, overlap_grad_reduce=True, overlap_param_gather=True),
        training=run.Config(TrainingConfig, run_dir=run_dir, precision="bf16", ema_decay=0.9999),
        checkpoint=run.Config(CheckpointConfig),
        logging=run.Config(LoggingConfig),
        sampling=sampling,
    )
