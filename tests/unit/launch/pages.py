"""The repository's pages as data: fenced blocks, files and commands in them, and a function that runs a command."""

import contextlib
import os
import re
import runpy
import shlex
from importlib import import_module
from itertools import chain
from pathlib import Path
from typing import NamedTuple
from unittest import mock

from tests.integration.actions import Ended, command
from tests.support.ranks import Job, run_jobs

ROOT = Path(__file__).parents[3]
PACKAGES = ("benchmarks", "dit", "docs", "energon_data", "examples", "launch", "recipes", "tests", ".github", ".ci")
FOLDERS = (ROOT.glob("*"), *((ROOT / package).rglob("*") for package in PACKAGES))
FILES = sorted(path.relative_to(ROOT) for path in chain(*FOLDERS) if path.is_file())
MARKDOWN = [path for path in FILES if path.suffix == ".md"]
FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NAMED = re.compile(r"# (\w+\.py)\n")


class Block(NamedTuple):
    """A fenced block of a page."""

    page: Path
    language: str
    text: str


def blocks(page: Path) -> list[Block]:
    """Return the fenced blocks of a page, in order."""
    return [Block(page, *found) for found in FENCED.findall((ROOT / page).read_text())]


def shown_files(page: Path) -> dict[str, str]:
    """Return the Python files that a page shows: blocks whose first line is `# NAME.py`."""
    return {match[1]: block.text for block in blocks(page) if (match := NAMED.match(block.text))}


def shown_commands(page: Path) -> list[str]:
    """Return the lines of a page's blocks without a language, continued ones joined."""
    joined = "".join(block.text for block in blocks(page) if not block.language).replace("\\\n", " ")
    return [line for line in joined.splitlines() if line.strip() and not line.startswith("#")]


def without_assignments(line: str) -> tuple[dict[str, str], list[str]]:
    """Return the variables that a command line sets for its command, and the words of the command without comments."""
    words = shlex.split(line, comments=True)
    count = next((i for i, word in enumerate(words) if not re.match(r"[A-Z_]+=", word)), len(words))
    return dict(word.split("=", 1) for word in words[:count]), words[count:]


def run_line(line: str, folder: Path) -> Ended:
    """Run `python FILE` or `python -m MODULE ...` of a page in a folder, in this process."""
    variables, (python, first, *words) = without_assignments(line)
    assert python == "python"
    with contextlib.chdir(folder), mock.patch.dict(os.environ, variables):
        if first != "-m":
            runpy.run_path(first, run_name="__main__")
            return Ended(0, "", "")
        name = f"{words[0]}.__main__" if hasattr(import_module(words[0]), "__path__") else words[0]
        return command(import_module(name).main, words[1:])


def follow(lines: dict[str, str], folder: Path) -> dict[str, Ended]:
    """Run commands in order in a folder, in one process, and require that all succeed.

    Args:
        lines: commands of a page, and the words that are added to each; later words override earlier ones.
    """
    jobs = {line: Job(run_line, {"line": f"{line} {more}", "folder": folder}) for line, more in lines.items()}
    ended = run_jobs(folder / "world", jobs)
    assert {line: end.err for line, end in ended.items() if end.code} == {}
    return ended


def shortened(page: str, words: dict[str, str]) -> dict[str, str]:
    """Return the commands of a page with the words that are added for the module of each."""
    return {line: words.get(shlex.split(line)[2], "") for line in shown_commands(Path(page))}
