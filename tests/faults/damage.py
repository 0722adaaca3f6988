"""Damage of files: flip bits, cut, swap, remove, or replace by hostile or nonsensical content."""

import json
import os
import pickle
import random
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from tests.faults.fuzz import SPRUNG
from tests.support.trap import Trap

NONSENSE = (
    *(None, True, False, 0, -1, 1, 2**63, 10**40, 0.5, float("nan"), float("inf"), -1e308, "", "x", "../../x", "/etc"),
    *([], [None], [[]], ["x"], [-1, -1], {}, {"x": 1}, {"_target_": "os.mkdir", "path": SPRUNG}, "é" * 300, [1] * 2000),
)
TEXTS = (
    *("", "\n", "null", "[]", "{}", "{", "---\n- a\n---\n- b", "a: &a [*a]", "[" * 100_000, "{'a':" * 5000, "\0"),
    *("!!python/object/apply:pathlib.Path.touch [sprung]", "!!python/object/apply:os.mkdir [sprung]", "NaN"),
    "a: &a [x, x, x, x, x, x, x, x, x]\n"
    + "\n".join(f"{b}: &{b} [{', '.join(['*' + a] * 9)}]" for a, b in zip("abcdef", "bcdefg")),
)


def flip(path: Path, rng: random.Random) -> None:
    content = bytearray(path.read_bytes() or b"\0")
    for _ in range(rng.choice((1, 1, 2, 8))):
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    path.write_bytes(content)


def cut(path: Path, rng: random.Random) -> None:
    os.truncate(path, rng.randrange(max(1, path.stat().st_size)) // rng.choice((1, 1, 8)))


def zeroed(path: Path, rng: random.Random) -> None:
    content = bytearray(path.read_bytes())
    start = rng.randrange(len(content) + 1)
    end = min(len(content), start + rng.choice((1, 8, 512, 4096)))
    content[start:end] = bytes(end - start)
    path.write_bytes(content)


def moved(path: Path, rng: random.Random) -> None:
    """Move a piece of the file to another place in it."""
    content = path.read_bytes()
    a, b, c = sorted(rng.randrange(len(content) + 1) for _ in range(3))
    path.write_bytes(content[:a] + content[b:c] + content[a:b] + content[c:])


def swapped(path: Path, rng: random.Random) -> None:
    """Exchange two files of the folder."""
    other = rng.choice(sorted(p for p in path.parent.iterdir() if p.is_file() and not p.is_symlink()))
    content = path.read_bytes()
    shutil.copyfile(other, path) if other != path else None
    other.write_bytes(content)


def stale(path: Path, rng: random.Random) -> None:
    """Replace a file of a checkpoint by the same file of the run's oldest checkpoint."""
    folder = next(parent for parent in path.parents if parent.name.startswith("iter_"))
    shutil.copy(min(folder.parent.glob("iter_*")) / path.relative_to(folder), path)


DAMAGES: dict[str, Callable[[Path, random.Random], Any]] = {
    "flip": flip,
    "cut": cut,
    "zeroed": zeroed,
    "longer": lambda path, rng: path.write_bytes(path.read_bytes() + rng.randbytes(rng.choice((1, 8, 512, 1024)))),
    "moved": moved,
    "removed": lambda path, rng: path.unlink(),
    "a folder": lambda path, rng: (path.unlink(), path.mkdir()),
    "a link": lambda path, rng: (
        path.unlink(),
        path.symlink_to(rng.choice(("/dev/zero", "/etc/passwd", "nowhere", path.name))),
    ),
    "a pipe": lambda path, rng: (path.unlink(), os.mkfifo(path)),
    "random bytes": lambda path, rng: path.write_bytes(rng.randbytes(rng.choice((1, 100, 10_000)))),
    "a text": lambda path, rng: path.write_text(rng.choice(TEXTS)),
    # A pickle that makes a file when it is loaded.
    "hostile": lambda path, rng: path.write_bytes(
        pickle.dumps(Trap(path.parent / SPRUNG), protocol=rng.randrange(2, 6))
    ),
    "swapped": swapped,
}
OF_CHECKPOINTS = {
    **{name: DAMAGES[name] for name in ("flip", "cut", "removed", "a folder", "hostile")},
    "emptied": lambda path, rng: os.truncate(path, 0),
    "stale": stale,
}
"""Damages that always change a file of a checkpoint."""


def places_in(value: Any) -> list[tuple[Any, Any]]:
    """Return every entry of nested lists and mappings as its container and key."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [place for key, inner in items for place in ((value, key), *places_in(inner))]


def restated(path: Path, rng: random.Random) -> str:
    """Change one or two entries of a JSON or YAML file, which stays valid; return a description of the change."""
    text = path.read_text()
    content = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    said = []
    for _ in range(rng.choice((1, 1, 2))):
        if not (places := places_in(content)):
            break
        container, key = rng.choice(places)
        if rng.random() < 0.25:
            del container[key]
            said.append(f"without {key}")
        else:
            container[key] = rng.choice(NONSENSE)
            said.append(f"{key}={str(container[key])[:60]}")
    path.write_text(json.dumps(content) if path.suffix == ".json" else yaml.safe_dump(content))
    return f"{path.name}: {', '.join(said)}"


def damage(path: Path, rng: random.Random) -> str:
    """Damage a file in a random way; return a description."""
    if path.suffix in (".json", ".yaml") and rng.random() < 0.6:
        with suppress(ValueError, yaml.YAMLError):  # an earlier damage made the text invalid
            return restated(path, rng)
    done = rng.choice(("flip", "flip", *DAMAGES))
    DAMAGES[done](path, rng)
    return f"{path.name}: {done}"
