"""Context parallelism around the network: cut a pack for this rank, and put a prediction together again.

Data come whole to every context-parallel rank. What is per token is cut (latents, positions, and with the layout all
that follows from it: noise, time, loss; conditions per latent token); what is per sample, and the text, stays whole.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from dit.batch import PackedBatch
from dit.context_parallel.partition import ContextSplit, context_rows

Network = Callable[[Tensor, Tensor, PackedBatch], Tensor]


def shard(batch: PackedBatch, cp_rank: int, cp_size: int, split: ContextSplit) -> PackedBatch:
    """Return a rank's share of a whole pack: of every sample the same number of rows.

    Raises:
        BatchError: a sample or the tail pad cannot be cut into equal parts.
    """
    if cp_size == 1:
        return batch
    shares = context_rows(batch.layout, cp_size, split)
    rows = shares.of_rank(cp_rank)
    return replace(
        batch,
        latents_TC=batch.latents_TC[rows],
        positions_T3=batch.positions_T3[rows],
        conditions=batch.conditions.select(rows),
        layout=batch.layout.select(rows, held=shares.blocks()[cp_rank]),
    )


def over_whole_packs(network: Network, group: dist.ProcessGroup, split: ContextSplit) -> Network:
    """Let a network that works on this rank's rows take and return those of the whole pack, for sampling.

    What is around it (the solver, guidance, thresholds) then runs on every rank alike and needs to know nothing. It
    keeps no gradient.
    """
    size = group.size()
    if size == 1:
        return network

    @torch.no_grad()
    def call(inputs_TC: Tensor, time_S: Tensor, batch: PackedBatch) -> Tensor:
        rows = context_rows(batch.layout, size, split)
        part = shard(batch, group.rank(), size, split)
        out_TC = network(inputs_TC[rows.of_rank(group.rank())], time_S, part)
        gathered = out_TC.new_empty(size * len(out_TC), out_TC.shape[1])
        dist.all_gather_into_tensor(gathered, out_TC.contiguous(), group=group)
        order = rows.order(0, size)
        return gathered if order is None else gathered[order[0]]

    return call
