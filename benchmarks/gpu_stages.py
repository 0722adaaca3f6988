"""Measure on one GPU in stages, the most valuable first: `bash benchmarks/on_gpu.sh [--dry] [STAGE ...]`.

A stage is a list of commands, each a separate process with a time limit, and of bars. A command appends its rows to
`OUT/STAGE/COMMAND.jsonl` as they are measured, so that a later failure leaves them. A stage ends with a table of its
bars, also in `OUT/STAGE.md`. Without a GPU, `--dry` runs the same commands on fake tensors or, where they need values,
in a small form on the CPU.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional

from benchmarks import commands, device_values
from benchmarks.rows import read_rows
from dit.durable_files import write_atomic
from dit.errors import EXIT_OK, EXIT_UNEXPECTED, ConfigError, one_line_errors
from dit.safe_files import read_bytes
from dit.terminal import echo

STAGE_S, DRY_FACTOR = 460.0, 10
"""Time limit of a stage; a dry run on a CPU has this many times as long."""
STEP, PLAN = "benchmarks.step", "benchmarks.prediction"
"""Commands that time a step, and plan it."""
Rows = dict[str, list[dict[str, Any]]]
"""Rows by command."""
Value = Callable[[Rows], float]


@dataclass(frozen=True)
class Command:
    """A command of a stage.

    Attributes:
        name: of its file of rows.
        words: after `python -m`; `--out FILE` is added.
        dry: words to add in a dry run.
        limit_s: time limit.
    """

    name: str
    words: tuple[str, ...]
    dry: tuple[str, ...] = ("--dry",)
    limit_s: float = 180.0


@dataclass(frozen=True)
class Bar:
    """A number and its bar.

    Attributes:
        name: of the number, with its unit.
        value: computed from the rows; raises LookupError or TypeError if they are missing.
        low, high: smallest and largest value that passes.
        source: of the bar.
    """

    name: str
    value: Value
    low: float = float("-inf")
    high: float = float("inf")
    source: str = ""

    @property
    def bar(self) -> str:
        """The bar as a cell of the table."""
        if self.high == float("inf"):
            return f">= {self.low:,.4g}"
        return f"<= {self.high:,.4g}" if self.low == float("-inf") else f"{self.low:,.4g} to {self.high:,.4g}"


@dataclass(frozen=True)
class Stage:
    """Commands that run one after the other, and the bars of their rows."""

    commands: tuple[Command, ...]
    bars: tuple[Bar, ...]


def row(rows: Rows, command: str, **match: object) -> dict[str, Any]:
    """Return the first row of a command with the given fields; raise LookupError if there is none."""
    matching = [r for r in rows[command] if all(r[k] == v for k, v in match.items())]
    return matching[0]


def field(command: str, name: str, scale: float = 1.0, **match: object) -> Value:
    """Return a value that is a field of a row."""
    return lambda rows: scale * row(rows, command, **match)[name]


def ratio(above: Value, below: Value) -> Value:
    """Return the value of a quotient."""
    return lambda rows: above(rows) / below(rows)


def best(command: str, name: str, case: str) -> Value:
    """Return the largest field of a case over its implementations."""
    return lambda rows: max(r[name] for r in rows[command] if r["case"] == case and r["status"] == "ok")


def failures(command: str) -> Value:
    """Return the number of rows that did not pass."""
    return lambda rows: float(len(rows[command]) - passes(command)(rows))


def passes(command: str) -> Value:
    """Return the number of rows that passed."""

    def count(rows: Rows) -> float:
        if not rows[command]:
            raise LookupError(f"{command} has no rows")
        return float(sum(r["passed"] for r in rows[command]))

    return count


def step(name: str, *words: str, steps: int = 10) -> Command:
    """Return a command that times optimizer steps of a recipe."""
    return Command(name, (STEP, "--steps", str(steps), "--warmup", "3", "--factory", *words), ())


def of_all_layers(shallow: str, deep: str, name: str, times: float) -> Value:
    """Return a field of the full depth: that of the shallow model and `times` the difference to the deeper one."""
    return lambda rows: row(rows, shallow)[name] + times * (row(rows, deep)[name] - row(rows, shallow)[name])


def layer_rate(kernels: str) -> Value:
    """Return TFLOP/s of four layers of DiT-7B, from steps of four and of eight layers."""

    def value(rows: Rows) -> float:
        shallow, deep = (row(rows, f"dit7b_{depth}_{kernels}") for depth in ("L4", "L8"))
        tflop = [r["tflops_per_rank_model"] * r["step_ms_p50"] / 1e3 for r in (shallow, deep)]
        return (tflop[1] - tflop[0]) / (deep["step_ms_p50"] - shallow["step_ms_p50"]) * 1e3

    return value


BF16_DIT = ("training.precision=bf16", "training.kernels=triton")
XL2_4 = (
    "training.micro_batch_size=4",
    "training.global_batch_size=4",
    "parallel.overlap_grad_reduce=False",
    "parallel.overlap_param_gather=False",
    *BF16_DIT,
)
"""Steps so short that a GPU waits for the host."""
FLUX_512 = (
    *("data.height=32", "data.width=32", "data.text_tokens=256"),
    *("training.micro_batch_size=32", "training.global_batch_size=32"),
)
"""MLPerf's FLUX.1: 256 tokens of image, 256 of text, 32 samples."""
CLIPS = 'data.shapes=["1x32x32","1x32x32","1x32x32","1x32x32","8x32x32","16x32x32"]'
FLUX_PARTS, DIT_PARTS = ("L3", "L6"), ("L4", "L8")
KERNELS = ("eager", "triton")
PACKED_RATE, DENSE_RATE = (
    field("packed_triton", "tflops_per_rank_model"),
    field("dense_triton", "tflops_per_rank_model"),
)

STAGES: dict[str, Stage] = {
    "values": Stage(
        (
            Command("tests", ("pytest", "tests/gpu", "-o", "addopts=", "-q", "-p", "no:cacheprovider"), (), 240),
            Command("losses", ("benchmarks.device_values",), ("--jobs", "1", "--only", "resume and samples"), 400),
        ),
        (
            Bar("tests/gpu: passed", field("tests", "passed"), low=200),
            Bar("tests/gpu: failed", field("tests", "failed"), high=0),
            Bar(
                "losses and samples within their bounds",
                passes("losses"),
                low=len(device_values.names()),
                source="losses of a CPU",
            ),
            Bar("losses and samples beyond their bounds", failures("losses"), high=0),
        ),
    ),
    "layers": Stage(
        (
            Command("ceilings", ("benchmarks.ceilings",), limit_s=60),
            Command("attention", ("benchmarks.attention",), limit_s=120),
            Command("layers", ("benchmarks.layers",), limit_s=240),
        ),
        (
            Bar("copy, GB/s", field("ceilings", "per_s", 1e-9, case="copy"), low=2500, source="planner"),
            Bar(
                "product of 8192, TFLOP/s",
                field("ceilings", "per_s", 1e-12, case="8192 x 8192 x 8192"),
                low=650,
                source="planner",
            ),
            *(
                Bar(f"attention, {case}, TFLOP/s", best("attention", "forward_backward_tflops", case), low=low)
                for case, low in (
                    ("dense 8k, head 128", 400),
                    ("dense 512 x 32, head 128", 250),
                    ("packed image + video 8k, head 128", 250),
                )
            ),
            Bar(
                "DiT-7B layer, fused, TFLOP/s",
                field("layers", "tflops", batch="dense", kernels="fused"),
                low=477,
                source="48.2 % of peak, NeMo VFM",
            ),
            *(
                Bar(
                    f"time of {other} / fused layer",
                    ratio(
                        field("layers", "ms", batch="dense", kernels=other),
                        field("layers", "ms", batch="dense", kernels="fused"),
                    ),
                    low=low,
                )
                for other, low in (
                    ("plain PyTorch", 1.25),
                    ("plain PyTorch, compiled", 1.03),
                    ("eager", 1.2),
                    ("compiled", 1.0),
                )
            ),
            Bar(
                "memory of fused / plain layer",
                ratio(
                    field("layers", "peak_bytes", batch="dense", kernels="fused"),
                    field("layers", "peak_bytes", batch="dense", kernels="plain PyTorch"),
                ),
                high=0.65,
            ),
            Bar(
                "packed / dense layer, TFLOP/s",
                ratio(
                    field("layers", "tflops", batch="packed", kernels="fused"),
                    field("layers", "tflops", batch="dense", kernels="fused"),
                ),
                low=0.9,
            ),
        ),
    ),
    "kernels": Stage(
        (Command("kernels", ("benchmarks.kernels",), ("--only", "noise"), 400),),
        tuple(
            Bar(f"{case}, measured GB/s", field("kernels", "measured", 1e-9, case=case), low=low, source=source)
            for case, low, source in (
                ("residual + norm + modulate", 2300, "80 % of the copy"),
                ("its gradient", 2000, "70 % of the copy"),
                ("heads: norm + RoPE", 2300, "80 % of the copy"),
                ("GELU + bias", 2300, "80 % of the copy"),
                ("AdamW + average + copy", 2300, "80 % of the copy"),
            )
        ),
    ),
    "models": Stage(
        (
            *(
                step(f"flux_{part}", f"bench_flux12b_1024_1gpu_{part}", *FLUX_512, "training.kernels=triton")
                for part in FLUX_PARTS
            ),
            *(
                Command(
                    f"flux_{part}_planned",
                    (
                        *(PLAN, "--factory", f"bench_flux12b_1024_1gpu_{part}"),
                        *(*FLUX_512, "training.kernels=triton"),
                    ),
                    (),
                )
                for part in FLUX_PARTS
            ),
            *(
                step(f"dit7b_{part}_{kernels}", f"bench_dit7b_8k_1gpu_{part}", f"training.kernels={kernels}")
                for kernels in KERNELS
                for part in DIT_PARTS
            ),
            step(
                "xl2", "dit_xl2_imagenet", "training.micro_batch_size=128", "training.global_batch_size=128", *BF16_DIT
            ),
            *(
                step(f"xl2_4{name}", "dit_xl2_imagenet", *XL2_4, f"training.cuda_graph={bool(name)}")
                for name in ("", "_graph")
            ),
            step("stdit_s", "mock_stdit_s", "training.kernels=triton"),
            Command(
                "unets",
                ("benchmarks.unets", "--batch", "16"),
                ("--side", "16", "--batch", "1", "--rounds", "1"),
            ),
        ),
        (
            Bar(
                "FLUX, 512 tokens: step of 32 images on all layers, measured / planned",
                ratio(
                    of_all_layers("flux_L3", "flux_L6", "step_ms_p50", 18),
                    of_all_layers("flux_L3_planned", "flux_L6_planned", "planned_ms", 18),
                ),
                low=0.85,
                high=1.15,
                source="docs/planner.md",
            ),
            Bar("FLUX, 512 tokens, 6 blocks, TFLOP/s", field("flux_L6", "tflops_per_rank_model"), low=400),
            Bar("DiT-7B layers in steps, fused, TFLOP/s", layer_rate("triton"), low=477, source="NeMo VFM"),
            Bar("DiT-7B layers in steps, eager, TFLOP/s", layer_rate("eager"), low=359, source="NeMo, 8k"),
            Bar(
                "DiT-XL/2, 256 tokens, TFLOP/s",
                field("xl2", "tflops_per_rank_model"),
                low=380,
                source="NeMo VFM / 1.25",
            ),
            Bar(
                "DiT-XL/2, 4 pictures, CUDA graph / without",
                ratio(field("xl2_4", "step_ms_p50"), field("xl2_4_graph", "step_ms_p50")),
                low=1.0,
            ),
        ),
    ),
    "packs": Stage(
        (
            *(step(f"dense_{kernels}", "bench_dit7b_8k_1gpu_L4", f"training.kernels={kernels}") for kernels in KERNELS),
            *(
                step(
                    *(f"packed_{kernels}", "bench_dit7b_8k_1gpu_L4", f"training.kernels={kernels}", CLIPS),
                    "data.max_tokens_per_pack=8192",
                )
                for kernels in KERNELS
            ),
            step(
                *("packed_graph", "bench_dit7b_8k_1gpu_L4", "training.kernels=triton", "training.cuda_graph=True"),
                *(CLIPS, "data.max_tokens_per_pack=8192", "data.pack_multiple_of=256"),
            ),
        ),
        (
            Bar("packs / dense, TFLOP/s, fused", ratio(PACKED_RATE, DENSE_RATE), low=0.9),
            Bar(
                "packs, CUDA graph / without, tokens/s",
                ratio(
                    *(field(f"packed_{name}", "valid_tokens_per_s_per_rank") for name in ("graph", "triton")),
                ),
                low=0.9,
            ),
            Bar(
                "packs / one sample per 8k batch, tokens/s",
                ratio(
                    field("packed_triton", "valid_tokens_per_s_per_rank"),
                    field("dense_triton", "valid_tokens_per_s_per_rank", (4 * 256 + 2048 + 4096) / 6 / 8192),
                ),
                low=2.5,
            ),
        ),
    ),
}
"""By name, the most valuable first."""


def started(command: Command, stage: str, out: Path, *, dry: bool) -> list[str]:
    """Return the words after `python -m` of a command."""
    words = [*command.words, *(command.dry if dry else ())]
    if dry and words[0] == STEP:
        words[0] = PLAN
    file = out / stage / f"{command.name}.jsonl"
    return [*words, f"--junit-xml={file.with_suffix('.xml')}"] if words[0] == "pytest" else [*words, "--out", str(file)]


def run_command(command: Command, stage: str, out: Path, limit_s: float, *, dry: bool) -> list[dict[str, Any]]:
    """Run a command and return its rows; its output goes to a log file, and the end of it to the console on failure."""
    file = out / stage / f"{command.name}.jsonl"
    for old in (file, file.with_suffix(".xml")):
        old.unlink(missing_ok=True)
    log, began = file.with_suffix(".log"), time.monotonic()
    module, *words = started(command, stage, out, dry=dry)
    code = commands.run_command(commands.python_command(module, 1, words), log, limit_s)
    result = "done" if code == 0 else f"ended with {'time limit' if code is None else code}"
    echo(f"{stage} {command.name}: {result}, {time.monotonic() - began:.0f} s", flush=True)
    if code != 0:
        echo("\n".join(read_bytes(log).decode(errors="replace").splitlines()[-15:]), flush=True)
    if file.with_suffix(".xml").exists():
        return [tests_of(file.with_suffix(".xml"))]
    return read_rows(file) if file.exists() else []


def tests_of(file: Path) -> dict[str, Any]:
    """Return the numbers of tests in a JUnit file: all, failed and skipped."""
    from xml.etree import ElementTree

    [suite] = ElementTree.parse(file).getroot().iter("testsuite")
    counts = {name: int(suite.attrib[name]) for name in ("tests", "failures", "errors", "skipped")}
    failed = counts["failures"] + counts["errors"]
    return {**counts, "failed": failed, "passed": counts["tests"] - failed - counts["skipped"]}


def table(bars: Sequence[Bar], rows: Rows) -> tuple[str, bool]:
    """Return the table of a stage, and whether all bars pass."""
    lines, passed = (
        ["| measurement | value | bar | source of the bar | result |", "| --- | ---: | ---: | --- | --- |"],
        True,
    )
    for bar in bars:
        try:
            value: Optional[float] = bar.value(rows)
        except (LookupError, TypeError, ValueError, ZeroDivisionError):
            value = None
        passes = value is not None and bar.low <= value <= bar.high
        passed &= passes
        shown = "-" if value is None else f"{value:,.4g}"
        result = "pass" if passes else "not measured" if value is None else "fail"
        lines.append(f"| {bar.name} | {shown} | {bar.bar} | {bar.source} | {result} |")
    return "\n".join(lines), passed


def run_stage(name: str, out: Path, *, dry: bool) -> tuple[bool, bool]:
    """Run the commands of a stage and print its table.

    Returns:
        Whether all commands wrote rows, and whether all bars pass.
    """
    slower = DRY_FACTOR if dry else 1
    deadline, rows = time.monotonic() + STAGE_S * slower, {}
    for command in STAGES[name].commands:
        limit_s = max(1.0, min(command.limit_s * slower, deadline - time.monotonic()))
        rows[command.name] = run_command(command, name, out, limit_s, dry=dry)
    text, passed = table(STAGES[name].bars, rows)
    write_atomic(out / f"{name}.md", text + "\n")
    echo(f"\n{text}\n", flush=True)
    return all(rows.values()), passed


@one_line_errors
def main(argv: Optional[Sequence[str]] = None) -> int:
    """Run stages; the exit code is 0 if all bars pass, or in a dry run if all commands run."""
    parser = argparse.ArgumentParser(prog="bash benchmarks/on_gpu.sh", description=__doc__)
    parser.add_argument("stages", nargs="*", metavar="STAGE", help=f"{', '.join(STAGES)} (all)")
    parser.add_argument("--dry", action="store_true", help="run without a GPU, and time nothing")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/gpu"), help="folder (%(default)s)")
    args = parser.parse_args(argv)
    if unknown := [name for name in args.stages if name not in STAGES]:
        raise ConfigError(f"unknown stage {unknown[0]!r}; use one of {', '.join(STAGES)}")
    if args.dry:
        os.environ["DIT_DEVICE"] = "cpu"
    else:
        os.environ.pop("DIT_DEVICE", None)
        from dit.backends.device import describe, use_cuda

        if not use_cuda():
            raise ConfigError(
                "torch sees no GPU; add --dry to run every command without one, or time a step on this CPU with "
                "benchmarks.step"
            )
        echo(describe())
    ran, passed = zip(*(run_stage(name, args.out, dry=args.dry) for name in args.stages or STAGES))
    return EXIT_OK if all(ran if args.dry else passed) else EXIT_UNEXPECTED


if __name__ == "__main__":
    sys.exit(main())
