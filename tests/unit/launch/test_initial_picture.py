"""Samples start from the picture that the user names, converted to the form of the model's data."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from dit.batch import pixel_values
from dit.encoders.text_config import check_text_encoder
from dit.encoders.vae import Geometry
from dit.errors import ConfigError
from dit.inference.decoding import Decoder
from energon_data.media_files import pixels_of
from energon_data.prepare.pictures import Fit
from launch.initial_picture import check_strength, pictures_of_texts, read_initial, read_inpainting, read_reference

NOTHING = Decoder(None, torch.device("cpu"))


def picture(folder: Path, pixels: np.ndarray) -> Path:
    Image.fromarray(pixels).save(folder / "picture.png")
    return folder / "picture.png"


def test_a_picture_of_the_sample_size_is_used_unchanged(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (6, 4, 3), np.uint8)
    found = read_initial(picture(tmp_path, pixels), (1, 6, 4), 3, NOTHING)
    exact = torch.from_numpy(pixels.astype(np.float32) / 127.5 - 1).permute(2, 0, 1)[:, None]
    torch.testing.assert_close(found, exact)


def test_other_sizes_cover_the_sample_and_one_channel_is_brightness(tmp_path: Path) -> None:
    """The picture is twice as wide as the sample: black, white, black. Only its white middle remains."""
    pixels = np.zeros((8, 16, 3), np.uint8)
    pixels[:, 4:12] = 255
    found = read_initial(picture(tmp_path, pixels), (1, 8, 8), 1, NOTHING)
    assert found.shape == (1, 1, 8, 8)
    assert torch.equal(found, torch.ones_like(found))


@pytest.mark.parametrize("size", [(200, 100), (20, 41), (64, 64)])
def test_a_reference_is_fitted_as_by_the_preparation_of_data(tmp_path: Path, size: tuple[int, int]) -> None:
    """It has at most the pixels of the largest training sample (here 8 x 7 positions of 8 x 8 pixels), in any shape."""
    pixels, vae = np.random.default_rng(0).integers(0, 256, (*size[::-1], 3), np.uint8), Decoder(None, NOTHING.device)
    vae.geometry = Geometry.of({"_class_name": "AutoencoderKL", "block_out_channels": [1] * 4}, "vae")
    found = read_reference(picture(tmp_path, pixels), (8, 7), 4, 2, vae)
    fitted = Fit(size=64, multiple_of=16, enlarge=True).apply(Image.fromarray(pixels))
    assert torch.equal(found, pixel_values(pixels_of([fitted])))
    assert found.shape[2:] == {(200, 100): (48, 80), (20, 41): (80, 48), (64, 64): (64, 64)}[size]


def test_a_reference_is_a_square_where_the_training_data_were(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (20, 41, 3), np.uint8)
    found = read_reference(picture(tmp_path, pixels), (8, 8), 3, 2, NOTHING, "square")
    fitted = Fit(size=8, aspect="square", multiple_of=2, enlarge=True).apply(Image.fromarray(pixels))
    assert torch.equal(found, pixel_values(pixels_of([fitted])))
    assert found.shape == (3, 1, 8, 8)


def test_an_unsuitable_initial_picture_is_refused(tmp_path: Path) -> None:
    path = picture(tmp_path, np.zeros((4, 4, 3), np.uint8))
    (tmp_path / "text.png").write_text("no picture")
    for file, frames, channels, says in (
        (path, 8, 3, "samples have 8 frames; use --frames 1"),
        (path, 1, 4, "latents of 4 channels, and nothing encodes a picture to them; name the autoencoder with --vae"),
        (tmp_path / "text.png", 1, 3, "text.png cannot be read: 10 bytes in none of .*; name a picture"),
        (tmp_path / "missing.png", 1, 3, "missing.png cannot be read: No such file or directory; name a picture"),
    ):
        with pytest.raises(ConfigError, match=says):
            read_initial(file, (frames, 4, 4), channels, NOTHING)


def test_strength_needs_a_picture_and_lies_above_0() -> None:
    assert check_strength(None, initial=True) == 0.75
    assert check_strength(1.0, initial=True) == 1.0
    for strength in (0.0, 1.5, float("nan")):
        with pytest.raises(ConfigError, match="must be above 0 and at most 1"):
            check_strength(strength, initial=True)
    with pytest.raises(ConfigError, match=r"--strength 0\.5 is how far samples leave the picture of --init"):
        check_strength(0.5, initial=False)


def test_a_mask_that_is_dark_everywhere_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mask").mkdir()
    dark = np.zeros((6, 4, 3), np.uint8)
    with pytest.raises(ConfigError, match="the mask is dark everywhere; paint white what to generate"):
        read_inpainting([picture(tmp_path, dark), picture(tmp_path / "mask", dark)], (1, 6, 4), 3, 2, NOTHING)


def test_transparent_areas_of_a_mask_are_kept(tmp_path: Path) -> None:
    """White paint on a transparent layer, twice as large as the picture."""
    layer = np.zeros((12, 8, 4), np.uint8)
    layer[4:8, 4:8] = 255
    (tmp_path / "mask").mkdir()
    paths = [picture(tmp_path, np.zeros((6, 4, 3), np.uint8)), picture(tmp_path / "mask", layer)]
    settings, _ = read_inpainting(paths, (1, 6, 4), 3, 2, NOTHING)
    assert settings["mask"].tolist() == [[False, False], [False, True], [False, False]]


def test_a_mask_of_another_aspect_ratio_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mask").mkdir()
    mask = picture(tmp_path / "mask", np.full((6, 9), 255, np.uint8))
    for width in (4, 12, 30):
        paths = [picture(tmp_path, np.zeros((6, width, 3), np.uint8)), mask]
        with pytest.raises(ConfigError, match=f"the mask of 9 x 6 pixels .* than the picture of {width} x 6"):
            read_inpainting(paths, (1, 6, 4), 3, 2, NOTHING)


def test_a_picture_that_the_text_encoder_reads_needs_a_prompt(tmp_path: Path) -> None:
    paths = [[picture(tmp_path, np.zeros((4, 4, 3), np.uint8))] * 2]
    (tmp_path / "config.json").write_text('{"model_type": "qwen2_5_vl"}')
    line = f"{tmp_path}:prompt=qwen_image_edit"
    assert check_text_encoder(line).reads_pictures
    with pytest.raises(ConfigError, match="--reference needs --prompt"):
        pictures_of_texts(paths, line, 0)
    assert list(map(len, pictures_of_texts(paths, line, 3) or ())) == [2, 2, 2]
    assert pictures_of_texts(paths, None, 0) is None
