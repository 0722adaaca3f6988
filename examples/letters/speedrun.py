"""Run the race of examples/letters/speedrun.md, or replay a record of it and compare the two to the bit.

    python -m examples.letters.speedrun --factory letters_dit --ranks 2 --out runs/race
    python -m examples.letters.speedrun --check record.json --out runs/again

The first command trains on two cores with five seeds, reads the generated letters of each, and writes `record.json` and
the row of the table. The second one repeats a record's training with its first seed and compares the data, the reader,
every loss, the weights, the letters read and, on the same machine, the process time. It exits with 1 if one of them
differs.
"""

import argparse
import ctypes
import hashlib
import json
import os
import resource
import shlex
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Optional

from benchmarks.step import revision, where
from dit.durable_files import write_atomic
from dit.errors import EXIT_OK, ConfigError, DataError, one_line_errors
from dit.monitoring.sinks import read_records
from dit.safe_files import parse_json, read_bytes
from dit.terminal import echo
from launch import cli, environment

if TYPE_CHECKING:
    from torch import Tensor

    from dit.run_config import RunConfig

CORES = 2
PR_SET_CHILD_SUBREAPER = 36  # of Linux's prctl
FILE, LOG, RUN = "record.json", "train.log", "run"
EXIT_DIFFERS = 1
TO_THE_BIT = {
    "data_sha256": "the letters differ; render them from the same fonts with the same version",
    "reader_sha256": "the reader differs, so its results cannot be compared",
    "reader_accuracy": "the accuracy on held-out families differs",
    "steps": "the lengths of the runs differ",
    "losses_sha256": "a loss differs",
    "weights_sha256": "the weights at the end differ",
    "read": "the number of letters read correctly differs",
    "total": "the number of generated letters differs",
}
"""Fields that must be equal in a replay, each with the meaning of a difference; a difference explains later ones."""
SEEDS = 5
MARK = 0.9  # share of letters that must be read correctly
SLOWER = 1.25  # a replay on the same machine may take this many times the claimed process time
FIXED = ("training.seed", "training.run_dir", "checkpoint.resume", "checkpoint.resume_from", "checkpoint.start_from")


@dataclass(frozen=True)
class Record:
    """Runs of the race that differ only in their seed. The digests and times are those of the recipe's seed.

    Attributes:
        factory, overrides, ranks: of the training command.
        revision: of the code.
        process_s: CPU time of the training command and all its processes, in seconds.
        wall_s: elapsed time in seconds, which depends on other work on the machine.
        steps: number of steps of the run.
        data_sha256: digest of the shards.
        reader_sha256: digest of the classifier's weights.
        losses_sha256: digest of every logged loss, in hexadecimal.
        weights_sha256: digest of the final weights and their average.
        read, total: number of letters that were read correctly, and of all letters.
        read_by_seed: `read` of each further seed.
        reader_accuracy: accuracy of the classifier on held-out families.
        machine, torch: processor, and version of torch.
    """

    factory: str
    overrides: list[str]
    ranks: int
    revision: str
    process_s: float
    wall_s: float
    steps: int
    data_sha256: str
    reader_sha256: str
    losses_sha256: str
    weights_sha256: str
    read: int
    total: int
    read_by_seed: dict[str, int]
    reader_accuracy: float
    machine: str
    torch: str

    @property
    def command(self) -> str:
        """The training command, without its folder."""
        launcher = f"torchrun --nproc-per-node {self.ranks} -m" if self.ranks > 1 else "python -m"
        return f"{launcher} launch.train --yes --factory {shlex.join([self.factory, *self.overrides])}"

    def row(self) -> str:
        """Return the row of the table of records."""
        reads = [self.read, *self.read_by_seed.values()]
        reached = sum(read >= MARK * self.total for read in reads)
        cells = (
            f"`{self.command}` at {self.revision}",
            f"{self.read / self.total:.1%} ({self.read} of {self.total}; reader {self.reader_accuracy:.1%})",
            f"{reached} of {len(reads)} ({min(reads) / self.total:.1%} to {max(reads) / self.total:.1%})",
            f"{self.process_s:,.0f} s ({self.wall_s:,.0f} s)",
            f"{self.steps:,}",
            f"{self.machine}, torch {self.torch}",
            f"`{self.weights_sha256[:16]}`",
        )
        return f"| {' | '.join(cells)} |"

    @classmethod
    def load(cls, path: Path) -> "Record":
        """Read a record.

        Raises:
            DataError: the file is not a record.
        """
        try:
            return cls(**parse_json(read_bytes(path)))
        except (OSError, ValueError, TypeError) as error:
            raise DataError(f"{path} is not a record of this race: {error}; give a {FILE} of this command") from error


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.letters.speedrun",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--factory", default="letters_dit", help="recipe (%(default)s)")
    parser.add_argument("--ranks", type=int, choices=range(1, CORES + 1), default=CORES, help="processes (%(default)s)")
    parser.add_argument("--seeds", type=int, default=SEEDS, help="seeds that are trained (%(default)s)")
    parser.add_argument("--check", type=Path, metavar="RECORD.json", help="repeat a record and compare")
    parser.add_argument("--any-revision", action="store_true", help="check a record of another revision of the code")
    parser.add_argument("--out", type=Path, required=True, help=f"new folder of the run, its log and {FILE}")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    return parser


def command_of(factory: str, overrides: Sequence[str], ranks: int, run: Path) -> list[str]:
    """Return the training command."""
    launcher = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "-m"] if ranks > 1 else []
    words = [*overrides, f"training.run_dir={run}", "checkpoint.resume=never"]
    return [sys.executable, "-m", *launcher, "launch.train", "--yes", "--factory", factory, *words]


def trained(command: Sequence[str], log: Path) -> tuple[float, float]:
    """Run a training command on two cores; return its CPU time and its elapsed time in seconds.

    Raises:
        DataError: it failed.
    """
    cores = sorted(os.sched_getaffinity(0))[:CORES]
    earlier, prctl = child_processes(), ctypes.CDLL(None).prctl
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    # Processes that a rank starts and does not wait for, such as the one that reads the data, become children of this
    # one, and their time counts.
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
    """Return the SHA-256 of the shards of a data set.

    Raises:
        DataError: there are none.
    """
    shards = sorted(folder.rglob("*.tar"))
    if not shards:
        raise DataError(f"{folder} has no shards; render the letters: python -m energon_data.prepare letters")
    return digest(hashlib.sha256(read_bytes(path, 1 << 32)).digest() for path in shards)


def losses_of(run: Path) -> list[str]:
    """Return every logged loss of a run, in hexadecimal."""
    records = read_records(run / "metrics.jsonl")
    return [f"{record['step']} {record['loss_hex']}" for record in records if "loss_hex" in record]


def weights_of(run: Path) -> dict[str, "Tensor"]:
    """Return the unsharded weights of a run's last checkpoint, and their average."""
    from dit.checkpoint.full_weights import read_full_weights
    from dit.checkpoint.reading import find_checkpoint

    folder, _ = find_checkpoint(run)
    return {
        f"{slot} {name}": value for slot in ("weight", "ema") for name, value in read_full_weights(folder, slot).items()
    }


def letters_read(run: Path) -> dict[str, Any]:
    """Draw letters from a run's averaged weights and read them, by `python -m launch.evaluate`.

    Raises:
        DataError: it failed.
    """
    command = [sys.executable, "-m", "launch.evaluate", "--checkpoint", str(run), "--metric", "letters", "--json"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise DataError(f"the letters were not read: {done.stderr.strip().splitlines()[-1:]}")
    result: dict[str, Any] = parse_json(done.stdout.splitlines()[-1])
    return result


def config_of(factory: str, overrides: Sequence[str]) -> "RunConfig":
    """Return the settings of a run.

    Raises:
        ConfigError: an override changes a setting that the race fixes.
    """
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


def run_race(factory: str, overrides: Sequence[str], ranks: int, out: Path, seeds: int = 1) -> Record:
    """Train with the recipe's seed and with seeds 1 to `seeds` - 1, read and return the record.

    Raises:
        ConfigError: `out` exists.
        DataError: the data are not letters, or the training failed.
    """
    from examples.letters.reader import FILE as READER

    data = Path(getattr(config_of(factory, overrides).data, "path", None) or "")
    before = digest_of_data(data)
    if out.exists():
        raise ConfigError(f"{out} exists; give --out a folder that does not")
    out.mkdir(parents=True)
    seconds, wall = trained(command_of(factory, overrides, ranks, out / RUN), out / LOG)
    losses, letters = losses_of(out / RUN), letters_read(out / RUN)
    read_by_seed = {}
    for seed in map(str, range(1, seeds)):
        run = out / f"{RUN}_{seed}"
        trained(command_of(factory, [*overrides, f"training.seed={seed}"], ranks, run), out / f"seed_{seed}.log")
        read_by_seed[seed] = letters_read(run)["correct"]
    place = where()
    return Record(
        factory=factory,
        overrides=list(overrides),
        ranks=ranks,
        revision=revision(),
        process_s=seconds,
        wall_s=wall,
        steps=int(losses[-1].split()[0]),
        data_sha256=before,
        reader_sha256=hashlib.sha256(read_bytes(data / READER)).hexdigest(),
        losses_sha256=digest(line.encode() for line in losses),
        weights_sha256=digest_of_tensors(weights_of(out / RUN)),
        read=letters["correct"],
        total=letters["total"],
        read_by_seed=read_by_seed,
        reader_accuracy=letters["reader_accuracy"],
        machine=processor(),
        torch=place["torch"],
    )


def processor() -> str:
    """Return the name of the processor from /proc/cpuinfo."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{CORES} cores of {names[0] if names else 'an unnamed processor'}"


def differences(claimed: Record, measured: Record) -> list[str]:
    """Return a line for each difference of a replay; an empty list confirms the record."""
    lines = [
        f"{name}: claimed {getattr(claimed, name)}, measured {getattr(measured, name)}: {why}"
        for name, why in TO_THE_BIT.items()
        if getattr(claimed, name) != getattr(measured, name)
    ]
    slower = measured.process_s > SLOWER * claimed.process_s
    if slower and measured.machine == claimed.machine:
        lines.append(
            f"process_s: claimed {claimed.process_s:,.0f} s, measured {measured.process_s:,.0f} s: more than "
            f"{SLOWER:g} times as long on the same machine"
        )
    if lines:
        lines += [
            f"{name}: claimed {getattr(claimed, name)}, now {getattr(measured, name)}, which may round differently"
            for name in ("machine", "torch", "revision")
            if getattr(claimed, name) != getattr(measured, name)
        ]
    return lines


@one_line_errors
def main(argv: Optional[Sequence[str]] = None) -> int:
    """Run the command and return its exit code: 1 if a checked record is not confirmed."""
    args = build_parser().parse_intermixed_args(argv)
    environment.prepare()
    claimed = None
    if args.check:
        claimed = Record.load(args.check)
        if args.overrides:
            raise ConfigError(f"--check reads the settings from the record; leave out {' '.join(args.overrides)}")
        if claimed.revision != revision() and not args.any_revision:
            raise ConfigError(
                f"{args.check} is from revision {claimed.revision}, this is {revision()}; check out that revision, or "
                "give --any-revision"
            )
        args.factory, args.overrides, args.ranks = claimed.factory, claimed.overrides, claimed.ranks
        args.seeds = 1
    measured = run_race(args.factory, args.overrides, args.ranks, args.out, args.seeds)
    write_atomic(args.out / FILE, json.dumps(asdict(measured), indent=1) + "\n")
    echo(measured.row())
    if claimed is None:
        return EXIT_OK
    lines = differences(claimed, measured)
    verdict = "not confirmed" if lines else "confirmed to the bit"
    times = f"CPU time {measured.process_s:,.0f} s, claimed {claimed.process_s:,.0f} s"
    if measured.machine != claimed.machine:
        times += f", not compared, because the record is from {claimed.machine}"
    echo(f"{args.check}: {verdict}; {times}", *lines, sep="\n")
    return EXIT_DIFFERS if lines else EXIT_OK


if __name__ == "__main__":
    sys.exit(main())
