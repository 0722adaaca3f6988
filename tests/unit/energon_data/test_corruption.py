"""Laws of corrupted small pictures: each part against its formula, drawn by address, the same after a resume."""

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from small_data import pictures, spec, write_dataset

from dit.batch import PackedBatch, pixel_values
from dit.condition_table import LOW_RESOLUTION
from dit.data_api import BatchSpec, sample_id
from dit.errors import ConfigError
from dit.patchify import unpatchify
from dit.resize import LowResolution, enlarged, reduced
from energon_data.augment import Visit
from energon_data.corruption import (
    Corruption,
    Span,
    blur_sigma,
    blurred,
    resized,
    through_jpeg,
    with_noise,
    with_poisson_noise,
)
from energon_data.dataset import EnergonData
from energon_data.media_files import open_picture, pixels_of

NOTHING = Span(low=0.0, high=0.0)
QUIET: dict[str, Any] = {
    **{"blur": 0.0, "enlarge": 0.0, "reduce": 0.0},
    **{"noise": NOTHING, "second_noise": NOTHING, "poisson": NOTHING},
}
GREY = 2 / 255  # one grey level of pictures in [-1, 1]


def draws(number: int = 0) -> np.random.Generator:
    return Visit(3, 0, number, 17).generator("/corruption")


def photograph(side: int = 24, frames: int = 1) -> torch.Tensor:
    """Return `[3, T, side, side]` in [-0.8, 0.8], smooth, every frame alike."""
    rows, columns = torch.meshgrid(torch.linspace(0, 3, side), torch.linspace(0, 3, side), indexing="ij")
    return (0.8 * torch.stack([rows.sin(), columns.cos(), (rows * columns).sin()]))[:, None].repeat(1, frames, 1, 1)


def test_nothing_asked_for_changes_nothing() -> None:
    x = photograph()
    assert torch.equal(Corruption(**QUIET)(x, draws()), x)


@pytest.mark.parametrize("radius", [1, 2, 3])
def test_a_blur_is_a_gaussian_of_the_radius(radius: int) -> None:
    """A point becomes the product of two Gaussians cut off at the radius; a surface stays as it is."""
    x = torch.zeros(1, 1, 15, 15)
    x[..., 7, 7] = 1
    offsets = np.arange(-radius, radius + 1)
    sigma = {1: 0.8, 2: 1.1, 3: 1.4}[radius]
    assert blur_sigma(radius) == pytest.approx(sigma)
    weights = np.exp(-(offsets**2) / (2 * sigma**2))
    expected = np.zeros((15, 15))
    expected[7 - radius : 8 + radius, 7 - radius : 8 + radius] = np.outer(weights, weights) / weights.sum() ** 2
    np.testing.assert_allclose(blurred(x, radius)[0, 0].numpy(), expected, atol=1e-7)
    surface = torch.full((3, 2, 5, 6), 0.3)
    torch.testing.assert_close(blurred(surface, radius), surface)


def test_gaussian_noise_has_its_deviation_in_grey_levels() -> None:
    noise = (with_noise(torch.zeros(3, 1, 200, 200), 2.5, draws()) / GREY).double()
    count = noise.numel()
    assert abs(noise.mean().item()) < 4 * 2.5 / count**0.5
    assert abs(noise.std().item() / 2.5 - 1) < 4 / (2 * count) ** 0.5


@pytest.mark.parametrize("level", [0.0, 20.0, 180.0])
def test_the_variance_of_poisson_noise_is_the_grey_level(level: float) -> None:
    strength = 1.5
    x = torch.full((3, 1, 200, 200), level * GREY - 1, dtype=torch.float32)
    noise = ((with_poisson_noise(x, strength, draws()) - x) / GREY).double()
    count = noise.numel()
    assert abs(noise.mean().item()) <= 4 * strength * (level / count) ** 0.5 + 1e-4
    assert noise.var().item() == pytest.approx(strength**2 * level, rel=4 * (3 / count) ** 0.5, abs=1e-4)


def test_jpeg_is_that_of_pillow() -> None:
    stored = ((photograph(frames=2) + 1) / GREY).round().to(torch.uint8)
    x, bytes_of = stored * GREY - 1, stored[:, 1].permute(1, 2, 0).numpy()
    file = io.BytesIO()
    Image.fromarray(bytes_of).save(file, "JPEG", quality=80)
    found = ((through_jpeg(x, 80)[:, 1] + 1) / GREY).round().permute(1, 2, 0).numpy()
    assert np.array_equal(found, np.asarray(Image.open(file)))
    assert through_jpeg(x[:1], 80).shape == (1, 2, 24, 24)


def test_strengths_do_not_depend_on_probabilities() -> None:
    """JPEG that is asked for as well comes on top of the same picture."""
    x = photograph()
    noisy = {**QUIET, "noise": Span(low=0, high=3), "poisson": Span(low=0.005, high=3)}
    for number in range(5):
        plain = Corruption(**noisy)(x, draws(number))
        compressed = Corruption(**{**noisy, "jpeg": 1.0, "quality": Span(low=90, high=90)})(x, draws(number))
        assert torch.equal(compressed, through_jpeg(plain, 90))


def test_two_blurs_have_radii_of_their_own() -> None:
    """Of nine pairs of radii all come, each as often within four standard deviations."""
    x, count = photograph(12), 900
    pairs = {(a, b): blurred(blurred(x, a), b) for a in (1, 2, 3) for b in (1, 2, 3)}
    both = Corruption(**{**QUIET, "blur": 1.0})
    found = [next(p for p, y in pairs.items() if torch.equal(both(x, draws(i)), y)) for i in range(count)]
    assert all(abs(found.count(pair) - 100) < 4 * (count / 9 * 8 / 9) ** 0.5 for pair in pairs)


def test_each_part_has_its_share() -> None:
    """Blurs of one radius: none, one or two; sizes: larger, smaller, or as it was. Within four standard deviations."""
    x, count = photograph(8), 3000
    once = blurred(x, 1)
    kinds = {"none": x, "once": once, "twice": blurred(once, 1)}
    blurs = Corruption(**{**QUIET, "blur": 0.2, "max_radius": 1})
    found = [next(k for k, y in kinds.items() if torch.equal(blurs(x, draws(i)), y)) for i in range(count)]
    for kind, share in {"none": 0.64, "once": 0.32, "twice": 0.04}.items():
        assert abs(found.count(kind) / count - share) < 4 * (share * (1 - share) / count) ** 0.5
    sizes = Corruption(**{**QUIET, "enlarge": 0.2, "reduce": 0.3, "scale": Span(low=0.5, high=2.0)})
    changed = sum(not torch.equal(sizes(x, draws(i)), x) for i in range(count)) / count
    same_size = 0.2 / 16 + 0.3 / 8  # a scale below 1 + 1 / 16 or above 1 - 1 / 16 rounds 8 pixels to 8
    assert abs(changed - (0.5 - same_size)) < 4 * (0.25 / count) ** 0.5


def test_another_size_is_there_and_back() -> None:
    x = photograph(20)
    assert resized(x, 1.13).shape == (3, 1, 23, 23)
    back = Corruption(**{**QUIET, "reduce": 1.0, "scale": Span(low=0.5, high=1.0)})
    for number in range(20):
        y = back(x, draws(number))
        assert y.shape == x.shape
        assert (y - x).abs().mean() < 0.05  # smooth pictures lose little


def test_frames_are_blurred_alike_and_noised_apart() -> None:
    x = photograph(frames=3)
    y = Corruption(**{**QUIET, "blur": 1.0})(x, draws())
    assert torch.equal(y[:, 0], y[:, 2])
    z = Corruption(**{**QUIET, "noise": Span(low=2.0, high=2.0)})(x, draws())
    assert not torch.equal(z[:, 0], z[:, 2])


def asked(factor: int = 2) -> BatchSpec:
    plain = spec(latent_channels=3, micro_batch_size=1)
    low = replace(LOW_RESOLUTION, shape=(3,), derive=LowResolution(factor))
    return replace(plain, conditions=(*plain.conditions, low))


def low_resolution(batch: PackedBatch) -> torch.Tensor:
    return unpatchify(batch.conditions[LOW_RESOLUTION.name].values, batch.grids[0], 1, 2)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    splits = {split: pictures(12, sizes=[(12, 12), (10, 16)]) for split in ("train", "val")}
    return write_dataset(tmp_path / "data", splits)


def test_the_model_reads_the_corrupted_and_enlarged_small_picture(folder: Path) -> None:
    """By the address of its visit: seed, stream, number in the stream, sample; the sample itself is not changed."""
    stored = {key: parts["pixels.png"] for key, _, parts in pictures(12, sizes=[(12, 12), (10, 16)])}
    data = EnergonData(path=str(folder), shuffle_buffer=0, corrupt_low_resolution=True)
    data.validate(asked(), 1, 1)
    stream = data.build_train(asked(), dp_rank=0, dp_size=1, seed=5, log_dir=None)
    for number in range(30):  # two epochs and a half
        batch = next(stream)
        key = batch.keys[0]
        picture = pixel_values(pixels_of([open_picture(stored[key.removeprefix("train_")])]))
        random = Visit(5, 0, number, sample_id(key)).generator("/corruption")
        expected = enlarged(Corruption()(reduced(picture, 2), random), 2)
        assert torch.equal(low_resolution(batch), expected)
        assert torch.equal(unpatchify(batch.latents_TC, batch.grids[0], 1, 2), picture)
    stream.close()


def test_held_out_pictures_are_not_corrupted(folder: Path) -> None:
    data = EnergonData(path=str(folder), corrupt_low_resolution=True)
    batches = list(data.build_validation(asked(), dp_rank=0, dp_size=1))
    assert len(batches) == 12
    for batch in batches:
        picture = unpatchify(batch.latents_TC, batch.grids[0], 1, 2)
        assert torch.equal(low_resolution(batch), enlarged(reduced(picture, 2), 2))


@pytest.mark.parametrize("background", [False, True])
def test_a_resumed_stream_corrupts_alike(folder: Path, background: bool) -> None:
    data = EnergonData(path=str(folder), num_streams=2, shuffle_buffer=5, corrupt_low_resolution=True)

    def build():
        return data.build_train(asked(), dp_rank=0, dp_size=1, seed=5, log_dir=None)

    stream = build()
    for _ in range(7):
        next(stream)
    state = stream.state_dict()
    rest = [next(stream) for _ in range(30)]
    data.background = background
    resumed = build()
    resumed.load_state_dict(state)
    for batch in rest:
        again = next(resumed)
        assert again.keys == batch.keys
        assert torch.equal(low_resolution(again), low_resolution(batch))
    stream.close()
    resumed.close()


def test_a_model_without_small_pictures_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"data\.corrupt_low_resolution .* this model takes none; set it to false"):
        EnergonData(path="x", corrupt_low_resolution=True).check_settings(spec(), 1, 1)
