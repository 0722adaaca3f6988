"""Plan of a run without GPU, data or ranks: parameters, memory per rank, operations.

`launch.plan` searches for the fastest layout.

Operations are counted in a forward pass on the meta device, memory in steps on fake tensors (`dit.planner`), which have
a shape but no values. Only the weights of online encoders are counted, not their activations. Memory outside of tensors
is not counted: CUDA's context, workspaces of libraries, fragmentation of the allocator.
"""

from collections.abc import Sequence
from typing import Optional

import nemo_run as run

from dit.checkpoint.base_model import start_line
from dit.checkpoint.state_files import STAGING_BYTES, checkpoint_bytes
from dit.conditions import Condition
from dit.convert.diffusers_format import export_line
from dit.encoders.weights import weight_bytes
from dit.errors import ConfigError
from dit.models.base import ModelConfig
from dit.monitoring.flops import PackFlops
from dit.parallel.build import count_parameters
from dit.parallel.dims import ParallelConfig, ParallelDims
from dit.planner.devices import DEVICES, Device, with_fp8
from dit.planner.job import Job
from dit.planner.plan import Plan, plan, planned_step
from dit.planner.time import Cluster
from dit.run_config import RunConfig
from dit.terminal import announce, counted
from dit.training.start_weights import start_remarks
from launch.config_file import built, summary
from launch.planned_sample import Sample, planned_sample

GIB = 2**30


def _described(sample: Sample) -> str:
    """Describe the sample whose operations are counted."""
    t, h, w = sample.grid
    text = "" if sample.text_tokens is None else f", {sample.text_tokens} of text"
    cure = {"": "", "shape": "; the shape is assumed: give --tokens TxHxW", "size": "; assumed: give --tokens TxHxW"}
    return f"{sample.tokens} in a sample of {t}x{h}x{w} patches{text}{cure[sample.assumed]}"


def layout_lines(config: RunConfig, dims: ParallelDims, *, packed: bool, requested: bool) -> list[str]:
    """Describe the layout of a run, and the settings that were adapted to its size."""
    parallel, training = config.parallel, config.training
    batch = f"{dims.micro_batches} micro-batches x {dims.micro_batch_size} x {dims.data_parallel_size} replicas"
    changes = config.adaptations(dims)
    return [
        f"ranks       {dims.world_size} = {_sharing(parallel, dims)}, data_parallel={parallel.named_data_parallel()}"
        f"{'' if requested else '; the fewest for this layout: give --world-size N'}",
        f"batch       {training.global_batch_size} {'packs' if packed else 'samples'} = {batch}",
        *(f"{'adapted' if line == changes[0] else '':<12}{line}" for line in changes),
    ]


def _sharing(parallel: ParallelConfig, dims: ParallelDims) -> str:
    """Return the sizes of a layout in one line."""
    pp, cp = parallel.pipeline_model_parallel_size, parallel.context_parallel_size
    pipeline, context = f"pipeline {pp} x " if pp > 1 else "", f"context {cp} x " if cp > 1 else ""
    sharing = f"tensor {parallel.tensor_model_parallel_size} x {pipeline}{context}data {dims.data_parallel_size}"
    if parallel.expert_model_parallel_size > 1:
        sharing += f" (experts over {parallel.expert_model_parallel_size} of them)"
    return sharing


def cost_lines(config: RunConfig, dims: ParallelDims, sample: Sample, device: Optional[Device] = None) -> list[str]:
    """Describe the costs of a run: parameters, operations, memory of a rank, checkpoint."""
    model, training, parallel = config.model, config.training, config.parallel
    flops = PackFlops(model, config.objective.auxiliary).training(*sample.as_pack)
    step = flops * sample.count(1) * training.global_batch_size
    shape = sample.shape(dims)
    announce(f"tracing a step: {counted(dims.world_size, 'rank')} = {_sharing(parallel, dims)}")
    planned = plan(Job(model, config.objective, config.optimizer, parallel, training, shape), dims)
    need = planned.fullest
    count = count_parameters(model)
    added = count_parameters(model, auxiliary=config.objective.auxiliary) - count
    trained = count if model.adapters is None else count_parameters(model, trained=True)
    state = checkpoint_bytes(trained + added, averages=training.num_averages)
    encoders, unknown = online_weights(config)
    activations = need.peak - need.live
    rows = {**need.state_bytes, "activations and temporaries": activations, **encoders}
    rows["total"] = need.peak + sum(encoders.values())
    width = max(map(len, rows))
    fullest = " (the fullest of the pipeline)" if parallel.pipeline_model_parallel_size > 1 else ""
    return [
        f"parameters  {count:,}"
        + ("" if trained == count else f", of which {trained:,} are trained (LoRA)")
        + (f", and {added:,} of networks that the objective adds" if added else ""),
        f"work        {flops / sample.tokens / 1e9:,.4g} GFLOP per token ({_described(sample)}), "
        f"{step / 1e12:,.4g} TFLOP per step",
        f"checkpoint  {state / GIB:,.3f} GiB on disk, {state / GIB / dims.world_size:,.3f} GiB from each rank through "
        f"{STAGING_BYTES >> 20} MiB of host memory; no device memory",
        "",
        f"memory per rank{fullest}, {training.precision}",
        *(f"  {name:<{width}}{value / GIB:10.3f} GiB" for name, value in rows.items()),
        *unknown,
        *([] if device is None else ["", _time_line(config, dims, planned, device, step)]),
    ]


def online_weights(config: RunConfig) -> tuple[dict[str, int], list[str]]:
    """Return the bytes of the weights of online encoders, by row; or a line if they are unknown."""
    encoding = config.data.online_encoding()
    if encoding is None:
        return {}, []
    try:
        sizes = weight_bytes(encoding, config.model.conditions())
    except ConfigError as error:
        return {}, [f"  without the online encoders: {error}"]
    return {f"weights of {name}": size for name, size in sizes.items()}, []


def _time_line(config: RunConfig, dims: ParallelDims, planned: Plan, device: Device, flops: float) -> str:
    """Describe the time of a step on nodes of 8 devices."""
    overlaps = config.training.linears == "overlapped"
    time = planned_step(planned, dims, Cluster(device, dims.world_size, config.parallel, overlaps))
    most = sorted(time.parts, key=lambda part: -time.parts[part])[:3]
    return (
        f"time        {time.total * 1e3:,.0f} ms per step on {dims.world_size} {device.name}, planned: "
        f"{', '.join(f'{part} {time.parts[part] / time.total:.0%}' for part in most)}; "
        f"MFU {flops / time.total / dims.world_size / device.peak_flops:.1%} (docs/planner.md)"
    )


def sample_line(model: ModelConfig, of_loss: Sequence[Condition] = ()) -> str:
    """Describe the values that a model and a loss read from a sample."""
    parts = [f"latent [{model.in_channels}, T, H, W]"]
    for condition in (*model.conditions(), *of_loss):
        name = condition.stored_as[0]
        if condition.num_classes is not None:
            value = f"{name} 0 to {condition.num_classes - 1}"
        else:
            value = name if condition.is_number else f"{name} {condition.stored_shape}"
        optional = condition.default is not None or condition.derive is not None
        parts.append(f"{value} (optional)" if optional else value)
    return f"sample      {', '.join(parts)}"


def report(
    task: run.Partial,
    world_size: Optional[int],
    tokens: Optional[Sequence[int]] = None,
    text_tokens: Optional[int] = None,
    device: Optional[str] = None,
) -> str:
    """Return the plan of a run as text.

    Args:
        tokens: of a sample, or its (t, h, w) patches; None for the value in the data settings, or 256.
        text_tokens: of its text; None for the value in the data settings, or 512.
    """
    config = built(task)
    planned_device = None if device is None else with_fp8(DEVICES[device], config.training.fp8)
    dims, _ = config.check(world_size)
    sample = planned_sample(config.data, config.model, tokens, text_tokens)
    layout = layout_lines(config, dims, packed=sample.pack is not None, requested=world_size is not None)
    layout.append(sample_line(config.model, config.objective.conditions))
    if config.checkpoint.start_from is not None:
        layout += [f"start       {start_line(config)}", *(f"{'':<12}{line}" for line in start_remarks(config))]
    layout.append(f"export      {export_line(config.model)}")
    return "\n".join([summary(task), "", *layout, *cost_lines(config, dims, sample, planned_device)])
