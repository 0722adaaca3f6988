"""Run the race of examples/race/README.md, or replay a record of it and compare the two to the bit.

    python -m examples.race --track letters --ranks 1 --out runs/race training.num_steps=400
    python -m examples.race --check examples/race/letters/1.json --out runs/again
    python -m examples.race --page

The first command trains on two cores with five seeds, judges the samples of each, and writes `record.json` and the row
of the table. The second one repeats a record's training with its first seed and the code of its revision, and compares
the data, the judge, every logged loss, the weights and the right results. It exits with 1 if one of them differs, or if
the same machine takes more than 1.25 times as long.
The third one writes the tables and the plot of the records in examples/race.
"""

import argparse
import ctypes
import hashlib
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Optional

from benchmarks.commands import python_command
from benchmarks.step import revision, where
from dit.durable_files import write_atomic
from dit.errors import EXIT_OK, ConfigError, DataError, one_line_errors
from dit.monitoring.sinks import read_records
from dit.safe_files import parse_json, read_bytes
from dit.terminal import echo
from examples.race.record import FOLDER, PAGE, PLOT, TRACKS, Record, differences, page, plot
from launch import cli, environment
from launch.argument_types import at_least_one

if TYPE_CHECKING:
    from torch import Tensor

    from dit.run_config import RunConfig

CORES = 2
PR_SET_CHILD_SUBREAPER = 36  # of Linux's prctl
FILE, LOG, RUN = "record.json", "train.log", "run"
EXIT_DIFFERS = 1
SEEDS = 5
FIXED = ("training.seed", "training.run_dir", "checkpoint.resume", "checkpoint.resume_from", "checkpoint.start_from")


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.race", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--track", choices=TRACKS, default="letters", help="what the model draws (%(default)s)")
    parser.add_argument("--factory", help="recipe (default: that of the track)")
    parser.add_argument("--ranks", type=int, choices=range(1, CORES + 1), default=CORES, help="processes (%(default)s)")
    parser.add_argument("--seeds", type=at_least_one, default=SEEDS, help="seeds that are trained (%(default)s)")
    parser.add_argument("--change", default="", help="change since the last record, for the table")
    parser.add_argument("--check", type=Path, metavar="RECORD.json", help="repeat a record and compare")
    parser.add_argument("--any-revision", action="store_true", help="check with the code of this revision")
    parser.add_argument("--page", action="store_true", help="write the tables and the plot of the records")
    parser.add_argument("--out", type=Path, help=f"new folder of the runs, their logs and {FILE}")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    return parser


def command_of(factory: str, overrides: Sequence[str], ranks: int, run: Path) -> list[str]:
    """Return the training command."""
    words = [*overrides, f"training.run_dir={run}", "checkpoint.resume=never"]
    return python_command("launch.train", ranks, ["--yes", "--factory", factory, *words])


def trained(command: Sequence[str], log: Path) -> tuple[float, float]:
    """Run a training command on two cores; return its CPU time and its elapsed time in seconds."""
    cores = sorted(os.sched_getaffinity(0))[:CORES]
    earlier, prctl = child_processes(), ctypes.CDLL(None).prctl
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    # Processes that a rank starts and does not wait for, such as the one that reads the data, become children of this
    # process, and their time counts.
    prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        with open(log, "w") as file:
            process = subprocess.Popen(
                command, stdout=file, stderr=subprocess.STDOUT, env={**os.environ, "OMP_NUM_THREADS": "1"}
            )
            os.sched_setaffinity(process.pid, cores)
            code = process.wait()
        while orphans := child_processes() - earlier:
            os.waitpid(orphans.pop(), 0)
    finally:
        prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
    wall, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    if code:
        raise DataError(f"the training ended with exit code {code}; {log} has its output")
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, wall


def child_processes() -> set[int]:
    """Return the ids of the children of this process."""
    return {int(pid) for path in Path("/proc/self/task").glob("*/children") for pid in path.read_text().split()}


def digest(parts: Iterable[bytes]) -> str:
    """Return the SHA-256 of byte strings, each with its length."""
    total = hashlib.sha256()
    for part in parts:
        total.update(len(part).to_bytes(8, "little"))
        total.update(part)
    return total.hexdigest()


def digest_of_tensors(tensors: Mapping[str, "Tensor"]) -> str:
    """Return the SHA-256 of the names, shapes and bits of tensors, in the order of their names."""
    return digest(
        part
        for name in sorted(tensors)
        for part in (f"{name} {list(tensors[name].shape)}".encode(), tensors[name].contiguous().numpy().tobytes())
    )


def digest_of_data(folder: Path) -> str:
    """Return the SHA-256 of the shards of a data set."""
    shards = sorted(folder.rglob("*.tar"))
    if not shards:
        raise DataError(f"{folder} has no shards; prepare them: python -m energon_data.prepare")
    return digest(hashlib.sha256(read_bytes(path, 1 << 32)).digest() for path in shards)


def losses_of(run: Path) -> list[str]:
    """Return every logged loss of a run, in hexadecimal."""
    records = read_records(run / "metrics.jsonl")
    return [f"{record['step']} {record['loss_hex']}" for record in records if "loss_hex" in record]


def weights_of(run: Path) -> dict[str, "Tensor"]:
    """Return the unsharded weights of a run's last checkpoint, and their average."""
    from dit.checkpoint.full_weights import read_full_weights
    from dit.checkpoint.reading import find_checkpoint

    with ExitStack() as reading:
        folder, _ = find_checkpoint(run, reading)
        slots = {slot: read_full_weights(folder, slot) for slot in ("weight", "ema")}
    return {f"{slot} {name}": value for slot, weights in slots.items() for name, value in weights.items()}


def judged(track: str, run: Path) -> tuple[int, int]:
    """Draw samples from a run's averaged weights; return the number of right results, and of all results."""
    command = [sys.executable, "-m", "launch.evaluate", "--checkpoint", str(run), *TRACKS[track].judge, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    if done.returncode:
        raise DataError(f"the samples of {run} were not judged: {done.stderr.strip().rpartition(chr(10))[2]}")
    return TRACKS[track].count(parse_json(done.stdout.splitlines()[-1]))


def config_of(factory: str, overrides: Sequence[str]) -> "RunConfig":
    """Return the settings of a run."""
    from launch.config_file import built
    from launch.train import resolve

    for word in overrides:
        if word.partition("=")[0] in FIXED:
            raise ConfigError(
                f"{word} is fixed in this race, because --seeds sets the seeds, and each run starts from step 0 in a "
                "folder below --out"
            )
    cli.check_factory(factory)
    return built(resolve(cli.Options(factory=factory, overrides=list(overrides))))


def run_race(args: argparse.Namespace) -> Record:
    """Train with the recipe's seed and with seeds 1 to `seeds` - 1, judge the samples and return the record."""
    track, out = TRACKS[args.track], args.out
    data = Path(getattr(config_of(args.factory, args.overrides).data, "path", None) or "data of the recipe")
    before = digest_of_data(data)
    if out.exists():
        raise ConfigError(f"{out} exists; give --out a folder that does not")
    out.mkdir(parents=True)
    seconds, wall = trained(command_of(args.factory, args.overrides, args.ranks, out / RUN), out / LOG)
    losses, (right, total) = losses_of(out / RUN), judged(args.track, out / RUN)
    right_by_seed = {}
    for seed in map(str, range(1, args.seeds)):
        run, words = out / f"{RUN}_{seed}", [*args.overrides, f"training.seed={seed}"]
        trained(command_of(args.factory, words, args.ranks, run), out / f"seed_{seed}.log")
        right_by_seed[seed], _ = judged(args.track, run)
    return Record(
        track=args.track,
        change=args.change,
        factory=args.factory,
        overrides=args.overrides,
        ranks=args.ranks,
        revision=revision(),
        process_s=seconds,
        wall_s=wall,
        steps=int(losses[-1].split()[0]),
        data_sha256=before,
        judge_sha256=hashlib.sha256(read_bytes(data / track.judge_file)).hexdigest() if track.judge_file else "",
        losses_sha256=digest(line.encode() for line in losses),
        weights_sha256=digest_of_tensors(weights_of(out / RUN)),
        right=right,
        total=total,
        right_by_seed=right_by_seed,
        machine=processor(),
        torch=where()["torch"],
    )


def processor() -> str:
    """Return the name of the processor from /proc/cpuinfo."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{CORES} cores of {names[0] if names else 'an unnamed processor'}"


def check(args: argparse.Namespace, claimed: Record) -> int:
    """Repeat a record with its first seed, print every difference, and return the exit code."""
    if args.overrides:
        raise ConfigError(f"--check reads the settings from the record; leave out {' '.join(args.overrides)}")
    if claimed.revision != revision() and not args.any_revision:
        return check_at(claimed.revision, FOLDER.parents[1], args.check, args.out)
    for name in ("track", "change", "factory", "overrides", "ranks"):
        setattr(args, name, getattr(claimed, name))
    args.seeds = 1
    measured = measure(args)
    lines = differences(claimed, measured)
    verdict = "not confirmed" if lines else "confirmed to the bit"
    times = f"CPU time {measured.process_s:,.0f} s, claimed {claimed.process_s:,.0f} s"
    if measured.machine != claimed.machine:
        times += f", not compared, because the record is from {claimed.machine}"
    echo(f"{args.check}: {verdict}; {times}", *lines, sep="\n")
    return EXIT_DIFFERS if lines else EXIT_OK


def check_at(commit: str, repository: Path, record: Path, out: Path) -> int:
    """Repeat a record with the code of its commit, in a temporary worktree; return the exit code."""
    with TemporaryDirectory() as folder:
        worktree, git = Path(folder) / "code", ["git", "-C", str(repository), "worktree"]
        added = subprocess.run([*git, "add", "--detach", worktree, commit], capture_output=True, text=True)
        if added.returncode:
            raise ConfigError(
                f"{record} is from revision {commit}, which {repository} cannot check out: {added.stderr.strip()}; "
                "run git fetch --unshallow, or give --any-revision to use the code of this revision"
            )
        try:
            (worktree / "data").symlink_to(Path("data").absolute())
            words = ["--check", str(record.absolute()), "--out", str(out.absolute())]
            command = [sys.executable, "-m", "examples.race", *words]
            return subprocess.run(command, cwd=worktree, env={**os.environ, "PYTHONPATH": str(worktree)}).returncode
        finally:
            subprocess.run([*git, "remove", "--force", worktree], check=True)


def measure(args: argparse.Namespace) -> Record:
    """Run the race, write `record.json` and print its row."""
    record = run_race(args)
    write_atomic(args.out / FILE, json.dumps(asdict(record), indent=1) + "\n")
    echo(f"{record.row()} {record.seeds_at_mark} seeds pass")
    return record


@one_line_errors
def main(argv: Optional[Sequence[str]] = None) -> int:
    """Run the command and return its exit code: 1 if a checked record is not confirmed."""
    args = build_parser().parse_intermixed_args(argv)
    if args.page:
        PAGE.write_text(page())
        plot(PLOT)
        return EXIT_OK
    if args.out is None:
        raise ConfigError("the folder of the runs is missing; give --out")
    environment.prepare()
    if args.check:
        return check(args, Record.load(args.check))
    args.factory = args.factory or TRACKS[args.track].factory
    measure(args)
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(main())
