"""Traffic of ST-DiT on one rank; test cases name this function."""

from dataclasses import replace
from math import prod

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.parallel_training import tiny_model
from dit.backends import process_groups
from dit.context_parallel.shard_batch import shard
from dit.layout import SequenceLayout
from dit.parallel.build import build_model
from dit.settings import TrainingConfig
from dit.verify.trial import SEED
from tests.parallel.context_worker import start
from tests.parallel.traffic import bytes_sent
from tests.support.batches import pack_of


def traffic(case: dict) -> dict:
    """Count the bytes that all ranks send over their context-parallel groups in one forward and one backward pass.

    Returns:
        For every (kind, segment scheme, split, name of a pack): (forward, backward), each as the
        maximum over ranks and the sum over ranks.
    """
    parallel, dims, groups = start(case)
    found = {}
    for key in case["keys"]:
        kind, comm, split, name = key
        settings = replace(parallel, spatial_temporal_comm=comm, context_split=split)
        model = tiny_model("stdit", num_layers=1, layer_pattern=[kind], qk_layernorm=False)
        (backbone,) = build_model(model, settings, TrainingConfig(precision="fp32", seed=SEED), groups)
        with torch.no_grad():
            for parameter in backbone.parameters():
                nn.init.normal_(parameter, 0.0, 0.1)
        grids = case["packs"][name]
        layout = SequenceLayout.from_lengths([prod(grid) for grid in grids], multiple_of=2 * dims.token_multiple)
        pack = pack_of(layout, torch.randn(layout.total_tokens, 16), grids)
        part = shard(pack, groups.cp.rank(), groups.cp.size(), split)
        with bytes_sent([groups.cp]) as forward:
            out_TC = backbone(part.latents_TC, torch.full((len(grids),), 0.3), part)
        with bytes_sent([groups.cp]) as backward:
            out_TC[part.layout.valid_T].square().sum().backward()
        counts = torch.tensor([sum(forward.values()), sum(backward.values())], dtype=torch.int64)
        everywhere = [torch.empty_like(counts) for _ in range(groups.world_size)]
        dist.all_gather(everywhere, counts)
        ranks = torch.stack(everywhere)
        found[key] = tuple(zip(ranks.max(0).values.tolist(), ranks.sum(0).tolist()))
    process_groups.release()
    return found
