"""Held-out loss, whole and by noise level, on fixed noise so that two evaluations can be compared."""

from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist

from dit.backends.process_groups import ProcessGroups
from dit.batch import PackedBatch
from dit.models.base import ModelConfig
from dit.objectives.addressed_noise import AddressedNoise
from dit.objectives.base import Objective
from dit.patchify import outputs_apart

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
    share: Callable[[PackedBatch], PackedBatch] = lambda batch: batch,
) -> dict[str, float]:
    """Average the training loss over the held-out samples, with all conditions kept.

    Every sample has its own fixed noise level and noise, the same in every evaluation.

    Args:
        share: cuts a whole pack for this rank (context parallel).

    Returns:
        `loss`, and `loss_level_i` for the i-th quarter of the noise levels, low to high, where samples fell into it;
        where more is logged than one term, also `loss_NAME` of each.
    """
    names = objective.logged
    sums = torch.zeros(NUM_BUCKETS, len(names) + 1, device=device)
    for batch in batches:
        batch = share(batch).to(device)
        noise = AddressedNoise(VALIDATION_SEED, 0, batch.sample_ids_S, batch.layout)
        prepared = objective.prepare(batch, noise)
        prediction_TC = network(prepared.inputs_TC, prepared.time_S, batch)
        outputs_TC = outputs_apart(prediction_TC, model.token_channels, model.in_channels)
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
    levels = {f"loss_level_{i}": sum(row[:summands]) / row[-1] for i, row in enumerate(totals) if row[-1]}
    return {**named_losses(objective, means), **levels}


def named_losses(objective: Objective, means: Sequence[float]) -> dict[str, float]:
    """Return the loss as it is logged, `loss`, and where it has several terms, `loss_NAME` of each.

    Args:
        means: of each term and measure, in the order of `objective.logged`.
    """
    named = {f"loss_{name}": mean for name, mean in zip(objective.logged, means, strict=True)}
    return {"loss": sum(means[: len(objective.terms)]), **(named if len(named) > 1 else {})}
