"""Deterministic mode: repeating a run on the same machines gives bitwise equal results.

Noise, initial weights and data order are deterministic in every mode. This mode covers kernels: some add in an order
that differs between calls (atomics), others are selected by measured time.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from dit.errors import ConfigError

WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
WORKSPACES = (":4096:8", ":16:8")
"""Values for which cuBLAS uses the same workspace for every stream and call."""
TRANSFORMER_ENGINE = "NVTE_ALLOW_NONDETERMINISTIC_ALGO"


@contextmanager
def deterministic(enabled: bool) -> Iterator[None]:
    """Enable torch's deterministic algorithms in this context; an operation without one raises an error.

    Enter the context before the first GPU call, because cuBLAS reads its workspace setting only once.
    """
    if not enabled:
        yield
        return
    unset = {WORKSPACE, TRANSFORMER_ENGINE} - os.environ.keys()
    required = {WORKSPACE: WORKSPACES, TRANSFORMER_ENGINE: ("0",)}
    for name, values in required.items():
        if os.environ.setdefault(name, values[0]) not in values:
            raise ConfigError(
                f"training.deterministic=True needs {name}={values[0]}, but the environment has "
                f"{os.environ[name]!r}; unset it, or set training.deterministic=False"
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
