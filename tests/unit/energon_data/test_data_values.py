"""Filters of the loader and their functions: limits of values and sizes, the largest magnitude, and checksums."""

import math
import zlib
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Optional

import numpy as np
import pytest
import torch
from small_data import clips, first_batch, npy, run, spec, write_dataset

from dit.condition_table import LOW_RESOLUTION, SIZE_AND_CROP
from dit.errors import DataError
from energon_data.dataset import EnergonData
from energon_data.filters import largest_magnitude
from energon_data.samples import checksum


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_the_largest_magnitude_is_of_either_sign_and_nan_of_a_nan(dtype: torch.dtype) -> None:
    for value in (7.5, -7.5, math.inf, -math.inf):
        assert largest_magnitude(torch.tensor([[-0.0, value], [1.0, -1.0]], dtype=dtype)) == abs(value)
    for nan in (math.nan, -math.nan):
        assert math.isnan(largest_magnitude(torch.tensor([math.inf, nan, -1.0], dtype=dtype)))
    assert largest_magnitude(torch.zeros(0, 4, dtype=dtype)) == 0  # tokens of an empty text


def test_checksums_equal_the_crc32_standard() -> None:
    """Compared with the check value of CRC-32/ISO-HDLC, and with zlib at all lengths near steps of fast versions."""
    assert checksum(b"123456789") == "cbf43926"
    data = torch.randint(0, 256, (4200,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)).numpy()
    for length in (*range(300), *range(1000, 4200, 101)):
        assert checksum(memoryview(data)[1 : 1 + length]) == f"{zlib.crc32(data[1 : 1 + length]):08x}"


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("text", 7e4, None),
        ("text", np.inf, "text reach inf, must be finite"),
        ("size_and_crop", 4000, None),
        ("low_resolution", -1000, None),
        ("low_resolution", -1001, "picture reach 1001, must be at most 1000"),
    ],
)
def test_only_values_per_latent_token_are_limited_to_1000(
    tmp_path: Path, name: str, value: float, words: Optional[str]
) -> None:
    """Pixel sizes, and texts of middle layers of language models, are larger."""
    picture = replace(LOW_RESOLUTION, shape=(2,))
    model = replace(spec(), conditions=(*spec().conditions, SIZE_AND_CROP, picture), micro_batch_size=1)
    [(key, meta, parts)] = clips(1, sizes=[(1, 4, 4)])
    arrays = {"text": np.ones((2, 3), np.float32), "size_and_crop": np.ones(6, np.float32)}
    arrays["low_resolution"] = np.ones((2, 1, 4, 4), np.float32)
    arrays[name].flat[1] = value
    parts |= {f"{part}.npy": npy(array) for part, array in arrays.items()}
    data = EnergonData(path=str(write_dataset(tmp_path / "data", {"train": [(key, meta, parts)]})), shuffle_buffer=0)
    with nullcontext() if words is None else pytest.raises(DataError, match=words):
        assert value in first_batch(data, model).conditions[{"text": "context"}.get(name, name)].values


def test_filters_drop_and_count_without_using_the_budget(mixed_folder: Path) -> None:
    keys, skipped = run(mixed_folder, 9, min_aesthetic_score=0.5)
    assert set(skipped) == {"aesthetic_score"}
    assert all(int(key[-5:]) >= 38 for key in keys)
    keys, skipped = run(mixed_folder, 12, max_tokens_per_sample=8)
    assert set(skipped) == {"too_long"}
    assert not any(int(key[-5:]) % 3 == 2 for key in keys)


@pytest.mark.parametrize(
    ("settings", "reason", "known"),
    [
        ({"min_aesthetic_score": 0.0}, "aesthetic_score", {"aesthetic_score": 1.0}),
        ({"min_side": 1}, "smallest_side", {"height": 8, "width": 8}),
        ({"max_side": 99}, "largest_side", {"height": 8, "width": 8}),
        ({"max_aspect_ratio": 9.0}, "aspect_ratio", {"height": 8, "width": 8}),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_a_limit_drops_a_latent_without_the_limited_number(
    tmp_path: Path, settings: dict[str, float], reason: str, known: dict[str, float]
) -> None:
    samples = [
        (key, {**meta, "aesthetic_score": None, **(known if key != "clip00005" else {})}, parts)
        for key, meta, parts in clips(12, sizes=[(1, 4, 4)])
    ]
    keys, skipped = run(write_dataset(tmp_path / "data", {"train": samples}), 2, **settings)
    assert len(set(keys)) == 8
    assert "train_clip00005" not in keys
    assert skipped == {reason: 1}
