"""Pictures and videos of one folder, and what `dataset.json` says of captions and classes."""

import hashlib
import json
from pathlib import Path

import pytest
from PIL import Image

from energon_data.media_files import video_bytes
from energon_data.prepare.__main__ import main
from energon_data.prepare.build import CAPTIONS


def mixed(folder: Path, pictures: int = 6, videos: int = 4) -> Path:
    folder.mkdir()
    for i in range(pictures):
        Image.new("RGB", (32, 16), (10 * i, 0, 0)).save(folder / f"p{i:02d}.png")
        (folder / f"p{i:02d}.txt").write_text(f"picture {i}")
    for i in range(videos):
        frames = [Image.new("RGB", (16, 16), (0, 30 * t, 0)) for t in range(3 + i)]
        (folder / f"v{i}.mp4").write_bytes(video_bytes(frames, 8.0))
    return folder


def described(source: Path, out: Path, command: str, *words: str) -> dict:
    common = ["--in", str(source), "--out", str(out), "--validation", "0", "--processes", "1"]
    assert main([command, *common, *words]) == 0
    return json.loads((out / "dataset.json").read_text())


def test_a_folder_of_both_is_read_in_one_command(tmp_path, capsys):
    """Clips of 3 frames: two of the video with 6, one of each other."""
    found = described(mixed(tmp_path / "in"), tmp_path / "out", "folder", "--frames", "3")
    assert found["shapes"] == {"3x1x16x32": 6, "3x3x16x16": 5}
    assert "left out" not in capsys.readouterr().out


@pytest.mark.parametrize(("command", "line"), [("images", "4 videos"), ("videos", "6 pictures")])
def test_what_a_command_leaves_out_is_said(tmp_path, capsys, command, line):
    described(mixed(tmp_path / "in"), tmp_path / "out", command)
    assert f"left out: {line} in {tmp_path / 'in'}; `prepare folder` takes both" in capsys.readouterr().out


def test_a_list_of_files_leaves_nothing_out(tmp_path, capsys):
    source = mixed(tmp_path / "in")
    (source / "metadata.jsonl").write_text('{"file_name": "p00.png"}\n')
    described(source, tmp_path / "out", "images")
    assert "left out" not in capsys.readouterr().out


def test_the_examples_are_the_captions_with_the_smallest_hashes(tmp_path):
    """Of different ones, whatever the shards: a sample at random that does not depend on the order of the files."""
    source = mixed(tmp_path / "in", pictures=40, videos=0)
    (source / "p39.txt").write_text("picture 0")
    captions = {f"picture {i}" for i in range(39)}
    expected = sorted(captions, key=lambda text: hashlib.sha256(text.encode()).digest())[:CAPTIONS]
    for number, size in enumerate(("1000", "7")):
        found = described(source, tmp_path / f"out{number}", "images", "--samples-per-shard", size)
        assert found["captions"] == expected


def test_classes_are_counted_by_the_largest_label(tmp_path):
    source = mixed(tmp_path / "in", videos=0)
    assert described(source, tmp_path / "none", "images")["num_classes"] == 0
    rows = [{"file_name": f"p{i:02d}.png", "label": (4, 0, 2)[i % 3]} for i in range(6)]
    (source / "metadata.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert described(source, tmp_path / "some", "images", "--samples-per-shard", "2")["num_classes"] == 5
