"""What a run will need, before it needs it: parameters, memory per rank and operations, without GPU, data or ranks.

The model of every pipeline stage is built on torch's meta device (shapes without memory), so the parameter, gradient
and optimizer rows are exact. The activation row is an estimate; its formula is printed under the table.
"""

import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Optional

import fiddle
import torch

from dit.errors import ConfigError
from dit.models.base import ModelConfig, Stage

if TYPE_CHECKING:
    import nemo_run as run

DEFAULT_TOKENS = 256
GIB = 2**30
# Tensors of one block that autograd keeps, in units of one token's hidden vector (width h) and MLP vector (width f).
SAVED_REPLICATED_H = 6  # x, norm(x) twice each; attention and MLP outputs before their gates
SAVED_SPLIT_H = 4  # q, k, v and the attention output, split over heads
SAVED_SPLIT_F = 2  # MLP before and after its activation, split over columns
ACTIVATION_NOTE = (
    "activations ~ micro_batch x tokens x layers x (6 h / SP + (4 h + 2 f) / TP) x bytes, without recompute"
)


@dataclass(frozen=True)
class Layout:
    """How many ranks there are and what they share."""

    world: int
    tp: int
    pp: int
    cp: int
    dp: int
    sequence_parallel: bool
    data_parallel: str


@dataclass(frozen=True)
class Memory:
    """Bytes on the fullest rank."""

    weights: int
    gradients: int
    optimizer: int
    ema: int
    activations: int

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.ema + self.activations


def layout_of(parallel: Any, world_size: Optional[int]) -> Layout:
    """Work out the data-parallel size; without a world size, take the smallest world that fits.

    Raises:
        ConfigError: the ranks do not divide into model-parallel groups.
    """
    tp, pp, cp = (
        parallel.tensor_model_parallel_size,
        parallel.pipeline_model_parallel_size,
        parallel.context_parallel_size,
    )
    for name, size in (("tensor_model", tp), ("pipeline_model", pp), ("context", cp)):
        if size < 1:
            raise ConfigError(f"parallel.{name}_parallel_size={size} must be at least 1")
    group = tp * pp * cp
    world = world_size or group
    if world % group:
        raise ConfigError(
            f"{world} ranks cannot be split into groups of {group} (tensor {tp} x pipeline {pp} x context {cp}); "
            f"use a multiple of {group} ranks, such as {-(-world // group) * group}"
        )
    return Layout(world, tp, pp, cp, world // group, parallel.sequence_parallel, parallel.data_parallel)


def stages(num_layers: int, pp: int) -> list[Stage]:
    """Return what each pipeline rank holds.

    Raises:
        ConfigError: the layers do not divide.
    """
    if num_layers % pp:
        fits = [n for n in range(1, num_layers + 1) if num_layers % n == 0]
        raise ConfigError(
            f"model.num_layers={num_layers} cannot be split over pipeline_model_parallel_size={pp}; use one of {fits}"
        )
    share = num_layers // pp
    return [Stage(range(i * share, (i + 1) * share), first=i == 0, last=i == pp - 1) for i in range(pp)]


def meta_parameters(model: ModelConfig, stage: Stage) -> dict[str, torch.nn.Parameter]:
    """Build one stage without memory and return its parameters, whole (before tensor parallelism)."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Megatron-Core tells at import which accelerators it does not find
        from megatron.core.transformer import TransformerConfig

        from dit.backends.provider import LayerProvider

        config = TransformerConfig(
            **model.megatron_sizes(),
            use_cpu_initialization=True,
            perform_initialization=False,
            params_dtype=torch.float32,
        )
    with torch.device("meta"):
        return dict(model.build(LayerProvider(config), None, stage).named_parameters())


def local_count(parameters: Iterable[torch.nn.Parameter], tp: int) -> int:
    """Return how many parameters one of `tp` tensor-parallel ranks holds.

    Raises:
        ConfigError: a split parameter does not divide.
    """
    total = 0
    for parameter in parameters:
        if getattr(parameter, "tensor_model_parallel", False):
            side = parameter.shape[parameter.partition_dim]  # type: ignore[attr-defined]
            if side % tp:
                raise ConfigError(
                    f"a side of {side} features cannot be split over tensor_model_parallel_size={tp}; "
                    "choose a size that divides it"
                )
            total += parameter.numel() // tp
        else:
            total += parameter.numel()
    return total


def num_parameters(model: ModelConfig) -> int:
    """Return the parameters of the whole model."""
    return local_count(meta_parameters(model, stages(model.megatron_sizes()["num_layers"], 1)[0]).values(), 1)


def memory(model: ModelConfig, training: Any, layout: Layout, tokens: int) -> Memory:
    """Estimate the bytes of the fullest rank.

    bf16 keeps bf16 weights, fp32 gradients, and in the optimizer an fp32 master copy with Adam's two moments; fp32
    keeps fp32 weights and gradients and the two moments. The distributed optimizer shards the optimizer over data and
    context parallel ranks, FSDP the weights and gradients too. The average (EMA) is fp32.

    Args:
        tokens: per sample.
    """
    sizes = model.megatron_sizes()
    hidden, ffn, layers = sizes["hidden_size"], sizes["ffn_hidden_size"], sizes["num_layers"]
    if sizes["num_attention_heads"] % layout.tp:
        raise ConfigError(
            f"model.num_attention_heads={sizes['num_attention_heads']} cannot be split over "
            f"tensor_model_parallel_size={layout.tp}; use one of "
            f"{[n for n in range(1, sizes['num_attention_heads'] + 1) if sizes['num_attention_heads'] % n == 0]}"
        )
    parts = stages(layers, layout.pp)
    count = max(local_count(meta_parameters(model, stage).values(), layout.tp) for stage in parts)
    half = training.precision == "bf16"
    shards = layout.dp * layout.cp
    weight_shards = shards if layout.data_parallel == "fsdp" else 1
    state_shards = 1 if layout.data_parallel == "ddp" else shards
    width = 2 if half else 4
    replicated = SAVED_REPLICATED_H * hidden / (layout.tp if layout.sequence_parallel else 1)
    split = (SAVED_SPLIT_H * hidden + SAVED_SPLIT_F * ffn) / layout.tp
    rows = training.micro_batch_size * tokens / layout.cp
    micro_batches = max(1, training.global_batch_size // (training.micro_batch_size * layout.dp))
    in_flight = min(layout.pp, micro_batches)  # 1F1B: the first stage holds one micro-batch per stage behind it
    return Memory(
        weights=count * width // weight_shards,
        gradients=count * 4 // weight_shards,
        optimizer=count * (12 if half else 8) // state_shards,
        ema=0 if training.ema_decay is None else count * 4 // state_shards,
        activations=int(rows * len(parts[0].layers) * (replicated + split) * width * in_flight),
    )


def batch_line(training: Any, layout: Layout) -> str:
    """Say how a global batch divides.

    Raises:
        ConfigError: it does not.
    """
    per_pass = training.micro_batch_size * layout.dp
    if training.global_batch_size % per_pass:
        raise ConfigError(
            f"training.global_batch_size={training.global_batch_size} is not a multiple of micro_batch_size="
            f"{training.micro_batch_size} x {layout.dp} data-parallel ranks = {per_pass}; "
            f"use {-(-training.global_batch_size // per_pass) * per_pass} or another micro batch"
        )
    count = training.global_batch_size // per_pass
    sizes = f"{count} micro-batches x {training.micro_batch_size} x {layout.dp} data-parallel ranks"
    return f"{training.global_batch_size} samples = {sizes}"


def report(task: "run.Partial", world_size: Optional[int], tokens: int = DEFAULT_TOKENS) -> str:
    """Return the plan of a run as text.

    Args:
        world_size: ranks to plan for; None for the smallest world that fits.
        tokens: per sample.

    Raises:
        ConfigError: the settings do not fit together.
    """
    from dit.training.flops import flops_per_token

    from launch.config_file import summary

    parts = {name: fiddle.build(getattr(task, name)) for name in task.__arguments__}
    model, training = parts["model"], parts["training"]
    model.validate()
    layout = layout_of(parts["parallel"], world_size)
    need = memory(model, training, layout, tokens)
    flops = flops_per_token(model, tokens)
    step = flops * tokens * training.global_batch_size
    sharing = f"tensor {layout.tp} x pipeline {layout.pp} x context {layout.cp} x data {layout.dp}"
    lines = [
        summary(task),
        "",
        f"parameters   {num_parameters(model):,}",
        f"ranks        {layout.world} = {sharing} ({layout.data_parallel})",
        f"batch        {batch_line(training, layout)}",
        f"operations   {flops / 1e9:,.3f} GFLOP per token, {step / 1e12:,.3f} TFLOP per step ({tokens} tokens per sample)",
        "",
        "memory of the fullest rank",
        *(f"  {name:<12} {value / GIB:9.3f} GiB" for name, value in need.__dict__.items()),
        f"  {'total':<12} {need.total / GIB:9.3f} GiB",
        f"  {ACTIVATION_NOTE}",
    ]
    return "\n".join(lines)
