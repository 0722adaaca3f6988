"""Context parallelism around the network: select this rank's tokens of a pack, and gather a prediction.

Every context-parallel rank reads the full pack. Per-token tensors are split: latents, positions, conditions per latent
token, and tensors computed from the layout (noise, time, loss). Per-sample tensors and texts are replicated.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from dit.batch import PackedBatch
from dit.context_parallel.partition import ContextSplit, context_partition

Network = Callable[[Tensor, Tensor, PackedBatch], Tensor]


def shard(batch: PackedBatch, cp_rank: int, cp_size: int, split: ContextSplit) -> PackedBatch:
    """Return the local part of a full pack, with the same number of tokens of every sample, padding included."""
    if cp_size == 1:
        return batch
    partition = context_partition(batch.layout, cp_size, split)
    indices_T = partition.of_rank(cp_rank)
    return replace(
        batch,
        latents_TC=batch.latents_TC[indices_T],
        positions_T3=batch.positions_T3[indices_T],
        conditions=batch.conditions.select(indices_T),
        # A copy, because the partition is cached, and a graph overwrites the tensors of its packs.
        layout=batch.layout.select(partition.indices_RT[cp_rank].clone(), local=partition.blocks()[cp_rank].plain),
    )


def on_full_packs(network: Network, group: dist.ProcessGroup, split: ContextSplit) -> Network:
    """Wrap a network on local tokens so that its input and output are the tokens of full packs, for sampling.

    Solver, guidance and thresholding then run identically on every rank, as without context parallelism. The wrapped
    network computes no gradients.
    """
    size = group.size()
    if size == 1:
        return network

    @torch.no_grad()
    def call(inputs_TC: Tensor, time_S: Tensor, batch: PackedBatch) -> Tensor:
        partition = context_partition(batch.layout, size, split)
        local_batch = shard(batch, group.rank(), size, split)
        out_TC = network(inputs_TC[partition.of_rank(group.rank())], time_S, local_batch)
        gathered = out_TC.new_empty(size * len(out_TC), out_TC.shape[1])
        dist.all_gather_into_tensor(gathered, out_TC.contiguous(), group=group)
        order = partition.order(0, size)
        return gathered if order is None else gathered[order[0]]

    return call
