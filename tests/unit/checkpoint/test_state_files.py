"""State on disk: any box can be read, whatever boxes were written, and damaged files are refused."""

import hashlib
import itertools
import json
import random

import pytest
import torch
from safetensors.torch import load_file

from dit.boxes import Box, boxes_of_range
from dit.checkpoint import state_files
from dit.checkpoint.state_files import (
    INDEX,
    STAGING_BYTES,
    StateReader,
    file_of_rank,
    head_of,
    index_text,
    read_full,
    tensors_text,
    write_files,
    write_full_state,
)
from dit.errors import CheckpointError

SHAPES = {"weight.a": (6, 5), "ema.a": (6, 5), "weight.b": (7,), "weight.c": (2, 3, 4), "weight.d": ()}


def values_of(name):
    generator = torch.Generator().manual_seed(sum(name.encode()))
    return torch.randn(SHAPES[name], generator=generator)


def write(folder, ranks, seed=0):
    """Write every tensor, split at random places into `ranks` files."""
    rng, parts, tensors = random.Random(seed), [], []
    for _ in range(ranks):
        parts.append({name: [] for name in SHAPES})
        tensors.append([])
    for name, shape in SHAPES.items():
        flat = values_of(name).view(-1)
        cuts = sorted([0, flat.numel(), *(rng.randint(0, flat.numel()) for _ in range(ranks - 1))])
        for rank, (start, stop) in enumerate(itertools.pairwise(cuts)):
            position = start
            for box in boxes_of_range(shape, start, stop):
                parts[rank][name].append(box)
                tensors[rank].append(flat[position : position + box.numel].view(box.sizes))
                position += box.numel
    folder.mkdir()
    records = {}
    for rank in range(ranks):
        files = {file_of_rank(rank): [head_of(parts[rank]), *tensors[rank]]}
        if rank == 0:
            index = tensors_text(SHAPES, {file_of_rank(rank): boxes for rank, boxes in enumerate(parts)})
            files[INDEX] = [index_text(index, {"adam_step": 7}).encode()]
        records |= write_files(folder, files)
    return records


@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_read_tensors_equal_written_tensors(tmp_path, ranks):
    records = write(tmp_path / "x", ranks)
    reader = StateReader(tmp_path / "x")
    assert reader.scalars == {"adam_step": 7}
    assert reader.shapes == SHAPES
    for name in SHAPES:
        assert torch.equal(read_full(reader, name), values_of(name))
    for file, record in records.items():
        data = (tmp_path / "x" / file).read_bytes()
        assert (record.size_bytes, record.sha256) == (len(data), hashlib.sha256(data).hexdigest())


@pytest.mark.parametrize("seed", range(20))
def test_any_box_of_any_tensor_is_read_separately(tmp_path, seed):
    """Also in another precision, and only the box is written."""
    rng = random.Random(seed)
    write(tmp_path / "x", 3, seed)
    reader = StateReader(tmp_path / "x")
    for name, shape in SHAPES.items():
        offsets = tuple(rng.randrange(size) for size in shape)
        sizes = tuple(rng.randint(1, size - offset) for size, offset in zip(shape, offsets))
        box = Box(offsets, sizes)
        target = torch.zeros(sizes, dtype=rng.choice([torch.float32, torch.bfloat16]))
        reader.read(name, shape, [(box, target)])
        assert torch.equal(target, values_of(name)[box.slices_in(Box.of(shape))].to(target.dtype))


def test_any_tool_reads_the_files(tmp_path):
    """The files are plain safetensors; a box has the name and offsets of its tensor as the key."""
    write_full_state(tmp_path, {name: values_of(name) for name in SHAPES})
    found = load_file(tmp_path / "rank_00000.safetensors")
    assert {name.partition("@")[0]: tuple(tensor.shape) for name, tensor in found.items()} == SHAPES
    assert torch.equal(found["weight.a@0,0"], values_of("weight.a"))


def test_large_values_pass_through_in_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr(state_files, "STAGING_BYTES", 64)
    pieces = [len(piece) for piece in state_files._views([b"head", torch.zeros(5, 7), torch.zeros(3)])]
    assert pieces == [4, 64, 64, 12, 12]
    assert STAGING_BYTES == 64 << 20
    write_full_state(tmp_path, {name: values_of(name) for name in SHAPES})
    assert torch.equal(read_full(StateReader(tmp_path), "weight.c"), values_of("weight.c"))


@pytest.mark.parametrize(
    ("boxes", "message"),
    [
        ([Box((0, 0), (5, 5))], "30 elements, 25"),
        ([Box((0, 0), (6, 5)), Box((2, 1), (1, 1))], "stored twice"),
        ([Box((0, 0), (4, 5)), Box((3, 0), (2, 5))], "stored twice"),
        ([Box((1, 0), (6, 5))], "outside"),
        ([Box((0,), (30,))], "outside"),
        ([Box((0, 0), (6, 5)), Box((0, 0), (0, 5))], "outside"),
    ],
)
def test_boxes_that_do_not_cover_the_tensor_are_refused(tmp_path, boxes, message):
    """Both when an index is written and when it is read."""
    with pytest.raises(CheckpointError, match=message):
        tensors_text({"a": (6, 5)}, {"f": {"a": boxes}})
    entry = {"shape": [6, 5], "boxes": [["f", list(box.offsets), list(box.sizes)] for box in boxes]}
    (tmp_path / INDEX).write_text(json.dumps({"format": 2, "scalars": {}, "tensors": {"a": entry}}))
    with pytest.raises(CheckpointError, match=message):
        StateReader(tmp_path)


def edited(folder, change):
    body = json.loads((folder / INDEX).read_text())
    change(body)
    (folder / INDEX).write_text(json.dumps(body))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda body: body["tensors"]["weight.a"]["boxes"][0].__setitem__(0, "../rank_00000.safetensors"),
            "checkpoint's folder",
        ),
        (lambda body: body["tensors"]["weight.a"]["boxes"][0].__setitem__(0, 3), "checkpoint's folder"),
        (lambda body: body["tensors"]["weight.a"]["boxes"][0].__setitem__(0, "missing"), "cannot be read"),
        (lambda body: body.__setitem__("format", 3), "format 3"),
        (lambda body: body.__setitem__("tensors", [1]), "cannot be used"),
        (lambda body: body.__setitem__("scalars", {"adam_step": "x"}), "cannot be used"),
        (lambda body: body["tensors"].__setitem__("weight.b", {"shape": [7]}), "cannot be used"),
    ],
)
def test_an_incorrect_index_is_refused(tmp_path, change, message):
    write_full_state(tmp_path, {name: values_of(name) for name in SHAPES})
    edited(tmp_path, change)
    with pytest.raises(CheckpointError, match=message):
        read_full(StateReader(tmp_path), "weight.a")


@pytest.mark.parametrize("text", ["", "[" * 100_000, "null", "{}", "\0"])
def test_an_invalid_index_is_refused(tmp_path, text):
    (tmp_path / INDEX).write_text(text)
    with pytest.raises(CheckpointError, match=r"cannot be (read|used)"):
        StateReader(tmp_path)


@pytest.mark.parametrize("data", [b"", b"\xff" * 64, b"\x02\0\0\0\0\0\0\0{}"])
def test_an_invalid_file_is_refused(tmp_path, data):
    write_full_state(tmp_path, {name: values_of(name) for name in SHAPES})
    (tmp_path / "rank_00000.safetensors").write_bytes(data)
    with pytest.raises(CheckpointError, match=r"rank_00000.safetensors cannot be read"):
        read_full(StateReader(tmp_path), "weight.a")


def test_a_tensor_of_another_shape_or_name_is_refused(tmp_path):
    write_full_state(tmp_path, {name: values_of(name) for name in SHAPES})
    reader = StateReader(tmp_path)
    with pytest.raises(CheckpointError, match=r"\[6, 5\].*\[5, 6\] in the model"):
        reader.read("weight.a", (5, 6), [])
    with pytest.raises(CheckpointError, match=r"lacks weight.x"):
        reader.read("weight.x", (5, 6), [])
    edited(tmp_path, lambda body: body["tensors"]["weight.c"].update(shape=[24], boxes=[[file_of_rank(0), [0], [24]]]))
    with pytest.raises(CheckpointError, match=r"cannot be read.*weight.c@0"):
        read_full(StateReader(tmp_path), "weight.c")
    edited(tmp_path, lambda body: body["tensors"]["weight.b"].update(shape=[6], boxes=[[file_of_rank(0), [0], [6]]]))
    with pytest.raises(CheckpointError, match=r"is F32 \[7\], state.json says F32 \[6\]"):
        read_full(StateReader(tmp_path), "weight.b")
