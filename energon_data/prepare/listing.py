"""What a user's folder holds: files with their captions, classes and metadata, from the usual conventions.

    cats/1.jpg  cats/1.txt                 a caption beside each file (.txt), or a .json object with `caption` and more
    cats/1.jpg  dogs/7.png                 one folder per class (`labels=True`)
    metadata.jsonl  .csv  .parquet         one row per file: `file_name`, `caption` (or `text`, `prompt`), others

A WebDataset of tar files is a listing, too: its samples are read member by member, in the order of the archive. A
sample is called by the archive's path within the folder and its own name there.
"""

import csv
import errno
import hashlib
import io
import os
import re
import tarfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple, Optional, Protocol, TypeVar

from dit.errors import ConfigError, DataError
from dit.safe_files import open_binary, parse_json, read_bytes
from energon_data import tar_index
from energon_data.media_files import PICTURES, VIDEOS
from energon_data.prepare import walk
from energon_data.prepare.walk import COMPANIONS, FOLLOW, Skipped
from energon_data.samples import SampleError

CAPTION_NAMES = ("caption", "text", "prompt")
LISTS = ("metadata.jsonl", "metadata.csv", "metadata.parquet")
MAX_FILE_BYTES = 8 << 30
_TEXTS = frozenset({"file_name", *CAPTION_NAMES})  # also where they spell a number
_RESERVED = frozenset({"crc32", "file_name", "label", *CAPTION_NAMES})


@dataclass(frozen=True, kw_only=True)
class Source:
    """One picture or video before it is decoded.

    Attributes:
        name: path within the user's folder or archive, for messages and as the address of the sample.
        read: returns the bytes of the file.
        captions: in the order given; empty if there is none.
        label: class number.
        metadata: further scalars that go with the sample.
    """

    name: str
    read: Callable[[], bytes]
    captions: tuple[str, ...] = ()
    label: Optional[int] = None
    metadata: Mapping[str, Any] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """The sample's name inside a shard: readable, without dots, and of its own for every path."""
        slug = re.sub(r"[^A-Za-z0-9]+", "-", str(PurePosixPath(self.name).with_suffix(""))).strip("-")[-40:]
        return f"{slug}-{hashlib.sha256(self.name.encode()).hexdigest()[:16]}"

    @property
    def extension(self) -> str:
        """Last extension of the name, in lower case, without the dot."""
        return self.name.rpartition(".")[2].lower()


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One file of a folder, small enough to be listed by the million; `source` opens what lies beside it.

    Attributes:
        name: path within the folder, with `/`.
        size: bytes; -1 if the file does not exist.
        mtime_ns: when it was last written, nanoseconds since the epoch.
        beside: name, size and time of each of its `COMPANIONS`; none are looked for where a list has the rows.
        row: of `metadata.jsonl`, `.csv` or `.parquet`, None if there is no such file.
    """

    name: str
    size: int
    mtime_ns: int = 0
    beside: tuple[tuple[str, int, int], ...] = ()
    label: Optional[int] = None
    row: Optional[dict[str, Any]] = None

    @property
    def stamp(self) -> list[Any]:
        """By which an interrupted preparation notices another file, caption or metadata under an old name."""
        return [self.name, self.size, self.mtime_ns, *self.beside]

    def source(self, folder: Path, *, follow_links: bool = False) -> Source:
        """Read the caption and metadata that lie beside the file.

        Args:
            follow_links: also read files outside of the folder to which links lead.

        Raises:
            SampleError: they are damaged, or a link that leaves the folder.
        """
        path, root = folder / self.name, None if follow_links else folder
        row = dict(self.row) if self.row is not None else self._beside(folder, root)
        captions = captions_of(row)
        metadata = scalars_of(row)
        label = row.get("label") if self.label is None else self.label
        return Source(
            name=self.name,
            read=lambda: _read(path, root),
            captions=captions,
            label=class_of(label),
            metadata=metadata,
        )

    def _beside(self, folder: Path, root: Optional[Path]) -> dict[str, Any]:
        """Return what the files beside this one say."""
        found: dict[str, Any] = {}
        for name, _, _ in self.beside:
            data = _read((folder / self.name).with_name(name), root)
            found |= read_object(data, name) if name.lower().endswith(".json") else {"caption": read_text(data, name)}
        return found


def scalars_of(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of a row that go along with the sample."""
    return {k: v for k, v in row.items() if k not in _RESERVED and isinstance(v, (str, int, float, bool))}


def class_of(value: Any) -> Optional[int]:
    """Return a class number.

    Raises:
        SampleError: it is none.
    """
    if value is None:
        return None
    if isinstance(value, str) and value.strip().isdecimal():
        return int(value)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise SampleError("metadata", f"label is {value!r}, not a whole number from 0")
    return value


def _leaves(path: Path, root: Path) -> bool:
    """Return whether links lead from a path below `root` to a file outside of it."""
    return not Path(os.path.realpath(path)).is_relative_to(os.path.realpath(root))


def _read(path: Path, root: Optional[Path]) -> bytes:
    """Return the bytes of a file, which links may not lead out of `root`."""
    try:
        if root is not None and _leaves(path, root):
            raise SampleError("path_escape", f"{path.name} is a link to a file outside of {root}; {FOLLOW}")
        return read_bytes(path, MAX_FILE_BYTES)
    except OSError as error:
        reason = "too_large" if error.errno == errno.EFBIG else "unreadable"
        raise SampleError(reason, f"cannot read: {error}") from error


def read_text(data: bytes, what: str) -> str:
    """Return the text of a file called `what`.

    Raises:
        SampleError: it is not UTF-8.
    """
    try:
        return data.decode("utf-8-sig").strip()
    except UnicodeDecodeError as error:
        raise SampleError("bad_caption", f"{what} is not UTF-8: {error}") from error


def read_object(data: bytes, what: str) -> dict[str, Any]:
    """Return the JSON object of a file called `what`.

    Raises:
        SampleError: it is none.
    """
    try:
        value = parse_json(data)
    except ValueError as error:
        raise SampleError("bad_json", f"{what} is no JSON: {error}") from error
    if not isinstance(value, dict):
        raise SampleError("bad_json", f"{what} is a {type(value).__name__}, not an object")
    return value


def captions_of(row: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the captions of a row: one string or a list of them, under the first of `CAPTION_NAMES` that is there.

    Raises:
        SampleError: it is neither.
    """
    for name in CAPTION_NAMES:
        value = row.get(name)
        if value is None:
            continue
        several = value if isinstance(value, list) else [value]
        if not all(isinstance(text, str) for text in several):
            raise SampleError("bad_caption", f"{name} is {value!r:.80}, neither text nor a list of texts")
        return tuple(text.strip() for text in several if text.strip())
    return ()


class Listing(NamedTuple):
    """The files of a folder.

    Attributes:
        entries: those that are read, by name.
        classes: names of the classes; empty without labels.
        skipped: the others.
    """

    entries: list[Entry]
    classes: list[str]
    skipped: list[Skipped]


def list_folder(
    folder: Path, extensions: frozenset[str], *, labels: bool = False, follow_links: bool = False
) -> Listing:
    """List the files of a folder and of those below it, sorted by name.

    Args:
        extensions: which files are samples.
        labels: the folders right below are classes, numbered by name.
        follow_links: also list folders to which links lead, and accept a list of files that is a link.

    Raises:
        ConfigError: the folder does not exist.
        DataError: it has no such file, one lies outside of every class, or a list of files is damaged.
    """
    if not folder.is_dir():
        raise ConfigError(f"{folder} is no folder; --in names the folder that holds the files")
    rows = _rows(folder, follow_links)
    entries, skipped = _walk(folder, extensions, follow_links)
    if rows is not None:
        known = {entry.name: entry for entry in entries}
        listed = next(name for name in LISTS if (folder / name).is_file())
        skipped = [skip for skip in skipped if skip.reason != "no_picture" and skip.name not in rows]
        unlisted = SampleError("not_listed", f"not in {listed}")
        skipped += [Skipped.of(name, unlisted) for name in known if name not in rows]
        # What the list names and the folder lacks stays in: it is counted as a sample that cannot be read.
        entries = [
            replace(known.get(name, Entry(name=name, size=-1)), row=row, beside=())
            for name, row in sorted(rows.items())
        ]
    skipped.sort()
    if not entries:
        why = f"; {walk.reasons(skipped)}" if skipped else ""
        endings = ", ".join(sorted(extensions))
        raise DataError(f"{folder} holds no file that ends in {endings}, also not in the folders below it{why}")
    if not labels:
        return Listing(entries, [], skipped)
    classes = sorted({entry.name.partition("/")[0] for entry in entries if "/" in entry.name})
    outside = [entry.name for entry in entries if "/" not in entry.name]
    if outside:
        raise DataError(f"{folder / outside[0]} lies in no class folder, and {len(outside) - 1} other files; move them")
    number = {name: i for i, name in enumerate(classes)}
    labelled = [replace(entry, label=number[entry.name.partition("/")[0]]) for entry in entries]
    return Listing(labelled, classes, skipped)


def list_stamp(folder: Path) -> Optional[list[str]]:
    """Return name and SHA-256 of the list of files that a folder has, None without one."""
    for path in (folder / name for name in LISTS):
        if path.is_file():
            with open_binary(path) as file:
                return [path.name, hashlib.file_digest(file, "sha256").hexdigest()]
    return None


def _walk(folder: Path, extensions: frozenset[str], follow_links: bool) -> tuple[list[Entry], list[Skipped]]:
    """Return every file of these kinds by name, and what else lies in the folder."""
    entries: list[Entry] = []
    skipped: list[Skipped] = []
    for place, names in walk.folders_below(folder, follow_links, skipped):
        companions: dict[tuple[str, str], str] = {}
        for name in reversed(names):  # of cat.txt and cat.TXT the first
            if (extension := walk.extension_of(name)) in COMPANIONS:
                companions.setdefault((walk.stem_of(name), extension), name)
        media = {walk.stem_of(name) for name in names if walk.extension_of(name) in PICTURES | VIDEOS}
        for name in names:
            path = place / name
            full_name = path.relative_to(folder).as_posix()
            if full_name in LISTS or (walk.extension_of(name) in COMPANIONS and walk.stem_of(name) in media):
                continue
            if (why := walk.not_read(path, extensions)) is not None:
                skipped.append(Skipped.of(full_name, why))
                continue
            names_beside = [companions.get((walk.stem_of(name), extension)) for extension in COMPANIONS]
            beside = tuple(
                seen for other in names_beside if other is not None and (seen := walk.seen_file(place / other))
            )
            about = path.stat()
            entries.append(Entry(name=full_name, size=about.st_size, mtime_ns=about.st_mtime_ns, beside=beside))
    return sorted(entries, key=lambda entry: entry.name), skipped


def _rows(folder: Path, follow_links: bool) -> Optional[dict[str, dict[str, Any]]]:
    """Return the rows of the first of `LISTS` by file name; None if the folder has none."""
    present = [folder / name for name in LISTS if (folder / name).is_file()]
    if not present:
        return None
    if not follow_links and _leaves(present[0], folder):
        raise DataError(f"{present[0]} is a link to a file outside of {folder}; {FOLLOW}")
    rows: dict[str, dict[str, Any]] = {}
    for number, row in enumerate(_parsed(present[0]), 1):
        name = row.get("file_name")
        if not isinstance(name, str) or not name:
            raise DataError(f"{present[0]}, row {number}: file_name is {name!r}; name a file relative to {folder}")
        parts = PurePosixPath(name).parts
        if name.startswith("/") or ".." in parts or "\\" in name:
            raise DataError(f"{present[0]}, row {number}: file_name {name!r} leaves the folder; name files inside it")
        name = str(PurePosixPath(name))
        if name in rows:
            raise DataError(f"{present[0]}, row {number}: {name!r} is listed twice; leave one row")
        rows[name] = row
    return rows


def _parsed(path: Path) -> Iterator[dict[str, Any]]:
    if path.suffix == ".parquet":
        yield from _parquet(path)
        return
    try:
        with io.TextIOWrapper(open_binary(path), encoding="utf-8-sig", newline="") as lines:
            if path.suffix == ".csv":
                for row in csv.DictReader(lines):
                    given = {k: v for k, v in row.items() if k is not None and v not in (None, "")}
                    yield {k: v if k in _TEXTS else _scalar(v) for k, v in given.items()}
                return
            for line in lines:
                if line.strip():
                    yield read_object(line.encode(), path.name)
    except (OSError, ValueError, csv.Error, SampleError) as error:
        detail = error.detail if isinstance(error, SampleError) else str(error)
        raise DataError(f"cannot read {path}: {detail}; correct the file") from error


def _parquet(path: Path) -> Iterator[dict[str, Any]]:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError as error:
        raise ConfigError(
            f"{path} needs pyarrow, which is not installed: pip install 'megatron-dit[parquet]'"
        ) from error
    try:
        for batch in parquet.ParquetFile(path).iter_batches():
            for row in batch.to_pylist():
                yield {name: value for name, value in row.items() if value is not None}
    except (OSError, ArrowException) as error:
        raise DataError(f"cannot read {path}: {error}; correct the file") from error


def _scalar(text: str) -> Any:
    """Return a CSV field as the number that it spells, else as text."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def list_tars(folder: Path, *, follow_links: bool = False) -> tuple[list[Path], list[Skipped]]:
    """List the tar files of a WebDataset, sorted, and links to folders that are not read.

    Raises:
        ConfigError: the path does not exist.
        DataError: there is none.
    """
    if folder.is_file():
        return [folder], []
    if not folder.is_dir():
        raise ConfigError(f"{folder} is neither a folder nor a file; --in names a folder of .tar files, or one of them")
    skipped: list[Skipped] = []
    paths = [place / name for place, names in walk.folders_below(folder, follow_links, skipped) for name in names]
    tars = sorted(path for path in paths if path.suffix == ".tar" and path.is_file())
    if not tars:
        links = f" ({walk.reasons(skipped)})" if skipped else ""
        raise DataError(f"{folder} holds no .tar file{links}; for single pictures use `prepare images`")
    return tars, skipped


def tar_stamp(path: Path) -> list[Any]:
    """Return path, size and time of an archive, by which an interrupted preparation notices another one."""
    about = path.stat()
    return [str(path), about.st_size, about.st_mtime_ns]


def name_within(path: Path, root: Path) -> str:
    """Return a file's path within a folder, with `/`; its full path if it lies elsewhere, its name if it is `root`."""
    if path == root:
        return path.name
    return path.relative_to(root).as_posix() if path.is_relative_to(root) else path.as_posix()


class _Named(Protocol):
    @property
    def name(self) -> str: ...


AnyNamed = TypeVar("AnyNamed", bound=_Named)


def first_of_each_name(
    sources: Iterable[AnyNamed | tuple[str, SampleError]],
) -> Iterator[AnyNamed | tuple[str, SampleError]]:
    """Yield the samples of an archive, but for a second one of a name its name and the reason `duplicate`."""
    known: set[str] = set()
    for source in sources:
        if not isinstance(source, tuple):
            if source.name in known:
                yield source.name, SampleError("duplicate", "the archive has this name twice; the first sample is kept")
                continue
            known.add(source.name)
        yield source


def read_tar(
    path: Path, extensions: frozenset[str], root: Optional[Path] = None
) -> Iterator[Source | tuple[str, SampleError]]:
    """Read the samples of one tar file in its order; members of a sample share the name before the first dot.

    The part that a member is of its sample follows that dot: `photo.png` is `png`. A picture or video whose part has
    further dots (`photo.v2.png`) is taken if the sample has no other.

    Args:
        root: folder within which the archive is named; its own by default.

    Yields:
        A sample, or the name and reason of one that cannot be used. A truncated archive ends with such a pair.
    """
    where = path.name if root is None else name_within(path, root)
    return first_of_each_name(_members_by_sample(path, where, extensions))


def _members_by_sample(
    path: Path, where: str, extensions: frozenset[str]
) -> Iterator[Source | tuple[str, SampleError]]:
    name, parts = "", dict[str, bytes]()
    try:
        with open_binary(path) as archive:
            for member, read in tar_index.read_tar(archive):
                place = PurePosixPath(member.name)
                if place.name.startswith("."):
                    continue
                stem, _, part = place.name.partition(".")
                sample, part = str(place.with_name(stem)), part.lower()
                if parts and (sample != name or part in parts):
                    yield _from_parts(f"{where}/{name}", parts, extensions)
                    parts = {}
                name = sample
                if part.rpartition(".")[2] in extensions | {"txt", "json", "cls"}:
                    if member.size > MAX_FILE_BYTES:
                        yield f"{where}/{member.name}", SampleError("too_large", f"{member.size} bytes")
                        continue
                    parts[part] = read()
        if not _has_end(path):
            raise tarfile.ReadError("it has no end marker")
    except (tarfile.TarError, OSError, EOFError, ValueError) as error:
        yield f"{where}/{name}", SampleError("bad_tar", f"the archive is cut short or damaged here: {error}")
        return
    if parts:
        yield _from_parts(f"{where}/{name}", parts, extensions)


def _has_end(path: Path) -> bool:
    """Tell whether an archive ends with two empty blocks; one that is cut between two members does not."""
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
                f"{len(media)} pictures or videos of {sorted(parts)}, wanted one; members that share the name before "
                "the first dot are one sample",
            )
        version = media[0].rpartition(".")[0]

        def companion(kind: str) -> Optional[bytes]:
            return parts.get(f"{version}.{kind}", parts.get(kind)) if version else parts.get(kind)

        described, text, number = companion("json"), companion("txt"), companion("cls")
        row = read_object(described, "json") if described is not None else {}
        if text is not None:
            row["caption"] = read_text(text, "txt")
        if number is not None:
            row["label"] = read_text(number, "cls")
        captions, label = captions_of(row), class_of(row.get("label"))
    except SampleError as error:
        return where, error
    data = parts[media[0]]
    metadata = scalars_of(row)
    return Source(name=f"{where}.{media[0]}", read=lambda: data, captions=captions, label=label, metadata=metadata)
