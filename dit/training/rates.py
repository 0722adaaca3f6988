"""Rates and shares of the steps since the last log line, over all ranks."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from dit.backends.device import StepTimer, describe, peak_flops, peak_memory
from dit.backends.process_groups import ProcessGroups, all_reduce
from dit.checkpoint.train_state import TrainState
from dit.data_api import DataStream
from dit.monitoring.heartbeat import Phase
from dit.step.device_batches import Consumed


def rates(
    consumed: Consumed,
    stream: DataStream,
    groups: ProcessGroups,
    micro_batches: int,
    seconds: float,
    device: torch.device,
) -> tuple[int, dict[str, float]]:
    """Reduce the counts of the steps since the last line; return the number of samples, and the values to log."""
    dropped, ranks = stream.sample_counts().dropped.total(), groups.world_size
    loader = [dropped, stream.samples_per_s(), stream.late()]
    counts = torch.tensor(
        [consumed.samples, consumed.valid_tokens, consumed.padded_tokens, sum(consumed.flops), *loader],
        dtype=torch.float64,
        device=device,
    )
    # Replicas wait for each other at the end of each step, so the step lasts as long as the largest work.
    steps = torch.tensor(consumed.flops, dtype=torch.float64, device=device).view(-1, micro_batches)
    slowest = torch.cat([steps.sum(1), steps.new_tensor([consumed.waited_s / seconds])])
    if not groups.is_data_reader:  # one rank counts for its replica; a group of these ranks would need more memory
        counts, slowest = torch.zeros_like(counts), torch.zeros_like(slowest)
    dist.all_reduce(counts)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    samples, valid, padded, flops, all_dropped, loader_samples_per_s, late = counts.tolist()
    peak = peak_flops(describe())
    return int(samples), {
        "samples_per_s": samples / seconds,
        "tokens_per_s": valid / seconds,
        "padded_tokens_per_s_per_rank": padded / seconds / ranks,
        "tflops_per_rank": flops / seconds / ranks / 1e12,
        **({} if peak is None else {"mfu": flops / seconds / ranks / peak}),
        "padding_share": 1 - valid / padded,
        "work_imbalance": slowest[:-1].sum().item() * groups.dp_size / flops,
        "data_wait_share": slowest[-1].item(),
        "late_micro_batches": late,
        "loader_samples_per_s": loader_samples_per_s,
        "dropped_samples": all_dropped,
    }


def rank_times(seconds: list[float], groups: ProcessGroups, device: torch.device) -> dict[str, float]:
    """Return the seconds of a step until the gradients are reduced: the median, the slowest rank and its number.

    Ranks that share a model wait for each other in the step, so a slow rank slows its whole replica down.
    """
    means = torch.zeros(groups.world_size, device=device)
    means[groups.rank] = sum(seconds) / max(1, len(seconds))
    dist.all_reduce(means)
    slowest, rank = means.max(0)
    return {"rank_s_median": means.median().item(), "rank_s_slowest": slowest.item(), "slowest_rank": rank.item()}


def memory_peaks(device: torch.device) -> dict[str, int]:
    """Return the peak memory since the start of the process, of the rank with the largest one."""
    peaks = {f"peak_memory_{kind}_bytes": size for kind, size in peak_memory().items()}
    largest = torch.tensor(list(peaks.values()), device=device)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return dict(zip(peaks, largest.tolist()))


def mean_terms(loss_sums: torch.Tensor, groups: ProcessGroups) -> list[float]:
    """Return the mean of each term and measure of the loss over all ranks; every rank calls this."""
    sums = loss_sums.clone()
    all_reduce(sums, groups.dp_cp)
    all_reduce(sums, groups.pp)  # only the last stage has losses
    return (sums[:-1] / sums[-1]).tolist()


def counters(state: TrainState, skipped_updates: int) -> dict[str, float]:
    """Return the counters that only some runs have: skipped updates, and the loss scale and overflows of fp16."""
    values: dict[str, float] = {"skipped_updates": skipped_updates} if skipped_updates else {}
    if state.loss_scale is not None:
        values["loss_scale"] = state.loss_scale.value
        values["overflowed_steps"] = state.loss_scale.overflowed_steps
    return values


def report_progress(wrapped: Sequence[Any], timer: StepTimer, phase: Phase) -> None:
    """Report progress from forward hooks, and stop the timer where the reduction of the gradients starts.

    Until then a rank computes; in the reduction it waits for other ranks.
    """

    def timed(finalize: Callable[..., None]) -> Callable[..., None]:
        def reduce(*args: Any, **kwargs: Any) -> None:
            timer.stop()
            phase.enter("reduces the gradient")
            finalize(*args, **kwargs)

        return reduce

    for chunk in wrapped:
        chunk.config.finalize_model_grads_func = timed(chunk.config.finalize_model_grads_func)
        chunk.register_forward_pre_hook(lambda *_: phase.go_on())
