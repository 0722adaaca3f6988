"""The process environment: defaults that must be set before torch starts, and what the launcher told this process.

Only defaults are set: a variable the user has exported is never changed. torchrun itself sets `OMP_NUM_THREADS=1` when
it starts several ranks on a machine; a single process keeps torch's own choice (all cores).
"""

import os
import sys
import warnings
from collections.abc import MutableMapping
from typing import Protocol


def prepare(environ: MutableMapping[str, str] = os.environ) -> None:
    """Set what torch, the tokenizers and forked loader workers read when they start; call before importing torch."""
    # Segments that grow instead of splitting: packs of varying length fragment the CUDA cache far less.
    if "PYTORCH_CUDA_ALLOC_CONF" not in environ:
        environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    # Loader workers are forked, which the tokenizers' thread pool would not survive.
    environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def quiet_libraries() -> None:
    """Hide warnings a user can do nothing about; call before importing Megatron-Core.

    At import it tells which accelerators it does not find (the run's first line says what is used), and it calls
    functions of torch.distributed that have newer names.
    """
    for category in (UserWarning, FutureWarning, DeprecationWarning):
        warnings.filterwarnings("ignore", category=category, module=r"megatron|torch\.distributed")


class Layout(Protocol):
    """What of a parallel layout the driver's settings depend on."""

    tensor_model_parallel_size: int
    data_parallel: str


def prepare_layout(parallel: Layout, environ: MutableMapping[str, str] = os.environ) -> None:
    """Set what the CUDA driver reads at its first call, once the parallel layout is known.

    Args:
        parallel: a `ParallelConfig`, or nemo-run's configuration of one.
    """
    # One hardware queue keeps the order "collective first, then GEMM" that overlaps tensor parallelism; Megatron-FSDP
    # needs several queues to overlap its gathers, and refuses 1.
    if parallel.tensor_model_parallel_size > 1 and parallel.data_parallel != "fsdp":
        environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")


def rank(environ: MutableMapping[str, str] = os.environ) -> int:
    """Return the global rank of this process; 0 without a launcher."""
    return int(environ.get("RANK", "0"))


def world_size(environ: MutableMapping[str, str] = os.environ) -> int:
    """Return how many processes the launcher started; 1 without a launcher."""
    return int(environ.get("WORLD_SIZE", "1"))


def is_launched(environ: MutableMapping[str, str] = os.environ) -> bool:
    """Tell whether torchrun (or a scheduler in its place) started this process."""
    return "RANK" in environ


def can_ask(environ: MutableMapping[str, str] = os.environ) -> bool:
    """Tell whether a person can answer a question: one process, with a terminal on both sides."""
    return not is_launched(environ) and sys.stdin.isatty() and sys.stdout.isatty()
