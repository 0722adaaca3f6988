"""Measures of style and motion, on pictures so small that the result is known."""

import pytest
import torch

from examples.letters import checks
from examples.letters.captions import Style


def pictures(*dots: list[tuple[int, int]], size: int = 6) -> torch.Tensor:
    """Return pictures with ink at the given (row, column)s."""
    images = torch.full((len(dots), 1, size, size), -1.0)
    for image, places in zip(images, dots, strict=True):
        for row, column in places:
            image[0, row, column] = 1.0
    return images


def clip(path: list[tuple[float, float]], size: int = 12) -> torch.Tensor:
    """Return a clip of a soft dot at (x, y) in each frame, `[1, T, size, size]`."""
    x, y = torch.arange(size).float(), torch.arange(size).float()[:, None]
    frames = [(2.5 - ((x - a) ** 2 + (y - b) ** 2).sqrt()).clamp(0, 1) for a, b in path]
    return torch.stack(frames)[None] * 2 - 1


def walk(direction: str, speed: float, frames: int = 5) -> torch.Tensor:
    dx, dy = checks.DIRECTIONS[direction]
    return clip([(5.5 + dx * speed * (t - 2), 5.5 + dy * speed * (t - 2)) for t in range(frames)])


def test_ink_is_the_share_of_black():
    assert checks.ink_share(pictures([], [(0, 0), (3, 3), (5, 1)])).tolist() == pytest.approx([0, 3 / 36])


def test_slant_is_the_lean_to_the_right_per_pixel_upwards():
    upright = [(r, 2) for r in range(6)]
    leaning = [(5, 1), (4, 1), (3, 2), (2, 2), (1, 3), (0, 3)]
    backwards = [(r, 5 - c) for r, c in leaning]
    diagonal = [(r, 5 - r) for r in range(6)]
    found = checks.slant(pictures(upright, leaning, backwards, diagonal)).tolist()
    rows = torch.arange(6).float() - 2.5
    expected = float(-(rows * torch.tensor([3.0, 3, 2, 2, 1, 1])).sum() / (rows**2).sum())
    assert found == pytest.approx([0, expected, -expected, 1], abs=1e-5)


def face(**style: str) -> dict:
    return {"weight": "regular", "slant": "upright", "condensed": False, "kind": "serif"} | style


def test_only_styles_of_the_fonts_are_requested():
    """A kind is used only if it has both styles; of several, the one with most faces is used."""
    assert checks.contrasts([face(), face(slant="italic", kind="sans"), face(weight="bold", kind=None)]) == []
    sans = [face(kind="sans"), face(kind="sans", weight="bold")]
    serif = [face(), face(weight="bold"), face(slant="italic")]
    found = checks.contrasts(sans + serif)
    assert [c.name for c in found] == [checks.BOLD_REGULAR.name, checks.ITALIC_UPRIGHT.name]
    assert {c.more.kind for c in found} == {c.less.kind for c in found} == {"serif"}
    assert found[1].more == Style(slant="italic", kind="serif")
    light = checks.contrasts([*sans, *serif, face(kind="sans", weight="light")])
    assert (light[0].name, light[0].more.kind) == (checks.BOLD_LIGHT.name, "sans")


def test_contrast_scores_count_pairs():
    bold, light = pictures([(0, 0), (1, 1)], [(0, 0)], [(2, 2)]), pictures([(0, 0)], [(0, 0), (1, 1)], [])
    check = checks.judge_contrast(checks.BOLD_LIGHT, bold, light, (bold, light))
    assert (check.kind, check.passed, check.total) == ("style", 2, 3)
    assert check.share == pytest.approx(2 / 3)


def test_the_centre_of_ink_follows_the_dot_and_not_faint_paper():
    path = [(3.0, 4.0), (5.5, 4.0), (7.0, 8.25)]
    clips = clip(path)[None]
    torch.testing.assert_close(checks.centres_of_ink(clips)[0], torch.tensor(path), atol=0.12, rtol=0)
    dirty = clips.clone()
    dirty[..., :3, :] = dirty[..., :3, :].clamp(min=-0.85)
    torch.testing.assert_close(checks.centres_of_ink(dirty), checks.centres_of_ink(clips))


def test_motion_counts_direction_speed_and_steadiness():
    """Clips that stand still, move sideways, too slowly or backwards fail; a change of direction is reported."""
    real = torch.stack([walk(d, 0.6) for d in checks.DIRECTIONS])
    back = clip([(4.0, 5.5), (5.0, 5.5), (6.0, 5.5), (5.5, 5.5), (7.0, 5.5)])
    cases = [
        (walk("left", 0.6), "left", True, True),
        (walk("down", 0.4), "down", True, True),
        (walk("down", 0.2), "down", False, True),
        (walk("up", 0.6), "down", False, False),
        (walk("left", 0.6), "up", False, True),
        (walk("left", 0.0), "left", False, True),
        (back, "right", True, False),
    ]
    for made, asked, moves, steady in cases:
        found = checks.judge_motion(made[None], [asked], real, list(checks.DIRECTIONS))
        assert [bool(check.passed) for check in found] == [moves, steady], asked
    together = torch.stack([made for made, *_ in cases])
    moving, steady = checks.judge_motion(together, [asked for _, asked, *_ in cases], real, list(checks.DIRECTIONS))
    assert (moving.passed, moving.total, steady.passed) == (3, 7, 5)
    assert float(moving.detail.split()[-1]) == pytest.approx(0.6, abs=0.02)
