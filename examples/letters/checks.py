"""Two measurements of generated letters: the effect of style words, and the motion."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from examples.letters.captions import Style
from examples.letters.moving import DIRECTIONS

FAINT = 0.1
"""Ink below this is ignored for the position of a letter: generated paper is not perfectly white."""


@dataclass(frozen=True)
class Check:
    """One measurement of a model.

    Attributes:
        kind: `style`, `motion`, `family` or `ocr`; the command has a minimum for each but `ocr`.
        name: the property.
        passed, total: number of samples with the property, and of all samples.
        share: their ratio.
        detail: the numbers, and those of real letters.
    """

    kind: str
    name: str
    passed: int
    total: int
    share: float
    detail: str

    @classmethod
    def of(cls, kind: str, name: str, passes: Tensor, detail: str) -> "Check":
        passed, total = int(passes.sum()), passes.numel()
        return cls(kind, name, passed, total, passed / total, detail)

    def line(self) -> str:
        return f"{self.name}: {100 * self.share:.1f} % ({self.passed} of {self.total}; {self.detail})"


def ink_share(images: Tensor) -> Tensor:
    """Return the mean ink of each picture, 0 for white paper and 1 for black; images `[N, 1, H, W]` in [-1, 1]."""
    return ((images.clamp(-1, 1) + 1) / 2).mean((1, 2, 3))


def slant(images: Tensor) -> Tensor:
    """Return the slant of each picture, shift to the right per pixel upwards: cov(x, up) / var(up).

    It differs between letters, so it is compared for one letter in two styles.
    """
    ink = ((images.clamp(-1, 1) + 1) / 2 - FAINT).clamp(min=0)[:, 0]
    ink = ink / ink.sum((1, 2), keepdim=True).clamp(min=1e-6)
    height, width = ink.shape[1:]
    x, up = torch.arange(width).float(), -torch.arange(height).float()[:, None]
    dx = x - (ink * x).sum((1, 2))[:, None, None]
    dy = up - (ink * up).sum((1, 2))[:, None, None]
    return (ink * dx * dy).sum((1, 2)) / (ink * dy**2).sum((1, 2)).clamp(min=1e-6)


@dataclass(frozen=True)
class Contrast:
    """Two styles that differ in one word, and the property that this word must change.

    Attributes:
        name: the property.
        more, less: the style with the larger value, and with the smaller one.
        measure: returns the value of each picture.
    """

    name: str
    more: Style
    less: Style
    measure: Callable[[Tensor], Tensor]


BOLD, LIGHT, REGULAR, ITALIC = Style(weight="bold"), Style(weight="light"), Style(), Style(slant="italic")
BOLD_LIGHT = Contrast("bold letters have more ink than light ones", BOLD, LIGHT, ink_share)
BOLD_REGULAR = Contrast("bold letters have more ink than regular ones", BOLD, REGULAR, ink_share)
ITALIC_UPRIGHT = Contrast("italic letters lean more than upright ones", ITALIC, REGULAR, slant)


def contrasts(faces: Sequence[dict[str, Any]]) -> list[Contrast]:
    """Return the contrasts that the faces of `dataset.json` allow, each with a kind of font that has both styles.

    Of the kinds that have both styles, the one with most faces is used.
    """
    styles = [Style.from_record(face) for face in faces]
    kinds = sorted({s.kind for s in styles if s.kind}, key=lambda kind: (-sum(s.kind == kind for s in styles), kind))
    allowed = []
    for plain in (BOLD_LIGHT, BOLD_REGULAR, ITALIC_UPRIGHT):
        pairs = [replace(plain, more=replace(plain.more, kind=k), less=replace(plain.less, kind=k)) for k in kinds]
        allowed += [pair for pair in pairs if pair.more in styles and pair.less in styles][:1]
    return allowed


def judge_contrast(contrast: Contrast, more: Tensor, less: Tensor, real: tuple[Tensor, Tensor]) -> Check:
    """Compare pictures of the same letters from the same noise in two styles.

    Args:
        more, less: `[N, 1, H, W]`, drawn in either style.
        real: pictures of real letters in either style.
    """
    a, b = contrast.measure(more), contrast.measure(less)
    real_a, real_b = (contrast.measure(images).mean().item() for images in real)
    detail = f"{a.mean():.3f} and {b.mean():.3f}, real letters {real_a:.3f} and {real_b:.3f}"
    detail = f"{kind}: {detail}" if (kind := contrast.more.kind) else detail
    return Check.of("style", contrast.name, a > b, detail)


def centres_of_ink(clips: Tensor) -> Tensor:
    """Return the centre of the ink of each frame, (x, y) in pixels, `[N, T, 2]`; clips `[N, 1, T, H, W]` in [-1, 1]."""
    ink = ((clips.clamp(-1, 1) + 1) / 2 - FAINT).clamp(min=0)[:, 0]
    ink = ink / ink.sum((2, 3), keepdim=True).clamp(min=1e-6)
    height, width = ink.shape[2:]
    x, y = torch.arange(width).float(), torch.arange(height).float()[:, None]
    return torch.stack([(ink * x).sum((2, 3)), (ink * y).sum((2, 3))], -1)


def judge_motion(clips: Tensor, directions: Sequence[str], real: Tensor, real_directions: Sequence[str]) -> list[Check]:
    """Measure whether letters move in the requested direction, as fast as real ones, and steadily.

    A clip passes if the displacement from its first to its last frame is within 45 degrees of the direction, and at
    least half as long as the shortest tenth of the real ones. It is steady if no frame moves back by more than a
    quarter of a pixel.

    Args:
        clips, real: `[N, 1, T, H, W]` in [-1, 1], generated and from the data set.
        directions, real_directions: the direction of each, a key of `DIRECTIONS`.
    """

    def along_and_aside(clips: Tensor, directions: Sequence[str]) -> tuple[Tensor, Tensor]:
        steps = centres_of_ink(clips).diff(dim=1)
        requested = torch.tensor([DIRECTIONS[d] for d in directions])[:, None]
        along = (steps * requested).sum(-1)
        aside = (steps * requested.flip(-1)).sum(-1)
        return along, aside

    along, aside = along_and_aside(clips, directions)
    real_along, _ = along_and_aside(real, real_directions)
    shortest = real_along.mean(1).quantile(0.1) / 2
    moves = (along.mean(1) >= shortest) & (along.sum(1) >= aside.sum(1).abs())
    speed = f"{along.mean():.2f} pixels per frame, real clips {real_along.mean():.2f}"
    steady, real_steady = (part.amin(1) > -0.25 for part in (along, real_along))
    steadiness = f"real clips {100 * real_steady.float().mean():.1f} %"
    return [
        Check.of("motion", "clips that move as asked", moves, speed),
        Check.of("motion", "clips that never turn back", steady, steadiness),
    ]
