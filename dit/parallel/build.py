"""Build a trainable model on this rank from its configuration: modules, initial weights, wrappers, optimizer."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Optional

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.enums import ModelType
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer import ParamKey, get_megatron_optimizer, get_standard_config_overrides
from megatron.core.optimizer.optimizer_config import ParamPredicate
from megatron.core.transformer import TransformerConfig

from dit.auxiliary import DISCRIMINATOR, NO_NETWORKS, AuxiliaryNetworks
from dit.backends.gradients import DataParallel, GradientFactor, finalize_gradients, share_main_gradients
from dit.backends.init import initialize_weights
from dit.backends.megatron_types import MegatronOptimizer
from dit.backends.process_groups import ProcessGroups
from dit.backends.provider import LayerProvider
from dit.backends.sharding import write_attributes
from dit.backends.width import rate_factor, set_width
from dit.context_parallel.attention import ContextAttention
from dit.kernels.attention import Attention
from dit.kernels.choice import AUTO, Target, choose
from dit.kernels.compiled import compile_layers, run_eagerly
from dit.kernels.recompute import recompute_activations
from dit.kernels.resolve import ATTENTION, ATTENTION_BLOCKS, LAYERS, add_gradients
from dit.models.base import Backbone, ModelConfig, Stage
from dit.models.registry import build_backbone
from dit.parallel.dims import ParallelConfig, check_supported
from dit.parallel.fsdp import finalize_shards, reduces_in_backward, wrap_fsdp
from dit.parallel.implementations import DTYPES, target_of
from dit.parallel.loss_scale import share_loss_scale, sub_optimizers
from dit.parallel.pipeline import split_layers, stages
from dit.patches import patches
from dit.settings import OptimizerConfig, TrainingConfig


@dataclass(frozen=True)
class TracedBuild:
    """Options to build a model for tracing on fake tensors, without initial weights.

    Attributes:
        stages: the stages to build, one per chunk; None for the stages of the layout.
        device: device for which attention kernels are selected.
    """

    stages: Optional[Sequence[Stage]]
    device: torch.device


@patches(
    "megatron-core 0.16",
    "core/pipeline_parallel/schedules.py: forward_backward_pipelining_with_interleaving",
    why="it frees outputs that are still being sent, so `deallocate_pipeline_outputs` is off",
    link="https://github.com/NVIDIA/Megatron-LM/pull/4047",
)
def megatron_config(
    model: ModelConfig, parallel: ParallelConfig, precision: str, *, meta: bool = False
) -> TransformerConfig:
    """Return Megatron-Core's config for a model, a layout and a precision.

    Args:
        meta: create parameters on torch's default device instead of this rank's, to build in `torch.device("meta")`.
    """
    dtype = DTYPES[precision]
    pp, vpp = parallel.pipeline_model_parallel_size, parallel.virtual_pipeline_model_parallel_size
    sizes = model.megatron_sizes()
    layout = None  # equal stages
    if parallel.pipeline_layers is not None and pp > 1:
        layout = _megatron_layout(split_layers(sizes.num_layers, pp, vpp, parallel.pipeline_layers))
    return TransformerConfig(
        **sizes.arguments(),
        tensor_model_parallel_size=parallel.tensor_model_parallel_size,
        sequence_parallel=parallel.sequence_parallel,
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=vpp,
        pipeline_model_parallel_layout=layout,
        # With batched sends, the interleaved schedule would mix up activations and gradients on two ranks, where the
        # next rank is also the previous rank. Single sends also overlap with computation.
        overlap_p2p_comm=vpp is not None,
        batch_p2p_comm=vpp is None,
        # The interleaved schedule of Megatron-Core 0.16 frees outputs that are still being sent (Megatron-LM #4047).
        # Hooks of Megatron-FSDP return views, which cannot be freed.
        deallocate_pipeline_outputs=vpp is None and parallel.data_parallel != "fsdp",
        context_parallel_size=parallel.context_parallel_size,
        expert_model_parallel_size=parallel.expert_model_parallel_size,
        expert_tensor_parallel_size=1,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=precision == "bf16",
        fp16=precision == "fp16",
        # Losses are (sum, count) pairs, and gradients are divided once by the global count of real tokens.
        calculate_per_token_loss=True,
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",
        use_cpu_initialization=meta,
        perform_initialization=False,
        gradient_accumulation_fusion=False,
        # Otherwise Transformer Engine would use the quantised weights of the first micro-batch in all steps.
        disable_parameter_transpose_cache=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
    )


def _megatron_layout(layers: Sequence[int]) -> list[list[str]]:
    """Return Megatron-Core's description of unequal pipeline stages."""
    layout = [["decoder"] * count for count in layers]
    return [["embedding", *layout[0]], *layout[1:-1], [*layout[-1], "loss"]]


def build_on_meta(
    model: ModelConfig, stage: Optional[Stage] = None, *, auxiliary: AuxiliaryNetworks = NO_NETWORKS
) -> Backbone:
    """Build the full model, or one stage of it, on the meta device (no memory), for counting and planning."""
    model.validate()
    stage = stage or Stage(range(model.megatron_sizes().num_layers))
    with torch.device("meta"):
        return build_on_one_rank(model, stage, auxiliary=auxiliary)


def build_on_one_rank(
    model: ModelConfig,
    stage: Stage,
    provider: Callable[[TransformerConfig], LayerProvider] = LayerProvider,
    *,
    auxiliary: AuxiliaryNetworks = NO_NETWORKS,
) -> Backbone:
    """Build a stage of the model without parallelism, in fp32 and without initial weights, on torch's default device.

    Args:
        provider: builds the linears; without groups, linears of `LayerProvider` can be inspected but not run.
    """
    config = megatron_config(model, ParallelConfig(), "fp32", meta=True)
    attention = choose(ATTENTION, target_of(model, "fp32", torch.device("cpu"))).load()
    linears = provider(config)
    backbone = build_backbone(model, linears, attention, stage)
    backbone.add_networks(auxiliary, linears)
    return backbone


def parameter_shapes(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the shape of every parameter of the full model by global name; allocates no memory."""
    return {name: tuple(parameter.shape) for name, parameter in build_on_meta(model).named_parameters()}


def count_parameters(model: ModelConfig, *, trained: bool = False, auxiliary: AuxiliaryNetworks = NO_NETWORKS) -> int:
    """Count the parameters of the full model, without frozen parameters if `trained`."""
    parameters = build_on_meta(model, auxiliary=auxiliary).parameters()
    return sum(p.numel() for p in parameters if p.requires_grad or not trained)


def attention_path(parallel: ParallelConfig, groups: ProcessGroups, target: Target, requested: str = AUTO) -> Attention:
    """Return the attention of this process, with context parallelism if the layout has it."""
    attention = choose(ATTENTION, target, requested).load()
    if parallel.context_parallel_size == 1:
        return attention
    inner, outer = groups.collection.hcp if parallel.context_comm == "a2a+p2p" else (None, None)
    return ContextAttention(
        local=attention,
        kernel=choose(ATTENTION_BLOCKS, target).load(),
        comm=parallel.context_comm,
        split=parallel.context_split,
        group=groups.cp,
        inner=inner,
        outer=outer,
        segment_comm=parallel.spatial_temporal_comm,
    )


@patches(
    "megatron-core 0.16",
    "core/distributed/finalize_model_grads.py: has_cond_embedder",
    why="it sums the gradients of conditioning embedders over pipeline stages",
)
def build_model(
    model: ModelConfig,
    parallel: ParallelConfig,
    training: TrainingConfig,
    groups: ProcessGroups,
    *,
    auxiliary: AuxiliaryNetworks = NO_NETWORKS,
    traced: Optional[TracedBuild] = None,
) -> list[Backbone]:
    """Build this rank's part of the model, one chunk per virtual pipeline stage, with counter-based initial weights."""
    model.validate()
    check_supported(model, parallel, training)
    if model.adapters is not None and groups.pp.size() > 1:
        build_on_meta(model)  # raises if no stage has a layer with an adapter
    config = megatron_config(model, parallel, training.precision)
    # Megatron-Core sums the gradients of replicated conditioning embedders over the pipeline if this is set.
    config.has_cond_embedder = parallel.data_parallel != "fsdp"
    target = target_of(model, training.precision, traced.device if traced else None)
    kernels = choose(LAYERS, target, training.kernels).load()
    if training.recompute == "full" or parallel.data_parallel == "fsdp":
        # Full recompute would save two tensors per layer. FSDP frees the bias that the next layer would add.
        kernels = replace(kernels, joins_layers=False)
    provider = LayerProvider(config, groups.collection, training.linears, kernels, training.fp8)
    path = attention_path(parallel, groups, target, training.attention)
    compiles = training.kernels == "compile"
    if compiles:
        path = run_eagerly(path)
    local_stages = stages(
        config.num_layers,
        groups.pp.size(),
        groups.pp.rank(),
        parallel.virtual_pipeline_model_parallel_size,
        parallel.pipeline_layers,
    )
    chunks = [build_backbone(model, provider, path, stage) for stage in (traced and traced.stages) or local_stages]
    base = model.at_base_width()
    base_network = None if base is None else build_on_meta(base, auxiliary=auxiliary)
    for chunk in chunks:
        chunk.add_networks(auxiliary, provider)
        chunk.model_type = ModelType.encoder_or_decoder
        if base_network is not None:
            set_width(chunk, base_network, provider.tp_size)
        if traced is None:
            initialize_weights(chunk, training.seed, tp_rank=provider.tp_rank)
        write_attributes(
            chunk,
            sequence_parallel=provider.sequence_parallel,
            pipeline=groups.pp.size() > 1,
            first_stage=chunk.stage.first,
            sums_head_norms=config.qk_layernorm,
        )
        if compiles:
            compile_layers(
                (module for module in chunk.modules() if isinstance(module, chunk.compiled_units or chunk.fsdp_units)),
                one_size=not model.supports.mixed_shapes,
                selective=training.recompute == "selective",
            )
        if not compiles or training.recompute != "selective":  # the compiler selects what it saves
            for layer in list(chunk.units())[: training.recompute_layers]:
                recompute_activations(layer, training.recompute)
    return chunks


def wrap(
    chunks: Sequence[Backbone],
    parallel: ParallelConfig,
    groups: ProcessGroups,
    target: Optional[Target] = None,
    kernels: str = "eager",
) -> list[Any]:
    """Wrap a model's chunks for data parallelism: DDP, distributed optimizer or FSDP, with fp32 gradient reduction.

    Forward passes must call the wrappers, because under FSDP the unwrapped chunks lack the unsharded weights.
    If `target` is None, torch adds the gradients.
    """
    config = chunks[0].config
    interleaved = len(chunks) > 1
    if parallel.data_parallel == "fsdp":
        sharded = [wrap_fsdp(chunk, parallel.fsdp_sharding, groups) for chunk in chunks]
        config.finalize_model_grads_func = finalize_shards
        if reduces_in_backward(sharded[0]):
            config.no_sync_func = [chunk.no_sync for chunk in sharded] if interleaved else sharded[0].no_sync
        return sharded
    config.finalize_model_grads_func = finalize_gradients
    add = torch._foreach_add_ if target is None else add_gradients(target, kernels)
    settings = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=parallel.overlap_grad_reduce,
        overlap_param_gather=parallel.overlap_param_gather,
        align_param_gather=interleaved and parallel.overlap_param_gather,
        use_distributed_optimizer=parallel.data_parallel == "distributed_optimizer",
    )
    wrapped = [
        # The communication of later chunks overlaps with the computation of other chunks, without small buckets.
        DataParallel(*(config, settings, chunk), disable_bucketing=i > 0, pg_collection=groups.collection, add=add)
        for i, chunk in enumerate(chunks)
    ]
    no_sync, grad_sync, param_sync = (
        [getattr(chunk, name) for chunk in wrapped] for name in ("no_sync", "start_grad_sync", "start_param_sync")
    )
    config.no_sync_func = no_sync if interleaved else no_sync[0]
    if parallel.overlap_grad_reduce and groups.pp.size() > 1:
        # All stages reduce at the same time, in the bubble of the later stages, so that none delays its neighbours.
        config.grad_sync_func = grad_sync if interleaved else grad_sync[0]
    if parallel.overlap_param_gather:
        config.param_sync_func = param_sync if interleaved else param_sync[0]
    return wrapped


@patches(
    "megatron-core 0.16",
    "core/optimizer: tp_group of an expert's optimizer, grad_stats_parallel_group, _copy_main_params_to_model_params, "
    "wd_mult",
    why="the norm would count experts of one tensor-parallel rank and one instance of hybrid sharding; fp32 parameters "
    "would be copied onto themselves, and `wd_mult` ignored",
)
def build_optimizer(
    wrapped: Sequence[Any],
    settings: OptimizerConfig,
    parallel: ParallelConfig,
    training: TrainingConfig,
    groups: ProcessGroups,
    *,
    auxiliary: AuxiliaryNetworks = NO_NETWORKS,
) -> MegatronOptimizer:
    """Build Megatron-Core's AdamW for the wrapped chunks of the model; in fp16 with a loss scale (`loss_scale_of`).

    Weight decay is set only here; neither `set_rates` nor loading a checkpoint changes it.
    """
    precision = training.precision
    config = MegatronOptimizerConfig(
        optimizer="adam",
        lr=settings.lr,
        weight_decay=settings.weight_decay,
        adam_beta1=settings.beta1,
        adam_beta2=settings.beta2,
        adam_eps=settings.eps,
        clip_grad=settings.clip_grad,
        bf16=precision == "bf16",
        fp16=precision == "fp16",
        loss_scale=training.loss_scale,
        initial_loss_scale=training.initial_loss_scale,
        min_loss_scale=1.0,  # an overflow at this scale ends the run
        loss_scale_window=training.loss_scale_window,
        hysteresis=1,  # the first overflow halves the scale
        params_dtype=DTYPES[precision],
        use_distributed_optimizer=parallel.data_parallel != "ddp",  # Megatron-Core requires it for FSDP too
        overlap_param_gather=parallel.overlap_param_gather,
    )
    overrides = get_standard_config_overrides(config)
    if auxiliary.lr_factor != 1.0:
        overrides[ParamKey(name=f"*{DISCRIMINATOR}*")] = {"lr_mult": auxiliary.lr_factor}
    overrides |= _overrides_of_width(wrapped, muon=settings.algorithm == "muon")
    optimizer = get_megatron_optimizer(
        config, list(wrapped), overrides, use_gloo_process_groups=False, pg_collection=groups.collection
    )
    parts = sub_optimizers(optimizer)
    for part in parts:
        if parallel.data_parallel != "fsdp" and any(group["is_expert_parallel"] for group in part.param_groups):
            # The gradient norm counts an unsharded parameter only on the first tensor-parallel rank. Tensor-parallel
            # ranks have copies of a dense parameter, but different experts.
            part.tp_group = groups.collection.expt_tp
        if groups.shard_copies is not None:
            part.grad_stats_parallel_group = dist.group.WORLD
        if parallel.data_parallel == "distributed_optimizer":
            share_main_gradients(part)
        if parallel.data_parallel == "distributed_optimizer" and precision == "fp32":
            # The optimizer updates views of the model's parameters, which Megatron-Core would copy onto themselves.
            part._copy_main_params_to_model_params = lambda: None
    for group in optimizer.param_groups:
        # Megatron-Core sets `wd_mult` and `lr_mult` of parameters, but only its scheduler applies them.
        group["weight_decay"] = settings.weight_decay * group["wd_mult"]
        group["lr"] = settings.lr * group["lr_mult"]
    if precision == "fp16":
        share_loss_scale(optimizer, wrapped, training.micro_batch_size)
    optimizer.gradient_copies = 1 if groups.shard_copies is None else groups.shard_copies.size()
    optimizer.gradient_factor = GradientFactor()
    # Each group has all gradients of its optimizer. The norm is summed over all ranks, so one group of them counts.
    groups_of_norm = [dist.get_process_group_ranks(part.get_grad_stats_parallel_group()) for part in parts]
    optimizer.parts_in_norm = [part for part, ranks in zip(parts, groups_of_norm) if 0 in ranks]
    return optimizer


def _overrides_of_width(wrapped: Sequence[Any], *, muon: bool) -> dict[ParamKey, Any]:
    """Return the factors of learning rates for `model.base_width`; rate times weight decay keeps its value."""
    factors = {rate_factor(parameter, muon=muon) for chunk in wrapped for parameter in chunk.parameters()}

    def key(factor: float) -> ParamKey:
        is_member = ParamPredicate(f"width {factor}", lambda parameter: rate_factor(parameter, muon=muon) == factor)
        return ParamKey(predicate=is_member)

    return {key(factor): {"lr_mult": factor, "wd_mult": 1 / factor} for factor in sorted(factors - {1.0})}
