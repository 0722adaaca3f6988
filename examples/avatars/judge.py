"""Read the attributes of a picture: those of the nearest drawing."""

from itertools import product

import numpy as np

from examples.avatars.drawings import ATTRIBUTES, draw

TOGETHER = (
    ("hair", "hair colour"),
    ("clothing", "clothing colour"),
    ("skin",),
    ("eyes", "glasses"),
    ("mouth", "beard"),
)
"""Attributes that are read together, because they share pixels."""


def read(pictures: np.ndarray) -> np.ndarray:
    """Return the attributes of avatars, without knowing which were requested.

    The search starts at the first value of every attribute. Each step draws all values of some attributes, with the
    others as read so far, and keeps the values whose drawing is nearest in pixels, until nothing changes. A step lowers
    the distance, or keeps it and selects an earlier value, so the search ends.

    Args:
        pictures: `[N, 16, 16, 3]` with values from 0 to 255.

    Returns:
        The value of each attribute as an index, `[N, 9]`.
    """
    names, everyone = list(ATTRIBUTES), np.arange(len(pictures))
    avatars = np.zeros((len(pictures), len(names)), int)
    before = avatars - 1
    while (avatars != before).any():
        before = avatars
        for attributes in TOGETHER:
            choices_MK = np.array(list(product(*(range(len(ATTRIBUTES[name])) for name in attributes))))
            candidates_NMA = np.repeat(avatars[:, None], len(choices_MK), axis=1)
            candidates_NMA[:, :, [names.index(name) for name in attributes]] = choices_MK
            drawings = draw(candidates_NMA.reshape(-1, len(names))).reshape(*candidates_NMA.shape[:2], -1)
            errors_NM = np.square(drawings - pictures.reshape(len(pictures), 1, -1).astype(np.int32)).sum(2)
            avatars = candidates_NMA[everyone, errors_NM.argmin(1)]
    return avatars
