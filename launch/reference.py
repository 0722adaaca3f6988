"""`--reference` of the metrics `fid` and `kid`: real pictures, or their statistics, in place of held-out data."""

from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from dit.batch import pixel_values
from dit.errors import DataError
from dit.evaluation.reference import read_pictures
from dit.safe_files import read_bytes
from energon_data.media_files import PICTURES, open_picture
from energon_data.prepare.walk import Skipped, extension_of, folders_below
from energon_data.samples import SampleError
from launch import environment

BATCH = 32
"""Pictures of which features are computed at once."""


def by_shape(pictures: Sequence[Tensor]) -> Iterator[Tensor]:
    """Stack tensors of one shape; yields one tensor per shape."""
    alike: dict[torch.Size, list[Tensor]] = {}
    for picture in pictures:
        alike.setdefault(picture.shape, []).append(picture)
    return map(torch.stack, alike.values())


def reference_pictures(path: Path) -> Iterator[Tensor]:
    """Yield this rank's share of the pictures of a folder or an `.npz` file, float32 `[n, 3, H, W]` in [-1, 1].

    A picture of a folder has its own size.
    """
    rank, ranks = environment.rank(), environment.world_size()
    if not path.is_dir():
        yield from map(pixel_values, islice(read_pictures(path, BATCH), rank, None, ranks))
        return
    files = _files(path)[rank::ranks]
    for start in range(0, len(files), BATCH):
        yield from by_shape([_picture(file) for file in files[start : start + BATCH]])


def _files(folder: Path) -> list[Path]:
    skipped: list[Skipped] = []
    files = [
        place / name
        for place, names in folders_below(folder, follow_links=False, skipped=skipped)
        for name in names
        if extension_of(name) in PICTURES
    ]
    if skipped:
        raise DataError(f"{folder / skipped[0].name} is {skipped[0].detail.partition(';')[0]}; replace it by a folder")
    if not files:
        raise DataError(f"{folder} holds no picture that ends in {', '.join(sorted(PICTURES))}")
    return files


def _picture(path: Path) -> Tensor:
    try:
        pixels = np.asarray(open_picture(read_bytes(path)))
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}; remove it from the folder") from error
    except SampleError as error:
        raise DataError(f"{path} cannot be read: {error.detail}; remove it from the folder") from error
    return pixel_values(torch.tensor(pixels).movedim(2, 0))
