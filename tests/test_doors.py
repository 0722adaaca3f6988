"""Doors: calls that open files, parse them or print are made in named places only, which bound their content."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("dit", "energon_data", "launch", "recipes", "benchmarks", "examples")
FILES = sorted(path.relative_to(ROOT) for package in PACKAGES for path in (ROOT / package).rglob("*.py"))

READERS = "dit/safe_files.py"
KERNEL = (
    *("dit/backends/device.py", "dit/monitoring/heartbeat.py", "dit/monitoring/time_limit.py"),
    *("benchmarks/loader.py", "examples/letters/speedrun.py"),
)
"""They read files of the kernel in /proc and /sys."""

OWN_PROCESSES = (
    *("dit/verify/ranks.py", "dit/step/balance.py"),
    *("energon_data/workers/background.py", "energon_data/workers/messages.py"),
)
"""They read what processes of the same command send to each other, in a new folder or through a connection."""

ALLOWED: dict[str, tuple[str, ...]] = {
    # Calls that open a path, but for writing, see `is_writing`.
    "open": (READERS,),
    "Path.open": (READERS,),  # a member of an archive
    "Path.read_text": (
        *KERNEL,
        "dit/verify/ranks.py",
        "recipes/registry.py",
        "launch/patches_page.py",
        "benchmarks/parallel_matrix.py",
    ),
    "Path.read_bytes": (OWN_PROCESSES[0],),
    # The rest create files exclusively, open folders, or flush what was written.
    "os.open": (
        *(READERS, "dit/durable_files.py", "dit/checkpoint/state_files.py", "dit/checkpoint/background/writer.py"),
        *("dit/checkpoint/manifest.py", "dit/checkpoint/reader_lock.py", "dit/convert/state_files.py"),
        "dit/verify/ranks.py",
    ),
    # Parsers.
    "json.load": (),
    "json.loads": (READERS,),
    "yaml.load": (),
    "yaml.safe_load": (),
    "yaml.full_load": (),
    "yaml.unsafe_load": (),
    "tarfile.open": (READERS, "energon_data/tar_index.py", "energon_data/prepare/shards.py"),
    "zipfile.ZipFile": (READERS, "dit/evaluation/features.py"),
    "np.load": (),
    "torch.load": (READERS, "dit/verify/full.py"),
    # Media and networks of other libraries.
    "Image.open": ("dit/media.py",),
    "av.open": ("dit/media.py",),
    "from_pretrained": ("dit/encoders/pretrained.py",),
    # Printers.
    "print": ("dit/terminal.py",),
    "sys.stdout.write": (),
    "sys.stderr.write": (),
    "traceback.print_exc": ("dit/verify/ranks.py",),
    "pickle.load": (),
    "pickle.loads": OWN_PROCESSES,
}
"""Files that may make a call, by the name of the call."""

MODULES = {name.partition(".")[0] for name in ALLOWED}


def name_of(call: ast.Call) -> str:
    """Return the name of a call as in `ALLOWED`; a method `open` of any object except a module is that of a path."""
    if isinstance(call.func, ast.Name):
        return call.func.id
    if not isinstance(call.func, ast.Attribute):
        return ""
    if call.func.attr == "from_pretrained":
        return call.func.attr
    owner = ast.unparse(call.func.value)
    is_path = call.func.attr in ("open", "read_text", "read_bytes") and owner not in MODULES
    return f"Path.{call.func.attr}" if is_path else f"{owner}.{call.func.attr}"


def is_writing(call: ast.Call) -> bool:
    """Return whether `open` is called with a mode that only writes, as for the output that a user names."""
    modes = [arg.value for arg in call.args[:2] if isinstance(arg, ast.Constant) and isinstance(arg.value, str)]
    return name_of(call) == "open" and any(mode in ("w", "wb", "a", "x", "xb") for mode in modes)


def calls(path: Path) -> Iterator[tuple[int, str]]:
    """Yield (line, name) of the calls of a file, also of `map(json.loads, lines)`."""
    for node in ast.walk(ast.parse((ROOT / path).read_text(), filename=str(path))):
        if isinstance(node, ast.Call) and not is_writing(node):
            yield node.lineno, name_of(node)
            yield from ((arg.lineno, ast.unparse(arg)) for arg in node.args if isinstance(arg, ast.Attribute))


@pytest.fixture(scope="module")
def all_calls() -> list[tuple[str, int, str]]:
    return [(str(path), line, name) for path in FILES for line, name in calls(path)]


@pytest.mark.parametrize("name", ALLOWED)
def test_a_door_is_opened_in_named_places_only(name: str, all_calls: list[tuple[str, int, str]]) -> None:
    uses = [(path, line) for path, line, called in all_calls if called == name]
    others = [f"{path}:{line}: {name}" for path, line in uses if path not in ALLOWED[name]]
    assert not others, "use dit.safe_files or dit.terminal\n" + "\n".join(others)
    assert {path for path, _ in uses} == set(ALLOWED[name]), "a place that is no longer used"


def test_a_call_is_recognised_however_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{__name__}.ROOT", tmp_path)
    lines = [
        "(folder / name).read_text()",
        "path.open('rb')",
        "open(path)",
        "open(path, 'w')",
        "map(json.loads, lines)",
        "Image.open(path)",
        "AutoModel.from_pretrained(path)",
    ]
    (tmp_path / "x.py").write_text("\n".join(lines))
    names = [name for _, name in sorted(calls(Path("x.py"))) if name in ALLOWED]
    assert names == ["Path.read_text", "Path.open", "open", "json.loads", "Image.open", "from_pretrained"]
