"""Preparation of pictures for tests, and access to the shards and samples that it writes."""

import io
import json
import tarfile
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
from PIL import Image

from energon_data.cookers import cook_clip
from energon_data.decoder import decode_sample
from energon_data.prepare.__main__ import main
from energon_data.prepare.media import Options
from energon_data.prepare.pictures import Fit
from energon_data.prepare.preparation import Preparation


def noise(width: int, height: int, seed: int = 0) -> Image.Image:
    values = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    return Image.fromarray(values)


def as_file(picture: Image.Image, kind: str = "PNG", **options) -> bytes:
    buffer = io.BytesIO()
    picture.save(buffer, kind, **options)
    return buffer.getvalue()


def png(shade: int, width: int = 16) -> bytes:
    return as_file(Image.new("RGB", (width, 16), (shade, 0, 0)))


def folder_of(folder: Path, files: Mapping[str, bytes | str]) -> Path:
    """Make a folder with files, in subfolders too."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    return folder


def folder_of_pictures(folder: Path, count: int = 12) -> Path:
    pictures = {f"p{i:02d}.png": as_file(noise(16 + 16 * (i % 2), 32, i)) for i in range(count)}
    return folder_of(folder, pictures | {f"p{i:02d}.txt": f"noise {i}\n" for i in range(count)})


def write_list(folder: Path, rows: Iterable[object]) -> Path:
    """Write the list `metadata.jsonl` of a folder."""
    return folder_of(folder, {"metadata.jsonl": "\n".join(map(json.dumps, rows))})


def prepare(source: Path, out: Path, command: str = "images", processes: int = 1, force: bool = False, **kwargs):
    options = kwargs.pop("options", Options(fit=Fit(multiple_of=16)))
    arguments = {"samples_per_shard": 5, "validation": 0.3, **kwargs}
    return Preparation.of(command, source, out, options, **arguments).run(processes=processes, force=force)


def run(source: object, out: Path, *words: str, command: str = "images") -> int:
    """Run a command of `energon_data.prepare` without held-out samples, and return its exit code."""
    return main([command, "--in", str(source), "--out", str(out), "--validation", "0", "--processes", "1", *words])


def described(source: object, out: Path, *words: str, command: str = "images") -> dict:
    """Run a command and return its `dataset.json`."""
    assert run(source, out, *words, command=command) == 0
    return description(out)


def description(out: Path) -> dict:
    return json.loads((out / "dataset.json").read_text())


def outcomes(out: Path) -> dict[str, str]:
    """Return the reason of every skipped file, from `skipped.jsonl`."""
    return {line["file"]: line["reason"] for line in map(json.loads, (out / "skipped.jsonl").open())}


def metadata_of(folder: Path) -> dict[str, dict]:
    """Return the metadata of each sample in the shards, by its source."""
    return {about["source"]: about for _, about, _, _ in samples(folder)}


def write_tar(path: Path, *members: tuple[str, bytes]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as archive:
        for name, data in members:
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return path


def shards(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.glob("*.tar"))}


def samples(folder: Path):
    """Yield metadata and cooked clip of every sample, as training reads them."""
    for path in sorted(folder.glob("*.tar")):
        parts: dict[str, dict[str, bytes]] = {}
        with tarfile.open(path) as archive:
            for member in archive:
                key, _, part = member.name.partition(".")
                parts.setdefault(key, {})[part] = archive.extractfile(member).read()
        for key, raw in parts.items():
            decoded = decode_sample(key, raw, require_checksums=True)
            decoded |= {"__key__": key, "__restore_key__": (), "__shard__": path.name}
            yield path.name.partition("-")[0], decoded["json"], cook_clip(decoded, references=True), raw
