"""Augmentation draws crops of the resized picture evenly and by address; limits on samples have exact counts."""

import json
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pytest
import torch
from PIL import Image
from small_data import first_batch, pictures, read_batches, spec, write_dataset

from dit.batch import PackedBatch, pixel_values
from dit.condition_table import MASK
from dit.encoders.vae import Geometry
from dit.errors import ConfigError, DataError
from dit.patchify import unpatchify
from energon_data.augment import Augmentation, Visit, resize
from energon_data.contents import Contents
from energon_data.cookers import read_references
from energon_data.dataset import EnergonData
from energon_data.filters import MEASURES, FilteredOutError
from energon_data.media_files import open_picture, pixels_of
from energon_data.samples import Clip, SampleError


def visits(count: int) -> list[Visit]:
    return [Visit(3, 0, number, 17) for number in range(count)]


def ramp(height: int, width: int) -> torch.Tensor:
    """Return pixels whose channels are their row, their column and 0."""
    rows, columns = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    return torch.stack([rows, columns, rows * 0]).to(torch.uint8)[:, None]


def test_a_resized_photograph_equals_that_of_pillow() -> None:
    file = Path(matplotlib.get_data_path()) / "sample_data" / "grace_hopper.jpg"
    photograph = open_picture(file.read_bytes())
    width, height = photograph.size
    actual = pixel_values(resize(pixels_of([photograph]), 96))
    size = (96, round(height * 96 / width))
    expected = pixel_values(pixels_of([photograph.resize(size, Image.Resampling.BICUBIC)]))
    assert actual.shape == expected.shape == (3, 1, size[1], 96)
    assert (actual - expected).abs().max() < 4 / 127.5  # Pillow rounds to 8 bits and clips after each of its two passes
    assert (actual - expected).abs().mean() < 0.5 / 127.5


def test_every_crop_window_is_equally_likely() -> None:
    augment = Augmentation(crop=(4, 6))
    corners = Counter()
    for visit in visits(3000):
        cut = augment(ramp(6, 9), visit)
        top, left = (cut[c, 0, 0, 0].item() for c in (0, 1))
        assert torch.equal(cut, ramp(6, 9)[:, :, top : top + 4, left : left + 6])
        corners[top, left] += 1
    assert set(corners) == {(top, left) for top in range(3) for left in range(4)}
    # 250 are expected at each of 12 places: chi-square with 11 degrees of freedom, beyond 31.3 once in a thousand.
    assert sum((count - 250) ** 2 / 250 for count in corners.values()) < 31.3


def test_flips_have_their_share_and_are_independent_of_the_crop() -> None:
    mirrored: dict[int, list[bool]] = {size: [] for size in (6, 9)}
    upper: list[bool] = []
    for size, found in mirrored.items():
        augment = Augmentation(crop=(4, 4), flip=0.3)
        for visit in visits(3000):
            cut = augment(ramp(size, size), visit)
            found.append(bool(cut[1, 0, 0, 0] > cut[1, 0, 0, -1]))
            upper += [bool(cut[0, 0, 0, 0] < 3)] * (size == 9)
    assert mirrored[6] == mirrored[9]
    for half in (True, False):  # places of the crop; four standard deviations
        flips = [flip for flip, above in zip(mirrored[9], upper) if above == half]
        assert abs(sum(flips) / len(flips) - 0.3) < 0.05
    assert abs(sum(mirrored[6]) / 3000 - 0.3) < 0.033  # four standard deviations
    assert torch.equal(Augmentation(flip=0.0)(ramp(4, 4), Visit(0, 0, 0, 0)), ramp(4, 4))
    assert torch.equal(Augmentation(flip=1.0)(ramp(4, 4), Visit(0, 0, 0, 0)), ramp(4, 4).flip(-1))


def test_each_part_of_the_address_counts() -> None:
    base = {"seed": 1, "stream": 2, "number": 3, "sample": 4}
    first = Visit(**base).generator().random(3).tolist()
    assert Visit(**base).generator().random(3).tolist() == first
    for name in base:
        assert Visit(**{**base, name: 5}).generator().random(3).tolist() != first


def test_all_frames_of_a_clip_have_the_same_crop() -> None:
    clip = ramp(9, 9).expand(-1, 5, -1, -1)
    for visit in visits(20):
        cut = Augmentation(smallest_side=8, crop=(4, 6), flip=0.5)(clip, visit)
        assert cut.shape == (3, 5, 4, 6)
        assert all(torch.equal(cut[:, 0], cut[:, t]) for t in range(5))


def test_pictures_are_cropped_to_patches_and_small_ones_dropped() -> None:
    cut = Augmentation(multiple_of=4)(ramp(7, 13), Visit(0, 0, 0, 0))
    assert torch.equal(cut, ramp(7, 13)[:, :, 2:6, 1:13])  # (7 - 4 + 1) / 2 and (13 - 12 + 1) / 2
    with pytest.raises(FilteredOutError, match="3 x 13 pixels, cropped to multiples of 4"):
        Augmentation(multiple_of=4)(ramp(3, 13), Visit(0, 0, 0, 0))
    with pytest.raises(FilteredOutError, match="7 x 13 pixels, cropped to 8 x 8"):
        Augmentation(crop=(8, 8))(ramp(7, 13), Visit(0, 0, 0, 0))


def test_a_line_of_pixels_is_not_resized_to_gigabytes() -> None:
    line = torch.zeros(3, 1, 1, 32768, dtype=torch.uint8)
    with pytest.raises(FilteredOutError, match="1 x 32768 pixels, resized to 512 x 16777216") as error:
        Augmentation(smallest_side=512)(line, Visit(0, 0, 0, 0))
    assert error.value.reason == "too_large"


ASKED = spec(latent_channels=3, micro_batch_size=1)


def read(folder: Path, batches: int, **settings: Any) -> tuple[list[PackedBatch], dict[str, int]]:
    data = EnergonData(path=str(folder), shuffle_buffer=0, **settings)
    data.validate(ASKED, 1, 1)
    return read_batches(data, ASKED, batches, seed=5)


def picture_of(batch: PackedBatch) -> np.ndarray:
    pixels = unpatchify(batch.latents_TC, batch.grids[0], 1, 2)
    return np.uint8(((pixels[:, 0].permute(1, 2, 0) + 1) * 127.5).round())


def test_a_picture_has_a_new_crop_in_every_epoch_and_the_centre_crop_when_held_out(tmp_path: Path) -> None:
    stored = {key: parts["pixels.png"] for key, _, parts in pictures(6, sizes=[(12, 12)])}
    folder = write_dataset(
        tmp_path / "data", {"train": pictures(6, sizes=[(12, 12)]), "val": pictures(6, sizes=[(12, 12)])}
    )
    batches, _ = read(folder, 6 * 20, crop_size=[8, 8], flip=0.5)
    places: dict[str, set] = {}
    for batch in batches:
        key = batch.keys[0].removeprefix("train_")
        original = np.asarray(open_picture(stored[key]))
        windows = {}
        for top, left in product(range(5), range(5)):
            window = original[top : top + 8, left : left + 8]
            windows |= {(top, left, False): window, (top, left, True): window[:, ::-1]}
        (place,) = [at for at, window in windows.items() if np.array_equal(window, picture_of(batch))]
        places.setdefault(key, set()).add(place)
    assert len(places) == 6
    assert all(len(found) > 10 for found in places.values())  # 20 draws of 50
    data = EnergonData(path=str(folder), crop_size=[8, 8], flip=0.5)
    held_out = list(data.build_validation(ASKED, dp_rank=0, dp_size=1))
    assert len(held_out) == 6
    for batch in held_out:
        original = np.asarray(open_picture(stored[batch.keys[0].removeprefix("val_")]))
        assert np.array_equal(picture_of(batch), original[2:10, 2:10])


@pytest.mark.parametrize(
    ("settings", "reason", "left"),
    [
        ({"min_side": 11}, "smallest_side", {(12, 12), (20, 12)}),
        ({"max_side": 16}, "largest_side", {(12, 12), (10, 16)}),
        ({"max_aspect_ratio": 1.6}, "aspect_ratio", {(12, 12), (10, 16)}),
    ],
)
def test_size_limits_drop_exactly_the_samples_beyond(
    picture_folder: Path, settings: dict[str, Any], reason: str, left: set[tuple[int, int]]
) -> None:
    batches, skipped = read(picture_folder, 40, **settings)
    assert {(2 * h, 2 * w) for batch in batches for _, h, w in batch.grids} == left
    assert set(skipped) == {reason}
    assert 18 <= skipped[reason] <= 22  # 20 of the 60 of an epoch


def test_captions_and_durations_have_limits(picture_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    batches, skipped = read(picture_folder, 17, min_caption_length=2, max_caption_length=3)
    assert {int(key[-5:]) % 7 for batch in batches for key in batch.keys} == {2, 3}
    assert set(skipped) == {"caption_length"}
    batches, skipped = read(picture_folder, 60, max_seconds=0.5)  # a picture lasts no time
    assert not skipped
    monkeypatch.setattr("energon_data.skip_log.GIVE_UP_AFTER", 70)
    with pytest.raises(DataError, match="too many samples were dropped"):
        read(picture_folder, 1, min_seconds=0.5)


@pytest.mark.parametrize("name", ["fps", "framerate"])
def test_a_duration_is_known_by_either_name_of_the_frame_rate(name: str) -> None:
    clip = Clip(__key__="", __restore_key__=(), latent=torch.zeros(1), pixel_shape=(8, 2, 2), metadata={name: 4.0})
    assert MEASURES["seconds"](clip) == 2.0


def test_a_reference_that_is_a_latent_is_not_augmented() -> None:
    sample, latent = {"reference.npy": np.zeros((3, 1, 4, 4), np.float32)}, torch.zeros(3, 1, 4, 4)
    assert torch.equal(torch.zeros(3, 1, 4, 4), *read_references(sample, latent))
    with pytest.raises(SampleError, match=r"has a reference that is a latent, which cannot be resized") as error:
        read_references(sample, latent, lambda pixels: pixels.flip(-1))
    assert error.value.reason == "not_pixels"


def test_a_latent_is_not_augmented(mixed_folder: Path) -> None:
    with pytest.raises(DataError, match=r"not_pixels.*the latent of a mirrored picture is not the mirrored latent"):
        first_batch(EnergonData(path=str(mixed_folder), flip=0.5), spec())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"crop_size": [8]}, r"\[8\] must be height and width"),
        ({"crop_size": [8, 16], "resize_side": 6}, "larger than data.resize_side=6"),
        ({"crop_size": [7, 8]}, "must be multiples of 2, model.patch_spatial"),
        ({"crop_size": [0, 8]}, "must be of numbers, each a whole number of at least 1"),
        ({"min_side": 9, "max_side": 8}, "data.min_side=9 is above data.max_side=8"),
        ({"flip": 1.5}, "data.flip=1.5 must be a finite number of at least 0 and at most 1"),
    ],
)
def test_settings_that_do_not_fit_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EnergonData(path="x", **settings).check_settings(spec(), 1, 1)


def with_shapes(folder: Path, *shapes: str, references: Sequence[str] = ()) -> EnergonData:
    """Write the shapes of the samples into `dataset.json`, as `prepare` does, and return the data."""
    description = json.loads((folder / "dataset.json").read_text())
    described = {"shapes": shapes, "latent_shape": [int(n) for n in shapes[0].split("x")]}
    described |= {"reference_shapes": references, "most_references": len(references)}
    (folder / "dataset.json").write_text(json.dumps(description | described))
    return EnergonData(path=str(folder), bucket_by_shape=True, references=bool(references))


def test_pictures_that_the_network_cannot_halve_are_refused(tmp_path: Path) -> None:
    """Before the run if no setting changes or drops their known sizes, else by name when they are read."""
    folder, wanted = tmp_path / "data", spec(latent_channels=3, side_multiple=2)
    write_dataset(folder, {"train": pictures(8, sizes=[(12, 12), (10, 16)])})
    data = EnergonData(path=str(folder), bucket_by_shape=True)
    data.validate(wanted, 1, 1)
    with pytest.raises(
        DataError, match=r"1 x 10 x 16 \(T .* 1 x 2 x 2, whose numbers along H and W must be multiples of 2"
    ):
        first_batch(data, wanted)
    with_shapes(folder, "3x1x12x12", "3x1x10x16")
    for flip in (0.0, 0.5):
        with pytest.raises(
            ConfigError, match=r"10 x 16 \(H .* of 4 \(.*=2, times 2 for the .* 4, or use fewer levels$"
        ):
            replace(data, flip=flip).validate(wanted, 1, 1)
    for settings in ({"crop_size": [8, 8]}, {"min_side": 12}, {"max_lost_samples": 1}):
        replace(data, **settings).validate(wanted, 1, 1)
    with pytest.raises(ConfigError, match=r"multiples of 4, model.patch_spatial times 2 for the levels"):
        replace(data, crop_size=[6, 8]).validate(wanted, 1, 1)


@pytest.mark.parametrize(
    ("patch", "shapes", "message"),
    [
        (
            (1, 3),
            ["3x1x12x12", "3x1x10x16"],
            r"10 x 16 .* multiples of 3 .*, or set model.patch_spatial to one of \[1, 2\]$",
        ),
        (
            (3, 2),
            ["3x16x4x4"],
            r"clips of 16 frames, .* model.patch_temporal=3; set it to one of \[1, 2, 4, 8, 16\], or",
        ),
        (
            (4, 2),
            ["3x1x4x4", "3x12x4x4", "3x6x4x4"],
            r"clips of 6 frames, .* model.patch_temporal=4; .* \[1, 2, 3, 6\], or",
        ),
        ((2, 2), ["3x1x4x4", "3x4x4x4"], None),
        ((3, 1), ["3x1x4x4"], None),
    ],
)
def test_samples_that_cannot_be_cut_into_patches_are_refused(
    tmp_path: Path, patch: tuple[int, int], shapes: list[str], message: str | None
) -> None:
    """Also where damaged samples are dropped; a still fills a patch of any number of frames; so do references."""
    folder = tmp_path / "data"
    write_dataset(folder, {"train": pictures(8, sizes=[(12, 12)])})
    wanted = spec(latent_channels=3, patch_temporal=patch[0], patch_spatial=patch[1])
    data = with_shapes(folder, *shapes)
    with nullcontext() if message is None else pytest.raises(ConfigError, match=message):
        data.validate(wanted, 1, 1)
    if message is not None and len(shapes) == 1:
        with pytest.raises(ConfigError, match=message):
            replace(data, max_lost_samples=100).validate(wanted, 1, 1)
    data, contents = with_shapes(folder, "3x1x12x12", references=["3x3x12x12"]), Contents.read(folder)
    assert contents is not None
    with pytest.raises(ConfigError, match="clips of 3 frames") if patch[0] in (2, 4) else nullcontext():
        data._check_frames(contents, wanted, folder)


@pytest.mark.parametrize(
    ("time", "space", "patch", "shapes", "message"),
    [
        (1, 32, 1, ["3x1x48x48"], r"multiples of 32 \(model.patch_spatial=1, times .*\); .* --multiple-of 32$"),
        (1, 8, 1, ["3x1x12x24"], r"multiples of 8 .* --multiple-of 8$"),
        (1, 8, 2, ["3x1x24x24"], r"multiples of 16 .* --multiple-of 16$"),
        (4, 8, 1, ["3x16x16x16"], r"clips of 16 frames, and data.online_vae encodes 1 \+ a multiple of 4; "),
        (4, 8, 1, ["3x17x16x16"], None),
    ],
)
def test_samples_that_an_online_autoencoder_cannot_encode_are_refused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    time: int,
    space: int,
    patch: int,
    shapes: list[str],
    message: str | None,
) -> None:
    """No patch size is offered where none fits; crops of such pictures are read."""
    geometry = Geometry(kind="AutoencoderKL", channels=3, time=time, space=space, patch=patch, mean=(0.0,), std=(1.0,))
    monkeypatch.setattr(Geometry, "read", lambda name: geometry)
    write_dataset(tmp_path / "data", {"train": pictures(8, sizes=[(12, 12)])})
    data = replace(with_shapes(tmp_path / "data", *shapes), online_vae="vae")
    wanted = spec(latent_channels=3, patch_spatial=1)
    with nullcontext() if message is None else pytest.raises(ConfigError, match=message):
        data.validate(wanted, 1, 1)
    if (time, space, patch) == (1, 8, 1):
        cropped = replace(data, resize_side=16, crop_size=[8, 8])
        cropped.validate(replace(wanted, orders_frames=False), 1, 1)


def test_clips_that_cannot_be_encoded_do_not_count_as_clips_that_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    geometry = Geometry(kind="AutoencoderKL", channels=3, time=4, space=8, mean=(0.0,), std=(1.0,))
    monkeypatch.setattr(Geometry, "read", lambda name: geometry)
    write_dataset(tmp_path / "data", {"train": pictures(8, sizes=[(12, 12)])})
    data = with_shapes(tmp_path / "data", "3x16x16x16", "3x17x16x16")
    data = replace(data, online_vae="vae", max_lost_samples=9)
    with pytest.raises(ConfigError, match="clips of 5 latent frames"):
        data.validate(spec(latent_channels=3, patch_spatial=1, patch_temporal=4), 1, 1)


def test_clips_that_a_limit_of_seconds_may_drop_are_not_refused(tmp_path: Path) -> None:
    write_dataset(tmp_path / "data", {"train": pictures(8, sizes=[(12, 12)])})
    data, wanted = with_shapes(tmp_path / "data", "3x8x4x4", "3x6x4x4"), spec(latent_channels=3, patch_temporal=4)
    with pytest.raises(ConfigError, match="clips of 6 frames"):
        data.validate(wanted, 1, 1)
    replace(data, min_seconds=0.3).validate(wanted, 1, 1)


def test_augmentation_next_to_a_second_picture_is_refused() -> None:
    asked = spec(latent_channels=3)
    with_mask = type(asked)(**{**vars(asked), "conditions": (*asked.conditions, MASK)})
    with pytest.raises(ConfigError, match="and not the mask that the model takes in addition"):
        EnergonData(path="x", flip=0.5).check_settings(with_mask, 1, 1)


@pytest.mark.parametrize(
    ("settings", "needed"),
    [
        ({"packing_buffer_size": 8}, {"max_tokens_per_pack": 64}),
        ({"pack_multiple_of": 8}, {"max_tokens_per_pack": 64}),
        ({"pad_packs": True}, {"max_tokens_per_pack": 64}),
        ({"pack_cost_tokens": 64}, {"max_tokens_per_pack": 64}),
        ({"random_crop": False}, {"crop_size": [16, 16]}),
        ({"online_precision": "bf16"}, {"online_vae": "identity"}),
    ],
    ids=lambda settings: ",".join(settings),
)
def test_settings_without_their_requirement_are_refused(settings, needed):
    ((name, value),) = settings.items()
    with pytest.raises(ConfigError, match=rf"data\.{name}={value} has no effect without data\.{next(iter(needed))}"):
        EnergonData(path="x", **settings).check_settings(spec(micro_batch_size=1), 1, 1)
    EnergonData(path="x", **settings, **needed).check_settings(spec(micro_batch_size=1), 1, 1)


def test_captions_that_do_not_vary_are_reported(mixed_folder: Path) -> None:
    """A recipe is not refused because of the captions in the data."""
    line = f"data.vary_captions=False has no effect: none of the samples read from {mixed_folder} has several captions"
    data = EnergonData(path=str(mixed_folder))
    assert (data.remarks(spec()), replace(data, vary_captions=False).remarks(spec())) == ([], [line])
