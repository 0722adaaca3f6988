"""Counter-based initial weights: each value is a function of (seed, global parameter name, row, column).

The values do not depend on the parallel layout, so every layout starts from the same model, and replicated parameters
are equal.
"""

import hashlib
import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from dit.backends.sharding import sharding_of
from dit.errors import ConfigError
from dit.kernels.unit_rms import unit_rms
from dit.philox import MASK32, philox, to_normal, to_uniform

_CHUNK_ROWS_ELEMENTS = 1 << 22


@dataclass(frozen=True)
class Init:
    """Initial distribution: `normal` with standard deviation `scale`, `uniform` in +-`scale`, or constant `scale`.

    `unit_rows` is a normal distribution, scaled to mean square 1 in each row; every update restores it
    (`dit.optimizer.unit_rows`).
    """

    kind: Literal["normal", "uniform", "constant", "unit_rows"]
    scale: float


ZEROS = Init("constant", 0.0)
ONES = Init("constant", 1.0)
UNIT_ROWS = Init("unit_rows", 1.0)


def normal(std: float) -> Init:
    """Return a normal initialisation with standard deviation `std`."""
    return Init("normal", std)


def uniform(bound: float) -> Init:
    """Return a uniform initialisation in +-bound."""
    return Init("uniform", bound)


def xavier_uniform(fan_in: int, fan_out: int) -> Init:
    """Return the uniform initialisation of Glorot and Bengio 2010, Eq. 16, from the global sizes of a linear layer."""
    return uniform(math.sqrt(6.0 / (fan_in + fan_out)))


def draw(init: Init, seed: int, name: str, rows: range, columns: range, device: torch.device) -> Tensor:
    """Draw one block of a global matrix, float32 `[len(rows), len(columns)]`."""
    if init.kind == "constant":
        return torch.full((len(rows), len(columns)), init.scale, device=device)
    name_hash = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")
    first, last = columns.start // 4, -(-columns.stop // 4)
    blocks = torch.arange(first, last, device=device)[None, :]
    row = torch.arange(rows.start, rows.stop, device=device)[:, None]
    row, blocks = torch.broadcast_tensors(row, blocks)
    words = philox(
        (blocks, row, torch.full_like(row, name_hash & MASK32), torch.full_like(row, name_hash >> 32)),
        (seed & MASK32, (seed >> 32) & MASK32),
    )
    lanes = tuple(2 * to_uniform(w) - 1 for w in words) if init.kind == "uniform" else to_normal(words)
    offset = columns.start - 4 * first
    return init.scale * torch.stack(lanes, -1).flatten(1)[:, offset : offset + len(columns)]


def with_init(parameter: nn.Parameter, init: Init) -> nn.Parameter:
    """Set the `init` attribute of a parameter, which `initialize_weights` reads."""
    parameter.init = init  # type: ignore[attr-defined]
    return parameter


def init_of(parameter: nn.Parameter, name: str) -> Init:
    """Return the initialisation that `with_init` set."""
    init = getattr(parameter, "init", None)
    if not isinstance(init, Init):
        raise ConfigError(
            f"parameter {name} of shape {tuple(parameter.shape)} has no initialisation; build it with the "
            "LayerProvider, or call dit.backends.init.with_init(parameter, Init(...))"
        )
    return init


@torch.no_grad()
def initialize_weights(module: nn.Module, seed: int, *, tp_rank: int) -> None:
    """Fill every parameter of a model with this rank's part of the counter-based initial weights."""
    for name, parameter in module.named_parameters():
        matrix = parameter.data.view(parameter.shape[0], -1) if parameter.dim() > 1 else parameter.data[None]
        sharding = sharding_of(parameter, name)
        split = None
        if sharding.is_split:
            split = 0 if parameter.dim() > 1 and sharding.split_dim == 0 else 1
        starts = (tp_rank * size if dim == split else 0 for dim, size in enumerate(matrix.shape))
        rows, columns = (range(start, start + size) for start, size in zip(starts, matrix.shape))
        step, init = max(1, _CHUNK_ROWS_ELEMENTS // len(columns)), init_of(parameter, name)
        for i in range(0, len(rows), step):
            block = draw(init, seed, name, rows[i : i + step], columns, matrix.device)
            matrix[i : i + step].copy_(unit_rms(block, 1) if init == UNIT_ROWS else block)
