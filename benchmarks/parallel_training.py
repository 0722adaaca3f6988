"""One rank of a world of gloo ranks: train a tiny model under each case's layout and report global tensors.

The tests and `benchmarks.parallel_matrix` compare what two layouts report.
"""

import gc
import pickle
from collections.abc import Sequence
from dataclasses import fields
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dit.backends import process_groups
from dit.backends.process_groups import ProcessGroups
from dit.batch import PackedBatch
from dit.conditions import Conditions, per_sample, per_text_token
from dit.layout import SequenceLayout
from dit.models import BACKBONES
from dit.models.base import ModelConfig
from dit.models.dit.config import DiTConfig
from dit.objectives.flow_matching import FlowMatching
from dit.parallel.dims import ParallelConfig, check_parallel
from dit.patchify import grid_positions

if TYPE_CHECKING:
    from dit.optimizer.master_weights import MasterShard

SEED = 5
ONE_TOKEN = (1, 1, 1)
GRIDS = [(1, 4, 4), (2, 2, 4), (1, 2, 2), (1, 4, 4), (1, 2, 4), (3, 2, 2), (1, 4, 4), (1, 2, 2)]


def tiny_model(backbone: str = "dit", **changes: Any) -> ModelConfig:
    """Return a backbone of 2 or 4 layers of width 32, with some settings changed."""
    if backbone != "dit":
        module, name = BACKBONES[backbone].split(":")
        sizes = {"hidden_size": 32, "num_layers": 2, "num_attention_heads": 4, "in_channels": 4, "context_size": 12}
        config = getattr(import_module(module), name)
        known = {field.name for field in fields(config)}
        sizes = {name: size for name, size in sizes.items() if name in known}
        return config(**{**sizes, "context_dropout": 0.4, **changes})
    sizes = {"hidden_size": 32, "num_layers": 4, "num_attention_heads": 4, "in_channels": 4, "num_classes": 5}
    options = {"qk_layernorm": True, "position_embedding": "sincos_3d", "context_size": 12, "context_dropout": 0.4}
    return DiTConfig(**{**sizes, **options, **changes})


def micro_batch(
    index: int, *, packed: bool, multiple_of: int, grids: tuple[tuple[int, int, int], ...] = ()
) -> PackedBatch:
    """Two samples that differ in everything; ragged with padding when packed, else a dense batch."""
    generator = torch.Generator().manual_seed(100 + index)
    grids = grids or tuple(GRIDS[(2 * index + i) % len(GRIDS)] if packed else (1, 4, 4) for i in range(2))
    lengths = [t * h * w for t, h, w in grids]
    layout = SequenceLayout.from_lengths(
        lengths, multiple_of=multiple_of if packed else 1, total_tokens=40 if packed else 32
    )
    latents, positions = torch.zeros(layout.total_tokens, 16), torch.zeros(layout.total_tokens, 3, dtype=torch.int64)
    for start, grid, length in zip(layout.starts, grids, lengths):
        latents[start : start + length] = torch.randn(length, 16, generator=generator)
        positions[start : start + length] = grid_positions(grid)
    context_layout = SequenceLayout.from_lengths([3 + index % 3, 5])
    return PackedBatch(
        latents_TC=latents,
        positions_T3=positions,
        layout=layout,
        sample_ids_S=torch.tensor([1000 + 2 * index, 1001 + 2 * index]),
        grids=grids,
        keys=(f"{index}a", f"{index}b"),
        conditions=Conditions(
            label=per_sample(torch.tensor([index % 5, (index + 2) % 5])),
            context=per_text_token(torch.randn(context_layout.total_tokens, 12, generator=generator), context_layout),
            pooled=per_sample(torch.randn(2, 6, generator=generator)),
            fps=per_sample(torch.tensor([24.0, 8.0 + index])),
        ),
    )


def named_parameters(chunks: Sequence[nn.Module]) -> list[tuple[str, nn.Parameter]]:
    """Return the named parameters of all chunks of this rank."""
    return [pair for chunk in chunks for pair in chunk.named_parameters()]


def gathered(shard: "MasterShard", values: Tensor) -> Tensor:
    """Join values that are split like a master shard into the parameter-shaped fp32 tensor, on every rank of its group.

    The shards are joined as integers: adding zero bits changes none, not even the sign of a zero.
    """
    if shard.group is None or shard.group.size() == 1:
        return values.detach().view(shard.parameter.shape).clone()
    flat = torch.zeros(shard.parameter.numel(), dtype=torch.float32, device=values.device)
    flat[shard.start : shard.stop] = values.detach().flatten()
    dist.all_reduce(flat.view(torch.int32), group=shard.group)
    return flat.view(shard.parameter.shape)


def whole(tensor: Tensor, parameter: Tensor, groups: ProcessGroups) -> Tensor:
    """Join a parameter-shaped tensor over the tensor-parallel ranks."""
    if groups.tp.size() == 1 or not getattr(parameter, "tensor_model_parallel", False):
        return tensor.detach().clone()
    parts = [torch.empty_like(tensor) for _ in range(groups.tp.size())]
    dist.all_gather(parts, tensor.contiguous(), group=groups.tp)
    return torch.cat(parts, parameter.partition_dim)  # type: ignore[attr-defined]


def copies_differ(parameter: Tensor, groups: ProcessGroups) -> bool:
    """Tell whether any two ranks that should hold the same values do not."""
    from dit.parallel.build import is_expert

    expert = is_expert(parameter)  # type: ignore[arg-type]
    copied_over = [groups.collection.expt_dp if expert else groups.dp_cp]
    if not getattr(parameter, "tensor_model_parallel", False) and not expert:
        copied_over.append(groups.tp)
    if getattr(parameter, "pipeline_parallel", False):
        copied_over.append(groups.pp)
    for group in copied_over:
        copies = [torch.empty_like(parameter) for _ in range(group.size())]
        dist.all_gather(copies, parameter.detach().contiguous(), group=group)
        if any(not torch.equal(copies[0], c) for c in copies[1:]):
            return True
    return False


def of_all_stages(named: list[tuple[str, Tensor]], groups: ProcessGroups) -> tuple[dict[str, Tensor], list[str]]:
    """Join (name, tensor) pairs over the stages and experts; also list the names whose copies differ."""
    parts: list[Any] = [None] * groups.different_parameters.size()
    dist.all_gather_object(parts, named, group=groups.different_parameters)
    found: dict[str, Tensor] = {}
    pairs = [pair for part in parts for pair in part]
    drifted = [name for name, tensor in pairs if not torch.equal(found.setdefault(name, tensor), tensor)]
    return found, drifted


def build(case: dict[str, Any]) -> SimpleNamespace:
    """Build what a case trains: groups, model chunks, optimizer, all on this rank."""
    from dit.optimizer import master_weights as optim
    from dit.parallel.build import build_model, build_optimizer, wrap
    from dit.settings import OptimizerConfig

    parallel = ParallelConfig(**case["parallel"])
    model = tiny_model(**case.get("model", {}))
    num_micro = case.get("micro_batches", 4)
    dims = check_parallel(
        parallel,
        world_size=dist.get_world_size() if dist.is_initialized() else process_groups.world_size_from_environment(),
        num_attention_heads=4,
        num_layers=model.megatron_sizes()["num_layers"],
        micro_batch_size=1,
        global_batch_size=num_micro,
        num_experts=model.megatron_sizes().get("num_moe_experts"),
    )
    groups = process_groups.initialize(parallel)
    precision = case.get("precision", "fp32")
    chunks = build_model(model, parallel, precision, groups, SEED, **case.get("recompute", {}))
    with torch.no_grad():  # a zero-initialised network would hide most gradients
        for name, parameter in named_parameters(chunks):
            if parameter.init.kind == "constant":  # type: ignore[attr-defined]
                shape = list(parameter.shape)
                if getattr(parameter, "tensor_model_parallel", False):
                    shape[parameter.partition_dim] *= groups.tp.size()  # type: ignore[attr-defined]
                values = torch.randn(shape, generator=torch.Generator().manual_seed(sum(name.encode()))) * 0.1
                if shape != list(parameter.shape):
                    dim = parameter.partition_dim  # type: ignore[attr-defined]
                    values = values.chunk(groups.tp.size(), dim)[groups.tp.rank()]
                parameter.add_(values)
    case.get("break", lambda chunks: None)(chunks)
    wrapped = wrap(chunks, parallel, groups)
    # Gradients that are zero in exact arithmetic (a bias of keys moves no softmax) are rounding noise, which Adam would
    # blow up to full steps if its eps were below it.
    settings = OptimizerConfig(lr=1e-2, clip_grad=0.5, weight_decay=0.1, eps=1e-6)
    optimizer = build_optimizer(wrapped, settings, parallel, precision, groups)
    shards = optim.master_shards(optimizer, chunks)
    return SimpleNamespace(**locals())


def train(case: dict[str, Any]) -> dict[str, Any]:
    """Train a case's steps; return losses, gradient norms, global gradients and parameters, and copies that differ."""
    from dit.context_parallel.shard_batch import shard
    from dit.monitoring.expert_load import expert_load
    from dit.optimizer import master_weights as optim
    from dit.parallel.schedule import forward_backward
    from dit.training.step import training_forward_step

    it = build(case)
    groups, optimizer, shards = it.groups, it.optimizer, it.shards
    result: dict[str, Any] = {"losses": [], "grad_norms": []}
    for step in range(case.get("steps", 2)):
        for chunk in it.wrapped:
            chunk.zero_grad_buffer()
        optimizer.zero_grad()
        mine = range(groups.dp_rank, it.num_micro, groups.dp_size)
        multiple_of = max(4, it.dims.token_multiple)
        packs = (
            micro_batch(
                it.num_micro * step + i,
                packed=case["packed"],
                multiple_of=multiple_of,
                # Under context parallelism all ranks but the first then hold nothing but padding.
                grids=(ONE_TOKEN,) * 2 if i >= it.num_micro - case.get("one_token_packs", 0) else (),
            )
            for i in mine
        )
        batches = (shard(pack, groups.cp.rank(), groups.cp.size(), it.parallel.context_split) for pack in packs)
        forward_step = training_forward_step(FlowMatching(), it.model, SEED, step)
        out = forward_backward(forward_step, batches, it.wrapped, it.dims.micro_batches, groups)
        sums = torch.tensor([sum(float(o[name]) for o in out) for name in ("loss_sum", "tokens")], dtype=torch.float32)
        dist.all_reduce(sums, group=groups.dp_cp)
        dist.all_reduce(sums, group=groups.pp)
        result["losses"].append((sums[0] / sums[1]).item())
        result["grad_norms"].append(optim.gradient_norm(optimizer))
        if step == 0:
            named = [(s.name, whole(gathered(s, s.grad), s.parameter, groups)) for s in shards]
            result["gradients"], _ = of_all_stages(named, groups)
        optim.apply_update(optimizer, result["grad_norms"][-1], it.settings.clip_grad)
    optim.publish_masters(optimizer, it.wrapped)  # with an overlapped gather the last update waits for the next forward
    if it.parallel.data_parallel == "fsdp":
        it.wrapped[0].start_param_sync(force_sync=True)  # gather all weights, to see what a forward pass would use
    named = [(s.name, s.parameter) for s in shards]
    result["parameters"], drifted = of_all_stages([(n, whole(p.data, p, groups)) for n, p in named], groups)
    result["drifted"] = drifted + [n for n, p in named if copies_differ(p, groups)]
    case.get("then", lambda it: None)(it)
    result["expert_load"] = expert_load(it.chunks, torch.device("cpu"))
    process_groups.release()
    result["connections"] = len(list(Path("/proc/self/fd").glob("*")))
    return result


def main(folder: Path) -> None:
    """Run the cases of a folder on this rank; rank 0 leaves the results there."""
    torch.set_num_threads(1)
    cases = pickle.loads((folder / "cases.pkl").read_bytes())
    tasks = [case.get("task", "benchmarks.parallel_training:train").split(":") for case in cases]
    functions = [getattr(import_module(module), name) for module, name in tasks]
    gc.freeze()  # what is imported needs no visit by the collector, which Megatron-FSDP calls for every model
    results = []
    for case, function in zip(cases, functions):
        results.append(function(case))
        gc.collect()  # a case's models refer to its groups, which keep threads as long as they live
    if dist.get_rank() == 0:
        (folder / "results.pkl").write_bytes(pickle.dumps(results))
    process_groups.destroy()
