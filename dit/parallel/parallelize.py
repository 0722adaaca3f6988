"""From a model configuration to a trainable model on this rank, in one order: build, start weights, wrap, optimizer."""

from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.enums import ModelType
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.transformer import TransformerConfig
from torch import nn

from dit.backends.addressed_init import initialize_weights
from dit.backends.attention import resolve_attention
from dit.backends.device import local_device
from dit.backends.process_groups import ProcessGroups
from dit.backends.provider import LayerProvider
from dit.models.base import Backbone, ModelConfig, Stage
from dit.parallel.dims import ParallelConfig

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def megatron_config(
    model: ModelConfig, parallel: ParallelConfig, precision: str, *, meta: bool = False
) -> TransformerConfig:
    """Return Megatron-Core's view of the model, the layout and the precision.

    Args:
        meta: parameters go to torch's default device instead of this rank's, for builds under `torch.device("meta")`.
    """
    dtype = DTYPES[precision]
    return TransformerConfig(
        **model.megatron_sizes(),
        tensor_model_parallel_size=parallel.tensor_model_parallel_size,
        sequence_parallel=parallel.sequence_parallel,
        pipeline_model_parallel_size=parallel.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=parallel.virtual_pipeline_model_parallel_size,
        context_parallel_size=parallel.context_parallel_size,
        expert_model_parallel_size=parallel.expert_model_parallel_size,
        expert_tensor_parallel_size=parallel.expert_tensor_parallel_size,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=precision == "bf16",
        # Losses travel as (sum, count) and gradients are divided once, by the global count of real tokens.
        calculate_per_token_loss=True,
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",
        use_cpu_initialization=meta,
        perform_initialization=False,
        gradient_accumulation_fusion=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
    )


def build_on_meta(model: ModelConfig) -> Backbone:
    """Build the whole model without memory, for counting and planning."""
    model.validate()
    with torch.device("meta"):
        config = megatron_config(model, ParallelConfig(), "fp32", meta=True)
        _, attention = resolve_attention(torch.device("cpu"), torch.float32)
        return model.build(LayerProvider(config), attention, Stage(range(config.num_layers)))


def count_parameters(model: ModelConfig) -> int:
    """Count the parameters of the whole model."""
    return sum(p.numel() for p in build_on_meta(model).parameters())


def build_model(
    model: ModelConfig, parallel: ParallelConfig, precision: str, groups: ProcessGroups, seed: int
) -> Backbone:
    """Build this rank's part of the model with its addressed start weights."""
    model.validate()
    config = megatron_config(model, parallel, precision)
    # Megatron-Core sums the gradients of replicated conditioning embedders over the pipeline when told so.
    config.has_cond_embedder = True  # type: ignore[attr-defined]
    provider = LayerProvider(config, groups.collection)
    _, attention = resolve_attention(local_device(), DTYPES[precision])
    backbone = model.build(provider, attention, Stage(range(config.num_layers)))
    backbone.model_type = ModelType.encoder_or_decoder  # type: ignore[assignment]
    initialize_weights(backbone, seed, tp_rank=provider.tp_rank, tp_size=provider.tp_size)
    return backbone


def is_expert(parameter: nn.Parameter) -> bool:
    """Tell whether this is a weight of one expert, which only the ranks of its expert-data-parallel group hold."""
    return not getattr(parameter, "allreduce", True)


def wrap(backbone: Backbone, parallel: ParallelConfig, groups: ProcessGroups) -> DistributedDataParallel:
    """Wrap a model so that data-parallel ranks share its gradients (fp32 reduction)."""
    wrapped = DistributedDataParallel(
        backbone.config,
        DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            overlap_grad_reduce=parallel.overlap_grad_reduce,
            overlap_param_gather=parallel.overlap_param_gather,
            use_distributed_optimizer=parallel.data_parallel == "distributed_optimizer",
        ),
        backbone,
        pg_collection=groups.collection,
    )
    config = backbone.config
    config.finalize_model_grads_func = finalize_model_grads
    config.no_sync_func = wrapped.no_sync
    if parallel.overlap_param_gather:
        config.param_sync_func = wrapped.start_param_sync
    return wrapped


def build_optimizer(
    wrapped: DistributedDataParallel, settings: Any, parallel: ParallelConfig, precision: str, groups: ProcessGroups
) -> Any:
    """Build Megatron-Core's AdamW over the wrapped model.

    Args:
        settings: the recipe's `OptimizerConfig`.
    """
    config = MegatronOptimizerConfig(
        optimizer="adam",
        lr=settings.lr,
        weight_decay=settings.weight_decay,
        adam_beta1=settings.beta1,
        adam_beta2=settings.beta2,
        adam_eps=settings.eps,
        clip_grad=settings.clip_grad,
        bf16=precision == "bf16",
        params_dtype=DTYPES[precision],
        use_distributed_optimizer=parallel.data_parallel == "distributed_optimizer",
        overlap_param_gather=parallel.overlap_param_gather,
    )
    optimizer = get_megatron_optimizer(
        config, [wrapped], use_gloo_process_groups=False, pg_collection=groups.collection
    )
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        if any(group["is_expert_parallel"] for group in part.param_groups):
            # The gradient norm counts a whole parameter on the first tensor-parallel rank alone. Those ranks hold
            # copies of a dense parameter, but different experts.
            part.tp_group = groups.collection.expt_tp
    for group in optimizer.param_groups:
        if "fused" in group:  # torch's AdamW, where Transformer Engine's is not at hand: one kernel instead of nine
            group["fused"], group["foreach"] = True, False
    return optimizer
