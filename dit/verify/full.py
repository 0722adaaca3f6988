"""Comparison of a layout with one rank at full size, on the ranks that torchrun started. No rank gathers the model.

    rank 0      trains the reference on one rank, in a separate process        --> gradients.pt, parameters.pt,
    others      wait                                                               averages.pt
    all ranks   train under the layout; compare their shards with the same slices of the files (memory-mapped)
    rank 0      sums the squared errors of all ranks

The memory of the reference's one rank limits the model size: `reference_bytes`.
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
from dit.parallel.build import count_parameters
from dit.verify.ranks import run_world
from dit.verify.report import Difference
from dit.verify.trial import Built, Report, Trial, drifted_copies, place_of, train

WAIT_S = 24 * 3600.0
"""Time limit for the reference run."""

FILES = {"gradients": "gradients.pt", "parameters": "parameters.pt", "averages": "averages.pt"}


def reference_bytes(trained: int, frozen: int = 0, *, averages: bool = False) -> tuple[int, int]:
    """Return the bytes that the reference needs on one rank, without activations, and on disk.

    Trained parameters need fp32 weights, gradients, Adam's two moments and the copies that are written to disk; with a
    weight average also the average and its copy. Frozen parameters need only their weights.
    """
    return (32 if averages else 24) * trained + 4 * frozen, (12 if averages else 8) * trained


def reference_needs(trial: Trial) -> tuple[int, int]:
    """Return the `reference_bytes` of a trial, whose networks of the objective are trained, too."""
    auxiliary = trial.objective.auxiliary
    count = count_parameters(trial.model, auxiliary=auxiliary)
    trained = count_parameters(trial.model, trained=True, auxiliary=auxiliary)
    return reference_bytes(trained, count - trained, averages=trial.training.ema_decay is not None)


@dataclass(frozen=True)
class Squares:
    """Sums of squares over shards of a parameter: of the reference, of the layout's values, and of their difference."""

    expected: float = 0.0
    actual: float = 0.0
    error: float = 0.0

    def __add__(self, other: "Squares") -> "Squares":
        return Squares(self.expected + other.expected, self.actual + other.actual, self.error + other.error)


class Against(Report):
    """Compares this rank's shard of each parameter with the reference files; no more than one parameter is gathered."""

    recomputes_averages = False  # of a model of full size, for which the host may have no memory

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def gradients(self, session: Built) -> dict[str, Any]:
        return {
            "place": place_of(session.groups),
            "gradients": self._squares("gradients", session, [s.grad for s in session.shards]),
        }

    def weights(self, session: Built) -> dict[str, Any]:
        values = [s.parameter.detach().flatten()[s.start : s.stop] for s in session.shards]
        averages = {} if session.ema is None else {"averages": self._squares("averages", session, session.ema.values)}
        return {
            "parameters": self._squares("parameters", session, values),
            **averages,
            "drifted": drifted_copies(session),
        }

    def _squares(self, kind: str, session: Built, values: Sequence[Tensor]) -> dict[str, Squares]:
        reference: Mapping[str, Tensor] = torch.load(self.folder / FILES[kind], mmap=True, weights_only=True)
        rank = session.groups.tp.rank()
        return {s.name: _compared(reference[s.name], s, x, rank) for s, x in zip(session.shards, values, strict=True)}


def _compared(full: Tensor, shard: MasterShard, values: Tensor, tp_rank: int) -> Squares:
    shape = shard.parameter.shape
    for dim, start in enumerate(sharding_of(shard.parameter, shard.name).origin(shape, tp_rank)):
        full = full.narrow(dim, start, shape[dim])
    expected = full.flatten()[shard.start : shard.stop].to(values.device).double()  # averages may be on the host
    actual = values.detach().flatten().double()
    sums = [float(x.square().sum()) for x in (expected, actual, actual - expected)]
    return Squares(*sums)


def write_reference(case: dict[str, Any]) -> dict[str, Any]:
    """Train `case["trial"]` on one rank and write its tensors; return the rest (a task of `run_world`)."""
    result = train(case["trial"])
    result["names"] = list(result["gradients"])
    for kind, file in FILES.items():
        if kind in result:
            tensors = {name: tensor.cpu() for name, tensor in result.pop(kind).items()}
            torch.save(tensors, Path(case["folder"]) / file)
    return result


def run_on_one_rank(case: dict[str, Any], folder: Path) -> Any:
    """Run a case of `run_world` in a separate process of rank 0, and return its result there; every rank calls this.

    Raises:
        RuntimeError: the process failed; on rank 0 the message ends with its last output.
    """
    result, failure = None, None
    if dist.get_rank() == 0:
        try:
            (result,) = run_world(1, [case], folder, timeout_s=WAIT_S, device="" if use_cuda() else "cpu")
        except RuntimeError as error:
            failure = error
    process_groups.raise_together(failure, RuntimeError("the process of one rank failed; see the error of rank 0"))
    return result


@contextmanager
def reference_folder(scratch: Optional[str], size_bytes: int) -> Iterator[Path]:
    """Create a folder for the reference, and remove it on exit; every rank calls this.

    Args:
        scratch: parent folder, visible to all ranks; None for the temporary folder of this machine.
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
    """Train both trials, and return the arguments of `report.judge_differences` on rank 0; every rank calls this.

    Raises:
        RuntimeError: the reference failed; the message ends with its last output.
    """
    case = {"task": "dit.verify.full:write_reference", "trial": one, "folder": str(folder)}
    reference = run_on_one_rank(case, folder / "reference")
    result = train(replace(many, by_rank=False), report=Against(folder))
    results: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(results, result)
    if reference is None:
        return None
    return {
        **{kind: (reference[kind], result[kind]) for kind in ("losses", "grad_norms")},
        **{
            kind: _summed(reference["names"], [(rank["place"], rank[kind]) for rank in results])
            for kind in FILES
            if kind in result
        },
        "drifted": [name for rank in results for name in rank["drifted"]],
        "inexact": result["inexact"],
    }


def _summed(names: Sequence[str], ranks: Sequence[tuple[str, Mapping[str, Squares]]]) -> dict[str, Difference]:
    """Add the sums of all ranks. Replicated shards count once per copy, in both the numerator and the denominator.

    A parameter that no rank reports has an infinite error.
    """
    errors = {}
    for name in names:
        parts = {place: squares[name] for place, squares in ranks if name in squares}
        total = sum(parts.values(), Squares())
        errors[name] = Difference(
            norm=math.sqrt(total.expected),
            ratio=_root(total.actual, total.expected),
            error=_root(total.error, total.expected) if parts else math.inf,
            by_rank={place: _root(part.actual, part.expected) for place, part in parts.items()},
        )
    return errors


def _root(part: float, of: float) -> float:
    """Return the root of a ratio of squares; 0 for 0 / 0, infinity for any other division by 0."""
    if of == 0:
        return math.inf if part else 0.0
    return math.sqrt(part / of)
