"""The process environment: defaults that must be set before torch starts, and the ranks from the launcher.

Only defaults are set: a variable the user has exported is never changed. torchrun itself sets `OMP_NUM_THREADS=1` when
it starts several ranks on a machine; a single process uses torch's default (all cores).
"""

import contextlib
import functools
import gc
import os
import sys
import warnings
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, Optional, Protocol

from dit.heap import keep_freed_memory
from dit.patches import patches


def prepare(environ: MutableMapping[str, str] = os.environ) -> None:
    """Set the variables of torch, the tokenizers and forked loader workers; call before importing torch.

    Freed memory stays with the process, see `dit.heap`.
    """
    # Expandable segments: packs of varying length fragment the CUDA cache less.
    if "PYTORCH_CUDA_ALLOC_CONF" not in environ:
        environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    # Loader workers are forked; the thread pool of the tokenizers does not support forks.
    environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    # torch remembers this many collectives; a rank that waited too long writes them down (dit/monitoring/heartbeat.py).
    if "TORCH_NCCL_TRACE_BUFFER_SIZE" not in environ:
        environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")
    keep_freed_memory(environ)


def quiet_libraries() -> None:
    """Hide warnings that users cannot act on; call before importing Megatron-Core.

    At import it lists missing accelerators (the first line of a run states those in use), and it calls deprecated
    functions of torch.distributed.
    """
    for category in (UserWarning, FutureWarning, DeprecationWarning):
        warnings.filterwarnings("ignore", category=category, module=r"megatron|torch\.distributed")


UNUSED = ("wandb", "multistorageclient")
"""Packages that Megatron-Core takes if they are there: for its inference engine, for checkpoints in object stores."""
REMOTE = "leptonai"
"""What nemo-run imports to submit jobs to a cloud, at once for all clouds."""


@patches(
    "torch 2.11-2.14",
    "torch: compile",
    why="Megatron-Core compiles functions at import, which loads the compiler",
)
@patches(
    "nemo-run 0.11",
    "nemo_run: import of leptonai",
    why="it imports the clients of all clouds, also of those that are not used",
)
@contextlib.contextmanager
def light_imports() -> Iterator[None]:
    """Import Megatron-Core and nemo-run without what no command uses of them: half of the time that a start takes.

    Optional packages are absent, the client of a cloud has names alone, and functions are compiled at their first call
    (torch.compile loads its compiler for the first decorator). Afterwards all can be imported as ever.
    """
    import torch

    hidden = [name for name in UNUSED if name not in sys.modules]
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]
    names = _Names()
    compile_now = torch.compile
    torch.compile = _at_first_call(compile_now)
    collects = gc.isenabled()
    gc.disable()  # a million objects are made, and none of them is garbage
    if REMOTE not in sys.modules:
        sys.meta_path.insert(0, names)
    try:
        yield
    finally:
        if collects:
            gc.enable()
        torch.compile = compile_now
        if names in sys.meta_path:
            sys.meta_path.remove(names)
            hidden += [name for name in sys.modules if name.partition(".")[0] == REMOTE]
        for name in hidden:
            del sys.modules[name]


class _Names(MetaPathFinder, Loader):
    """Finds modules of the package `REMOTE` that have every name, each for an empty class."""

    def find_spec(
        self, fullname: str, path: Optional[Sequence[str]], target: Optional[ModuleType] = None
    ) -> Optional[ModuleSpec]:
        return ModuleSpec(fullname, self, is_package=True) if fullname.partition(".")[0] == REMOTE else None

    def exec_module(self, module: ModuleType) -> None:
        def absent(name: str) -> type:
            if name.startswith("__"):
                raise AttributeError(name)
            return type(name, (), {})

        module.__getattr__ = absent  # type: ignore[method-assign]


def _at_first_call(compile_now: Callable[..., Any]) -> Callable[..., Any]:
    """Return `torch.compile` as a decorator that does nothing before the decorated function is called."""

    def decorator(function: Optional[Callable[..., Any]] = None, **options: Any) -> Callable[..., Any]:
        if function is None:
            return functools.partial(decorator, **options)

        @functools.cache
        def compiled() -> Callable[..., Any]:
            return compile_now(function, **options)

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            return compiled()(*args, **kwargs)

        return call

    return decorator


class Layout(Protocol):
    """The settings of a parallel layout that the driver's variables depend on."""

    tensor_model_parallel_size: int
    data_parallel: str


def prepare_layout(parallel: Layout, environ: MutableMapping[str, str] = os.environ) -> None:
    """Set the variables that the CUDA driver reads at its first call, for a parallel layout.

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
    """Return the number of processes that the launcher started; 1 without a launcher."""
    return int(environ.get("WORLD_SIZE", "1"))


def is_launched(environ: MutableMapping[str, str] = os.environ) -> bool:
    """Return whether torchrun (or a scheduler) started this process."""
    return "RANK" in environ


def can_ask(environ: MutableMapping[str, str] = os.environ) -> bool:
    """Return whether a user can answer a prompt: one process, with a terminal for input and output."""
    return not is_launched(environ) and sys.stdin.isatty() and sys.stdout.isatty()
