"""Selection among several implementations of an op, according to their requirements.

The implementations of an op are listed in the order in which `auto` prefers them. The last one has no requirements:

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
UNTRIED = "runs on request only: tests/gpu has no test of it"
UNVERIFIED = "runs on request only until tests/gpu has passed with it on this machine (megatron-dit kernels --verify)"
SLOW_START = "runs on request only: the first step waits for the compiler"
LAYERS_ONLY = "runs on request only: layers are compiled, and this op is eager"
"""Reasons to exclude an implementation from `auto`; `UNVERIFIED` holds until it is verified on the machine."""
T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


@dataclass(frozen=True)
class Target:
    """Device and tensors of an op.

    Attributes:
        head_sizes: features of a head of each attention; empty if unknown, which satisfies every requirement.
        verified: implementations that have passed tests/gpu on this machine, such as `layers.triton`.
    """

    device: torch.device
    dtype: torch.dtype
    head_sizes: frozenset[int] = frozenset()
    verified: frozenset[str] = frozenset()


Requirement = Callable[[Target], Optional[str]]
"""Returns None if the target satisfies the requirement, else a reason that continues "<implementation> ..."."""


def half_on_cuda(target: Target) -> Optional[str]:
    """Require bf16 or fp16 on CUDA."""
    if target.device.type == "cuda" and target.dtype in (torch.bfloat16, torch.float16):
        return None
    return f"needs bf16 or fp16 on CUDA, not {str(target.dtype).removeprefix('torch.')} on {target.device.type}"


def on_cuda(target: Target) -> Optional[str]:
    """Require CUDA."""
    return None if target.device.type == "cuda" else f"needs CUDA, not {target.device.type}"


def on_symmetric_memory(target: Target) -> Optional[str]:
    """Require torch's products on symmetric memory, and CUDA or torch's test mode of them."""
    from torch.distributed import _symmetric_memory  # defines the operations

    if not hasattr(torch.ops.symm_mem, "fused_matmul_reduce_scatter"):
        return f"needs torch.ops.symm_mem.fused_matmul_reduce_scatter, which torch {torch.__version__} does not have"
    return None if _symmetric_memory._is_test_mode else on_cuda(target)


def on_cuda_or_interpreted(target: Target) -> Optional[str]:
    """Require CUDA, or Triton's interpreter (TRITON_INTERPRET=1), which runs kernels on CPU in tests."""
    return None if os.environ.get("TRITON_INTERPRET") == "1" else on_cuda(target)


def installed(package: str, cure: str = "pip install -e '.[gpu]' in the repository's folder") -> Requirement:
    """Return the requirement that a package, or a module of a package, is installed."""
    parent = package.partition(".")[0]
    reason = f"needs {package}, which is not installed; {cure}"
    return lambda _: None if find_spec(parent) and find_spec(package) else reason


def code_generator(target: Target) -> Optional[str]:
    """Require the code generator of torch.compile: Triton on CUDA, a C++ compiler on CPU."""
    if target.device.type == "cuda":
        return installed("triton")(target)
    name = os.environ.get("CXX", "g++")
    return None if which(name) else f"needs a C++ compiler, and {name} is not found; install one, or set CXX"


def capability(*majors: int) -> Requirement:
    """Return the requirement of a GPU with one of these major compute capabilities."""

    def requirement(target: Target) -> Optional[str]:
        if not torch.cuda.is_available():
            return on_cuda(Target(torch.device("cpu"), target.dtype))
        major, minor = torch.cuda.get_device_capability(target.device)
        words = " or ".join(f"{one}.x" for one in majors)
        return None if major in majors else f"needs compute capability {words}, not {major}.{minor}"

    return requirement


def capability_from(major: int, minor: int, purpose: str) -> Requirement:
    """Return the requirement of a GPU with at least this compute capability; an unknown one satisfies it.

    Args:
        purpose: setting or kernels that have the requirement.
    """

    def requirement(target: Target) -> Optional[str]:
        if not torch.cuda.is_available():
            return None
        actual = torch.cuda.get_device_capability(target.device)
        needs = f"needs compute capability {major}.{minor} or higher with {purpose}, not {actual[0]}.{actual[1]}"
        return None if actual >= (major, minor) else needs

    return requirement


def not_deterministic(_: Target) -> Optional[str]:
    """Require a run that need not be deterministic."""
    if not torch.are_deterministic_algorithms_enabled():
        return None
    return "selects its kernels by itself, and training.deterministic=True needs verified ones"


def head_sizes(multiple_of: int, largest: int) -> Requirement:
    """Return the requirement of attention kernels that support only some head sizes."""

    def requirement(target: Target) -> Optional[str]:
        others = [size for size in target.head_sizes if size % multiple_of or size > largest]
        if not others:
            return None
        return f"needs a head size that is a multiple of {multiple_of} up to {largest}, not {min(others)}"

    return requirement


@dataclass(frozen=True)
class Implementation(Generic[T_co]):
    """One implementation of an op.

    Attributes:
        load: returns the implementation; imports its dependencies.
        requires: requirements, checked in this order.
        opt_in_reason: reason to exclude the implementation from `auto`, or None; see `Op.opt_in_reason`.
    """

    name: str
    load: Callable[[], T_co]
    requires: tuple[Requirement, ...] = ()
    opt_in_reason: Optional[str] = None

    def unmet_requirement(self, target: Target) -> Optional[str]:
        """Return the reason of the first requirement that the target does not satisfy, or None."""
        return next(filter(None, (requirement(target) for requirement in self.requires)), None)


@dataclass(frozen=True)
class Op(Generic[T_co]):
    """An operation and its implementations.

    Attributes:
        implementations: in the order of `auto`; the last one has no requirements.
        setting: setting that selects an implementation; None if the op always uses `auto`.
    """

    name: str
    implementations: tuple[Implementation[T_co], ...]
    setting: Optional[str] = None

    def opt_in_reason(self, one: Implementation[object], target: Target) -> Optional[str]:
        """Return the reason to exclude an implementation from `auto` on a target, or None."""
        is_verified = one.opt_in_reason == UNVERIFIED and f"{self.name}.{one.name}" in target.verified
        return None if is_verified else one.opt_in_reason


def choose(op: Op[T], target: Target, requested: str = AUTO) -> Implementation[T]:
    """Select the requested implementation of an op; `auto` selects the first one whose requirements are satisfied."""
    if requested == AUTO:
        return next(
            one for one in op.implementations if not (op.opt_in_reason(one, target) or one.unmet_requirement(target))
        )
    selected = next((one for one in op.implementations if one.name == requested), None)
    if selected is None:
        names = ", ".join([AUTO, *(one.name for one in op.implementations)])
        raise ConfigError(f"{op.setting}={requested!r} is unknown; use one of {names}")
    reason = selected.unmet_requirement(target)
    if reason:
        raise ConfigError(f"{op.setting}={requested!r} {reason}; or use {AUTO!r}")
    return selected


@dataclass(frozen=True)
class Selection:
    """The selected implementation of an op.

    Attributes:
        others: for each other implementation, the reason why it was not selected.
    """

    name: str
    others: Mapping[str, str]


def table(ops: Iterable[Op[object]], target: Target, settings: Mapping[str, str]) -> dict[str, Selection]:
    """Return the selection for every op by op name."""
    selections = {}
    for op in ops:
        requested = settings.get(op.setting or "", AUTO)
        selected = choose(op, target, requested)
        default = f"{selected.name} comes first" if requested == AUTO else f"{op.setting}={requested}"
        others = {
            one.name: one.unmet_requirement(target) or op.opt_in_reason(one, target) or default
            for one in op.implementations
            if one is not selected
        }
        selections[op.name] = Selection(selected.name, others)
    return selections
