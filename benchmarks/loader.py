"""Compare loaders on the same shards: `python -m benchmarks.loader`.

Each reads, shuffles, decodes, patchifies and batches the same samples. Ours also verifies checksums, checks for values
that are not finite, and can resume at every micro-batch. Loaders alternate and are restarted each time; the first
micro-batches, which fill buffers, are not measured. Process time includes this process and all workers.
"""

import argparse
import gc
import io
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from dit.condition_table import CONTEXT, LABEL
from dit.data_api import BatchSpec
from dit.errors import EXIT_OK
from dit.patchify import patchify
from dit.terminal import echo
from energon_data.dataset import EnergonData
from energon_data.prepare import shards

WORKERS = 2
SHUFFLE = 100
CLASSES = 10
OURS, PLAIN, WEBDATASET = f"ours, {WORKERS} workers", f"Energon, {WORKERS} workers", "webdataset, no workers"


@dataclass(frozen=True)
class Case:
    """Samples to read.

    Attributes:
        latent: `[C, T, H, W]`, float16.
        text: tokens and width of the text, float16; None for no text.
        batch: samples of a micro-batch.
        patch: side of a patch.
        samples: of the data set.
    """

    latent: tuple[int, int, int, int]
    text: tuple[int, int] | None
    batch: int
    patch: int
    samples: int

    @property
    def spec(self) -> BatchSpec:
        """The micro-batches of ours."""
        conditions = [replace(LABEL, num_classes=CLASSES)]
        if self.text is not None:
            conditions.append(replace(CONTEXT, shape=(self.text[1],)))
        return BatchSpec(
            patch_temporal=1,
            patch_spatial=self.patch,
            latent_channels=self.latent[0],
            conditions=tuple(conditions),
            micro_batch_size=self.batch,
        )


CASES = {
    "letters": Case(latent=(1, 1, 16, 16), text=None, batch=32, patch=4, samples=8000),
    "latents and texts": Case(latent=(16, 1, 32, 32), text=(128, 1024), batch=16, patch=2, samples=1500),
}


class Read(NamedTuple):
    """What reading took.

    Attributes:
        seconds: wall time.
        process_seconds: of this process and its workers.
        saving: seconds of each save of the position.
    """

    samples: int
    seconds: float
    process_seconds: float
    saving: list[float]


def write(case: Case, folder: Path) -> Path:
    """Write random samples into four shards."""
    rng = np.random.default_rng(0)
    with shards.published_folder(folder, force=True) as out:
        writer = shards.ShardWriter(out, "train", -(-case.samples // 4))
        for i in range(case.samples):
            parts = {"latent.npy": rng.standard_normal(case.latent, np.float32)}
            if case.text is not None:
                parts["text.npy"] = rng.standard_normal(case.text, np.float32)
            arrays = {name: shards.npy_bytes(array.astype(np.float16)) for name, array in parts.items()}
            writer.add(f"s{i:06d}", {"label": i % CLASSES}, arrays)
        writer.close()
        shards.write_dataset_file(out, {"format": 1, "shards": writer.shards})
        shards.write_energon_metadata(out, writer.shards, ["train"])
    return folder


@contextmanager
def ours(case: Case, folder: Path, *, workers: int = WORKERS) -> Iterator[tuple[Iterator[Any], Callable[[], Any]]]:
    """Open our loader, as a run does."""
    data = EnergonData(path=str(folder), num_streams=max(workers, 1), background=workers > 0, shuffle_buffer=SHUFFLE)
    stream = data.build_train(case.spec, dp_rank=0, dp_size=1, seed=0, log_dir=None)
    yield stream, lambda: torch.save(stream.state_dict(), io.BytesIO())
    stream.close()


def _patches(latent: Any, patch: int) -> Tensor:
    return patchify(torch.as_tensor(latent).float(), 1, patch)[0]


@contextmanager
def plain_energon(case: Case, folder: Path) -> Iterator[tuple[Iterator[Any], None]]:
    """Open a loader as Energon's documentation does, without saving."""
    from megatron.energon import (
        Cooker,
        DefaultTaskEncoder,
        Sample,
        WorkerConfig,
        basic_sample_keys,
        edataclass,
        get_loader,
        get_train_dataset,
        stateless,
    )

    @edataclass
    class Latent(Sample):
        tokens: Tensor
        text: Tensor
        label: int

    @stateless
    def cook(sample: dict[str, Any]) -> Latent:
        text = torch.as_tensor(sample["text.npy"]) if case.text is not None else torch.empty(0, 1)
        keys, label = basic_sample_keys(sample), sample["json"]["label"]
        return Latent(**keys, tokens=_patches(sample["latent.npy"], case.patch), text=text, label=label)

    class Encoder(DefaultTaskEncoder):
        cookers = (Cooker(cook),)

        @stateless
        def batch(self, samples: list[Latent]) -> dict[str, Any]:
            return {
                "tokens": torch.cat([s.tokens for s in samples]),
                "text": torch.cat([s.text for s in samples]),
                "label": torch.tensor([s.label for s in samples]),
                "keys": [s.__key__ for s in samples],
            }

    dataset = get_train_dataset(
        folder,
        worker_config=WorkerConfig(rank=0, world_size=1, num_workers=WORKERS),
        batch_size=case.batch,
        shuffle_buffer_size=SHUFFLE,
        max_samples_per_sequence=None,
        task_encoder=Encoder(),
    )
    loader = get_loader(dataset, watchdog_timeout_seconds=None)
    loader.pin_memory = False
    yield iter(loader), None


@contextmanager
def webdataset(case: Case, folder: Path) -> Iterator[tuple[Iterator[Any], None]]:
    """Open webdataset's pipeline in this process."""
    import webdataset as wds

    names = ["latent.npy", "json", *(["text.npy"] if case.text is not None else [])]

    def encode(parts: tuple[Any, ...]) -> tuple[Any, ...]:
        return _patches(parts[0], case.patch), parts[1]["label"], *map(torch.as_tensor, parts[2:])

    def batch(samples: list[tuple[Any, ...]]) -> tuple[Any, ...]:
        tokens, labels, *texts = zip(*samples)
        return torch.cat(tokens), torch.tensor(labels), *(torch.cat(text) for text in texts)

    urls = sorted(map(str, folder.glob("*.tar")))
    samples = wds.WebDataset(urls, shardshuffle=len(urls)).repeat().shuffle(SHUFFLE).decode().to_tuple(*names)
    yield iter(samples.map(encode).batched(case.batch, collation_fn=batch)), None


LOADERS: dict[str, Any] = {OURS: ours, PLAIN: plain_energon, WEBDATASET: webdataset}


def process_seconds() -> float:
    """Return the processor time of this process and of all living processes below it, all threads, in seconds."""
    return time.process_time() + sum(map(_seconds_below, _children("self")))


def _children(process: str) -> list[str]:
    return [
        child for task in Path(f"/proc/{process}/task").iterdir() for child in (task / "children").read_text().split()
    ]


def _seconds_below(process: str) -> float:
    """Return the processor time of a process and of all below it."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    seconds = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return seconds + sum(map(_seconds_below, _children(process)))


def read(name: str, case: Case, folder: Path, batches: int) -> Read:
    """Start a loader and read some micro-batches; a loader that can save does it ten times afterwards."""
    with LOADERS[name](case, folder) as (loader, save):
        for _ in islice(loader, 2 + SHUFFLE * WORKERS // case.batch):
            pass
        began, worked = time.perf_counter(), process_seconds()
        for _ in islice(loader, batches):
            pass
        seconds, process = time.perf_counter() - began, process_seconds() - worked
        saving = []
        for _ in range(0 if save is None else 10):
            next(loader)
            began = time.perf_counter()
            save()
            saving.append(time.perf_counter() - began)
    gc.collect()
    return Read(batches * case.batch, seconds, process, saving)


def measure(name: str, folder: Path, rounds: int) -> list[dict[str, Any]]:
    """Read the samples of a case with each loader in turn; return a row for each."""
    case = CASES[name]
    folder = write(case, folder / name.replace(" ", "_"))
    reads_by_loader: dict[str, list[Read]] = {loader: [] for loader in LOADERS}
    for number in range(rounds + 1):
        for loader, reads in reads_by_loader.items():
            result = read(loader, case, folder, case.samples // case.batch // 2)
            if number:  # the first round brings imports and the page cache
                reads.append(result)
    rows = []
    for loader, reads in reads_by_loader.items():
        # Other work on the machine only makes a loader slower: the best round is the nearest to the truth.
        rows.append(
            {
                "samples": name,
                "loader": loader,
                "process_ms": 1000 * min(r.process_seconds / r.samples for r in reads),
                "samples_per_s": max(r.samples / r.seconds for r in reads),
                "faster": median(
                    (a.process_seconds / a.samples) / (b.process_seconds / b.samples)
                    for a, b in zip(reads, reads_by_loader[OURS])
                ),
                "faster_wall": median(
                    (a.seconds / a.samples) / (b.seconds / b.samples) for a, b in zip(reads, reads_by_loader[OURS])
                ),
                "save_ms": [1000 * s for r in reads for s in r.saving],
            }
        )
    return rows


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the rows as Markdown."""
    lines = [
        "| samples | loader | process ms per sample | samples/s | ours is faster: process time | wall | saving, ms |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in rows:
        saving = f"{median(row['save_ms']):.1f}, at most {max(row['save_ms']):.1f}" if row["save_ms"] else ""
        lines.append(
            f"| {row['samples']} | {row['loader']} | {row['process_ms']:.2f} | {row['samples_per_s']:,.0f} | "
            f"{row['faster']:.1f} | {row['faster_wall']:.1f} | {saving} |"
        )
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.loader", description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=5, help="how often each loader reads (5)")
    parser.add_argument("--samples", nargs="+", choices=CASES, default=list(CASES), help="what to read (all)")
    parser.add_argument("--out", type=Path, help="write the rows as JSON")
    args = parser.parse_args(argv)
    os.environ["TQDM_DISABLE"] = "1"
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="dit-loader-") as folder:
        rows = [row for name in args.samples for row in measure(name, Path(folder), args.rounds)]
    echo(table(rows))
    if args.out:
        args.out.write_text(json.dumps(rows, indent=1), encoding="utf-8")
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(main())
