"""Compare a layout with one rank at full size, on the ranks that torchrun started: no rank gathers the model.

    rank 0      trains the reference on one rank, in a process of its own      --> gradients.pt, parameters.pt
    others      wait
    all ranks   train under the layout; compare their own parts with the same parts of the files (memory-mapped)
    rank 0      adds up the squared errors of all ranks

The one rank of the reference is what limits the size: `reference_bytes`.
"""

import math
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Optional

import torch
import torch.distributed as dist
from torch import Tensor

from dit.backends import process_groups
from dit.backends.device import use_cuda
from dit.backends.sharding import sharding_of
from dit.errors import ConfigError
from dit.optimizer.master_weights import MasterShard
from dit.verify.ranks import run_world
from dit.verify.report import Difference
from dit.verify.trial import Built, Report, Trial, drifted_copies, place_of, train

WAIT_S = 24 * 3600.0
"""How long ranks wait for the reference."""

FILES = {"gradients": "gradients.pt", "parameters": "parameters.pt"}


def reference_bytes(trained: int, frozen: int = 0) -> tuple[int, int]:
    """Return the bytes that the reference needs on one rank, activations apart, and on disk.

    In fp32: weights, gradients, Adam's two averages, and the two copies that are written; of frozen ones the weights.

    Args:
        trained: parameters that are trained.
        frozen: those that are not.
    """
    return 24 * trained + 4 * frozen, 8 * trained


@dataclass(frozen=True)
class Squares:
    """Sums of squares over parts of a parameter: of the reference, of the layout's values, of their difference."""

    expected: float = 0.0
    given: float = 0.0
    error: float = 0.0

    def __add__(self, other: "Squares") -> "Squares":
        return Squares(self.expected + other.expected, self.given + other.given, self.error + other.error)


class Against(Report):
    """Reports how this rank's part of each parameter differs from the reference; nothing is gathered.

    Args:
        folder: of the reference.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def gradients(self, it: Built) -> dict[str, Any]:
        return {"place": place_of(it.groups), "gradients": self._squares("gradients", it, [s.grad for s in it.shards])}

    def weights(self, it: Built) -> dict[str, Any]:
        values = [s.parameter.detach().flatten()[s.start : s.stop] for s in it.shards]
        return {"parameters": self._squares("parameters", it, values), "drifted": drifted_copies(it)}

    def _squares(self, kind: str, it: Built, values: Sequence[Tensor]) -> dict[str, Squares]:
        reference: Mapping[str, Tensor] = torch.load(self.folder / FILES[kind], mmap=True, weights_only=True)
        rank = it.groups.tp.rank()
        return {s.name: _compared(reference[s.name], s, x, rank) for s, x in zip(it.shards, values, strict=True)}


def _compared(full: Tensor, shard: MasterShard, values: Tensor, tp_rank: int) -> Squares:
    shape = shard.parameter.shape
    for dim, start in enumerate(sharding_of(shard.parameter, shard.name).origin(shape, tp_rank)):
        full = full.narrow(dim, start, shape[dim])
    expected = full.flatten()[shard.start : shard.stop].to(values.device).double()
    given = values.detach().flatten().double()
    sums = [float(x.square().sum()) for x in (expected, given, given - expected)]
    return Squares(*sums)


def write_reference(case: dict[str, Any]) -> dict[str, Any]:
    """Train `case["trial"]` on one rank and write its tensors; return the rest (a task of `run_world`)."""
    result = train(case["trial"])
    result["names"] = list(result["gradients"])
    for kind, file in FILES.items():
        torch.save(result.pop(kind), Path(case["folder"]) / file)
    return result


@contextmanager
def reference_folder(scratch: Optional[str], size_bytes: int) -> Iterator[Path]:
    """Make a folder for the reference, and remove it at the end; every rank calls this.

    Args:
        scratch: where; all ranks see it. None for the temporary folder of this machine.
        size_bytes: of the reference.

    Raises:
        ConfigError: the disk has less space.
    """
    process_groups.connect(timeout_s=WAIT_S)
    place: list[Any] = [None]
    failure: Optional[Exception] = None
    if dist.get_rank() == 0:
        place = [tempfile.mkdtemp(prefix="verify-", dir=scratch)]
        free = shutil.disk_usage(place[0]).free
        if free < size_bytes:
            failure = ConfigError(
                f"the reference needs {size_bytes / 2**30:.1f} GiB and {place[0]} has {free / 2**30:.1f} GiB free; "
                "give a larger disk with --scratch DIR"
            )
    try:
        process_groups.raise_together(failure, ConfigError("the disk is too small for the reference; see rank 0"))
        dist.broadcast_object_list(place)
        yield Path(place[0])
    finally:
        if dist.get_rank() == 0:
            shutil.rmtree(place[0], ignore_errors=True)


def differences(one: Trial, many: Trial, folder: Path) -> Optional[dict[str, Any]]:
    """Train both, and return on rank 0 what `report.judge_differences` takes; every rank calls this.

    Args:
        folder: for the reference, from `reference_folder`.

    Raises:
        RuntimeError: the reference failed; the message holds the end of its output.
    """
    failure: Optional[Exception] = None
    reference: Optional[dict[str, Any]] = None
    if dist.get_rank() == 0:
        case = {"task": "dit.verify.full:write_reference", "trial": one, "folder": str(folder)}
        try:
            device = "" if use_cuda() else "cpu"
            (reference,) = run_world(1, [case], folder / "reference", timeout_s=WAIT_S, device=device)
        except RuntimeError as error:
            failure = error
    process_groups.raise_together(failure, RuntimeError("the reference failed; see the error of rank 0"))
    mine = train(replace(many, by_rank=False), report=Against(folder))
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    if reference is None:
        return None
    return {
        **{kind: (reference[kind], mine[kind]) for kind in ("losses", "grad_norms")},
        **{kind: _added_up(reference["names"], [(rank["place"], rank[kind]) for rank in found]) for kind in FILES},
        "drifted": [name for rank in found for name in rank["drifted"]],
    }


def _added_up(names: Sequence[str], ranks: Sequence[tuple[str, Mapping[str, Squares]]]) -> dict[str, Difference]:
    """Join the sums of all ranks; each copy of a part counts, on both sides of a ratio.

    A parameter that no rank has differs by infinity.
    """
    found = {}
    for name in names:
        parts = {place: squares[name] for place, squares in ranks if name in squares}
        total = sum(parts.values(), Squares())
        found[name] = Difference(
            norm=math.sqrt(total.expected),
            ratio=_root(total.given, total.expected),
            error=_root(total.error, total.expected) if parts else math.inf,
            by_rank={place: _root(part.given, part.expected) for place, part in parts.items()},
        )
    return found


def _root(part: float, of: float) -> float:
    """Return the root of a ratio of squares; 0 for nothing of nothing, infinity for something of nothing."""
    if of == 0:
        return math.inf if part else 0.0
    return math.sqrt(part / of)
