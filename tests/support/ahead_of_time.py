"""Ahead-of-time compilation of Triton kernels without a GPU: registers, spills and widths of memory accesses."""

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Optional

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from dit.patches import replaced

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
POINTERS = {"bf16": "*bf16", "fp16": "*fp16", "fp32": "*fp32", "int32": "*i32", "int64": "*i64"}
NUMBER, ABSENT = "number", "none"
KINDS = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.int32: "int32",
    torch.int64: "int64",
}


@dataclass(frozen=True)
class Compiled:
    """Properties of a compiled kernel.

    Attributes:
        registers: registers per thread.
        spills: instructions that read or write local memory.
        shared_bytes: shared memory per program.
        loads, stores: instructions that read and write global memory, by their width in bits.
        copies: instructions that copy global to shared memory, by their width in bits; the program does not wait.
    """

    registers: int
    spills: int
    shared_bytes: int
    loads: Mapping[int, int]
    stores: Mapping[int, int]
    copies: Mapping[int, int]

    @property
    def accesses(self) -> dict[int, int]:
        """Instructions that read or write global memory, by their width in bits."""
        counts = Counter[int]()
        for of_kind in (self.loads, self.stores, self.copies):
            counts.update(of_kind)
        return dict(sorted(counts.items()))


def compiled(
    kernel: Any,
    types: Mapping[str, str],
    flags: Mapping[str, object],
    *,
    capability: int,
    num_warps: int,
    maxnreg: Optional[int] = None,
) -> Compiled:
    """Compile a kernel ahead of time, as if all addresses and sizes that Triton specialises on were multiples of 16.

    Args:
        kernel: result of triton.jit.
        types: type of each argument by name: a key of `POINTERS`, "none" for None, "number" for a float32.
        flags: compile-time constants.
        capability: 90 for H100 and H200, 100 for B200.
        maxnreg: limit of registers per thread.
    """
    signature, constants, aligned = {}, {}, {}
    for i, parameter in enumerate(kernel.params):
        name = parameter.name
        if parameter.is_constexpr or types.get(name) == ABSENT:
            signature[name], constants[name] = "constexpr", flags.get(name)
        elif types.get(name) in POINTERS:
            signature[name], aligned[(i,)] = POINTERS[types[name]], [["tt.divisibility", 16]]
        elif name == "eps" or types.get(name) == NUMBER:
            signature[name] = "fp32"
        else:
            signature[name] = "i32"
            if not parameter.do_not_specialize:
                aligned[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constants, aligned)
    binary = triton.compile(
        source, target=GPUTarget("cuda", capability, 32), options={"num_warps": num_warps, "maxnreg": maxnreg}
    )
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary.asm["cubin"])
        file.flush()
        usage = subprocess.run(
            [TOOLS / "cuobjdump", "-res-usage", file.name], capture_output=True, text=True, check=True
        )
        code = subprocess.run([TOOLS / "nvdisasm", file.name], capture_output=True, text=True, check=True).stdout
    registers = int(re.findall(r"REG:(\d+)", usage.stdout)[0])
    spills = len(re.findall(r"\b(?:LDL|STL)\b", code))
    widths = (_widths(instruction, code) for instruction in ("LDG", "STG", "LDGSTS"))
    return Compiled(registers, spills, binary.metadata.shared, *widths)


def _widths(instruction: str, code: str) -> dict[int, int]:
    """Count the occurrences of an instruction by access width in bits."""
    counts: dict[int, int] = {}
    for suffix in re.findall(rf"\b{instruction}\.E([.\w]*)", code):
        default = 8 if ".U8" in suffix else 16 if "16" in suffix else 32
        width = next((int(w) for w in re.findall(r"\.(64|128|256)", suffix)), default)
        counts[width] = counts.get(width, 0) + 1
    return counts


@dataclass(frozen=True)
class Launch:
    """One recorded launch of a kernel.

    Attributes:
        grid: number of programs.
        types, flags, num_warps, maxnreg: arguments of `compiled`.
        sizes: other whole numbers.
    """

    kernel: Any
    grid: int
    num_warps: int
    types: Mapping[str, str] = field(default_factory=dict)
    flags: Mapping[str, object] = field(default_factory=dict)
    maxnreg: Optional[int] = None
    sizes: Mapping[str, int] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Name of the kernel."""
        return str(self.kernel.fn.__name__)

    def compiled(self, capability: int) -> Compiled:
        """Compile the kernel for the recorded arguments."""
        return compiled(
            self.kernel,
            self.types,
            self.flags,
            capability=capability,
            num_warps=self.num_warps,
            maxnreg=self.maxnreg,
        )


@contextmanager
def record_launches() -> Iterator[list[Launch]]:
    """Record launches instead of running them, for tensors on any device; outputs are not written."""
    launches: list[Launch] = []

    def run(kernel: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> None:
        num_warps, maxnreg = options.pop("num_warps", 4), options.pop("maxnreg", None)
        values = dict(zip(kernel.arg_names, arguments)) | options
        programs = 1
        for size in grid:
            programs *= size
        types = {name: kind for name, value in values.items() if (kind := _kind(value)) is not None}
        flags = {p.name: values[p.name] for p in kernel.params if p.is_constexpr}
        sizes = {name: value for name, value in values.items() if isinstance(value, int) and name not in flags}
        launches.append(Launch(kernel, programs, num_warps, types, flags, maxnreg, sizes))

    with replaced(JITFunction, run=run):
        yield launches


def _kind(value: Any) -> Optional[str]:
    """Return the type of an argument for `compiled`; None for a size or a constant."""
    if value is None:
        return ABSENT
    if isinstance(value, float):
        return NUMBER
    return KINDS[value.dtype] if isinstance(value, Tensor) else None
