"""Files that only claim to be pictures or videos are refused; users' files are read, within a time limit."""

import io
import json
import os
import socket
import sys
import threading
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest
from PIL import EpsImagePlugin, Image
from small_data import read_batches, spec, write_dataset

from dit.media import reads_heic
from energon_data import colours, media_files
from energon_data.dataset import EnergonData
from energon_data.media_files import open_picture, picture_bytes, read_pixels, video_bytes
from energon_data.prepare.videos import Cut, clips_of
from energon_data.samples import SampleError
from tests.support.bounded import bounded
from tests.unit.energon_data.awkward_media import black, video
from tests.unit.energon_data.preparations import as_file, described, folder_of, noise, png, run, write_tar

PORT = 40000 + 2 * (os.getpid() % 10000)  # test processes run in parallel
ATTACKS = {
    "ffconcat": b"ffconcat version 1.0\nfile private.mp4\n",
    "ffconcat of a picture": b"ffconcat version 1.0\nfile private.png\n",
    "sdp": f"v=0\no=- 0 0 IN IP4 127.0.0.1\ns=x\nc=IN IP4 127.0.0.1\nt=0 0\nm=video {PORT} RTP/AVP 96\n"
    "a=rtpmap:96 H264/90000\n".encode(),
    "hls": b"#EXTM3U\n#EXT-X-TARGETDURATION:9\n#EXTINF:9,\nprivate.mp4\n#EXT-X-ENDLIST\n",
    "postscript": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 32 32\n%%EndComments\nshowpage\n%%EOF\n",
    "svg": b'<svg xmlns="http://www.w3.org/2000/svg" width="32" height="32"><image href="private.png"/></svg>',
}


def film(count: int = 6) -> list[Image.Image]:
    return [Image.new("RGB", (32, 32), (8 * i, 100, 50)) for i in range(count)]


def hostile_files() -> dict[str, bytes]:
    """Every attack as a picture and as a video."""
    return {f"{i}.{kind}": data for i, data in enumerate(ATTACKS.values()) for kind in ("png", "mp4")}


@pytest.fixture
def traps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Provide the targets of attacks, private files and a Ghostscript, and check at the end that none was used."""
    place = tmp_path / "working_folder"
    private = {"private.mp4": video_bytes(film(), 8.0), "private.png": picture_bytes(noise(32, 32), "png")}
    folder_of(place, private | {"gs": f"#!{sys.executable}\nopen({str(place / 'started')!r}, 'w')\n"})
    (place / "gs").chmod(0o755)
    monkeypatch.chdir(place)
    monkeypatch.setenv("PATH", str(place), prepend=":")
    monkeypatch.setattr(EpsImagePlugin, "gs_binary", None)
    seen, stop = [], threading.Event()

    def watch() -> None:
        while not stop.wait(0.01):
            lines = Path("/proc/net/udp").read_text().splitlines() if sys.platform == "linux" else []
            seen.extend(line for line in lines if f":{PORT:04X} " in line)

    watching = threading.Thread(target=watch)
    watching.start()
    yield
    stop.set()
    watching.join()
    assert not seen, "a UDP port was opened"
    assert not (place / "started").exists(), "Ghostscript was started"


@pytest.mark.skipif(sys.platform != "linux", reason="/proc/net/udp")
def test_the_port_check_detects_an_open_port():
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as opened:
        opened.bind(("127.0.0.1", PORT))
        assert f":{PORT:04X} " in Path("/proc/net/udp").read_text()


@pytest.mark.usefixtures("traps")
@pytest.mark.parametrize("command", ["folder", "webdataset"])
def test_prepare_refuses_files_that_only_claim_to_be_media(tmp_path: Path, command: str):
    files = {"good.png": picture_bytes(noise(32, 32), "png"), "fine.mp4": video_bytes(film(), 8.0), **hostile_files()}
    if command == "webdataset":
        members = [(name.replace(".", f"-{name[-3:]}."), data) for name, data in files.items()]
        source = write_tar(tmp_path / "in" / "0.tar", *members).parent
    else:
        source = folder_of(tmp_path / "in", files)
    about = described(source, tmp_path / "out", command=command)
    assert about["skipped"] == {"bad_image": len(ATTACKS), "bad_video": len(ATTACKS)}
    assert about["samples"] == {"train": 2}


def read(folder: Path, parts: dict[str, bytes], log_dir: Path) -> dict[str, str]:
    """Train on eight pictures and on samples with one part each; return the reason why each of these is lost."""
    good = [(f"good{i}", {}, {"pixels.png": picture_bytes(noise(32, 32), "png")}) for i in range(8)]
    bad = [(f"bad{i}", {}, {f"pixels.{name.rpartition('.')[2]}": data}) for i, (name, data) in enumerate(parts.items())]
    write_dataset(folder, {"train": [*good[:4], *bad, *good[4:]]}, per_shard=99)
    data = EnergonData(path=str(folder), shuffle_buffer=0, max_lost_samples=len(bad))
    wanted = spec(latent_channels=3, num_classes=None, context_size=None)
    batches, _ = read_batches(data, wanted, 2, log_dir=log_dir)
    assert {key for batch in batches for key in batch.keys} == {f"train_good{i}" for i in range(8)}
    lines = map(json.loads, (log_dir / "data_skipped.jsonl").read_text().splitlines())
    return {list(parts)[int(line["key"].removeprefix("train_bad"))]: line["reason"] for line in lines if line["lost"]}


@pytest.mark.usefixtures("traps")
def test_training_refuses_files_that_only_claim_to_be_media(tmp_path: Path):
    reasons = {name: "bad_image" if name.endswith("png") else "bad_video" for name in hostile_files()}
    assert read(tmp_path / "data", hostile_files(), tmp_path / "run") == reasons


# Files of users.


@pytest.mark.parametrize(
    ("container", "codec", "pixels"),
    [
        ("mp4", "libx264", "yuv420p"),
        ("mp4", "libx265", "yuv420p"),
        ("mp4", "libsvtav1", "yuv420p"),
        ("ipod", "libx264", "yuv420p"),  # .m4v
        ("mov", "libx264", "yuv420p"),
        ("mov", "prores_ks", "yuv422p10le"),
        ("matroska", "libx264", "yuv444p"),
        ("matroska", "ffv1", "yuv420p"),
        ("webm", "libvpx", "yuv420p"),
        ("webm", "libvpx-vp9", "yuv420p"),
        ("avi", "mpeg4", "yuv420p"),
        ("avi", "mjpeg", "yuvj420p"),
    ],
)
def test_usual_containers_and_codecs_are_read(container: str, codec: str, pixels: str):
    if codec not in av.codecs_available:
        pytest.skip(f"this PyAV has no {codec}")
    pictures = [picture.resize((64, 64)) for picture in film()]
    assert read_pixels(video(pictures, container, codec, pixels), "mp4").shape == (3, 6, 64, 64)


@pytest.mark.parametrize(("container", "codec"), [("mpegts", "mpeg2video"), ("flv", "flv1")])
def test_other_containers_are_refused(container: str, codec: str):
    with pytest.raises(SampleError, match="unreadable video"):
        read_pixels(video(film(), container, codec, "yuv420p", rate=25), "mp4")


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "MPO", "AVIF", "HEIF"])
def test_usual_pictures_are_read(kind: str):
    if kind == "HEIF" and not reads_heic():
        pytest.skip("pillow-heif is not installed")
    several = {"save_all": True, "append_images": [Image.new("RGB", (24, 16))]} if kind == "MPO" else {}
    data = as_file(Image.new("RGB", (24, 16), (255, 0, 0)), kind, **several)
    assert Image.open(io.BytesIO(data)).format == kind
    opened = open_picture(data)
    assert opened.size == (24, 16)
    assert np.abs(np.asarray(opened, int) - (255, 0, 0)).max() < 8


@pytest.mark.parametrize("kind", ["PPM", "TGA", "ICO"])
def test_other_pictures_are_refused(kind: str):
    with pytest.raises(SampleError, match="in none of the formats PNG, JPEG"):
        open_picture(as_file(noise(32, 32), kind))


@pytest.mark.parametrize("size", [(16385, 16384), (32769, 1), (60_000, 60_000), (2**31 - 1, 2**31 - 1)])
def test_a_header_with_too_many_pixels_is_refused_before_decoding(size: tuple[int, int], tmp_path: Path):
    """Pillow has other limits, and an error without numbers; preparation counts such a picture as skipped."""
    source = folder_of(tmp_path / "in", {"bomb.png": black(*size, rows=0), "good.png": as_file(noise(32, 32))})
    record = described(source, tmp_path / "out")
    message = f"{size[0]} x {size[1]} pixels; at most 268,435,456 in total and 32,768 per side; scale it down"
    assert record["skipped_examples"] == {"too_large": [f"bomb.png: {message}"]}


@pytest.mark.filterwarnings("error")
def test_a_200_megapixel_picture_is_decoded_without_copies():
    size = (16320, 12240)  # 0.8 GB, four bytes a pixel
    data = black(*size, rows=12240)
    assert bounded(lambda: open_picture(data).size, memory_bytes=1 << 30) == size


@pytest.mark.parametrize("mode", ["RGBA", "LA", "F", "I", "P"])
def test_decoding_in_bands_changes_no_pixel(mode: str, monkeypatch: pytest.MonkeyPatch):
    picture = Image.merge("RGBA", (*noise(40, 40).split(), noise(40, 40, seed=1).getchannel(0))).convert(mode)
    data = as_file(picture, "TIFF" if mode in ("F", "I") else "PNG", **({"transparency": 7} if mode == "P" else {}))
    opened = np.asarray(open_picture(data))
    monkeypatch.setattr(colours, "_BAND", 7)
    assert np.array_equal(np.asarray(open_picture(data)), opened)
    assert opened.std() > 10


# Damage that used to end in a traceback.


@pytest.mark.parametrize("kind", ["PNG", "WEBP", "JPEG"])
@pytest.mark.parametrize("exif", [b"Exif\0\0garbage", b"Exif\0\0MM\0*", b"no header"])
@pytest.mark.filterwarnings("ignore:Corrupt EXIF")
def test_a_picture_with_damaged_exif_data_is_read_as_stored(kind: str, exif: bytes):
    opened = open_picture(as_file(noise(32, 16), kind, exif=exif))
    assert not opened.info["turned"]
    assert kind != "PNG" or np.array_equal(np.asarray(opened), np.asarray(noise(32, 16)))


def test_a_flipped_byte_of_a_png_is_damage():
    data = bytearray(as_file(noise(64, 64), "PNG"))
    data[len(data) // 2] ^= 0xFF
    with pytest.raises(SampleError) as caught:
        open_picture(bytes(data))
    assert caught.value.reason == "bad_image"


def test_a_file_that_its_format_cannot_store_is_skipped_with_its_size(tmp_path: Path):
    """WebP has at most 16,383 pixels a side, and H.264 16,384."""
    wide = Image.new("L", (16_400, 16))
    files = {"wide.png": as_file(wide), "wide.mkv": video([wide], "matroska", "ffv1"), "fine.png": png(0)}
    found = described(folder_of(tmp_path / "in", files), tmp_path / "out", "--format", "webp", command="folder")
    assert found["samples"] == {"train": 1}
    texts = found["skipped_examples"]["not_stored"]
    assert [text[:55] for text in texts] == [
        "wide.mkv: 16400 x 16 pixels cannot be stored as mp4: Ge",
        "wide.png: 16400 x 16 pixels cannot be stored as webp: e",
    ]


def test_the_frames_of_a_clip_have_a_limit_in_memory(monkeypatch: pytest.MonkeyPatch):
    """A small file may have a hundred thousand large frames. Each clip has its own limit, after scaling."""
    data = video_bytes(film(24), 8.0)
    monkeypatch.setattr(media_files, "MAX_CLIP_PIXELS", 10 * 32 * 32)
    for read_all in (lambda: read_pixels(data, "mp4"), lambda: list(clips_of(data, Cut()))):
        with pytest.raises(SampleError, match="more than 10,240 pixels; cut the video") as caught:
            read_all()
        assert caught.value.reason == "too_large"
    assert [len(frames) for frames, _ in clips_of(data, Cut(frames=8))] == [8, 8, 8]
    assert len(next(clips_of(data, Cut(), fit=lambda frame: frame.resize((16, 16))))[0]) == 24


def of_two_sizes(instants: tuple[int, ...] = (0, 1, 2)) -> bytes:
    """Pictures of 32 x 32 and 48 x 32 pixels, eight per second."""
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="matroska") as file:
        stream = file.add_stream("mjpeg", rate=8)
        stream.width, stream.height, stream.pix_fmt = 32, 32, "yuvj420p"
        for number, instant in enumerate(instants):
            packet = av.Packet(as_file(Image.new("RGB", (48 if number == 1 else 32, 32)), "JPEG"))
            packet.stream, packet.time_base, packet.pts, packet.dts = stream, Fraction(1, 8), instant, instant
            file.mux(packet)
    return buffer.getvalue()


def test_a_video_of_an_unknown_codec_or_of_several_sizes_is_refused(tmp_path: Path):
    files = {"unknown.mp4": video_bytes(film(), 8.0).replace(b"avc1", b"zzzz"), "sizes.mkv": of_two_sizes()}
    assert read(tmp_path / "data", files, tmp_path / "run") == dict.fromkeys(files, "bad_video")
    source = folder_of(tmp_path / "in", files)
    assert run(source, tmp_path / "none", command="videos") == 3
    cut_to_one_size = described(source, tmp_path / "out", "--size", "32", "--aspect", "square", command="videos")
    examples = cut_to_one_size["skipped_examples"]
    assert examples == {"bad_video": ["unknown.mp4: FFmpeg has no decoder for its video stream"]}


def test_a_gap_in_time_is_filled_with_a_bounded_number_of_frames(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(media_files, "MAX_FRAMES", 100)
    assert len(next(clips_of(of_two_sizes((0, 1, 90)), Cut(fps=8.0)))[0]) == 91
    with pytest.raises(SampleError, match="more than 100 frames"):
        list(clips_of(of_two_sizes((0, 1, 10**6)), Cut(fps=8.0)))


# Time.


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A processor clock that advances by a second at each reading, and a limit of 15 s."""
    now = [0.0]

    def thread_time() -> float:
        now[0] += 1
        return now[0]

    monkeypatch.setattr(media_files.time, "thread_time", thread_time)
    monkeypatch.setattr(media_files, "MAX_SECONDS", 15)
    return now


def test_a_video_has_a_time_limit_for_each_of_its_clips(clock: list[float]):
    """The time between two clips does not count, because preparation encodes a clip before it decodes the next."""
    data = video_bytes(film(24), 8.0)
    with pytest.raises(SampleError, match="more than 15 s") as caught:
        list(clips_of(data, Cut()))
    assert caught.value.reason == "too_slow"
    lengths = []
    for frames, _ in clips_of(data, Cut(frames=6)):
        lengths.append(len(frames))
        clock[0] += 1000
    assert lengths == [6, 6, 6, 6]


@pytest.mark.usefixtures("clock")
@pytest.mark.parametrize("kind", ["PNG", "JPEG"])
def test_a_picture_has_a_time_limit(monkeypatch: pytest.MonkeyPatch, kind: str):
    files = [as_file(noise(side, side), kind, quality=100, compress_level=1) for side in (64, 2000)]
    monkeypatch.setattr(media_files, "MAX_SECONDS", 60)  # pieces of 64 KiB, and those of the header
    assert open_picture(files[0]).size == (64, 64)
    with pytest.raises(SampleError) as caught:
        open_picture(files[1])
    assert caught.value.reason == "too_slow"


@pytest.mark.usefixtures("clock")
def test_training_drops_and_counts_slow_samples(tmp_path: Path):
    files = {"long.mp4": video_bytes(film(24), 8.0)}
    assert read(tmp_path / "data", files, tmp_path / "run") == {"long.mp4": "too_slow"}
