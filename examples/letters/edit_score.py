"""The metric `letter_edits`: held-out letters are edited as every instruction says, and compared with their fonts.

Requests are the edits of the training data, of every letter of the held-out font families. Some have no truth, because
the family lacks the style; then only the letter and the direction of the change are measured.
"""

import argparse
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Optional

import torch
from torch import Tensor

from dit.errors import ConfigError
from dit.safe_files import read_bytes
from energon_data.media_files import open_picture
from examples.comparison import check_minimums, draw_samples
from examples.letters.captions import Style
from examples.letters.checks import Check, Contrast, ink_share, judge_contrast, slant
from examples.letters.edits import DEFAULT, INSTRUCTIONS, Drawing, edited, ink_of, instruction, read_drawings
from examples.letters.reader import load_reader
from examples.letters.score import DEFAULT_DATA, score, shortfalls
from launch import environment
from launch.measurement import Measurement, Metric
from launch.sample_requests import encode_prompts

if TYPE_CHECKING:
    from dit.inference.generator import Generator

MEASURES = {
    "bold": (ink_share, "more ink"),
    "light": (ink_share, "less ink"),
    "regular": (ink_share, "less ink"),
    "italic": (slant, "more slant"),
    "upright": (slant, "less slant"),
}
"""Property of a letter that an instruction with each style word changes, and the direction of the change."""
SHOWN = 8  # edits of each style word in the picture


@dataclass(frozen=True)
class Edit:
    """A requested edit.

    Attributes:
        original: index of the original among the drawings.
        word: style word of the instruction.
        truth: index of the same letter in the requested style; None if the family lacks it.
    """

    original: int
    word: str
    truth: Optional[int]


def requested_edits(drawings: Sequence[Drawing]) -> tuple[list[Edit], list[Edit]]:
    """Return the edits of held-out letters, and the edits of the training families.

    An edit of a held-out letter is requested only if training has the same change of style.
    """
    numbers = {(d.family, d.style, d.letter): i for i, d in reversed(list(enumerate(drawings)))}
    every = [
        Edit(i, word, numbers.get((d.family, style, d.letter)))
        for i, d in enumerate(drawings)
        for word in INSTRUCTIONS
        if (style := edited(d.style, word)) != d.style
    ]
    trained = [edit for edit in every if edit.truth is not None and not drawings[edit.original].held_out]

    def change(edit: Edit) -> tuple[str, str, str]:
        style = drawings[edit.original].style
        return style.weight, style.slant, edit.word

    seen = {change(edit) for edit in trained}
    return [e for e in every if drawings[e.original].held_out and change(e) in seen], trained


def nearest(picture: Tensor, inks: Tensor, numbers: Sequence[int]) -> int:
    """Return the drawing with the smallest squared difference from a picture."""
    distances = (inks[list(numbers)] - picture).square().flatten(1).sum(1)
    return numbers[int(distances.argmin())]


def judge_styles(edits: Sequence[Edit], pictures: Tensor, inks: Tensor, trained: Sequence[Edit]) -> list[Check]:
    """Measure the change from each original letter to the edited one, by style word."""
    checks = []
    for word, (measure, change) in MEASURES.items():
        rows = [i for i, edit in enumerate(edits) if edit.word == word]
        real = [(edit.truth, edit.original) for edit in trained if edit.word == word]
        if not rows:
            continue
        contrast = Contrast(f"{word} letters have {change} than their originals", Style(), Style(), measure)
        ours = pictures[rows], inks[[edits[i].original for i in rows]]
        theirs = inks[[after for after, _ in real]], inks[[before for _, before in real]]
        if "less" in change:
            ours, theirs = ours[::-1], theirs[::-1]
        checks.append(judge_contrast(contrast, *ours, theirs))
    return checks


def judge_drawings(edits: Sequence[Edit], pictures: Tensor, drawings: Sequence[Drawing], inks: Tensor) -> list[Check]:
    """Find the nearest drawing of each edited letter: among the styles of its family, and among all families."""
    own_style, own_family, own_family_before = list[bool](), list[bool](), list[bool]()
    rows = [i for i, edit in enumerate(edits) if edit.truth is not None]
    for i in rows:
        edit = edits[i]
        assert edit.truth is not None
        truth = drawings[edit.truth]
        letters = [n for n, d in enumerate(drawings) if d.letter == truth.letter]
        styles = [n for n in letters if drawings[n].family == truth.family]
        families = [
            n
            for n in letters
            if (drawings[n].style.weight, drawings[n].style.slant) == (truth.style.weight, truth.style.slant)
        ]
        own_style.append(nearest(pictures[i], inks, styles) == edit.truth)
        before = inks[edit.original]
        for own, picture in ((own_family, pictures[i]), (own_family_before, before)):
            own.append(drawings[nearest(picture, inks, families)].family == truth.family)
    error, change = (
        (a - inks[[edits[i].truth for i in rows]]).square().mean().sqrt().item()
        for a in (pictures[rows], inks[[edits[i].original for i in rows]])
    )
    detail = f"RMS error {error:.3f}, of the originals {change:.3f}"
    copies = 100 * sum(own_family_before) / max(1, len(rows))
    of_families = f"{len({d.family for d in drawings})} families; of the originals {copies:.1f} %"
    return [
        Check.of("style", "nearest to the requested style, among those of the family", torch.tensor(own_style), detail),
        Check.of(
            "family",
            "nearest to the font family of the original, in that style",
            torch.tensor(own_family),
            of_families,
        ),
    ]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flag of this metric; `--minimum` and `--minimum-style` are those of `--metric letters`."""
    parser.add_argument_group("--metric letter_edits").add_argument(
        "--minimum-family",
        type=float,
        metavar="SHARE",
        help="exit with 1 if a smaller share of the letters is nearest to the font family of their original",
    )


def measure(args: argparse.Namespace, generator: "Generator") -> Measurement:
    """Edit every held-out letter, read the results, and compare them with all drawings.

    Raises:
        ConfigError: the model takes no text, or its pictures are not in colour.
        DataError: the folder of pairs, or the data set of the reader, cannot be read.
    """
    check_minimums(args)
    folder = Path(args.data or DEFAULT)
    drawings = read_drawings(folder)
    inks = torch.stack([ink_of(open_picture(read_bytes(folder / drawing.file))) for drawing in drawings])
    if (channels := generator.config.model.in_channels) != 3:
        raise ConfigError(f"letters are edited as pictures of 3 channels, and the model has {channels}")
    edits, trained = requested_edits(drawings)
    prompts = [instruction(edit.word, f"{edit.original}") for edit in edits]
    # A model of pictures sees black letters on white in three equal channels.
    originals = [[-inks[edit.original].expand(3, -1, -1)[:, None]] for edit in edits]
    samples = draw_samples(args, generator, encode_prompts(generator, prompts), originals).cpu()
    pictures = -samples[:, :, 0].mean(1, keepdim=True).clamp(-1, 1)
    reader = load_reader(DEFAULT_DATA)
    letters = [reader.class_names.index(drawings[edit.original].letter) for edit in edits]
    checks = [*judge_styles(edits, pictures, inks, trained), *judge_drawings(edits, pictures, drawings, inks)]
    result = score(reader, pictures[:, :, None], letters, checks)
    if args.out and environment.rank() == 0:
        _write_grid(edits, pictures, inks, args.out)
    return Measurement(result.lines(), asdict(result) | {"minimum": args.minimum}, shortfalls(result, args))


def _write_grid(edits: Sequence[Edit], pictures: Tensor, inks: Tensor, path: str) -> None:
    """Write originals, edited letters and those of the font, some of each style word."""
    from dit.sampling.grid import image_grid, save_png, spread

    shown, captions = [], []
    for word in MEASURES:
        rows = [i for i, edit in enumerate(edits) if edit.word == word]
        rows = [i for i in rows if edits[i].truth is not None] or rows
        for i in (rows[n] for n in spread(len(rows), SHOWN)):
            truth = edits[i].truth
            shown += [
                inks[edits[i].original],
                pictures[i],
                torch.full_like(pictures[i], -1) if truth is None else inks[truth],
            ]
            captions += ["original", word, "" if truth is None else "font"]
    save_png(image_grid(-torch.stack(shown), captions, columns=3 * SHOWN), path)


EDITS = Metric(
    "held-out letters edited by text: share read correctly, in the requested style, and nearest to their own font",
    measure,
    add_arguments,
)
