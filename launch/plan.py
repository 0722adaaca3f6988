"""What a run will need, before it needs it: parameters, memory per rank and operations, without GPU, data or ranks.

The model is built on torch's meta device (shapes without memory), so the weight, gradient, optimizer and average rows
are exact up to the padding of Megatron-Core's buffers. The activation row is an estimate; its formula is printed.
"""

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Optional

import fiddle
from torch import nn

from dit.errors import ConfigError
from dit.models.base import ModelConfig
from dit.models.experts import ExpertOptions
from dit.parallel.dims import ParallelConfig, check_parallel
from dit.training.settings import TrainingConfig
from energon_data.mock import MockData

if TYPE_CHECKING:
    import nemo_run as run

DEFAULT_TOKENS = 256
GIB = 2**30
# Tensors of one block that autograd keeps per token, in widths of the hidden (h) and of the MLP vector (f).
SAVED_WHOLE_H = 6  # input and modulated norm of both sub-layers, and both outputs before their gates
SAVED_SPLIT_H = 4  # q, k, v and the attention output, split over heads
SAVED_SPLIT_F = 2  # MLP before and after its activation, split over columns
CHEAP_WHOLE_H, CHEAP_SPLIT_F = 2, 1  # of these: modulated norms and the activation, which selective recompute drops
SAVED_ROUTED_H = 2  # input and output of an expert, for each expert that a token meets
FORMULA = (
    "activations ~ micro_batch_size x tokens / CP x layers in flight x (6 h / SP + (4 h + 2 f) / TP) x bytes per\n"
    "  number, with hidden_size h, ffn size f, SP = TP if sequence_parallel else 1; layers in flight = num_layers, in\n"
    "  a pipeline this rank's own layers, once per micro-batch that waits for its backward pass"
)
RECOMPUTE_FORMULAS = {
    "none": "",
    "selective": "\n  of that, recompute=selective keeps neither 2 h / SP nor f / TP of each layer it is asked for",
    "full": "\n  of that, recompute=full keeps h / SP of each layer it is asked for, and one such layer whole",
}
EXPERTS_FORMULA = "\n  with experts, 2 f counts for each that a token meets on average, with 2 h more"


@dataclass(frozen=True)
class Memory:
    """Bytes on one rank."""

    weights: int
    gradients: int
    optimizer: int
    average: int
    activations: int

    @property
    def total(self) -> int:
        return sum(asdict(self).values())


def local_parameters(parameters: Iterable[nn.Parameter], tp: int) -> int:
    """Count the parameters that one of `tp` tensor-parallel ranks holds.

    Raises:
        ConfigError: a split parameter does not divide.
    """
    total = 0
    for parameter in parameters:
        split = getattr(parameter, "tensor_model_parallel", False)
        side = parameter.shape[parameter.partition_dim] if split else tp  # type: ignore[attr-defined]
        if side % tp:
            raise ConfigError(
                f"a weight with {side} features cannot be split over parallel.tensor_model_parallel_size={tp}; "
                "choose one that divides the model's sizes"
            )
        total += parameter.numel() // (tp if split else 1)
    return total


def estimate_memory(
    model: ModelConfig, training: TrainingConfig, parallel: ParallelConfig, data_parallel_size: int, tokens: int
) -> Memory:
    """Add up what one rank holds: of a pipeline's ranks, the one that needs most.

    bf16 keeps bf16 weights, fp32 gradients, and in the optimizer an fp32 master copy with Adam's two moments; fp32
    keeps fp32 weights and gradients and the two moments. The distributed optimizer spreads its states and the fp32
    average over the ranks that hold the same parameters; FSDP may spread gradients and weights, too (at any time it
    also holds a few layers whole).

    Args:
        tokens: per sample.
    """
    ranks = [
        _rank_memory(model, training, parallel, data_parallel_size, tokens, pp_rank)
        for pp_rank in range(parallel.pipeline_model_parallel_size)
    ]
    return max(ranks, key=lambda memory: memory.total)


def _rank_memory(
    model: ModelConfig,
    training: TrainingConfig,
    parallel: ParallelConfig,
    data_parallel_size: int,
    tokens: int,
    pp_rank: int,
) -> Memory:
    from dit.parallel.parallelize import build_on_meta, is_expert
    from dit.parallel.pipeline import layers_in_flight, split_layers, stages

    tp, pp, cp, ep = (
        parallel.tensor_model_parallel_size,
        parallel.pipeline_model_parallel_size,
        parallel.context_parallel_size,
        parallel.expert_model_parallel_size,
    )
    cut = (parallel.virtual_pipeline_model_parallel_size, parallel.pipeline_layers)
    num_layers = model.megatron_sizes()["num_layers"]
    chunks = [build_on_meta(model, stage) for stage in stages(num_layers, pp, pp_rank, *cut)]
    parameters = [p for chunk in chunks for p in chunk.parameters()]
    dense = local_parameters((p for p in parameters if not is_expert(p)), tp)
    experts = sum(p.numel() for p in parameters if is_expert(p)) // ep
    count = dense + experts
    micro_batches = training.global_batch_size // (training.micro_batch_size * data_parallel_size)
    split = split_layers(num_layers, pp, *cut)
    again = [min(count, training.recompute_layers or count) * (training.recompute != "none") for count in split]
    layers, recomputed = (layers_in_flight(counts, pp, pp_rank, micro_batches) for counts in (split, again))
    half = training.precision == "bf16"
    spread_parts = {
        "ddp": (),
        "distributed_optimizer": ("optim",),
        "fsdp": tuple(parallel.fsdp_sharding.split("_")),
    }[parallel.data_parallel]
    expert_copies = data_parallel_size * tp * cp // ep

    def held(part: str, size: int) -> int:
        """Return the bytes of a part that takes `size` per parameter; some are spread over the ranks that share it."""
        if part not in spread_parts:
            return count * size
        return dense * size // (data_parallel_size * cp) + experts * size // expert_copies

    sizes = model.megatron_sizes()
    h, f = sizes["hidden_size"], sizes["ffn_hidden_size"]
    shares = tp if parallel.sequence_parallel else 1
    inner, routed = f, 0.0
    if isinstance(model, ExpertOptions) and model.num_experts is not None:
        met = model.moe_capacity_factor if model.moe_router == "expert_choice" else model.moe_top_k
        inner, routed = met * sizes["moe_ffn_hidden_size"], met * SAVED_ROUTED_H * h
    per_token = SAVED_WHOLE_H * h / shares + (SAVED_SPLIT_H * h + SAVED_SPLIT_F * inner + routed) / tp
    kept = layers * per_token
    if training.recompute == "selective":
        kept -= recomputed * (CHEAP_WHOLE_H * h / shares + CHEAP_SPLIT_F * inner / tp)
    elif recomputed:
        kept += recomputed * (h / shares - per_token) + per_token
    return Memory(
        weights=held("params", 2 if half else 4),
        gradients=held("grads", 4),
        optimizer=held("optim", 12 if half else 8),
        average=0 if training.ema_decay is None else held("optim", 4),
        activations=int(training.micro_batch_size * tokens / cp * kept * (2 if half else 4)),
    )


def planned_sample(task: "run.Partial", model: ModelConfig) -> tuple[int, Optional[tuple[int, int, int]]]:
    """Return the tokens and the (t, h, w) patches of the largest made-up sample; of real data nothing is known here."""
    data = fiddle.build(task.data)
    if not isinstance(data, MockData):
        return DEFAULT_TOKENS, None
    patch_t, patch_s = model.patch_temporal, model.patch_spatial
    grid = max(((t // patch_t, h // patch_s, w // patch_s) for t, h, w in data.sizes()), key=math.prod)
    return math.prod(grid), grid


def report(task: "run.Partial", world_size: Optional[int], tokens: Optional[int] = None) -> str:
    """Return the plan of a run as text.

    Args:
        world_size: ranks to plan for; None for the smallest world that fits the layout.
        tokens: per sample; None for those of the largest made-up sample, or 256.

    Raises:
        ConfigError: the settings do not fit together.
    """
    from dit.parallel.parallelize import count_parameters
    from dit.training.flops import flops_per_token
    from launch.config_file import summary

    parts: dict[str, Any] = {name: fiddle.build(getattr(task, name)) for name in ("model", "training", "parallel")}
    model, training, parallel = parts["model"], parts["training"], parts["parallel"]
    model.validate()
    per_stage = parallel.tensor_model_parallel_size * parallel.context_parallel_size
    smallest = math.lcm(per_stage, parallel.expert_model_parallel_size) * parallel.pipeline_model_parallel_size
    dims = check_parallel(
        parallel,
        world_size=world_size or smallest,
        num_attention_heads=model.megatron_sizes()["num_attention_heads"],
        num_layers=model.megatron_sizes()["num_layers"],
        micro_batch_size=training.micro_batch_size,
        global_batch_size=training.global_batch_size,
        num_experts=model.megatron_sizes().get("num_moe_experts"),
        num_query_groups=model.megatron_sizes().get("num_query_groups"),
    )
    tokens, grid = planned_sample(task, model) if tokens is None else (tokens, None)
    need = estimate_memory(model, training, parallel, dims.data_parallel_size, tokens)
    flops = flops_per_token(model, tokens, grid=grid)
    step = flops * tokens * training.global_batch_size
    pp = parallel.pipeline_model_parallel_size
    pipeline = f"pipeline {pp} x " if pp > 1 else ""
    cp = parallel.context_parallel_size
    context = f"context {cp} x " if cp > 1 else ""
    sharing = f"tensor {parallel.tensor_model_parallel_size} x {pipeline}{context}data {dims.data_parallel_size}"
    if parallel.expert_model_parallel_size > 1:
        sharing += f" (experts over {parallel.expert_model_parallel_size} of them)"
    batch = f"{dims.micro_batches} micro-batches x {training.micro_batch_size} x {dims.data_parallel_size} replicas"
    lines = [
        summary(task),
        "",
        f"parameters  {count_parameters(model):,}",
        f"ranks       {dims.world_size} = {sharing}, data_parallel={parallel.data_parallel}",
        f"batch       {training.global_batch_size} samples = {batch}",
        f"work        {flops / 1e9:,.4g} GFLOP per token ({tokens} to a sample), {step / 1e12:,.4g} TFLOP per step",
        "",
        f"memory per rank{' (the fullest of the pipeline)' if pp > 1 else ''}, {training.precision}",
        *(f"  {name:<12}{value / GIB:10.3f} GiB" for name, value in asdict(need).items()),
        f"  {'total':<12}{need.total / GIB:10.3f} GiB",
        f"  {FORMULA}{EXPERTS_FORMULA if 'num_moe_experts' in model.megatron_sizes() else ''}"
        f"{RECOMPUTE_FORMULAS[training.recompute]}",
    ]
    return "\n".join(lines)
