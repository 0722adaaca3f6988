"""Sizes of the parallel layout, and their checks before any memory is allocated."""

import itertools
import math
from dataclasses import dataclass
from typing import Literal, Optional

from dit.errors import ConfigError
from dit.kernels.fp8 import BLOCKS, check_features
from dit.models.base import ModelConfig, TransformerSizes
from dit.parallel.pipeline import split_layers
from dit.ranges import LAYERS, RANKS, check_ranges, divisors, ranged
from dit.settings import Fp8, TrainingConfig

FSDPSharding = Literal["optim", "optim_grads", "optim_grads_params"]


@dataclass(kw_only=True)
class ParallelConfig:
    """Sizes of the parallel layout, in Megatron's spelling.

    Attributes:
        tensor_model_parallel_size: ranks that split every linear layer.
        sequence_parallel: shard tokens between linear layers over tensor-parallel ranks.
        pipeline_model_parallel_size: ranks that split the layers.
        virtual_pipeline_model_parallel_size: model chunks per pipeline rank (interleaved schedule).
        pipeline_layers: layers of each stage (rank, or virtual chunk); None for equal ones.
        context_parallel_size: ranks that split the tokens of every sample.
        context_comm, context_a2a_size: exchange under context parallelism: ring, `all_gather`, Ulysses (`a2a`), or both
            (`a2a+p2p`), with this many ranks in an all-to-all.
        context_split: chunks of a sample per rank: one, or two in Transformer Engine's order.
        spatial_temporal_comm: spatial and temporal attention on complete segments after an all-to-all, or on split
            ones.
        expert_model_parallel_size: ranks that split the experts of a layer.
        data_parallel: shard the optimizer, nothing (`ddp`), or what `fsdp_sharding` names (`fsdp`).
        fsdp_sharding: what Megatron-FSDP shards: optimizer, gradients, weights.
        num_distributed_optimizer_instances: groups of ranks that each shard a copy of FSDP's state.
        overlap_grad_reduce, overlap_param_gather: reduce gradients during the backward pass, gather parameters during
            the forward pass; `optim_grads_params` always does.
    """

    tensor_model_parallel_size: int = ranged(1, RANKS)
    sequence_parallel: bool = False
    pipeline_model_parallel_size: int = ranged(1, RANKS)
    virtual_pipeline_model_parallel_size: Optional[int] = ranged(None, RANKS)
    pipeline_layers: Optional[list[int]] = ranged(None, LAYERS)
    context_parallel_size: int = ranged(1, RANKS)
    context_comm: Literal["p2p", "all_gather", "a2a", "a2a+p2p"] = "p2p"
    context_a2a_size: Optional[int] = ranged(None, RANKS)
    context_split: Literal["contiguous", "load_balanced"] = "contiguous"
    spatial_temporal_comm: Literal["hybrid", "context"] = "hybrid"
    expert_model_parallel_size: int = ranged(1, RANKS)
    data_parallel: Literal["ddp", "distributed_optimizer", "fsdp"] = "distributed_optimizer"
    fsdp_sharding: FSDPSharding = "optim_grads_params"
    num_distributed_optimizer_instances: int = ranged(1, RANKS)
    overlap_grad_reduce: bool = False
    overlap_param_gather: bool = False

    def validate(self) -> None:
        """Check the range of every size; `check_parallel` checks them against each other, the model and the job."""
        check_ranges("parallel", self)

    def named_data_parallel(self) -> str:
        """Return the kind of data parallelism, with the number of instances under hybrid sharding."""
        count = self.num_distributed_optimizer_instances
        return self.data_parallel + (f", {count} instances" if count > 1 else "")


@dataclass(frozen=True)
class ParallelDims:
    """Validated sizes of one job.

    Attributes:
        data_parallel_size: replicas that read different samples.
        micro_batch_size: samples (or packs) per forward pass of one replica.
        micro_batches: micro-batches per optimizer step on one replica.
        token_multiple: every sample is padded to a multiple of this number of tokens.
    """

    world_size: int
    data_parallel_size: int
    micro_batch_size: int
    micro_batches: int
    token_multiple: int


def fewest_ranks(parallel: ParallelConfig, *, sharded: bool = False) -> int:
    """Return the smallest number of ranks for a layout.

    Args:
        sharded: at least two ranks share every weight under FSDP, which also runs on one.
    """
    tp, instances = parallel.tensor_model_parallel_size, parallel.num_distributed_optimizer_instances
    ep = parallel.expert_model_parallel_size
    per_stage = math.lcm(tp * parallel.context_parallel_size, ep)
    if instances > 1 or (sharded and parallel.data_parallel == "fsdp"):  # each has two ranks that shard its state
        counts = (n for n in itertools.count(per_stage, per_stage) if n > ep)
        per_stage = next(n for n in counts if n // tp % instances == 0 and n // tp > instances)
    return per_stage * parallel.pipeline_model_parallel_size


def fitting_micro_batch(at_most: int, share: int) -> int:
    """Return the largest micro-batch size up to `at_most` that divides `share`, the samples per step and replica."""
    return next(size for size in range(min(at_most, share), 0, -1) if share % size == 0)


def _check_fsdp(parallel: ParallelConfig) -> None:
    sharding = parallel.fsdp_sharding
    overlaps = {
        "overlap_grad_reduce": parallel.overlap_grad_reduce,
        "overlap_param_gather": parallel.overlap_param_gather,
    }
    legal = {"optim": (), "optim_grads": ("overlap_grad_reduce",), "optim_grads_params": tuple(overlaps)}[sharding]
    for name, enabled in overlaps.items():
        if enabled and name not in legal:
            raise ConfigError(
                f"parallel.{name}=True is not available with fsdp_sharding={sharding!r}; switch it off or use "
                "fsdp_sharding='optim_grads_params', which always overlaps both"
            )


def _check_pipeline(parallel: ParallelConfig, num_layers: int, uncut: range) -> None:
    pp, vpp = parallel.pipeline_model_parallel_size, parallel.virtual_pipeline_model_parallel_size
    if vpp is not None and (pp == 1 or vpp < 2):
        raise ConfigError(
            f"parallel.virtual_pipeline_model_parallel_size={vpp} needs at least 2 chunks and a "
            f"parallel.pipeline_model_parallel_size of at least 2, got {pp}; set it to None for one chunk per rank"
        )
    split = split_layers(num_layers, pp, vpp, parallel.pipeline_layers)
    if any(end in uncut[1:] for end in itertools.accumulate(split)):
        raise ConfigError(
            f"pipeline stages of {split} layers cut layers {uncut.start} to {uncut.stop - 1}, which "
            "model.routing.rejoin=fused needs on one stage; set parallel.pipeline_layers (such as "
            f"{[n for n in (uncut.start, len(uncut), num_layers - uncut.stop) if n]}), or use rejoin=unchanged"
        )


def _check_experts(parallel: ParallelConfig, num_experts: Optional[int]) -> None:
    ep = parallel.expert_model_parallel_size
    if num_experts is None:
        if ep > 1:
            raise ConfigError(
                f"parallel.expert_model_parallel_size={ep} splits experts over ranks, but the model has none; "
                "use 1 or set model.num_experts"
            )
        return
    if num_experts % ep:
        raise ConfigError(
            f"model.num_experts={num_experts} cannot be split over parallel.expert_model_parallel_size={ep} ranks; "
            f"use one of {divisors(num_experts)} or change the number of experts"
        )
    if parallel.tensor_model_parallel_size > 1 and not parallel.sequence_parallel:
        raise ConfigError(
            f"model.num_experts={num_experts} with parallel.tensor_model_parallel_size="
            f"{parallel.tensor_model_parallel_size} needs parallel.sequence_parallel=True: without it every "
            "tensor-parallel rank would send the same tokens to the experts"
        )


def check_supported(model: ModelConfig, parallel: ParallelConfig, training: TrainingConfig) -> None:
    """Check that the backbone supports the layout and the precision.

    Training, the dry run and sampling call this before anything is built.
    """
    for ability, name, size in (
        ("tensor", "tensor_model_parallel_size", parallel.tensor_model_parallel_size),
        ("pipeline", "pipeline_model_parallel_size", parallel.pipeline_model_parallel_size),
        ("context", "context_parallel_size", parallel.context_parallel_size),
        ("expert", "expert_model_parallel_size", parallel.expert_model_parallel_size),
    ):
        if size > 1:
            model.check_supports(ability, f"parallel.{name}={size}", f"parallel.{name}=1")
    if parallel.sequence_parallel:
        model.check_supports("sequence", "parallel.sequence_parallel=True", "parallel.sequence_parallel=False")
    if parallel.data_parallel == "fsdp":
        cure = "parallel.data_parallel=distributed_optimizer"
        model.check_supports("fsdp", "parallel.data_parallel=fsdp", cure)
    if training.kernels == "compile":
        _check_compiled(model, parallel, training)
    if training.linears == "overlapped":
        _check_overlapped(parallel, training.fp8)
    if training.fp8 is not None:
        _check_fp8(model, parallel, training.fp8)
    if training.precision != "fp32":
        model.check_supports(training.precision, f"training.precision={training.precision}", "training.precision=fp32")


def _check_compiled(model: ModelConfig, parallel: ParallelConfig, training: TrainingConfig) -> None:
    """Check that the layers can be compiled."""
    layers = training.recompute_layers
    for refused, why in (
        (
            not model.supports.compiled,
            f"the layers of model={type(model).__name__} have inputs that torch.compile does not support",
        ),
        (parallel.data_parallel == "fsdp", "parallel.data_parallel=fsdp gathers and frees the weights of a layer"),
        (training.linears == "transformer_engine", "training.linears=transformer_engine cannot be compiled"),
        (training.fp8 is not None, f"training.fp8={training.fp8} cannot be compiled"),
        (
            training.recompute == "selective" and layers is not None,
            f"training.recompute=selective with training.recompute_layers={layers}: the layers share their graphs",
        ),
    ):
        if refused:
            raise ConfigError(f"training.kernels=compile is not available: {why}; use training.kernels=auto")


def _check_overlapped(parallel: ParallelConfig, fp8: Optional[Fp8]) -> None:
    """Check that the linears have communication to overlap, and products of the weights' precision."""
    tp, sequence_parallel = parallel.tensor_model_parallel_size, parallel.sequence_parallel
    if tp == 1 or not sequence_parallel:
        raise ConfigError(
            "training.linears=overlapped overlaps the communication of sequence parallelism, but there is none with "
            f"parallel.tensor_model_parallel_size={tp} and sequence_parallel={sequence_parallel}; use at least 2 and "
            "True, or training.linears=auto"
        )
    if fp8 is not None:
        raise ConfigError(
            f"training.linears=overlapped cannot quantise its products by training.fp8={fp8}; use training.fp8=None, "
            "or training.linears=auto"
        )


def _check_fp8(model: ModelConfig, parallel: ParallelConfig, fp8: Fp8) -> None:
    """Check that the model has products that can be quantised equally under every layout."""
    sizes = model.megatron_sizes()
    name, experts, cp = type(model).__name__, sizes.num_moe_experts, parallel.context_parallel_size
    for refused, why in (
        (not model.supports.tensor, f"model={name} has no transformer blocks of linears that it can quantise; use"),
        (experts is not None, f"the products of model.num_experts={experts} experts are not quantised; use"),
        (
            cp > 1 and not model.supports.split_texts,
            f"parallel.context_parallel_size={cp} replicates texts or class tokens of model={name} over ranks, and a "
            "rank would quantise only its part of their gradient; use context_parallel_size=1, or",
        ),
        (
            (cp > 1 or parallel.sequence_parallel) and model.draws_in_training,
            f"parallel.context_parallel_size={cp} and sequence_parallel={parallel.sequence_parallel} pad the shorter "
            "pack of model.routing, and padding counts in scales; use context_parallel_size=1 and "
            "sequence_parallel=False, or",
        ),
    ):
        if refused:
            raise ConfigError(f"training.fp8={fp8} is not available: {why} training.fp8=None")
    for owner, blocks in _blocks(model).items():
        for size, count in (("hidden_size", blocks.hidden_size), ("ffn_hidden_size", blocks.ffn_hidden_size)):
            name = f"features of {size}{owner}" if owner else f"features of model.{size}"
            if count is not None:
                check_features(fp8, count, parallel.tensor_model_parallel_size, name)


def check_parallel(
    model: ModelConfig, parallel: ParallelConfig, training: TrainingConfig, world_size: int
) -> ParallelDims:
    """Check a layout against the model, the batch and the job."""
    parallel.validate()
    check_supported(model, parallel, training)
    sizes = model.megatron_sizes()
    for owner, blocks in _blocks(model).items():
        _check_blocks(parallel, blocks, owner)
    _check_split(parallel, "num_cross_attention_heads", getattr(model, "num_cross_attention_heads", None))
    _check_convolution(parallel, model.convolved_channels)
    if parallel.data_parallel == "fsdp":
        _check_fsdp(parallel)
    _check_pipeline(parallel, sizes.num_layers, model.uncut_layers)
    _check_experts(parallel, sizes.num_moe_experts)
    if parallel.sequence_parallel and parallel.tensor_model_parallel_size == 1:
        raise ConfigError(
            "parallel.sequence_parallel=True needs parallel.tensor_model_parallel_size of at least 2, got 1; "
            "raise it or switch sequence_parallel off"
        )
    _check_overlaps(parallel)
    dp = _replicas(parallel, world_size)
    _check_expert_ranks(parallel, sizes.num_moe_experts, dp)
    _check_instances(parallel, sizes.num_moe_experts, dp)
    micro_batch_size, micro_batches = _micro_batches(parallel, training, dp)
    return ParallelDims(
        world_size=world_size,
        data_parallel_size=dp,
        micro_batch_size=micro_batch_size,
        micro_batches=micro_batches,
        token_multiple=_token_multiple(parallel, training),
    )


def _blocks(model: ModelConfig) -> dict[str, TransformerSizes]:
    """Return the sizes of all kinds of blocks, by " of " and the setting that adds them; "" for the main ones."""
    return {"": model.megatron_sizes()} | {f" of {name}": sizes for name, sizes in model.other_blocks.items()}


def _check_blocks(parallel: ParallelConfig, sizes: TransformerSizes, owner: str) -> None:
    """Check that ranks can split the heads and MLPs of a kind of blocks; `owner` as in `_blocks`."""
    _check_split(parallel, "num_attention_heads", sizes.num_attention_heads, owner)
    _check_split(parallel, "num_query_groups", sizes.num_query_groups, owner)
    if sizes.num_moe_experts is None:  # otherwise, experts replace the MLPs
        _check_split(parallel, "ffn_hidden_size", sizes.ffn_hidden_size, owner)
    _check_context(parallel, sizes.num_query_groups or sizes.num_attention_heads, owner)


def _check_split(parallel: ParallelConfig, name: str, count: Optional[int], owner: str = "") -> None:
    tp = parallel.tensor_model_parallel_size
    if count is not None and count % tp:
        fits = [n for n in divisors(count) if n <= 64]
        raise ConfigError(
            f"{name}={count}{owner} cannot be split over tensor_model_parallel_size={tp}; "
            f"use one of {fits} or change {owner.removeprefix(' of ') or f'model.{name}'}"
        )


def _check_convolution(parallel: ParallelConfig, channels: Optional[int]) -> None:
    count, cp = (channels or 0) // parallel.tensor_model_parallel_size, parallel.context_parallel_size
    if count % cp:
        raise ConfigError(
            f"the depthwise convolution has {count} pairs of channels on a tensor-parallel rank, which cannot be split "
            f"over context_parallel_size={cp}; use a divisor of {count}, or change model.ffn_hidden_size"
        )


def _check_overlaps(parallel: ParallelConfig) -> None:
    if parallel.overlap_param_gather and parallel.data_parallel == "ddp":
        raise ConfigError(
            "parallel.overlap_param_gather=True needs data_parallel=distributed_optimizer or fsdp, got 'ddp'"
        )
    if parallel.overlap_param_gather and not parallel.overlap_grad_reduce:
        raise ConfigError("parallel.overlap_param_gather=True needs parallel.overlap_grad_reduce=True")


def _replicas(parallel: ParallelConfig, world_size: int) -> int:
    """Return the number of model replicas, which read different samples."""
    tp, pp = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
    cp = parallel.context_parallel_size
    model_ranks = tp * pp * cp
    if world_size % model_ranks:
        count = max(1, round(world_size / model_ranks)) * model_ranks
        raise ConfigError(
            f"world size {world_size} is not a multiple of TP {tp} x PP {pp} x CP {cp} = {model_ranks}; start "
            f"{count} ranks (torchrun --standalone --nproc-per-node {count} -m launch.train ...), or shrink the layout"
        )
    return world_size // model_ranks


def _check_expert_ranks(parallel: ParallelConfig, num_experts: Optional[int], dp: int) -> None:
    """Check that the experts can be split over the ranks of a pipeline stage."""
    tp, cp = parallel.tensor_model_parallel_size, parallel.context_parallel_size
    ep = parallel.expert_model_parallel_size
    if tp * cp * dp % ep:
        fits = [n for n in divisors(tp * cp * dp) if num_experts is not None and num_experts % n == 0]
        raise ConfigError(
            f"parallel.expert_model_parallel_size={ep} does not divide the TP {tp} x CP {cp} x DP {dp} = "
            f"{tp * cp * dp} ranks of a pipeline stage; use one of {fits} or start another number of ranks"
        )
    sharded_gradients = parallel.data_parallel == "fsdp" and parallel.fsdp_sharding != "optim"
    if sharded_gradients and ep > 1 and tp * cp * dp == ep and cp * dp > 1:
        raise ConfigError(
            f"parallel.fsdp_sharding={parallel.fsdp_sharding!r} cannot shard experts that are each on only one rank, "
            f"as with expert_model_parallel_size={ep} on TP {tp} x CP {cp} x DP {dp} ranks: Megatron-FSDP counts their "
            "gradients twice; use a smaller expert_model_parallel_size, fsdp_sharding='optim' or "
            "data_parallel=distributed_optimizer"
        )


def _check_instances(parallel: ParallelConfig, num_experts: Optional[int], dp: int) -> None:
    """Check that the data-parallel ranks can be split into groups that each shard a copy of the state."""
    count, cp = parallel.num_distributed_optimizer_instances, parallel.context_parallel_size
    if count == 1:
        return
    setting = f"parallel.num_distributed_optimizer_instances={count}"
    if parallel.data_parallel != "fsdp":
        raise ConfigError(
            f"{setting} needs data_parallel=fsdp, got {parallel.data_parallel!r}; use 1 or switch FSDP on"
        )
    fits = [1, *(n for n in divisors(dp * cp) if 1 < n < dp * cp)]
    if count not in fits:
        raise ConfigError(
            f"{setting} cannot split the DP {dp} x CP {cp} = {dp * cp} ranks into {count} groups of equal size with at "
            f"least 2 ranks each; use one of {fits} (data_parallel=ddp keeps a copy on every rank), or start another "
            "number of ranks"
        )
    tp, ep = parallel.tensor_model_parallel_size, parallel.expert_model_parallel_size
    if num_experts is not None and tp * ep > 1:
        raise ConfigError(
            f"{setting} cannot be used for experts with tensor_model_parallel_size={tp} and "
            f"expert_model_parallel_size={ep}: Megatron-FSDP would sum their gradients over the wrong ranks; use 1, or "
            "set both sizes to 1"
        )


def _micro_batches(parallel: ParallelConfig, training: TrainingConfig, dp: int) -> tuple[int, int]:
    """Return the samples of a micro-batch and the micro-batches of a step on one of `dp` replicas."""
    total, pp = training.global_batch_size, parallel.pipeline_model_parallel_size
    interleaved = parallel.virtual_pipeline_model_parallel_size is not None
    parts = dp * pp if interleaved else dp  # the interleaved schedule takes micro-batches by the number of its stages
    if total % parts:
        raise ConfigError(_uneven_batch(total, dp, pp, interleaved))
    size = fitting_micro_batch(training.micro_batch_size, total // parts)
    return size, total // (size * dp)


def _uneven_batch(global_batch_size: int, dp: int, pp: int, interleaved: bool) -> str:
    """Return the message for a global batch that cannot be split over replicas, with sizes that can."""
    parts = dp * pp if interleaved else dp
    below = global_batch_size // parts * parts
    sizes = f"use {f'{below} or ' if below else ''}{below + parts}"
    if interleaved:
        return (
            f"training.global_batch_size={global_batch_size} gives no multiple of pipeline_model_parallel_size={pp} "
            f"micro-batches to each of {dp} data-parallel replicas, as the interleaved schedule needs; {sizes}, or "
            "virtual_pipeline_model_parallel_size=None"
        )
    fits = max(n for n in range(1, dp) if global_batch_size % n == 0)
    return (
        f"training.global_batch_size={global_batch_size} is not a multiple of the data-parallel size {dp}; {sizes}, or "
        f"fewer ranks, such as for {fits} replica{'s' if fits > 1 else ''}"
    )


def _token_multiple(parallel: ParallelConfig, training: TrainingConfig) -> int:
    """Return the number that must divide every sample's length.

    All ranks then get the same number of tokens, and context parallelism cuts no block of quantised tokens. Transformer
    Engine quantises the tokens of each rank, and takes complete blocks only.
    """
    cp = parallel.context_parallel_size
    chunks = 2 * cp if cp > 1 and parallel.context_split == "load_balanced" else cp
    shards = parallel.tensor_model_parallel_size if parallel.sequence_parallel else 1
    block = 1 if training.fp8 is None else BLOCKS[training.fp8]
    if training.linears == "transformer_engine":
        return chunks * shards * block
    return chunks * math.lcm(shards, block if cp > 1 else 1)


def _check_context(parallel: ParallelConfig, kv_heads: int, owner: str) -> None:
    cp, comm, inner = parallel.context_parallel_size, parallel.context_comm, parallel.context_a2a_size
    heads = kv_heads // parallel.tensor_model_parallel_size  # an exchange of heads splits keys and values too
    if comm == "a2a+p2p":
        fits = [n for n in divisors(cp) if 1 < n < cp and heads % n == 0]
        if inner not in fits:
            raise ConfigError(
                f"parallel.context_comm='a2a+p2p' with context_parallel_size={cp} and {heads} heads of keys{owner} per "
                f"rank cannot have parallel.context_a2a_size={inner}; "
                + (f"use one of {fits}" if fits else "no size divides both, so use 'p2p' or 'all_gather'")
            )
    elif inner is not None:
        raise ConfigError(
            f"parallel.context_a2a_size={inner} belongs to context_comm='a2a+p2p', but context_comm is {comm!r}; "
            "set it to None"
        )
    if comm == "a2a" and heads % cp:
        raise ConfigError(
            f"parallel.context_comm='a2a' cannot split {kv_heads} heads of keys{owner} / "
            f"tensor_model_parallel_size={parallel.tensor_model_parallel_size} = {heads} heads over "
            f"context_parallel_size={cp} ranks; use one of {divisors(heads)} ranks, 'p2p' or 'all_gather'"
        )
