"""Functions that open files, parse or print ("doors") are used only in listed files, which limit the content."""

import ast
from collections.abc import Iterator
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Optional

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("dit", "energon_data", "launch", "recipes", "benchmarks", "examples")
FILES = sorted(path.relative_to(ROOT) for package in PACKAGES for path in (ROOT / package).rglob("*.py"))

READERS = "dit/safe_files.py"
OWN_READERS = ("dit.safe_files", "energon_data.prepare.sources")
"""Modules whose functions `read_bytes` and `read_text` are not methods of `Path`."""

KERNEL = (
    *("dit/backends/device.py", "dit/monitoring/heartbeat.py", "dit/monitoring/time_limit.py"),
    *("examples/race/__main__.py", "launch/experiment.py"),
)
"""Files that read /proc and /sys."""

OWN_PROCESSES = (
    *("dit/verify/ranks.py", "dit/step/balance.py", "dit/backends/process_groups.py"),
    *("energon_data/workers/background.py", "energon_data/workers/messages.py"),
)
"""Files that read messages between processes of one command, in a new folder or through a connection."""

ALLOWED: dict[str, tuple[str, ...]] = {
    # Parsers.
    "json.load*": (READERS,),
    "json.*Decoder": (),
    "tomllib.load*": ("dit/extensions.py",),  # pyproject.toml of this repository
    "yaml.*load*": (READERS,),
    "yaml.*Loader": (READERS,),
    "pickle.load*": OWN_PROCESSES,
    "pickle.Unpickler": (),
    "tarfile.open": (
        *("energon_data/tar_index.py", "energon_data/prepare/shards.py"),
        "examples/avatars/design.py",  # an archive with a known checksum
    ),
    "zipfile.ZipFile": (READERS, "dit/evaluation/features.py"),
    "numpy.load*": (),
    "numpy.open_memmap": (READERS,),
    "torch.load": (
        *(READERS, "dit/verify/ranks.py"),  # the second reads files that it wrote
        "dit/evaluation/features.py",  # a TorchScript program selected by the user
    ),
    "safetensors.load*": ("energon_data/decoder.py",),
    "safetensors.safe_open": (READERS,),
    "pyarrow.ParquetFile": ("energon_data/prepare/lists.py",),
    "pyarrow.read_*": (),
    # Media, installed fonts, and networks of other libraries.
    "PIL.open": ("dit/media.py",),
    "av.open": ("dit/media.py",),
    "PIL.truetype": ("dit/sampling/grid.py", "examples/letters/fonts.py", "examples/pictograms/drawings.py"),
    "matplotlib.FT2Font": ("examples/letters/fonts.py", "examples/pictograms/drawings.py"),
    "*.from_pretrained": ("dit/encoders/pretrained.py",),
    # Printers.
    "print": ("dit/terminal.py",),
    "*.print": (),
    "sys.write*": (),
    "traceback.print_*": ("dit/verify/ranks.py",),
    # `READERS`, and files that create files exclusively, open folders or flush to disk.
    "os.open": (
        *(READERS, "dit/durable_files.py", "dit/checkpoint/manifest.py", "dit/checkpoint/reader_lock.py"),
        "dit/verify/ranks.py",
    ),
    # Methods of `Path`, and functions of the same name in other modules.
    "open": (READERS,),
    "*.open": (READERS,),  # members of archives
    "*.read_text": (*KERNEL, "dit/verify/ranks.py", "recipes/registry.py", "benchmarks/parallel_matrix.py"),
    "*.read_bytes": (OWN_PROCESSES[0],),
}
"""Files that may use a function, by a pattern of package and function: `torch.load` includes `torch.jit.load`.

The first matching pattern applies.
"""


def imports(tree: ast.AST) -> dict[str, str]:
    """Map each imported name of a file to its full name."""
    names: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.asname: alias.name for alias in node.names if alias.asname}
        elif isinstance(node, ast.ImportFrom):
            names |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    return names


def full_name(node: ast.AST, imported: dict[str, str]) -> str:
    """Return the full name of a function, such as `PIL.Image.open`; `?` stands for an object without a name."""
    if isinstance(node, ast.Attribute):
        return f"{full_name(node.value, imported)}.{node.attr}"
    return imported.get(node.id, node.id) if isinstance(node, ast.Name) else "?"


@cache
def door(name: str) -> Optional[str]:
    """Return the first key of `ALLOWED` that matches a full name."""
    owner, _, function = name.rpartition(".")
    if owner in OWN_READERS:
        return None
    short = f"{owner.partition('.')[0]}.{function}" if owner else function
    return next((pattern for pattern in ALLOWED if fnmatchcase(short, pattern)), None)


def is_writing(call: ast.Call) -> bool:
    """Return whether `open` is called with a mode that only writes, as for an output file of the user."""
    modes = [arg.value for arg in call.args[1:2] if isinstance(arg, ast.Constant)]
    return ast.unparse(call.func) == "open" and any(mode in ("w", "wb", "a", "x", "xb") for mode in modes)


def doors(source: str) -> Iterator[tuple[int, str]]:
    """Yield (line, key of `ALLOWED`) for each use of a door: calls, and references as in `map(json.loads, lines)`."""
    tree = ast.parse(source)
    imported, nodes = imports(tree), list(ast.walk(tree))
    writers = {node.func for node in nodes if isinstance(node, ast.Call) and is_writing(node)}
    for node in nodes:
        if isinstance(node, ast.Name | ast.Attribute) and node not in writers:
            key = door(full_name(node, imported))
            yield from [] if key is None else [(node.lineno, key)]


@pytest.fixture(scope="module")
def all_uses() -> list[tuple[str, int, str]]:
    return [(str(path), *use) for path in FILES for use in doors((ROOT / path).read_text())]


@pytest.mark.parametrize("pattern", ALLOWED)
def test_a_restricted_call_is_used_only_in_named_places(pattern: str, all_uses: list[tuple[str, int, str]]) -> None:
    uses = [(path, line) for path, line, used in all_uses if used == pattern]
    others = [f"{path}:{line}: {pattern}" for path, line in uses if path not in ALLOWED[pattern]]
    assert not others, "use dit.safe_files or dit.terminal\n" + "\n".join(others)
    assert {path for path, _ in uses} == set(ALLOWED[pattern]), "a place that is no longer used"


@pytest.mark.parametrize(
    ("source", "key"),
    [
        ("import json; json.loads(x)", "json.load*"),
        ("import json as j; j.loads(x)", "json.load*"),
        ("from json import loads; loads(x)", "json.load*"),
        ("from json import loads as parse; parse(x)", "json.load*"),
        ("def f():\n    from json import loads as parse\n    return parse(x)", "json.load*"),
        ("import json; map(json.loads, lines)", "json.load*"),
        ("import json; parse = json.loads", "json.load*"),
        ("from PIL import Image; Image.open(path)", "PIL.open"),
        ("from PIL import Image as I; I.open(path)", "PIL.open"),
        ("import PIL.Image; PIL.Image.open(path)", "PIL.open"),
        ("import PIL.Image as I; I.open(path)", "PIL.open"),
        ("from PIL.Image import open as decode; decode(path)", "PIL.open"),
        ("import numpy as np; np.load(path)", "numpy.load*"),
        ("import numpy as np; np.lib.format.open_memmap(path)", "numpy.open_memmap"),
        ("import torch; torch.load(path)", "torch.load"),
        ("import torch; torch.jit.load(path)", "torch.load"),
        ("from torch.distributed import checkpoint as dcp; dcp.load(state)", "torch.load"),
        ("from safetensors import safe_open; safe_open(path)", "safetensors.safe_open"),
        ("from safetensors.torch import load_file; load_file(path)", "safetensors.load*"),
        ("from pyarrow import parquet; parquet.ParquetFile(path)", "pyarrow.ParquetFile"),
        ("import pyarrow.parquet as pq; pq.read_table(path)", "pyarrow.read_*"),
        ("import pickle; pickle.load(file)", "pickle.load*"),
        ("import pickle; pickle.loads(data)", "pickle.load*"),
        ("import pickle\nclass Reader(pickle.Unpickler): pass", "pickle.Unpickler"),
        ("import yaml; yaml.safe_load(x)", "yaml.*load*"),
        ("import yaml; yaml.unsafe_load_all(x)", "yaml.*load*"),
        ("import tarfile; tarfile.open(path)", "tarfile.open"),
        ("from zipfile import ZipFile as Z; Z(path)", "zipfile.ZipFile"),
        ("import av; av.open(path)", "av.open"),
        ("from transformers import AutoModel; AutoModel.from_pretrained(path)", "*.from_pretrained"),
        ("open(path)", "open"),
        ("open(path, mode)", "open"),
        ("import io; io.open(path)", "*.open"),
        ("import os; os.open(path, flags)", "os.open"),
        ("path.open('rb')", "*.open"),
        ("(folder / name).read_text()", "*.read_text"),
        ("from pathlib import Path as P; P(name).read_bytes()", "*.read_bytes"),
        ("from launch.plan import PAGE; PAGE.read_bytes()", "*.read_bytes"),
        ("print(x)", "print"),
        ("console.print(x)", "*.print"),
        ("self._live.console.print(x)", "*.print"),
        ("import sys; sys.stderr.buffer.write(x)", "sys.write*"),
        # No doors.
        ("open(path, 'w')", None),
        ("path.write_text(x)", None),
        ("import triton.language as tl; tl.load(pointer)", None),
        ("from dit.safe_files import read_bytes; read_bytes(path)", None),
        ("from dit import safe_files; safe_files.read_bytes(path)", None),
    ],
)
def test_a_restricted_call_is_recognised_in_every_spelling(source: str, key: Optional[str]) -> None:
    assert [used for _, used in doors(source)] == [key] * (key is not None)
