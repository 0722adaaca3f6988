"""Samples of a WebDataset, read member by member, in the order of each archive.

The name of a sample consists of the archive's path within the folder and the name in the archive.
"""

import os
import re
import tarfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Optional

from dit.errors import ConfigError, DataError
from dit.safe_files import open_binary
from energon_data import tar_index
from energon_data.prepare import walk
from energon_data.prepare.sources import (
    MAX_FILE_BYTES,
    Source,
    captions_of,
    class_of,
    leaves,
    read_text,
    scalars_of,
)
from energon_data.prepare.walk import Skipped
from energon_data.samples import SampleError, read_object

_PACKED = re.compile(r"\.(tar\.(gz|bz2?|xz|zst|lz4)|t[bgx]z2?)$", re.IGNORECASE)
_COMPRESSIONS = {b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"\x28\xb5\x2f\xfd": "zstd"}
"""Compressions of files by their first bytes."""


def list_tars(folder: Path, *, follow_links: bool = False) -> tuple[list[Path], list[Skipped]]:
    """List the tar files of a WebDataset, sorted, and links out of the folder that are not read."""
    if folder.is_file():
        return [folder], []
    if not folder.is_dir():
        raise ConfigError(f"{folder} does not exist; --in names a folder of .tar files, or one of them")
    skipped: list[Skipped] = []
    paths = [place / name for place, names in walk.folders_below(folder, follow_links, skipped) for name in names]
    tars = sorted(path for path in paths if path.suffix.lower() == ".tar" and path.is_file())
    unread = "compressed archives are not read; uncompress it"
    skipped += [
        Skipped(name_within(path, folder), "other_format", unread) for path in paths if _PACKED.search(path.name)
    ]
    outside = [path for path in tars if not follow_links and leaves(path, folder)]
    escape = f"a link to a file outside of {folder}; {walk.FOLLOW}"
    skipped += [Skipped(name_within(path, folder), "path_escape", escape) for path in outside]
    tars = [path for path in tars if path not in outside]
    if not tars:
        links = f" ({walk.reasons(skipped)})" if skipped else ""
        raise DataError(f"{folder} has no .tar file{links}; for single pictures use `prepare images`")
    return tars, skipped


def name_within(path: Path, root: Path) -> str:
    """Return a file's path within a folder, with `/`; its full path outside the folder, its name if it is `root`."""
    if path == root:
        return path.name
    return path.relative_to(root).as_posix() if path.is_relative_to(root) else path.as_posix()


def read_tar(path: Path, *, extensions: frozenset[str], root: Path) -> Iterator[Source | tuple[str, SampleError]]:
    """Read the samples of one tar file in its order; members of a sample share the name before the first dot.

    The rest of the name is the part: `photo.png` has the part `png`. A picture or video whose part has further dots
    (`photo.v2.png`) is used if the sample has no other.

    Args:
        root: folder that the archive's name is relative to, or the archive, which then has no folder.

    Yields:
        A sample, or the name and reason of an unusable one. A truncated archive ends with such a pair, a complete one
        with those of the first member of each extension that is not read.
    """
    where = name_within(path, root)
    names: set[str] = set()
    for name, content in _members_by_sample(path, where, extensions | {*walk.COMPANIONS, "cls"}):
        if isinstance(content, SampleError):
            yield name, content
            continue
        source = _from_parts(name, content, extensions)
        if isinstance(source, Source):
            if source.name in names:
                yield source.name, SampleError("duplicate", "the archive has this name twice; the first sample is used")
                continue
            names.add(source.name)
        yield source


def _members_by_sample(
    path: Path, where: str, extensions: frozenset[str]
) -> Iterator[tuple[str, dict[str, bytes] | SampleError]]:
    """Yield the name of each sample of a tar file after `where/`, and its parts or why it cannot be used."""
    name, parts, unread = where, dict[str, bytes](), dict[str, str]()
    try:
        with open_binary(path) as archive:
            begins = archive.read(8)
            if kind := next((kind for start, kind in _COMPRESSIONS.items() if begins.startswith(start)), None):
                yield name, SampleError("bad_tar", f"compressed by {kind}; uncompress it")
                return
            for member, read in tar_index.read_tar(archive):
                place = PurePosixPath(member.name)
                stem, _, part = place.name.partition(".")
                if not stem:
                    continue
                sample, part = f"{where}/{place.with_name(stem)}", part.lower()
                if (extension := part.rpartition(".")[2]) not in extensions:
                    unread.setdefault(extension, f"{where}/{member.name}")
                    continue
                if parts and (sample != name or part in parts):
                    yield name, parts
                    parts = {}
                name = sample
                if member.size > MAX_FILE_BYTES:
                    yield f"{where}/{member.name}", SampleError("too_large", f"{member.size} bytes")
                    continue
                parts[part] = read()
        if not _has_end(path):
            raise tarfile.ReadError("it has no end marker")
    except (tarfile.TarError, OSError, EOFError, ValueError) as error:
        yield name, SampleError("bad_tar", f"the archive is cut short or damaged here: {error}")
        return
    if parts:
        yield name, parts
    for extension, first in unread.items():
        detail = f"members with the extension {extension!r} are not read; this is the first of the archive"
        yield first, SampleError("other_format", detail)


def _has_end(path: Path) -> bool:
    """Return whether an archive ends with two empty blocks; an archive truncated between members does not."""
    with open_binary(path) as file:
        file.seek(-min(1024, path.stat().st_size), os.SEEK_END)
        return file.read() == bytes(1024)


def _from_parts(where: str, parts: Mapping[str, bytes], extensions: Iterable[str]) -> Source | tuple[str, SampleError]:
    media = [part for part in parts if part in extensions]
    media = media or [part for part in parts if part.rpartition(".")[2] in extensions]
    try:
        if len(media) != 1:
            raise SampleError(
                "missing_part",
                f"{len(media)} pictures or videos among {sorted(parts)}, expected one; members that share the name "
                "before the first dot are one sample",
            )
        version = media[0].rpartition(".")[0]

        def companion(kind: str) -> Optional[bytes]:
            names = (f"{version}.{kind}", kind, f"{media[0]}.{kind}")
            return next((parts[name] for name in names if name in parts), None)

        described, number = companion("json"), companion("cls")
        row = read_object(described, "json") if described is not None else {}
        for kind in ("caption", "txt"):
            if (text := companion(kind)) is not None and (caption := read_text(text, kind)):
                row |= {"captions": None, "caption": caption}
        if number is not None:
            row["label"] = read_text(number, "cls")
        data = parts[media[0]]
        return Source(
            name=f"{where}.{media[0]}",
            read=lambda: data,
            captions=captions_of(row),
            label=class_of(row.get("label")),
            metadata=scalars_of(row),
        )
    except SampleError as error:
        return where, error
