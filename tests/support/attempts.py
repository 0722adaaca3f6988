"""Attempts at a run on mixed packs of pictures and clips, which tests kill and start again."""

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from dit.verify.ranks import FORKS, free_port
from energon_data.media_files import video_bytes
from energon_data.prepare.__main__ import main as prepare
from tests.integration import actions
from tests.integration.runs import SMALL_PACKS, overrides
from tests.support import faults
from tests.support.ranks import fork_data_server

CLIPS_FROM = 12
"""Number of steps before the blend has clips."""
SETTINGS: dict[str, Any] = {
    **SMALL_PACKS,
    "data__flip": 0.5,
    "model__in_channels": 3,
    "model__patch_spatial": 4,
    "model__num_classes": "null",
    "model__context_size": "null",
    "training__global_batch_size": 4,
    "logging__tensorboard": False,
}


def prepare_media(folder: Path) -> Path:
    """Prepare 48 pictures of three sizes and 16 clips; the second half of the clips is longer."""
    rng = np.random.default_rng(0)

    def pixels(height: int, width: int) -> Image.Image:
        return Image.fromarray(rng.integers(0, 256, (height, width, 3), np.uint8))

    for name in ("pictures", "films"):
        (folder / f"in_{name}").mkdir()
    for i in range(48):
        pixels(*((16, 16), (16, 32), (24, 16))[i % 3]).save(folder / "in_pictures" / f"p{i:02d}.png")
    for i in range(16):
        frames = [pixels(16, 16) for _ in range(2 + i // 8)]
        (folder / "in_films" / f"f{i:02d}.mp4").write_bytes(video_bytes(frames, 8.0))
    for kind, name in (("images", "pictures"), ("videos", "films")):
        words = ["--in", str(folder / f"in_{name}"), "--out", str(folder / name), "--processes", "1"]
        assert prepare([kind, *words, "--samples-per-shard", "10", "--validation", "0"]) == 0
    return folder


def arguments(folder: Path, run_dir: Path, **settings: Any) -> list[str]:
    """Return the arguments of a run on a blend that starts with pictures only."""
    blend = f"[{{path: {folder / 'pictures'}, weight: [1, 3]}}, {{path: {folder / 'films'}, weight: [0, 1]}}]"
    mixed = {"data__blend": blend, "data__blend_steps": [CLIPS_FROM]}
    return ["--yes", "--factory", "tiny_dit", *overrides(run_dir, **{**SETTINGS, **mixed, **settings})]


@dataclass(frozen=True)
class Files:
    """Files of one attempt at a run, next to the run folder.

    Attributes:
        number: of the attempt.
        ranks: world size.
    """

    run_dir: Path
    number: int
    ranks: int = 1

    def of(self, kind: str, rank: int) -> Path:
        return self.run_dir.with_name(f"{self.run_dir.name}_{kind}_{self.number}_{rank}")

    def steps(self, rank: int = 0) -> dict[int, list[str]]:
        """Return the sample keys by step on one rank, without a line that the kill cut off."""
        file = self.of("steps", rank)
        lines = file.read_text().split("\n")[:-1] if file.exists() else []
        return {record["step"]: record["keys"] for record in map(json.loads, lines)}

    def log(self) -> str:
        files = [self.of("log", rank) for rank in range(self.ranks)]
        return "\n".join(file.read_text(errors="replace")[-3000:] for file in files if file.exists())


Watch = Callable[[Files, int], faults.Fault]
"""Makes the context in which a rank trains, from the files of its attempt and its number."""


def _train(words: list[str], files: Files, rank: int, world: dict[str, str], watches: tuple[Watch, ...]) -> None:
    """Run one rank, forked with all modules imported, in a new session, so that a kill can include its workers."""
    os.setsid()
    out = os.open(files.of("log", rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(out, stream)
    os.environ |= {"DIT_DEVICE": "cpu", "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", **world}
    fork_data_server()
    noted = partial(faults.samples_noted, files.of("steps", rank))
    sys.exit(actions.train(words, partial(faults.together, noted, *(watch(files, rank) for watch in watches))).code)


@contextmanager
def attempt(words: list[str], files: Files, *watches: Watch) -> Iterator[list[BaseProcess]]:
    """Start all ranks; at the end kill those that run, and the workers of all."""
    port = str(free_port())
    ranks: list[BaseProcess] = []
    for rank in range(files.ranks):
        world = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(files.ranks), "MASTER_PORT": port}
        ranks.append(FORKS.Process(target=_train, args=(words, files, rank, world if files.ranks > 1 else {}, watches)))
    try:
        for process in ranks:
            process.start()
        yield ranks
    finally:
        for process in ranks:
            if process.pid is not None:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.kill()  # it may not lead a group yet
                process.join()


def finish(words: list[str], files: Files) -> None:
    """Run to the last step."""
    with attempt(words, files) as ranks:
        for rank in ranks:
            rank.join(400)
            assert rank.exitcode == 0, files.log()


def children(process: BaseProcess) -> list[int]:
    """Return the process ids of the children of a process."""
    found: list[int] = []
    for thread in Path(f"/proc/{process.pid}/task").glob("*/children"):
        with suppress(FileNotFoundError, ProcessLookupError):  # the thread has ended
            found += map(int, thread.read_text().split())
    return found
