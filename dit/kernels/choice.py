"""Ops with several implementations: each says what it needs, `choose` selects one, `table` says why not the others.

The implementations of an op stand in the order in which `auto` prefers them. The last one needs nothing:

    attention    transformer_engine    needs its package, CUDA, bf16 or fp16
                 varlen                needs CUDA, bf16 or fp16
                 sdpa                  runs everywhere
"""

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from shutil import which
from typing import Generic, Optional, TypeVar

import torch

from dit.errors import ConfigError

AUTO = "auto"
UNTRIED = "runs on request only: it has not passed tests/gpu on any device"
"""Why `auto` passes over an implementation that was written and never run."""
SLOW_START = "runs on request only: the first step waits for the compiler"
"""Why `auto` passes over an implementation that is generated when it first runs."""
OF_LAYERS = "runs on request only: layers are compiled, and this is eager"
"""Why `auto` passes over what stands for the eager form where a setting compiles layers."""
T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


@dataclass(frozen=True)
class Target:
    """Where an op runs, and on what.

    Attributes:
        device: of its tensors.
        dtype: of its tensors.
        head_size: features of an attention head; None where it is not known yet, which refuses nothing.
    """

    device: torch.device
    dtype: torch.dtype
    head_size: Optional[int] = None


Requirement = Callable[[Target], Optional[str]]
"""Returns what an implementation needs and a target lacks, in words that follow the implementation's name; or None."""


def half_on_cuda(target: Target) -> Optional[str]:
    """Require bf16 or fp16 on CUDA."""
    if target.device.type == "cuda" and target.dtype in (torch.bfloat16, torch.float16):
        return None
    return f"needs bf16 or fp16 on CUDA, not {str(target.dtype).removeprefix('torch.')} on {target.device.type}"


def on_cuda(target: Target) -> Optional[str]:
    """Require CUDA."""
    return None if target.device.type == "cuda" else f"needs CUDA, not {target.device.type}"


def on_cuda_or_interpreted(target: Target) -> Optional[str]:
    """Require CUDA, or Triton's interpreter (TRITON_INTERPRET=1), which runs its kernels anywhere, for tests."""
    return None if os.environ.get("TRITON_INTERPRET") == "1" else on_cuda(target)


def installed(package: str) -> Requirement:
    """Return the requirement of a package."""
    absent = f"needs {package}, which is not installed; pip install -e '.[gpu]' in the repository's folder"
    return lambda _: None if find_spec(package) else absent


def code_generator(target: Target) -> Optional[str]:
    """Require what torch.compile generates code with: Triton on CUDA, a C++ compiler on CPU."""
    if target.device.type == "cuda":
        return installed("triton")(target)
    name = os.environ.get("CXX", "g++")
    return None if which(name) else f"needs a C++ compiler, and {name} is not found; install one, or set CXX"


def head_sizes(multiple_of: int, largest: int) -> Requirement:
    """Return the requirement of attention kernels that take some head sizes only."""

    def refuse(target: Target) -> Optional[str]:
        size = target.head_size
        if size is None or (size % multiple_of == 0 and size <= largest):
            return None
        return f"needs heads of a multiple of {multiple_of} features up to {largest}, and these have {size}"

    return refuse


@dataclass(frozen=True)
class Implementation(Generic[T_co]):
    """One implementation of an op.

    Attributes:
        name: as settings and records name it.
        load: returns it; imports what it needs.
        requires: of the target, checked in this order.
        on_request: why `auto` passes over it; None if it does not.
    """

    name: str
    load: Callable[[], T_co]
    requires: tuple[Requirement, ...] = ()
    on_request: Optional[str] = None

    def lacks(self, target: Target) -> Optional[str]:
        """Return the first requirement that the target does not meet, in words; None if it meets all."""
        return next(filter(None, (requirement(target) for requirement in self.requires)), None)


@dataclass(frozen=True)
class Op(Generic[T_co]):
    """An operation and its implementations.

    Attributes:
        name: as records name it.
        implementations: those that `auto` prefers first; the last one requires nothing.
        setting: that selects one; None where `auto` always does.
    """

    name: str
    implementations: tuple[Implementation[T_co], ...]
    setting: Optional[str] = None


def choose(op: Op[T], target: Target, asked: str = AUTO) -> Implementation[T]:
    """Select an implementation: the one asked for, or the first that the target allows and `auto` may take.

    Raises:
        ConfigError: the one asked for is unknown, or the target lacks what it needs.
    """
    if asked == AUTO:
        return next(one for one in op.implementations if not (one.on_request or one.lacks(target)))
    found = next((one for one in op.implementations if one.name == asked), None)
    if found is None:
        known = ", ".join([AUTO, *(one.name for one in op.implementations)])
        raise ConfigError(f"{op.setting}={asked!r} is unknown; use one of {known}")
    lacks = found.lacks(target)
    if lacks:
        raise ConfigError(f"{op.setting}={asked!r} {lacks}; or use {AUTO!r}")
    return found


@dataclass(frozen=True)
class Selection:
    """The implementation of an op on a target.

    Attributes:
        name: of the one selected.
        others: why not, by name of each other one.
    """

    name: str
    others: Mapping[str, str]


def table(ops: Iterable[Op[object]], target: Target, asked: Mapping[str, str]) -> dict[str, Selection]:
    """Return the implementation of every op on a target, and why not the others, by the name of the op.

    Args:
        asked: values of the settings that select one, by the name of the setting.

    Raises:
        ConfigError: as `choose`.
    """
    found = {}
    for op in ops:
        wanted = asked.get(op.setting or "", AUTO)
        selected = choose(op, target, wanted)
        behind = f"{selected.name} comes first" if wanted == AUTO else f"{op.setting}={wanted}"
        others = {
            one.name: one.lacks(target) or one.on_request or behind for one in op.implementations if one is not selected
        }
        found[op.name] = Selection(selected.name, others)
    return found
