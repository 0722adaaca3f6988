"""Train a recipe, or a grid of recipes, layouts and variants, as one nemo-run experiment.

    python -m launch.experiment --executor "torchrun(ranks=2)" --factory tiny_dit --layouts ddp tp2 pp2

Each run is a `launch.train` process with its run folder below `--runs`. Runs on this machine are sequential; elsewhere
all are submitted at once. If a run fails, the others still run, and the command fails. `--dryrun` prints the commands
or scripts.
"""

import argparse
import inspect
import os
import shlex
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import chain
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Optional

from dit.config_record import TRUST_VARIABLE
from dit.errors import EXIT_INTERRUPTED, EXIT_OK, EXIT_UNEXPECTED, ConfigError, UserError, one_line_errors
from dit.terminal import echo
from launch import cli, environment, grid
from launch.argument_types import command_parser

if TYPE_CHECKING:
    from nemo_run.core.execution.base import Executor as Executor
    from torchx.specs import AppDryRunInfo

SUCCEEDED, UNKNOWN = "SUCCEEDED", "UNKNOWN"
EXECUTOR = "executor."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that select where an experiment runs."""
    parser.add_argument("--name", help="of the experiment (default: the first recipe)")
    parser.add_argument("--folder", type=Path, help="of nemo-run's scripts and logs (slurm: job_dir; else ~/.nemo_run)")
    parser.add_argument("--dryrun", action="store_true", help="print the commands or scripts, and start nothing")


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command."""
    parser = command_parser("launch.experiment", __doc__)
    parser.add_argument("--executor", default="local", help="name of launch/executors.py with arguments (%(default)s)")
    parser.add_argument("--detach", action="store_true", help="return once submitted; only Slurm")
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="folder of the run folders (%(default)s)")
    add_arguments(parser)
    grid.add_arguments(parser)
    return parser


def split_overrides(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the overrides of the runs, and those of the executor without their prefix."""
    of_executor = [word.removeprefix(EXECUTOR) for word in words if word.startswith(EXECUTOR)]
    return [word for word in words if not word.startswith(EXECUTOR)], of_executor


def executor_of(text: str, overrides: Sequence[str] = ()) -> "Executor":
    """Return the executor that `name(argument=value)` and overrides of its fields describe."""
    import fiddle

    from launch.executors import ENVIRONMENT, EXECUTORS
    from launch.overrides import apply_overrides, parse_call

    name = text.partition("(")[0]
    if name not in EXECUTORS:
        raise ConfigError(f"--executor {name}: no such executor; use one of {', '.join(EXECUTORS)}")
    call = parse_call(EXECUTORS[name], text, "--executor")
    try:
        config = call()
    except TypeError as error:
        raise ConfigError(f"--executor {text}: {error.args[0]}; launch/executors.py has its arguments") from error
    apply_overrides(config, list(overrides))
    try:
        executor: Executor = fiddle.build(config)
    except AssertionError as error:
        raise ConfigError(f"--executor {name}: {str(error).partition(chr(10))[0]}") from error
    executor.env_vars = {name: str(value) for name, value in {**ENVIRONMENT, **executor.env_vars}.items()}
    return executor


def check(cells: Sequence[grid.Cell], executor: "Executor") -> None:
    """Check the settings of every run before one of them starts or waits in a queue.

    Paths and packages in a container are unknown here, so its runs are checked if their settings depend on neither.
    """
    from launch import config_file, train

    ranks = executor.nnodes() * executor.nproc_per_node()
    in_container = getattr(executor, "container_image", None) is not None
    for cell in cells:
        if in_container and _depends_on_container(cell.recipe, executor):
            continue
        try:
            config = config_file.built(train.resolve(cli.Options(factory=cell.recipe, overrides=cell.overrides)))
            if in_container:
                config.sampling.vae = None  # a folder of the container
            config.check(ranks)
        except UserError as error:
            line = str(error).splitlines()[0]
            raise type(error)(f"{cell.name} (ranks of --executor: {ranks}): {line}") from error


def _depends_on_container(recipe: str, executor: "Executor") -> bool:
    """Return whether a recipe may read folders, or needs packages of the user."""
    from launch import train

    name = recipe.partition("(")[0]
    has_packages = TRUST_VARIABLE in {**os.environ, **executor.env_vars}
    return has_packages or "." in name or bool(inspect.signature(train.find_recipe(name)).parameters)


def execute(
    title: str,
    module: str,
    tasks: Mapping[str, Sequence[str]],
    executor: "Executor",
    *,
    folder: Optional[Path] = None,
    detach: bool = False,
    dryrun: bool = False,
) -> dict[str, str]:
    """Run `python -m MODULE WORDS` for each task as one experiment, and return their states by name."""
    import nemo_run as run
    from invoke.exceptions import UnexpectedExit

    from launch.executors import folder_of

    is_local, start = isinstance(executor, run.LocalExecutor), [module]
    if is_local:  # python of this installation, even if its folder is not on PATH
        path = os.pathsep.join(filter(None, (str(Path(sys.executable).parent), os.environ.get("PATH"))))
        executor.env_vars.setdefault("PATH", path)
    if is_local and executor.launcher == "torchrun":
        # nemo-run quotes the arguments of torchrun for a shell, but starts it without one on this machine.
        executor.launcher = None
        ranks = str(executor.nproc_per_node())
        start = ["torch.distributed.run", "--standalone", "--nproc-per-node", ranks, "-m", module]
    base = folder_of(executor, folder, chain.from_iterable(tasks.values()))
    if dryrun:
        base = folder  # no shared disk is needed
    quiet = {"skip_status_at_exit": True, "enable_goodbye_message": False, "log_level": "WARN"}
    with run.Experiment(grid.file_name(title), base_dir=None if base is None else str(base), **quiet) as experiment:
        for name, words in tasks.items():
            script = run.Script(path=start[0], m=True, args=[*start[1:], *words], entrypoint="python")
            experiment.add(script, executor=executor, name=name)
        if dryrun:
            experiment.dryrun(log=False)
            for job in experiment.jobs:
                echo(f"# {job.id}\n{_script(job._dryrun_info)}\n")  # no public name in nemo-run
            return {}
        try:
            with _interruptible(is_local):
                experiment.run(sequential=is_local and len(tasks) > 1, detach=detach, tail_logs=not detach)
        except UnexpectedExit as error:
            reason = " ".join(error.result.stderr.split()) or f"{error.result.command} failed"
            raise ConfigError(f"{reason}; correct the executor, or start this on a login node of Slurm") from error
    jobs = experiment.status(return_dict=True) or {}
    return {name: str(job["status"]) for name, job in jobs.items()}


@contextmanager
def _interruptible(is_local: bool) -> Iterator[None]:
    """On Ctrl-C, SIGTERM or SIGHUP, stop the runs of this machine, which save, and interrupt the command.

    nemo-run waits until all runs have ended. Jobs of Slurm continue.
    """

    def stop(number: int, frame: Optional[FrameType]) -> None:
        if not is_local:
            echo("interrupted; the submitted jobs continue", file=sys.stderr)
            os._exit(EXIT_INTERRUPTED)
        processes: list[str] = []
        for file in Path("/proc/self/task").glob("*/children"):
            with suppress(OSError):  # the thread has ended
                processes += file.read_text().split()
        for process in processes:
            with suppress(ProcessLookupError):
                os.kill(int(process), signal.SIGTERM)
        raise KeyboardInterrupt

    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    handlers = {number: signal.signal(number, stop) for number in signals if signal.getsignal(number) != signal.SIG_IGN}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _script(planned: "AppDryRunInfo[Any]") -> str:
    """Return the command line of nemo-run on this machine, else the script of the scheduler."""
    roles = getattr(planned.request, "role_params", {})
    return "\n".join(shlex.join(process.args) for processes in roles.values() for process in processes) or str(planned)


def conclude(states: Mapping[str, str], detached: bool) -> int:
    """Print the states of the tasks, and return the exit code: 0 if all succeeded, or were submitted."""
    for name, state in states.items():
        echo(f"{state:<10} {name}")
    failed = [name for name, state in states.items() if state != SUCCEEDED]
    if not failed or detached:
        return EXIT_OK
    hint = "; without Slurm's accounting (sacct) only exit.json in each run's folder has the result"
    hint = hint if UNKNOWN in states.values() else ""
    echo(f"error: {len(failed)} of {len(states)} runs did not succeed: {', '.join(failed)}{hint}", file=sys.stderr)
    return EXIT_UNEXPECTED


@one_line_errors
def main(argv: Optional[Sequence[str]] = None) -> int:
    """Run the command and return its exit code."""
    args = build_parser().parse_intermixed_args(argv)
    of_runs, of_executor = split_overrides(grid.overrides_of(args))
    cells = grid.cells_of(args, of_runs, reserved=["training.run_dir"])
    environment.prepare(quiet=True)
    executor = executor_of(args.executor, of_executor)
    check(cells, executor)
    tasks = {
        cell.name: [
            *("--yes", "--factory", cell.recipe, *cell.overrides),
            f"training.run_dir={args.runs.resolve() / cell.name}",
        ]
        for cell in cells
    }
    where = {"folder": args.folder, "detach": args.detach, "dryrun": args.dryrun}
    states = execute(args.name or args.factory[0], "launch.train", tasks, executor, **where)
    return conclude(states, args.detach)


if __name__ == "__main__":
    sys.exit(main())
