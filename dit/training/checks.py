"""The checks of a run's settings before anything is built; those of `check_run` the dry run makes as well."""

from typing import Optional

from dit.data_api import BatchSpec, DataConfig
from dit.kernels.recompute import check_recompute
from dit.models.base import ModelConfig
from dit.optimizer.schedules import check_schedule
from dit.parallel.dims import ParallelConfig, ParallelDims, check_parallel, fewest_ranks
from dit.settings import (
    CheckpointConfig,
    LoggingConfig,
    OptimizerConfig,
    SamplingConfig,
    ScheduleConfig,
    TrainingConfig,
)

CHECKED = ("model", "data", "optimizer", "schedule", "parallel", "training", "checkpoint", "logging", "sampling")
"""The parts of a run that `check_run` takes, in its order."""


def check_run(
    model: ModelConfig,
    data: DataConfig,
    optimizer: OptimizerConfig,
    schedule: ScheduleConfig,
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
    for part in (optimizer, schedule, parallel, training, *others):
        part.validate()
    check_recompute(training.recompute, training.recompute_layers)
    check_schedule(training.num_steps, optimizer.lr, schedule)
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
    spec = model.batch_spec(micro_batch_size=dims.micro_batch_size, multiple_of=dims.token_multiple)
    data.check_settings(spec, dims.data_parallel_size, dims.micro_batches * dims.data_parallel_size)
    return dims, spec


def adapted(schedule: ScheduleConfig, training: TrainingConfig, dims: ParallelDims) -> list[str]:
    """Say which settings were adapted to the run's size, one line each."""
    lines = []
    if dims.micro_batch_size < training.micro_batch_size:
        lines.append(
            f"micro-batches of {dims.micro_batch_size}, not training.micro_batch_size={training.micro_batch_size}: "
            f"a global batch of {training.global_batch_size} is shared by {dims.data_parallel_size} replicas in "
            f"{dims.micro_batches} micro-batch{'es' if dims.micro_batches > 1 else ''} each"
        )
    if schedule.warmup_steps > training.num_steps:
        lines.append(
            f"a warm-up of {training.num_steps} steps, not schedule.warmup_steps={schedule.warmup_steps}: "
            f"the run has no more"
        )
    return lines
