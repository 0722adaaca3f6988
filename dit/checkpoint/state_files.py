"""State on disk: boxes of unsharded tensors in safetensors files, and one index of their positions.

    rank_00000.safetensors    the boxes of rank 0; a box of tensor `n` at offsets (3, 0) is called `n@3,0`
    rank_00001.safetensors
    state.json                shape of each tensor, and the file, offsets and sizes of each of its boxes

Every rank writes its own file and hashes it while writing. Nothing is gathered, and reading executes no code. Any
safetensors reader can read the files.
"""

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, product
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError
from torch import Tensor

from dit.boxes import Box
from dit.checkpoint.manifest import CURE, FileRecord, write_hashed
from dit.errors import CheckpointError
from dit.safe_files import open_safetensors, read_json, valid_entries

INDEX = "state.json"
FORMAT = 2
STAGING_BYTES = 64 << 20  # copied from a device to the host at once
LONGEST_INDEX = 1 << 30  # bytes; a box takes about 100
ITEM_BYTES = 4  # all state is float32

Boxes = Mapping[str, Sequence[Box]]
"""The boxes of each tensor by its name."""
Pieces = Iterable[bytes | Tensor]
"""The content of a file: bytes and float32 tensors, one after the other."""


def checkpoint_bytes(parameters: int, *, averages: int) -> int:
    """Return the size of a training state on disk, without names: weights, Adam's two moments and the averages."""
    return parameters * ITEM_BYTES * (3 + averages)


def file_of_rank(rank: int) -> str:
    """Return the name of the file that a rank writes."""
    return f"rank_{rank:05d}.safetensors"


def _key(name: str, box: Box) -> str:
    return f"{name}@{','.join(map(str, box.offsets))}"


def write_files(folder: Path, files: Mapping[str, Pieces]) -> dict[str, FileRecord]:
    """Write new files, flushed to the disk; return the size and SHA-256 of each.

    Tensors are contiguous, on any device, and are read one by one, so an iterator may compute them; those of a device
    are copied to the host in pieces of `STAGING_BYTES`.
    """
    records = {}
    for name, pieces in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        records[name] = write_hashed(folder / name, _views(pieces))
    return records


def _views(pieces: Pieces) -> Iterator[memoryview]:
    for piece in pieces:
        if isinstance(piece, bytes):
            yield memoryview(piece)
        else:
            for part in piece.detach().view(-1).split(STAGING_BYTES // ITEM_BYTES):
                yield memoryview(part.cpu().numpy()).cast("B")


def head_of(boxes: Boxes) -> bytes:
    """Return the header of a safetensors file of float32 boxes."""
    header: dict[str, Any] = {}
    end = 0
    for name, parts in boxes.items():
        for box in parts:
            start, end = end, end + box.numel * ITEM_BYTES
            header[_key(name, box)] = {"dtype": "F32", "shape": list(box.sizes), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def tensors_text(shapes: Mapping[str, Sequence[int]], parts: Mapping[str, Boxes]) -> str:
    """Return the JSON of an index's tensors, which is the same for every step of a layout."""
    entries: dict[str, list[Any]] = {name: [] for name in shapes}
    for file, boxes in parts.items():
        for name, tensor_boxes in boxes.items():
            entries[name] += [[file, list(box.offsets), list(box.sizes)] for box in tensor_boxes]
    for name, shape in shapes.items():
        _check_complete(name, shape, [Box(tuple(offsets), tuple(sizes)) for _, offsets, sizes in entries[name]])
    tensors = {name: {"shape": list(shape), "boxes": entries[name]} for name, shape in shapes.items()}
    return json.dumps(tensors, separators=(",", ":"))


def index_text(tensors: str, scalars: Mapping[str, float]) -> str:
    """Return the text of an index: its tensors, see `tensors_text`, and scalars of the state."""
    named = json.dumps(dict(scalars), separators=(",", ":"))
    return f'{{"format":{FORMAT},"scalars":{named},"tensors":{tensors}}}'


def write_full_state(folder: Path, tensors: Mapping[str, Tensor]) -> dict[str, FileRecord]:
    """Write full tensors, one by one, as the state of a single process; return the records of the files by name."""
    file, boxes = file_of_rank(0), {name: [Box.of(tensor.shape)] for name, tensor in tensors.items()}
    values = (tensor.float().contiguous() for tensor in tensors.values())
    index = tensors_text({name: tensor.shape for name, tensor in tensors.items()}, {file: boxes})
    return write_files(folder, {file: chain([head_of(boxes)], values), INDEX: [index_text(index, {}).encode()]})


def _finite(value: object) -> float:
    """Check a number of the index; integers are returned as integers."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{value!r} is not a finite number")
    return value


def _check_complete(name: str, shape: Sequence[int], boxes: Sequence[Box]) -> None:
    """Check that boxes cover a tensor exactly: inside it, without overlap, and complete."""
    full = Box.of(shape)
    for box in boxes:
        if len(box.sizes) != len(shape) or min(box.sizes, default=1) < 1 or box.overlap(full) != box:
            raise CheckpointError(f"{name} of shape {list(shape)} has a box outside of it: {box}; {CURE}")
    if (stored := sum(box.numel for box in boxes)) < math.prod(shape):
        raise CheckpointError(f"{name} has {math.prod(shape)} elements, {stored} of them are stored; {CURE}")
    if _corners(boxes) != _corners([full]):
        raise CheckpointError(f"{name} of shape {list(shape)} is partly stored twice ({stored} elements); {CURE}")


def _corners(boxes: Sequence[Box]) -> dict[tuple[int, ...], int]:
    """Return the finite differences of the number of boxes at each element, which determine these numbers.

    A box adds 1 or -1 at each corner, -1 at those with an odd number of ends:

        1 . . -1        a box of two rows and three columns
        .  .  .
       -1 . .  1
    """
    corners: dict[tuple[int, ...], int] = {}
    for box in boxes:
        signed = [((start, 1), (start + size, -1)) for start, size in zip(box.offsets, box.sizes)]
        for ends in product(*signed):
            corner = tuple(index for index, _ in ends)
            corners[corner] = corners.get(corner, 0) + math.prod(sign for _, sign in ends)
    return {corner: count for corner, count in corners.items() if count}


class StateReader:
    """Reads any box of any tensor of a verified checkpoint, independently of the stored boxes."""

    def __init__(self, folder: Path, *, finite: bool = False) -> None:
        self.folder, self._finite = folder, finite
        self._files: dict[str, Any] = {}
        body = read_json(folder / INDEX, CheckpointError, CURE, LONGEST_INDEX)
        with valid_entries(folder / INDEX, CheckpointError, CURE):
            if body["format"] != FORMAT:
                raise CheckpointError(f"{folder / INDEX} is of format {body['format']!r}, this version reads {FORMAT}")
            self.scalars: dict[str, float] = {str(name): _finite(value) for name, value in body["scalars"].items()}
            self.shapes = {name: tuple(map(int, entry["shape"])) for name, entry in body["tensors"].items()}
            self._stored = {
                name: [(_plain(file), Box(tuple(map(int, o)), tuple(map(int, s)))) for file, o, s in entry["boxes"]]
                for name, entry in body["tensors"].items()
            }
        try:
            for name, shape in self.shapes.items():
                _check_complete(name, shape, [box for _, box in self._stored[name]])
        except CheckpointError as error:
            raise CheckpointError(f"{folder / INDEX}: {error}") from error

    def read(self, name: str, shape: Sequence[int], views: Iterable[tuple[Box, Tensor]]) -> None:
        """Copy each box of a stored tensor into the tensor paired with it, on any device and in any precision."""
        if name not in self._stored:
            raise CheckpointError(
                f"{self.folder} lacks {name}; it has {len(self.shapes)} other tensors: give the settings of its run"
            )
        if self.shapes[name] != tuple(shape):
            raise CheckpointError(
                f"{name} is {list(self.shapes[name])} in {self.folder}, {list(shape)} in the model; "
                "give the model settings it was trained with"
            )
        for box, target in views:
            for file, stored in self._stored[name]:
                if (common := box.overlap(stored)) is not None:
                    values = self._values(file, name, stored, common)
                    if self._finite:
                        self._check_finite(name, values)
                    target[common.slices_in(box)].copy_(values)

    def _check_finite(self, name: str, values: Tensor) -> None:
        if broken := values.numel() - int(torch.isfinite(values).sum()):
            raise CheckpointError(
                f"{name} in {self.folder} has {broken} NaN or infinite values of {values.numel()}; name the "
                "folder of an earlier checkpoint"
            )

    def _values(self, file: str, name: str, stored: Box, requested: Box) -> Tensor:
        key = _key(name, stored)
        try:
            if file not in self._files:
                self._files[file] = open_safetensors(self.folder / file)
            opened = self._files[file]
            entry = opened.get_slice(key)
            if tuple(entry.get_shape()) != stored.sizes or entry.get_dtype() != "F32":
                raise CheckpointError(
                    f"{self.folder / file}: {key} is {entry.get_dtype()} {entry.get_shape()}, "
                    f"{INDEX} says F32 {list(stored.sizes)}; {CURE}"
                )
            return opened.get_tensor(key) if requested == stored else entry[requested.slices_in(stored)]
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{self.folder / file} cannot be read: {error}; {CURE}") from error


class Weights(Protocol):
    """Weights that a run starts from: of a checkpoint, or of a folder of another code base."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of every unsharded parameter by global name."""

    def read(self, name: str, shape: Sequence[int], views: Iterable[tuple[Box, Tensor]]) -> None:
        """Copy boxes of a parameter into memory, see `StateReader.read`."""


class SlotWeights:
    """The weights of a verified checkpoint, which must be finite."""

    def __init__(self, folder: Path, slot: str) -> None:
        self._folder, self._reader, self._prefix = folder, StateReader(folder, finite=True), f"{slot}."
        stored = self._reader.shapes
        self.shapes = {n.removeprefix(self._prefix): shape for n, shape in stored.items() if n.startswith(self._prefix)}

    def read(self, name: str, shape: Sequence[int], views: Iterable[tuple[Box, Tensor]]) -> None:
        self._reader.read(self._prefix + name, shape, views)

    def __str__(self) -> str:
        return f"{sum(map(math.prod, self.shapes.values())):,} parameters of {self._folder}"


def read_full(weights: Weights, name: str) -> Tensor:
    """Return one parameter in full, float32, on the host."""
    shape = weights.shapes[name]
    target = torch.empty(shape, dtype=torch.float32)
    weights.read(name, shape, [(Box.of(shape), target)])
    return target


def _plain(file: object) -> str:
    if not isinstance(file, str) or Path(file).name != file:
        raise CheckpointError(f"{INDEX} names {file!r}, which is not a file in the checkpoint's folder; {CURE}")
    return file
