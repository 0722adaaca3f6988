"""Parsers of command lines, and types of their arguments."""

import argparse
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dit.command_line import Parser
from dit.errors import ConfigError
from dit.ranges import COUNT, Range
from dit.safe_files import read_array


def command_parser(module: str, description: str, epilog: str = "") -> argparse.ArgumentParser:
    """Return the parser of `python -m MODULE`, whose help keeps the line breaks of its texts."""
    return Parser(
        prog=f"python -m {module}",
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def height_and_width(text: str) -> tuple[int, int]:
    """Parse an argument such as 512x768; a single number stands for both."""
    sides = text.lower().split("x")
    if len(sides) > 2 or not all(side.isdecimal() and int(side) for side in sides):
        raise argparse.ArgumentTypeError(f"must be a height and a width such as 512x768, got {text!r}")
    return int(sides[0]), int(sides[-1])


def top_and_left(text: str) -> tuple[int, int]:
    """Parse an argument such as 0,128."""
    sides = text.split(",")
    if len(sides) != 2 or not all(side.isdecimal() for side in sides):
        raise argparse.ArgumentTypeError(f"must be the top and the left of a corner such as 0,128, got {text!r}")
    return int(sides[0]), int(sides[1])


def number_in(allowed: Range) -> Callable[[str], Any]:
    """Return a parser of numbers in a range, as integers if the range has only these."""

    def parse(text: str) -> float:
        try:
            value = int(text) if allowed.whole else float(text)
        except ValueError:
            value = math.nan
        if value not in allowed:
            raise argparse.ArgumentTypeError(f"must be {allowed}, got {text!r}")
        return value

    return parse


at_least_one = number_in(COUNT)


def read_numbers(path: str | Path, option: str) -> Any:
    """Return the NumPy array of a `.npy` file that an option names."""
    try:
        return read_array(Path(path))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{option} {path} cannot be read: {error}; save it with numpy.save") from error


def split_arguments(text: str, separators: str = ",") -> list[str]:
    """Split `a=1, b=[2, 3], c='x, y'` at the separators outside brackets and quotes."""
    parts, depth, quote, start = [], 0, "", 0
    for i, char in enumerate(text):
        if quote:
            quote = "" if char == quote else quote
        elif char in "'\"":
            quote = char
        elif char in "([{":
            depth += 1
        elif char in ")]}":
            depth -= 1
        elif char in separators and depth == 0:
            parts.append(text[start:i])
            start = i + 1
    return [part.strip() for part in [*parts, text[start:]] if part.strip()]
