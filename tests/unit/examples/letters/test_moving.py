"""Moving letters have the direction and speed of their captions, and never leave the picture."""

import re
from pathlib import Path

import pytest
import torch
from PIL import Image

from dit.errors import ConfigError, DataError
from energon_data.prepare.__main__ import main
from examples.letters.checks import centres_of_ink
from examples.letters.fonts import CANVAS
from examples.letters.loading import load_clips, load_letters
from examples.letters.moving import (
    CLASS_NAMES,
    DIRECTIONS,
    FPS,
    OFF_MIDDLE,
    SPEEDS,
    Motion,
    prepare_moving_letters,
    render,
)

PIXEL_ATOL = 0.3  # of a pixel: thin strokes change their grey value between two pixels
MEAN_ATOL = 0.06  # the same, averaged over seven steps
FRAMES, SIZE, STILLS = 8, 16, 4


@pytest.fixture(scope="module")
def moving(tmp_path_factory: pytest.TempPathFactory, bundled_fonts: Path) -> Path:
    """Clips and stills of one font; because it has a single face, train and val share it."""
    folder = tmp_path_factory.mktemp("moving")
    (folder / "fonts").mkdir()
    (folder / "fonts" / "f.ttf").write_bytes((bundled_fonts / "DejaVuSans.ttf").read_bytes())
    counts = {"--variations": "2", "--stills": str(STILLS), "--samples-per-shard": "60"}
    arguments = [word for flag in {"--fonts": str(folder / "fonts"), **counts}.items() for word in flag]
    assert main(["moving_letters", "--out", str(folder / "data"), *arguments]) == 0
    return folder / "data"


def test_every_class_has_its_clips_and_stills(moving: Path) -> None:
    clips = load_clips(moving, "train")
    shapes = [(meta["label"], latent.shape) for latent, meta in clips]
    for label in range(len(CLASS_NAMES)):
        assert shapes.count((label, (1, FRAMES, SIZE, SIZE))) == 2
        assert shapes.count((label, (1, 1, SIZE, SIZE))) == 2 * STILLS


def test_a_clip_moves_as_in_its_metadata(moving: Path) -> None:
    """Direction and speed, in pixels per frame, are measured on the pixels: even steps, without drift to the side."""
    speeds = set()
    for latent, meta in load_clips(moving, "train"):
        assert CLASS_NAMES[meta["label"]] == f"{meta['letter']} {meta['direction']}"
        assert meta["fps"] == FPS
        assert meta["frames"] == latent.shape[1]
        if meta["frames"] == 1:
            assert meta["caption"] == f"the letter {meta['letter']}"
            continue
        assert meta["direction"] in meta["caption"].split()
        assert ("slowly" in meta["caption"]) == (meta["speed"] == "slow")
        steps = centres_of_ink(latent[None])[0].diff(dim=0)
        expected = torch.tensor(DIRECTIONS[meta["direction"]]) * meta["pixels_per_frame"]
        torch.testing.assert_close(steps.mean(0), expected, atol=MEAN_ATOL, rtol=0)
        assert (steps - expected).abs().max() < PIXEL_ATOL
        speeds.add(meta["speed"])
    assert speeds == set(SPEEDS)


def test_a_still_is_a_frame_of_its_clip(moving: Path) -> None:
    clips = {meta["key"]: latent for latent, meta in load_clips(moving, "train")}
    stills = [key for key in clips if re.search(r"_t\d\d$", key)]
    assert len(stills) == 2 * STILLS * len(CLASS_NAMES)
    for key in stills:
        t = int(key[-2:])
        assert torch.equal(clips[key], clips[key[:-4]][:, t : t + 1])


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_a_path_is_straight_and_its_middle_is_that_of_the_picture(direction: str) -> None:
    generator = torch.Generator().manual_seed(1)
    for _ in range(50):
        motion = Motion.draw(direction, FRAMES, SIZE, generator)
        assert motion.path_F2.mean(0).abs().max() <= OFF_MIDDLE * SIZE + 1e-5
        steps = motion.path_F2.diff(dim=0)
        wanted = torch.tensor(DIRECTIONS[direction]) * SPEEDS[motion.speed]
        torch.testing.assert_close(steps, wanted.expand_as(steps))


def test_glyphs_are_rendered_on_their_path() -> None:
    """The centre of ink of a round dot follows the path; the amount of ink does not change."""
    middle = (torch.arange(CANVAS) - (CANVAS - 1) / 2) ** 2
    dot = (middle[:, None] + middle < 12**2).float()
    path = torch.tensor([[-2.0, 1.0], [0.0, 0.0], [1.5, -2.5]])
    clip = render(dot, Motion("left", "slow", path), SIZE)
    centres = centres_of_ink(clip[None])[0] - (SIZE - 1) / 2
    torch.testing.assert_close(centres, path, atol=0.05, rtol=0)
    ink = (clip + 1).sum((0, 2, 3))
    torch.testing.assert_close(ink, ink[:1].expand_as(ink), rtol=0.01, atol=0)


def test_frames_are_pictures_for_the_reader(moving: Path) -> None:
    images, labels, metadata = load_letters(moving, "train")
    assert len(images) == len(labels) == len(metadata) == len(CLASS_NAMES) * 2 * (FRAMES + STILLS)
    clip, meta = load_clips(moving, "train")[0]
    assert torch.equal(images[: clip.shape[1]], clip.transpose(0, 1))
    assert set(labels[: clip.shape[1]].tolist()) == {meta["label"]}


def test_a_flipped_bit_in_a_clip_is_refused(moving: Path, copy_of) -> None:
    folder = copy_of(moving)
    shard = next(folder.glob("train-*.tar"))
    data = bytearray(shard.read_bytes())
    data[data.index(b".latent.npy") + 512 + 700] ^= 16
    shard.write_bytes(data)
    with pytest.raises(DataError, match=r"latent.npy.*CRC32"):
        load_clips(folder, "train")


def test_paths_outside_the_picture_are_refused(tmp_path: Path, bundled_fonts: Path) -> None:
    with pytest.raises(ConfigError, match="use at most 8"):
        prepare_moving_letters(tmp_path / "x", frames=9, fonts=[bundled_fonts])
    with pytest.raises(ConfigError, match=r"8\.\.64"):
        prepare_moving_letters(tmp_path / "x", size=4, fonts=[bundled_fonts])
    assert list(tmp_path.iterdir()) == []


def test_pictures_that_are_no_letters_are_refused(tmp_path: Path) -> None:
    """Data of `energon_data.prepare images` have pixels."""
    (tmp_path / "in").mkdir()
    Image.new("RGB", (16, 16)).save(tmp_path / "in" / "a.png")
    assert main(["images", "--in", str(tmp_path / "in"), "--out", str(tmp_path / "data")]) == 0
    with pytest.raises(DataError, match=r"have no latent\.npy, which letters have; choose another --metric"):
        load_clips(tmp_path / "data", "train")
