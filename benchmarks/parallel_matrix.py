"""Every parallel layout against one rank, on this machine: `python -m benchmarks.parallel_matrix [--write]`.

Each row trains a tiny model for three steps on dense and on packed batches, on gloo ranks, and compares losses,
gradient norms, every parameter's gradient and the weights after the last step with the same steps on one rank. It also
moves a checkpoint (weights, average, Adam's moments) to one rank and another one from there. The table in
docs/parallelism.md is the output of this command.
"""

import argparse
import json
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Optional

import torch
from torch import Tensor

from benchmarks.parallel_training import run_world
from dit.errors import EXIT_OK, EXIT_UNEXPECTED
from dit.terminal import echo
from dit.verify.compare import BOUNDS, Comparison, compare_training, largest_error
from dit.verify.ranks import FORKS

STEPS = 3
PAGE = Path(__file__).parents[1] / "docs" / "parallelism.md"
START, END = "<!-- parallel matrix: start -->", "<!-- parallel matrix: end -->"
TP2SP = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
TP4SP = {"tensor_model_parallel_size": 4, "sequence_parallel": True}
CP2, CP4 = {"context_parallel_size": 2}, {"context_parallel_size": 4}
PP2 = {"pipeline_model_parallel_size": 2}
EP2 = {"expert_model_parallel_size": 2}
FSDP = {"data_parallel": "fsdp"}
HYBRID = {**FSDP, "num_distributed_optimizer_instances": 2}
EXPERTS = {"num_experts": 4, "moe_ffn_hidden_size": 48, "moe_capacity_factor": 1.5}


@dataclass(frozen=True)
class Row:
    """One layout.

    Attributes:
        name: in the table.
        world: ranks.
        parallel: settings of `ParallelConfig`.
        model: changes of the tiny model.
        micro_batches: of a step, over all replicas.
        optimizer: changes of the optimizer that one rank does not have.
    """

    name: str
    world: int
    parallel: dict[str, Any]
    model: dict[str, Any] = field(default_factory=dict)
    micro_batches: int = 4
    optimizer: dict[str, Any] = field(default_factory=dict)

    @property
    def task(self) -> dict[str, Any]:
        """The training case, equal for all layouts."""
        return {"model": self.model, "micro_batches": self.micro_batches}


SMALL = [
    Row("DP 2", 2, {"data_parallel": "ddp"}),
    Row("distributed optimizer 2", 2, {}),
    Row("FSDP 2", 2, FSDP),
    Row("hybrid FSDP, 2 instances of 2", 4, HYBRID),
    Row("distributed optimizer 2, offload", 2, {}, optimizer={"offload": True}),
    Row("FSDP 2, offload", 2, FSDP, optimizer={"offload": True}),
    Row("TP 2", 2, {"tensor_model_parallel_size": 2}),
    Row("TP 2 + SP", 2, TP2SP),
    Row("TP 4 + SP", 4, TP4SP),
    Row("PP 2", 2, PP2),
    Row("PP 4", 4, {"pipeline_model_parallel_size": 4}),
    Row("PP 2, VPP 2", 2, {**PP2, "virtual_pipeline_model_parallel_size": 2}),
    Row("PP 2, FSDP 2", 4, {**PP2, **FSDP}),
    Row("TP 2 + SP, PP 2, VPP 2, FSDP 2", 8, {**TP2SP, **PP2, "virtual_pipeline_model_parallel_size": 2, **FSDP}),
    Row("CP 2 ring", 2, CP2),
    Row("CP 4 ring", 4, CP4),
    Row("CP 4 all-gather", 4, {**CP4, "context_comm": "all_gather"}),
    Row("CP 4 all-to-all", 4, {**CP4, "context_comm": "a2a"}),
    Row("CP 4 two-level", 4, {**CP4, "context_comm": "a2a+p2p", "context_a2a_size": 2}),
    Row("EP 2", 2, EP2, EXPERTS),
    Row("EP 2, TP 2 + SP", 4, {**EP2, **TP2SP}, EXPERTS),
    Row("TP 2 + SP, hybrid FSDP, 2 instances of 2", 8, {**TP2SP, **HYBRID}),
]
MISSION = [
    Row("FSDP 8", 8, FSDP, micro_batches=8),
    Row("CP 2, TP 2 + SP, FSDP 2", 8, {**CP2, **TP2SP, **FSDP}),
    Row("CP 2, TP 2 + SP, distributed optimizer 2", 8, {**CP2, **TP2SP}),
    Row("CP 2, TP 2 + SP, PP 2, distributed optimizer", 8, {**CP2, **TP2SP, **PP2}),
    Row("CP 2, TP 2 + SP, PP 2, EP 2, distributed optimizer", 8, {**CP2, **TP2SP, **PP2, **EP2}, EXPERTS),
    Row("CP 2, TP 2 + SP, EP 2, FSDP 2", 8, {**CP2, **TP2SP, **EP2, **FSDP}, EXPERTS),
]
"""The six combinations that the public systems document as supported."""


@dataclass(frozen=True)
class Outcome:
    """How a layout compares with one rank.

    Attributes:
        comparisons: of its training on dense and on packed batches.
        lost: tensors that a checkpoint to or from one rank changed.
    """

    comparisons: tuple[Comparison, ...]
    lost: tuple[str, ...]

    @property
    def differences(self) -> tuple[str, ...]:
        """The differences, one line each."""
        trained = (line for comparison in self.comparisons for line in comparison.differences)
        return (*trained, *(f"{name}: a checkpoint changes it" for name in self.lost))

    @property
    def errors(self) -> dict[str, float]:
        """The largest relative error of each compared kind, the worse of dense and packed batches."""
        return {kind: largest_error(c.largest(kind) for c in self.comparisons) for kind in BOUNDS}


def not_carried(before: dict[str, Any], read: dict[str, Any]) -> tuple[str, ...]:
    """List the tensors that a checkpoint changed, and copies that differ."""
    return (
        *(n for n, value in before.items() if n != "drifted" and not _same(value, read[n])),
        *before["drifted"],
        *read["drifted"],
    )


def _same(before: object, read: object) -> bool:
    if isinstance(before, Tensor) and isinstance(read, Tensor):
        return torch.equal(before, read)
    return before == read


def run(rows: Sequence[Row], folder: Path) -> dict[str, Outcome]:
    """Run rows, each world size in one start; a failed world raises with the output of its ranks.

    One rank runs first and last: it writes the checkpoints that the others read, and reads those that they write.
    """
    tasks: list[dict[str, Any]] = []
    for row in rows:
        if row.task not in tasks:
            tasks.append(row.task)
    one_rank, saved_alone = {"data_parallel": "ddp"}, [str(folder / f"task_{i}") for i in range(len(tasks))]
    number = {row.name: tasks.index(row.task) for row in rows}

    def training(parallel: dict[str, Any], task: dict[str, Any]) -> list[dict[str, Any]]:
        return [{"parallel": parallel, "packed": packed, "steps": STEPS, **task} for packed in (False, True)]

    def moving(way: str, parallel: dict[str, Any], task: dict[str, Any], path: str) -> dict[str, Any]:
        return {"task": f"benchmarks.parallel_checkpoints:{way}", "parallel": parallel, "folder": path, **task}

    first = [
        case
        for task, path in zip(tasks, saved_alone)
        for case in (*training(one_rank, task), moving("save", one_rank, task, path))
    ]
    on_one_rank = run_world(1, first, folder / "first")
    by_start: dict[tuple[int, str], list[Row]] = defaultdict(list)
    for row in rows:
        # Megatron-FSDP never releases the groups of its models, and their threads poll: each such row starts new ranks.
        by_start[row.world, row.name if row.parallel.get("data_parallel") == "fsdp" else ""].append(row)
    starts = [(world, f"{i}_{world}", group) for i, ((world, _), group) in enumerate(sorted(by_start.items()))]
    many: dict[str, list[dict[str, Any]]] = {}
    for world, name, group in starts:
        cases = [
            case
            for i, row in enumerate(group)
            for task in [{**row.task, "optimizer": row.optimizer}]
            for case in (
                *training(row.parallel, task),
                moving("save", row.parallel, task, str(folder / f"row_{name}_{i}")),
                moving("load", row.parallel, task, saved_alone[number[row.name]]),
            )
        ]
        results = run_world(world, cases, folder / name, timeout_s=1800.0)
        many |= {row.name: results[4 * i : 4 * i + 4] for i, row in enumerate(group)}
    last = [
        moving("load", one_rank, row.task, str(folder / f"row_{name}_{i}"))
        for _, name, group in starts
        for i, row in enumerate(group)
    ]
    loaded = run_world(1, last, folder / "last")
    outcomes = {}
    for row, on_one in zip((row for *_, group in starts for row in group), loaded, strict=True):
        dense, packed, saved, back = many[row.name]
        alone_dense, alone_packed, alone_saved = on_one_rank[3 * number[row.name] :][:3]
        not_restored = (*not_carried(saved, on_one), *not_carried(alone_saved, back))
        comparisons = (compare_training(alone_dense, dense), compare_training(alone_packed, packed))
        outcomes[row.name] = Outcome(comparisons, not_restored)
    return outcomes


def table(rows: Sequence[Row], outcomes: dict[str, Outcome]) -> str:
    """Return the list of gradient errors in Markdown; a layout that is not equal is marked after its name."""
    lines = []
    for row in rows:
        outcome = outcomes[row.name]
        name = f"{row.name} **differs** ({outcome.differences[0]})" if outcome.differences else row.name
        lines.append(f"* {name}: {outcome.errors['gradients']:.1e}")
    return "\n".join(lines)


def write_page(text: str, path: Path = PAGE) -> None:
    """Write the table between its marks in the page."""
    page = path.read_text()
    before, _, remainder = page.partition(START)
    _, _, after = remainder.partition(END)
    if not remainder or not after:
        raise ValueError(f"{path} lacks the marks {START} and {END}")
    path.write_text(f"{before}{START}\n{text}\n{END}{after}")


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Run the command; the exit code is 0 if every layout equals one rank."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.parallel_matrix", description=__doc__)
    parser.add_argument("--only", help="rows whose name contains this")
    parser.add_argument("--write", action="store_true", help="put the table into docs/parallelism.md")
    parser.add_argument("--out", type=Path, help="write the numbers to this JSON file")
    args = parser.parse_args(argv)
    if args.write and not PAGE.exists():
        parser.error(f"--write: {PAGE} does not exist; it is part of the repository, not of an installed copy")
    rows = [row for row in (*SMALL, *MISSION) if not args.only or args.only in row.name]
    FORKS.set_forkserver_preload(["benchmarks.parallel_checkpoints"])
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        outcomes = run(rows, Path(folder))
    text = table(rows, outcomes)
    echo(text)
    echo(f"{len(rows)} layouts, dense and packed, in {time.perf_counter() - started:.0f} s")
    if args.write:
        write_page(text)
    if args.out:
        args.out.write_text(json.dumps({name: _numbers(outcome) for name, outcome in outcomes.items()}, indent=1))
    return EXIT_UNEXPECTED if any(outcome.differences for outcome in outcomes.values()) else EXIT_OK


def _numbers(outcome: Outcome) -> dict[str, Any]:
    return {"errors": outcome.errors, "differences": outcome.differences}


if __name__ == "__main__":
    sys.exit(main())
