"""Held-out loss, in total and by noise level, on fixed noise so that evaluations can be compared."""

from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist

from dit.backends.process_groups import ProcessGroups
from dit.batch import PackedBatch
from dit.models.base import ModelConfig
from dit.objectives.addressed_noise import AddressedNoise
from dit.objectives.base import Objective
from dit.patchify import split_outputs

NUM_BUCKETS = 4
VALIDATION_SEED = 0x5A11DA7E


@torch.no_grad()
def held_out_loss(
    network: Callable[..., torch.Tensor],
    batches: Iterator[PackedBatch],
    objective: Objective,
    model: ModelConfig,
    device: torch.device,
    groups: ProcessGroups,
    shard: Callable[[PackedBatch], PackedBatch] = lambda batch: batch,
) -> dict[str, float]:
    """Average the training loss over the held-out samples, without dropping conditions.

    Every sample has its own fixed noise level and noise, the same in every evaluation.

    Args:
        network: predicts on full packs or, with `shard`, on their local tokens.
        batches: of this data-parallel rank.
        objective: has the loss.
        model: has the channels.
        device: of the network.
        groups: the process groups.
        shard: selects the local tokens of a full pack (context parallel).

    Returns:
        `loss`, and `loss_level_i` for the i-th quarter of the noise levels, low to high, if it has samples and the
        objective has levels; if more than one term is logged, also `loss_NAME` of each.
    """
    names = objective.logged
    sums = torch.zeros(NUM_BUCKETS, len(names) + 1, device=device)
    for batch in batches:
        batch = shard(batch).to(device)
        noise = AddressedNoise(VALIDATION_SEED, 0, batch.sample_ids_S, batch.layout)
        prepared = objective.prepare(batch, noise)
        prediction_TC = network(prepared.inputs_TC, prepared.time_S, batch)
        outputs_TC = split_outputs(prediction_TC, model.token_channels, model.in_channels)
        found = objective.loss_terms(outputs_TC, prepared, batch.layout)
        columns_S = [found[name].sum_per_sample(batch.layout) for name in names]
        columns_S.append(batch.layout.sum_per_sample(batch.layout.valid_T.float()))
        bucket_S = (noise.level_S() * NUM_BUCKETS).long()
        sums.index_add_(0, bucket_S, torch.stack(columns_S, -1))
    dist.all_reduce(sums, group=groups.dp_cp)
    totals: list[list[float]] = sums.tolist()
    count = max(1.0, sum(row[-1] for row in totals))
    means = [sum(row[i] for row in totals) / count for i in range(len(names))]
    summands = len(objective.terms)
    by_level = [] if objective.reconstructs else totals
    levels = {f"loss_level_{i}": sum(row[:summands]) / row[-1] for i, row in enumerate(by_level) if row[-1]}
    return {**named_losses(objective, means), **levels}


def named_losses(objective: Objective, means: Sequence[float]) -> dict[str, float]:
    """Return the logged names of the loss: `loss` and, if it has several terms, `loss_NAME` of each.

    Args:
        means: of each term and measure, in the order of `objective.logged`.
    """
    named = {f"loss_{name}": mean for name, mean in zip(objective.logged, means, strict=True)}
    return {"loss": sum(means[: len(objective.terms)]), **(named if len(named) > 1 else {})}
