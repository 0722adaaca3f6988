"""Reader of samples in indexed tar shards: one read per sample; the parser verifies every tar header.

Energon's reader uses `tarfile` and a storage client, which take about half a millisecond per small sample; this reader
takes a few microseconds. `tarfile` reads samples that use tar extensions.
"""

import io
import os
import tarfile
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TypeVar

import numpy as np

from dit.errors import DataError
from dit.safe_files import open_binary, open_regular, read_bytes

if TYPE_CHECKING:
    from megatron.energon.flavors.webdataset.itar_reader import ShardInfosITarReader

Bytes = TypeVar("Bytes", bytes, memoryview)
BLOCK = 512
READ_ERROR = "__read_error__"
"""Name of the part with the reason why a sample could not be read."""

_OPEN_SHARDS = 32
_BLOCK_SAMPLES = 32  # consecutive samples, so that disks and file systems can read ahead
_LONGEST_HEADER = 1 << 20  # bytes of a long name or of a pax header
_LONG_HEADERS = (tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE, tarfile.GNUTYPE_LONGNAME,
                 tarfile.GNUTYPE_LONGLINK)  # fmt: skip


class UnusualTarError(Exception):
    """A member uses a tar extension that only `tarfile` reads."""


def parse_members(data: Bytes) -> list[tuple[str, Bytes]]:
    """Return name and content of the regular files in a section of a ustar archive; contents of views are views.

    Raises:
        ValueError: a header does not match its checksum, or the section ends inside a member.
        UnusualTarError: a member is not a plain file (long names, sparse files, links).
    """
    members = []
    at, end = 0, len(data)
    while at + BLOCK <= end:
        header = bytes(data[at : at + BLOCK])
        if not header.strip(b"\0"):
            break
        try:
            written = int(header[148:156].rstrip(b"\0 ") or b"-1", 8)
        except ValueError:
            written = -1
        if written != sum(header) - sum(header[148:156]) + 8 * 32:
            raise ValueError("a tar header does not match its checksum")
        if header[156:157] not in (b"0", b"\0") or header[124] & 0x80:
            raise UnusualTarError
        size = int(header[124:136].rstrip(b"\0 ") or b"0", 8)
        raw_name = header[:100].split(b"\0", 1)[0]
        if header[257:262] == b"ustar" and header[345]:
            raw_name = header[345:500].split(b"\0", 1)[0] + b"/" + raw_name
        name = utf8_name(raw_name)
        start = at + BLOCK
        if start + size > end:
            raise ValueError(f"the shard ends inside {name!r}")
        members.append((name, data[start : start + size]))
        at = start + -(-size // BLOCK) * BLOCK
    return members


def utf8_name(name: bytes | str) -> str:
    """Return the name of a member, from its bytes or as `tarfile` decodes it; raises `ValueError` if not UTF-8."""
    name = name.encode(errors="surrogateescape") if isinstance(name, str) else name
    try:
        return name.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"the name {str(name)[1:]} is not UTF-8; rename it and write the shard again") from error


class _Member(tarfile.TarInfo):
    """A member with a limit on header size, because `tarfile` reads headers into memory."""

    def _proc_member(self, archive: tarfile.TarFile) -> tarfile.TarInfo:
        if self.type in _LONG_HEADERS and self.size > _LONGEST_HEADER:
            raise tarfile.ReadError(f"a header has {self.size:,} bytes; the limit is {_LONGEST_HEADER:,}")
        member: tarfile.TarInfo = super()._proc_member(archive)  # type: ignore[misc]
        return member


def read_tar(file: BinaryIO) -> Iterator[tuple[tarfile.TarInfo, Callable[[], bytes]]]:
    """Yield the regular files of a tar archive in order, each with a function that reads its content.

    Raises:
        tarfile.TarError, OSError, EOFError, ValueError: the archive is truncated or damaged, or has a sparse file.
    """
    end = file.seek(0, os.SEEK_END)
    file.seek(0)
    with tarfile.open(fileobj=file, mode="r:", tarinfo=_Member) as archive:
        while (member := archive.next()) is not None:
            archive.members = []  # type: ignore[attr-defined]  # otherwise tarfile keeps all members
            if member.issparse():
                raise tarfile.ReadError(f"{member.name!r} is a sparse file, which is not supported")
            if member.isfile():
                yield member, partial(_content, archive, member, end)


def _content(archive: tarfile.TarFile, member: tarfile.TarInfo, end: int) -> bytes:
    if member.offset_data + member.size > end:
        raise tarfile.ReadError(f"{member.name!r} has {member.size:,} bytes, more than the archive contains")
    return content.read() if (content := archive.extractfile(member)) else b""


def group_members(members: Sequence[tuple[str, Bytes]]) -> tuple[str, dict[str, Bytes]]:
    """Return the sample's name and its parts by extension (everything after the first dot of the file name).

    Raises:
        ValueError: the members belong to different samples, or there is none.
    """
    key, parts = None, dict[str, Bytes]()
    for name, content in members:
        folder, slash, file = name.rpartition("/")
        stem, dot, extension = file.partition(".")
        if not dot or not stem:
            continue
        base = folder + slash + stem
        if key is not None and base != key:
            raise ValueError(f"members of two samples, {key!r} and {base!r}, where the index expects one")
        key = base
        parts[extension] = content
    if key is None:
        raise ValueError("no member that belongs to a sample")
    return key, parts


def read_offsets(shard: Path) -> np.ndarray:
    """Read the byte offsets of a shard's samples, and the end of the last one, from its `.tar.idx` file."""
    file = shard.with_suffix(".tar.idx")
    if not file.is_file():
        raise DataError(f"shard {shard} has no index {file.name}; run `energon prepare` on its folder again")
    try:
        raw = read_bytes(file)
    except OSError as error:
        raise DataError(f"index {file} cannot be read: {error.strerror}; restore the file") from error
    if len(raw) % 8 or len(raw) < 16:
        raise DataError(
            f"index {file} has {len(raw)} bytes, not a list of offsets; run `energon prepare` on its folder"
        )
    offsets = np.frombuffer(raw, "<u8")
    if offsets[0] != 0 or (offsets[1:] < offsets[:-1] + BLOCK).any() or offsets[-1] >= 2**63:
        raise DataError(f"the offsets in index {file} do not ascend from 0; run `energon prepare` on its folder again")
    return offsets.astype(np.int64)


def sample_of(data: bytes | memoryview) -> tuple[str, dict[str, Any]]:
    """Return name and parts of a sample from its bytes in a shard; supports tar extensions.

    Raises:
        ValueError, tarfile.TarError: the bytes are damaged, or hold no sample or several.
    """
    try:
        return group_members(parse_members(data))
    except UnusualTarError:
        return group_members([(utf8_name(member.name), read()) for member, read in read_tar(io.BytesIO(data))])


def read_samples(shards: Sequence[Path], indices: Iterable[int]) -> Iterator[tuple[Path, bytes]]:
    """Yield the shard and the bytes of samples, by ascending index over all shards; ends after the last sample."""
    remaining, first = iter(indices), 0
    index = next(remaining, None)
    for shard in shards:
        offsets = read_offsets(shard).tolist()
        with open_binary(shard) as file:
            while index is not None and index - first < len(offsets) - 1:
                start, end = offsets[index - first : index - first + 2]
                file.seek(start)
                yield shard, file.read(end - start)
                index = next(remaining, None)
        first += len(offsets) - 1


def spread_order(count: int) -> np.ndarray:
    """Return the numbers below `count` in an order whose first n numbers, for every n, are spread evenly.

    Gaps between them are shorter than 2 * count / n, because the order is that of the multiples of the golden ratio
    modulo 1.
    """
    order = np.empty(count, np.int64)
    order[np.argsort(np.arange(count) * ((5**0.5 - 1) / 2) % 1)] = np.arange(count)
    return order


def interleaved(index: int, count: int, streams: int) -> int:
    """Return the position, in the order of the shards, of the sample that Energon numbers `index`.

    Energon gives each of `streams` a contiguous part of the numbers. Blocks of consecutive positions belong to the
    parts in turn, so each stream reads from all shards. Of 12 samples, 2 streams and blocks of 2:

        index      0 1 2 3  4  5 | 6 7 8 9 10 11
        position   0 1 4 5  8  9 | 2 3 6 7 10 11
    """
    block = min(max(count // (16 * streams), 1), _BLOCK_SAMPLES)
    blocks = count // block
    number, offset = divmod(index, block)
    if number == blocks:  # samples after the last complete block
        return index
    size, longer = divmod(blocks, streams)  # the first `longer` streams have one more block
    if number < longer * (size + 1):
        stream, turn = divmod(number, size + 1)
    else:
        stream, turn = divmod(number - longer, size)
    return (turn * streams + stream) * block + offset


class SampleReader:
    """Random access to the samples of a list of shards; replaces Energon's reader of the same shards.

    An unreadable sample is returned with the reason under `READ_ERROR`, and then counted as damaged.

    Args:
        energon_reader: Energon's `ShardInfosITarReader`.
        spread: number the samples in `spread_order`, not in the order of the shards.
        streams: number the samples so that each of this many equal parts has samples of all shards, see `interleaved`.
    """

    def __init__(self, energon_reader: "ShardInfosITarReader", *, spread: bool = False, streams: int = 1) -> None:
        self._energon = energon_reader
        self._starts = list(energon_reader.shard_count_cumsum)
        self._shards = list(energon_reader.shard_infos)
        self._order = spread_order(len(self)) if spread else None
        self.streams = streams
        self._open: OrderedDict[int, tuple[int, np.ndarray]] = OrderedDict()

    def __len__(self) -> int:
        return self._starts[-1]

    def __str__(self) -> str:
        return f"SampleReader({self._energon})"

    def _shard(self, number: int) -> tuple[int, np.ndarray]:
        """Return file descriptor and offsets of a shard; forks may share it, since each read has an explicit offset."""
        entry = self._open.get(number)
        if entry is None:
            path = Path(self._shards[number].path.local_path())
            entry = self._open[number] = (open_regular(path), read_offsets(path))
            if len(self._open) > _OPEN_SHARDS:
                os.close(self._open.popitem(last=False)[1][0])
        return entry

    def _read(self, number: int, position: int) -> tuple[str, dict[str, bytes | memoryview]]:
        """Read a sample; `.npy` parts are views of the buffer."""
        descriptor, offsets = self._shard(number)
        start, end = int(offsets[position]), int(offsets[position + 1])
        data, count = memoryview(np.empty(end - start, np.uint8).data), 0
        while count < len(data):  # one read returns at most 2 GiB
            if not (more := os.preadv(descriptor, [data[count:]], start + count)):
                raise ValueError(f"the shard is truncated: {count} of {end - start} bytes at offset {start}")
            count += more
        key, parts = sample_of(data)
        return key, {name: part if name.endswith(".npy") else bytes(part) for name, part in parts.items()}

    def __getitem__(self, index: int) -> dict[str, Any] | None:
        place = interleaved(index, len(self), self.streams) if self._order is None else int(self._order[index])
        number = bisect_right(self._starts, place) - 1
        shard, position = self._shards[number], place - self._starts[number]
        parts: dict[str, Any]
        try:
            key, parts = self._read(number, position)
        except Exception as error:
            key, parts = f"#{position}", {READ_ERROR: str(error) or type(error).__name__}
        if self._energon.sample_filter is not None and not self._energon.sample_filter(f"{shard.name}/{key}"):
            return None
        return {"__key__": key, "__shard__": shard.name, "__restore_key__": ("Webdataset", index), **parts}

    def close(self) -> None:
        for descriptor, _ in self._open.values():
            os.close(descriptor)
        self._open.clear()
        self._energon.close()
