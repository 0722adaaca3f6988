"""Search for the fastest layout of a recipe: `python -m launch.plan --factory NAME --gpus 256 --device h100`.

Time and memory are computed from steps traced on fake tensors (`dit.planner`), so no GPU is needed. docs/planner.md
documents how the model of time was checked.
"""

import argparse
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, Optional

from dit.command_line import Parser
from dit.errors import EXIT_CONFIG, EXIT_OK, one_line_errors
from dit.planner.devices import DEVICES, with_fp8
from dit.ranges import RANKS
from dit.terminal import announce, echo, progress
from launch import cli, environment
from launch.argument_types import at_least_one, number_in

if TYPE_CHECKING:
    from dit.parallel.dims import ParallelDims
    from dit.planner.layouts import Allowed, Candidate, Problem, Shape
    from dit.planner.search import Priced, Verdict
    from dit.planner.time import StepTime
    from launch.planned_sample import Sample

GIB = 2**30
CAUSES = {
    "matmul": "matrix products (recomputed, or too narrow)",
    "attention": "attention (recomputed)",
    "memory-bound": "memory-bound operations",
    "tensor parallel": "tensor-parallel traffic",
    "context parallel": "context-parallel traffic",
    "expert parallel": "expert-parallel traffic",
    "pipeline sends": "sends of the pipeline",
    "pipeline bubble": "the pipeline's bubble",
    "data parallel": "gradients and weights that are not hidden",
    "optimizer": "the optimizer",
}


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command; overrides are parsed by the recipe."""
    parser = Parser(prog="python -m launch.plan", description=__doc__)
    parser.add_argument("--factory", required=True, help="recipe (python -m launch.train --list)")
    flag, count = parser.add_argument, partial(parser.add_argument, type=at_least_one, metavar="N")
    flag("--gpus", type=number_in(RANKS), required=True, metavar="N", help="GPUs to train on")
    flag("--device", default="h100", choices=DEVICES, metavar="NAME", help=f"{', '.join(DEVICES)} (%(default)s)")
    count("--nodes-of", help="GPUs joined by NVLink (8; 72 for gb200 and gb300)")
    flag("--tokens", type=cli.tokens, metavar="N|TxHxW", help="tokens of a sample, or its patches (the recipe's)")
    count("--text-tokens", help="tokens of its text")
    count("--top", default=5, help="layouts to print (%(default)s)")
    flag("--json", type=Path, metavar="FILE", help="write all of it as JSON")
    flag("overrides", nargs="*", metavar="key=value")
    return parser


@dataclass(frozen=True)
class Rates:
    """Converts the time of a step to throughput and MFU.

    Attributes:
        flops: of a step by convention (`dit.monitoring.flops`); "hardware" is without recompute. No "nemo" for images.
        recomputed: operations of one more forward pass through all layers.
    """

    problem: "Problem"
    unit: str
    per_step: int
    flops: dict[str, float]
    recomputed: float

    def per_gpu(self, seconds: float) -> float:
        return self.per_step / seconds / self.problem.world_size

    def mfu(self, candidate: "Candidate", seconds: float) -> dict[str, float]:
        """Return the share of the device's dense bf16 peak by convention."""
        peak = self.problem.device.peak_flops * self.problem.world_size
        executed = {**self.flops, "hardware": self.flops["hardware"] + candidate.recomputed * self.recomputed}
        return {name: flops / seconds / peak for name, flops in executed.items()}


@dataclass(frozen=True)
class Report:
    """Result of a search, with the best layout traced at its full depth."""

    problem: "Problem"
    rates: Rates
    allowed: "Allowed"
    verdict: "Verdict"
    not_traced: Sequence["Candidate"]
    seconds: float
    step: Optional["StepTime"]
    peak: Optional[int]

    def lines(self, top: int) -> list[str]:
        verdict, problem = self.verdict, self.problem
        head = (
            f"{len(self.allowed.layouts):,} layouts of {problem.world_size} {problem.device.name}, "
            f"{problem.device.node_size} per node: {len(verdict.fitting):,} fit, {len(verdict.too_large):,} do not, "
            f"{len(self.not_traced):,} are too slow to trace; searched in {self.seconds:.0f} s"
        )
        if not verdict.fitting:
            return [head, "", *self.losers(), *self.cure()]
        return [head, "", *self.table(verdict.fitting[:top]), "", *self.best(), "", *self.losers()]

    def table(self, rows: Sequence["Priced"]) -> list[str]:
        lines = [f"{'':<58} {'step':>10} {self.rates.unit + '/s/GPU':>13} {'MFU':>6} {'memory':>10}"]
        for priced in rows:
            seconds = priced.time.total
            lines.append(
                f"{layout_name(priced.candidate, priced.dims):<58} {seconds * 1e3:>7,.0f} ms "
                f"{self.rates.per_gpu(seconds):>13,.0f} {self.rates.mfu(priced.candidate, seconds)['model']:>6.1%} "
                f"{priced.peak / GIB:>6.1f} GiB"
            )
        return lines

    def best(self) -> list[str]:
        """Describe the best layout, from a trace of its full depth."""
        priced = self.verdict.fitting[0]
        assert self.step is not None
        assert self.peak is not None
        time = self.step
        mfu = ", ".join(f"{name} {share:.1%}" for name, share in self.rates.mfu(priced.candidate, time.total).items())
        return [
            f"the first, traced at its full depth: {time.total * 1e3:,.0f} ms, {self.peak / GIB:.1f} GiB",
            *(
                f"  {name:<17} {seconds * 1e3:>9,.1f} ms {seconds / time.total:>6.1%}"
                for name, seconds in time.parts.items()
                if seconds > 1e-3 * time.total
            ),
            f"  {self.rates.per_gpu(time.total):,.0f} {self.rates.unit}/s/GPU; MFU {mfu}",
            f"  {' '.join(overrides(priced.candidate, self.problem))}",
        ]

    def losers(self) -> list[str]:
        """Return a line for each reason why other layouts are slower, do not fit or are not allowed."""
        lines = []
        for item, group in self.verdict.by_item().items():
            first = group[0]
            lines.append(
                f"{len(group):>6,} do not fit because of {item}: the smallest needs {first.peak / GIB:,.1f} GiB "
                f"({layout_name(first.candidate, first.dims)})"
            )
        for part, group in self.verdict.by_loss().items():
            first, best = group[0], self.verdict.fitting[0]
            slower = first.time.total / best.time.total - 1
            lines.append(
                f"{len(group):>6,} slower because of {CAUSES[part]}: the fastest takes {slower:.1%} longer "
                f"({layout_name(first.candidate, first.dims)})"
            )
        names = [stage_name(shape) for shape in dict.fromkeys(candidate.shape for candidate in self.not_traced)]
        if names:
            examples = f"{len(names)} stages, such as {names[0]}"
            lines.append(f"{len(self.not_traced):>6,} not traced, because their passes take longer: {examples}")
        for number, example in sorted(self.allowed.refused.values(), reverse=True):
            shown = example.partition(";")[0] if self.allowed.layouts else example  # with its cure if none is allowed
            lines.append(f"{number:>6,} not allowed, for example: {shown}")
        return lines

    def cure(self) -> list[str]:
        """Return how to find a layout if none fits; nothing if none is allowed, because the refusals have cures."""
        from dit.planner.devices import MEMORY_SHARE

        if not self.verdict.too_large:
            return []
        smallest = min(priced.peak for priced in self.verdict.too_large) / GIB
        room = MEMORY_SHARE * self.problem.device.memory_bytes / GIB
        cure = "more --gpus or another --device" + (
            "" if self.problem.optimizer.offload else ", or optimizer.offload=True"
        )
        return [
            "",
            f"no layout fits: the smallest one needs {smallest:.1f} GiB, and tensors can use {room:.1f} GiB of each "
            f"{self.problem.device.name}; use {cure}",
        ]

    def record(self) -> dict[str, Any]:
        verdict, problem = self.verdict, self.problem
        return {
            "gpus": problem.world_size,
            "device": problem.device.name,
            "node_size": problem.device.node_size,
            "tokens": problem.tokens,
            "unit": self.rates.unit,
            "searched_s": self.seconds,
            "fitting": [self._row(priced) for priced in verdict.fitting],
            "too_large": [self._row(priced) for priced in verdict.too_large],
            "not_traced": Counter(stage_name(candidate.shape) for candidate in self.not_traced),
            "not_allowed": [{"count": n, "example": text} for n, text in self.allowed.refused.values()],
            "best": None
            if self.step is None
            else {"step_s": self.step.total, "parts_s": self.step.parts, "peak_bytes": self.peak},
        }

    def _row(self, priced: "Priced") -> dict[str, Any]:
        seconds = priced.time.total
        return {
            "layout": layout_name(priced.candidate, priced.dims),
            "overrides": overrides(priced.candidate, self.problem),
            "step_s": seconds,
            "parts_s": priced.time.parts,
            "memory_bytes": priced.memory,
            f"{self.rates.unit}_per_s_per_gpu": self.rates.per_gpu(seconds),
            "mfu": self.rates.mfu(priced.candidate, seconds),
        }


def layout_name(candidate: "Candidate", dims: "ParallelDims") -> str:
    """Return a short name of a layout."""
    shape = candidate.shape
    sizes = {"TP": shape.tensor, "CP": shape.context, "PP": candidate.pipeline, "VPP": candidate.chunks or 1}
    words = [f"{name}{size}" for name, size in {**sizes, "EP": shape.expert}.items() if size > 1]
    kind = {"distributed_optimizer": "sharded optimizer", "fsdp": _fsdp_name(shape), "ddp": "DDP"}[
        candidate.data_parallel
    ]
    words += [f"DP{dims.data_parallel_size}", kind, f"micro-batch {dims.micro_batch_size}"]
    if candidate.recomputed:
        words.append(f"recompute {candidate.recomputed:.0%}")
    elif shape.recompute != "none":
        words.append(f"recompute {shape.recompute}")
    return " ".join(words)


def _fsdp_name(shape: "Shape") -> str:
    return "FSDP" if shape.instances == 1 else f"FSDP x {shape.instances} instances"


def stage_name(shape: "Shape") -> str:
    """Return a short name of the traced part of a layout."""
    sizes = {"TP": shape.tensor, "CP": shape.context, "EP": shape.expert}
    words = [f"{name}{size}" for name, size in sizes.items() if size > 1] + ([_fsdp_name(shape)] if shape.fsdp else [])
    words += [] if shape.recompute == "none" else [f"recompute {shape.recompute}"]
    return " ".join(words) or "one rank"


def overrides(candidate: "Candidate", problem: "Problem") -> list[str]:
    """Return the overrides that select this layout for the recipe."""
    layout = problem.layout_of(candidate)
    training = candidate.training(problem.training, problem.layers_of_chunk(candidate))
    changes = []
    for name, part, original in (("parallel", layout, problem.parallel), ("training", training, problem.training)):
        changes += [f"{name}.{key}={value}" for key, value in vars(part).items() if value != vars(original)[key]]
    return changes


def rates(problem: "Problem", sample: "Sample") -> Rates:
    """Count the units and operations of a step."""
    from dit.monitoring.flops import Convention, PackFlops

    operations = partial(PackFlops(problem.model, problem.objective.auxiliary).training, *sample.as_pack)
    samples = sample.count(1) * problem.training.global_batch_size
    pictures = not problem.model.supports.mixed_shapes
    # NeMo's formula depends on parameters and tokens, and does not apply to convolutions.
    conventions: tuple[Convention, ...] = ("model", "hardware") if pictures else ("model", "hardware", "nemo")
    flops: dict[str, float] = {name: float(samples * operations(convention=name)) for name in conventions}
    recomputed = samples * operations(convention="hardware", recomputed=1.0) - flops["hardware"]
    unit, units_per_sample = ("images", 1) if pictures else ("tokens", sample.tokens)
    return Rates(problem, unit, samples * units_per_sample, flops, recomputed)


def problem_of(args: argparse.Namespace) -> tuple["Problem", "Sample"]:
    """Return the planned run and its sample."""
    from dit.parallel.dims import ParallelDims
    from dit.planner.layouts import Problem
    from launch.config_file import built
    from launch.planned_sample import planned_sample
    from launch.train import resolve

    task = resolve(cli.parse(["--factory", args.factory, *args.overrides]))
    config = built(task)
    sample = planned_sample(config.data, config.model, args.tokens, args.text_tokens)
    device = with_fp8(DEVICES[args.device], config.training.fp8)
    problem = Problem(
        config.model,
        config.objective,
        config.optimizer,
        config.parallel,
        config.training,
        lambda samples, multiple: sample.shape(ParallelDims(args.gpus, 1, samples, 1, multiple)),
        sample.tokens * sample.count(1),
        args.gpus,
        device if args.nodes_of is None else replace(device, node_size=args.nodes_of),
        lambda parallel, training: replace(config, parallel=parallel, training=training).check(args.gpus)[0],
    )
    return problem, sample


def searched(problem: "Problem", sample: "Sample") -> Report:
    """Trace the parts that layouts consist of, price all layouts, and trace the best one at its full depth.

    A layout whose trace does not fit into memory is not the best one.
    """
    from dit.planner.job import Job
    from dit.planner.layouts import allowed, candidates, shapes
    from dit.planner.plan import plan, planned_step
    from dit.planner.search import judged, price_layouts, with_traced_memory
    from dit.planner.trace import Tracer

    options = allowed(problem, candidates(problem))
    if not options.layouts:
        return Report(problem, rates(problem, sample), options, judged(problem, []), [], 0.0, None, None)
    started, stages = time.perf_counter(), shapes(options.layouts)

    with Tracer(min(len(stages), os.cpu_count() or 1)) as tracer, progress() as show:
        numbers = count(1)

        def begin(shape: "Shape") -> None:
            show(f"tracing stage {next(numbers)} of at most {len(stages)}: {stage_name(shape)}")

        results, not_traced = price_layouts(problem, options.layouts, tracer, begin)
        verdict = judged(problem, results)
        seconds = time.perf_counter() - started
        step = peak = None
        while step is None and verdict.fitting:
            candidate, dims = verdict.fitting[0].candidate, verdict.fitting[0].dims
            layout = problem.layout_of(candidate)
            training = candidate.training(problem.training, problem.layers_of_chunk(candidate))
            parts = problem.model, problem.objective, problem.optimizer, layout, training
            show(f"tracing the fastest layout at its full depth: {layout_name(candidate, dims)}")
            full = plan(Job(*parts, sample.shape(dims)), dims, tracer=tracer.stored)
            first, *others = verdict.fitting
            verdict = judged(problem, [with_traced_memory(first, full.fullest), *others, *verdict.too_large])
            if verdict.fitting and verdict.fitting[0].candidate == candidate:
                step = planned_step(full, dims, problem.cluster(layout))
                peak = full.fullest.peak
    return Report(problem, rates(problem, sample), options, verdict, not_traced, seconds, step, peak)


@one_line_errors
def main(argv: Optional[Sequence[str]] = None) -> int:
    """Run the command and return its exit code."""
    args = build_parser().parse_intermixed_args(argv)
    cli.check_factory(args.factory)
    announce(f"{args.factory}: importing torch and Megatron-Core")
    environment.prepare(quiet=True)
    problem, sample = problem_of(args)
    report = searched(problem, sample)
    echo("\n".join(report.lines(args.top)))
    if args.json:
        args.json.write_text(json.dumps(report.record(), indent=1))
    return EXIT_OK if report.verdict.fitting else EXIT_CONFIG


if __name__ == "__main__":
    sys.exit(main())
