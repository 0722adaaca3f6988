"""The report of `energon_data.inspect` matches the data in the folder and the packs of the loader."""

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from small_data import clips, npy, spec, write_dataset

from dit.encoders.vae import load_vae
from dit.errors import DataError
from dit.sampling.grid import CAPTION_HEIGHT, GAP, tile_origin, to_bytes
from energon_data.dataset import EnergonData
from energon_data.folder import check_dataset
from energon_data.inspect import TILE, main, tile_of
from energon_data.report.survey import expected_packing, survey
from tests.support.encoders import prepare_twice
from tests.unit.energon_data.preparations import as_file, described, folder_of, png


def page(capsys: pytest.CaptureFixture, *words: str) -> dict[str, list[str]]:
    """Run the command; return the text after each heading and the lines below it."""
    assert main(list(words)) == 0
    found, heading = dict[str, list[str]](), ""
    for line in capsys.readouterr().out.splitlines():
        if line.startswith("  "):
            found[heading].append(" ".join(line.split()))
        else:
            heading, _, text = line.partition(" ")
            found[heading] = [text.strip()]
    return found


def test_the_page_describes_the_written_samples(mixed_folder: Path, capsys: pytest.CaptureFixture):
    """75 samples of three sizes in turn, 25 of them clips of two frames at 12 per second, texts of 1 to 8 tokens."""
    found = page(capsys, str(mixed_folder))
    size = sum(path.stat().st_size for path in mixed_folder.glob("train-*.tar")) / 2**20
    assert found["samples"] == [f"75 in 5 shards, {size:.1f} MiB (a shard: 11 to 16, median 16.0 samples)"]
    assert found["read"] == ["75 of them"]
    assert found["holds"] == ["aesthetic_score, fps, label, latent, text"]
    assert found["channels"] == ["2"]
    sizes = {" ".join(row.split()[:5]): row.split()[5:7] for row in found["sizes"][1:]}
    assert sizes == {size: ["25", "33.3%"] for size in ("1 x 4 x 4", "2 x 4 x 4", "1 x 6 x 8")}
    assert found["clips"] == ["25, 2 frames"]
    assert found["durations"] == [f"0.17 s, {25 * 2 / 12:.1f} s in all"]
    assert found["texts"] == ["1 to 8, median 4.0 tokens"]
    assert found["captions"] == ["none"]
    assert found["tokens"] == ["4 to 12, median 8.0, with patches of 1x2x2"]
    assert "refused" not in found
    assert "damaged" not in found


def test_samples_that_patches_do_not_divide_are_reported(mixed_folder: Path, capsys: pytest.CaptureFixture):
    """An image fills a patch of two frames by repetition."""
    found = page(capsys, str(mixed_folder), "--patch", "2x4x4")
    assert found["refused"][0].startswith("25 cannot be cut into patches of 2x4x4, such as train_clip00002: 1 x 6 x 8")
    assert found["tokens"] == ["1, with patches of 2x4x4"]


@pytest.mark.parametrize(("capacity", "multiple_of"), [(24, 1), (16, 1), (20, 8)])
def test_packs_equal_those_of_the_loader(mixed_folder: Path, capacity: int, multiple_of: int):
    """With all samples in one buffer, the estimate and the loader pack the same; all tokens except padding are real."""
    info = check_dataset(str(mixed_folder), "train")
    lengths = [one.tokens((1, 2, 2)) for one in survey(info, limit=None).seen]
    expected = expected_packing(lengths, capacity, multiple_of=multiple_of)
    data = EnergonData(
        path=str(mixed_folder),
        max_tokens_per_pack=capacity - capacity % multiple_of,
        pack_multiple_of=multiple_of,
        validation_split="train",
        validation_samples=None,
    )
    wanted = spec(multiple_of=multiple_of, micro_batch_size=1)
    layouts = [pack.layout for pack in data.build_validation(wanted, dp_rank=0, dp_size=1)]
    assert expected.packs == len(layouts)
    assert expected.samples == sum(layout.num_samples for layout in layouts) == 75 * (1 - expected.too_long)
    assert expected.real == sum(layout.valid_tokens for layout in layouts) / (len(layouts) * capacity)


def test_packs_have_complete_passes_and_no_long_samples():
    """Two passes over 5 + 3 fit into a pack of 20, and one over three samples of 8 fills one and a half of 16."""
    packing = expected_packing([5, 3, 21], 20)
    assert (packing.packs, packing.samples, packing.real) == (1, 4, 16 / 20)
    assert packing.too_long == pytest.approx(1 / 3)
    assert expected_packing([8] * 3, 16)[:3] == (2, 3, 24 / 32)
    assert expected_packing([8] * 300, 16)[:2] == (150, 300)
    with pytest.raises(DataError, match="none of 1 samples fits into packs of 8 tokens; the shortest has 9"):
        expected_packing([9], 8)


def test_a_part_of_a_large_folder_is_read_evenly(mixed_folder: Path, capsys: pytest.CaptureFixture):
    info = check_dataset(str(mixed_folder), "train")
    assert [one.key for one in survey(info, limit=5).seen] == [f"train_clip{i:05d}" for i in (0, 15, 30, 45, 60)]
    assert page(capsys, str(mixed_folder), "--samples", "5")["read"] == ["5 of them, evenly distributed"]


def test_damage_is_counted_as_in_training(
    mixed_folder: Path, copy_of: Callable[[Path], Path], capsys: pytest.CaptureFixture
):
    """Changed values of a latent lose one sample, named with its shard; if no sample is left, the command fails."""
    folder = copy_of(mixed_folder)
    shard = folder / "train-000001.tar"
    written = np.full(4, 20, np.float32).tobytes()  # all values of sample 20 are 20
    shard.write_bytes(shard.read_bytes().replace(written, bytes(16), 1))
    found = page(capsys, str(folder))
    assert found["read"] == ["75 of them"]
    assert re.fullmatch(r"checksum: 1, the first: train-000001.tar/train_clip00020: .*CRC32.*", found["damaged"][0])
    assert sum(int(row.split()[5]) for row in found["sizes"][1:]) == 74
    for path in folder.glob("train-*.tar"):
        path.write_bytes(bytes(path.stat().st_size))
    assert main([str(folder)]) == 3
    assert "none of 75 samples" in capsys.readouterr().err


COLORS = [(255, 0, 0), (0, 255, 0), (0, 0, 255)]


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    """Three pictures of one colour each, two with captions."""
    red, green, blue = (
        {"pixels.png": as_file(Image.new("RGB", size, color))}
        for size, color in zip(((16, 8), (8, 16), (400, 400)), COLORS, strict=True)
    )
    samples = [
        ("0", {"caption": "a red field"}, red),
        ("1", {}, green | {"txt": b"green grass\n"}),
        ("2", {"note": "no caption"}, blue),
    ]
    return write_dataset(tmp_path / "pictures", {"train": samples})


def test_the_page_shows_captions_and_pictures(pictures: Path, tmp_path: Path, capsys: pytest.CaptureFixture):
    """Each tile of the sheet has its picture in the centre, at the largest size that fits, undistorted."""
    sheet = tmp_path / "sheet.png"
    found = page(capsys, str(pictures), "--sheet", str(sheet))
    assert found["captions"] == [
        "66.7% of the samples, 2 different, 2 to 3, median 2.5 words",
        "'a red field'",
        "'green grass'",
    ]
    assert found["sheet"] == [f"{sheet}: 3 samples"]
    pixels = np.asarray(Image.open(sheet))
    for color, area in zip(COLORS, (TILE * TILE // 2, TILE * TILE // 2, TILE * TILE), strict=True):
        rows, columns = np.nonzero((pixels == color).all(-1))
        assert len(rows) == area == (np.ptp(rows) + 1) * (np.ptp(columns) + 1)


def test_latents_are_shown_in_false_colours(mixed_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture):
    sheet = tmp_path / "sheet.png"
    found = page(capsys, str(mixed_folder), "--sheet", str(sheet))
    (line,) = found["sheet"]
    assert line == f"{sheet}: 36 samples; latents in false colours: --vae decodes them"
    assert Image.open(sheet).size[0] == 6 * (TILE + GAP) + GAP


def test_a_named_autoencoder_decodes_latents(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """Each tile is the decoded latent of its sample; data with another number of channels are refused."""
    root = prepare_twice(tmp_path)
    sheet, vae = tmp_path / "sheet.png", root / "vae"
    capsys.readouterr()
    found = page(capsys, str(root / "latents"), "--sheet", str(sheet), "--vae", str(vae))
    assert found["sheet"] == [f"{sheet}: 12 samples; latents decoded by {vae}"]
    info = check_dataset(root / "latents", "train")
    shown = survey(info, limit=None, pictures=12, show=lambda latent: latent[:, 0]).shown
    pixels = np.asarray(Image.open(sheet))
    lines = ((len(pixels) - GAP) // 3 - TILE - GAP) // CAPTION_HEIGHT
    for index, (_, latent) in enumerate(shown):
        decoded = load_vae(str(vae)).decode(latent[None, :, None])[0, :, 0]
        left, top = tile_origin(index, 4, TILE, TILE, captions=lines)
        assert np.array_equal(pixels[top : top + TILE, left : left + TILE], to_bytes(tile_of(decoded)).numpy())
    assert main([str(root / "pixels"), "--sheet", str(sheet), "--vae", str(vae)]) == 2
    assert "decodes latents of 4 channels, and the samples have 3" in capsys.readouterr().err
    assert main([str(root / "latents"), "--vae", str(vae)]) == 2
    assert "add --sheet FILE.png" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "code", "expected"),
    [
        (["--patch", "2x2"], 2, "--patch must be TxHxW such as 1x2x2, got '2x2'"),
        (["--pack", "0"], 2, "--pack 0 must be at least 1"),
        (["--pack", "3"], 3, "none of 75 samples fits into packs of 3 tokens; the shortest has 4"),
        (["--split", "test"], 3, "has no split 'test', only ['train', 'val']"),
    ],
)
def test_a_user_error_has_one_line(mixed_folder: Path, capsys: pytest.CaptureFixture, words, code, expected):
    assert main([str(mixed_folder), *words]) == code
    assert expected in capsys.readouterr().err


def test_samples_without_checksums_are_read_on_request(tmp_path: Path, capsys: pytest.CaptureFixture):
    folder = tmp_path / "data"
    write_dataset(folder, {"train": [("a", {}, {"latent.npy": npy(np.zeros((2, 1, 4, 4), np.float32))})]})
    shard = folder / "train-000000.tar"
    shard.write_bytes(shard.read_bytes().replace(b'"crc32"', b'"other"'))
    assert main([str(folder)]) == 3
    assert "no_checksum" in capsys.readouterr().err
    assert page(capsys, str(folder), "--no-checksums")["read"] == ["1 of them"]


@pytest.mark.parametrize(("scale", "warns"), [(255, False), (60, True)])
def test_the_scale_of_latents_is_printed_with_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture, scale: int, warns: bool
):
    """Preparation and `inspect` print the numbers of numpy. The autoencoder `identity` returns the pixels."""
    out = tmp_path / "out"
    pixels = np.random.default_rng(0).integers(0, 2, (4, 16, 16, 3)) * scale
    pictures = {f"{i}.png": as_file(Image.fromarray(x)) for i, x in enumerate(pixels.astype(np.uint8))}
    found = described(folder_of(tmp_path / "in", pictures), out, "--vae", "identity", "--samples-per-shard", "3")
    latents = (pixels / 127.5 - 1).astype(np.float16).astype(np.float64)
    expected = f"mean {latents.mean():.3g}, standard deviation {latents.std():.3g}"
    expected += "; warning: training expects about 1 (0.5 to 2), check scaling_factor" if warns else ""
    said = capsys.readouterr().out
    assert f"  latents: {expected}" in said
    assert ("warning" in said) == warns
    assert found["latent_std"] == pytest.approx(latents.std())
    assert page(capsys, str(out))["latents"][0].startswith(expected)


def test_pixels_have_no_scale_of_latents(tmp_path: Path, capsys: pytest.CaptureFixture):
    described(folder_of(tmp_path / "in", {"0.png": png(0)}), tmp_path / "out")
    assert "latents" not in capsys.readouterr().out
    assert "latents" not in page(capsys, str(tmp_path / "out"))


LONG_AND_SHORT = [(1, 4, 4), (4, 8, 8), (1, 4, 4), (8, 8, 8)]


@pytest.mark.parametrize(
    ("settings", "lines"),
    [
        (
            {"max_tokens_per_pack": 64},
            [
                "12 of 24 clips have more than data.max_tokens_per_pack=64 tokens (the longest 128) and are dropped; "
                "raise data.max_tokens_per_pack to 128"
            ],
        ),
        (
            {"max_tokens_per_pack": 1024, "max_tokens_per_sample": 63},
            [
                "24 of 24 clips have more than data.max_tokens_per_sample=63 tokens (the longest 128) and are dropped; "
                "raise data.max_tokens_per_sample to 128"
            ],
        ),
        (
            {"min_aesthetic_score": 0.75},
            [
                "18 of 24 images are dropped (aesthetic_score), the first: aesthetic score 0, expected at least 0.75",
                "18 of 24 clips are dropped (aesthetic_score), the first: aesthetic score 0.0208333, expected at "
                "least 0.75",
            ],
        ),
        (
            {"max_caption_length": 9},
            [
                "24 of 24 images are dropped (caption_length), the first: no caption length, expected at most 9",
                "24 of 24 clips are dropped (caption_length), the first: no caption length, expected at most 9",
            ],
        ),
        ({"max_tokens_per_pack": 128}, []),
        ({}, []),
    ],
)
def test_expected_drops_are_reported_before_training(
    tmp_path: Path, settings: dict[str, Any], lines: list[str]
) -> None:
    folder = write_dataset(tmp_path / "data", {"train": clips(48, sizes=LONG_AND_SHORT)})
    data = EnergonData(path=str(folder), **settings)
    assert data.remarks(spec(micro_batch_size=1)) == [f"{folder}: {line}" for line in lines]


def test_shards_that_a_user_added_to_a_folder_are_reported_as_not_read(tmp_path: Path) -> None:
    samples = {"train": clips(8, sizes=[(1, 4, 4)]), "val": clips(2, sizes=[(1, 4, 4)])}
    folder = write_dataset(tmp_path / "data", samples, per_shard=4)
    data = EnergonData(path=str(folder))
    assert data.remarks(spec()) == []
    for name in ("more.tar", "train-000002.tar"):
        shutil.copy(folder / "train-000000.tar", folder / name)
    [remark] = data.remarks(spec())
    assert f"{folder} has 2 tar files in no split, such as more.tar, which training does not read" in remark


def test_only_some_samples_are_read_before_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are evenly distributed, and fewer are read if reading is slow."""
    monkeypatch.setattr("energon_data.report.survey.MOST_BEFORE_TRAINING", 16)
    folder = write_dataset(tmp_path / "data", {"train": clips(48, sizes=[(4, 8, 8)] + [(1, 4, 4)] * 3)})
    data = EnergonData(path=str(folder), max_tokens_per_pack=32)
    assert data.remarks(spec(micro_batch_size=1))[0].startswith(f"{folder}, 16 of 48 samples: 4 of 4 clips have")
    monkeypatch.setattr("energon_data.report.survey.SECONDS", 0.0)
    assert data.remarks(spec(micro_batch_size=1))[0].startswith(f"{folder}, 2 of 48 samples: 2 of 2 clips")
