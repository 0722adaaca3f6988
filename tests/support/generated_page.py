"""Command line of the generators of pages."""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path


def write_or_print(module: str, page: Callable[[], str], file: Path, argv: Sequence[str] | None) -> int:
    """Print a generated page, or write its file with `--write`."""
    parser = argparse.ArgumentParser(prog=f"python -m {module}", description=f"Print the text of {file.name}.")
    parser.add_argument("--write", action="store_true", help=f"write {file.name} instead of printing it")
    if parser.parse_args(argv).write:
        file.write_text(page(), encoding="utf-8")
    else:
        print(page(), end="")
    return 0
