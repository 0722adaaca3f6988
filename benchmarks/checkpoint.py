"""Time and memory of saving and loading a training state, compared with plain torch distributed checkpointing (DCP).

`python -m benchmarks.checkpoint --factory letters_dit model.hidden_size=768 model.num_layers=12`

Both write and read the local ranges of each rank: DCP one tensor per rank and parameter, under separate names, which
only the same layout can read; ours boxes that every layout can read. The two alternate, so that changes in the speed of
the machine affect both. Ours includes the SHA-256 of every byte and both include flushing to the disk. On both sides a
load ends with the local ranges of this rank in place; copying the master weights to the model (a copy, and an
all-gather if ranks own ranges) is the same work after either, and is timed separately as `publish`.

A third pair also alternates: a complete synchronous save (`full_save`, with manifest and rename), and an asynchronous
one (`checkpoint.async_save`): the time that it blocks (`beside_blocks`), and the time until it is durable
(`beside_durable`, if nothing else runs). With `--dcp-process` also DCP's `async_save` in a process
(`dcp_blocks`, `dcp_durable`).
"""

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Optional

from benchmarks.step import config_of, revision, table
from dit.errors import one_line_errors
from dit.terminal import echo
from launch import environment

if TYPE_CHECKING:
    from dit.checkpoint.saves import Saves
    from dit.checkpoint.train_state import TrainState
    from dit.run_config import RunConfig

DCP_ASYNC = ("dcp_blocks", "dcp_durable")


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.checkpoint", description=__doc__)
    parser.add_argument("--factory", required=True, help="recipe whose state is saved")
    parser.add_argument("--rounds", type=int, default=5, help="times that both are run")
    parser.add_argument("--folder", type=Path, help="disk to write to (default: the temporary one)")
    parser.add_argument("--dcp-process", action="store_true", help="also measure DCP's async_save in a process")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.set_defaults(real_data=False, shape=None)
    return parser


def measure(config: "RunConfig", rounds: int, folder: Path, *, dcp_process: bool = False) -> dict[str, Any]:
    """Save and load one state `rounds` times in both ways; every rank calls this.

    Returns:
        Median seconds of each, and the median over the rounds of their ratios, on rank 0's clocks.
    """
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

    from dit.backends import process_groups
    from dit.backends.device import describe, synchronize
    from dit.checkpoint.sharded_state import load_shards, save_state
    from dit.optimizer.master_weights import SLOTS, copy_masters_to_model
    from dit.training.pretrain import Run

    dims, spec = config.check_here()
    groups = process_groups.initialize(config.parallel)
    state = Run(config, dims, spec, groups, quiet=True).state
    plain: dict[str, torch.Tensor] = {}
    for i, shard in enumerate(state.shards):
        shard.ensure_state()
        values = {"weight": shard.main, **{slot: shard.slot(slot) for slot in SLOTS}}
        if state.ema is not None:
            values["ema"] = state.ema.values[i]
        plain |= {f"{groups.rank}.{slot}.{shard.name}": value.detach() for slot, value in values.items()}

    def timed(run: Callable[[], Any]) -> tuple[float, float]:
        torch.distributed.barrier()
        synchronize()
        wall, cpu = time.perf_counter(), time.process_time()
        run()
        synchronize()
        torch.distributed.barrier()
        return time.perf_counter() - wall, time.process_time() - cpu

    saves = {name: _saves(config, state, folder / name, is_async=name == "beside") for name in ("full", "beside")}

    def save(name: str) -> None:
        state.step += 1
        saves[name].save(state, {})

    def dcp_async(path: Path) -> Any:
        return dcp.async_save(plain, checkpoint_id=path, async_checkpointer_type=AsyncCheckpointerType.PROCESS)

    times_by_name: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for i in range(rounds + 1):
        our_folder, dcp_folder = folder / f"ours_{i}", folder / f"dcp_{i}"
        if groups.rank == 0:
            our_folder.mkdir()
        torch.distributed.barrier()
        ways: list[tuple[str, Callable[[], Any]]] = [
            ("save", lambda: save_state(our_folder, state.shards, state.ema, state.optimizer, groups)),  # noqa: B023
            ("dcp_save", lambda: dcp.save(plain, checkpoint_id=dcp_folder)),  # noqa: B023
            ("load", lambda: load_shards(our_folder, state.shards, state.ema, state.optimizer, groups)),  # noqa: B023
            ("dcp_load", lambda: dcp.load(plain, checkpoint_id=dcp_folder)),  # noqa: B023
        ]
        in_turn = ways if i % 2 == 0 else [ways[1], ways[0], ways[3], ways[2]]
        for name, run in [*in_turn, ("publish", lambda: copy_masters_to_model(state.optimizer, state.wrapped))]:
            times = timed(run)
            if i:  # the first round warms up
                times_by_name[name].append(times)
        for name in ("full", "beside") if i % 2 == 0 else ("beside", "full"):
            times = timed(partial(save, name))
            waited = timed(saves[name].wait)
            if i and name == "full":
                times_by_name["full_save"].append(times)
            elif i:
                times_by_name["beside_blocks"].append(times)
                times_by_name["beside_durable"].append((times[0] + waited[0], times[1] + waited[1]))
        if dcp_process:
            pending: list[Any] = []
            times = timed(lambda: pending.append(dcp_async(folder / f"dcp_async_{i}")))  # noqa: B023
            waited = timed(lambda: pending[0].result())  # noqa: B023
            if i:
                times_by_name["dcp_blocks"].append(times)
                times_by_name["dcp_durable"].append((times[0] + waited[0], times[1] + waited[1]))
        torch.distributed.barrier()
        if groups.rank == 0:
            for path in folder.glob(f"*_{i}"):
                shutil.rmtree(path)
    record = {
        "device": describe(),
        "revision": revision(),
        "world_size": groups.world_size,
        "data_parallel": config.parallel.data_parallel,
        "state_gib_of_rank_0": sum(4 * value.numel() for value in plain.values()) / 2**30,
        "rounds": rounds,
    }
    for what in ("save", "load"):
        pairs = list(zip(times_by_name[what], times_by_name[f"dcp_{what}"], strict=True))
        for clock, unit in enumerate(("wall", "cpu")):
            record[f"{what}_{unit}_s"] = median(our_time[clock] for our_time, _ in pairs)
            record[f"dcp_{what}_{unit}_s"] = median(dcp_time[clock] for _, dcp_time in pairs)
            record[f"{what}_{unit}_ratio"] = median(our_time[clock] / dcp_time[clock] for our_time, dcp_time in pairs)
    for clock, unit in enumerate(("wall", "cpu")):
        for name in ("full_save", "beside_blocks", "beside_durable", *(n for n in times_by_name if n in DCP_ASYNC)):
            record[f"{name}_{unit}_s"] = median(times[clock] for times in times_by_name[name])
        pairs = list(zip(times_by_name["beside_blocks"], times_by_name["full_save"], strict=True))
        record[f"blocking_{unit}_ratio"] = median(blocked[clock] / full[clock] for blocked, full in pairs)
    for checkpoints in saves.values():
        checkpoints.close()
    record["publish_wall_s"], record["publish_cpu_s"] = (
        median(times) for times in zip(*times_by_name["publish"], strict=True)
    )
    process_groups.destroy()
    return record


def _saves(config: "RunConfig", state: "TrainState", root: Path, *, is_async: bool) -> "Saves":
    from dit.checkpoint.checkpointer import Checkpointer
    from dit.checkpoint.saves import Saves
    from dit.checkpoint.store import CheckpointStore
    from dit.monitoring.run_log import RunLog

    settings = replace(config.checkpoint, async_save=is_async, keep_last=1)
    return Saves(Checkpointer(CheckpointStore(root, settings), config), state, RunLog())


@one_line_errors
def main(argv: Optional[Sequence[str]] = None) -> int:
    """Run the command and return its exit code."""
    args = build_parser().parse_args(argv)
    environment.prepare()
    environment.quiet_libraries()
    folder = args.folder or Path(tempfile.gettempdir()) / f"checkpoints_{os.environ.get('TORCHELASTIC_RUN_ID', 'one')}"
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as run_dir:
        record = {"recipe": args.factory, "overrides": args.overrides}
        record |= measure(config_of(args, run_dir), args.rounds, folder, dcp_process=args.dcp_process)
    if int(os.environ.get("RANK", "0")) == 0:
        echo(table(record))
        echo(json.dumps(record))
    return 0


if __name__ == "__main__":
    sys.exit(main())
