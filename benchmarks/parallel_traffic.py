"""Drawings of two parallel layouts with counted bytes: `python -m benchmarks.parallel_traffic [--write]`.

`dit.planner.trace` runs the steps on fake tensors and counts the bytes that a rank sends. `--write` puts the drawings
into docs/parallelism.md.
"""

import argparse
import sys
from collections.abc import Sequence
from typing import Optional

import torch

from benchmarks.parallel_matrix import PAGE, write_page
from dit.context_parallel.partition import context_partition
from dit.context_parallel.segments import AttentionKind, assign_owners, segments_of
from dit.errors import EXIT_OK, one_line_errors
from dit.layout import SequenceLayout
from dit.models.base import ModelConfig
from dit.models.dit.config import DiTConfig
from dit.models.stdit.config import STDiTConfig
from dit.objectives.flow_matching import FlowMatching
from dit.parallel.build import parameter_shapes
from dit.parallel.dims import ParallelConfig
from dit.planner.job import Job
from dit.planner.trace import trace
from dit.settings import OptimizerConfig, TrainingConfig
from dit.terminal import echo
from dit.tracing.counter import StepTrace
from dit.tracing.packs import PackShape

MARKS = ("<!-- parallel traffic: start -->", "<!-- parallel traffic: end -->")
GRID = (16, 16, 16)
"""(t, h, w) of the clip of the ST-DiT table, in patches."""
HIDDEN = 1152
RANKS = (2, 4, 8)
KINDS: tuple[AttentionKind, ...] = ("spatial", "temporal")
DRAWN = (4, 2, 2)
"""(t, h, w) of the clip that is drawn, on two ranks."""
STAGES, SAMPLES, PATCHES, LAYERS = 4, 8, (1, 16, 16), 28
MICRO_BATCHES = {"segments": 2, "stages": 8}
"""Enough for a steady state, from which the numbers of one micro-batch follow."""


def job(
    model: ModelConfig,
    parallel: ParallelConfig,
    pack: PackShape,
    world_size: int,
    rank: int = 0,
    micro_batches: int = MICRO_BATCHES["segments"],
) -> Job:
    """Return a step in bf16 with gradients in float32, of several micro-batches."""
    training = TrainingConfig(precision="bf16", ema_decay=None, global_batch_size=micro_batches * SAMPLES)
    return Job(
        model,
        FlowMatching(),
        OptimizerConfig(),
        parallel,
        training,
        pack,
        world_size,
        rank,
        micro_batches,
        kernels=torch.device("cpu"),
    )


def segment_jobs() -> dict[tuple[AttentionKind, int, str], Job]:
    """Return a layer of each attention, by its kind, the context-parallel ranks, and the exchange."""
    jobs = {}
    for kind in KINDS:
        model = STDiTConfig(
            hidden_size=HIDDEN, num_layers=1, num_attention_heads=16, layer_pattern=[kind], context_size=HIDDEN
        )
        for ranks in RANKS:
            for comm in ("hybrid", "context"):
                parallel = ParallelConfig(context_parallel_size=ranks, spatial_temporal_comm=comm)
                pack = PackShape((GRID,), text_lengths=(8,), multiple_of=2 * ranks)
                jobs[kind, ranks, comm] = job(model, parallel, pack, ranks)
    return jobs


def stage_jobs() -> list[Job]:
    """Return the stages of a DiT-XL of classes."""
    model = DiTConfig(num_classes=1000, hidden_size=HIDDEN, num_layers=LAYERS, num_attention_heads=16)
    parallel = ParallelConfig(pipeline_model_parallel_size=STAGES)
    pack = PackShape((PATCHES,) * SAMPLES)
    return [job(model, parallel, pack, STAGES, rank, MICRO_BATCHES["stages"]) for rank in range(STAGES)]


def exchanged(step: StepTrace) -> int:
    """Return the bytes that a rank sends over its context-parallel group in the forward pass of a micro-batch."""
    return sum(step.parts["forward"].sent_bytes[kind, "cp"] for kind in ("all_to_all", "send"))


def megabytes(count: float) -> str:
    """Return a number of bytes as text."""
    return f"{count / 1e6:.2f} MB"


def segment_table(steps: dict[tuple[AttentionKind, int, str], StepTrace]) -> str:
    """Return the table of ST-DiT in Markdown: counted bytes next to the published factors."""
    t, h, w = GRID
    published = {"spatial": ("t/cp", t), "temporal": ("hw/cp", h * w)}
    heads = ("attention", "ranks", "ring", "hybrid", "ring / hybrid", "published factor")
    lines = [f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}"]
    for kind in KINDS:
        name, size = published[kind]
        for ranks in RANKS:
            ring, hybrid = (exchanged(steps[kind, ranks, comm]) for comm in ("context", "hybrid"))
            factor = f"{ring / hybrid:.1f}" if hybrid else "nothing is sent"
            row = (kind, str(ranks), megabytes(ring), megabytes(hybrid), factor, f"{name} = {size // ranks}")
            lines.append(f"| {' | '.join(row)} |")
    return "\n".join(lines)


def owners(kind: AttentionKind, grid: tuple[int, int, int], ranks: int) -> list[int]:
    """Return the rank that attends to each token of a clip; for `full`, the rank that stores it."""
    layout = SequenceLayout.from_lengths([grid[0] * grid[1] * grid[2]], multiple_of=2 * ranks)
    stored_T = torch.zeros(layout.total_tokens, dtype=torch.int64)
    for rank in range(ranks):
        stored_T[context_partition(layout, ranks, "contiguous").of_rank(rank)] = rank
    if kind == "full":
        return stored_T.tolist()
    segments = segments_of(layout, (grid,), kind)
    counts_KR = torch.zeros(len(segments.lengths_K), ranks, dtype=torch.int64)
    counts_KR.index_put_(
        (segments.segment_V, stored_T[segments.indices_V]), torch.ones_like(segments.segment_V), accumulate=True
    )
    attends_T = torch.empty_like(stored_T)
    attends_T[segments.indices_V] = assign_owners(segments.lengths_K, counts_KR)[segments.segment_V]
    return attends_T.tolist()


def segment_drawing() -> str:
    """Draw which rank has each token of a small clip in each kind of attention, and where an exchange is needed."""
    t, h, w = DRAWN
    tables = {kind: owners(kind, DRAWN, 2) for kind in ("full", "spatial", "temporal")}
    lines = ["rank of each token (rows: frames, columns: patches; <-> all-to-all)", ""]
    lines.append("".join(kind.ljust(2 * h * w + 8) for kind in tables).rstrip())
    for frame in range(t):
        line = ""
        for kind, table in tables.items():
            moves = table != tables["full"] and frame == t // 2
            arrow = "" if kind == "full" else "   <->   " if moves else " " * 9
            line += arrow + " ".join(map(str, table[frame * h * w :][: h * w]))
        lines.append(line)
    return "\n".join(lines)


def pipeline_drawing(steps: Sequence[StepTrace]) -> str:
    """Draw the stages of a pipeline: conditioner, layers, and what is sent."""
    unit = steps[1].parts["micro-batch"].sent_bytes["send", "pp"] // 2  # of an inner stage: forward, and backward
    reduced = steps[0].sent_bytes["all_reduce", "pp"]
    shapes = parameter_shapes(stage_jobs()[0].model)
    parameters = sum(torch.Size(shape).numel() for name, shape in shapes.items() if name.startswith("conditioner."))
    each, width = LAYERS // STAGES, 19
    rows = [
        ["time, class"] * STAGES,
        ["|"] * STAGES,
        ["conditioner"] * STAGES,
        ["|"] * STAGES,
        [f"layers {i * each}-{(i + 1) * each - 1}" for i in range(STAGES)],
    ]
    lines = ["".join(text.ljust(width) for text in row).rstrip() for row in rows[:-1]]
    lines.append("".join(f"{text} ".ljust(width - 2, "-") + "> " for text in rows[-1][:-1]) + rows[-1][-1])
    return "\n".join(
        [
            *lines,
            "",
            f"between two stages:  {megabytes(unit)} forward and as much backward, per micro-batch",
            f"conditioner:         {parameters:,} parameters on every stage;",
            f"                     the sum of their gradients sends {megabytes(reduced)} per rank and step",
        ]
    )


def page() -> str:
    """Return the section of the page."""
    jobs, stages = segment_jobs(), stage_jobs()
    steps = trace([*jobs.values(), *stages])
    return "\n".join(
        [
            f"**Conditioning under pipeline parallelism**, DiT-XL on {STAGES} stages, {SAMPLES} samples of "
            f"{PATCHES[1] * PATCHES[2]} tokens per micro-batch, bf16:",
            "",
            "```text",
            pipeline_drawing(steps[len(jobs) :]),
            "```",
            "",
            "**Hybrid context parallelism of ST-DiT** on two ranks, a clip of "
            f"{DRAWN[0]} frames of {DRAWN[1] * DRAWN[2]} patches:",
            "",
            "```text",
            segment_drawing(),
            "```",
            "",
            f"Bytes that a rank sends in the forward pass of one layer, clip of {' x '.join(map(str, GRID))} patches, "
            f"hidden size {HIDDEN:,}, bf16:",
            "",
            segment_table(dict(zip(jobs, steps))),
        ]
    )


@one_line_errors
def main(argv: Optional[Sequence[str]] = None) -> int:
    """Run the command and return its exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.parallel_traffic", description=__doc__)
    parser.add_argument("--write", action="store_true", help="put the drawings into docs/parallelism.md")
    args = parser.parse_args(argv)
    if args.write and not PAGE.exists():
        parser.error(f"--write: {PAGE} does not exist; it is part of the repository, not of an installed copy")
    text = page()
    echo(text)
    if args.write:
        write_page(text, marks=MARKS)
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(main())
