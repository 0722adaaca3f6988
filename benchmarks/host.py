"""Time the host's work for one layer, forward and backward: `python -m benchmarks.host`, on CPU in a minute.

With `--waits`, count instead, for a step of a tiny model, the copies between host and device and the waits of the host.

Tensors are small, so that the work of Python, autograd and torch's dispatcher dominates; a GPU waits for this work if
its kernels are short. Fused kernels are not started: their launch is missing, and eager rows include small CPU kernels.
Each row is compared with a plain PyTorch block on a dense batch of the same number of tokens. Attention is one call of
torch's: over all samples together in our layers, over a batch of samples in the plain block.
"""

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from statistics import median
from typing import Any, Literal, Optional
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.kernels import kernels_do_nothing
from benchmarks.passes import Case, PlainBlock, layer
from benchmarks.waits import PHASES, count_waits
from dit.backends import process_groups
from dit.errors import EXIT_OK, one_line_errors
from dit.kernels.layer_kernels import EAGER, fused
from dit.layout import SequenceLayout
from dit.parallel.dims import ParallelConfig
from dit.planner.job import Job
from dit.settings import OptimizerConfig, TrainingConfig
from dit.terminal import echo
from dit.tracing.packs import PackShape
from dit.verify.tiny import tiny_model
from launch import environment
from launch.argument_types import at_least_one
from launch.config_file import built
from launch.train import call_recipe

SIZES = 48, 2, 16
DENSE = SequenceLayout.from_lengths([8] * 4)
RAGGED = SequenceLayout.from_lengths([9, 4, 8, 5], multiple_of=2, total_tokens=32)
CASES = (
    Case("DiT dense", DENSE),
    Case("DiT ragged + padding", RAGGED),
    Case("DiT-cross dense", DENSE, cross=True),
    Case("DiT-cross ragged + padding", RAGGED, cross=True),
)
KERNELS = {"eager": EAGER, "fused": fused()}
LAYERS = 8
"""Layers of a stack; times are divided by it."""
CALLS = 3
"""Calls between two readings of the clock."""
WARM_UP = 5
"""Readings before those that count."""

WAITS = (
    ("DiT", "tiny_dit", ("dense", "packed", "packed, CP 2")),
    ("DiT-cross", "pretrain_7b", ("dense", "packed", "packed, CP 2")),
    ("FLUX", "flux_12b", ("dense", "packed", "packed, CP 2")),
    ("STDiT", "pretrain_stdit_xl", ("packed", "packed, CP 2")),
    ("UNet", "tiny_ldm_unet", ("dense",)),
)
"""Backbone, recipe and packs of each step whose waits are counted."""
MICRO_BATCHES = 2
PACKED = ((1, 16, 16), (1, 8, 8), (4, 8, 8), (1, 4, 4), (1, 8, 12))
"""Patches along t, h and w of samples of several sizes."""

Call = Callable[[Tensor], Any]


@contextmanager
def without_substitutes() -> Iterator[None]:
    """Restore `Tensor.new_empty`, which is replaced only on CPUs (`dit.backends.megatron_cpu`)."""
    with patch.object(Tensor, "new_empty", getattr(Tensor.new_empty, "__wrapped__", Tensor.new_empty)):
        yield


def attention(q_TNH: Tensor, k_KNH: Tensor, v_KNH: Tensor, *_: SequenceLayout) -> Tensor:
    """Attend in one call, without regard to samples."""
    q, k, v = (x.unsqueeze(0).transpose(1, 2) for x in (q_TNH, k_KNH, v_KNH))
    return scaled_dot_product_attention(q, k, v).transpose(1, 2).squeeze(0)


def microseconds(calls: dict[str, Call], repeats: int) -> dict[str, list[float]]:
    """Return CPU times in microseconds of a layer's forward and backward pass, read in turns after a warm-up."""
    x_TD = torch.randn(DENSE.total_tokens, SIZES[0], requires_grad=True)
    times: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(WARM_UP + repeats):
        for name, call in calls.items():
            began = time.thread_time()
            for _ in range(CALLS):
                out = call(x_TD)
                out.backward(torch.ones_like(out))
            if number >= WARM_UP:
                times[name].append(1e6 * (time.thread_time() - began) / (CALLS * LAYERS))
    return times


def plain(cross: bool) -> Call:
    """Return a stack of plain blocks."""
    blocks = [PlainBlock(SIZES, cross=cross) for _ in range(LAYERS)]
    cond_SD = torch.zeros(DENSE.num_samples, SIZES[0], requires_grad=True)
    texts = [torch.zeros(DENSE.num_samples, 77, SIZES[2], requires_grad=True)] if cross else []

    def call(x_TD: Tensor) -> Tensor:
        for block in blocks:
            x_TD = block(x_TD, cond_SD, *texts)
        return x_TD

    return call


def rows(groups: process_groups.ProcessGroups, repeats: int) -> Iterator[str]:
    """Time every layer and yield the rows of the table.

    Args:
        groups: the groups of one rank.
        repeats: readings of each row, at least 1.
    """
    with kernels_do_nothing(), without_substitutes():
        for case in CASES:
            calls: dict[str, Call] = {"plain PyTorch": plain(case.cross)}
            for name, kernels in KERNELS.items():
                options: dict[str, Any] = {"precision": "fp32", "attention": attention, "std": 0.02, "count": LAYERS}
                calls[name] = layer(case, kernels, "none", groups, sizes=SIZES, **options)
            times = microseconds(calls, repeats)
            reference = min(times["plain PyTorch"])
            for name, values in times.items():
                shortest = min(values)
                yield f"| {case.name} | {name} | {shortest:.0f} | {median(values):.0f} | {shortest / reference:.2f} |"


def wait_job(recipe: str, packs: str, kernels: Literal["eager", "triton"]) -> Job:
    """Return a step of the tiny form of a recipe in bf16, with the kernels of a GPU; no two packs are equal.

    Args:
        packs: entry of `WAITS`.
        kernels: `training.kernels`.
    """
    config = built(call_recipe(recipe))
    parallel = ParallelConfig(context_parallel_size=2 if packs.endswith("CP 2") else 1)
    model = tiny_model(config.model, parallel)
    shapes = []
    for i in range(MICRO_BATCHES + 1):  # one for the step that fills caches
        grids = [(1, 16, 16 + 4 * i)] * 4 if packs == "dense" else PACKED[i:]
        texts = range(5 + i, 5 + i + len(grids)) if model.condition("context") else ()
        shapes.append(PackShape(tuple(grids), tuple(texts), 16, None if packs == "dense" else 2048))
    training = TrainingConfig(precision="bf16", ema_decay=0.99, kernels=kernels)
    arguments = model, config.objective, OptimizerConfig(), parallel, training, shapes[0]
    world = parallel.context_parallel_size
    return Job(*arguments, world_size=world, micro_batches=MICRO_BATCHES, in_full=True, packs=tuple(shapes))


def wait_rows() -> Iterator[str]:
    """Count waits and yield the rows of the table."""
    for name, recipe, all_packs in WAITS:
        for packs in all_packs:
            for kernels in ("eager", "triton"):
                counted = count_waits(wait_job(recipe, packs, kernels))
                cells = [f"{counted.queued[phase]} / {counted.waits[phase]}" for phase in PHASES]
                yield f"| {name} | {packs} | {kernels} | {' | '.join(cells)} |"


@one_line_errors
def main(argv: Optional[Sequence[str]] = None) -> int:
    """Time every layer and print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.host", description=__doc__)
    parser.add_argument("--repeats", type=at_least_one, default=25, help="readings of each row (%(default)s)")
    parser.add_argument("--waits", action="store_true", help="count copies and waits of a step")
    args = parser.parse_args(argv)
    environment.prepare()
    torch.set_num_threads(1)
    if args.waits:
        echo(f"| backbone | packs | kernels | {' | '.join(PHASES)} |")
        echo(f"| --- | --- | --- |{' ---: |' * len(PHASES)}")
        for row in wait_rows():
            echo(row)
        return EXIT_OK
    groups = process_groups.initialize(ParallelConfig())
    echo("| layer | kernels | us, shortest | us, median | shortest / plain block |")
    echo("| --- | --- | ---: | ---: | ---: |")
    for row in rows(groups, args.repeats):
        echo(row)
    process_groups.destroy()
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(main())
