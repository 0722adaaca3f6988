"""One rank of a test world: train a tiny model under each case's layout and report global tensors."""

import pickle
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from dit.backends import process_groups
from dit.batch import PackedBatch, SequenceLayout
from dit.models.dit.config import DiTConfig
from dit.objectives.flow_matching import FlowMatching
from dit.parallel.dims import ParallelConfig, check_parallel
from dit.patchify import grid_positions

SEED = 5
GRIDS = [(1, 4, 4), (2, 2, 4), (1, 2, 2), (1, 4, 4), (1, 2, 4), (3, 2, 2), (1, 4, 4), (1, 2, 2)]


def tiny_model(**changes) -> DiTConfig:
    sizes = {"hidden_size": 32, "num_layers": 4, "num_attention_heads": 4, "in_channels": 4, "num_classes": 5}
    options = {"qk_layernorm": True, "position_embedding": "sincos_3d", "context_size": 12, "context_dropout": 0.4}
    return DiTConfig(**sizes, **{**options, **changes})


def micro_batch(index: int, *, packed: bool, multiple_of: int) -> PackedBatch:
    """Two samples that differ in everything; ragged with padding when packed, else a dense batch."""
    generator = torch.Generator().manual_seed(100 + index)
    grids = tuple(GRIDS[(2 * index + i) % len(GRIDS)] if packed else (1, 4, 4) for i in range(2))
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
        labels_S=torch.tensor([index % 5, (index + 2) % 5]),
        context_KD=torch.randn(context_layout.total_tokens, 12, generator=generator),
        context_layout=context_layout,
    )


def whole(tensor: torch.Tensor, parameter: torch.nn.Parameter, groups) -> torch.Tensor:
    """Join a parameter-shaped tensor over the tensor-parallel ranks."""
    if groups.tp.size() == 1 or not getattr(parameter, "tensor_model_parallel", False):
        return tensor.detach().clone()
    parts = [torch.empty_like(tensor) for _ in range(groups.tp.size())]
    dist.all_gather(parts, tensor.contiguous(), group=groups.tp)
    return torch.cat(parts, parameter.partition_dim)


def of_all_ranks(named: dict[str, torch.Tensor], groups) -> dict[str, torch.Tensor]:
    """Join what ranks with different parameters (experts, stages) hold; copies of one name must be equal."""
    parts: list = [None] * groups.different_parameters.size()
    dist.all_gather_object(parts, named, group=groups.different_parameters)
    found: dict[str, torch.Tensor] = {}
    for name, tensor in (item for part in parts for item in part.items()):
        assert torch.equal(found.setdefault(name, tensor), tensor), f"copies of {name} differ"
    return found


def copies_differ(parameter: torch.nn.Parameter, groups) -> bool:
    """Tell whether any two ranks that should hold the same values do not."""
    from dit.parallel.parallelize import is_expert

    group = groups.dp_cp if getattr(parameter, "tensor_model_parallel", False) else dist.group.WORLD
    group = groups.collection.expt_dp if is_expert(parameter) else group
    copies = [torch.empty_like(parameter) for _ in range(group.size())]
    dist.all_gather(copies, parameter.detach().contiguous(), group=group)
    return any(not torch.equal(copies[0], c) for c in copies[1:])


def train(case: dict) -> dict:
    from megatron.core.pipeline_parallel import get_forward_backward_func

    from dit.parallel.parallelize import build_model, build_optimizer, wrap
    from dit.training import optim
    from dit.training.expert_load import expert_load
    from dit.training.settings import OptimizerConfig
    from dit.training.step import training_forward_step

    parallel = ParallelConfig(**case["parallel"])
    model = tiny_model(**case.get("model", {}))
    packed, num_micro = case["packed"], 4
    dims = check_parallel(
        parallel,
        world_size=dist.get_world_size() if dist.is_initialized() else process_groups.world_size_from_environment(),
        num_attention_heads=4,
        micro_batch_size=1,
        global_batch_size=num_micro,
        num_experts=model.num_experts,
    )
    groups = process_groups.initialize(parallel)
    backbone = build_model(model, parallel, "fp32", groups, SEED)
    with torch.no_grad():  # a zero-initialised network would hide most gradients
        for name, parameter in backbone.named_parameters():
            if parameter.init.kind == "constant":
                shape = list(parameter.shape)
                if getattr(parameter, "tensor_model_parallel", False):
                    shape[parameter.partition_dim] *= groups.tp.size()
                values = torch.randn(shape, generator=torch.Generator().manual_seed(sum(name.encode()))) * 0.1
                if shape != list(parameter.shape):
                    values = values.chunk(groups.tp.size(), parameter.partition_dim)[groups.tp.rank()]
                parameter.add_(values)
    wrapped = wrap(backbone, parallel, groups)
    settings = OptimizerConfig(lr=1e-2, clip_grad=0.5, weight_decay=0.1)
    optimizer = build_optimizer(wrapped, settings, parallel, "fp32", groups)
    shards = optim.master_shards(optimizer, backbone)
    run = get_forward_backward_func()
    result: dict = {"losses": [], "grad_norms": []}
    for step in range(3):
        wrapped.zero_grad_buffer()
        optimizer.zero_grad()
        mine = range(groups.dp_rank, num_micro, groups.dp_size)
        batches = (micro_batch(4 * step + i, packed=packed, multiple_of=4) for i in mine)
        out = run(
            forward_step_func=training_forward_step(FlowMatching(), model, SEED, step),
            data_iterator=batches,
            model=wrapped,
            num_microbatches=dims.micro_batches,
            seq_length=40,
            micro_batch_size=1,
            pg_collection=groups.collection,
        )
        sums = torch.stack([sum(o["loss_sum"] for o in out), sum(o["tokens"] for o in out)])
        dist.all_reduce(sums, group=groups.dp_cp)
        result["losses"].append((sums[0] / sums[1]).item())
        result["grad_norms"].append(optim.gradient_norm(optimizer))
        if step == 0:
            gradients = {
                s.name: whole(s.gather(s.main.grad if s.main.numel() else s.main), s.parameter, groups) for s in shards
            }
            result["gradients"] = of_all_ranks(gradients, groups)
        optim.apply_update(optimizer, result["grad_norms"][-1], settings.clip_grad)
    optim.publish_masters(optimizer, wrapped)  # with an overlapped gather the last update waits for the next forward
    parameters = {n: whole(p.data, p, groups) for n, p in backbone.named_parameters()}
    result["parameters"] = of_all_ranks(parameters, groups)
    result["expert_load"] = expert_load(backbone, torch.device("cpu"))
    result["drifted"] = [n for n, p in backbone.named_parameters() if copies_differ(p, groups)]
    process_groups.release()
    return result


def main(folder: Path) -> None:
    cases = pickle.loads((folder / "cases.pkl").read_bytes())
    results = [train(case) for case in cases]
    if dist.get_rank() == 0:
        (folder / "results.pkl").write_bytes(pickle.dumps(results))
    process_groups.destroy()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
