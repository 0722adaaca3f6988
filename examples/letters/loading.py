"""Load a folder of letters into memory without Energon, for the classifier of letters."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dit.errors import DataError
from dit.safe_files import open_binary
from energon_data.decoder import decode_sample
from energon_data.folder import check_folder
from energon_data.samples import META_PART, SampleError
from energon_data.tar_index import group_members, parse_members, read_offsets


def load_clips(folder: str | Path, split: str) -> list[tuple[Tensor, dict[str, Any]]]:
    """Load all samples of a split, and verify every checksum.

    Args:
        folder: folder written by `python -m energon_data.prepare letters` or `moving_letters`.
        split: `train` or `val`.

    Returns:
        For each sample the latent, float32 `[C, T, H, W]` in [-1, 1], and the metadata with its `key`.

    Raises:
        DataError: the folder is not a data set, or a sample is damaged.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise DataError(f"{folder} does not exist; `python -m energon_data.prepare letters --out {folder}` writes it")
    info = check_folder(folder, split)
    clips: list[tuple[Tensor, dict[str, Any]]] = []
    for shard in info.shards:
        offsets = read_offsets(shard).tolist()
        with open_binary(shard) as file:
            data = file.read(offsets[-1])
        for start, end in pairwise(offsets):
            try:
                key, parts = group_members(parse_members(data[start:end]))
                sample = decode_sample(key, parts, require_checksums=True)
            except (SampleError, ValueError, KeyError) as error:
                raise DataError(
                    f"picture at byte {start} of {shard} is damaged: {error}; write the letters again"
                ) from error
            if "latent.npy" not in sample:
                raise DataError(
                    f"samples in {folder} have no latent.npy, which letters have; choose another --metric or --data"
                )
            clips.append((torch.from_numpy(sample["latent.npy"]).float(), sample[META_PART] | {"key": key}))
    return clips


def load_letters(folder: str | Path, split: str) -> tuple[Tensor, Tensor, list[dict[str, Any]]]:
    """Load all pictures of a split; the frames of a clip are pictures.

    Returns:
        Images float32 `[N, 1, H, W]` in [-1, 1], labels int64 `[N]`, and the metadata of each picture with its `key`.

    Raises:
        DataError: the folder is not a letters data set, or a picture is damaged.
    """
    clips = load_clips(folder, split)
    if len({latent.shape[2:] for latent, _ in clips}) != 1:
        raise DataError(f"the pictures in {folder} differ in size; this is not a letters data set")
    if any("label" not in meta for _, meta in clips):
        raise DataError(f"samples in {folder} have no label, which letters have; choose another --metric or --data")
    images = torch.cat([latent.transpose(0, 1) for latent, _ in clips])
    metadata = [meta for latent, meta in clips for _ in range(latent.shape[1])]
    return images, torch.tensor([m["label"] for m in metadata], dtype=torch.int64), metadata
