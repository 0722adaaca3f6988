"""Parallel sizes: what a recipe asks for, checked before any memory is touched."""

from dataclasses import dataclass
from typing import Literal, Optional


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
        expert_model_parallel_size: ranks that share the experts of a layer.
        expert_tensor_parallel_size: ranks that share one expert.
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
