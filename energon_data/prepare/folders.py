"""The files of a user's folder, with their captions, classes and metadata from the usual conventions.

    cats/1.jpg  cats/1.txt                 a caption next to each file (.txt, .caption), or a .json object with more
    cats/1.jpg  dogs/7.png                 one folder per class (`labels`)
    10_sks dog/1.jpg                       repeated 10 times; caption "sks dog" if it has none (`repeats`)
    metadata.jsonl  .csv  .parquet         one row per file
    edited/1.png  originals/1.jpg          each edited from the pictures of its name, one in each folder of originals,
                                           or from those that `reference` in its row names

See `energon_data.prepare.lists` for the lists.
"""

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple, Optional

from dit.errors import ConfigError, DataError
from dit.terminal import counted
from energon_data.media_files import PICTURES, VIDEOS
from energon_data.prepare import walk
from energon_data.prepare.lists import LISTS, Rows, find_list, read_list
from energon_data.prepare.sources import (
    Source,
    captions_of,
    class_of,
    read_file,
    read_text,
    scalars_of,
    span_of,
)
from energon_data.prepare.walk import COMPANIONS, Skipped
from energon_data.samples import REFERENCE, SampleError, read_object

MAX_REPEATS = 1000


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One file of a folder; small, because a folder may have millions of files.

    Attributes:
        name: path within the folder, with `/`.
        size: bytes; -1 if the file does not exist.
        companions: name, size and time of each of its `COMPANIONS`; empty if a list has the rows.
        repeats: number of reads in one pass over the data.
        caption: of its folder, for a file without one.
        references: for each picture that it is edited from, that file in another folder, or several that could be it;
            empty if there is none.
    """

    name: str
    size: int
    mtime_ns: int = 0
    companions: tuple[tuple[str, int, int], ...] = ()
    label: Optional[int] = None
    row: Optional[dict[str, Any]] = None
    repeats: int = 1
    caption: Optional[str] = None
    references: tuple[tuple["Entry", ...], ...] = ()

    @property
    def group(self) -> str:
        """Name of the first folder below the user's folder; empty for a file directly in the user's folder."""
        return self.name.rpartition("/")[0].partition("/")[0]

    @property
    def stamp(self) -> list[Any]:
        """Values by which a resumed preparation detects a changed file, caption or metadata."""
        references = [value for files in self.references for file in files for value in file.stamp]
        return [self.name, self.size, self.mtime_ns, *self.companions, *references]

    def source(self, folder: Path, *, follow_links: bool = False, references: Sequence[Path] = ()) -> Source:
        """Read the caption and metadata next to the file.

        Args:
            references: folders of `references`; the last one has all further pictures.
        """
        path, root = folder / self.name, None if follow_links else folder
        row = dict(self.row) if self.row is not None else self._read_companions(folder, root)
        is_still = walk.extension_of(self.name) in PICTURES - {"gif"}
        originals = [self._original(i, references, row, root) for i in range(len(self.references))]
        label = row.get("label") if self.label is None else self.label
        return Source(
            name=self.name,
            read=lambda: self._read(path, root),
            captions=captions_of(row) or (() if self.caption is None else (self.caption,)),
            label=class_of(label),
            metadata=scalars_of(row),
            span=None if is_still else span_of(row),
            repeats=self.repeats,
            references=tuple(originals),
        )

    def _original(
        self, number: int, folders: Sequence[Path], row: dict[str, Any], root: Optional[Path]
    ) -> Callable[[], bytes]:
        """Return a function that reads one of the pictures that the file is edited from."""
        folder, files = folders[min(number, len(folders) - 1)], self.references[number]
        if not files:
            named = names_of_references(row)
            description = f"called {named[number]}" if named else "of its name"
            raise SampleError("no_reference", f"--reference {folder} has no picture {description}")
        if len(files) > 1:
            names = ", ".join(file.name for file in files)
            raise SampleError(
                "no_reference", f"--reference {folder} has {names}; name one of them as `reference` in a list"
            )
        return partial(files[0]._read, folder / files[0].name, root and folder)

    def _read(self, path: Path, root: Optional[Path]) -> bytes:
        if self.size < 0 and not os.path.lexists(path):
            raise SampleError("not_a_file", "the list names it, and the folder has no such file")
        return read_file(path, root)

    def _read_companions(self, folder: Path, root: Optional[Path]) -> dict[str, Any]:
        row: dict[str, Any] = {}
        for name, _, _ in self.companions:
            data = read_file((folder / self.name).with_name(name), root)
            if name.lower().endswith(".json"):
                row |= read_object(data, name)
            elif caption := read_text(data, name):
                row |= {"captions": None, "caption": caption}
        return row


class Listing(NamedTuple):
    """The files of a folder."""

    entries: list[Entry]
    classes: list[str]
    skipped: list[Skipped]
    list_file: Optional[Path] = None


def list_folder(
    folder: Path,
    extensions: frozenset[str],
    *,
    labels: bool = False,
    repeats: bool = False,
    list_file: Optional[Path] = None,
    follow_links: bool = False,
    references: Sequence[Path] = (),
) -> Listing:
    """List the files of a folder and its subfolders, sorted by name.

    Args:
        labels: the first level of folders are classes, numbered by name.
        repeats: the first level of folders are called `N_NAME`.
        list_file: a list of files, see `energon_data.prepare.lists`; None for that of the folder, if it has one.
        follow_links: also list linked folders, and accept a list of files that is a link.
        references: folders with the pictures that those of `folder` are edited from.
    """
    if not folder.is_dir():
        hint = "; `prepare huggingface` reads parquet files" if folder.suffix == ".parquet" else ""
        raise ConfigError(f"{folder} is not a folder; --in names the folder with the files{hint}")
    list_file = find_list(folder, list_file, follow_links=follow_links)
    entries, skipped = _walk(folder, extensions, follow_links)
    if list_file is not None:
        rows = read_list(list_file, [entry.name for entry in entries])
        entries, skipped = _listed(entries, skipped, rows, list_file)
    skipped.sort()
    if not entries:
        why = f"; {walk.reasons(skipped)}" if skipped else ""
        hint = "; `prepare huggingface` reads .parquet" if any(s.name.endswith(".parquet") for s in skipped) else ""
        endings = ", ".join(sorted(extensions))
        raise DataError(f"{folder} and its subfolders have no file that ends in {endings}{why}{hint}")
    if references:
        entries = _with_references(entries, folder, references, follow_links)
    if labels:
        classes = _groups(folder, entries, "class folder")
        number = {name: i for i, name in enumerate(classes)}
        return Listing([replace(entry, label=number[entry.group]) for entry in entries], classes, skipped, list_file)
    if repeats:
        counts = {name: _repeats(folder / name) for name in _groups(folder, entries, "folder N_NAME")}
        entries = [replace(entry, repeats=counts[entry.group][0], caption=counts[entry.group][1]) for entry in entries]
    return Listing(entries, [], skipped, list_file)


def _listed(
    entries: Sequence[Entry], skipped: Sequence[Skipped], rows: Rows, list_file: Path
) -> tuple[list[Entry], list[Skipped]]:
    """Return the files in a list, sorted by name, and the other files of the folder."""
    existing = {entry.name: entry for entry in entries}
    unlisted = f"not in {list_file.name}; only files that it names are read"
    not_used = [skip for skip in skipped if skip.reason != "no_picture" and skip.name not in rows]
    not_used += [Skipped(name, "not_listed", unlisted) for name in existing if name not in rows]
    # Listed files that do not exist are included, so that they count as samples that cannot be read.
    entries = [
        replace(existing.get(name, Entry(name=name, size=-1)), row=row, companions=())
        for name, of_file in sorted(rows.items())
        for row in of_file
    ]
    return entries, not_used


def names_of_references(row: Mapping[str, Any]) -> Optional[list[str]]:
    """Return the pictures that a row of a list names, one or a list of them; None if it names none."""
    names = row.get(REFERENCE)
    return None if names is None else [str(name) for name in (names if isinstance(names, list) else [names])]


def _with_references(
    entries: Sequence[Entry], folder: Path, references: Sequence[Path], follow_links: bool
) -> list[Entry]:
    """Return the files with the pictures that they are edited from.

    The first picture must exist, and all that a row names. Other files may lack the pictures of the last folders.
    """
    folders = [_originals(place, folder, follow_links) for place in references]

    def references_of(entry: Entry) -> tuple[tuple[Entry, ...], ...]:
        names = names_of_references(entry.row or {})
        if names:
            pictures = [folders[min(i, len(folders) - 1)].by_name for i in range(len(names))]
            return tuple(of.get(walk.composed(str(PurePosixPath(name))), ()) for of, name in zip(pictures, names))
        name = walk.composed(entry.name)
        files = [
            originals.by_name.get(name, originals.by_stem.get(walk.stem_of(name), ())) if originals.by_stem else ()
            for originals in folders
        ]
        while len(files) > 1 and not files[-1]:
            files.pop()
        return tuple(files)

    return [replace(entry, references=references_of(entry)) for entry in entries]


class _Originals(NamedTuple):
    """The pictures of a folder of `--reference`.

    Attributes:
        by_stem: empty if it is also the folder of the edited pictures, because a picture is not its own original.
    """

    by_name: dict[str, tuple[Entry, ...]]
    by_stem: dict[str, tuple[Entry, ...]]


def _originals(place: Path, edited: Path, follow_links: bool) -> _Originals:
    if not place.is_dir():
        raise ConfigError(f"--reference {place} is not a folder; name the one with the pictures before the edit")
    pictures, _ = _walk(place, PICTURES, follow_links)
    by_name: dict[str, tuple[Entry, ...]] = {walk.composed(picture.name): (picture,) for picture in pictures}
    by_stem: dict[str, tuple[Entry, ...]] = {}
    pairs = () if place.samefile(edited) else by_name.items()
    for name, picture in pairs:
        by_stem[walk.stem_of(name)] = (*by_stem.get(walk.stem_of(name), ()), *picture)
    return _Originals(by_name, by_stem)


def _groups(folder: Path, entries: Sequence[Entry], kind: str) -> list[str]:
    outside = [entry.name for entry in entries if "/" not in entry.name]
    if outside:
        raise DataError(
            f"{counted(len(outside), 'file')} in no {kind}, such as {folder / outside[0]}; move them into folders"
        )
    return sorted({entry.group for entry in entries})


def _repeats(folder: Path) -> tuple[int, str]:
    """Parse the repeats and the caption from the name of a folder."""
    match = re.fullmatch(r"(\d+)_(.+)", folder.name)
    if match is None or not 1 <= int(match[1]) <= MAX_REPEATS:
        raise DataError(
            f"{folder} is not called N_NAME with N from 1 to {MAX_REPEATS}, such as 10_sks dog; rename it, or "
            "leave out --repeats"
        )
    return int(match[1]), match[2]


def _walk(folder: Path, extensions: frozenset[str], follow_links: bool) -> tuple[list[Entry], list[Skipped]]:
    """Return every file with these extensions by name, and the other files."""
    entries: list[Entry] = []
    skipped: list[Skipped] = []
    for place, names in walk.folders_below(folder, follow_links, skipped):
        companions: dict[tuple[str, str], str] = {}
        for name in reversed(names):  # of cat.txt and cat.TXT, the first one counts
            if (extension := walk.extension_of(name)) in COMPANIONS:
                companions.setdefault((walk.stem_of(name), extension), name)
        # A companion with exactly the name of a file precedes one with other accents.
        companions = {(walk.composed(stem), ending): name for (stem, ending), name in companions.items()} | companions
        media = {walk.composed(walk.stem_of(name)) for name in names if walk.extension_of(name) in PICTURES | VIDEOS}
        for name in names:
            path, stem = place / name, walk.stem_of(name)
            full_name = path.relative_to(folder).as_posix()
            if full_name in LISTS or (walk.extension_of(name) in COMPANIONS and walk.composed(stem) in media):
                continue
            if (why := walk.not_read(path, extensions)) is not None:
                skipped.append(Skipped(full_name, *why))
                continue
            companion_names = [
                companions.get((stem, extension), companions.get((walk.composed(stem), extension)))
                for extension in COMPANIONS
            ]
            files = tuple(
                file for companion in companion_names if companion and (file := walk.seen_file(place / companion))
            )
            about = path.stat()
            entries.append(Entry(name=full_name, size=about.st_size, mtime_ns=about.st_mtime_ns, companions=files))
    return sorted(entries, key=lambda entry: entry.name), skipped
