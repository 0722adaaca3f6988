"""The checks of a run's settings before anything is built; those of `check_run` the dry run makes as well."""

from typing import Optional

from dit.data_api import BatchSpec, DataConfig
from dit.errors import ConfigError
from dit.kernels.recompute import check_recompute
from dit.models.base import ModelConfig
from dit.objectives.base import Objective
from dit.optimizer.schedules import Schedule
from dit.parallel.dims import ParallelConfig, ParallelDims, check_parallel, fewest_ranks
from dit.settings import (
    CheckpointConfig,
    LoggingConfig,
    OptimizerConfig,
    SamplingConfig,
    TrainingConfig,
)

CHECKED = ("model", "data", "optimizer", "schedule", "parallel", "training", "checkpoint", "logging", "sampling")
"""The parts of a run that `check_run` takes, in its order."""


def check_run(
    model: ModelConfig,
    data: DataConfig,
    optimizer: OptimizerConfig,
    schedule: Schedule,
    parallel: ParallelConfig,
    training: TrainingConfig,
    *others: CheckpointConfig | LoggingConfig | SamplingConfig,
    world_size: Optional[int],
) -> tuple[ParallelDims, BatchSpec]:
    """Check every setting by itself, then against each other.

    Args:
        others: settings that no other part depends on.
        world_size: ranks of the run; None for the fewest that the layout needs.

    Raises:
        ConfigError: with the numbers and the cure.
    """
    model.validate()
    for part in (optimizer, parallel, training, *others):
        part.validate()
    check_recompute(training.recompute, training.recompute_layers)
    schedule.check(training.num_steps, optimizer.lr)
    sizes = model.megatron_sizes()
    dims = check_parallel(
        parallel,
        world_size=world_size or fewest_ranks(parallel),
        num_attention_heads=sizes["num_attention_heads"],
        num_layers=sizes["num_layers"],
        micro_batch_size=training.micro_batch_size,
        global_batch_size=training.global_batch_size,
        num_experts=sizes.get("num_moe_experts"),
        num_query_groups=sizes.get("num_query_groups"),
    )
    spec = BatchSpec(
        patch_temporal=model.patch_temporal,
        patch_spatial=model.patch_spatial,
        latent_channels=model.in_channels,
        num_classes=model.num_classes,
        context_size=model.context_size,
        pooled_size=model.pooled_size,
        micro_batch_size=dims.micro_batch_size,
        multiple_of=dims.token_multiple,
    )
    data.check_settings(spec, dims.data_parallel_size, dims.micro_batches * dims.data_parallel_size)
    return dims, spec


def check_outputs(objective: Objective, model: ModelConfig) -> None:
    """Check that the model predicts as many outputs as the objective trains.

    Raises:
        ConfigError: with the numbers and the cure.
    """
    predicted, wanted = model.output_features, objective.num_outputs * model.token_channels
    if predicted != wanted:
        raise ConfigError(
            f"the model predicts {predicted} numbers for a token of {model.token_channels} "
            f"(model.in_channels={model.in_channels}), and the objective trains {wanted}; "
            f"set model.out_channels={objective.num_outputs * model.in_channels}, or choose an objective with as many "
            "outputs (objective=ddpm_learned_variance has two, the others have one)"
        )


def adapted(schedule: Schedule, training: TrainingConfig, dims: ParallelDims) -> list[str]:
    """Say which settings were adapted to the run's size, one line each."""
    lines = []
    if dims.micro_batch_size < training.micro_batch_size:
        lines.append(
            f"micro-batches of {dims.micro_batch_size}, not training.micro_batch_size={training.micro_batch_size}: "
            f"a global batch of {training.global_batch_size} is shared by {dims.data_parallel_size} replicas in "
            f"{dims.micro_batches} micro-batch{'es' if dims.micro_batches > 1 else ''} each"
        )
    return lines + schedule.adapted(training.num_steps)
