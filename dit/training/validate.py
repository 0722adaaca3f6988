"""Held-out loss, whole and by noise level, on fixed noise so that two evaluations can be compared."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from dit.backends.process_groups import ProcessGroups
from dit.batch import PackedBatch
from dit.objectives.addressed_noise import AddressedNoise
from dit.objectives.base import Objective, pointwise_error

NUM_BUCKETS = 4
VALIDATION_SEED = 0x5A11DA7E


@torch.no_grad()
def held_out_loss(
    network: Callable[..., torch.Tensor],
    batches: Iterator[PackedBatch],
    objective: Objective,
    device: torch.device,
    groups: ProcessGroups,
    share: Callable[[PackedBatch], PackedBatch] = lambda batch: batch,
) -> dict[str, float]:
    """Average the training loss over the held-out samples, with all conditions kept.

    Every sample has its own fixed noise level and noise, the same in every evaluation.

    Args:
        share: cuts a whole pack for this rank (context parallel).

    Returns:
        `loss`, and `loss_level_i` for the i-th quarter of the noise levels, low to high, where samples fell into it.
    """
    sums = torch.zeros(NUM_BUCKETS, 2, device=device)
    for batch in batches:
        batch = share(batch).to(device)
        noise = AddressedNoise(VALIDATION_SEED, 0, batch.sample_ids_S, batch.layout)
        prepared = objective.prepare(batch, noise)
        prediction_TC = network(prepared.inputs_TC, prepared.time_S, batch)
        error_T = pointwise_error(prediction_TC, prepared.target_TC, objective.loss_kind).mean(-1)
        error_S = batch.layout.sum_per_sample(error_T) * prepared.weight_S
        tokens_S = batch.layout.sum_per_sample(torch.ones_like(error_T))
        bucket_S = (noise.level_S() * NUM_BUCKETS).long()
        sums.index_add_(0, bucket_S, torch.stack([error_S, tokens_S], -1))
    dist.all_reduce(sums, group=groups.dp_cp)
    totals: list[Any] = sums.tolist()
    found = {f"loss_level_{i}": error / count for i, (error, count) in enumerate(totals) if count}
    return {"loss": sum(e for e, _ in totals) / max(1.0, sum(c for _, c in totals)), **found}
