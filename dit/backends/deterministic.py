"""A deterministic mode: the same run on the same machines gives the same bits.

Noise, initial weights and the order of the data are counter-based in every mode. What is left are kernels: some add
in an order that differs from call to call (atomics), others are selected by measured time.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from dit.errors import ConfigError

WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
WORKSPACES = (":4096:8", ":16:8")
"""With one of these cuBLAS has the same workspaces for every stream and call."""
TRANSFORMER_ENGINE = "NVTE_ALLOW_NONDETERMINISTIC_ALGO"


@contextmanager
def deterministic(wanted: bool) -> Iterator[None]:
    """Let torch use deterministic algorithms alone inside, and fail at an operation that has none.

    Enter it before the first call of a GPU: cuBLAS reads its workspaces once.

    Args:
        wanted: whether to; else nothing is changed.

    Raises:
        ConfigError: the environment asks for something else.
    """
    if not wanted:
        yield
        return
    unset = {WORKSPACE, TRANSFORMER_ENGINE} - os.environ.keys()
    required = {WORKSPACE: WORKSPACES, TRANSFORMER_ENGINE: ("0",)}
    for name, values in required.items():
        if os.environ.setdefault(name, values[0]) not in values:
            raise ConfigError(
                f"training.deterministic=True needs {name}={values[0]} in the environment, which has "
                f"{os.environ[name]!r}; remove it there, or set training.deterministic=False"
            )
    cudnn = torch.backends.cudnn
    before = torch.are_deterministic_algorithms_enabled(), cudnn.deterministic, cudnn.benchmark
    torch.use_deterministic_algorithms(True)
    cudnn.deterministic, cudnn.benchmark = True, False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        cudnn.deterministic, cudnn.benchmark = before[1:]
        for name in unset:
            os.environ.pop(name, None)
