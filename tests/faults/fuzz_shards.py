"""Random damage of a data set (shards, indices, `.nv-meta`), read by training, validation and `inspect`."""

import random
import shutil
import tempfile
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import torch

from dit.errors import one_line_errors
from energon_data import inspect
from energon_data.dataset import EnergonData
from tests.faults.damage import damage
from tests.faults.fuzz import Ended, judge, run
from tests.unit.energon_data.small_data import clips, spec, write_dataset

SAMPLES, HELD_OUT = 40, 8
SIZES = [(1, 4, 4), (2, 4, 4), (1, 6, 8)]


@cache
def sound() -> Path:
    """Write the undamaged data set; all values of sample `i` are `i`."""
    splits = {"train": clips(SAMPLES, sizes=SIZES), "val": clips(HELD_OUT, sizes=SIZES)}
    return write_dataset(Path(tempfile.mkdtemp(prefix="fuzz")) / "data", splits)


def check(keys: Sequence[str], latents_TC: torch.Tensor, sizes: Sequence[int]) -> None:
    """Check that samples have the values that were written.

    Raises:
        AssertionError: a sample has other values.
    """
    for key, values in zip(keys, latents_TC.split(list(sizes))):
        assert key[-9:-5] == "clip", key
        assert torch.equal(values, torch.full_like(values, int(key[-5:]))), f"{key} is not what was written"


@one_line_errors
def train(words: Sequence[str]) -> int:
    """Read an epoch and a half as training does."""
    folder, lost = words
    data = EnergonData(path=folder, shuffle_buffer=7, max_lost_samples=int(lost), background=False)
    data.validate(spec(), 1, 1)
    data.class_names(), data.text_encoder(), data.attributions(), data.stored_conditions()
    stream = data.build_train(spec(), dp_rank=0, dp_size=1, seed=0, log_dir=str(Path(folder).parent / "log"))
    try:
        for _ in range(SAMPLES * 3 // 2 // 4):
            batch = next(stream)
            check(batch.keys, batch.latents_TC, batch.layout.lengths)
    finally:
        stream.close()
    return 0


@one_line_errors
def validate(words: Sequence[str]) -> int:
    """Read the held-out samples."""
    folder, lost = words
    data = EnergonData(path=folder, max_lost_samples=int(lost), background=False)
    for batch in data.build_validation(spec(), dp_rank=0, dp_size=1):
        check(batch.keys, batch.latents_TC, batch.layout.lengths)
    return 0


def look(words: Sequence[str]) -> int:
    """Describe the data set with `python -m energon_data.inspect`."""
    return inspect.main([words[0]])


READERS: tuple[Callable[[Sequence[str]], int], ...] = (train, train, validate, look)


def attempt(seed: int, number: int, folder: Path) -> Ended:
    """Damage a copy of the data set one to three times, and read it."""
    rng = random.Random(f"shards {seed} {number}")
    data = Path(shutil.copytree(sound(), folder / "data"))
    done = []
    for _ in range(rng.choice((1, 1, 2, 3))):
        files = sorted(p for p in data.rglob("*") if p.is_file() and not p.is_symlink())
        shards = [p for p in files if p.suffix == ".tar"]
        done.append(damage(rng.choice(rng.choice((files, shards)) or files), rng))
    reader = rng.choice(READERS)
    words = [str(data), str(rng.choice((0, 0, 3, 1000)))]
    ended = run(reader, words, folder)
    judge(ended, folder, codes=(3,), causes=(str(data), ".tar", *(one.partition(":")[0] for one in done)))
    ended.words = (reader.__name__, *words, *done)
    return ended
