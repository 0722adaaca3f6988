"""Pictures and videos of one folder or archive, their captions, and their description in `dataset.json`."""

import gzip
import hashlib
import json
import math
import os
import unicodedata
from collections import Counter
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from small_data import read_batches

from dit.data_api import BatchSpec
from dit.errors import EXIT_DATA, ConfigError
from energon_data.dataset import EnergonData
from energon_data.media_files import open_picture, video_bytes
from energon_data.prepare.build import CAPTIONS
from energon_data.prepare.media import Options
from energon_data.prepare.preparation import Preparation
from energon_data.samples import SampleError
from tests.unit.energon_data.preparations import (
    as_file,
    described,
    folder_of,
    metadata_of,
    noise,
    outcomes,
    png,
    prepare,
    run,
    write_list,
    write_tar,
)


def mixed(folder: Path, pictures: int = 6, videos: int = 4) -> Path:
    folder.mkdir()
    for i in range(pictures):
        Image.new("RGB", (32, 16), (10 * i, 0, 0)).save(folder / f"p{i:02d}.png")
        (folder / f"p{i:02d}.txt").write_text(f"picture {i}")
    for i in range(videos):
        frames = [Image.new("RGB", (16, 16), (0, 30 * t, 0)) for t in range(3 + i)]
        (folder / f"v{i}.mp4").write_bytes(video_bytes(frames, 8.0))
    return folder


def test_a_folder_of_files_and_archives_is_read_in_one_command(tmp_path, capsys):
    """Clips have 3 frames: two come from the video with 6 frames, and one from each other video."""
    found = described(mixed(tmp_path / "in"), tmp_path / "out", "--frames", "3", command="folder")
    assert found["shapes"] == {"3x1x16x32": 6, "3x3x16x16": 5}
    assert "skipped" not in capsys.readouterr().out


@pytest.mark.parametrize(("command", "count", "first"), [("images", 4, "v0.mp4"), ("videos", 6, "p00.png")])
def test_files_of_another_kind_are_counted(tmp_path, capsys, command, count, first):
    described(mixed(tmp_path / "in"), tmp_path / "out", command=command)
    expected = f"skipped, other_kind: {count}; {first}: `prepare folder` takes pictures and videos"
    assert expected in capsys.readouterr().out


@pytest.mark.parametrize(("command", "count"), [("images", 5), ("folder", 9)])
def test_files_that_a_list_does_not_name_are_counted(tmp_path, capsys, command, count):
    """Files that the command would otherwise read are counted; a complete list prints nothing."""
    source = mixed(tmp_path / "in")
    (source / "metadata.jsonl").write_text('{"file_name": "p00.png"}\n')
    described(source, tmp_path / "out", command=command)
    expected = f"skipped, not_listed: {count}; p01.png: not in metadata.jsonl; only files that it names are read"
    assert expected in (said := capsys.readouterr().out)
    assert "used: 1 of 1 row\n" in said
    for path in source.glob("*.mp4"):
        path.unlink()
    write_list(source, [{"file_name": path.name} for path in sorted(source.glob("*.png"))])
    described(source, tmp_path / "all", command=command)
    assert "skipped" not in capsys.readouterr().out


def test_the_examples_are_the_captions_with_the_smallest_hashes(tmp_path):
    """Examples are distinct and do not depend on shards or file order; the hash makes them a random sample."""
    source = mixed(tmp_path / "in", pictures=40, videos=0)
    (source / "p39.txt").write_text("picture 0")
    captions = {f"picture {i}" for i in range(39)}
    expected = sorted(captions, key=lambda text: hashlib.sha256(text.encode()).digest())[:CAPTIONS]
    for number, size in enumerate(("1000", "7")):
        found = described(source, tmp_path / f"out{number}", "--samples-per-shard", size)
        assert found["captions"] == expected


def test_classes_are_counted_by_the_largest_label(tmp_path):
    source = mixed(tmp_path / "in", videos=0)
    assert described(source, tmp_path / "none")["num_classes"] == 0
    write_list(source, [{"file_name": f"p{i:02d}.png", "label": (4, 0, 2)[i % 3]} for i in range(6)])
    assert described(source, tmp_path / "some", "--samples-per-shard", "2")["num_classes"] == 5


# Captions and lists.


def test_numeric_captions_of_a_csv_are_texts(tmp_path):
    source = mixed(tmp_path / "in", videos=0)
    captions = ["7", "nan", "1_000", "-inf", "1e3", "plain"]
    rows = [f"p{i:02d}.png,{caption},{i},0.5" for i, caption in enumerate(captions)]
    (source / "metadata.csv").write_text("\n".join(["file_name,text,label,score", *rows]))
    assert described(source, tmp_path / "out")["skipped"] == {}
    found = metadata_of(tmp_path / "out")
    assert [found[f"p{i:02d}.png"]["caption"] for i in range(6)] == captions
    assert [found[f"p{i:02d}.png"]["label"] for i in range(6)] == list(range(6))
    assert {about["score"] for about in found.values()} == {0.5}


@pytest.mark.parametrize("command", ["images", "webdataset"])
def test_an_empty_caption_does_not_hide_another(tmp_path, command):
    source = mixed(tmp_path / "in", pictures=3, videos=0)
    rows = [{"caption": " ", "text": "a dog"}, {"caption": "a cat"}, {"captions": [], "prompt": "a bird"}]
    for i, row in enumerate(rows):
        (source / f"p{i:02d}.json").write_text(json.dumps(row))
        (source / f"p{i:02d}.txt").write_text("\n")
    if command == "webdataset":
        files = [(path.name, path.read_bytes()) for path in sorted(source.iterdir())]
        source = write_tar(tmp_path / "in.tar", *files)
    described(source, tmp_path / "out", command=command)
    found = metadata_of(tmp_path / "out")
    assert [found[name]["caption"] for name in sorted(found)] == ["a dog", "a cat", "a bird"]


def test_a_caption_in_capitals_is_read_and_samples_without_one_are_counted(tmp_path, capsys):
    source = mixed(tmp_path / "in", pictures=4, videos=0)
    (source / "p00.txt").rename(source / "p00.TXT")
    (source / "p01.png").rename(source / "UPPER.PNG")
    (source / "p01.txt").rename(source / "UPPER.TXT")
    (source / "p02.txt").unlink()
    (source / "p03.TXT").write_text("not this one")
    described(source, tmp_path / "out")
    found = {name: about.get("caption") for name, about in metadata_of(tmp_path / "out").items()}
    assert found == {"p00.png": "picture 0", "UPPER.PNG": "picture 1", "p02.png": None, "p03.png": "picture 3"}
    assert "\n  without a caption: 1 of 4\n" in capsys.readouterr().out


COMPOSED = unicodedata.normalize("NFC", "caf\u00e9")
DECOMPOSED = unicodedata.normalize("NFD", COMPOSED)


@pytest.mark.parametrize("kind", ["companion", "list"])
@pytest.mark.parametrize(("picture", "text"), [(COMPOSED, DECOMPOSED), (DECOMPOSED, COMPOSED)])
def test_a_caption_matches_in_both_unicode_forms_of_an_accent(tmp_path, kind, picture, text):
    """macOS writes a letter and its accent as two characters, most editors as one."""
    source = mixed(tmp_path / "in", pictures=1, videos=0)
    (source / "p00.png").rename(source / f"{picture}.png")
    (source / "p00.txt").unlink()
    if kind == "companion":
        (source / f"{text}.txt").write_text("a bar")
    else:
        row = {"file_name": f"{text}.png", "text": "a bar"}
        (source / "metadata.jsonl").write_text(json.dumps(row, ensure_ascii=False))
    assert described(source, tmp_path / "out")["skipped"] == {}
    assert metadata_of(tmp_path / "out")[f"{picture}.png"]["caption"] == "a bar"


@pytest.mark.parametrize("kind", ["companion", "list"])
def test_files_in_both_unicode_forms_of_an_accent_have_separate_captions(tmp_path, kind):
    source = mixed(tmp_path / "in", pictures=2, videos=0)
    names = (COMPOSED, DECOMPOSED)
    for i, name in enumerate(names):
        (source / f"p{i:02d}.png").rename(source / f"{name}.png")
        (source / f"p{i:02d}.txt").rename(source / f"{name}.txt")
    if kind == "list":
        write_list(source, [{"file_name": f"{name}.png", "text": f"picture {i}"} for i, name in enumerate(names)])
    described(source, tmp_path / "out")
    found = {name: about["caption"] for name, about in metadata_of(tmp_path / "out").items()}
    assert found == {f"{COMPOSED}.png": "picture 0", f"{DECOMPOSED}.png": "picture 1"}


def test_two_unicode_forms_of_one_file_in_a_list_are_refused(tmp_path, capsys):
    source = mixed(tmp_path / "in", pictures=1, videos=0)
    (source / "p00.png").rename(source / f"{DECOMPOSED}.png")
    write_list(source, [{"file_name": f"{name}.png", "text": name} for name in (COMPOSED, DECOMPOSED)])
    assert run(source, tmp_path / "out") == EXIT_DATA
    assert "is listed twice" in capsys.readouterr().err


def test_a_class_of_only_some_samples_is_reported(tmp_path, capsys):
    source = mixed(tmp_path / "in", pictures=4, videos=0)
    (source / "p02.json").write_text('{"label": "3"}')
    (source / "p03.json").write_text(json.dumps({"label": "9" * 5000}))  # Python converts at most 4,300 digits
    found = described(source, tmp_path / "out")
    assert (found["num_classes"], found["labelled"]) == (4, 1)
    said = capsys.readouterr().out
    assert "without a class: 2 of 3" in said
    assert "skipped, metadata: 1; p03.png: label is '99999" in said
    assert "without a caption" not in said


def change_list(source: Path) -> None:
    (source / "metadata.jsonl").write_text((source / "metadata.jsonl").read_text().replace("old", "new"))


def change_file(source: Path, name: str) -> None:
    """Change the modification time, as another file of the same size would."""
    about = (source / name).stat()
    os.utime(source / name, ns=(about.st_atime_ns, about.st_mtime_ns + 1))


CHANGES = [change_list, *(partial(change_file, name=name) for name in ("p05.txt", "p05.png"))]


@pytest.mark.parametrize("change", CHANGES, ids=["list", "caption", "picture"])
def test_an_interrupted_preparation_does_not_continue_with_other_captions_or_files(tmp_path, change):
    """Otherwise half of the samples would have the old caption and half the new one."""
    source = mixed(tmp_path / "in", videos=0)
    if change is change_list:
        write_list(source, [{"file_name": f"p{i:02d}.png", "text": "old"} for i in range(6)])

    def prepared() -> Preparation:
        return Preparation.of("images", source, tmp_path / "out", Options(), samples_per_shard=3)

    def stop(number, record):
        raise KeyboardInterrupt

    first = prepared()
    with pytest.raises(KeyboardInterrupt):
        first.run(processes=1, force=False, on_unit=stop)
    assert json.loads(json.dumps(prepared().plan)) == json.loads(json.dumps(first.plan))
    change(source)
    changed = prepared()
    with pytest.raises(ConfigError, match=r"has unfinished work of another command \(it differs in files\)"):
        changed.run(processes=1, force=False)
    assert changed.run(processes=1, force=True).shapes.total() == 6


# WebDatasets.


def test_archives_of_one_name_in_two_folders_are_different_samples(tmp_path):
    for folder, shade in (("a", 10), ("b", 20)):
        write_tar(tmp_path / "in" / folder / "000.tar", ("0001.png", png(shade)), ("0001.txt", folder.encode()))
    assert described(tmp_path / "in", tmp_path / "out", command="webdataset")["samples"] == {"train": 2}
    found = metadata_of(tmp_path / "out")
    assert {name: about["caption"] for name, about in found.items()} == {
        "a/000.tar/0001.png": "a",
        "b/000.tar/0001.png": "b",
    }


@pytest.mark.parametrize("between", [("2.png", b""), ("1.txt", b"of the first")])
def test_a_name_that_an_archive_has_twice_is_counted(tmp_path, between):
    """The first `1` is complete when another sample, or the next picture named `1`, follows."""
    archive = write_tar(tmp_path / "in" / "0.tar", ("1.png", png(1)), between, ("1.png", png(2)))
    found = described(archive, tmp_path / "out", command="webdataset")
    assert found["skipped"]["duplicate"] == 1
    assert found["skipped_examples"]["duplicate"][0].startswith("0.tar/1.png: ")
    assert metadata_of(tmp_path / "out").keys() == {"0.tar/1.png"}


def test_pictures_with_a_second_dot_are_samples_and_skipped_files_are_counted(tmp_path):
    members = [
        ("plain.png", png(0)),
        ("photo.v2.png", png(1)),
        ("photo.v2.txt", b"second version"),
        ("clip.final.PNG", png(2)),
        ("clip.txt", b"final"),
        ("mask.png", png(3)),
        ("mask.seg.png", png(4)),
        ("two.v1.png", png(5)),
        ("two.v2.png", png(6)),
        ("._plain.png", b"of another system"),
    ]
    found = described(write_tar(tmp_path / "in" / "0.tar", *members), tmp_path / "out", command="webdataset")
    captions = {name: about.get("caption") for name, about in metadata_of(tmp_path / "out").items()}
    assert captions == {
        "0.tar/plain.png": None,
        "0.tar/photo.v2.png": "second version",
        "0.tar/clip.final.png": "final",
        "0.tar/mask.png": None,
    }
    assert found["skipped"] == {"missing_part": 1}
    (example,) = found["skipped_examples"]["missing_part"]
    assert "two: 2 pictures or videos among ['v1.png', 'v2.png'], expected one" in example


def test_captions_of_an_archive_are_read_in_each_form_and_other_members_are_listed(tmp_path: Path) -> None:
    """A text next to a picture precedes the captions in its .json, as in a folder."""
    members = {f"{name}.png": png(0) for name in "abcd"} | {"a.png.txt": b"sidecar", "b.caption": b"booru"}
    members |= {"c.json": b'{"captions": ["of json", "another"]}', "c.txt": b"of text", "c.npy": b"", "d.npy": b""}
    members |= {"d.json": b'{"captions": ["two", "texts"]}', "d.txt": b" ", "README": b""}
    write_tar(tmp_path / "in" / "0.tar", *sorted(members.items()))
    folder_of(tmp_path / "in", members)
    expected = {"sidecar", "booru", "of text", "two"}
    for command, captions in (("webdataset", expected), ("images", expected - {"sidecar"})):
        found = described(tmp_path / "in", tmp_path / command, command=command)
        assert set(found["captions"]) == captions
    assert outcomes(tmp_path / "webdataset") == dict.fromkeys(["0.tar/README", "0.tar/c.npy"], "other_format")


def test_links_to_archives_and_folders_outside_are_read_with_follow_links_only(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    for folder in ("in", "elsewhere", "linked"):
        write_tar(tmp_path / folder / f"{folder}.tar", ("1.png", png(0)))
    (tmp_path / "in" / "inside.tar").symlink_to("in.tar")
    (tmp_path / "in" / "outside.tar").symlink_to("../elsewhere/elsewhere.tar")
    (tmp_path / "in" / "more").symlink_to(tmp_path / "linked")
    for out, flags, count, skipped in (
        ("without", [], 2, {"path_escape": 1, "linked_folder": 1}),
        ("with", ["--follow-links"], 4, {}),
    ):
        found = described(tmp_path / "in", tmp_path / out, *flags, command="webdataset")
        assert (found["samples"], found["skipped"]) == ({"train": count}, skipped)
    for name in ("in.tar", "inside.tar", "more"):
        (tmp_path / "in" / name).unlink()
    assert run(tmp_path / "in", tmp_path / "none", command="webdataset") == EXIT_DATA
    assert "1 path_escape (outside.tar: a link to a file outside of" in capsys.readouterr().err


def test_compressed_archives_are_named_with_the_cure(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    plain = write_tar(tmp_path / "in" / "a.TAR", ("1.png", png(0))).read_bytes()
    folder_of(
        tmp_path / "in",
        {"b.tar.gz": gzip.compress(plain), "c.tgz": b"", "d.tar": gzip.compress(plain), "d.tar.idx": b""},
    )
    assert described(tmp_path / "in", tmp_path / "out", command="webdataset")["samples"] == {"train": 1}
    reasons = {"b.tar.gz": "other_format", "c.tgz": "other_format", "d.tar": "bad_tar"}
    assert outcomes(tmp_path / "out") == reasons
    assert "d.tar: compressed by gzip; uncompress it" in capsys.readouterr().out
    for name in ("a.TAR", "d.tar"):
        (tmp_path / "in" / name).unlink()
    assert run(tmp_path / "in", tmp_path / "none", command="webdataset") == EXIT_DATA
    assert (
        "has no .tar file (2 other_format (b.tar.gz: compressed archives are not read; uncompress"
        in capsys.readouterr().err
    )


# Pictures.


def test_an_invalid_picture_has_the_same_error_text_in_every_run(tmp_path):
    """The text of an error goes into `dataset.json`, which must be equal in every run, so it has no memory address."""
    with pytest.raises(SampleError) as caught:
        open_picture(b"no picture")
    assert caught.value.reason == "bad_image"
    assert "0x" not in str(caught.value)
    source = mixed(tmp_path / "in", videos=0)
    (source / "p00.png").write_bytes(b"no picture")
    described(source, tmp_path / "one")
    described(source, tmp_path / "two")
    assert (tmp_path / "one" / "dataset.json").read_bytes() == (tmp_path / "two" / "dataset.json").read_bytes()


@pytest.mark.parametrize(
    ("values", "dtype"),
    [([0, 0.5, 1], "f4"), ([0, 127.5, 255], "f4"), ([0, 32768, 65535], "f4"), ([0, 32768, 65535], "u2")],
)
def test_grey_of_more_than_eight_bits_is_converted_exactly(values, dtype):
    picture = as_file(Image.fromarray(np.array([values], dtype)), "TIFF")
    assert np.asarray(open_picture(picture))[0, :, 0].tolist() == [0, 128, 255]


def test_a_dark_grey_picture_of_sixteen_bits_stays_dark():
    picture = Image.fromarray(np.array([[0, 200, 255]], np.uint16))
    for kind in ("PNG", "TIFF"):
        assert np.asarray(open_picture(as_file(picture, kind)))[0, :, 0].tolist() == [0, 1, 1]


def test_pictures_with_nonfinite_values_are_refused():
    picture = as_file(Image.fromarray(np.array([[0.5, np.nan]], np.float32)), "TIFF")
    with pytest.raises(SampleError, match="not finite"):
        open_picture(picture)


def test_streams_repeat_large_and_small_files_of_two_folders_at_one_rate(tmp_path: Path) -> None:
    """With a stream for each folder, packs of one folder would hold 16 pictures of 4 tokens, those of the other one 4
    of 16, so its pictures would have a quarter of the reads."""
    sizes = {f"{name}/{i:02d}.png": side for name, side in {"large": 64, "small": 32}.items() for i in range(64)}
    source = folder_of(tmp_path / "in", {name: as_file(noise(side, side)) for name, side in sizes.items()})
    prepare(source, tmp_path / "out", samples_per_shard=16, validation=0.0)
    packs = {"max_tokens_per_pack": 64, "pack_multiple_of": 4, "packing_buffer_size": 16}
    data = EnergonData(path=str(tmp_path / "out"), num_streams=2, background=False, **packs)
    wanted = BatchSpec(patch_temporal=1, patch_spatial=16, latent_channels=3, micro_batch_size=1)
    reads: Counter[int] = Counter()
    for batch in read_batches(data, wanted, 200)[0]:
        reads.update(map(math.prod, batch.grids))
    assert reads[16] == pytest.approx(reads[4], rel=0.25)
