"""A user's pictures and videos become shards: sizes, conventions, damage, restarts, and always the same bytes."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from fractions import Fraction

import numpy as np
import pyarrow
import pytest
import torch
from PIL import Image
from preparations import (
    as_file,
    described,
    description,
    folder_of,
    folder_of_pictures,
    noise,
    prepare,
    samples,
    shards,
    write_list,
    write_tar,
)
from pyarrow import parquet

from dit.errors import ConfigError, DataError
from dit.verify.ranks import FORKS
from energon_data.folder import check_folder
from energon_data.media_files import open_picture, pixels_of, video_bytes
from energon_data.prepare.__main__ import main
from energon_data.prepare.build import is_held_out
from energon_data.prepare.folders import list_folder
from energon_data.prepare.media import Options
from energon_data.prepare.pictures import Fit
from energon_data.prepare.preparation import Preparation
from energon_data.prepare.videos import Cut, clips_of
from energon_data.samples import SampleError
from tests.integration import actions
from tests.support.ranks import Job, run_jobs
from tests.unit.energon_data.awkward_media import (
    EXIF_ORIENTATION,
    MATRICES,
    black,
    jpeg,
    marked,
    marked_corner,
    mp4,
    turned_mp4,
)


def test_transparent_pixels_are_white():
    see_through = Image.new("RGBA", (2, 1), (0, 0, 0, 0))
    see_through.putpixel((1, 0), (10, 20, 30, 255))
    assert np.asarray(open_picture(as_file(see_through))).tolist() == [[[255, 255, 255], [10, 20, 30]]]


@pytest.mark.parametrize("kind", ["png", "webp"])
def test_pixels_are_read_bitwise_unchanged(tmp_path, kind):
    pictures = {f"{i}.png": noise(*size, i) for i, size in enumerate([(32, 32), (50, 40), (64, 16)])}
    source = folder_of(tmp_path / "in", {name: as_file(picture) for name, picture in pictures.items()})
    prepare(source, tmp_path / "out", validation=0, options=Options(fit=Fit(multiple_of=16), image_format=kind))
    found = {metadata["source"]: clip.latent for _, metadata, clip, _ in samples(tmp_path / "out")}
    assert found.keys() == pictures.keys()
    for name, picture in pictures.items():
        expected = pixels_of([Fit(multiple_of=16).apply(picture)]).float() / 127.5 - 1
        assert torch.equal(found[name], expected)


def test_a_file_that_fits_is_stored_unchanged(tmp_path):
    photo = as_file(noise(48, 32), "JPEG", quality=80)
    prepare(folder_of(tmp_path / "in", {"a.jpg": photo}), tmp_path / "out", validation=0)
    [(_, metadata, _, parts)] = samples(tmp_path / "out")
    assert parts["pixels.jpg"] == photo
    assert (metadata["width"], metadata["height"]) == (48, 32)


def test_every_file_is_a_sample_and_the_folder_passes_the_checks_of_training(tmp_path):
    total = prepare(folder_of_pictures(tmp_path / "in"), tmp_path / "out")
    held_out = {m["source"] for split, m, _, _ in samples(tmp_path / "out") if split == "val"}
    every = {f"p{i:02d}.png" for i in range(12)}
    assert {m["source"] for _, m, _, _ in samples(tmp_path / "out")} == every
    assert total.shapes == {"3x1x32x16": 6, "3x1x32x32": 6}
    entries = list_folder(tmp_path / "in", frozenset({"png"})).entries
    assert held_out == {e.name for e in entries if is_held_out(e.source(tmp_path / "in").key, 0.3)}
    for split, count in (("train", 12 - len(held_out)), ("val", len(held_out))):
        info = check_folder(tmp_path / "out", split)
        assert info.samples == count > 0
    assert info.description["samples"] == {"train": 12 - len(held_out), "val": len(held_out)}
    assert not (tmp_path / ".out.partial").exists()


def test_captions_and_classes_of_every_convention_are_read(tmp_path):
    about = {"caption": ["two", "captions"], "aesthetic_score": 6.5, "list": [1]}
    names = ("cat/a.png", "cat/b.png", "dog/c.png", "dog/d.png")
    files = dict.fromkeys(names, as_file(noise(16, 16)))
    files |= {"cat/a.txt": "\ufeffa cat\n", "cat/b.json": json.dumps(about)}
    prepare(folder_of(tmp_path / "in", files), tmp_path / "out", labels=True, validation=0)
    found = {metadata["source"]: metadata for _, metadata, _, _ in samples(tmp_path / "out")}
    assert {name: m["label"] for name, m in found.items()} == dict(zip(names, (0, 0, 1, 1)))
    assert found["cat/a.png"]["caption"] == "a cat"
    assert found["cat/b.png"]["captions"] == ["two", "captions"]
    assert found["cat/b.png"]["aesthetic_score"] == 6.5
    assert "list" not in found["cat/b.png"]
    assert "caption" not in found["dog/c.png"]
    assert check_folder(tmp_path / "out", "train").description["class_names"] == ["cat", "dog"]


@pytest.mark.parametrize("kind", ["jsonl", "csv", "parquet"])
def test_a_list_of_files_has_captions_and_unlisted_files_are_counted(tmp_path, kind):
    source = folder_of(tmp_path / "in", dict.fromkeys(["a.png", "b.png", "unlisted.png"], as_file(noise(16, 16))))
    rows = [("a.png", "first, with comma", 3), ("b.png", "second", 4), ("gone.png", "third", 5)]
    names = ("file_name", "text", "label")
    if kind == "jsonl":
        write_list(source, [dict(zip(names, row)) for row in rows])
    elif kind == "parquet":
        parquet.write_table(pyarrow.table(dict(zip(names, map(list, zip(*rows))))), source / "metadata.parquet")
    else:
        lines = [",".join(names), *(f'{f},"{t}",{n}' for f, t, n in rows)]
        folder_of(source, {"metadata.csv": "\n".join(lines)})
    total = prepare(source, tmp_path / "out", validation=0)
    found = {m["source"]: (m["caption"], m["label"]) for _, m, _, _ in samples(tmp_path / "out")}
    assert found == {"a.png": ("first, with comma", 3), "b.png": ("second", 4)}
    assert dict(total.skipped) == {"not_a_file": 1, "not_listed": 1}


def test_links_that_leave_the_folder_are_not_followed(tmp_path):
    """Each such link costs one sample, which is counted; links inside the folder are read."""
    outside = folder_of_pictures(tmp_path / "outside", 1)
    folder_of(outside, {"p00.txt": "secret", "p00.json": '{"caption": "secret"}', "v.mp4": mp4(marked())})
    source = folder_of_pictures(tmp_path / "in", 6)
    targets = {"p01.txt": "p00.txt", "p02.json": "p00.json", "p03.png": "p00.png", "link.mp4": "v.mp4"}
    for name, target in targets.items():
        (source / name).unlink(missing_ok=True)
        (source / name).symlink_to(outside / target)
    (source / "p04.txt").unlink()
    (source / "p04.txt").symlink_to("../outside/p00.txt")
    (source / "p05.txt").unlink()
    (source / "p05.txt").symlink_to("p00.txt")
    total = prepare(source, tmp_path / "out", command="folder", validation=0)
    assert dict(total.skipped) == {"path_escape": 5}
    assert "p01.txt is a link to a file outside of" in total.examples["path_escape"][1]
    found = {metadata["source"]: metadata["caption"] for _, metadata, _, _ in samples(tmp_path / "out")}
    assert found == {"p00.png": "noise 0", "p05.png": "noise 0"}


def test_a_list_cannot_name_files_outside_the_folder(tmp_path):
    """A row may not name a link or a file in a linked folder, and the list may not be a link."""
    outside = folder_of_pictures(tmp_path / "outside", 2)
    source = folder_of_pictures(tmp_path / "in", 2)
    (source / "link.png").symlink_to(outside / "p00.png")
    (source / "linked").symlink_to(outside)
    write_list(tmp_path, [{"file_name": name, "text": name} for name in ("p00.png", "link.png", "linked/p01.png")])
    shutil.copy(tmp_path / "metadata.jsonl", source)
    total = prepare(source, tmp_path / "out", validation=0)
    assert dict(total.skipped) == {"path_escape": 2, "linked_folder": 1, "not_listed": 1}
    assert [metadata["source"] for _, metadata, _, _ in samples(tmp_path / "out")] == ["p00.png"]
    (source / "metadata.jsonl").unlink()
    (source / "metadata.jsonl").symlink_to(tmp_path / "metadata.jsonl")
    with pytest.raises(DataError, match=r"metadata\.jsonl is a link to a file outside of .*--follow-links"):
        prepare(source, tmp_path / "again")


def test_a_webdataset_of_jpg_and_txt_is_read_and_a_truncated_archive_counted(tmp_path):
    source, members = tmp_path / "in", []
    for i in range(3):
        parts = {"jpg": as_file(noise(32, 32, i), "JPEG"), "txt": b"caption %d" % i, "cls": b"7"}
        members += [(f"s{i}.{part}", data) for part, data in parts.items()]
    broken = write_tar(source / "0.tar", *members)
    broken.write_bytes(broken.read_bytes()[: broken.stat().st_size // 2])
    write_tar(source / "1.tar", *members, ("lonely.txt", b""))
    total = prepare(source, tmp_path / "out", command="webdataset", validation=0)
    found = [m for _, m, _, _ in samples(tmp_path / "out")]
    assert {m["source"] for m in found} >= {"0.tar/s0.jpg", "1.tar/s0.jpg", "1.tar/s1.jpg", "1.tar/s2.jpg"}
    assert {m["label"] for m in found} == {7}
    assert found[0]["caption"] == "caption 0"
    assert dict(total.skipped) == {"bad_tar": 1, "missing_part": 1}


# Videos.


def test_clips_have_the_requested_frame_rate():
    frames = [Image.new("RGB", (32, 16), (8 * i, 0, 255 - 8 * i)) for i in range(24)]
    data = video_bytes(frames, 24.0)
    for fps, count in ((None, 24), (24.0, 24), (12.0, 12), (6.0, 6), (48.0, 48)):
        [(found, rate)] = clips_of(data, Cut(fps=fps))
        assert len(found) == count
        assert rate == (fps or 24.0)
        # Every instant shows the frame that was displayed at that time.
        shown = [round(np.asarray(f)[..., 0].mean() / 8) for f in found]
        assert shown == [int(i * 24 / rate) for i in range(count)]
    clips = list(clips_of(data, Cut(frames=10)))
    assert [len(found) for found, _ in clips] == [10, 10]
    [(found, _)] = clips_of(data, Cut(multiple_of=5))
    assert len(found) == 20
    [(found, _)] = clips_of(data, Cut(multiple_of=4, after_first=True))
    assert len(found) == 21
    with pytest.raises(SampleError, match="24 frames, a clip needs 25"):
        list(clips_of(data, Cut(frames=25)))


def test_videos_become_clips_that_training_reads(tmp_path):
    frames = [Image.new("RGB", (48, 32), (10 * i, 100, 50)) for i in range(20)]
    films = {"v.mp4": video_bytes(frames, 10.0), "short.mp4": video_bytes(frames[:3], 10.0)}
    source = folder_of(tmp_path / "in", {**films, "broken.mp4": b"not a video", "v.txt": "red rises"})
    options = Options(fit=Fit(multiple_of=16), cut=Cut(frames=8))
    total = prepare(source, tmp_path / "out", command="videos", validation=0, options=options)
    assert dict(total.skipped) == {"bad_video": 1, "too_short": 1}
    found = list(samples(tmp_path / "out"))
    assert [clip.latent.shape for _, _, clip, _ in found] == [(3, 8, 32, 48)] * 2
    assert {m["fps"] for _, m, _, _ in found} == {10.0}
    red = found[1][2].latent[0].mean((1, 2))
    expected = torch.tensor([10.0 * i for i in range(8, 16)]) / 127.5 - 1
    assert torch.allclose(red, expected, atol=0.02)  # of lossy colours


@pytest.mark.parametrize("how", MATRICES)
def test_clips_and_pictures_of_a_phone_are_stored_as_they_are_displayed(tmp_path, how):
    """The mark is in the corner where players show it, and a picture with the same orientation agrees."""
    original = turned_mp4(mp4(marked()), MATRICES[how])
    files = {"clip.mp4": original, "photo.jpg": jpeg(marked(), EXIF_ORIENTATION[how])}
    source = folder_of(tmp_path / "in", files)
    total = prepare(source, tmp_path / "out", command="folder", validation=0)
    clip, photo = (((c.latent + 1) * 127.5).round() for _, _, c, _ in samples(tmp_path / "out"))
    assert clip.shape[2:] == photo.shape[2:] == ((96, 64) if how in ("90", "270", "transposed") else (64, 96))
    corner = {"90": "top right", "180": "bottom right", "270": "bottom left", "mirrored": "top right"}
    for sample in (clip, photo):
        assert marked_corner(sample[:, 0].permute(1, 2, 0).numpy()) == corner.get(how, "top left")
    assert total.counts["turned"] == (0 if how == "as stored" else 2)
    [stored] = [raw["pixels.mp4"] for _, _, _, raw in samples(tmp_path / "out") if "pixels.mp4" in raw]
    assert (stored == original) == (how == "as stored")  # otherwise it is encoded upright, for other readers


def test_a_clip_rotated_by_another_angle_is_refused():
    slanted = turned_mp4(mp4(marked()), (0.7071, 0.7071, -0.7071, 0.7071))
    with pytest.raises(SampleError, match="multiple of 90 degrees"):
        list(clips_of(slanted, Cut()))


def test_pixels_of_a_clip_that_are_not_square_are_made_square():
    for aspect, width in ((Fraction(2), 128), (Fraction(1, 2), 32)):
        [(frames, _)] = clips_of(mp4(marked(64, 64), aspect=aspect), Cut())
        assert {frame.size for frame in frames} == {(width, 64)}
        [(frames, _)] = clips_of(turned_mp4(mp4(marked(64, 64), aspect=aspect), MATRICES["90"]), Cut())
        assert {frame.size for frame in frames} == {(64, width)}


# Damage, restarts, repetition.


def test_bad_files_are_counted_by_reason_and_all_others_are_kept(tmp_path):
    source = folder_of_pictures(tmp_path / "in")
    bad = {"p03.png": b"", "p04.png": black(60_000, 60_000, rows=0), "p05.txt": b"\xff\xfe\xff"}
    folder_of(source, {**bad, "p06.png": as_file(noise(8, 8))})
    os.unlink(source / "p07.png")
    os.mkfifo(source / "p07.png")  # not a file
    total = prepare(source, tmp_path / "out")
    assert total.skipped.total() == 5
    assert set(total.skipped) <= {"bad_image", "too_large", "bad_caption", "too_small", "not_a_file"}
    assert {m["source"] for _, m, _, _ in samples(tmp_path / "out")} == {
        f"p{i:02d}.png" for i in (0, 1, 2, 8, 9, 10, 11)
    }
    examples = description(tmp_path / "out")["skipped_examples"]
    assert examples["too_small"] == ["p06.png: 8 x 8 pixels; the smallest size is 16 x 16"]


@pytest.mark.parametrize("damage", ["empty", "all_bad"])
def test_no_sample_is_an_error(tmp_path, damage):
    source = folder_of(tmp_path / "in", {"a.png": b"nothing"} if damage == "all_bad" else {})
    with pytest.raises(DataError, match=r"have no file|no sample is left for training: 1 bad_image"):
        prepare(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("start", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_any_number_of_processes_writes_the_same_bytes(tmp_path, monkeypatch, start):
    if start == "fork":  # of a process that has imported all modules
        monkeypatch.setattr("energon_data.prepare.build.get_context", lambda _: FORKS)
    source = folder_of_pictures(tmp_path / "in")
    prepare(source, tmp_path / "one")
    prepare(source, tmp_path / "two", processes=2)
    assert shards(tmp_path / "one") == shards(tmp_path / "two")
    assert description(tmp_path / "one") == description(tmp_path / "two")


def test_an_interrupted_preparation_continues_to_the_same_bytes(tmp_path):
    source = folder_of_pictures(tmp_path / "in")
    prepare(source, tmp_path / "undisturbed")
    preparation = Preparation.of(
        "images", source, tmp_path / "out", Options(fit=Fit(multiple_of=16)), samples_per_shard=5, validation=0.3
    )

    def stop(number, record):
        if number == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        preparation.run(processes=1, force=False, on_unit=stop)
    partial = preparation.job.partial
    assert sorted(path.name for path in partial.glob("unit-*")) == ["unit-000000.json", "unit-000001.json"]
    cut = sorted(preparation.job.data.glob("*-000001.tar"))[0]
    cut.write_bytes(cut.read_bytes()[:1000])  # a record without its shard does not count
    times = {path.name: path.stat().st_mtime_ns for path in preparation.job.data.glob("*-000000.tar")}
    with pytest.raises(ConfigError, match=r"differs in samples_per_shard"):
        prepare(source, tmp_path / "out", samples_per_shard=4)
    prepare(source, tmp_path / "out")
    assert shards(tmp_path / "out") == shards(tmp_path / "undisturbed")
    assert {n: (tmp_path / "out" / n).stat().st_mtime_ns for n in times} == times  # unit 0 was not written again
    with pytest.raises(ConfigError, match="exists already"):
        prepare(source, tmp_path / "out")
    prepare(source, tmp_path / "out", samples_per_shard=4, force=True)
    assert len(shards(tmp_path / "out")) > len(shards(tmp_path / "undisturbed")) - 1


def test_a_killed_preparation_writes_the_same_shards_when_repeated(tmp_path):
    source = folder_of_pictures(tmp_path / "in", 40)
    command = ["images", "--in", str(source), "--samples-per-shard", "2", "--validation", "0.3", "--processes", "1"]
    out = tmp_path / "out"
    process = subprocess.Popen([sys.executable, "-m", "energon_data.prepare", *command, "--out", str(out)])
    partial = tmp_path / ".out.partial"
    deadline = time.monotonic() + 120
    while len(list(partial.glob("unit-*.json"))) < 3 and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not out.exists()
    assert partial.exists()
    assert main([*command, "--out", str(out)]) == 0
    assert main([*command, "--out", str(tmp_path / "undisturbed")]) == 0
    assert shards(out) == shards(tmp_path / "undisturbed")


def test_ranks_write_the_shards_of_one_process(tmp_path):
    """Four units on three ranks; only rank 0 reports."""
    command = ["images", "--in", str(folder_of_pictures(tmp_path / "in", 8)), "--samples-per-shard", "2"]
    command += ["--validation", "0.3", "--processes", "1"]
    assert main([*command, "--out", str(tmp_path / "alone")]) == 0
    job = Job(actions.prepare, {"arguments": [*command, "--out", str(tmp_path / "out")]}, ranks=3)
    ended = run_jobs(tmp_path / "world", {"prepare": job})["prepare"]
    assert [rank.code for rank in ended] == [0, 0, 0], ended
    assert shards(tmp_path / "out") == shards(tmp_path / "alone")
    assert [rank.out.count("8 samples in") for rank in ended] == [1, 0, 0]
    assert not (tmp_path / ".out.partial").exists()


def test_one_caption_is_used_for_all_files_without_a_caption(tmp_path):
    source = folder_of_pictures(tmp_path / "in", 3)
    (source / "p01.txt").unlink()
    described(source, tmp_path / "out", "--caption", "a photo of sks dog")
    captions = {metadata["source"]: metadata["caption"] for _, metadata, *_ in samples(tmp_path / "out")}
    assert captions == {"p00.png": "noise 0", "p01.png": "a photo of sks dog", "p02.png": "noise 2"}
