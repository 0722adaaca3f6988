"""What a run will need, before it needs it: parameters, memory per rank and operations, without GPU, data or ranks.

The model is built on torch's meta device (shapes without memory), so the weight, gradient, optimizer and average rows
are exact up to the padding of Megatron-Core's buffers. The activation row is an estimate: what autograd keeps of the
layers, as each backbone counts it (`ModelConfig.saved_activations`); its formula is printed.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Optional

import fiddle
from torch import nn

from dit.backends.sharding import sharding_of
from dit.errors import ConfigError
from dit.models.activations import BatchForm, Kept
from dit.models.base import ModelConfig
from dit.parallel.dims import ParallelConfig
from dit.settings import TrainingConfig
from energon_data.mock import MockData

if TYPE_CHECKING:
    import nemo_run as run

DEFAULT_TOKENS = 256
DEFAULT_TEXT_TOKENS = 512
GIB = 2**30
FORMULA = """\
activations ~ rows of a micro-batch / CP x layers in flight x (w / SP + s / TP) x bytes per number, with SP = TP if
  sequence_parallel else 1; of each token layer 0 keeps {numbers}; text rows likewise, not
  divided by CP; layers in flight = num_layers, in a pipeline this rank's own layers, once per micro-batch that waits
  for its backward pass"""
RECOMPUTE_FORMULAS = {
    "none": "",
    "selective": "\n  of that, recompute=selective keeps neither modulated norms nor the MLP's activation ({left})",
    "full": "\n  of that, recompute=full keeps the input ({left}) of each of its layers, and one such layer whole",
}


@dataclass(frozen=True)
class Sample:
    """The sample that a run is planned for.

    Attributes:
        tokens: of the sample.
        grid: its (t, h, w) patches; None where only their number is known.
        text_tokens: of its text; None for a model without text.
        pack: tokens of a micro-batch that is a pack of such samples; None for micro-batches of `micro_batch_size`.
        assumed: nothing says how many tokens a sample has.
    """

    tokens: int
    grid: Optional[tuple[int, int, int]] = None
    text_tokens: Optional[int] = None
    pack: Optional[int] = None
    assumed: bool = False

    def rows(self, micro_batch_size: int) -> int:
        """Return the tokens of a micro-batch."""
        return micro_batch_size * max(self.tokens, self.pack or 0)

    def text_rows(self, micro_batch_size: int) -> int:
        """Return the text tokens of a micro-batch."""
        return self.rows(micro_batch_size) // self.tokens * (self.text_tokens or 0)

    def form(self, training: TrainingConfig, parallel: ParallelConfig) -> BatchForm:
        """Say how samples lie in a micro-batch."""
        packed = self.pack is not None  # the pack that needs most has several samples, also if one can fill it
        spread = parallel.sequence_parallel or parallel.context_parallel_size > 1
        several = packed or training.micro_batch_size > 1
        ragged = packed or (several and spread)
        return BatchForm(half=training.precision == "bf16", several=several, ragged=ragged)


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
        dim = sharding_of(parameter).split_dim
        side = tp if dim is None else parameter.shape[dim]
        if side % tp:
            raise ConfigError(
                f"a weight with {side} features cannot be split over parallel.tensor_model_parallel_size={tp}; "
                "choose one that divides the model's sizes"
            )
        total += parameter.numel() // (1 if dim is None else tp)
    return total


def estimate_memory(
    model: ModelConfig, training: TrainingConfig, parallel: ParallelConfig, data_parallel_size: int, sample: Sample
) -> Memory:
    """Add up what one rank holds: of a pipeline's ranks, the one that needs most.

    bf16 keeps bf16 weights, fp32 gradients, and in the optimizer an fp32 master copy with Adam's two moments; fp32
    keeps fp32 weights and gradients and the two moments. The distributed optimizer spreads its states and the fp32
    average over the ranks that hold the same parameters; FSDP may spread gradients and weights, too (at any time it
    also holds a few layers whole). Activations are those of the layers alone.
    """
    ranks = [
        _rank_memory(model, training, parallel, data_parallel_size, sample, pp_rank)
        for pp_rank in range(parallel.pipeline_model_parallel_size)
    ]
    return max(ranks, key=lambda memory: memory.total)


def _rank_memory(
    model: ModelConfig,
    training: TrainingConfig,
    parallel: ParallelConfig,
    data_parallel_size: int,
    sample: Sample,
    pp_rank: int,
) -> Memory:
    from dit.parallel.build import build_on_meta
    from dit.parallel.pipeline import stages

    tp, pp, cp, ep = (
        parallel.tensor_model_parallel_size,
        parallel.pipeline_model_parallel_size,
        parallel.context_parallel_size,
        parallel.expert_model_parallel_size,
    )
    cut = (parallel.virtual_pipeline_model_parallel_size, parallel.pipeline_layers)
    num_layers = model.megatron_sizes().num_layers
    chunks = [build_on_meta(model, stage) for stage in stages(num_layers, pp, pp_rank, *cut)]
    parameters = [p for chunk in chunks for p in chunk.parameters()]
    dense = local_parameters((p for p in parameters if not sharding_of(p).expert), tp)
    experts = sum(p.numel() for p in parameters if sharding_of(p).expert) // ep
    count = dense + experts
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

    return Memory(
        weights=held("params", 2 if half else 4),
        gradients=held("grads", 4),
        optimizer=held("optim", 12 if half else 8),
        average=0 if training.ema_decay is None else held("optim", 4),
        activations=_activations(model, training, parallel, data_parallel_size, sample, pp_rank),
    )


def _activations(
    model: ModelConfig,
    training: TrainingConfig,
    parallel: ParallelConfig,
    data_parallel_size: int,
    sample: Sample,
    pp_rank: int,
) -> int:
    """Return the bytes that the layers of one pipeline rank keep for the backward pass, at the fullest moment."""
    from dit.parallel.pipeline import layers_in_flight, split_layers

    form, size = sample.form(training, parallel), training.micro_batch_size
    rows, text_rows = sample.rows(size) / parallel.context_parallel_size, sample.text_rows(size)
    pp, tp = parallel.pipeline_model_parallel_size, parallel.tensor_model_parallel_size
    sp = tp if parallel.sequence_parallel else 1

    def layer_bytes(layer: int, recompute: str) -> float:
        saved = model.saved_activations(layer, form)
        token, text = (_numbers(kept, recompute, tp, sp) for kept in (saved.token, saved.text))
        return (rows * token + text_rows * text) * (2 if form.half else 4)

    num_layers = model.megatron_sizes().num_layers
    split = split_layers(num_layers, pp, parallel.virtual_pipeline_model_parallel_size, parallel.pipeline_layers)
    first, per_stage, redone = 0, [], [0.0]
    for stage, count in enumerate(split):
        again = min(count, training.recompute_layers or count) if training.recompute != "none" else 0
        kept = [layer_bytes(first + i, training.recompute if i < again else "none") for i in range(count)]
        per_stage.append(sum(kept))
        if training.recompute == "full" and stage % pp == pp_rank:
            redone += [layer_bytes(first + i, "none") for i in range(again)]
        first += count
    micro_batches = training.global_batch_size // (size * data_parallel_size)
    return int(layers_in_flight(per_stage, pp, pp_rank, micro_batches) + max(redone))


def _numbers(kept: Kept, recompute: str, tp: int, sp: int) -> float:
    """Return the numbers that one rank keeps of a row in a layer."""
    if recompute == "full":
        return kept.input / sp
    if recompute == "selective":
        return (kept.whole - kept.cheap_whole) / sp + (kept.split - kept.cheap_split) / tp
    return kept.whole / sp + kept.split / tp


def planned_sample(
    task: "run.Partial", model: ModelConfig, tokens: Optional[Sequence[int]] = None, text_tokens: Optional[int] = None
) -> Sample:
    """Return the sample of the data settings: the largest synthetic one, or the longest that is read.

    Args:
        tokens: of a sample, or its (t, h, w) patches, instead.
        text_tokens: of its text, instead.
    """
    data = fiddle.build(task.data)
    pack = getattr(data, "max_tokens_per_pack", None)
    if model.context_size is None:
        text_tokens = None
    elif text_tokens is None:
        known = data.text_tokens if isinstance(data, MockData) else getattr(data, "max_text_tokens", None)
        text_tokens = known or DEFAULT_TEXT_TOKENS
    assumed = False
    if tokens is None and isinstance(data, MockData):
        patch_t, patch_s = model.patch_temporal, model.patch_spatial
        tokens = max(((t // patch_t, h // patch_s, w // patch_s) for t, h, w in data.sizes()), key=math.prod)
    elif tokens is None:
        limit = getattr(data, "max_tokens_per_sample", None) or pack
        tokens, assumed = (limit or DEFAULT_TOKENS,), limit is None
    grid = (tokens[0], tokens[1], tokens[2]) if len(tokens) == 3 else None
    return Sample(math.prod(tokens), grid, text_tokens, pack, assumed)


def _described(sample: Sample, model: ModelConfig) -> str:
    """Say for which sample the operations are counted."""
    text = "" if sample.text_tokens is None else f", {sample.text_tokens} of text"
    if sample.assumed:
        text += "; assumed: give --tokens N"
    if sample.grid is None and model.unattended_flops([(2, 2, 2)]):
        text += "; full attention is counted: for that in frames and columns give --tokens TxHxW patches"
    return f"{sample.tokens} to a sample{text}"


def _formula(model: ModelConfig, training: TrainingConfig, form: BatchForm) -> str:
    """Return the activation row's formula with the numbers of this model."""
    kept = model.saved_activations(0, form).token
    numbers = f"w = {kept.whole:,.0f} and s = {kept.split:,.0f} numbers"
    left = f"w less {kept.cheap_whole:,.0f}, s less {kept.cheap_split:,.0f}"
    if training.recompute == "full":
        left = f"{kept.input:,.0f} of w"
    return FORMULA.format(numbers=numbers) + RECOMPUTE_FORMULAS[training.recompute].format(left=left)


def report(
    task: "run.Partial",
    world_size: Optional[int],
    tokens: Optional[Sequence[int]] = None,
    text_tokens: Optional[int] = None,
) -> str:
    """Return the plan of a run as text.

    Args:
        world_size: ranks to plan for; None for the smallest world that fits the layout.
        tokens: of a sample, or its (t, h, w) patches; None for what the data settings say, or 256.
        text_tokens: of its text; None for what the data settings say, or 512.

    Raises:
        ConfigError: the settings do not fit together.
    """
    from dit.checkpoint.state_files import STAGING_BYTES, checkpoint_bytes
    from dit.monitoring.flops import flops_per_token
    from dit.parallel.build import count_parameters
    from launch.config_file import built, summary

    config = built(task)
    dims, _ = config.check(world_size)
    model, training, parallel = config.model, config.training, config.parallel
    changes = config.adaptations(dims)
    training = replace(training, micro_batch_size=dims.micro_batch_size)
    sample = planned_sample(task, model, tokens, text_tokens)
    need = estimate_memory(model, training, parallel, dims.data_parallel_size, sample)
    flops = flops_per_token(model, sample.tokens, sample.text_tokens, grid=sample.grid)
    step = flops * sample.rows(1) * training.global_batch_size
    pp = parallel.pipeline_model_parallel_size
    pipeline = f"pipeline {pp} x " if pp > 1 else ""
    cp = parallel.context_parallel_size
    context = f"context {cp} x " if cp > 1 else ""
    sharing = f"tensor {parallel.tensor_model_parallel_size} x {pipeline}{context}data {dims.data_parallel_size}"
    if parallel.expert_model_parallel_size > 1:
        sharing += f" (experts over {parallel.expert_model_parallel_size} of them)"
    batch = f"{dims.micro_batches} micro-batches x {dims.micro_batch_size} x {dims.data_parallel_size} replicas"
    count = count_parameters(model)
    state = checkpoint_bytes(count, averaged=training.ema_decay is not None)
    lines = [
        summary(task),
        "",
        f"parameters  {count:,}",
        f"ranks       {dims.world_size} = {sharing}, data_parallel={parallel.data_parallel}"
        f"{'' if world_size else '; the fewest for this layout: give --world-size N'}",
        f"batch       {training.global_batch_size} {'samples' if sample.pack is None else 'packs'} = {batch}",
        f"work        {flops / 1e9:,.4g} GFLOP per token ({_described(sample, model)}), "
        f"{step / 1e12:,.4g} TFLOP per step",
        f"checkpoint  {state / GIB:,.3f} GiB on disk, {state / GIB / dims.world_size:,.3f} GiB from each rank through "
        f"{STAGING_BYTES >> 20} MiB of host memory; no device memory",
        *(f"{'adapted' if line == changes[0] else '':<12}{line}" for line in changes),
        "",
        f"memory per rank{' (the fullest of the pipeline)' if pp > 1 else ''}, {training.precision}",
        *(f"  {name:<12}{value / GIB:10.3f} GiB" for name, value in asdict(need).items()),
        f"  {'total':<12}{need.total / GIB:10.3f} GiB",
        f"  {_formula(model, training, sample.form(training, parallel))}",
    ]
    return "\n".join(lines)
