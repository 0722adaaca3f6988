"""Time a layer of DiT-7B, forward and backward, with all kernels in turns: `python -m benchmarks.layers`.

The layer has cross-attention and QK-norm; it is compared with a plain PyTorch block, eager and compiled. Rates count
the operations of the model's formulas. On a CPU the layer is small.
"""

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Optional

import torch
from torch import Tensor, nn

from benchmarks.clock import append, fake_tensors, medians
from benchmarks.passes import SIZES, Case, Sizes, layer, plain_block
from dit.backends import process_groups
from dit.backends.device import ACCELERATOR, local_device, peak_bytes, use_cuda
from dit.backends.process_groups import ProcessGroups
from dit.errors import EXIT_OK, one_line_errors
from dit.kernels.attention import Attention
from dit.kernels.choice import Target, choose
from dit.kernels.layer_kernels import EAGER, fused
from dit.kernels.resolve import ATTENTION
from dit.layout import SequenceLayout
from dit.parallel.dims import ParallelConfig
from dit.terminal import echo
from launch import environment
from launch.argument_types import at_least_one

TOKENS, TEXT_TOKENS = 8192, 512
PACK = [256] * 8 + [2048, 4096 - 128]
"""Lengths of eight images and two clips, with padding up to `TOKENS`."""
SMALL, SMALL_SIZES = 64, (64, 4, 32)
"""Divisor of the lengths on a CPU, and sizes there."""
PLAIN, PLAIN_COMPILED = "plain PyTorch", "plain PyTorch, compiled"
KERNELS = {"eager": (EAGER, False), "fused": (fused(), False), "compiled": (EAGER, True)}
"""Kernels of our layer, and whether torch.compile compiles it."""

Call = Callable[[Tensor], Tensor]


def layouts(divisor: int) -> dict[str, SequenceLayout]:
    """Return the dense and the packed batch."""
    lengths, total = [max(1, n // divisor) for n in PACK], TOKENS // divisor
    dense = [total]
    device = local_device()
    return {
        "dense": SequenceLayout.from_lengths(dense, device=device),
        "packed": SequenceLayout.from_lengths(lengths, total_tokens=total, device=device),
    }


def flops(layout: SequenceLayout, sizes: Sizes) -> int:
    """Count a forward and backward pass of a layer: two layers minus one."""
    from dit.models.dit_cross.config import DiTCrossConfig
    from dit.monitoring.flops import PackFlops

    hidden, heads, context = sizes
    settings: dict[str, Any] = {"hidden_size": hidden, "num_attention_heads": heads, "context_size": context}
    grids = [(n, 1, 1) for n in layout.lengths]
    texts = SequenceLayout.from_lengths([TEXT_TOKENS] * layout.num_samples)
    two, one = (
        PackFlops(DiTCrossConfig(num_layers=count, **settings)).training(layout, grids, texts) for count in (2, 1)
    )
    return two - one


def attention(sizes: Sizes, dry: bool) -> Attention:
    """Return the attention that training selects."""
    target = Target(ACCELERATOR if dry else local_device(), torch.bfloat16, frozenset({sizes[0] // sizes[1]}))
    return choose(ATTENTION, target).load()


def both_passes(call: Call, tokens: int, hidden: int) -> Callable[[], object]:
    """Return a forward and backward pass of a layer, as a function without arguments."""
    x_TD, grad_TD = random(tokens, hidden).requires_grad_(), random(tokens, hidden)
    return lambda: call(x_TD).backward(grad_TD)


def random(*shape: int) -> Tensor:
    """Return random numbers in bf16."""
    return torch.randn(shape, dtype=torch.bfloat16, device=local_device())


def networks(
    name: str, layout: SequenceLayout, sizes: Sizes, groups: ProcessGroups, *, dry: bool, compiled: bool
) -> Iterator[tuple[str, Call]]:
    """Yield each kind of layer as a function of tokens."""
    hidden, _, context = sizes
    if name == "dense":
        cond_SD, text_SKC = random(1, hidden), random(1, TEXT_TOKENS, context)
        with local_device():
            block = plain_block(sizes, cross=True)
        for parameter in block.parameters():
            nn.init.normal_(parameter, std=0.02)
        yield PLAIN, lambda x_TD: block(x_TD, cond_SD, text_SKC)
        if compiled:
            fast = torch.compile(block)
            yield PLAIN_COMPILED, lambda x_TD: fast(x_TD, cond_SD, text_SKC)
    for kind, (kernels, is_compiled) in KERNELS.items():
        if (is_compiled and not compiled) or (kind == "fused" and not (use_cuda() or dry)):
            continue
        yield (
            kind,
            layer(
                Case(name, layout, cross=True),
                *(kernels, "none", groups),
                sizes=sizes,
                attention=attention(sizes, dry),
                std=0.02,
                compiled=is_compiled,
                text_tokens=TEXT_TOKENS,
            ),
        )


def rows(groups: ProcessGroups, repeats: int, *, dry: bool, compiled: bool) -> Iterator[dict[str, Any]]:
    """Time the layers on both batches and yield a row for each."""
    full_size = use_cuda() or dry
    with fake_tensors(dry):
        sizes = SIZES if full_size else SMALL_SIZES
        for name, layout in layouts(1 if full_size else SMALL).items():
            calls = {
                kind: both_passes(call, layout.total_tokens, sizes[0])
                for kind, call in networks(name, layout, sizes, groups, dry=dry, compiled=compiled)
            }
            operations = flops(layout, sizes)
            seconds = medians(calls, repeats, dry=dry)
            for kind, call in calls.items():
                rate = operations / seconds[kind] / 1e12 if seconds[kind] else None
                yield {
                    "batch": name,
                    "kernels": kind,
                    "tflop": operations / 1e12,
                    "ms": 1e3 * seconds[kind],
                    "tflops": rate,
                    "peak_bytes": None if dry else peak_bytes(call),
                }


@one_line_errors
def main(argv: Optional[Sequence[str]] = None) -> int:
    """Run the command and return its exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.layers", description=__doc__)
    parser.add_argument("--repeats", type=at_least_one, default=15, help="timed calls of each layer (%(default)s)")
    parser.add_argument("--no-compile", action="store_true", help="leave out compiled layers, whose start takes long")
    parser.add_argument("--dry", action="store_true", help="run every layer once on fake tensors, and time nothing")
    parser.add_argument("--out", type=Path, help="append one JSON line per row to this file")
    args = parser.parse_args(argv)
    environment.prepare()
    groups = process_groups.initialize(ParallelConfig())
    echo(f"{'batch':<8}{'kernels':<26}{'TFLOP':>8}{'ms':>10}{'TFLOP/s':>10}")
    for row in rows(groups, args.repeats, dry=args.dry, compiled=not (args.no_compile or args.dry)):
        append(args.out, row)
        rate = "-" if row["tflops"] is None else f"{row['tflops']:.3g}"
        echo(f"{row['batch']:<8}{row['kernels']:<26}{row['tflop']:>8.3g}{row['ms']:>10.3f}{rate:>10}")
    process_groups.destroy()
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(main())
