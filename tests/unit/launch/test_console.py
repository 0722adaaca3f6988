"""`megatron-dit` starts fast, runs the same code as `python -m`, and is not confused by a user's folder names."""

import ast
import inspect
import os
import re
import subprocess
import sys
import tomllib
from importlib import import_module
from pathlib import Path

import pytest

from dit import __version__, extensions
from dit.errors import EXIT_CONFIG, EXIT_OK, page_of
from launch import check_packages, console

REPOSITORY = Path(__file__).parents[3]
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
SETUPTOOLS = PROJECT["tool"]["setuptools"]


EDITABLE = """
import sys
from importlib.machinery import PathFinder

class Finder:
    def find_spec(name, path=None, target=None):
        return PathFinder.find_spec(name, [{repository!r}]) if path is None else None

sys.path[:] = [entry for entry in sys.path if entry]  # the script's folder comes first, not the current one
sys.meta_path.insert(sys.meta_path.index(PathFinder) + 1, Finder)
from {module} import {function} as main
sys.exit(main())
"""
"""Code of the installed script for an editable install, which finds this project after everything on sys.path."""


def python(*words: str, cwd: Path, path: str = str(REPOSITORY)) -> subprocess.CompletedProcess:
    """Run Python in a folder, with `path` after this folder in the search path."""
    environ = {**os.environ, "PYTHONPATH": path}
    return subprocess.run([sys.executable, *words], cwd=cwd, env=environ, capture_output=True, text=True, timeout=60)


def console_script(*words: str, cwd: Path) -> subprocess.CompletedProcess:
    """Run the installed command in a folder."""
    module, _, function = PROJECT["project"]["scripts"]["megatron-dit"].partition(":")
    program = EDITABLE.format(repository=str(REPOSITORY), module=module, function=function)
    return python("-c", program, *words, cwd=cwd, path="")


def test_every_command_is_one_that_python_m_starts():
    for command, _ in console.COMMANDS.values():
        module = import_module(command.split()[0])
        assert callable(module.main), command
        assert inspect.getsource(module).endswith('if __name__ == "__main__":\n    sys.exit(main())\n'), command
    assert " ".join(sorted(console.COMMANDS)) == (
        "average bench dryrun evaluate export import inspect kernels plan prepare sample status train verify"
    )
    packages = {*console.PACKAGES, *extensions.own_packages()}
    assert [f"{name}*" for name in sorted(packages)] == sorted(SETUPTOOLS["packages"]["find"]["include"])


def test_help_lists_the_commands_and_imports_nothing_heavy(tmp_path: Path):
    program = (
        "import sys; from launch.console import main; code = main(['--help']); "
        "print(sorted({'torch', 'numpy', 'megatron', 'nemo_run'} & set(sys.modules)), code)"
    )
    out = python("-c", program, cwd=tmp_path).stdout
    assert out.endswith("\n[] 0\n")
    assert [line.split()[0] for line in out.splitlines() if line[:2] == "  " != line[2:4]] == list(console.COMMANDS)


@pytest.mark.parametrize(
    ("words", "code", "expected"),
    [
        (["trian"], EXIT_CONFIG, "'trian' is not a command; did you mean train?"),
        (["xyz"], EXIT_CONFIG, "use one of train, dryrun, plan, verify, "),
        ([], EXIT_CONFIG, "no command given"),
        (["--version"], EXIT_OK, f"megatron-dit {__version__}"),
        (["dryrun", "--factory", "tiny_dti"], EXIT_CONFIG, "did you mean tiny_dit, "),
        (["train", "--factory", "tiny_dit", "--dryrnu"], EXIT_CONFIG, "did you mean --dryrun "),
    ],
)
def test_a_user_error_has_one_line_and_an_exit_code(
    capsys: pytest.CaptureFixture, words: list[str], code: int, expected: str
):
    assert console.main(words) == code
    out, err = capsys.readouterr()
    [line] = (out + err).splitlines()
    assert expected in line


def test_dryrun_is_training_without_a_step(monkeypatch: pytest.MonkeyPatch):
    found = []
    monkeypatch.setattr("launch.train.main", lambda argv: found.append(argv) or 7)
    assert console.main(["dryrun", "--factory", "tiny_dit"]) == console.main(["train", "-l"]) == 7
    assert found == [["--dryrun", "--factory", "tiny_dit"], ["-l"]]


def test_folders_with_the_names_of_packages_do_not_hide_them_from_the_command(tmp_path: Path):
    for name in ("recipes", "benchmarks", "energon_data", "examples"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise RuntimeError('the user's own')\n")
    ended = console_script("train", "--list", cwd=tmp_path)
    assert (ended.returncode, ended.stderr) == (EXIT_OK, "")
    assert "letters_dit" in ended.stdout


def test_python_m_names_the_folder_that_hides_a_package(tmp_path: Path):
    """One line names the folder and the fix."""
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "__init__.py").touch()
    ended = python("-m", "launch.train", "--list", cwd=tmp_path)
    assert ended.returncode != EXIT_OK
    [line] = ended.stderr.splitlines()
    assert f"{tmp_path}/recipes hides the package 'recipes' of megatron-dit in {REPOSITORY}" in line
    assert "start `megatron-dit COMMAND`" in line


def test_python_m_works_without_the_examples_if_a_folder_hides_them(tmp_path: Path):
    """Many projects have a folder named `examples`, and few need the examples of this project."""
    (tmp_path / "examples").mkdir()
    (tmp_path / "examples" / "__init__.py").touch()
    ended = python("-m", "energon_data.prepare", "--help", cwd=tmp_path)
    assert ended.returncode == EXIT_OK
    assert "images" in ended.stdout
    # An editable installation still finds submodules of our package.
    left_out = "letters of preparations is left out, because it cannot be imported: No module named 'examples"
    assert ("letters" in ended.stdout) != (left_out in ended.stderr)


@pytest.mark.parametrize("file", ["not_ours/__init__.py", "not_ours/data.txt", "not_ours.py"])
def test_a_package_in_another_location_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, file: str):
    """The file is in a package or in a folder without `__init__.py`, or is a module."""
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).touch()
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ImportError, match=rf"{tmp_path}/not_ours(\.py)? hides the package 'not_ours'"):
        check_packages(("dit", "not_ours"))
    check_packages()


def test_an_own_recipe_in_the_current_folder_is_found(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture
):
    """As with `python -m`, the current folder is searched, but after all packages."""
    (tmp_path / "mine.py").write_text("def small():\n    return 5\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert console.main(["train", "--factory", "mine.small", "--dryrun"]) == EXIT_CONFIG
    assert sys.path[-1] == str(tmp_path)
    assert "mine.small returns a int" in capsys.readouterr().err


def test_messages_name_pages_that_an_installed_copy_holds(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Messages take a page's path from `page_of` instead of spelling it; pages are installed as package data."""
    assert "README.md" in SETUPTOOLS["package-data"]["*"]
    spelt, named = [], set()
    for path in (file for package in console.PACKAGES for file in (REPOSITORY / package).rglob("*.py")):
        if not re.search(r"README\.md|page_of", text := path.read_text()):
            continue
        tree = ast.parse(text)
        documentation = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "page_of":
                named.add(ast.literal_eval(node.args[0]))
            value = node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""
            if "/README.md" in value and id(node) not in documentation:
                spelt.append(f"{path}:{node.lineno}: {value}")
    assert spelt == []
    assert named == {"launch", "energon_data"}
    for package in named:
        monkeypatch.chdir(tmp_path)
        assert Path(page_of(package)).is_file()
        monkeypatch.chdir(REPOSITORY)
        assert page_of(package) == f"{package}/README.md"


@pytest.mark.parametrize(
    ("words", "near"),
    [
        (
            "prepare images --in x --out y --caption-prefx z",
            "unknown option --caption-prefx; did you mean --caption-prefix",
        ),
        ("sample --checkpoint x --promt=y", "unknown option --promt; did you mean --prompt"),
        ("plan --factory tiny_dit --gpsu 2", "unknown option --gpsu; did you mean --gpus"),
        (
            "plan --factory tiny_dit --training.seed=2",
            "unknown option --training.seed; --help shows all options, and settings",
        ),
        ("status x --qqq", "unknown option --qqq; --help shows all options"),
        ("status", "missing RUN_DIR; --help describes"),
        ("prepare", "missing COMMAND; use one of images, "),
        ("prepare images --in", "--in needs a value; write --in VALUE"),
        ("sample --checkpoint x --out y --reference", "--reference needs at least one value; --help describes"),
        ("evaluate --checkpoint x --metric loss --json=1", "--json takes no value, got '1'; write only --json"),
    ],
)
def test_errors_of_options_have_a_cure(words, near, capsys):
    with pytest.raises(SystemExit) as ended:
        console.main(words.split())
    assert ended.value.code == EXIT_CONFIG
    assert f"error: {near}" in capsys.readouterr().err


@pytest.mark.parametrize("words", ["plan --gpus 2", "verify", "bench"])
def test_overrides_may_precede_and_follow_options(words, capsys):
    assert console.main([*words.split(), "model.x=1", "--factory", "tiny_dti", "model.y=2"]) == EXIT_CONFIG
    assert "did you mean tiny_dit" in capsys.readouterr().err
