"""Functions that test cases run on each rank of a context-parallel world."""

from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks import parallel_training
from benchmarks.parallel_training import micro_batch, tiny_model
from dit.backends import process_groups
from dit.backends.process_groups import ProcessGroups
from dit.context_parallel.partition import ContextSplit, context_partition
from dit.context_parallel.shard_batch import on_full_packs, shard
from dit.kernels.attention import Attention
from dit.kernels.choice import Target
from dit.layout import SequenceLayout
from dit.models.base import Backbone
from dit.objectives.ddpm import DDPM
from dit.objectives.edm import EDM
from dit.objectives.flow_matching import FlowMatching
from dit.parallel.build import attention_path, build_model
from dit.parallel.dims import ParallelConfig, ParallelDims, check_parallel
from dit.sampling.generate import empty_pack
from dit.settings import SamplingConfig, TrainingConfig
from dit.step.forward_step import training_forward_step
from dit.step_checks.first_bad_tensor import Probe
from dit.training.validate import held_out_loss
from dit.verify.trial import SEED, Built
from tests.parallel.traffic import bytes_sent
from tests.support.batches import generate
from tests.unit.kernels.attention_cases import AttentionCase, Result, exact, run

LAYERS = 2


def start(case: dict) -> tuple[ParallelConfig, ParallelDims, ProcessGroups]:
    parallel = ParallelConfig(**case["parallel"])
    return parallel, check(parallel), process_groups.initialize(parallel)


def check(parallel: ParallelConfig) -> ParallelDims:
    model, world_size = tiny_model(num_layers=LAYERS), process_groups.world_size_from_environment()
    return check_parallel(model, parallel, TrainingConfig(global_batch_size=4), world_size)


def attention(case: dict) -> dict:
    """Compare context-parallel attention with exact attention over full packs, for every scheme and attention case.

    With `one_segment` each pack is one long sample, as if `cu_seqlens` were ignored.

    Returns:
        For each scheme and attention case: the relative error of the output and of each gradient, and the values
        in padding.
    """
    parallel, _, groups = start(case)
    target = Target(torch.device("cpu"), torch.float32)
    errors = {}
    for comm, split in case["schemes"]:
        attend = attention_path(replace(parallel, context_comm=comm, context_split=split), groups, target)
        found = {one.name: _errors(one, attend, split, groups.cp, case.get("one_segment")) for one in case["cases"]}
        errors[comm, split] = found
    process_groups.release()
    return errors


@cache
def exact_attention(one: AttentionCase) -> Result:
    """Return attention over full packs, which is the same for every scheme."""
    return exact(one, one.qkv())


def _errors(
    one: AttentionCase, attend: Attention, split: ContextSplit, group: Any, one_segment: bool
) -> dict[str, float]:
    true_q, true_k = one.layouts()
    used_q, used_k = true_q, true_k
    if one_segment:
        used_q = used_k = SequenceLayout.from_lengths([true_q.total_tokens])
    mine = context_partition(used_q, group.size(), split).of_rank(group.rank())
    local_q = used_q.select(mine)
    keys, local_k = (mine, local_q) if used_k is used_q else (slice(None), used_k)

    def split_attention(q: Tensor, k: Tensor, v: Tensor, *_: SequenceLayout) -> Tensor:
        # Tokens of other ranks are zeros with zero gradients here; the sum over ranks is the full output.
        return torch.zeros_like(q).index_copy(0, mine, attend(q[mine], k[keys], v[keys], local_q, local_k))

    actual, expected = vars(run(split_attention, one, one.qkv())), vars(exact_attention(one))
    summed = torch.cat([x.flatten() for x in actual.values()])
    dist.all_reduce(summed, group=group)
    parts = summed.split([x.numel() for x in actual.values()])
    found = {}
    for name, got, layout in zip(expected, parts, (true_q, true_q, true_k, true_k)):
        want = expected[name]
        got = got.view_as(want)
        found[name] = float((got - want).norm() / want.norm().clamp(min=1e-12))
        found[f"{name} padding"] = float(got[~layout.valid_T].abs().sum())
    return found


def build(parallel: ParallelConfig, groups: ProcessGroups) -> Backbone:
    """Build the tiny model and add noise to its parameters, so that zero-initialised ones affect the output."""
    (backbone,) = build_model(
        tiny_model(num_layers=LAYERS), parallel, TrainingConfig(precision="fp32", seed=SEED), groups
    )
    with torch.no_grad():
        for name, parameter in backbone.named_parameters():
            generator = torch.Generator().manual_seed(sum(name.encode()))
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.1)
    return backbone


def sample_and_validate(case: dict) -> dict:
    """Generate latents whose tokens do not divide evenly, and compute held-out losses of ragged packs, per split."""
    parallel, _, groups = start(case)
    model, found = tiny_model(), {}
    for split in case["splits"]:
        parallel = replace(parallel, context_split=split)
        multiple_of = check(parallel).token_multiple
        backbone = build(parallel, groups)
        spec = model.batch_spec(multiple_of=multiple_of)
        generator = torch.Generator().manual_seed(1)
        texts = [torch.randn(n, model.context_size, generator=generator) for n in (3, 5)]
        pack = empty_pack(spec, (1, 6, 6), 2, torch.device("cpu"), {"label": [1, 4], "context": texts})
        network = on_full_packs(backbone, groups.cp, split)
        settings = {"solver": "euler", "num_steps": 3, "guidance_scale": 2.0, "seed": 7}
        latents = generate(network, FlowMatching(), pack, spec, SamplingConfig(**settings))
        packs = (micro_batch(i, packed=True, multiple_of=max(4, multiple_of)) for i in range(3))
        share = partial(shard, cp_rank=groups.cp.rank(), cp_size=groups.cp.size(), split=split)
        losses = held_out_loss(backbone, packs, FlowMatching(), model, torch.device("cpu"), groups, share)
        methods = SamplingConfig(
            solver="heun",
            num_steps=3,
            seed=7,
            churn=[2.0, 0.0, 1e9, 1.0],
            guidance_rescale=0.5,
            guidance_interval=[0.1, 3.0],
        )
        churned = generate(network, EDM(sigma_max=5.0), pack, spec, methods)
        offset = held_out_loss(
            backbone,
            (micro_batch(i, packed=True, multiple_of=max(4, multiple_of)) for i in range(3)),
            DDPM(noise_offset=0.5),
            model,
            torch.device("cpu"),
            groups,
            share,
        )
        found[split] = {"latents": latents, "losses": losses, "churned": churned, "offset": offset}
    process_groups.release()
    return found


def worst_samples(case: dict) -> list:
    """Compute a step again, and return the samples with the largest losses of each rank."""
    worst: list[Any] = []

    def then(it: Built) -> None:
        cp, multiple_of = it.groups.cp, max(4, it.dims.token_multiple)
        packs = [micro_batch(i, packed=True, multiple_of=multiple_of) for i in range(it.dims.micro_batches)]
        batches = [shard(pack, cp.rank(), cp.size(), it.trial.parallel.context_split) for pack in packs]
        probe = Probe(it, it.trial.objective, (it.model.token_channels, it.model.in_channels))
        probe.run(training_forward_step(it.trial.objective, it.model, SEED, it.step, it.mix), batches)
        worst.extend(process_groups.gather_objects(probe.worst))

    parallel_training.train({**case, "packed": True, "then": then})
    return worst


def traffic(case: dict) -> dict:
    """Count the bytes that one rank sends over the context-parallel groups in one forward and one backward pass."""
    parallel, dims, groups = start(case)
    pack = micro_batch(0, packed=True, multiple_of=max(4, dims.token_multiple))
    part = shard(pack, groups.cp.rank(), groups.cp.size(), parallel.context_split)
    found = {}
    for comm in case["comms"]:
        backbone = build(replace(parallel, context_comm=comm), groups)
        with bytes_sent([groups.cp, *groups.collection.hcp]) as forward:
            out_TC = backbone(part.latents_TC, torch.full((2,), 0.3), part)
        with bytes_sent([groups.cp, *groups.collection.hcp]) as backward:
            out_TC.square().sum().backward()
        found[comm] = (dict(forward), dict(backward))
    process_groups.release()
    return {"tokens": pack.layout.total_tokens, **found}


def placement(case: dict) -> list[tuple[int, int, list[int]]]:
    """Return each rank's data-parallel rank, context-parallel rank and the ranks of its data-parallel group."""
    _, _, groups = start(case)
    mine = (groups.dp_rank, groups.cp.rank(), dist.get_process_group_ranks(groups.dp))
    found = process_groups.gather_objects(mine)
    process_groups.release()
    return found
