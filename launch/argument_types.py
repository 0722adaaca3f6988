"""Parsers of command lines, and types of their arguments."""

import argparse
import math
import re

from dit.command_line import Parser

UNITS = {"KB": 1000, "MB": 1000**2, "GB": 1000**3}


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


def at_least_one(text: str) -> int:
    """Parse an integer of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, got {text!r}")
    return int(text)


def frame_rate(text: str) -> float:
    """Parse a number of frames per second."""
    try:
        fps = float(text)
    except ValueError:
        fps = 0.0
    if not 0 < fps < math.inf:
        raise argparse.ArgumentTypeError(f"must be a number of frames per second greater than 0, got {text!r}")
    return fps


def file_size(text: str) -> int:
    """Parse a size such as 5GB; return bytes."""
    match = re.fullmatch(r"(\d+)\s*(KB|MB|GB)", text.strip().upper())
    if match is None or int(match[1]) == 0:
        raise argparse.ArgumentTypeError(f"must be a size such as 500MB or 5GB, got {text!r}")
    return int(match[1]) * UNITS[match[2]]


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
