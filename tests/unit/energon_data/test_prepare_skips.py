"""Every file of a folder becomes a sample, or is listed with the reason why it does not."""

import errno
import json
import os
import sys
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path

import av
import numpy as np
import pytest
from PIL import Image
from transformers import Dinov2Config

from dit import media
from dit.errors import EXIT_CONFIG, EXIT_DATA, EXIT_INTERRUPTED, EXIT_OK
from energon_data import media_files
from energon_data.media_files import open_picture
from energon_data.prepare import build
from energon_data.prepare.media import Options
from energon_data.prepare.preparation import Preparation
from energon_data.prepare.videos import Cut, clips_of
from energon_data.samples import SampleError
from recipes.finetune import finetune
from tests.support.encoders import save_language_model, save_vae
from tests.unit.energon_data.awkward_media import (
    AWKWARD,
    FOLLOWED,
    GREY,
    HEIGHT,
    TAKEN,
    WIDTH,
    animated_gif,
    awkward_folder,
    heic,
    marked,
    marked_corner,
    mp4,
    video,
)
from tests.unit.energon_data.preparations import as_file, described, description, folder_of, outcomes, run, write_list

prepare = partial(run, command="folder")


@pytest.mark.parametrize("follow", [False, True])
def test_every_file_of_an_awkward_folder_is_a_sample_or_named_with_its_reason(tmp_path, capsys, follow):
    source = awkward_folder(tmp_path)
    expected = dict(AWKWARD)
    if follow:
        del expected["more"]
        expected |= FOLLOWED
    assert prepare(source, tmp_path / "out", "--size", "64", *["--follow-links"] * follow) == EXIT_OK
    skipped = {name: reason for name, reason in expected.items() if reason != TAKEN}
    assert outcomes(tmp_path / "out") == skipped
    num_taken = len(expected) - len(skipped)
    found = description(tmp_path / "out")
    assert (found["skipped"], found["samples"]["train"]) == (Counter(skipped.values()), num_taken)
    summary = capsys.readouterr().out
    assert f"{num_taken} samples in 1 shard," in summary
    shapes = ", ".join(f"{count} of {shape}" for shape, count in found["shapes"].items())
    assert f"  shapes (C x T x H x W): {shapes}\n" in summary
    assert "  skipped, too_small: 2; sliver.png: " in summary
    assert f"used: {num_taken} of {len(expected)} files" in summary
    assert "turned according to the file: 3 samples" in summary
    assert "cropped: by at most 17% (wide_pixels.mp4)" in summary
    assert "enlarged: 0 samples" in summary
    assert f"every skipped file and its reason: {tmp_path / 'out' / 'skipped.jsonl'}" in summary
    needed = "own_data and finetune need none; other recipes: training.validation_interval=0"
    assert f"  val: 0 samples ({needed})" in summary
    assert finetune().training.validation_interval == 0


def test_a_broken_file_without_caption_is_reported_as_broken(tmp_path):
    whole = as_file(marked(64, 64))
    files = {"a.png": whole, "a.txt": "a word", "bare.png": whole, "empty.png": b"", "cut.png": whole[:90]}
    assert prepare(folder_of(tmp_path / "in", files), tmp_path / "out", "--text-encoder", "identity") == EXIT_OK
    assert outcomes(tmp_path / "out") == {"bare.png": "no_caption", "empty.png": "bad_image", "cut.png": "bad_image"}


def test_an_enlarged_picture_is_counted(tmp_path, capsys):
    source = folder_of(tmp_path / "in", {"small.png": as_file(marked(20, 20))})
    assert prepare(source, tmp_path / "out", "--size", "64", "--enlarge") == EXIT_OK
    assert "enlarged: 1 sample" in capsys.readouterr().out


def test_a_heic_file_of_a_rotated_camera_is_counted_and_upright(tmp_path, capsys):
    if not media.reads_heic():
        pytest.skip("needs pillow-heif")
    source = folder_of(tmp_path / "in", {"phone.heic": heic(marked(), 6)})
    assert prepare(source, tmp_path / "out", "--size", "64") == EXIT_OK
    assert "turned according to the file: 1 sample" in capsys.readouterr().out
    picture = open_picture(heic(marked(), 6))
    assert picture.size == (HEIGHT, WIDTH)
    assert marked_corner(np.asarray(picture)) == "top right"


@pytest.mark.parametrize("kind", ["HEIC", "AVIF"])
def test_a_half_copied_picture_is_named_as_such(kind):
    """The metadata are at the end of such a file, so the reader does not recognize the rest."""
    if kind == "HEIC" and not media.reads_heic():
        pytest.skip("needs pillow-heif")
    noise = Image.effect_noise((64, 64), 50).convert("RGB")
    data = heic(noise, 6) if kind == "HEIC" else as_file(noise, "AVIF")
    length = len(data) // 2
    expected = f"a {kind} file that is damaged or ends early, after {length} bytes; copy it again"
    with pytest.raises(SampleError, match=expected):
        open_picture(data[:length])


def test_a_half_copied_video_is_named_as_such():
    """Cameras write the index after the frames."""
    data = mp4(marked())
    length = data.index(b"moov") - 10
    expected = rf"ends early, after {length} bytes: its index \(moov\) is missing; copy it again"
    with pytest.raises(SampleError, match=expected):
        list(clips_of(data[:length], Cut()))


@pytest.mark.parametrize(("container", "codec"), [("matroska", "libx264"), ("avi", "mpeg4")])
def test_a_video_without_its_end_is_named_as_such(tmp_path, container, codec):
    """A header states the duration of the complete file, which may be that of its sound, or its bytes."""
    with av.open(str(tmp_path / "a"), "w", format=container) as file:
        sound, picture = file.add_stream("mp3", rate=48000), file.add_stream(codec, rate=8)
        picture.width, picture.height, picture.pix_fmt = 64, 64, "yuv420p"
        for i in range(40):
            noise = Image.effect_noise((64, 64), 50).convert("RGB")
            file.mux(picture.encode(av.VideoFrame.from_image(noise)) if i < 30 else [])
            frame = av.AudioFrame.from_ndarray(np.zeros((1, 6000), np.float32), format="flt", layout="mono")
            frame.sample_rate, frame.pts = 48000, 6000 * i
            file.mux(sound.encode(frame))
        file.mux([*picture.encode(), *sound.encode()])
    data = (tmp_path / "a").read_bytes()
    [(frames, _)] = clips_of(data, Cut())
    assert len(frames) == 30
    half = data[: len(data) // 2]
    expected = (
        rf"after {len(half)} of {len(data)} bytes" if container == "avi" else r"says 5\.\d s, and it ends at [1-3]\.\d"
    )
    with pytest.raises(SampleError, match=f"{expected}.*; copy it again"):
        list(clips_of(half, Cut()))
    if container != "avi":  # the time of a span is complete
        [(frames, _)] = clips_of(half, Cut(), (0.0, 0.5))
        assert len(frames) == 4


def test_an_empty_file_is_named_as_such():
    with pytest.raises(SampleError, match="the file is empty"):
        open_picture(b"")
    with pytest.raises(SampleError, match="the file is empty"):
        list(clips_of(b"", Cut()))


@pytest.mark.parametrize(("package", "names"), [("av", "a.mp4"), ("pillow_heif", "a.HEIC")])
def test_a_package_that_is_missing_is_named_with_its_files_before_any_is_read(
    tmp_path, capsys, monkeypatch, package, names
):
    source = folder_of(pictures(tmp_path / "in", 2), {names.replace("a.", f"{x}."): b"not read" for x in "abc"})
    monkeypatch.setitem(sys.modules, package, None)
    media.reads_heic.cache_clear()
    try:
        assert prepare(source, tmp_path / "out") == EXIT_CONFIG
        if package == "pillow_heif":
            with pytest.raises(SampleError, match="needs pillow-heif"):
                open_picture(b"\0\0\0\x1cftypheic" + bytes(100))
    finally:
        media.reads_heic.cache_clear()
    error = capsys.readouterr().err
    extra = {"av": "PyAV, which is not installed: pip install -e '.[video]'", "pillow_heif": "pip install -e '.[heic]'"}
    assert f"error: {names} and 2 other files: " in error
    assert extra[package] in error
    assert error.rstrip().endswith(", or move them away")
    assert error.count("\n") == 2  # with "preparing ..."
    assert ".gif" not in error


def test_a_listed_file_that_is_absent_is_named_and_counted(tmp_path, capsys):
    source = pictures(tmp_path / "in", 1)
    write_list(source, [{"file_name": name, "text": name} for name in ("0.png", "gone.png", "lost.png")])
    assert prepare(source, tmp_path / "out", command="images") == EXIT_OK
    detail = "the list names it, and the folder has no such file"
    assert f"  skipped, not_a_file: 2; gone.png: {detail}" in capsys.readouterr().out
    assert outcomes(tmp_path / "out") == {"gone.png": "not_a_file", "lost.png": "not_a_file"}


def test_text_that_is_not_unicode_skips_its_file(tmp_path, capsys):
    """A name and a caption in Latin-1, and a caption with half of an emoji, as JSON of a truncated text has it."""
    captions = [json.dumps({"caption": f"smile {text}"}) for text in ("\ud83d", "\ud83d\ude00")]
    source = folder_of(pictures(tmp_path / "in", 4), {f"{i}.json": text for i, text in enumerate(captions)})
    os.rename(source / "2.png", os.fsencode(source) + b"/caf\xe9.png")
    (source / "3.txt").write_bytes("grün".encode("latin-1"))
    assert prepare(source, tmp_path / "out", "--shuffle-tags", "2", command="images") == EXIT_OK
    assert outcomes(tmp_path / "out") == {"0.png": "bad_caption", "3.png": "bad_caption", "caf\udce9.png": "bad_name"}
    assert "skipped, bad_name: 1; caf?.png: the name is not UTF-8; rename it" in capsys.readouterr().out
    details = (tmp_path / "out" / "skipped.jsonl").read_text()
    assert "3.txt is not UTF-8: byte 0xfc at position 2; save it as UTF-8" in details
    assert description(tmp_path / "out")["captions"] == ["smile \U0001f600"]


@pytest.mark.parametrize("command", ["images", "webdataset"])
def test_a_folder_with_only_a_linked_folder_is_refused_by_its_name(tmp_path, capsys, command):
    (tmp_path / "in").mkdir()
    (tmp_path / "photos").mkdir()
    (tmp_path / "in" / "photos").symlink_to(tmp_path / "photos")
    assert prepare(tmp_path / "in", tmp_path / "out", command=command) == EXIT_DATA
    assert "1 linked_folder (photos: a link to a folder; --follow-links reads it)" in capsys.readouterr().err


def test_an_animated_gif_is_a_clip_of_its_frames_on_white(tmp_path):
    [(frames, rate)] = clips_of(animated_gif(), Cut(fps=10.0))
    assert rate == 10.0
    corners = [np.asarray(frame)[8, 8::16] for frame in frames]
    for i, shades in enumerate(corners):
        assert shades.tolist() == [list(GREY) if place == i else [255] * 3 for place in range(6)]
    source = folder_of(tmp_path / "in", {"moving.gif": animated_gif(), "still.gif": as_file(marked(), "GIF")})
    for command, shapes in (
        ("images", {"3x1x64x96": 2}),
        ("folder", {"3x1x64x96": 1, "3x4x64x96": 1}),
        ("videos", {"3x1x64x96": 1, "3x4x64x96": 1}),
    ):
        assert described(source, tmp_path / command, command=command)["shapes"] == shapes


@pytest.mark.parametrize("frozen", [0, 5])
def test_a_frozen_frame_is_in_one_clip_without_motion(tmp_path, capsys, frozen):
    """Twelve frames, one of which is displayed for a minute; clips of 0.4 s.

    FFmpeg displays the last one for the mean duration.
    """
    frames = [Image.new("L", (32, 32), 20 * i) for i in range(12)]
    durations = [100] * 12
    durations[frozen] = 60_000
    source = tmp_path / "in"
    source.mkdir()
    frames[0].save(source / "a.gif", save_all=True, append_images=frames[1:], duration=durations)
    flags = ("--fps", "10", "--frames", "4", "--multiple-of", "16")
    found = described(source, tmp_path / "out", *flags, command="videos")
    assert found["shapes"] == {"3x4x32x32": 4}
    said = capsys.readouterr().out
    assert "used: 1 of 1 file, 1 of them in part" in said
    assert "skipped, frozen: 1; a.gif: after" in said


def test_a_video_with_an_error_after_its_first_clips_is_used_and_listed(tmp_path, capsys, monkeypatch):
    lengths = {"long.mp4": 8, "short.mp4": 4, "still.mp4": 1}
    turning = [marked(), marked().rotate(180)] * 4
    source = folder_of(tmp_path / "in", {name: video(turning[:count]) for name, count in lengths.items()})
    monkeypatch.setattr(media_files, "MAX_FRAMES", 5)
    found = described(source, tmp_path / "out", "--frames", "2", command="videos")
    assert found["shapes"] == {"3x2x64x96": 4}
    said = capsys.readouterr().out
    assert "used: 2 of 3 files, 1 of them in part" in said
    assert "skipped, too_long: 1; long.mp4: after 2 clips, which are used: more than 5 frames" in said


@pytest.mark.parametrize(("command", "count"), [("folder", 2), ("images", 3)])
def test_the_summary_counts_first_frames_of_animated_pictures(tmp_path, capsys, command, count):
    """FFmpeg has no reader for them; an animated GIF becomes a clip if the command takes clips."""
    source = pictures(tmp_path / "in", 1)
    for name in ("a.webp", "b.png", "d.gif"):
        red, black = Image.new("RGB", (32, 32), "red"), Image.new("RGB", (32, 32))
        red.save(source / name, save_all=True, append_images=[black])
    assert prepare(source, tmp_path / "out", "--samples-per-shard", "1", command=command) == EXIT_OK
    assert f"first frame of an animation: {count} samples (a.webp)" in capsys.readouterr().out


# Failures and restarts.


def pictures(folder: Path, count: int = 6) -> Path:
    return folder_of(folder, {f"{i}.png": as_file(Image.new("RGB", (32, 32), (i, 0, 0))) for i in range(count)})


def fail_at(monkeypatch, number: int, error: BaseException) -> None:
    """Make the unit of this number raise an error instead of writing its shards."""
    make_unit = build._make_unit

    def make(job, unit, entries):
        if unit == number:
            raise error
        return make_unit(job, unit, entries)

    monkeypatch.setattr(build, "_make_unit", make)


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), KeyboardInterrupt()])
def test_a_failed_preparation_continues_and_reports_this(tmp_path, capsys, monkeypatch, error):
    source, out, partial = pictures(tmp_path / "in"), tmp_path / "out", tmp_path / ".out.partial"
    with monkeypatch.context() as patch:
        fail_at(patch, 2, error)
        code = EXIT_CONFIG if isinstance(error, OSError) else EXIT_INTERRUPTED
        assert prepare(source, out, "--samples-per-shard", "2") == code
    said = capsys.readouterr().err
    assert f"the same command continues from {partial}" in said
    assert "Traceback" not in said
    if isinstance(error, OSError):
        assert f"error: {partial}: No space left on device" in said
    assert prepare(source, out, "--samples-per-shard", "2") == EXIT_OK
    assert f"{out}: continues after 2 of 3 parts, which are in {partial}" in capsys.readouterr().err
    assert not partial.exists()


def test_a_preparation_of_millions_of_files_continues(tmp_path):
    """The plan lists every file, and may be longer than other records, which have at most 64 MiB."""
    source, out, resumed = pictures(tmp_path / "in"), tmp_path / "out", []
    first = Preparation.of("images", source, out, Options(), samples_per_shard=2, validation=0)
    first = replace(first, plan=first.plan | {"files": "x" * (65 << 20)})

    def stop(*_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        first.run(processes=1, force=False, on_unit=stop)
    replace(first).run(processes=1, force=False, on_resume=resumed.append)
    assert resumed == [1]


def test_force_starts_over_and_its_own_work_continues_without_it(tmp_path, capsys, monkeypatch):
    """Otherwise no flags would continue the replacement of an older data set."""
    source, out, partial = pictures(tmp_path / "in"), tmp_path / "out", tmp_path / ".out.partial"
    assert prepare(source, out, "--samples-per-shard", "3") == EXIT_OK
    flags = ["--samples-per-shard", "2"]
    for _ in range(2):
        with monkeypatch.context() as patch:
            fail_at(patch, 1, KeyboardInterrupt())
            assert prepare(source, out, *flags, "--force") == EXIT_INTERRUPTED
        said = capsys.readouterr().err
        assert f"the same command without --force continues from {partial}" in said
        assert "continues after" not in said
    assert prepare(source, out, *flags) == EXIT_OK
    assert "continues after 1 of 3 parts" in capsys.readouterr().err
    assert len(list(out.glob("*.tar"))) == 3
    assert prepare(source, out, *flags) == EXIT_CONFIG


def test_other_weights_of_an_encoder_are_other_work(tmp_path):
    """An autoencoder trained again in its folder has the name of the first one."""
    source, vae = pictures(tmp_path / "in", 1), save_vae(tmp_path / "vae")
    text, teacher = save_language_model("qwen3", tmp_path / "text"), tmp_path / "teacher"
    Dinov2Config().save_pretrained(teacher)
    options = Options(vae=str(vae), text_encoder=f"text={text}:padded", teacher=str(teacher))

    def encoders():
        return Preparation.of("images", source, tmp_path / "out", options).plan["encoders"]

    seen = [encoders()]
    for path in (vae / "diffusion_pytorch_model.safetensors", text / "model.safetensors", teacher / "config.json"):
        os.utime(path, ns=(0, 0))
        seen.append(encoders())
        assert seen[-1] == encoders() != seen[-2]


def test_a_preparation_that_fails_before_its_first_shard_leaves_no_file(tmp_path, capsys, monkeypatch):
    source = pictures(tmp_path / "in")
    with monkeypatch.context() as patch:
        fail_at(patch, 0, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
        assert prepare(source, tmp_path / "out") == EXIT_CONFIG
    (source / "0.png").write_bytes(b"")
    assert prepare(source, tmp_path / "none", "--size", "64", "--aspect", "square") == EXIT_DATA
    assert "continues" not in capsys.readouterr().err
    assert {path.name for path in tmp_path.iterdir()} == {"in"}
