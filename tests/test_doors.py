"""Files from outside are opened in one module per kind, which names the formats that it reads."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("dit", "recipes", "energon_data", "launch", "benchmarks")
FILES = sorted(path.relative_to(ROOT) for package in PACKAGES for path in (ROOT / package).rglob("*.py"))

# Full name of a function, or `.name` of a method of any object -> files that may call it.
DOORS = {
    "PIL.Image.open": ("dit/media.py",),
    "av.open": ("dit/media.py",),
    ".from_pretrained": ("dit/encoders/pretrained.py",),
}


def uses(tree: ast.Module, door: str) -> Iterator[int]:
    """Yield the lines that call a door, or import its function, under whatever name modules are imported."""
    names: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.asname: alias.name for alias in node.names if alias.asname}
        elif isinstance(node, ast.ImportFrom):
            names |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
            if door in (f"{node.module}.{alias.name}" for alias in node.names):
                yield node.lineno
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            first, *rest = ast.unparse(node.func).split(".")
            called = ".".join([names.get(first, first), *rest])
            if called.endswith(door) if door.startswith(".") else called == door:
                yield node.lineno


@pytest.mark.parametrize("door", DOORS)
def test_a_door_is_opened_in_its_files_only(door: str):
    trees = {path: ast.parse((ROOT / path).read_text(), filename=str(path)) for path in FILES}
    found = [
        f"{path}:{line}" for path, tree in trees.items() if str(path) not in DOORS[door] for line in uses(tree, door)
    ]
    assert not found, f"{door} belongs to {', '.join(DOORS[door])}: {found}"
    assert any(list(uses(trees[Path(file)], door)) for file in DOORS[door]), f"{DOORS[door]} no longer use {door}"


@pytest.mark.parametrize(
    ("door", "source"),
    [
        ("PIL.Image.open", "from PIL import Image\nImage.open(x)"),
        ("PIL.Image.open", "import PIL.Image\nPIL.Image.open(x)"),
        ("PIL.Image.open", "import PIL.Image as pictures\npictures.open(x)"),
        ("PIL.Image.open", "def f():\n    from PIL import Image as I\n    return I.open(x)"),
        ("PIL.Image.open", "from PIL.Image import open as load"),
        (".open", "paths[0].parent.open()"),
    ],
)
def test_a_door_is_seen_under_any_name(door: str, source: str):
    assert list(uses(ast.parse(source), door))
