"""Pairs of letters before and after an edit of their style, as a folder that `energon_data.prepare images` reads.

    OUT/train/edited/*.png          each an original in another style of its family; metadata.jsonl has the instructions
    OUT/train/originals/*.png       the letters before the edit
    OUT/faces/FONT/*.png            every letter of every font face once, without variation; faces.jsonl describes them

Some families are held out: they are only in `faces`, from which `examples.letters.edit_score` takes originals.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Optional

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from dit.data_api import sample_id
from dit.errors import DataError, one_line_errors
from dit.safe_files import open_binary, parse_json
from dit.terminal import counted, echo
from examples.letters.captions import Style
from examples.letters.fonts import LETTERS, Face, find_faces, held_out_families
from examples.letters.stills import face_slug, vary
from launch.argument_types import at_least_one

DEFAULT = "data/letter_pairs"
SIZE, VARIATIONS, SEED = 16, 12, 0
FACES = "faces.jsonl"
INSTRUCTIONS = {
    "bold": ("make it bold", "set it in bold", "draw it with thick strokes"),
    "light": ("make it light", "set it in a light weight", "draw it with thin strokes"),
    "regular": ("make it regular", "set it in the regular weight", "draw it neither bold nor light"),
    "italic": ("make it italic", "set it in italics", "slant it"),
    "upright": ("make it upright", "set it upright", "do not slant it"),
}
"""Wordings of each edit, by the style word that it changes."""


def edited(style: Style, word: str) -> Style:
    """Return a style after an edit."""
    return replace(style, slant=word) if word in ("italic", "upright") else replace(style, weight=word)


def instruction(word: str, key: str) -> str:
    """Return a wording of an edit, by a hash of `key`."""
    return INSTRUCTIONS[word][sample_id(key) % len(INSTRUCTIONS[word])]


@dataclass(frozen=True)
class Drawing:
    """A letter in one font face.

    Attributes:
        file: its picture, relative to the folder of pairs: black on white.
        held_out: no pair of this family is in the training data.
    """

    file: str
    letter: str
    family: str
    style: Style
    held_out: bool

    def record(self) -> dict[str, Any]:
        """Return the line of `faces.jsonl`."""
        return {**asdict(self), "style": asdict(self.style)}

    @classmethod
    def from_record(cls, record: dict[str, Any]) -> "Drawing":
        return cls(**{**record, "style": Style(**record["style"])})


def read_drawings(folder: Path) -> list[Drawing]:
    """Return the drawings of a folder of pairs.

    Raises:
        DataError: the folder has none.
    """
    try:
        with open_binary(folder / FACES) as lines:
            return [Drawing.from_record(parse_json(line)) for line in lines]
    except OSError as error:
        raise DataError(
            f"{folder / FACES} cannot be read: {error}; `python -m examples.letters.edits --out {folder}` writes it"
        ) from error


def ink_of(picture: Image.Image) -> Tensor:
    """Return the ink of a picture of a black letter on white, float32 `[1, H, W]`: 1 for ink, -1 for paper."""
    return 1 - torch.from_numpy(np.array(picture.convert("L"), np.float32))[None] / 127.5


def save(ink: Tensor, path: Path) -> None:
    """Write a picture of a black letter on white."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(((1 - ink) * 127.5).round().clamp(0, 255).byte().numpy(), "L").save(path)


def pairs(faces: Sequence[Face]) -> Iterator[tuple[Face, str, Face]]:
    """Yield face, edit and edited face of all families that have both."""
    by_style = {(face.family, Style.of(face)): face for face in reversed(faces)}
    for face in faces:
        for word in INSTRUCTIONS:
            after = by_style.get((face.family, edited(Style.of(face), word)))
            if after not in (None, face):
                yield face, word, after


def write_pairs(out: Path, *, fonts: Optional[Sequence[str]], variations: int = VARIATIONS, size: int = SIZE) -> str:
    """Render all pictures; `out` is created only when complete.

    Returns:
        Numbers of pairs and families, as a line.

    Raises:
        ConfigError: `out` exists.
        DataError: no two families remain, or none has two styles.
    """
    from energon_data.prepare.shards import published_folder

    faces = find_faces(fonts).faces
    held_out = held_out_families(faces)
    training = [face for face in faces if face.family not in held_out]
    of_training = list(pairs(training))
    if not held_out or not of_training:
        raise DataError(
            f"{counted(len(faces), 'font face')} of this machine have no pair of styles and another family to hold "
            "out; install fonts (for example fonts-dejavu), or pass --fonts FOLDER"
        )
    with published_folder(out, force=False) as folder:
        rows = []
        for number, (before, word, after) in enumerate(of_training):
            # The same random numbers for both, so that only the style differs.
            inks = [
                vary(torch.from_numpy(face.glyphs), variations, size, torch.Generator().manual_seed(SEED + number))
                for face in (before, after)
            ]
            for label, letter in enumerate(LETTERS):
                for variation in range(variations):
                    key = f"{face_slug(before)}-{word}-{before.path.stem}-{letter}-{variation}"
                    for ink, place in zip(inks, ("originals", "edited")):
                        save(ink[label, variation], folder / "train" / place / f"{key}.png")
                    rows.append({"file_name": f"{key}.png", "text": instruction(word, key)})
        _write_lines(folder / "train" / "edited" / "metadata.jsonl", rows)
        _write_lines(folder / FACES, [drawing.record() for drawing in _draw_faces(folder, faces, held_out, size)])
    families = ", ".join(sorted({face.family for face, _, _ in of_training}))
    return f"{out}: {counted(len(rows), 'pair')} of {families}; held out: {', '.join(sorted(held_out))}"


def _draw_faces(folder: Path, faces: Sequence[Face], held_out: set[str], size: int) -> Iterator[Drawing]:
    """Write and yield every letter of every face."""
    for face in faces:
        glyphs = vary(torch.from_numpy(face.glyphs), 1, size, torch.Generator())[:, 0]
        for letter, ink in zip(LETTERS, glyphs):
            file = f"faces/{face.path.stem}/{letter}.png"
            save(ink, folder / file)
            yield Drawing(file, letter, face.family, Style.of(face), face.family in held_out)


def _write_lines(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@one_line_errors
def main(argv: Optional[Sequence[str]] = None) -> int:
    """Render pairs of letters before and after an edit of their style, and every letter of every font face."""
    parser = argparse.ArgumentParser(prog="python -m examples.letters.edits", description=main.__doc__)
    parser.add_argument("--out", type=Path, default=Path(DEFAULT), help="folder to create (%(default)s)")
    parser.add_argument("--fonts", nargs="+", metavar="DIR", help="look for fonts here")
    count = partial(parser.add_argument, type=at_least_one, metavar="N")
    count("--size", default=SIZE, help="side of the pictures (%(default)s)")
    count("--variations", default=VARIATIONS, help="of each pair (%(default)s)")
    args = parser.parse_args(argv)
    echo(write_pairs(args.out, fonts=args.fonts, variations=args.variations, size=args.size))
    return 0


if __name__ == "__main__":
    sys.exit(main())
