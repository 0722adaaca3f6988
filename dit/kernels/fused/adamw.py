"""AdamW, weight average and model copy as one kernel over all parameters of a group; see `dit.kernels.adamw`."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Optional

import torch
from torch import Tensor

from dit.kernels.adamw import Elements, Rates
from dit.kernels.fused.blocks import cdiv
from dit.kernels.graph_tables import is_capturing, table_on

VECTOR_BYTES = 16
"""Size of a vectorised memory access, which requires aligned addresses."""
TABLES = 16
"""Size of the cache of address tables; a run has one table per group of parameters."""

Addresses = tuple[tuple[int, ...], ...]


@torch.library.custom_op("dit::adamw", mutates_args=("mains", "exp_avgs", "exp_avg_sqs", "averages", "models"))
def adamw_op(
    gradients: Sequence[Tensor],
    mains: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    averages: Sequence[Tensor],
    models: Sequence[Tensor],
    clip: Tensor,
    rates: Tensor,
) -> None:
    """Update parameters in place; each tensor is read and written once.

    Args:
        averages, models: one per parameter, or empty.
        clip: see `dit.kernels.adamw.Rates`.
        rates: `Rates.values` on the device.
    """
    from dit.kernels.fused.gpu import adamw as gpu

    columns = [gradients, mains, exp_avgs, exp_avg_sqs, averages or gradients, models or gradients]
    rows = tuple(
        (*(tensor.data_ptr() for tensor in tensors), tensors[0].numel()) for tensors in zip(*columns, strict=True)
    )
    half = bool(models) and models[0].dtype == torch.float16
    parts = {"average": bool(averages), "model": bool(models), "half": half}
    tables_of = tables if is_capturing() else _cached_tables  # the cache may free a table that a graph reads
    for aligned, group in by_alignment(rows):
        table, chunks = tables_of(group, gpu.CHUNK, mains[0].device)
        gpu.adamw(table, chunks, clip, rates, **parts, aligned=aligned)


@adamw_op.register_fake
def _(gradients, mains, exp_avgs, exp_avg_sqs, averages, models, clip, rates):  # type: ignore[no-untyped-def]
    return None


def by_alignment(rows: Sequence[tuple[int, ...]]) -> list[tuple[bool, Addresses]]:
    """Split rows of addresses, then elements, by whether all addresses allow vectorised accesses."""
    aligned = [not any(address % VECTOR_BYTES for address in row[:-1]) for row in rows]
    groups = [(kind, tuple(row for row, of_row in zip(rows, aligned) if of_row == kind)) for kind in (True, False)]
    return [(kind, group) for kind, group in groups if group]


def tables(rows: Addresses, chunk: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the tables of addresses and of chunks of all parameters, on the device."""
    counts = torch.tensor([cdiv(row[-1], chunk) for row in rows])
    owners = torch.repeat_interleave(torch.arange(len(rows)), counts)
    numbers = torch.arange(len(owners)) - (counts.cumsum(0) - counts)[owners]
    chunks = torch.stack([owners, numbers], 1).int()
    return table_on(torch.tensor(rows), device), table_on(chunks.contiguous(), device)


_cached_tables = lru_cache(maxsize=TABLES)(tables)


def adamw(parameters: Sequence[Elements], rates: Rates) -> None:
    """See `dit.kernels.adamw.adamw`; tensors are contiguous, and model weights are bf16 or fp16."""
    if not parameters:
        return
    for p in parameters:
        for tensor in (p.gradient, p.main, p.exp_avg, p.exp_avg_sq, p.average, p.model):
            assert tensor is None or tensor.is_contiguous(), "the tensors of a parameter must be contiguous"
    adamw_op(
        [p.gradient for p in parameters],
        [p.main for p in parameters],
        [p.exp_avg for p in parameters],
        [p.exp_avg_sq for p in parameters],
        _present([p.average for p in parameters]),
        _present([p.model for p in parameters]),
        rates.clip.float(),
        rates.on_device,
    )


def _present(tensors: Sequence[Optional[Tensor]]) -> list[Tensor]:
    present = [tensor for tensor in tensors if tensor is not None]
    assert len(present) in (0, len(tensors)), "either all parameters or none must have this tensor"
    return present
