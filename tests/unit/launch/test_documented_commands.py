"""Commands of the pages: each recipe plans at the world size of its command, and no two runs share a port.

Some test checks every line of a fenced block and runs every Python block. Pages are found by a search, so a new page
or command is checked automatically.
"""

import io
import os
import re
import shlex
import subprocess
import tomllib
from collections.abc import Iterator
from importlib import import_module
from itertools import pairwise, product
from pathlib import Path
from typing import NamedTuple, Optional

import pytest
from torch.distributed.run import get_args_parser

from launch import cli
from launch.config_file import built
from launch.overrides import apply_overrides
from launch.train import call_recipe
from tests.support import slurm
from tests.unit.launch.pages import FILES, MARKDOWN, ROOT, blocks, follow, shown_commands, without_assignments

PAGES = [
    path
    for path in FILES
    if path.parts[0] != "tests" and (path.suffix in (".md", ".sh", ".py") or path.name in ("Makefile", "run"))
]
# How each kind of page sets the variables of its commands: `NAME ?= a`, `for NAME in a b; do`.
VARIABLES = (
    re.compile(r"^(\w+) \?= (\S+)", re.MULTILINE),
    re.compile(r"^ *for (\w+) in ([^;\n]+); do", re.MULTILINE),
)
OVERRIDE = re.compile(r"[a-z_.]+[-+*/]?=(\S+|\[.+\])")
GRIDS = r"(launch\.experiment|benchmarks\.sweep) "
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
    for pattern in VARIABLES:
        for match in pattern.finditer(text):
            found[match[1]] = shlex.split(match[2])
    return found


def expanded(line: str, values: dict[str, list[str]]) -> Iterator[str]:
    """Yield a command line for each combination of its variables; variables that the page does not set remain."""
    used = [name for name in values if re.search(rf"\$[({{]?{name}\b", line)]
    for choice in product(*(values[name] for name in used)):
        text = line
        for name, value in zip(used, choice):
            text = re.sub(rf"\$[({{]?{name}\b[)}}]?", value, text)
        yield text


def parsed(page: Path, line: str) -> Optional[Command]:
    """Read the recipe, its overrides and the number of ranks from a command line; None for a reader's recipe."""
    before, _, after = line.partition("--factory ")
    text = after.partition("`")[0].partition("|")[0]
    recipe, *rest = text.split() if page.suffix == ".py" else shlex.split(text)  # lines of Python contain prose, too
    if PLACEHOLDER.fullmatch(recipe) or "." in recipe:  # the reader's own: tests/unit/launch/test_extending_pages.py
        return None
    # Arguments name folders of the reader, which contain the objective: tests/integration/test_fine_tuning_page.py.
    recipe, has_base, _ = recipe.partition("(")
    rest = [word for word in rest if not (has_base and word.startswith("objective."))]
    planned = re.search(r"--world-size (\d+)", line)
    one_process = re.search("--dryrun|launch.verify|launch.plan", line)
    world_size = int(planned[1]) if planned else None if one_process else started(before)
    return Command(page, recipe, tuple(word for word in rest if OVERRIDE.fullmatch(word)), world_size)


def started(line: str) -> int:
    """Return how many ranks a line starts: by torchrun, or by sbatch with the script's own flags."""
    sbatch = slurm.directives() if "sbatch " in line else {}
    ranks, nodes = re.search(r"--nproc-per-node (\d+)", line), re.search(r"--(?:nnodes |nodes=)(\d+)", line)
    of_node = int(ranks[1]) if ranks else int(sbatch.get("gpus-per-node", 1))
    return of_node * (int(nodes[1]) if nodes else int(sbatch.get("nodes", 1)))


def lines(page: Path) -> Iterator[str]:
    """Yield the logical lines of a page that name a recipe; of a Python file, only those with a command."""
    text = (ROOT / page).read_text()
    values = variables(text)
    for line in text.replace("\\\n", " ").splitlines():
        # A line of GRIDS starts many recipes: test_a_documented_grid_dry_runs.
        if "--factory " not in line or re.search(GRIDS, line):
            continue
        if page.suffix != ".py" or re.search(r"(launch\.train|benchmarks\.step|megatron-dit) ", line):
            yield from expanded(line, values)


COMMANDS = [command for page in PAGES for line in lines(page) if (command := parsed(page, line))]


@pytest.mark.parametrize("command", sorted(set(COMMANDS), key=str), ids=lambda c: f"{c.page}-{c.recipe}-{c.world_size}")
def test_a_documented_command_plans_at_its_world_size(command):
    """The dry run makes every check of training that needs neither this machine nor the data."""
    task = call_recipe(command.recipe)
    apply_overrides(task, list(command.overrides))
    dims, _ = built(task).check(command.world_size)
    assert command.world_size in (None, dims.world_size)


def test_the_parser_reads_the_commands_of_all_pages():
    """They include four nodes in launch/README.md, by torchrun and by Slurm, and variables of make."""
    found = {(str(c.page), c.recipe, c.world_size) for c in COMMANDS}
    assert ("README.md", "dit_xl2_imagenet", 8) in found
    assert ("Makefile", "letters_dit", 2) in found
    on_nodes = [c for c in COMMANDS if str(c.page) == "launch/README.md"]
    assert [c.world_size for c in on_nodes] == [32, 32]
    assert any("training.num_steps=600" in c.overrides for c in COMMANDS)


def test_two_runs_on_one_machine_use_two_ports():
    """torchrun picks a free port only with `--standalone`; commands for several nodes set a port."""
    sharing = []
    for page in PAGES:
        for line in (ROOT / page).read_text().replace("\\\n", " ").splitlines():
            for command in re.findall(r"torchrun (.*--nproc-per-node.*)", line):
                if "--standalone" not in command and "--nnodes" not in command:
                    sharing.append(f"{page}: torchrun {command}")
    assert not sharing, "\n".join(sharing)


def test_torchrun_and_the_launcher_accept_their_flags():
    """Recipes and settings are checked by test_a_documented_command_plans_at_its_world_size."""
    lines = [
        line for page in MARKDOWN for block in blocks(page) for line in block.text.replace("\\\n", " ").splitlines()
    ]
    commands = [line[line.index("torchrun") :] for line in lines if re.search(r"torchrun .*-m launch\.train", line)]
    assert commands
    for command in (one for one in commands if "..." not in one):
        options = get_args_parser().parse_args(shlex.split(command, comments=True)[1:])
        assert (options.module, options.training_script) == (True, "launch.train")
        cli.parse(options.training_script_args)


def module_lines(page: Path) -> Iterator[tuple[str, str]]:
    """Yield the module and the text of each `python -m MODULE ...` in the blocks and sentences of a page.

    torchrun commands that start no recipe are included.
    """
    text = (ROOT / page).read_text()
    in_text = (" ".join(words.split()) for words in re.findall(r"`(python -m [^`]+)`", text))
    for line in (*(line for block in blocks(page) for line in block.text.replace("\\\n", " ").splitlines()), *in_text):
        if "--factory" not in line:
            line = re.sub(r"torchrun -.*? -m ", "python -m ", line)
        if match := re.match(r"(?:[A-Z_]+=\S+ )*(?:\.venv/bin/)?(python -m (?!pytest)(\S+).*)", line):
            yield match[2], match[1]


MODULES = sorted({(page, *found) for page in MARKDOWN for found in module_lines(page)}, key=str)


@pytest.mark.parametrize(("page", "module", "line"), MODULES, ids=lambda value: str(value)[:60])
def test_a_documented_module_takes_the_flags_of_its_page(page, module, line, capsys):
    """`--help` of the command lists each flag."""
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


def pytest_lines() -> Iterator[tuple[Path, str, list[str]]]:
    """Yield the page, the test file and the options of each `pytest FILE ...` in the pages."""
    for page in MARKDOWN:
        for found in re.findall(r"`(?:python -m )?pytest ([^`]+)`", (ROOT / page).read_text()):
            words = shlex.split(found)
            yield from ((page, word, words) for word in words if re.fullmatch(r"tests/\S+\.py", word))


@pytest.mark.parametrize(("page", "file", "words"), pytest_lines(), ids=lambda value: str(value)[:60])
def test_a_documented_pytest_command_selects_tests(page, file, words):
    """By default, pytest selects no test of a file that is marked as slow or long as a whole."""
    text = (ROOT / file).read_text()
    options = dict(pairwise(words))
    if mark := options.get("-m"):
        assert f"pytest.mark.{mark}" in text
    else:
        assert not re.search(r"^pytestmark = pytest\.mark\.(slow|long)", text, re.MULTILINE)
    assert re.search(rf"^def test_.*{options.get('-k', '')}", text, re.MULTILINE)


GRID_LINES = sorted(
    line
    for page, module, line in MODULES
    if re.search(GRIDS, f"{module} ")
    and re.search("--factory (?!NAME)", line)
    and page != Path("benchmarks/results/README.md")  # it measured a refused layout, too
)


@pytest.mark.parametrize("line", GRID_LINES)
def test_a_documented_grid_dry_runs(line, tmp_path, monkeypatch, capsys):
    """The output has a command for every cell, and each cell plans on the number of ranks that its command starts."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.stdin", io.StringIO())
    _, _, module, *words = shlex.split(line)
    monkeypatch.setattr("nemo_run.config._NEMORUN_HOME", str(tmp_path / "nemo_run"))
    assert import_module(module).main([*words, *(["--dryrun"] if "--dryrun" not in words else [])]) == 0
    out = capsys.readouterr().out
    started = re.findall(r"--nproc-per-node (\d+) .*?-m (?:launch\.train|benchmarks\.step) (.*--factory .*)", out)
    assert started
    for ranks, cell in started:
        nodes = re.search(r"--nnodes (\d+)", out)
        _, recipe, *rest = re.split(r"--factory (\S+) ", cell)
        task = call_recipe(recipe)
        given = [word for word in shlex.split(rest[0]) if OVERRIDE.fullmatch(word)]
        apply_overrides(task, given)
        built(task).check(int(ranks) * (int(nodes[1]) if nodes else 1))


def target_of(words: list[str]) -> list[str]:
    """Return the targets of a `make` command, without variables (`NAME=VALUE`)."""
    return [word for word in words[1:] if "=" not in word]


def extras_of(words: list[str]) -> list[str]:
    """Return the optional dependencies of this project that a `pip` command installs."""
    return [extra for word in words for found in re.findall(r"^\.\[(.+)\]$", word) for extra in found.split(",")]


def checked_by(page: Path, line: str) -> str:
    """Return the name of the test that checks a line of a fenced block, or an empty string if none does."""
    _, words = without_assignments(line)
    start = " ".join(words[:2])
    if start == "python -m":
        return "test_a_documented_module_takes_the_flags_of_its_page"
    if words[0] in ("torchrun", "sbatch") and "--factory" in words:
        return "test_a_documented_command_plans_at_its_world_size"
    if words[0] == "torchrun" and "-m" in words:
        return "test_a_documented_module_takes_the_flags_of_its_page"
    if words[0] == "make" or start in ("pip install", "python3 -m", ". .venv/bin/activate"):
        return "test_targets_and_extras_exist"
    if start.startswith("energon prepare"):
        return "test_an_existing_webdataset_is_prepared_and_each_refusal_names_its_cure"
    if words[0] == "python" and (ROOT / page).read_text().find(f"# {words[1]}\n") > 0:
        return "test_a_command_of_the_page_has_the_described_result"
    return ""


def test_every_line_of_a_block_is_checked():
    """A block without a language contains commands; all other blocks name their language."""
    lines = [(page, line) for page in MARKDOWN for line in shown_commands(page)]
    assert len(lines) > 30
    assert [
        f"{page}: {line}" for page, line in lines for part in line.split(" && ") if not checked_by(page, part)
    ] == []
    hidden = [
        f"{page}: {line}"
        for page in MARKDOWN
        for line in (ROOT / page).read_text().splitlines()
        if re.match(r"    +(python -m|torchrun|make|pip|megatron-dit) ", line)
    ]
    assert hidden == [], "an indented command is checked by nothing; fence it"


def test_every_script_parses():
    """Scripts in pages, and `.sh` files."""
    scripts = [block.text for page in MARKDOWN for block in blocks(page) if block.language == "bash"]
    scripts += [(ROOT / path).read_text() for path in FILES if path.suffix == ".sh"]
    assert len(scripts) > 2
    for script in scripts:
        subprocess.run(["bash", "-n"], input=script, text=True, check=True)


def test_targets_and_extras_exist():
    """Targets of `make` and extras of `pip` in the pages, the Dockerfile, the workflow and its script."""
    rules = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = 0
    for page in (*MARKDOWN, Path(".ci/run"), Path(".github/workflows/ci.yml"), Path("Dockerfile")):
        text = (ROOT / page).read_text().replace("\\\n", " ")
        for line in re.findall(
            r"(?:^|`|&& |RUN )((?:make|(?:\S*python -m )?pip install) [^`\n&]+)", text, re.MULTILINE
        ):
            words = shlex.split(line, comments=True)
            wrong = [x for x in target_of(words) if x not in rules] if words[0] == "make" else []
            wrong += [x for x in extras_of(words) if x not in project["optional-dependencies"]]
            assert wrong == [], f"{page}: {line}"
            named += 1
    assert named > 12
    for command in re.findall(r"^ +- run: (\S+)$", (ROOT / ".github/workflows/ci.yml").read_text(), re.MULTILINE):
        assert os.access(ROOT / command, os.X_OK), command


def test_clean_removes_the_output_of_all_demos_and_no_other_data_or_runs():
    def words(*arguments: str) -> list[str]:
        printed = subprocess.run(
            ["make", "-n", *arguments], cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout
        return shlex.split(printed.replace("\\\n", " "))

    demos = re.findall(r"^(demo[a-z-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    demo_words = words("-B", *demos)
    written = {after for word, after in pairwise(demo_words) if word == "--out"}
    written |= {run_dir for word in demo_words if (run_dir := word.removeprefix("training.run_dir=")) != word}
    removed = set(words("clean"))
    assert len(written) > 40
    assert written <= removed
    assert {name for name in removed if name.startswith(("data", "runs"))} <= written


RUNS_THE_PYTHON = {
    "README.md": "test_documented_commands.py",
    "energon_data/README.md": "test_data_page.py",
    "docs/adding-a-backbone.md": "test_extending_pages.py",
    "docs/runs.md": "test_loop_options.py",
    "docs/adding-an-objective.md": "test_extending_pages.py",
    "docs/adding-a-condition.md": "test_extending_pages.py",
    "docs/adding-a-data-source.md": "test_extending_pages.py",
}
"""The test file that runs the Python blocks of each page."""


def test_every_python_block_is_run():
    with_python = {str(page) for page in MARKDOWN if any(block.language == "python" for block in blocks(page))}
    assert with_python == set(RUNS_THE_PYTHON)
    languages = {block.language for page in MARKDOWN for block in blocks(page)}
    assert languages <= {"", "python", "bash", "yaml", "text"}


def test_the_python_of_the_readme_trains_and_draws(tmp_path):
    """The example runs as a reader would paste it: in another process, from an empty folder."""
    [program] = [block.text for block in blocks(Path("README.md")) if block.language == "python"]
    assert len(program.splitlines()) <= 10
    (tmp_path / "first.py").write_text(f"{program}\nassert tuple(latents.shape) == (3, 4, 1, 16, 16)\n")
    follow({"python first.py": ""}, tmp_path)
    assert (tmp_path / "runs" / "first" / "metrics.jsonl").exists()
