"""Lists of files: several clips of a video by their times, and lists outside of the folder."""

import io
from fractions import Fraction
from functools import partial
from pathlib import Path

import av
import numpy as np
import pytest
from PIL import Image

from dit.errors import EXIT_CONFIG, EXIT_DATA, EXIT_OK
from energon_data.prepare.videos import Cut, clips_of
from energon_data.samples import SampleError
from tests.unit.energon_data.preparations import (
    described,
    folder_of,
    metadata_of,
    outcomes,
    png,
    run,
    samples,
    write_list,
)

RATE, SECONDS, GAP = 8, 6, 8  # frames per second, duration, distance of key frames
prepare = partial(run, command="videos")


def film(
    offset: int = 0,
    container: str = "mp4",
    times: list[Fraction] | None = None,
    rate: int = RATE,
    codec: str = "libx264",
    **options: str,
) -> bytes:
    """Return a video whose frame `i` has the shade 5 `i`.

    Args:
        offset: time of its first frame, in frames.
        times: of its frames, in seconds; None for a constant rate.
        options: of the codec.
    """
    buffer = io.BytesIO()
    times = [Fraction(i + offset, rate) for i in range(rate * SECONDS)] if times is None else times
    tick = Fraction(1, rate if all(time * rate % 1 == 0 for time in times) else 1000)
    with av.open(buffer, "w", format=container) as file:
        usual = {"g": str(GAP)} | ({"crf": "1"} if codec == "libx264" else {})
        stream = file.add_stream(codec, rate=rate, options=usual | options)
        stream.width, stream.height, stream.pix_fmt = 16, 16, "yuv444p" if codec == "libx264" else "yuv420p"
        stream.codec_context.time_base = tick
        for i, time in enumerate(times):
            frame = av.VideoFrame.from_image(Image.new("RGB", (16, 16), (5 * i,) * 3))
            frame.pts, frame.time_base = int(time / tick), tick
            file.mux(stream.encode(frame))
        file.mux(stream.encode())
    return buffer.getvalue()


def numbers(frames: list[Image.Image]) -> list[int]:
    return [round(float(np.asarray(frame).mean()) / 5) for frame in frames]


# Clips by start and end.


@pytest.mark.parametrize("offset", [0, 24])
@pytest.mark.parametrize(
    ("span", "first", "last"),
    [((0.0, 1.0), 0, 7), ((1.0, 2.5), 8, 19), ((2.3, 2.6), 19, 20), ((5.0, None), 40, 47), ((5.5, 99.0), 44, 47)],
)
def test_a_clip_has_the_frames_of_its_times(span, first, last, offset):
    """Times count from the first frame, even if the file starts later; the frame at the end is not in the clip."""
    [(frames, rate)] = clips_of(film(offset, "matroska" if offset else "mp4"), Cut(), span)
    assert numbers(frames) == list(range(first, last + 1))
    assert rate == RATE


UNEVEN = [Fraction(ms, 1000) for ms in (0, 33, 66, 100, 500, 900, 1000, 1020, 2500, 4000)]


@pytest.mark.parametrize("container", ["mp4", "matroska"])
@pytest.mark.parametrize(
    ("span", "fps", "shown"),
    [
        ((0.1, 2.0), 10.0, [3] * 4 + [4] * 4 + [5, 6] + [7] * 9),
        ((1.2, 2.4), 10.0, [7] * 12),
        ((1.2, 2.4), None, [7]),
        ((0.7, 1.0), 10.0, [4, 4, 5]),
    ],
)
def test_a_span_of_uneven_frames_has_those_that_are_displayed_in_it(container, span, fps, shown):
    """A frame that begins before the start, or that stays until after the end, is displayed in the span, too."""
    [(frames, _)] = clips_of(film(container=container, times=UNEVEN, rate=30), Cut(fps=fps), span)
    assert numbers(frames) == shown


def test_a_span_within_the_display_time_of_a_frame_has_this_frame():
    for fps, shown in ((None, [1]), (10.0, [1] * 6)):
        [(frames, _)] = clips_of(film(times=[Fraction(i) for i in range(4)], rate=1), Cut(fps=fps), (1.2, 1.8))
        assert numbers(frames) == shown


@pytest.mark.parametrize("container", ["mp4", "matroska"])
def test_clips_of_uneven_frames_have_their_measured_rate(container):
    """Matroska states a rate that such a video does not have; a constant rate stays as stated."""
    data, even = film(container=container, times=UNEVEN, rate=30), [Fraction(i, 30) for i in range(50)]
    assert [rate for _, rate in clips_of(data, Cut())] == pytest.approx([9 / 4])
    assert [rate for _, rate in clips_of(data, Cut(frames=5))] == pytest.approx([4 / 0.5, 4 / 3.1])
    assert {rate for _, rate in clips_of(film(container=container, times=even, rate=30), Cut(frames=2))} == {30}


@pytest.mark.parametrize("container", ["mp4", "matroska"])
def test_a_span_between_frames_is_exact_in_containers_that_round_times(container):
    data = film(container=container, times=[Fraction(i, 30) for i in range(20)], rate=30)
    for k in range(16):
        for fps in (None, 30.0):
            [(frames, _)] = clips_of(data, Cut(fps=fps), (k / 30, (k + 4) / 30))
            assert numbers(frames) == list(range(k, k + 4))


OPEN_GOPS = {"x264-params": f"open-gop=1:keyint={GAP}:min-keyint={GAP}:scenecut=0:bframes=3"}


@pytest.mark.parametrize(
    ("container", "codec", "options"),
    [
        ("mp4", "libx264", OPEN_GOPS),
        ("matroska", "libx264", OPEN_GOPS),
        ("mp4", "mpeg4", {"bf": "2"}),
        ("avi", "mpeg4", {"bf": "2"}),
    ],
)
def test_a_span_has_the_frames_before_the_key_frame_of_a_seek(container, codec, options):
    """A seek may end at a key frame that is displayed after the start. AVI stores no display times."""
    data = film(container=container, codec=codec, **options)
    [(frames, _)] = clips_of(data, Cut())
    shades = numbers(frames)
    assert len(shades) == RATE * SECONDS
    for k in range(RATE * SECONDS - 4):
        [(frames, _)] = clips_of(data, Cut(), (k / RATE, (k + 4) / RATE))
        assert numbers(frames) == shades[k : k + 4], k


def test_clips_of_a_span_are_cut_like_those_of_a_video():
    found = list(clips_of(film(), Cut(fps=4.0, frames=3), (1.0, 3.5)))
    assert [numbers(frames) for frames, _ in found] == [[8, 10, 12], [14, 16, 18], [20, 22, 24]]


def test_the_error_for_a_start_beyond_the_end_has_both_times():
    with pytest.raises(SampleError, match=r"its last frame is at 5\.88 s, before the start at 7\.0 s") as caught:
        list(clips_of(film(), Cut(), (7.0, 8.0)))
    assert caught.value.reason == "too_short"


ROWS = [
    {"file": "a.mp4", "start": 1.0, "end": 3.5, "caption": "dark"},
    {"file": "a.mp4", "start": 4, "caption": "bright"},
    {"file": "a.mp4", "start": 7, "end": 8, "caption": "beyond"},
    {"file": "a.mp4", "start": 3, "end": 2, "caption": "backwards"},
    {"file": "a.mp4", "start": "0:01", "end": 2, "caption": "text"},
    {"file": "b.mp4", "caption": "all of it"},
    {"file": "gone.mp4", "start": 0, "end": 1, "caption": "missing"},
]


def test_several_clips_of_one_film_have_their_own_captions(tmp_path, capsys):
    source = folder_of(tmp_path / "in", dict.fromkeys(["a.mp4", "b.mp4", "unlisted.mp4"], film()))
    rows = write_list(tmp_path, ROWS) / "metadata.jsonl"
    found = described(source, tmp_path / "out", "--list", str(rows), command="videos")
    assert found["shapes"] == {"3x20x16x16": 1, "3x16x16x16": 1, "3x48x16x16": 1}
    assert sorted(found["captions"]) == ["all of it", "bright", "dark"]
    assert outcomes(tmp_path / "out") == {
        "unlisted.mp4": "not_listed",
        "a.mp4": "metadata",
        "a.mp4#t=7.0,8.0": "too_short",
        "gone.mp4#t=0.0,1.0": "not_a_file",
    }
    assert sorted(found["skipped_examples"]["metadata"]) == [
        "a.mp4: start is '0:01', not a number of seconds from 0",
        "a.mp4: the end, 2.0 s, is not after the start, 3.0 s",
    ]


def test_clips_of_one_film_are_in_one_split(tmp_path):
    """Otherwise a model would be tested on a film that it has seen in training."""
    names = ("one.mp4", "two.mp4", "three.mp4", "four.mp4")
    source = folder_of(tmp_path / "in", dict.fromkeys(names, film()))
    write_list(source, [{"file_name": name, "start": i, "end": i + 1} for name in names for i in range(5)])
    assert prepare(source, tmp_path / "out", "--validation", "0.5") == EXIT_OK
    by_file: dict[str, set[str]] = {}
    for split, about, _, _ in samples(tmp_path / "out"):
        by_file.setdefault(about["source"], set()).add(split)
    assert {len(splits) for splits in by_file.values()} == {1}
    assert set().union(*by_file.values()) == {"train", "val"}


@pytest.mark.parametrize("again", [{"file_name": "a.mp4", "start": 1, "end": 2}, {"file_name": "a.mp4"}])
def test_the_same_clip_twice_is_refused_with_its_row(tmp_path, capsys, again):
    source = folder_of(tmp_path / "in", {"a.mp4": film()})
    write_list(source, [{"file_name": "a.mp4", "start": 1, "end": 2}, again])
    assert prepare(source, tmp_path / "out") == EXIT_DATA
    assert "row 2: 'a.mp4'" in (said := capsys.readouterr().err)
    assert "is listed twice; leave one row, or give the clips of a video different starts or ends" in said


def downloaded(root: Path, names: list[str]) -> Path:
    """Make a folder of pictures."""
    return folder_of(root / "in", {name: png(i) for i, name in enumerate(names)})


# Lists of other names, and hints to other commands.


def test_a_list_may_be_in_another_folder_and_overrides_the_list_in_the_folder(tmp_path):
    source = downloaded(tmp_path, ["a.png", "b.png"])
    (source / "metadata.csv").write_text("file_name,text\na.png,not this one\n")
    (tmp_path / "mine.csv").write_text("file_name,text\nb.png,this one\n")
    assert prepare(source, tmp_path / "out", "--list", str(tmp_path / "mine.csv"), command="images") == EXIT_OK
    assert {name: about["caption"] for name, about in metadata_of(tmp_path / "out").items()} == {"b.png": "this one"}


def test_fields_of_a_csv_are_numbers_only_in_their_usual_form(tmp_path):
    """Other fields, such as identifiers, are stored as text; training can read all of them."""
    fields = {"score": 0.5, "year": -1999, "small": 1e-05, "half": ".5", "large": 2**64 - 1, "huge": "1" * 21}
    fields |= {"agent": "007", "id": "1_000", "code": "00.5", "word": "nan", "arabic": "\u0663"}
    source = downloaded(tmp_path, ["a.png"])
    row = {"file_name": "a.png", **fields}
    (source / "metadata.csv").write_text(f"{','.join(row)}\n{','.join(map(str, row.values()))}\n")
    assert prepare(source, tmp_path / "out", command="images") == EXIT_OK
    [(_, about, _, _)] = samples(tmp_path / "out")
    assert {name: about[name] for name in fields} == fields | {"half": 0.5}


def test_spaces_after_the_commas_of_a_csv_belong_to_no_name_and_no_text(tmp_path):
    source = downloaded(tmp_path, ["a.png", "b.png"])
    (source / "metadata.csv").write_text('file_name, text\na.png, "a red fox, jumping"\nb.png, plain\n')
    assert prepare(source, tmp_path / "out", command="images") == EXIT_OK
    captions = {name: about["caption"] for name, about in metadata_of(tmp_path / "out").items()}
    assert captions == {"a.png": "a red fox, jumping", "b.png": "plain"}


def test_a_caption_of_a_csv_may_be_long(tmp_path):
    source, caption = downloaded(tmp_path, ["a.png"]), "red, " * 100_000 + "fox"
    (source / "metadata.csv").write_text(f'file_name,text\na.png,"{caption}"\n')
    assert prepare(source, tmp_path / "out", command="images") == EXIT_OK
    assert metadata_of(tmp_path / "out")["a.png"]["caption"] == caption


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("none.csv", "none.csv does not exist"),
        ("list.txt", "must end in .jsonl, .csv"),
        ("list.jsonl", "line 2 is not JSON: Expecting value at column 14; correct"),
        ("commas.csv", "commas.csv: row 2 has 4 fields, the header 2; put text with commas in double quotes"),
        ("excel.csv", "excel.csv: the header 'file_name;text' has no comma; separate the fields by commas"),
        ("latin.csv", "latin.csv has the byte 0xfc, which is not UTF-8; save the file as UTF-8"),
        ("twice.csv", "twice.csv: the header has 'text' twice; leave one of these columns"),
        ("header.csv", "header.csv has no row; write one for each file, or move it away"),
        ("nothing.jsonl", "nothing.jsonl has no row"),
        ("open.csv", "open.csv: unexpected end of data"),
        ("pair.csv", "pair.csv: ',' expected after '\"'"),
        ("above.jsonl", "above.jsonl, row 1: file_name '../secret.png' leaves the folder"),
        ("root.jsonl", "root.jsonl, row 1: file_name '/etc/passwd' leaves the folder"),
        ("nameless.jsonl", "nameless.jsonl, row 1: no file_name, its entries are caption; the column file_name names"),
        ("null.jsonl", "null.jsonl, row 1: file_name is None; the column"),
        ("array.jsonl", "line 1 is a list, not an object"),
    ],
)
def test_an_invalid_list_is_refused(tmp_path, capsys, name, says):
    source = downloaded(tmp_path, ["a.png"])
    lists = {
        "list.txt": "a.png",
        "list.jsonl": '{"file_name": "a.png", "text": "red"}\n{"file_name": \n',
        "commas.csv": "file_name,text\nb.png,blue\na.png,a red fox, jumping, high\n",
        "excel.csv": "file_name;text\na.png;red\n",
        "latin.csv": "file_name,text\nb.png,blue\na.png,grün\n".encode("latin-1"),
        "twice.csv": "file_name,text,text\na.png,red,blue\n",
        "header.csv": "file_name,text\n",
        "nothing.jsonl": "",
        "open.csv": 'file_name,text\na.png,"a red fox\nb.png,blue\n',
        "pair.csv": 'file_name,text\na.png,"a red fox\nb.png,"blue"\n',
        "above.jsonl": '{"file_name": "../secret.png"}',
        "root.jsonl": '{"file_name": "/etc/passwd"}',
        "nameless.jsonl": '{"caption": "nameless"}',
        "null.jsonl": '{"file_name": null, "caption": "nameless"}',
        "array.jsonl": "[1]",
    }
    words = ["--list", str(folder_of(tmp_path, lists) / name)]
    assert prepare(source, tmp_path / "out", *words, command="images") in (EXIT_CONFIG, EXIT_DATA)
    assert says in capsys.readouterr().err


def test_a_folder_that_cannot_be_created_is_refused(tmp_path, capsys):
    source = downloaded(tmp_path, ["a.png"])
    assert prepare(source, source / "a.png" / "out", command="images") == EXIT_CONFIG
    assert "Not a directory; choose another --out" in capsys.readouterr().err


def test_the_error_for_parquet_files_names_their_command(tmp_path, capsys):
    folder = folder_of(tmp_path / "in", {"train.parquet": b"PAR1"})
    for source in (folder, folder / "train.parquet"):
        assert prepare(source, tmp_path / "out", command="images") in (EXIT_CONFIG, EXIT_DATA)
        assert "prepare huggingface" in capsys.readouterr().err
