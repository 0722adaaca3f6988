"""Time attention, forward and backward, on every path of this machine: `python -m benchmarks.attention`.

Each case is first compared with the float32 reference on random inputs, then timed; a path that refuses a case is a row
with the reason. Rates count 4 n^2 N H operations forward and 2.5 times that backward per segment of n tokens.
"""

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Optional

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.clock import DRY, append, fake_tensors, medians
from dit.backends.device import local_device, use_cuda
from dit.errors import EXIT_OK
from dit.kernels.attention import Attention, reference_attention, segment_sdpa, varlen_attention
from dit.layout import SequenceLayout
from dit.terminal import echo
from launch.argument_types import at_least_one

CUDA_CASES = {
    "dense 256 x 64, head 72": ([256] * 64, 16, 72),
    "dense 512 x 32, head 128": ([512] * 32, 24, 128),
    "dense 1k x 16, head 64": ([1024] * 16, 16, 64),
    "dense 8k, head 64": ([8192], 16, 64),
    "dense 8k, head 128": ([8192], 24, 128),
    "dense 64k, head 128": ([65536], 24, 128),
    "packed image + video 8k, head 128": ([256] * 8 + [2048, 4096], 24, 128),
}
CPU_CASES = {
    "dense 16 x 32, head 32": ([16] * 32, 4, 32),
    "dense 256 x 4, head 64": ([256] * 4, 4, 64),
    "packed 16..256, head 64": ([16, 64, 256, 128, 48], 4, 64),
}
Context = Callable[[], AbstractContextManager[None]]
REFERENCE_TOKENS = 8192
"""Longer packs have no reference: its score matrix would not fit."""


def paths(full_size: bool) -> Iterator[tuple[str, Attention, Context]]:
    """Yield (name, attention, context to run it in): those of a GPU for its cases, or that of a CPU."""
    yield "segment_sdpa", segment_sdpa, nullcontext
    if full_size:
        for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION):
            yield f"segment_sdpa {backend.name.lower()}", segment_sdpa, partial(sdpa_kernel, backend)
        yield "varlen", varlen_attention, nullcontext


def measure(attention: Attention, context: Context, case: Sequence[Any], repeats: int, *, dry: bool) -> dict[str, Any]:
    """Check one path on one case and time it; a refusal is a result.

    Args:
        case: lengths of segments, heads, head size.
    """
    lengths, heads, head_size = case
    device = local_device()
    dtype = torch.bfloat16 if use_cuda() or dry else torch.float32
    layout = SequenceLayout.from_lengths(lengths, device=device)
    shape = layout.total_tokens, heads, head_size
    q, k, v = (torch.randn(shape, device=device, dtype=dtype, requires_grad=True) for _ in range(3))
    gradient = torch.randn_like(q)

    def forward() -> Tensor:
        return attention(q, k, v, layout, layout)

    try:
        with context():
            error = None
            if layout.total_tokens <= REFERENCE_TOKENS and not dry:
                expected = reference_attention(q, k, v, layout, layout)
                error = ((forward() - expected).float().norm() / expected.float().norm()).item()
            both = {"forward": forward, "forward_backward": lambda: forward().backward(gradient)}
            seconds = medians(both, repeats, dry=dry)
    except RuntimeError as refusal:
        return {"status": "refused", "why": str(refusal).splitlines()[0]}
    operations = 4 * sum(n * n for n in lengths) * heads * head_size
    row: dict[str, Any] = {"status": DRY if dry else "ok", "relative_error": error}
    for name, factor in () if dry else (("forward", 1.0), ("forward_backward", 3.5)):
        row[f"{name}_ms"] = 1e3 * seconds[name]
        row[f"{name}_tflops"] = factor * operations / seconds[name] / 1e12
    return row


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Run the command and return its exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.attention", description=__doc__)
    parser.add_argument("--repeats", type=at_least_one, default=11, help="timed calls of each path (%(default)s)")
    parser.add_argument("--dry", action="store_true", help="run a GPU's cases once on fake tensors, and time nothing")
    parser.add_argument("--out", type=Path, help="append one JSON line per row to this file")
    args = parser.parse_args(argv)
    torch.manual_seed(time.time_ns() % 2**31)
    echo(f"{'case':<36}{'path':<34}{'error':>10}{'fwd ms':>10}{'fwd+bwd ms':>12}{'TFLOP/s':>10}")
    full_size = use_cuda() or args.dry
    for case, sizes in (CUDA_CASES if full_size else CPU_CASES).items():
        for name, attention, context in paths(full_size):
            with fake_tensors(args.dry):
                row = measure(attention, context, sizes, args.repeats, dry=args.dry)
            if row["status"] == DRY:
                echo(f"{case:<36}{name:<34}not measured")
            elif row["status"] == "ok":
                error = "" if row["relative_error"] is None else f"{row['relative_error']:.1e}"
                numbers = f"{row['forward_ms']:>10.3f}{row['forward_backward_ms']:>12.3f}"
                echo(f"{case:<36}{name:<34}{error:>10}{numbers}{row['forward_backward_tflops']:>10.3f}")
            else:
                echo(f"{case:<36}{name:<34}refused: {row['why']}")
            append(args.out, {"case": case, "path": name} | row)
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(main())
