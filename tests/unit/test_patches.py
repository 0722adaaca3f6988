"""Patches of other libraries: their versions are checked, all are declared, and docs/patches.md lists them."""

import ast
import itertools
import tomllib

import pytest
from packaging.requirements import Requirement

from dit import patches
from dit.errors import ConfigError
from tests.support import patches_page


@pytest.mark.parametrize(
    ("installed", "accepted"), [("0.15.3", False), ("0.16.0rc1", True), ("0.17.9+local", True), ("0.18.0", False)]
)
def test_a_patch_refuses_versions_that_it_was_not_written_for(monkeypatch, installed, accepted):
    """The call raises an error, not the import; it has both versions and the command that installs a supported one."""
    monkeypatch.setattr(patches, "installed_version", lambda package: {"megatron-core": installed}[package])
    monkeypatch.setattr(patches, "check_version", patches.check_version.__wrapped__)

    @patches.patches("megatron-core 0.16-0.17", "core/some.py: name", why="a reason")
    def double(x: int) -> int:
        return 2 * x

    if accepted:
        assert double(3) == 6
        return
    cure = r"core/some\.py: name .* megatron-core 0\.16-0\.17; pip install 'megatron-core>=0\.16,<0\.18'.*patches\.md"
    with pytest.raises(ConfigError, match=rf"megatron-core: {installed} is installed.*{cure}"):
        double(3)


def test_a_missing_library_is_refused(monkeypatch):
    monkeypatch.setattr(patches, "check_version", patches.check_version.__wrapped__)
    with pytest.raises(ConfigError, match="no version is installed"):
        patches.patches("no-such-library 1.0", "x", why="y")(int)()


def test_patches_support_exactly_the_versions_that_can_be_installed():
    """If a bound in pyproject.toml is widened, the message lists the patches to review."""
    project = tomllib.loads((patches_page.ROOT / "pyproject.toml").read_text())["project"]
    allowed = {r.name: r.specifier for r in map(Requirement, project["dependencies"])}
    wrong = []
    declared = (patches_page.patches_of(file, tree) for file, tree in patches_page.sources().items())
    for patch in itertools.chain(*declared):
        package, first, last = patches.versions_of(patch.library)
        (major, minor), specifier = last, allowed[package]
        inside = all(specifier.contains(f"{a}.{b}.1") for a, b in (first, last))
        outside = (f"{first[0]}.{first[1] - 1}.1", f"{major}.{minor + 1}.0")
        if not inside or any(specifier.contains(version) for version in outside):
            wrong.append(f"{patch.file}: {patch.function} is for {patch.library}, pyproject.toml allows {specifier}")
    assert not wrong, "\n".join(wrong)


def replaced(tree: ast.Module) -> list[tuple[int, str]]:
    """List (line, name) of library attributes that are set outside of functions that declare a patch."""
    names = patches_page.bindings(tree)
    found: list[tuple[int, str]] = []

    def visit(node: ast.AST, declared: bool) -> None:
        declared |= any("patches(" in ast.unparse(d) for d in getattr(node, "decorator_list", ()))
        targets: list[ast.AST] = []
        if isinstance(node, ast.Assign):
            targets = [
                t for target in node.targets for t in (target.elts if isinstance(target, ast.Tuple) else [target])
            ]
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("setattr", "_replace"):
            targets = [ast.Attribute(node.args[0], "attribute")]
        for target in targets:
            name = patches_page.dotted_name(target, names) if isinstance(target, ast.Attribute) else None
            if name is not None and not declared:
                found.append((node.lineno, name))
        for child in ast.iter_child_nodes(node):
            visit(child, declared)

    visit(tree, False)
    return found


SETTINGS = {"torch._dynamo.config.recompile_limit"}
"""Documented settings of a library."""


def test_every_replacement_in_a_library_is_declared():
    undeclared = [
        f"{file}:{line}: {name}"
        for file, tree in patches_page.sources().items()
        for line, name in replaced(tree)
        if name not in SETTINGS
    ]
    assert not undeclared, "\n".join(undeclared)


@pytest.mark.parametrize(
    "code",
    [
        "import torch\ntorch.cuda.synchronize = print",
        "from torch import nn\ndef f():\n    a, nn.Module.to = 1, print",
        "import megatron.core.utils as m\nsetattr(m, 'name', 1)",
    ],
)
def test_the_scan_detects_a_replacement(code):
    [(line, _)] = replaced(ast.parse(code))
    assert line == code.count("\n") + 1
    assert (
        replaced(ast.parse(code.replace("def f", "@patches('torch 2.11', 'x', why='y')\ndef f"))) == []
        or "def" not in code
    )


def test_the_page_is_current():
    assert patches_page.PAGE.read_text() == patches_page.page(), "run python -m tests.support.patches_page --write"
