"""Reference statistics in `.npz` files: reading, writing, and errors of one line."""

import io
import re
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dit.errors import ConfigError
from dit.evaluation.frechet import Gaussian, Moments, frechet_distance
from dit.evaluation.reference import read_features, read_gaussian, read_pictures
from tests.unit.evaluation.test_distances import random

NETWORK = "a network"
FEATURES = random(30, 5)
MU, SIGMA = FEATURES.mean(0).numpy(), torch.cov(FEATURES.T).numpy()


def saved(path: Path, save: Callable[..., None] = np.savez, **arrays: Any) -> Path:
    save(path, **arrays)
    return path


def one_line(path: Path, read: Callable[[Path, str], Any] = read_gaussian) -> str:
    with pytest.raises(ConfigError) as caught:
        read(path, NETWORK)
    assert "\n" not in str(caught.value)
    assert path.name in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
@pytest.mark.parametrize("order", ["C", "F"])
def test_published_statistics_equal_those_of_the_features(tmp_path: Path, save: Callable, order: Any) -> None:
    """As pytorch-fid, clean-fid and EDM write them, compressed or not; other arrays of the file are not read."""
    others = {"mu_s": np.zeros(3), "arr_0": np.zeros((1, 2, 2, 3), np.uint8)}
    path = saved(tmp_path / "x.npz", save, mu=MU, sigma=np.asarray(SIGMA, order=order), **others)
    gaussian = read_gaussian(path, NETWORK)
    assert gaussian is not None
    assert gaussian.count is None
    moments = Moments()
    moments.add(FEATURES)
    assert frechet_distance(gaussian, moments.reduce()) == pytest.approx(0, abs=1e-8)
    shifted = Gaussian(gaussian.mean + 2, gaussian.covariance)
    assert frechet_distance(gaussian, shifted) == pytest.approx(5 * 2**2)
    path = saved(tmp_path / "y.npz", save, feats=np.asarray(FEATURES.numpy(), order=order))
    feats = read_features(path, NETWORK)
    assert feats is not None
    assert torch.equal(feats, FEATURES)


def test_files_of_an_earlier_version_have_a_network_and_a_number_of_pictures(tmp_path: Path) -> None:
    statistics = {"mu": MU, "sigma": SIGMA, "feats": FEATURES.numpy()}
    path = saved(tmp_path / "x.npz", **statistics, network=np.array(NETWORK), pictures=np.array(30))
    gaussian = read_gaussian(path, NETWORK)
    assert gaussian is not None
    assert gaussian.count == 30
    assert read_features(path, NETWORK) is not None
    path = saved(tmp_path / "z.npz", **statistics, network=np.array(NETWORK), pictures=np.array(np.inf))
    gaussian = read_gaussian(path, NETWORK)
    assert gaussian is not None
    assert gaussian.count is None
    path = saved(tmp_path / "y.npz", **statistics, network=np.array("another"))
    for read in (read_gaussian, read_features):
        assert "has the features of 'another', and --features is a network; give the same" in one_line(path, read)


NAN, TILTED = SIGMA.copy(), SIGMA.copy()
NAN[1, 2] = NAN[2, 1] = np.nan
TILTED[0, 1] += 0.5


@pytest.mark.parametrize(
    ("arrays", "said"),
    [
        ({"mu": MU[:4], "sigma": SIGMA}, r"mu has 4 features and sigma has shape \[5, 5\]"),
        ({"mu": MU, "sigma": NAN}, "2 of 25 numbers of sigma are not finite"),
        ({"mu": MU * np.inf, "sigma": SIGMA}, "5 of 5 numbers of mu are not finite"),
        ({"mu": MU, "sigma": TILTED}, "sigma is not symmetric, so it is no covariance"),
        ({"mu": MU, "sigma": -SIGMA}, "sigma has a negative variance"),
        ({"mu": MU[None], "sigma": SIGMA}, "expected floating-point numbers with 1 axis"),
        ({"mu": MU.astype(int), "sigma": SIGMA}, "mu is int64"),
        ({"mu": MU}, "holds mu; FID needs mu and sigma, or pictures as arr_0"),
        ({"mu": np.array([{}], object), "sigma": SIGMA}, "mu.npy holds object, not numbers"),
        ({"mu": np.zeros(20_000, np.float32), "sigma": SIGMA}, "at most 16,384 features"),
    ],
)
def test_statistics_without_a_valid_covariance_are_refused_in_one_line(
    tmp_path: Path, arrays: dict[str, Any], said: str
) -> None:
    assert re.search(said, one_line(saved(tmp_path / "x.npz", **arrays)))


def test_mean_and_covariance_do_not_determine_the_kernel_distance(tmp_path: Path) -> None:
    path = saved(tmp_path / "x.npz", mu=MU, sigma=SIGMA)
    assert "KID needs the features of all pictures" in one_line(path, read_features)
    path = saved(tmp_path / "y.npz", feats=FEATURES.numpy() * np.nan)
    assert "150 of 150 numbers of feats are not finite" in one_line(path, read_features)


def test_a_damaged_archive_is_refused_in_one_line(tmp_path: Path) -> None:
    path = saved(tmp_path / "x.npz", np.savez_compressed, mu=np.zeros(40), sigma=np.asarray(random(40, 40)))
    whole = path.read_bytes()
    path.write_bytes(whole[:-30])
    assert "not a zip file" in one_line(path)
    place = whole.index(b"sigma.npy") + 200
    path.write_bytes(whole[:place] + bytes(b ^ 255 for b in whole[place : place + 8]) + whole[place + 8 :])
    assert "cannot be read" in one_line(path)
    path.write_bytes(b"nonsense")
    assert "cannot be read" in one_line(path)
    path.unlink()
    assert "No such file" in one_line(path)


def test_arrays_of_an_archive_must_have_the_length_in_their_header(tmp_path: Path) -> None:
    """A header of 8 TB, and a member of zeros that expands a thousand times to 8 GiB, take no memory."""
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "<f8", "fortran_order": False, "shape": (10**6, 10**6)})
    path = tmp_path / "x.npz"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("mu.npy", header.getvalue())
    assert "mu.npy is not as long as its header says" in one_line(path)


def test_pictures_are_read_in_blocks(tmp_path: Path) -> None:
    pictures = np.arange(5 * 4 * 6 * 3, dtype=np.uint8).reshape(5, 4, 6, 3)
    path = saved(tmp_path / "x.npz", np.savez_compressed, arr_0=pictures)
    assert read_gaussian(path, NETWORK) is None
    assert read_features(path, NETWORK) is None
    blocks = list(read_pictures(path, 2))
    assert [len(block) for block in blocks] == [2, 2, 1]
    assert np.array_equal(torch.cat(blocks).movedim(1, 3).numpy(), pictures)
    path = saved(tmp_path / "y.npz", arr_0=pictures.astype(np.float32))
    with pytest.raises(ConfigError, match=r"float32 of shape \[5, 4, 6, 3\]; expected uint8"):
        next(read_pictures(path, 2))
