"""Memory bandwidth of the fused kernels on this GPU: `python -m benchmarks.kernels`.

Each call is timed with cold caches. Without a GPU nothing runs, and the table has only the bytes of each call.
"""

import argparse
import importlib
import inspect
import pkgutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Optional

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.clock import append, medians
from benchmarks.layer_traffic import WRITE_ONLY
from dit.backends.device import local_device, use_cuda
from dit.errors import EXIT_OK, one_line_errors
from dit.patches import replaced
from dit.terminal import echo
from dit.tracing.counter import tensors_in

BF16, FP32 = torch.bfloat16, torch.float32
TOKENS, HIDDEN, HEAD_SIZE = 8192, 4096, 128
LENGTHS = [3000, 410, 1999, 2005]
REPEATS = 20


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


def cases(device: torch.device) -> dict[str, Callable[[], object]]:
    """Return every fused operation at a size of published models, by name."""
    from dit.kernels.adamw import Elements, Rates
    from dit.kernels.fused import noise, ops, picture_ops
    from dit.kernels.fused.adamw import adamw
    from dit.kernels.fused.blocks import blocks_of_passes, rows_of_pictures
    from dit.kernels.fused.residual_norm import WIDEST_WITH_BIAS
    from dit.layout import SequenceLayout
    from dit.objectives.addressed_noise import AddressedNoise

    hidden = HIDDEN
    layout = SequenceLayout.from_lengths(LENGTHS, multiple_of=128, total_tokens=TOKENS, device=device)
    samples = layout.num_samples

    def empty(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    x, y, grad = (empty(TOKENS, hidden) for _ in range(3))
    gate, shift, scale = (empty(samples, hidden) for _ in range(3))
    bias = empty(hidden) if hidden <= WIDEST_WITH_BIAS else None
    statistics = empty(TOKENS, 2, dtype=FP32)
    size, count = HEAD_SIZE, hidden // HEAD_SIZE
    heads, of_head = empty(TOKENS, count, 3, size), empty(size)
    cos, sin = (empty(TOKENS, 1, size // 2, dtype=FP32) for _ in range(2))
    q = empty(TOKENS, count, size)
    inner, of_inner, of_gated = empty(TOKENS, 4 * hidden), empty(TOKENS, 4 * hidden), empty(TOKENS, 2 * hidden)
    forward, backward = blocks_of_passes(layout, hidden)
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
        "its gradient": lambda: ops.residual_norm_backward(grad, y, x, y, *modulated, statistics, *tables[1]),
        "sums of segments": lambda: ops.segment_sums(sums, *modulated, *tables[1]),
        "heads: norm + RoPE": lambda: ops.heads(heads[:, :, :2], of_head, of_head, cos, sin, True, 1e-6),
        "heads: gradient": lambda: ops.heads_backward(
            *(q, q, q, heads[:, :, :2], of_head, of_head, cos, sin, count, 1e-6, False)
        ),
        "GELU + bias": lambda: ops.activation(inner, of_inner[0], 0),
        "GELU: gradient": lambda: ops.activation_backward(of_inner, inner, None, 0),
        "SwiGLU": lambda: ops.activation(inner, None, ops.SILU),
        "SwiGLU: gradient": lambda: ops.activation_backward(of_gated, inner, None, ops.SILU),
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


@contextmanager
def kernels_do_nothing() -> Iterator[None]:
    """Replace the functions that start fused kernels; their results stay uninitialised."""
    from dit.kernels.fused import gpu

    names = [info.name for info in pkgutil.iter_modules(gpu.__path__)]
    modules = [importlib.import_module(f"{gpu.__name__}.{name}") for name in names]  # first: they import functions
    with ExitStack() as stack:
        for module in modules:
            functions = inspect.getmembers(module, inspect.isfunction)
            starters = [name for name, it in functions if it.__module__ == module.__name__ and not name.startswith("_")]
            stack.enter_context(replaced(module, **dict.fromkeys(starters, lambda *_, **__: None)))
        yield


def counted(call: Callable[[], object]) -> Traffic:
    """Return the traffic of a call, whose kernels are not started."""
    with kernels_do_nothing(), Traffic() as traffic:
        call()
    return traffic


@one_line_errors
def main(argv: Optional[Sequence[str]] = None) -> int:
    """Run the command and return its exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kernels", description=__doc__)
    parser.add_argument("--only", nargs="+", metavar="TEXT", help="operations whose name contains one of these")
    parser.add_argument("--out", type=Path, help="append one JSON line per operation to this file")
    args = parser.parse_args(argv)
    echo(f"{'operation':<32}{'MB':>8}{'GB/s':>8}")
    for case, call in cases(local_device()).items():
        if args.only and not any(text in case for text in args.only):
            continue
        traffic, measured = counted(call), None
        if use_cuda():
            measured = (traffic.read + traffic.written) / medians({case: call}, REPEATS)[case]
        append(args.out, {"case": case, "read": traffic.read, "written": traffic.written, "measured": measured})
        rate = "-" if measured is None else f"{measured / 1e9:.0f}"
        echo(f"{case:<32}{(traffic.read + traffic.written) / 1e6:>8.1f}{rate:>8}")
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(main())
