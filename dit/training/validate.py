"""Held-out loss, in total and by noise level, with fixed noise so that evaluations are comparable."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch

from dit.backends.process_groups import ProcessGroups, all_reduce
from dit.batch import PackedBatch
from dit.models.base import ModelConfig
from dit.objectives.addressed_noise import AddressedNoise
from dit.objectives.base import Objective
from dit.objectives.flow_matching import FlowMatching
from dit.objectives.losses import Term
from dit.patchify import split_outputs

NUM_BUCKETS = 4
NUM_TIMES = 8
VALIDATION_SEED = 0x5A11DA7E


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

    Every sample has its own fixed noise levels and noise, the same in every evaluation.

    Args:
        network: predicts on full packs or, with `shard`, on their local tokens.
        batches: held-out micro-batches of this data-parallel rank.
        shard: selects the local tokens of a full pack (context parallel).

    Returns:
        `loss`, and `loss_level_i` for the i-th quarter of the noise levels, low to high, if it has samples and the
        objective has levels; if more than one term is logged, also `loss_NAME` of each.
    """
    sums = loss_sums(network, batches, objective, model, device, shard)
    all_reduce(sums, groups.dp_cp)
    return mean_losses(objective, sums)


@torch.no_grad()
def loss_sums(
    network: Callable[..., torch.Tensor],
    batches: Iterator[PackedBatch],
    objective: Objective,
    model: ModelConfig,
    device: torch.device,
    shard: Callable[[PackedBatch], PackedBatch] = lambda batch: batch,
) -> torch.Tensor:
    """Sum the training loss over this rank's held-out samples; see `held_out_loss` for the arguments.

    Returns:
        `[NUM_BUCKETS, logged + 1]` float32: for each quarter of the noise levels, the logged terms and the tokens.
    """
    names = objective.logged
    sums = torch.zeros(NUM_BUCKETS, len(names) + 1, device=device)
    for batch in batches:
        batch = shard(batch).to(device)
        noise = AddressedNoise(VALIDATION_SEED, 0, batch.sample_ids_S, batch.layout, latent_channels=model.in_channels)
        terms = _loss_terms(network, batch, objective, model, noise)
        if batch.repeated:
            continue
        columns_L = [terms[name].sum_per_level(batch.layout) for name in names]
        columns_L.append(batch.layout.level_layout.sum_per_sample(batch.layout.noised_T.float()))
        bucket_L = (noise.level_L() * NUM_BUCKETS).long()
        sums.index_add_(0, bucket_L, torch.stack(columns_L, -1))
    return sums


def mean_losses(objective: Objective, sums: torch.Tensor) -> dict[str, float]:
    """Return the result of `held_out_loss` from the `loss_sums` of all ranks."""
    totals: list[list[float]] = sums.tolist()
    count = max(1.0, sum(row[-1] for row in totals))
    means = [sum(row[i] for row in totals) / count for i in range(len(objective.logged))]
    summands = len(objective.terms)
    by_level = [] if objective.reconstructs else totals
    levels = {f"loss_level_{i}": sum(row[:summands]) / row[-1] for i, row in enumerate(by_level) if row[-1]}
    return {**named_losses(objective, means), **levels}


class AtTimes(AddressedNoise):
    """Noise of held-out samples; all noise levels of a sample have one fixed quantile, float32 `[S]`."""

    def __init__(self, batch: PackedBatch, times_S: torch.Tensor) -> None:
        super().__init__(VALIDATION_SEED, 0, batch.sample_ids_S, batch.layout)
        self.times_S = times_S

    def quantile_S(self, number: int) -> torch.Tensor:
        return self.times_S


@torch.no_grad()
def loss_at_times(
    network: Callable[..., torch.Tensor],
    batches: Iterator[PackedBatch],
    objective: FlowMatching,
    model: ModelConfig,
    device: torch.device,
) -> torch.Tensor:
    """Sum the error of the velocity at the flow times 0/8, 1/8, ..., 7/8, one fixed time per held-out sample.

    The sums do not depend on the distribution and weights of times in training, so they are comparable across systems:
    the validation loss of FLUX.1 in MLPerf Training is the mean over the times of their means. A sample's time is its
    id modulo 8; MLPerf numbers its samples instead. If the network predicts x0, errors below `MIN_TIME` have the weight
    of that time.

    Returns:
        `[NUM_TIMES, 2]` float64: by time, the sum over samples of the mean squared error, and the number of samples.

    Source: mlcommons/training, text_to_image/torchtitan/README.md, section 5; Esser et al. 2024, arXiv:2403.03206.
    """
    plain = FlowMatching(
        prediction=objective.prediction,
        alignment=objective.alignment,
        teacher_token_weight=objective.teacher_token_weight,
    )
    sums = torch.zeros(NUM_TIMES, 2, device=device, dtype=torch.float64)
    for batch in batches:
        batch = replace(batch, loss_weight_S=None).to(device)
        time_S = batch.sample_ids_S % NUM_TIMES
        terms = _loss_terms(network, batch, plain, model, AtTimes(batch, time_S.float() / NUM_TIMES))
        if batch.repeated:
            continue
        tokens_S = batch.layout.sum_per_sample(batch.layout.noised_T.double())
        error_S = batch.layout.sum_levels(terms["error"].sum_per_level(batch.layout).double()) / tokens_S
        sums.index_add_(0, time_S, torch.stack([error_S, torch.ones_like(error_S)], -1))
    return sums


def _loss_terms(
    network: Callable[..., torch.Tensor],
    batch: PackedBatch,
    objective: Objective,
    model: ModelConfig,
    noise: AddressedNoise,
) -> dict[str, Term]:
    batch = replace(batch, conditions=batch.conditions.without(*(c.name for c in objective.conditions)))
    batch = objective.augment(batch, model.conditions(), noise, draw=True)
    prepared = objective.prepare(batch, noise)
    batch = prepared.noised(batch)
    prepared = objective.complete(network, prepared, batch, model.conditions())
    prediction_TC = network(prepared.inputs_TC, prepared.time_S, batch)
    outputs_TC = split_outputs(prediction_TC, model.token_channels, model.in_channels, objective.num_outputs)
    return objective.loss_terms(outputs_TC, prepared, batch.layout)


def named_losses(objective: Objective, means: Sequence[float]) -> dict[str, float]:
    """Return the losses by logged name: `loss` and, if it has several terms, `loss_NAME` of each."""
    named = {f"loss_{name}": mean for name, mean in zip(objective.logged, means, strict=True)}
    return {"loss": sum(means[: len(objective.terms)]), **(named if len(named) > 1 else {})}
