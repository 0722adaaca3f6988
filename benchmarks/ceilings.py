"""Measure what the device can do at best, the copy of memory and matrix products: `python -m benchmarks.ceilings`.

Inputs are random: a product of zeros draws less power and is faster. A copy of n bytes counts as 2 n.
"""

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Optional

import torch

from benchmarks.clock import append, fake_tensors, medians
from dit.backends.device import local_device, use_cuda
from dit.errors import EXIT_OK
from dit.terminal import echo
from launch.argument_types import at_least_one

COPY = "copy"
PRODUCTS = {
    "8192 x 8192 x 8192": (8192, 8192, 8192),
    "DiT-7B query, key, value": (8192, 3072, 3 * 3072),
    "DiT-7B MLP, first": (8192, 3072, 4 * 3072),
    "DiT-7B MLP, second": (8192, 4 * 3072, 3072),
}
"""Rows, inner size and columns of bf16 products."""
COPIED, SCALE = 1 << 30, 64
"""Bytes of the copy, and the divisor of all sizes on a CPU."""


def cases(scale: int) -> Iterator[tuple[str, float, Callable[[], object]]]:
    """Yield (name, work in bytes or operations, call)."""
    place: dict[str, Any] = {"dtype": torch.bfloat16, "device": local_device()}
    source = torch.randn(COPIED // 2 // scale, **place)
    target = torch.empty_like(source)
    yield COPY, 2.0 * source.nbytes, lambda: target.copy_(source)
    for name, sizes in PRODUCTS.items():
        rows, inner, columns = (max(1, size // scale) for size in sizes)
        a, b = torch.randn(rows, inner, **place), torch.randn(inner, columns, **place)
        yield name, 2.0 * rows * inner * columns, lambda a=a, b=b: a @ b  # type: ignore[misc]


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Run the command and return its exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ceilings", description=__doc__)
    parser.add_argument("--repeats", type=at_least_one, default=30, help="timed calls of each case (%(default)s)")
    parser.add_argument("--dry", action="store_true", help="run every case once on fake tensors, and time nothing")
    parser.add_argument("--out", type=Path, help="append one JSON line per row to this file")
    args = parser.parse_args(argv)
    with fake_tensors(args.dry):
        for name, work, call in cases(1 if use_cuda() or args.dry else SCALE):
            seconds = medians({name: call}, args.repeats, dry=args.dry)[name]
            row: dict[str, Any] = {"case": name, "work": work, "per_s": work / seconds if seconds else None}
            append(args.out, row)
            unit = "GB/s" if name == COPY else "GFLOP/s"
            echo(f"{name:<28}{row['per_s'] / 1e9:>12,.0f} {unit}" if seconds else f"{name:<28}  not measured")
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(main())
