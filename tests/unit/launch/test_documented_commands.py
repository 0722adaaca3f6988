"""Every command that a page names: its recipe plans at the world size it is started with, and no two runs share a port.

Pages are found, not listed: a new page or command is checked without anybody thinking of it.
"""

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from itertools import chain, product
from pathlib import Path
from typing import NamedTuple, Optional

import pytest

from launch.config_file import built
from launch.overrides import apply_overrides
from launch.train import call_recipe, load_component
from tests.integration.runs import environment

ROOT = Path(__file__).parents[3]
PACKAGES = ("benchmarks", "dit", "docs", "energon_data", "launch", "recipes")
FOLDERS = (ROOT.glob("*"), *((ROOT / package).rglob("*") for package in PACKAGES))
PAGES = sorted(
    path.relative_to(ROOT)
    for path in chain(*FOLDERS)
    if path.suffix in (".md", ".sh", ".py") or path.name == "Makefile"
)
# How each kind of page sets the variables of its commands: `NAME ?= a`, `for NAME in a b; do`, `#SBATCH --nodes=4`.
VARIABLES = [
    (re.compile(r"^(\w+) \?= (\S+)", re.MULTILINE), None),
    (re.compile(r"^ *for (\w+) in ([^;\n]+); do", re.MULTILINE), None),
    (re.compile(r"^#SBATCH --nodes=(\d+)", re.MULTILINE), "SLURM_NNODES"),
]
OVERRIDE = re.compile(r"[a-z_.]+[-+*/]?=\S+")
PLACEHOLDER = re.compile(r"[A-Z]+")


class Command(NamedTuple):
    """A recipe as a page starts it."""

    page: Path
    recipe: str
    overrides: tuple[str, ...]
    world_size: Optional[int]


def variables(text: str) -> dict[str, list[str]]:
    """Return the values that each variable of a page takes."""
    found: dict[str, list[str]] = {}
    for pattern, name in VARIABLES:
        for match in pattern.finditer(text):
            key, values = (match[1], match[2]) if name is None else (name, match[1])
            found[key] = shlex.split(values)
    return found


def expanded(line: str, values: dict[str, list[str]]) -> Iterator[str]:
    """Yield a command line for each combination of its variables; those that the page does not set are left."""
    used = [name for name in values if re.search(rf"\$[({{]?{name}\b", line)]
    for choice in product(*(values[name] for name in used)):
        text = line
        for name, value in zip(used, choice):
            text = re.sub(rf"\$[({{]?{name}\b[)}}]?", value, text)
        yield text


def parsed(page: Path, line: str) -> Optional[Command]:
    """Read the recipe, its overrides and the number of ranks from a command line; None for a placeholder."""
    before, _, after = line.partition("--factory ")
    text = after.partition("`")[0].partition("|")[0]
    recipe, *rest = text.split() if page.suffix == ".py" else shlex.split(text)  # Python's lines hold prose, too
    if PLACEHOLDER.fullmatch(recipe):
        return None
    planned = re.search(r"--world-size (\d+)", line)
    ranks, nodes = (re.search(rf'--{flag} "?(\d+)', before) for flag in ("nproc-per-node", "nnodes"))
    started = (int(ranks[1]) if ranks else 1) * (int(nodes[1]) if nodes else 1)
    world_size = int(planned[1]) if planned else None if re.search("--dryrun|launch.verify", line) else started
    return Command(page, recipe, tuple(word for word in rest if OVERRIDE.fullmatch(word)), world_size)


def lines(page: Path) -> Iterator[str]:
    """Yield the logical lines of a page; of Python, those that hold a command rather than a message about one."""
    text = (ROOT / page).read_text()
    for line in text.replace("\\\n", " ").splitlines():
        if page.suffix != ".py" or re.search(r"(launch\.train|benchmarks\.step|megatron-dit) ", line):
            yield from expanded(line, variables(text))


COMMANDS = [
    command for page in PAGES for line in lines(page) if "--factory " in line if (command := parsed(page, line))
]


@pytest.mark.parametrize("command", sorted(set(COMMANDS), key=str), ids=lambda c: f"{c.page}-{c.recipe}-{c.world_size}")
def test_a_documented_command_plans_at_its_world_size(command):
    """The dry run makes every check of training that needs neither this machine nor the data."""
    task = call_recipe(command.recipe)
    apply_overrides(task, list(command.overrides), load_component)
    dims, _ = built(task).check(command.world_size)
    assert command.world_size in (None, dims.world_size)


def test_the_commands_of_all_pages_are_found():
    """The four nodes of launch/README.md by torchrun and by Slurm, make's variables, the sweep's loop."""
    found = {(str(c.page), c.recipe, c.world_size) for c in COMMANDS}
    assert ("README.md", "dit_xl2_imagenet", 8) in found
    assert ("Makefile", "letters_dit", 2) in found
    on_nodes = [c for c in COMMANDS if str(c.page) == "launch/README.md"]
    assert [c.world_size for c in on_nodes] == [8, 32, 32, 32, 8, 8, 8]
    assert {c.overrides for c in on_nodes[-3:]} == {
        ("parallel.data_parallel=fsdp",),
        ("parallel.tensor_model_parallel_size=2",),
        ("parallel.context_parallel_size=2",),
    }
    assert any("training.num_steps=2100" in c.overrides for c in COMMANDS)


def test_two_runs_on_one_machine_take_two_ports():
    """Only `--standalone` lets every torchrun take a free port; several nodes name theirs."""
    sharing = []
    for page in PAGES:
        for line in (ROOT / page).read_text().replace("\\\n", " ").splitlines():
            for command in re.findall(r"torchrun (-.*--nproc-per-node.*)", line):
                if "--standalone" not in command and "--nnodes" not in command:
                    sharing.append(f"{page}: torchrun {command}")
    assert not sharing, "\n".join(sharing)


FENCED = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
MODULES = sorted(
    {
        (page, match[1], line)
        for page in PAGES
        if page.suffix == ".md"
        for _, block in FENCED.findall((ROOT / page).read_text())
        for line in block.replace("\\\n", " ").splitlines()
        if (match := re.match(r"(?:python|\.venv/bin/python) -m (\S+)", line))
    },
    key=str,
)


@pytest.mark.parametrize(("page", "module", "line"), MODULES, ids=lambda value: str(value)[:60])
def test_a_documented_module_takes_the_flags_of_its_page(page, module, line, capsys):
    """`--help` of the command names each of them."""
    found = import_module(f"{module}.__main__" if (ROOT / module.replace(".", "/")).is_dir() else module)
    words = [word for word in shlex.split(line.partition(" #")[0])[3:] if word not in ("...", "[...]")]
    try:
        code = found.main([*[word for word in words[:1] if not word.startswith("-")], "--help"])
    except SystemExit as ended:
        code = ended.code
    assert code == 0
    text = capsys.readouterr().out
    missing = [flag for word in words if word.startswith("--") and (flag := word.partition("=")[0]) not in text]
    assert not missing, f"{page}: {module} does not take {missing}"


def test_the_python_of_the_readme_trains_and_draws(tmp_path):
    """As a reader pastes it; in a process of its own, from an empty folder."""
    [program] = [block for language, block in FENCED.findall((ROOT / "README.md").read_text()) if language == "python"]
    assert len(program.splitlines()) <= 10
    program += "\nprint(tuple(latents.shape))\n"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env=environment(), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.splitlines()[-1] == "(3, 4, 1, 16, 16)"
    assert (tmp_path / "runs" / "first" / "metrics.jsonl").exists()
