"""Pixels are where the layout puts them, and a file is complete or missing."""

import os

import numpy as np
import pytest
import torch
from PIL import Image

from dit.errors import ConfigError
from dit.sampling import grid


def pixels(image: Image.Image) -> torch.Tensor:
    return torch.from_numpy(np.array(image))


@pytest.mark.parametrize(("columns", "captions"), [(1, True), (2, False), (3, True), (5, True)])
def test_every_pixel_of_every_tile_is_at_the_place_of_the_formula(columns, captions):
    """Each image is random; the tile cut out at `tile_origin` is the enlarged image to the bit."""
    images = torch.rand(5, 1, 6, 4, generator=torch.Generator().manual_seed(1)) * 2 - 1
    names = list("ABCDE") if captions else None
    drawn = pixels(grid.image_grid(images, names, columns, scale=3))
    expected = grid.to_bytes(images).repeat_interleave(3, 1).repeat_interleave(3, 2)
    for index in range(5):
        left, top = grid.tile_origin(index, columns, 18, 12, captions=captions)
        assert torch.equal(drawn[top : top + 18, left : left + 12], expected[index])


def test_captions_have_the_letters_of_european_languages():
    font = grid.caption_font(12)
    missing = bytes(font.getmask("\uffff"))
    assert all(bytes(font.getmask(letter)) != missing for letter in "äöüßéñ—Ωж")


def test_captions_are_drawn_outside_of_tiles():
    """The longest caption determines the number of lines above every tile."""
    images = torch.full((4, 3, 8, 8), -1.0)
    drawn = pixels(grid.image_grid(images, ["a red circle and a square", "a", "WWWWWWWWWWWW", " "], 2, scale=8))
    background = torch.tensor(grid.BACKGROUND, dtype=torch.uint8)
    lines = []
    for index in range(4):
        left, top = grid.tile_origin(index, 2, 64, 64, captions=3)
        assert not drawn[top : top + 64, left : left + 64].any()
        above = (drawn[top - 48 : top, left : left + 64] != background).any(-1).any(1).view(3, 16).any(1)
        lines.append(above.tolist())
    assert lines == [[True] * 3, [False, False, True], [True] * 3, [False] * 3]


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("a green circle", ["a green", "circle"]),
        ("one", ["one"]),
        ("", [""]),
        ("incomprehensible", ["incomprehe", "nsible"]),
        ("a incomprehensible b", ["a", "incomprehe", "nsible b"]),
        ("a woman skiing on a white mountain", ["a woman", "skiing on", "a white…"]),
        ("  spaces \n and  lines ", ["spaces and", "lines"]),
        ("x" * 100_000, ["x" * 10, "x" * 10, "x" * 9 + "…"]),
    ],
)
def test_a_caption_is_broken_between_words_and_cut_only_after_its_last_line(text, lines):
    assert grid.wrap(text, 10, 3, len) == lines


def test_values_map_to_bytes_by_rounding_and_clip():
    values = torch.tensor([-5.0, -1.0, 0.0, 1.0, 5.0]).view(1, 1, 1, 5)
    assert grid.to_bytes(values)[0, 0, :, 0].tolist() == [0, 0, 128, 255, 255]


def test_preview_colours_keep_their_order():
    red = torch.tensor([1.0, -1.0, -1.0]).view(1, 3, 1, 1)
    assert grid.to_bytes(red)[0, 0, 0].tolist() == [255, 0, 0]


def test_pictures_are_unchanged_and_latents_get_a_preview():
    picture = torch.tensor([-2.0, 0.5]).view(1, 1, 1, 1, 2)
    assert grid.to_pictures(picture).flatten().tolist() == [-1.0, 0.5]
    latents = torch.randn(2, 16, 1, 8, 8, generator=torch.Generator().manual_seed(1)) * torch.tensor([1.0, 50.0]).view(
        2, 1, 1, 1, 1
    )
    preview = grid.to_pictures(latents)
    assert preview.shape == (2, 3, 1, 8, 8)
    # Scaled per sample, so a sample with values fifty times as large looks alike.
    assert preview.std((1, 2, 3, 4)) == pytest.approx(torch.full((2,), 1 / 3).numpy(), rel=0.02)


def test_wrong_input_is_refused():
    with pytest.raises(ConfigError, match="1 or 3 channels, got 4"):
        grid.image_grid(torch.zeros(1, 4, 8, 8))
    with pytest.raises(ConfigError, match="2 images have 3 captions"):
        grid.image_grid(torch.zeros(2, 1, 8, 8), ["a", "b", "c"])
    with pytest.raises(ConfigError, match="got 0"):
        grid.image_grid(torch.zeros(0, 1, 8, 8))


def test_a_saved_picture_reads_back_the_same(tmp_path):
    image = grid.image_grid(torch.zeros(3, 1, 8, 8), ["a", "b", "c"])
    path = grid.save_png(image, tmp_path / "new" / "grid.png")
    assert torch.equal(pixels(Image.open(path)), pixels(image))
    assert [p.name for p in path.parent.iterdir()] == ["grid.png"]


def test_a_failed_write_leaves_the_old_picture_and_no_temporary_file(tmp_path, monkeypatch):
    image = grid.image_grid(torch.zeros(1, 1, 8, 8))
    path = grid.save_png(image, tmp_path / "grid.png")
    before = path.read_bytes()

    def full_disk(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(OSError, match="No space left"):
        grid.save_png(image, path)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["grid.png"]
