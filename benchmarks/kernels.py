"""Memory bandwidth of the fused kernels, modelled or measured: `python -m benchmarks.kernels [--device h200]`.

Without a GPU this is a model, not a measurement. Each kernel is compiled for the device. Registers and shared memory of
the machine code determine the number of concurrent programs per multiprocessor, and its loads the bytes in flight:

    bytes in flight = programs at once x threads x bytes of a thread's widest loads x unmasked share
    modelled        = min(bandwidth, bytes in flight / latency x (reads + writes) / reads) x balance
    balance         = programs / (programs of the multiprocessor that has most x multiprocessors)

Rows that a loop copies to shared memory in advance are in flight, the row that it processes is not. This is an upper
bound, because barriers, instructions and caches are ignored. On a GPU the same command also times each call with cold
caches and prints the measurements.
"""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, Optional

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.clock import append
from benchmarks.layer_traffic import WRITE_ONLY
from benchmarks.prediction import device_of
from dit.backends.device import describe, device_seconds, local_device, use_cuda
from dit.errors import EXIT_OK, one_line_errors
from dit.planner.devices import B200, H100, H200
from dit.terminal import echo
from dit.tracing.repeats import tensors_in

BF16, FP32 = torch.bfloat16, torch.float32
TOKENS, HIDDEN, HEAD_SIZE = 8192, 4096, 128
LENGTHS = [3000, 410, 1999, 2005]


@dataclass(frozen=True)
class Chip:
    """Limits of a GPU.

    Attributes:
        capability: compute capability, as an integer.
        multiprocessors: of the GPU.
        bandwidth: bytes per second that an element-wise kernel reaches (`dit.planner.devices`).
        shared_bytes: of a multiprocessor; a program needs one kilobyte more than it requests.
    """

    capability: int
    multiprocessors: int
    bandwidth: float
    shared_bytes: int = 228 * 1024


CHIPS = {
    "h100": Chip(90, 132, H100.memory_bandwidth),
    "h200": Chip(90, 132, H200.memory_bandwidth),
    "b200": Chip(100, 148, B200.memory_bandwidth),
}
OTHERWISE = "h200"  # default without a GPU, or for an unknown one
REGISTERS, WARPS, PROGRAMS = 65536, 64, 32
"""Limits of a multiprocessor; a warp gets registers in units of 256."""
LATENCY_S = 0.8e-6
"""Latency of a load under load, an assumption: about 1,400 cycles."""
WARM_UP, REPEATS = 3, 20


@dataclass(frozen=True)
class Row:
    """One kernel of a call.

    Attributes:
        programs: concurrent programs of a multiprocessor.
        occupancy: their warps, divided by the largest possible number.
        in_flight: bytes of outstanding loads.
        modelled: bytes per second, reads and writes.
    """

    case: str
    kernel: str
    grid: int
    registers: int
    spills: int
    shared_bytes: int
    programs: int
    occupancy: float
    in_flight: int
    modelled: float


@dataclass(frozen=True)
class Call:
    """Traffic and bandwidth of a call.

    Attributes:
        read, written: bytes.
        modelled: bytes per second of its slowest kernel.
        measured: bytes per second; None without a GPU.
    """

    case: str
    read: int
    written: int
    modelled: float
    measured: Optional[float] = None


class Traffic(TorchDispatchMode):
    """Counts the bytes that fused operators read and write: each argument and each result once."""

    def __init__(self) -> None:
        super().__init__()
        self.read = self.written = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.namespace == "dit":
            for argument, value in zip(func._schema.arguments, args):
                size = sum(x.nbytes for x in tensors_in((value,)))
                changed = argument.alias_info is not None and argument.alias_info.is_write
                self.written += size if changed else 0
                self.read += 0 if argument.name in WRITE_ONLY else size
            self.written += sum(x.nbytes for x in tensors_in((out,)))
        return out


def cases(device: torch.device, chip: Chip, hidden: int = HIDDEN) -> dict[str, Callable[[], object]]:
    """Return every fused operation at a size of published models, by name."""
    from dit.kernels.adamw import Elements, Rates
    from dit.kernels.fused import noise, ops, picture_ops
    from dit.kernels.fused.adamw import adamw
    from dit.kernels.fused.blocks import FORWARD_ROWS, blocks_of, rows_of_blocks, rows_of_pictures
    from dit.kernels.fused.residual_norm import WIDEST_WITH_BIAS
    from dit.layout import SequenceLayout
    from dit.objectives.addressed_noise import AddressedNoise

    layout = SequenceLayout.from_lengths(LENGTHS, multiple_of=128, total_tokens=TOKENS, device=device)
    samples = layout.num_samples

    def empty(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    x, y, grad = (empty(TOKENS, hidden) for _ in range(3))
    gate, shift, scale = (empty(samples, hidden) for _ in range(3))
    bias = empty(hidden) if hidden <= WIDEST_WITH_BIAS else None
    mean, rstd = empty(TOKENS, dtype=FP32), empty(TOKENS, dtype=FP32)
    size, count = HEAD_SIZE, hidden // HEAD_SIZE
    heads, of_head = empty(TOKENS, count, 3, size), empty(size)
    cos, sin = (empty(TOKENS, 1, size // 2, dtype=FP32) for _ in range(2))
    q = empty(TOKENS, count, size)
    inner, of_inner, of_gated = empty(TOKENS, 4 * hidden), empty(TOKENS, 4 * hidden), empty(TOKENS, 2 * hidden)
    forward, backward = blocks_of(layout, FORWARD_ROWS), blocks_of(layout, rows_of_blocks(TOKENS, chip.multiprocessors))
    tables = (forward.table, forward.offsets), (backward.table, backward.offsets)
    sums = empty(len(backward.table), 3 + (bias is not None), hidden, dtype=FP32)
    pictures, channels = empty(16, 64 * 64, 256), 256
    rows, weight = rows_of_pictures(64 * 64), empty(channels, dtype=FP32)
    of_blocks = empty(16 * 64 * 64 // rows, 2, channels, dtype=FP32)
    factors, rest_N2C = empty(16, 4, channels, dtype=FP32), empty(16, 2, channels, dtype=FP32)
    modulation = empty(16, channels), empty(16, channels)
    many_elements = 1 << 24
    elements = []
    for _ in range(2):
        g, p, m, v, average = (empty(many_elements, dtype=FP32) for _ in range(5))
        elements.append(Elements(g, p, m, v, average, empty(many_elements)))
    ids = torch.zeros(samples, dtype=torch.int64, device=device)
    latents, ones = empty(8 * TOKENS, 16), empty(samples, dtype=FP32)
    many = SequenceLayout.from_lengths([8 * n for n in LENGTHS], total_tokens=8 * TOKENS, device=device)
    draws = AddressedNoise(1, 5, ids, many, mixer=noise.mix)
    rates = Rates(1e-4, 0.9, 0.99, 1e-8, 0.1, 10, torch.ones((), device=device))
    rates = replace(rates, table=rates.on_device)
    modulated = gate, bias, scale, None
    return {
        "residual + norm + modulate": lambda: ops.residual_norm(
            x, y, gate, bias, shift, scale, None, *tables[0], 1e-6, False
        ),
        "its gradient": lambda: ops.residual_norm_backward(grad, y, x, y, *modulated, mean, rstd, *tables[1]),
        "sums of segments": lambda: ops.segment_sums(sums, *modulated, *tables[1], BF16),
        "heads: norm + RoPE": lambda: ops.heads(heads[:, :, :2], of_head, of_head, cos, sin, True, 1e-6),
        "heads: gradient": lambda: ops.heads_backward(
            *(q, q, q, heads[:, :, :2], of_head, of_head, cos, sin, count, 1e-6, False)
        ),
        "GELU + bias": lambda: ops.activation(inner, None, False),
        "GELU: gradient": lambda: ops.activation_backward(of_inner, inner, None, False),
        "SwiGLU": lambda: ops.activation(inner, None, True),
        "SwiGLU: gradient": lambda: ops.activation_backward(of_gated, inner, None, True),
        "group norm: sums": lambda: picture_ops.group_sums(pictures, rows),
        "group norm: factors": lambda: picture_ops.group_factors(
            *(of_blocks, weight, weight, *modulation, 16, 64 * 64, 32, rows, 1e-5)
        ),
        "group norm + SiLU": lambda: picture_ops.norm_groups(pictures, factors, rows, True),
        "group norm: sums of gradients": lambda: picture_ops.group_gradient_sums(
            pictures, pictures, factors, rows, True
        ),
        "group norm: gradient": lambda: picture_ops.norm_groups_backward(
            pictures, pictures, factors, rest_N2C, rows, True
        ),
        "AdamW + average + copy": lambda: adamw(elements, rates),
        "noise + noising": lambda: draws.mix(latents, (ones, ones), (ones, ones)),
    }


def occupancy(registers: int, shared_bytes: int, warps: int, chip: Chip) -> int:
    """Return the number of concurrent programs of a kernel per multiprocessor."""
    of_warp = -(-registers * 32 // 256) * 256
    return min(PROGRAMS, WARPS // warps, REGISTERS // of_warp // warps, chip.shared_bytes // (shared_bytes + 1024))


def unmasked(launch: Any) -> float:
    """Return the share of the lanes of a kernel's tiles that have columns."""
    tile = launch.flags.get("WIDTH", launch.flags.get("COLUMNS", 1)) + launch.flags.get("REST", 0)
    size = launch.sizes.get("size", launch.sizes.get("channels", tile))
    return float(size / (-(-size // tile) * tile))


def _loads_in_flight(launch: Any, binary: Any) -> dict[int, float]:
    """Return loads of a thread by width; a loop of N stages has its copies N times, for N - 1 rows in advance."""
    stages, copies = launch.flags.get("STAGES", 1), binary.copies
    return {w: binary.loads.get(w, 0) + copies.get(w, 0) * (stages - 1) / stages for w in {*binary.loads, *copies}}


def model(case: str, call: Callable[[], object], chip: Chip) -> tuple[Call, list[Row]]:
    """Compile the kernels of a call for a chip, and model their bandwidth; nothing runs."""
    from benchmarks.ahead_of_time import record_launches

    with record_launches() as launches, Traffic() as traffic:
        call()
    rows = []
    for launch in launches:
        binary = launch.compiled(chip.capability)
        programs = occupancy(binary.registers, binary.shared_bytes, launch.num_warps, chip)
        loads = _loads_in_flight(launch, binary)
        widest = max(loads)
        at_once = min(launch.grid, programs * chip.multiprocessors)
        in_flight = int(at_once * launch.num_warps * 32 * loads[widest] * widest / 8 * unmasked(launch))
        balance = launch.grid / (-(-launch.grid // chip.multiprocessors) * chip.multiprocessors)
        reached = in_flight / LATENCY_S * (traffic.read + traffic.written) / traffic.read
        modelled = min(chip.bandwidth, reached) * balance
        share = programs * launch.num_warps / WARPS
        rows.append(
            Row(
                *(case, launch.name, launch.grid, binary.registers, binary.spills, binary.shared_bytes),
                *(programs, share, in_flight, modelled),
            )
        )
    return Call(case, traffic.read, traffic.written, min(row.modelled for row in rows)), rows


def measure(call: Callable[[], object], nbytes: int) -> float:
    """Return the bytes per second of a call on the present GPU: the median, each time with cold caches."""
    return nbytes / median(device_seconds(call, WARM_UP + REPEATS)[WARM_UP:])


def table(calls: Sequence[Call], rows: Sequence[Row], chip: Chip) -> str:
    """Return calls and their kernels as a Markdown table."""
    lines = [
        "| operation | MB | kernel | programs | registers | shared bytes | at once | occupancy | MB in flight "
        "| modelled GB/s | of attainable | measured GB/s |",
        "| --- " * 12 + "|",
    ]
    for call in calls:
        measured = "not measured" if call.measured is None else f"{call.measured / 1e9:.0f}"
        for row in (row for row in rows if row.case == call.case):
            lines.append(
                f"| {call.case} | {(call.read + call.written) / 1e6:.1f} | {row.kernel} | {row.grid} | {row.registers} "
                f"| {row.shared_bytes} | {row.programs} | {row.occupancy:.0%} | {row.in_flight / 1e6:.1f} "
                f"| {row.modelled / 1e9:.0f} | {row.modelled / chip.bandwidth:.0%} | {measured} |"
            )
    return "\n".join(lines)


def kind_of(name: str) -> Optional[str]:
    """Return the key in `CHIPS` of a device, by its CUDA name; None if it is unknown."""
    device = device_of(name)
    return device.name.lower() if device is not None and device.name.lower() in CHIPS else None


@one_line_errors
def main(argv: Optional[Sequence[str]] = None) -> int:
    """Run the command and return its exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kernels", description=__doc__)
    parser.add_argument("--device", choices=CHIPS, help=f"modelled device (this GPU if known, else {OTHERWISE})")
    parser.add_argument("--only", nargs="+", metavar="TEXT", help="operations whose name contains one of these")
    parser.add_argument("--hidden", type=int, default=HIDDEN, help="hidden size of the layers")
    parser.add_argument("--json", action="store_true", help="print the numbers as JSON")
    parser.add_argument("--out", type=Path, help="append one JSON line per operation to this file")
    args = parser.parse_args(argv)
    device = args.device or kind_of(describe()) or OTHERWISE
    chip, calls, rows = CHIPS[device], [], []
    for case, operation in cases(local_device(), chip, args.hidden).items():
        if args.only and not any(text in case for text in args.only):
            continue
        call, kernels = model(case, operation, chip)
        if use_cuda():
            call = replace(call, measured=measure(operation, call.read + call.written))
        calls.append(call)
        rows += kernels
    if args.out:
        for call in calls:
            append(args.out, {"modelled_for": device, **asdict(call)})
    if args.json:
        echo(json.dumps({"calls": [asdict(call) for call in calls], "kernels": [asdict(row) for row in rows]}))
        return EXIT_OK
    echo(f"modelled for {device} ({chip.bandwidth / 1e9:.0f} GB/s attainable), not measured unless marked as measured")
    echo(table(calls, rows, chip))
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(main())
