"""The command line of `launch.train`: flags, overrides and help. It imports nothing heavy, to report mistakes at once.

nemo-run (0.11) ignores unknown flags and exits with code 0 after every failure. The flags are therefore parsed here;
only the factory and the overrides are passed to it.
"""

import argparse
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NoReturn, Optional

from dit.command_line import did_you_mean, long_options, with_cure
from dit.errors import ConfigError
from dit.planner.devices import DEVICES
from dit.ranges import COUNT, RANKS
from launch.argument_types import at_least_one, number_in
from recipes import registry

USAGE = """\
python -m launch.train --factory RECIPE [flags] [key.path=value ...]
       torchrun --standalone --nproc-per-node N -m launch.train --yes --factory RECIPE [flags] [key.path=value ...]\
"""
DESCRIPTION = """\
Train a diffusion backbone.

first steps
  python -m launch.train --list                                  what can be trained
  python -m launch.train --factory tiny_dit --yes                a run of seconds on synthetic data, any machine
  python -m launch.train --factory letters_dit --dryrun          look at a recipe: settings, parameters, memory
  torchrun --standalone --nproc-per-node 2 -m launch.train --yes --factory letters_dit
  python -m launch.sample --checkpoint runs/letters_dit          sample from the trained model

change any setting
  training.num_steps=500 optimizer.lr=3e-4                       dotted path = value
  objective=edm objective.p_mean=-0.4                            swap a part by name, then set its fields
  "objective=ddpm(prediction='v')"                               the same in one argument (quote it for the shell)
  parallel.tensor_model_parallel_size=2                          split over ranks; see parallel.* with --print-config
"""
EXIT_CODES = """\
exit codes
  0 target reached    2 usage or configuration    3 data    4 not finite    5 checkpoint    6 saving failed
  17 results of a step do not repeat    70 unexpected    75 preempted, checkpoint written (requeue)    130 Ctrl-C
  torchrun turns each non-zero code of a rank into 1; RUN_DIR/exit.json has the original one.
"""


@dataclass(kw_only=True)
class Options:
    """A parsed command line; a field other than `overrides` is a flag of its name (`list_recipes` is `--list`)."""

    factory: Optional[str] = None
    yaml: Optional[str] = None
    yes: bool = False
    dryrun: bool = False
    world_size: Optional[int] = None
    tokens: Optional[tuple[int, ...]] = None
    text_tokens: Optional[int] = None
    device: Optional[str] = None
    print_config: bool = False
    to_yaml: Optional[str] = None
    list_recipes: bool = False
    describe: Optional[str] = None
    verbose: bool = False
    help: bool = False
    overrides: list[str] = field(default_factory=list)

    @property
    def source(self) -> Optional[str]:
        """The recipe or the file that selects the run."""
        return self.factory or self.yaml

    @property
    def starts_training(self) -> bool:
        return not (self.help or self.list_recipes or self.describe or self.dryrun or self.print_config or self.to_yaml)


def parse(argv: Sequence[str], keys_of: Callable[[Options], Sequence[str]] = lambda options: ()) -> Options:
    """Read the flags and collect the overrides.

    Args:
        keys_of: returns the settings of the selected run, for the error of an unknown flag.
    """
    options, words = PARSER.parse_known_args(argv, Options())
    for word, following in zip(words, [*words[1:], "-"]):
        if word.startswith("-"):
            flag, has_value, value = word.partition("=")
            if not has_value:
                value = "VALUE" if following.startswith("-") or "=" in following else following
            name = flag.lstrip("-").replace("-", "_")
            settings = [f"{key}={value}" for key in keys_of(options) if name in (key, key.rpartition(".")[2])]
            if settings:
                raise ConfigError(f"unknown flag {flag}; settings are written without dashes: {' or '.join(settings)}")
            cure = "; --help shows all flags, and settings are written without dashes, key.path=value"
            raise ConfigError(f"unknown flag {flag}{did_you_mean(flag, FLAGS) or cure}")
        if "=" not in word:
            raise ConfigError(_stray_word_message(word))
    options.overrides = words
    return options


def check_factory(name: str) -> None:
    """Check a plain recipe name against the registry, before anything heavy is imported."""
    base = name.partition("(")[0]
    names = [entry.name for entry in registry.recipes()]
    if "." not in base and base not in names:
        hint = did_you_mean(base, names) or "."
        raise ConfigError(f"--factory {base}: no such recipe{hint} --list shows all {len(names)}")


def tokens(value: str) -> tuple[int, ...]:
    """Parse `4096`, or `24x32x32` patches."""
    tokens = tuple(int(n) if n.isdecimal() and len(n) <= 20 else 0 for n in value.lower().split("x"))
    if len(tokens) not in (1, 3) or math.prod(tokens) not in COUNT:
        raise argparse.ArgumentTypeError(
            f"must be {COUNT}, or three numbers with such a product as TxHxW patches, got {value!r}; "
            "write --tokens 4096 or --tokens 24x32x32"
        )
    return tokens


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        text = with_cure(message)
        raise ConfigError(text if "--help" in text else f"{text}; --help shows all flags")


def _parser() -> argparse.ArgumentParser:
    """Return the parser of the flags; the words that it does not know are overrides."""
    parser = _Parser(
        usage=USAGE,
        description=DESCRIPTION,
        epilog=EXIT_CODES,
        add_help=False,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
        formatter_class=partial(argparse.RawDescriptionHelpFormatter, max_help_position=29, width=120),
    )
    flag = parser.add_argument_group("flags").add_argument
    switch = partial(flag, action="store_true")
    flag("--factory", "-f", metavar="RECIPE", help="a name of --list, or package.module.function of your own")
    flag("--yaml", metavar="FILE|RUN_DIR", help="a saved configuration, or that of a run folder, instead of a recipe")
    switch("--yes", help="do not ask before starting (required under torchrun and in scripts)")
    switch("--dryrun", "--dry-run", help="settings, parameters, memory per rank and FLOPs; needs no GPU and no data")
    plan = parser.add_argument_group("with --dryrun").add_argument
    plan(
        "--world-size", metavar="N", type=number_in(RANKS), help="ranks (default: as launched, or the fewest that fit)"
    )
    plan(
        "--tokens",
        metavar="N|TxHxW",
        type=tokens,
        help="tokens of a sample, or its patches: frames x height x width (default: those of the data, else 256)",
    )
    plan(
        "--text-tokens",
        metavar="N",
        type=at_least_one,
        help="tokens of its text (default: those of the data, else 512)",
    )
    plan(
        "--device",
        metavar="NAME",
        choices=DEVICES,
        help=f"plan the time of a step, too (docs/planner.md), on one of {', '.join(DEVICES)}",
    )
    switch("--print-config", help="print the complete configuration as YAML")
    flag("--to-yaml", metavar="FILE", help="write the configuration to FILE, which --yaml reads")
    switch("--list", "-l", dest="list_recipes", help="list the recipes")
    flag("--describe", metavar="NAME", help="print the full description of a recipe or component")
    switch("--verbose", "-v", help="debug messages, and tracebacks of usage errors")
    switch("--help", "-h", help="this page")
    return parser


PARSER = _parser()
HELP = PARSER.format_help()
FLAGS = long_options(PARSER)


def _stray_word_message(word: str) -> str:
    names = [entry.name for entry in registry.recipes()]
    if word in names:
        return f"{word!r} stands alone; recipes are selected by --factory {word}"
    return f"{word!r} is neither a flag nor an override; overrides are key.path=value, recipes --factory NAME"
