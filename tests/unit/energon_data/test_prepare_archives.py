"""Archives that `prepare webdataset` reads: links, and equal names."""

import io
import json
import tarfile
from pathlib import Path

import pytest
from PIL import Image

from dit.errors import EXIT_DATA
from energon_data.media_files import picture_bytes
from energon_data.prepare.__main__ import main

PICTURE = picture_bytes(Image.new("RGB", (16, 16)), "png")
COMMAND = ("webdataset", "--size", "16", "--validation", "0", "--processes", "1")


def write_tar(path: Path, members: dict[str, bytes]) -> Path:
    with tarfile.open(path, "w") as tar:
        for name, data in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return path


def test_captions_of_an_archive_are_read_in_each_form_and_other_members_are_listed(tmp_path: Path) -> None:
    """A text next to a picture precedes the captions in its .json, as in a folder."""
    (tmp_path / "in").mkdir()
    members = {f"{name}.png": PICTURE for name in "abcd"} | {"a.png.txt": b"sidecar", "b.caption": b"booru"}
    members |= {"c.json": b'{"captions": ["of json", "another"]}', "c.txt": b"of text", "c.npy": b"", "d.npy": b""}
    members |= {"d.json": b'{"captions": ["two", "texts"]}', "d.txt": b" ", "README": b""}
    write_tar(tmp_path / "in" / "0.tar", dict(sorted(members.items())))
    for name, data in members.items():
        (tmp_path / "in" / name).write_bytes(data)
    expected = {"sidecar", "booru", "of text", "two"}
    for command, captions in ((COMMAND, expected), (("images", *COMMAND[1:]), expected - {"sidecar"})):
        out = tmp_path / command[0]
        assert main([*command, "--in", str(tmp_path / "in"), "--out", str(out)]) == 0
        assert set(json.loads((out / "dataset.json").read_text())["captions"]) == captions
    skipped = [json.loads(line) for line in (tmp_path / "webdataset" / "skipped.jsonl").open()]
    assert [(line["file"], line["reason"]) for line in skipped] == [
        ("0.tar/README", "other_format"),
        ("0.tar/c.npy", "other_format"),
    ]


def test_archives_below_a_linked_folder_are_read_with_follow_links_and_named_without(tmp_path: Path) -> None:
    for folder in ("in", "elsewhere"):
        (tmp_path / folder).mkdir()
        write_tar(tmp_path / folder / "0.tar", {"1.png": PICTURE})
    (tmp_path / "in" / "more").symlink_to(tmp_path / "elsewhere")
    words = [*COMMAND, "--in", str(tmp_path / "in"), "--out"]
    for out, flags, count, skipped in (
        ("without", [], 1, {"linked_folder": 1}),
        ("with", ["--follow-links"], 2, {}),
    ):
        assert main([*words, str(tmp_path / out), *flags]) == 0
        found = json.loads((tmp_path / out / "dataset.json").read_text())
        assert (found["samples"], found["skipped"]) == ({"train": count}, skipped)


def test_a_link_to_an_archive_outside_is_read_with_follow_links_only(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    for folder in ("in", "elsewhere"):
        (tmp_path / folder).mkdir()
        write_tar(tmp_path / folder / f"{folder}.tar", {"1.png": PICTURE})
    (tmp_path / "in" / "inside.tar").symlink_to("in.tar")
    (tmp_path / "in" / "outside.tar").symlink_to("../elsewhere/elsewhere.tar")
    words = [*COMMAND, "--in", str(tmp_path / "in"), "--out"]
    for out, flags, count, skipped in (
        ("without", [], 2, {"path_escape": 1}),
        ("with", ["--follow-links"], 3, {}),
    ):
        assert main([*words, str(tmp_path / out), *flags]) == 0
        found = json.loads((tmp_path / out / "dataset.json").read_text())
        assert (found["samples"], found["skipped"]) == ({"train": count}, skipped)
    (tmp_path / "in" / "in.tar").unlink()
    (tmp_path / "in" / "inside.tar").unlink()
    assert main([*words, str(tmp_path / "none")]) == EXIT_DATA
    assert "1 path_escape (outside.tar: a link to a file outside of" in capsys.readouterr().err
