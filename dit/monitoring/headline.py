"""The first line of a run: model, objective, device, parallel layout."""

from dit.backends.device import describe
from dit.checkpoint.train_state import TrainState
from dit.parallel.dims import ParallelDims
from dit.parallel.implementations import fp8_of, implementations
from dit.run_config import RunConfig


def headline(config: RunConfig, dims: ParallelDims, state: TrainState, *, resumed: bool) -> str:
    """Return a one-line description of a run."""
    parallel, training = config.parallel, config.training
    count = sum(shard.parameter.numel() for shard in state.shards)
    pp, vpp = parallel.pipeline_model_parallel_size, parallel.virtual_pipeline_model_parallel_size
    pipeline = f" x PP {pp}{f' (VPP {vpp})' if vpp else ''}" if pp > 1 else ""
    selections = implementations(config.model, training)
    context = ""
    if parallel.context_parallel_size > 1:
        context = f" x CP {parallel.context_parallel_size} ({parallel.context_comm}, {parallel.context_split})"
    ep = parallel.expert_model_parallel_size
    sharing = parallel.named_data_parallel() + (f", EP {ep}" if ep > 1 else "")
    return (
        f"{type(config.model).__name__} {count:,} parameters on rank 0 | {type(config.objective).__name__} | "
        f"{dims.world_size} x {describe()}: TP {parallel.tensor_model_parallel_size}"
        f"{'+SP' if parallel.sequence_parallel else ''}{pipeline}{context} x DP {dims.data_parallel_size} "
        f"({sharing}) | {training.precision}{fp8_of(training, selections)}, attention {selections['attention'].name} | "
        f"global batch {training.global_batch_size} | {training.run_dir}"
        + (f" | resumed at step {state.step}" if resumed else "")
        + (", the target" if state.step >= training.num_steps else "")
    )
