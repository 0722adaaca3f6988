"""Statistics of real pictures in `.npz` files, computed earlier or by others.

* `mu [D]`, `sigma [D, D]`: mean and covariance of features, for FID, as pytorch-fid, clean-fid, EDM and ADM write them
* `feats [N, D]`: features, for KID, as clean-fid writes them
* `arr_0 [N, H, W, 3]`: pictures as bytes, as ADM writes them
* `network`, `pictures`: name of the feature network and number of pictures; only in files of an earlier version
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Optional

import numpy as np
import torch
from torch import Tensor

from dit.errors import ConfigError
from dit.evaluation.frechet import Gaussian
from dit.safe_files import StoredArray, open_npz

PICTURES = "arr_0"
MOST_FEATURES = 16384
"""Largest width of features; Inception has 2,048."""
MOST_PIXELS = 1 << 28


def read_gaussian(path: Path, network: str) -> Optional[Gaussian]:
    """Read mean and covariance; None if the file has only pictures."""
    with _arrays(path) as arrays:
        if not {"mu", "sigma"} <= arrays.keys():
            if PICTURES in arrays:
                return None
            raise ConfigError(f"{path} holds {_names(arrays)}; FID needs mu and sigma, or pictures as {PICTURES}")
        (width,), shape = _numbers(path, arrays, "mu", 1), _numbers(path, arrays, "sigma", 2)
        if shape != (width, width):
            raise ConfigError(f"{path}: mu has {width} features and sigma has shape {list(shape)}; compute it again")
        count = _check_network(path, arrays, network)
        mean, covariance = (_finite(path, name, arrays[name].read()) for name in ("mu", "sigma"))
    if not torch.allclose(covariance, covariance.T, rtol=0, atol=1e-3 * float(covariance.abs().max())):
        raise ConfigError(f"{path}: sigma is not symmetric, so it is no covariance; compute it again")
    if covariance.diagonal().min() < 0:
        raise ConfigError(f"{path}: sigma has a negative variance, so it is no covariance; compute it again")
    return Gaussian(mean, (covariance + covariance.T) / 2, count)


def read_features(path: Path, network: str) -> Optional[Tensor]:
    """Read features `[N, D]`, float64; None if the file has only pictures. Arguments and errors as `read_gaussian`."""
    with _arrays(path) as arrays:
        if "feats" not in arrays:
            if PICTURES in arrays:
                return None
            raise ConfigError(
                f"{path} holds {_names(arrays)}; KID needs the features of all pictures as feats, or pictures as "
                f"{PICTURES}, because mean and covariance do not determine it"
            )
        _numbers(path, arrays, "feats", 2)
        _check_network(path, arrays, network)
        return _finite(path, "feats", arrays["feats"].read())


def read_pictures(path: Path, count: int) -> Iterator[Tensor]:
    """Yield the pictures of a file, up to `count` at a time, uint8 `[n, 3, H, W]`."""
    with _arrays(path) as arrays:
        stored = arrays[PICTURES]
        if stored.dtype != np.uint8 or len(stored.shape) != 4 or stored.shape[3] != 3:
            raise ConfigError(
                f"{path}: {PICTURES} holds {stored.dtype} of shape {list(stored.shape)}; expected uint8 [N, H, W, 3]"
            )
        if stored.shape[1] * stored.shape[2] > MOST_PIXELS:
            raise ConfigError(f"{path}: pictures of {stored.shape[1]} x {stored.shape[2]} pixels are too large")
        for block in stored.blocks(count):
            yield torch.tensor(block).movedim(3, 1)


@contextmanager
def _arrays(path: Path) -> Iterator[dict[str, StoredArray]]:
    try:
        with open_npz(path) as arrays:
            yield arrays
    except ConfigError:
        raise
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or " ".join(str(error).split())
        raise ConfigError(
            f"--reference {path} cannot be read: {reason}; give a complete .npz file or a folder"
        ) from error


def _numbers(path: Path, arrays: dict[str, StoredArray], name: str, axes: int) -> tuple[int, ...]:
    array = arrays[name]
    if array.dtype.kind != "f" or len(array.shape) != axes or not 1 <= array.shape[-1] <= MOST_FEATURES:
        raise ConfigError(
            f"{path}: {name} is {array.dtype} of shape {list(array.shape)}; expected floating-point numbers with "
            f"{axes} {'axis' if axes == 1 else 'axes'} and at most {MOST_FEATURES:,} features"
        )
    return array.shape


def _finite(path: Path, name: str, array: Any) -> Tensor:
    values = torch.from_numpy(array.astype(np.float64))
    if bad := int((~values.isfinite()).sum()):
        raise ConfigError(f"{path}: {bad:,} of {values.numel():,} numbers of {name} are not finite; compute it again")
    return values


def _check_network(path: Path, arrays: dict[str, StoredArray], network: str) -> Optional[int]:
    """Check that features are of this network, if the file names one; return the number of pictures, if recorded."""
    if "network" in arrays and (recorded := str(arrays["network"].read())) != network:
        raise ConfigError(
            f"{path} has the features of {recorded!r:.200}, and --features is {network}; give the same network, or "
            "pictures as --reference"
        )
    count = arrays.get("pictures")
    return None if count is None or (count.shape, count.dtype.kind) != ((), "i") else int(count.read())


def _names(arrays: dict[str, StoredArray]) -> str:
    return ", ".join(sorted(arrays)[:8]) or "nothing"
