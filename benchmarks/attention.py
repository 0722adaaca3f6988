"""Time attention, forward and backward, on every path of this machine: `python -m benchmarks.attention`.

Each case is first compared with the float32 reference on random inputs, then timed; a path that refuses a case is a row
with the reason. Rates count 4 n^2 N H operations forward and 2.5 times that backward per segment of n tokens.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Optional

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.step import revision
from dit.backends.device import describe, local_device, synchronize, use_cuda
from dit.errors import EXIT_OK
from dit.kernels.attention import Attention, reference_attention, segment_sdpa, varlen_attention
from dit.layout import SequenceLayout
from dit.terminal import echo

CUDA_CASES = {
    "dense 256 x 64, head 72": ([256] * 64, 16, 72),
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


def paths() -> Iterator[tuple[str, Attention, Context]]:
    """Yield (name, attention, context to run it in)."""
    yield "segment_sdpa", segment_sdpa, nullcontext
    if use_cuda():
        for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION):
            yield f"segment_sdpa {backend.name.lower()}", segment_sdpa, partial(sdpa_kernel, backend)
        yield "varlen", varlen_attention, nullcontext


def measure(
    attention: Attention, context: Context, lengths: list[int], heads: int, head_size: int, repeats: int
) -> dict[str, Any]:
    """Check one path on one case and time it; a refusal is a result."""
    device = local_device()
    dtype = torch.bfloat16 if use_cuda() else torch.float32
    layout = SequenceLayout.from_lengths(lengths, device=device)
    q, k, v = (
        torch.randn(layout.total_tokens, heads, head_size, device=device, dtype=dtype, requires_grad=True)
        for _ in range(3)
    )
    gradient = torch.randn_like(q)
    try:
        with context():
            out: Tensor = attention(q, k, v, layout, layout)
            out.backward(gradient)
            error = None
            if layout.total_tokens <= REFERENCE_TOKENS:
                expected = reference_attention(q, k, v, layout, layout)
                error = ((out - expected).float().norm() / expected.float().norm()).item()
            forward, forward_and_backward = [], []
            for _ in range(repeats):
                synchronize()
                started = time.perf_counter()
                out = attention(q, k, v, layout, layout)
                synchronize()
                forward.append(time.perf_counter() - started)
                out.backward(gradient)
                synchronize()
                forward_and_backward.append(time.perf_counter() - started)
    except RuntimeError as refusal:
        return {"status": "refused", "why": str(refusal).splitlines()[0]}
    operations = 4 * sum(n * n for n in lengths) * heads * head_size
    return {
        "status": "ok",
        "relative_error": error,
        "forward_ms": 1e3 * median(forward),
        "forward_backward_ms": 1e3 * median(forward_and_backward),
        "forward_tflops": operations / median(forward) / 1e12,
        "forward_backward_tflops": 3.5 * operations / median(forward_and_backward) / 1e12,
    }


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Run the command and return its exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.attention", description=__doc__)
    parser.add_argument("--repeats", type=int, default=11, help="timed calls of each path (%(default)s)")
    parser.add_argument("--out", type=Path, help="append one JSON line per row to this file")
    args = parser.parse_args(argv)
    torch.manual_seed(time.time_ns() % 2**31)
    echo(f"{'case':<36}{'path':<34}{'error':>10}{'fwd ms':>10}{'fwd+bwd ms':>12}{'TFLOP/s':>10}")
    for case, (lengths, heads, head_size) in (CUDA_CASES if use_cuda() else CPU_CASES).items():
        for name, attention, context in paths():
            row = measure(attention, context, lengths, heads, head_size, args.repeats)
            if row["status"] == "ok":
                error = "" if row["relative_error"] is None else f"{row['relative_error']:.1e}"
                numbers = f"{row['forward_ms']:>10.3f}{row['forward_backward_ms']:>12.3f}"
                echo(f"{case:<36}{name:<34}{error:>10}{numbers}{row['forward_backward_tflops']:>10.3f}")
            else:
                echo(f"{case:<36}{name:<34}refused: {row['why']}")
            if args.out:
                head = {"case": case, "path": name, "device": describe(), "revision": revision()}
                args.out.parent.mkdir(parents=True, exist_ok=True)
                with open(args.out, "a") as file:
                    file.write(json.dumps(head | row) + "\n")
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(main())
