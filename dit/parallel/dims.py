"""Parallel sizes: what a recipe asks for, checked before any memory is touched."""

from dataclasses import dataclass
from typing import Literal, Optional

from dit.errors import ConfigError


@dataclass(kw_only=True)
class ParallelConfig:
    """Sizes of the parallel layout, in Megatron's spelling.

    Attributes:
        tensor_model_parallel_size: ranks that share every linear layer.
        sequence_parallel: shard activations between the linear layers over the tensor-parallel ranks.
        pipeline_model_parallel_size: ranks that share the layers.
        virtual_pipeline_model_parallel_size: model chunks per pipeline rank (interleaved schedule).
        context_parallel_size: ranks that share the tokens of every sample.
        context_comm: how attention exchanges keys and values under context parallelism.
        expert_model_parallel_size: ranks that share the experts of a layer, taken from the tensor-, context- and
            data-parallel ranks of a pipeline stage.
        expert_tensor_parallel_size: ranks that share one expert; experts are whole here, so 1.
        data_parallel: what data-parallel ranks shard: nothing, the optimizer, or everything (FSDP).
        overlap_grad_reduce: reduce gradients while the backward pass runs.
        overlap_param_gather: gather parameters while the forward pass runs (distributed optimizer).
    """

    tensor_model_parallel_size: int = 1
    sequence_parallel: bool = False
    pipeline_model_parallel_size: int = 1
    virtual_pipeline_model_parallel_size: Optional[int] = None
    context_parallel_size: int = 1
    context_comm: Literal["p2p", "all_gather", "a2a", "a2a+p2p"] = "p2p"
    expert_model_parallel_size: int = 1
    expert_tensor_parallel_size: int = 1
    data_parallel: Literal["ddp", "distributed_optimizer", "fsdp"] = "distributed_optimizer"
    overlap_grad_reduce: bool = False
    overlap_param_gather: bool = False


@dataclass(frozen=True)
class ParallelDims:
    """Checked sizes of one job.

    Attributes:
        world_size: ranks of the job.
        data_parallel_size: replicas that read different samples.
        micro_batches: micro-batches per optimizer step on one replica.
        token_multiple: every sample is padded to a multiple of this many tokens.
    """

    world_size: int
    data_parallel_size: int
    micro_batches: int
    token_multiple: int


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def _check_experts(parallel: ParallelConfig, num_experts: Optional[int]) -> None:
    ep = parallel.expert_model_parallel_size
    if parallel.expert_tensor_parallel_size > 1:
        raise ConfigError(
            f"parallel.expert_tensor_parallel_size={parallel.expert_tensor_parallel_size} is not available: an expert "
            "lies whole on one rank; use 1 and share experts with parallel.expert_model_parallel_size"
        )
    if num_experts is None:
        if ep > 1:
            raise ConfigError(
                f"parallel.expert_model_parallel_size={ep} shares experts, but the model has none; "
                "use 1 or set model.num_experts"
            )
        return
    if num_experts % ep:
        raise ConfigError(
            f"model.num_experts={num_experts} cannot be shared by parallel.expert_model_parallel_size={ep} ranks; "
            f"use one of {_divisors(num_experts)} or change the number of experts"
        )
    if parallel.tensor_model_parallel_size > 1 and not parallel.sequence_parallel:
        raise ConfigError(
            f"model.num_experts={num_experts} with parallel.tensor_model_parallel_size="
            f"{parallel.tensor_model_parallel_size} needs parallel.sequence_parallel=True: without it every "
            "tensor-parallel rank would send the same tokens to the experts"
        )


def check_parallel(
    parallel: ParallelConfig,
    *,
    world_size: int,
    num_attention_heads: int,
    micro_batch_size: int,
    global_batch_size: int,
    num_experts: Optional[int] = None,
) -> ParallelDims:
    """Check a layout against the job and the model.

    Raises:
        ConfigError: the sizes do not fit; the message names the numbers and the nearest legal choice.
    """
    tp, pp, cp = (
        parallel.tensor_model_parallel_size,
        parallel.pipeline_model_parallel_size,
        parallel.context_parallel_size,
    )
    for name, value in (
        ("tensor_model_parallel_size", tp),
        ("pipeline_model_parallel_size", pp),
        ("context_parallel_size", cp),
        ("expert_model_parallel_size", parallel.expert_model_parallel_size),
        ("expert_tensor_parallel_size", parallel.expert_tensor_parallel_size),
    ):
        if value < 1:
            raise ConfigError(f"parallel.{name}={value} must be at least 1")
    if num_attention_heads % tp:
        raise ConfigError(
            f"num_attention_heads={num_attention_heads} cannot be split over tensor_model_parallel_size={tp}; "
            f"use one of {_divisors(num_attention_heads)} or change the number of heads"
        )
    unsupported = {
        "pipeline_model_parallel_size": pp > 1 or parallel.virtual_pipeline_model_parallel_size is not None,
        "context_parallel_size": cp > 1,
        "data_parallel=fsdp": parallel.data_parallel == "fsdp",
    }
    if any(unsupported.values()):
        raise ConfigError(
            f"parallel.{[k for k, bad in unsupported.items() if bad]} is not available yet; this version runs tensor, "
            "sequence and expert parallelism with data_parallel=ddp or distributed_optimizer"
        )
    _check_experts(parallel, num_experts)
    if parallel.sequence_parallel and tp == 1:
        raise ConfigError(
            "parallel.sequence_parallel=True needs parallel.tensor_model_parallel_size of at least 2, got 1; "
            "raise it or switch sequence_parallel off"
        )
    if parallel.overlap_param_gather and parallel.data_parallel != "distributed_optimizer":
        raise ConfigError(
            "parallel.overlap_param_gather=True needs data_parallel=distributed_optimizer, "
            f"got {parallel.data_parallel!r}"
        )
    if parallel.overlap_param_gather and not parallel.overlap_grad_reduce:
        raise ConfigError("parallel.overlap_param_gather=True needs parallel.overlap_grad_reduce=True")
    model_ranks = tp * pp * cp
    if world_size % model_ranks:
        raise ConfigError(
            f"world size {world_size} is not a multiple of TP {tp} x PP {pp} x CP {cp} = {model_ranks}; "
            f"start {max(1, round(world_size / model_ranks)) * model_ranks} ranks or shrink the layout"
        )
    dp = world_size // model_ranks
    ep = parallel.expert_model_parallel_size
    if tp * cp * dp % ep:
        fits = [n for n in _divisors(tp * cp * dp) if num_experts is not None and num_experts % n == 0]
        raise ConfigError(
            f"parallel.expert_model_parallel_size={ep} does not divide the TP {tp} x CP {cp} x DP {dp} = "
            f"{tp * cp * dp} ranks of a pipeline stage; use one of {fits} or start another number of ranks"
        )
    if micro_batch_size < 1 or global_batch_size < 1:
        raise ConfigError(
            f"training.micro_batch_size={micro_batch_size} and training.global_batch_size={global_batch_size} "
            "must be at least 1"
        )
    if global_batch_size % (micro_batch_size * dp):
        nearest = max(1, round(global_batch_size / (micro_batch_size * dp))) * micro_batch_size * dp
        raise ConfigError(
            f"training.global_batch_size={global_batch_size} is not a multiple of micro_batch_size={micro_batch_size} "
            f"x data-parallel size {dp} = {micro_batch_size * dp}; use {nearest} or another micro-batch size"
        )
    return ParallelDims(
        world_size=world_size,
        data_parallel_size=dp,
        micro_batches=global_batch_size // (micro_batch_size * dp),
        token_multiple=tp if parallel.sequence_parallel else 1,
    )
