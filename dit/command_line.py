"""Argument parsers and suggestions for misspelt words."""

import argparse
import difflib
import re
import sys
from collections.abc import Iterable
from itertools import takewhile
from typing import Any, NoReturn

MESSAGES = (
    (r"^argument ([^:/]+).*: ignored explicit argument (.*)", r"\1 takes no value, got \2; write only \1"),
    (
        r"^argument ([^:/]+).*: expected one argument$",
        r"\1 needs a value; write \1 VALUE, or \1=VALUE if it begins with -",
    ),
    (
        r"^argument ([^:/]+).*: expected (at least one|\d+) argument(s?)$",
        r"\1 needs \2 value\3; --help describes it",
    ),
    (r"^the following arguments are required: (.*)", r"missing \1; --help describes them"),
    (r"^unrecognized arguments: (.*)", r"unknown words \1; --help describes the command"),
)
"""Patterns of argparse's messages, and texts with a cure."""


class Parser(argparse.ArgumentParser):
    """Parser whose error for an unknown option names the nearest options; subcommands have the same class."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Return the parsed arguments and the unknown words; unknown options are an error before missing arguments."""
        words, options = list(sys.argv[1:] if args is None else args), long_options(self)
        is_command = self._subparsers is None  # a parser of subcommands does not know their options
        for word in takewhile(lambda word: word != "--", words if is_command else ()):
            option = word.partition("=")[0]
            if option.startswith("--") and not any(name.startswith(option) for name in options):
                has_settings = any(action.dest == "overrides" for action in self._actions)
                settings = ", and settings are written without dashes, key.path=value" if has_settings else ""
                hint = did_you_mean(option, options) or f"; --help shows all options{settings}"
                self.error(f"unknown option {option}{hint}")
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        """Print an error with its cure, and end the process with code 2."""
        text = with_cure(message)
        for action in self._actions if text.startswith("missing COMMAND") else ():
            if isinstance(action, argparse._SubParsersAction):
                text = f"missing COMMAND; use one of {', '.join(action.choices)}"
        super().error(text)


def with_cure(message: str) -> str:
    """Return an error message of argparse with its cure."""
    for pattern, text in MESSAGES:
        message = re.sub(pattern, text, message)
    return message


def long_options(parser: argparse.ArgumentParser) -> list[str]:
    """Return the options of a parser that begin with two dashes."""
    return [option for action in parser._actions for option in action.option_strings if option.startswith("--")]


def closest(name: str, names: Iterable[str], count: int = 3) -> list[str]:
    """Return the names that look most like `name`, best first; none if nothing is near."""

    def likeness(other: str) -> float:
        a, b = (text.lower().lstrip("-") for text in (name, other))
        ratio = difflib.SequenceMatcher(None, a, b).ratio()
        return max(ratio, 0.8) if len(a) > 2 and a in b else ratio

    ranked = sorted(((likeness(other), other) for other in names), key=lambda pair: -pair[0])
    return [other for score, other in ranked if score >= max(0.6, ranked[0][0] - 0.15)][:count]


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """Return "; did you mean a, b or c?" for the nearest names, or an empty string."""
    near = closest(name, names)
    if not near:
        return ""
    return f"; did you mean {near[0] if len(near) == 1 else ', '.join(near[:-1]) + ' or ' + near[-1]}?"
