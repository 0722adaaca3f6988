"""Small checkpoints for tests of the store."""

import random
from contextlib import suppress

from dit.checkpoint.manifest import verify_folder
from dit.checkpoint.store import CheckpointStore
from dit.errors import CheckpointError
from dit.settings import CheckpointConfig

FILES = ("state.json", "rank_0.safetensors", "rank_1.safetensors", ".hidden", "loader/dp_00000.pt", "empty")


def make_store(root, **keep):
    return CheckpointStore(root, CheckpointConfig(**keep))


def fill(folder, step):
    """Write files whose content is a function of the step and the name."""
    for name in FILES:
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        seeded = random.Random(f"{step} {name}")
        path.write_bytes(b"" if name == "empty" else seeded.randbytes(seeded.randrange(100, 400)))


def save(store, step, **meta):
    folder = store.begin(step)
    with store.writing(step):
        fill(folder, step)
    return store.publish(step, meta)


def newest_valid(store):
    """Return folder and manifest of the newest checkpoint that verifies; None if there is none."""
    for folder in store.newest_first():
        with suppress(CheckpointError):
            return folder, verify_folder(folder)
    return None


def newest_step(store):
    found = newest_valid(store)
    return None if found is None else found[1].step


def leftovers(store):
    return sorted(p.name for p in store.root.iterdir() if p.suffix)
