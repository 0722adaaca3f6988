"""The process environment: defaults that must be set before torch starts, and the ranks from the launcher.

Only defaults are set: a variable the user has exported is never changed. torchrun itself sets `OMP_NUM_THREADS=1` when
it starts several ranks on a machine; a single process uses torch's default (all cores).
"""

import os
import sys
from collections.abc import MutableMapping
from typing import TYPE_CHECKING

from dit.heap import keep_freed_memory
from dit.terminal import quiet_libraries

if TYPE_CHECKING:
    from dit.parallel.dims import ParallelConfig


def prepare(environ: MutableMapping[str, str] = os.environ, *, quiet: bool = False) -> None:
    """Set the variables of torch, the tokenizers and forked loader workers; call before importing torch.

    Freed memory stays with the process, see `dit.heap`.

    Args:
        quiet: hide warnings that users cannot act on.
    """
    if quiet:
        quiet_libraries()
    # Expandable segments: packs of varying length fragment the CUDA cache less.
    if "PYTORCH_CUDA_ALLOC_CONF" not in environ:
        environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    # NCCL would register such memory in a CUDA graph as one allocation, and hang (pytorch/pytorch#158029).
    settings = (environ.get(name, "") for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"))
    if any("expandable_segments:True" in setting for setting in settings):
        environ.setdefault("NCCL_GRAPH_REGISTER", "0")
    # Loader workers are forked; the thread pool of the tokenizers does not support forks.
    environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    # torch remembers this many collectives; a rank that waited too long writes them down (dit/monitoring/heartbeat.py).
    if "TORCH_NCCL_TRACE_BUFFER_SIZE" not in environ:
        environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")
    keep_freed_memory(environ)


def prepare_layout(parallel: "ParallelConfig", environ: MutableMapping[str, str] = os.environ) -> None:
    """Set the variables that the CUDA driver reads at its first call, for a parallel layout."""
    # One hardware queue keeps the order "communication first, then compute" that overlaps tensor parallelism and rings;
    # Megatron-FSDP needs several queues to overlap its gathers, and refuses 1.
    splits_model = max(parallel.tensor_model_parallel_size, parallel.context_parallel_size) > 1
    if splits_model and parallel.data_parallel != "fsdp":
        environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")


def rank() -> int:
    """Return the global rank of this process; 0 without a launcher."""
    return int(os.environ.get("RANK", "0"))


def world_size() -> int:
    """Return the number of processes that the launcher started; 1 without a launcher."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def is_launched() -> bool:
    """Return whether torchrun (or a scheduler) started this process."""
    return "RANK" in os.environ


def can_ask() -> bool:
    """Return whether a user can answer a prompt: one process, with a terminal for input and output."""
    return not is_launched() and sys.stdin.isatty() and sys.stdout.isatty()
