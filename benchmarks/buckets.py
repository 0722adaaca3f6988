"""Pixels lost from pictures of many sizes: aspect buckets compared with packs of native sizes.

With buckets, a picture is scaled to cover the bucket with the nearest ratio and cut to it. A batch has pictures of one
bucket; pictures that do not fill a batch at the end of an epoch are dropped. Packs take any size; borders are cut to a
multiple of the autoencoder's compression times the patch.
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from benchmarks.rows import markdown
from energon_data.prepare.pictures import Fit

Size = tuple[int, int]
Target = Callable[[int, int], tuple[int, int, int, int]]
_HALF = (
    *((512, 2048), (512, 1984), (512, 1920), (512, 1856), (576, 1792), (576, 1728), (576, 1664), (640, 1600)),
    *((640, 1536), (704, 1472), (704, 1408), (768, 1344), (768, 1280), (832, 1216), (832, 1152), (896, 1152)),
    *((896, 1088), (960, 1088), (960, 1024)),
)
SDXL: tuple[Size, ...] = (*_HALF, (704, 1344), (1024, 1024), *((high, wide) for wide, high in _HALF))
"""The 40 sizes on which SDXL was trained: Podell et al. 2023, arXiv:2307.01952, appendix I."""
MULTIPLE = 16  # a compression of 8 and a patch of 2
BATCH = 64  # samples of one bucket: 8 on each of 8 GPUs


def many_pictures(count: int) -> list[Size]:
    """Return (width, height): areas of 512 to 2,048 pixels squared and ratios from 1:3 to 3:1, evenly in logarithms."""
    rng = np.random.default_rng(0)
    sides = np.exp2(rng.uniform(9, 11, count))
    ratios = np.exp(rng.uniform(-math.log(3), math.log(3), count))
    return [(round(s * r**0.5), round(s / r**0.5)) for s, r in zip(sides, ratios)]


def cover(width: int, height: int) -> tuple[int, int, int, int]:
    """Return how a bucket trainer scales and cuts a picture: width and height, before and after the cut."""
    cut = min(SDXL, key=lambda size: abs(math.log(size[0] / size[1] * height / width)))
    grow = max(cut[0] / width, cut[1] / height)
    return max(cut[0], round(width * grow)), max(cut[1], round(height * grow)), *cut


def losses(pictures: Sequence[Size], target: Target, batch: int = 1) -> dict[str, float]:
    """Return the losses of the pictures, as shares.

    Args:
        target: maps width and height to those before and after the cut.
        batch: samples of one size in a batch; incomplete batches are dropped. 1 drops none.

    Returns:
        `cut`: scaled pixels that are cut off; `shrunk`: stored pixels lost by scaling down; `enlarged`: pictures that
        are scaled up; `dropped`: pictures in no batch.
    """
    targets = [(w * h, target(w, h)) for w, h in pictures]
    scaled = sum(wide * high for _, (wide, high, _, _) in targets)
    after_cut = sum(w * h for _, (_, _, w, h) in targets)
    after_scaling = sum(min(area, wide * high) for area, (wide, high, _, _) in targets)
    sizes = Counter((w, h) for _, (_, _, w, h) in targets)
    return {
        "cut": 1 - after_cut / scaled,
        "shrunk": 1 - after_scaling / sum(area for area, _ in targets),
        "enlarged": sum(wide * high > area for area, (wide, high, _, _) in targets) / len(targets),
        "dropped": sum(count % batch for count in sizes.values()) / len(targets),
    }


def measure(count: int) -> list[dict[str, Any]]:
    """Return a row for each way, on the same pictures."""
    pictures = many_pictures(count)
    ways: dict[str, tuple[Target, int]] = {
        "SDXL's 40 buckets": (cover, BATCH),
        "packs, area at most that of 1,024 px (`--size 1024`)": (Fit(size=1024, multiple_of=MULTIPLE).target, 1),
        "packs of native sizes": (Fit(multiple_of=MULTIPLE).target, 1),
    }
    return [{"way": way, **losses(pictures, target, batch)} for way, (target, batch) in ways.items()]


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the rows as Markdown."""
    names = ("cut", "shrunk", "enlarged", "dropped")
    cells = [[row["way"], *(f"{row[name]:.1%}".replace("%", " %") for name in names)] for row in rows]
    return markdown(["way", "pixels cut off", "scaled away", "pictures enlarged", "left out"], cells, len(names))
