"""Argument parsers and suggestions for misspelt words."""

import argparse
import difflib
from collections.abc import Iterable
from typing import Any


class Parser(argparse.ArgumentParser):
    """Parser whose error for an unknown option names the nearest options; subcommands have the same class."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Return the parsed arguments and the unknown words, which have no option of two dashes."""
        namespace, words = super().parse_known_args(args, namespace)
        for word in words:
            if word.startswith("--"):
                option = word.partition("=")[0]
                hint = did_you_mean(option, long_options(self)) or "; --help shows all options"
                self.error(f"unknown option {option}{hint}")
        return namespace, words


def long_options(parser: argparse.ArgumentParser) -> list[str]:
    """Return the options of a parser that begin with two dashes."""
    return [option for action in parser._actions for option in action.option_strings if option.startswith("--")]


def closest(name: str, names: Iterable[str], count: int = 3) -> list[str]:
    """Return the names that look most like `name`, best first; none if nothing is near."""

    def likeness(other: str) -> float:
        a, b = name.lower(), other.lower()
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
