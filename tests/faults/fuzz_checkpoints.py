"""Random damage of a run folder and its newest checkpoint, which is then resumed, sampled, exported or inspected.

Half of the damaged checkpoints get a new manifest, as an attacker would write it, so that no hash shows the damage.
"""

import random
import re
import shutil
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist

from dit.backends import process_groups
from dit.checkpoint.manifest import MANIFEST, Manifest, hash_tree
from dit.errors import CheckpointError
from launch import export, sample, status, train
from tests.faults.damage import NONSENSE, damage, places_in
from tests.faults.fuzz import SPRUNG, Ended, judge, run
from tests.integration import runs
from tests.integration.runs import assert_same_bits, checkpoint, losses, read_tensors
from tests.support.trap import Trap

STEPS, BEFORE = 4, 2
MODEL = {
    "model__hidden_size": 32,
    "model__num_layers": 1,
    "model__context_size": "none",
    "model__position_embedding": "sincos_2d",
}
"""A model that diffusers can load."""
IN_RUN = ("config.yaml", "metrics.jsonl", "exit.json", "env.json")
CODES = (2, 3, 4, 5)


def arguments(run_dir: Path) -> list[str]:
    """Return the command line that starts and resumes the run."""
    settings = {"training__num_steps": STEPS, "training__log_interval": 1, "checkpoint__interval": BEFORE}
    return runs.mock(run_dir, **settings, data__dataset_size=16, **MODEL)


def on_one_rank(main: Callable[[Sequence[str]], int], words: Sequence[str]) -> int:
    """Run a command as the only rank; destroy its process groups at the end."""
    try:
        with mock.patch.dict("os.environ", {"DIT_DEVICE": "cpu", "WANDB_MODE": "offline"}):
            return main(words)
    finally:
        if dist.is_initialized():
            process_groups.destroy()


@cache
def sound() -> Path:
    """Train the run that is damaged."""
    folder = Path(tempfile.mkdtemp(prefix="fuzz"))
    ended = run(partial(on_one_rank, train.main), arguments(folder / "run"), folder)
    assert ended.code == 0, ended.err
    return folder / "run"


def sealed(folder: Path, rng: random.Random) -> str:
    """Write a manifest that matches a damaged checkpoint, sometimes with changed metadata."""
    old = Manifest.from_text((checkpoint(sound(), STEPS) / MANIFEST).read_text())
    meta, said = dict(old.meta), ""
    if rng.random() < 0.3:
        container, key = rng.choice(places_in(meta))
        container[key] = rng.choice([value for value in NONSENSE if value == value and str(value) != "inf"])
        said = f", says {key}={str(container[key])[:60]}"
    (folder / MANIFEST).unlink(missing_ok=True)
    (folder / MANIFEST).write_text(replace(old, meta=meta, files=hash_tree(folder, {})).to_text())
    return f"sealed{said}"


def command(reader: str, run_dir: Path) -> tuple[Callable[[Sequence[str]], int], list[str]]:
    """Return a command that reads a run folder, and its words."""
    source, out = ["--checkpoint", str(run_dir)], str(run_dir.parent / "out")
    return {
        "resume": (train.main, arguments(run_dir)),
        "sample": (sample.main, [*source, "--labels", "1", "--steps", "1", "--out", f"{out}.png"]),
        "export": (export.main, [*source, "--format", "diffusers", "--out", out]),
        "status": (status.main, [str(run_dir)]),
        "print": (train.main, ["--yaml", str(run_dir), "--print-config"]),
    }[reader]


READERS = ("resume", "resume", "resume", "sample", "export", "status", "print")


def assert_unchanged(run_dir: Path, undamaged: Path, step: int, metrics: bool = True) -> None:
    """Check that a resumed run has the losses and, to the bit, the last checkpoint of the undamaged run."""
    assert not metrics or losses(run_dir).items() >= losses(undamaged).items()
    assert_same_bits(*(read_tensors(checkpoint(path, step)) for path in (run_dir, undamaged)))


def attempt(seed: int, number: int, folder: Path) -> Ended:
    """Damage a copy of the run folder one to three times, and use it."""
    rng = random.Random(f"checkpoints {seed} {number}")
    run_dir = Path(shutil.copytree(sound(), folder / "run"))
    newest = checkpoint(run_dir, STEPS)
    reader = rng.choice(READERS)
    done = []
    if reader in ("status", "print") or rng.random() < 0.1:
        done.append(damage(run_dir / rng.choice(IN_RUN), rng))
    for _ in range(rng.choice((1, 1, 2, 3))):
        files = sorted(p for p in newest.rglob("*") if p.is_file() and not p.is_symlink())
        path = rng.choice(files)
        if path.suffix == ".pt" and rng.random() < 0.3:
            torch.save({"position": Trap(path.parent / SPRUNG)}, path)
            done.append(f"{path.name}: hostile state")
        else:
            done.append(damage(path, rng))
    is_sealed = rng.random() < 0.5
    if is_sealed:
        with suppress(CheckpointError, OSError):
            done.append(sealed(newest, rng))
    main, words = command(reader, run_dir)
    ended = run(partial(on_one_rank, main), words, folder)
    named = [name for one in done for name in (one.partition(":")[0], *re.findall(r"(\w+)=", one))]
    judge(ended, folder, codes=CODES, causes=(str(run_dir), "the checkpoint of step", *named))
    if reader == "resume" and ended.code == 0 and not is_sealed and not ended.wrong:
        try:
            assert_unchanged(run_dir, sound(), STEPS, metrics=not any("metrics" in one for one in done))
        except AssertionError as error:
            ended.wrong.append(f"the run is another one: {error}")
    ended.words = (reader, *done)
    return ended
