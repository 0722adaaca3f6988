"""The training command: `python -m launch.train --factory RECIPE ...`, with or without torchrun.

nemo-run provides recipes, parses the overrides and runs the task. Its `main` is not used, because it always exits with
0 and ignores unknown flags. This one returns the exit codes of `dit.errors`.
"""

import importlib
import inspect
import logging
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Optional

from dit.errors import (
    EXIT_CONFIG,
    EXIT_MACHINE,
    EXIT_NOT_FINITE,
    EXIT_OK,
    EXIT_PREEMPTED,
    EXIT_UNEXPECTED,
    ConfigError,
    UserError,
    discard_output,
    exit_code,
    flushed_output,
    message_of,
    name_root_cause,
    on_a_screen,
)
from dit.ranges import check_path
from dit.terminal import announce, echo, log_to_stderr
from launch import cli, environment
from recipes import registry

if TYPE_CHECKING:
    import nemo_run as run

START, BASE = "checkpoint.start_from", "base"
LONGEST_CAUSE = 300  # characters; the exit record has the full error
SAME_ON_ALL_RANKS = (EXIT_CONFIG, EXIT_NOT_FINITE, EXIT_MACHINE)


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Run the command line and return the exit code of the process."""
    verbose = False
    try:
        options = cli.parse(sys.argv[1:] if argv is None else argv, _keys_of)
        verbose = options.verbose
        if options.starts_training:
            return _execute(options)
        try:
            with flushed_output():
                return _execute(options)
        except BrokenPipeError:
            return discard_output()
    except UserError as error:
        _report(error, verbose)
        return exit_code(error)
    except SystemExit as leave:
        if leave.code == EXIT_PREEMPTED:
            name_root_cause("stopped on request; after a preemption, the same command continues the run", failed=False)
        if isinstance(leave.code, str):
            echo(leave.code, file=sys.stderr)
        return exit_code(leave)
    except KeyboardInterrupt as interrupt:
        echo("interrupted; a training continues from its last checkpoint if it is started again", file=sys.stderr)
        return exit_code(interrupt)
    except BaseException as error:  # some libraries derive errors from it; Python itself would exit with 1
        from dit.monitoring.exit_record import is_peer_lost

        if is_peer_lost(error) and not verbose:
            cause = on_a_screen(f"{type(error).__name__}: {error}".partition("\n")[0], LONGEST_CAUSE)
            line = f"stopped because another rank ended or cannot be reached; see its error ({cause})"
            echo(f"rank {environment.rank()}: {line}", file=sys.stderr)
            name_root_cause(line, failed=False)
            return EXIT_UNEXPECTED
        echo(f"rank {environment.rank()}: unexpected error", file=sys.stderr)
        echo(traceback.format_exc(), end="", file=sys.stderr)
        name_root_cause(f"unexpected error {type(error).__name__}: {error}")
        return EXIT_UNEXPECTED


def _execute(options: cli.Options) -> int:
    if options.help:
        echo(cli.HELP, end="")
        return EXIT_OK
    if options.list_recipes:
        echo(registry.listing())
        return EXIT_OK
    if options.describe:
        echo(registry.description(options.describe))
        return EXIT_OK
    _check(options)
    if options.dryrun:
        announce(f"{options.source}: importing torch and Megatron-Core")
    environment.prepare(quiet=not options.verbose)
    from launch import config_file

    task = resolve(options)
    # Every rank resolves the same configuration; rank 0 prints it.
    shows = environment.rank() == 0
    if options.to_yaml and shows:
        config_file.write(task, options.to_yaml)
        echo(f"configuration written to {options.to_yaml}")
    if options.print_config and shows:
        echo(config_file.dump(task), end="")
    if options.dryrun and shows:
        from launch import dry_run

        world_size = options.world_size or (environment.world_size() if environment.is_launched() else None)
        echo(dry_run.report(task, world_size, options.tokens, options.text_tokens, options.device))
    if not options.starts_training:
        return EXIT_OK
    environment.prepare_layout(task.parallel)
    import nemo_run as run

    if shows:
        _check_run(task)
        echo(config_file.summary(task), flush=True)
    if not options.yes and input(f"Start {options.source}? [y/N] ").strip().lower() not in ("y", "yes"):
        return EXIT_OK
    _configure_logging(options.verbose)
    run.run(task, direct=True)
    return EXIT_OK


def _keys_of(options: cli.Options) -> list[str]:
    """Return the settings of the selected run; none if it cannot be resolved."""
    if not options.source:
        return []
    environment.prepare(quiet=True)
    from launch.overrides import all_keys

    try:
        if options.factory:
            cli.check_factory(options.factory)
        return all_keys(resolve(replace(options, overrides=[])))
    except Exception:  # of the recipe's own module; the command line has another error
        return []


def _check(options: cli.Options) -> None:
    """Check the command line before the heavy imports."""
    if options.factory and options.yaml:
        raise ConfigError("--factory and --yaml both select the run; give one of them, and overrides for the rest")
    if not options.source:
        raise ConfigError("no recipe selected; give --factory NAME (--list shows all) or --yaml FILE")
    if (options.world_size or options.tokens or options.text_tokens or options.device) and not options.dryrun:
        raise ConfigError(
            "--world-size, --tokens, --text-tokens and --device only plan; add --dryrun, or start that many ranks with "
            "torchrun"
        )
    if options.factory:
        cli.check_factory(options.factory)
    if options.starts_training and not options.yes and not environment.can_ask():
        raise ConfigError("cannot ask for confirmation (no terminal, or several ranks); add --yes to start training")


def _check_run(task: "run.Partial") -> None:
    """Check a run before its settings are printed; an error leaves the record of a failed run."""
    import fiddle

    from dit.monitoring.exit_record import ExitRecord
    from dit.monitoring.run_lock import RunLock
    from dit.training.pretrain import pretrain
    from launch import config_file

    if fiddle.get_callable(task) is not pretrain:
        return
    config = config_file.built(task)
    run_dir = config.training.run_dir
    check_path("training.run_dir", run_dir)  # the lock and the exit record need the folder
    if environment.world_size() == 1:  # with several ranks, `pretrain` raises the error on all of them
        with RunLock(run_dir) as lock:
            try:
                lock.check()
            except UserError:
                with ExitRecord(run_dir, 0, lock.is_ours):
                    raise
    try:
        config.check_here()
    except UserError:
        with RunLock(run_dir, environment.rank()) as lock, ExitRecord(run_dir, environment.rank(), lock.is_ours):
            raise


def resolve(options: cli.Options) -> "run.Partial":
    """Return the configured task: the recipe (or that of a file) with the overrides applied."""
    from launch import config_file, overrides

    if options.yaml:
        task = config_file.load(options.yaml)
    else:
        task = call_recipe(str(options.factory), start=overrides.value_in(options.overrides, START))
    overrides.apply_overrides(task, options.overrides)
    return task


def find_recipe(name: str) -> Callable[..., object]:
    """Return the function of a recipe given as `name` or `package.module.name`."""
    module, _, attribute = name.rpartition(".")
    if not module:
        module, attribute = next((e.module, e.function) for e in registry.recipes() if e.name == name)
    try:
        function: Callable[..., object] = getattr(importlib.import_module(module), attribute)
    except (ModuleNotFoundError, AttributeError) as error:
        # A module that is missing in the recipe's own imports is not a misspelt recipe.
        if isinstance(error, ModuleNotFoundError) and not module.startswith(str(error.name)):
            raise
        raise ConfigError(f"--factory {name}: {error}; write package.module.function, or a name of --list") from error
    return function


def call_recipe(text: str, start: Optional[str] = None) -> "run.Partial":
    """Call a recipe given as `name`, `package.module.name` or `name(argument=value)`.

    Args:
        start: `checkpoint.start_from` if it is overridden. It is the `base` of a recipe that has this argument, so that
            the sizes of the model follow from it.
    """
    import nemo_run as run

    from launch.overrides import parse_call

    name = text.partition("(")[0]
    factory = parse_call(find_recipe(name), text, "--factory")
    takes_start = start is not None and BASE in inspect.signature(factory).parameters and BASE not in factory.keywords
    task = factory(base=start) if takes_start else factory()
    if not isinstance(task, run.Partial):
        raise ConfigError(f"--factory {name} returns a {type(task).__name__}; a recipe returns run.Partial(pretrain)")
    return task


def _configure_logging(verbose: bool) -> None:
    """Log this project's messages; those of other libraries only as warnings, or with --verbose."""
    log_to_stderr(logging.INFO if verbose else logging.WARNING)
    for package in ("dit", "energon_data", "launch"):
        logging.getLogger(package).setLevel(logging.DEBUG if verbose else logging.INFO)


def _report(error: UserError, verbose: bool) -> None:
    message = on_a_screen(message_of(error))
    name_root_cause(f"error: {message}")
    several = environment.world_size() > 1
    # Errors that are equal on all ranks are printed once; other errors may concern one rank.
    if not several or environment.rank() == 0 or exit_code(error) not in SAME_ON_ALL_RANKS:
        echo(f"{f'rank {environment.rank()}: ' if several else ''}error: {message}", file=sys.stderr)
    if verbose:
        echo(traceback.format_exc(), end="", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
