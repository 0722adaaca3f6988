"""Triton kernels compiled for a GPU that is not there: their registers, spills and widths of access."""

import re
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
NAMES = {"bf16": "*bf16", "fp32": "*fp32", "int32": "*i32"}


@dataclass(frozen=True)
class Compiled:
    """A kernel as machine code.

    Attributes:
        registers: per thread.
        spills: instructions that read or write local memory.
        shared_bytes: per program.
        accesses: instructions that read or write global memory, by their width in bits.
    """

    registers: int
    spills: int
    shared_bytes: int
    accesses: Mapping[int, int]


def compiled(
    kernel: Any, pointers: Mapping[str, str], flags: Mapping[str, object], *, num_warps: int, capability: int
) -> Compiled:
    """Compile a kernel ahead of time, with all sizes and addresses multiples of 16.

    Args:
        kernel: of triton.jit.
        pointers: type of each tensor by its name (`NAMES`); "none" for one that is left out.
        flags: the constants.
        capability: 90 for H100 and H200, 100 for B200.
    """
    signature, constants, aligned = {}, {}, {}
    for i, parameter in enumerate(kernel.params):
        name = parameter.name
        if parameter.is_constexpr or pointers.get(name) == "none":
            signature[name], constants[name] = "constexpr", flags.get(name)
        elif name in pointers:
            signature[name], aligned[(i,)] = NAMES[pointers[name]], [["tt.divisibility", 16]]
        elif name == "eps":
            signature[name] = "fp32"
        else:
            signature[name], aligned[(i,)] = "i32", [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constants, aligned)
    made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": num_warps})
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        usage = subprocess.run(
            [TOOLS / "cuobjdump", "-res-usage", file.name], capture_output=True, text=True, check=True
        )
        code = subprocess.run([TOOLS / "nvdisasm", file.name], capture_output=True, text=True, check=True).stdout
    numbers = dict(re.findall(r"(REG|STACK|SHARED|LOCAL):(\d+)", usage.stdout))
    accesses: dict[int, int] = {}
    for what in re.findall(r"\b(?:LDG|STG)\.E([.\w]*)", code):
        width = next(
            (int(w) for w in re.findall(r"\.(64|128|256)", what)), 8 if ".U8" in what else 16 if "16" in what else 32
        )
        accesses[width] = accesses.get(width, 0) + 1
    return Compiled(int(numbers["REG"]), len(re.findall(r"\b(?:LDL|STL)\b", code)), int(numbers["SHARED"]), accesses)
