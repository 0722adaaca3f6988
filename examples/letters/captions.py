"""Captions of letters in several wordings, made from the properties that a font file states."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Optional

from dit.data_api import sample_id
from examples.letters.fonts import Face


@dataclass(frozen=True, kw_only=True)
class Style:
    """The properties of a font that captions use.

    Attributes:
        weight: `light`, `regular` or `bold`.
        slant: `upright` or `italic`.
        condensed: narrower than the family's normal width.
        kind: `serif`, `sans`, `monospace` or `script`; None if the font does not state it.
    """

    weight: str = "regular"
    slant: str = "upright"
    condensed: bool = False
    kind: Optional[str] = None

    @classmethod
    def of(cls, face: Face) -> "Style":
        """Return the style of a font face."""
        weights = [word for word in ("light", "bold") if word in face.styles]
        return cls(
            weight=weights[0] if weights else "regular",
            slant="italic" if "italic" in face.styles else "upright",
            condensed="condensed" in face.styles,
            kind=face.kind,
        )

    @classmethod
    def from_record(cls, record: dict[str, Any]) -> "Style":
        """Return the style of a face that `dataset.json` lists."""
        return cls(**{name: record[name] for name in ("weight", "slant", "condensed", "kind")})

    @property
    def all_words(self) -> list[str]:
        """Every word, such as `regular upright sans`."""
        return [self.weight, *["condensed"] * self.condensed, self.slant, *([self.kind] if self.kind else [])]

    @property
    def words(self) -> list[str]:
        """The distinctive words: `regular` and `upright` only if there are no others."""
        return [word for word in self.all_words if word not in ("regular", "upright")] or ["regular", "upright"]

    def caption(self, letter: str) -> str:
        """Return the plain wording, such as `the letter Q in a bold serif font`."""
        return f"the letter {letter} in {_with_article(self.words)} font"


def _with_article(words: Sequence[str]) -> str:
    return f"{'an' if words[0][0] in 'aeiou' else 'a'} {' '.join(words)}"


def wordings(letter: str, style: Style, family: str) -> list[str]:
    """Return true captions of one letter in one font, the plain one first."""
    return [
        style.caption(letter),
        f"{_with_article(style.words)} letter {letter}",
        f"capital {letter}, {', '.join(style.all_words)}",
        f"the letter {letter} in {_with_article(style.all_words)} font",
        f"the letter {letter}",
        f"the letter {letter} set in {family}, {' '.join(style.all_words)}",
    ]


def choose_caption(key: str, letter: str, style: Style, family: str) -> str:
    """Return the wording of a sample, by a hash of its name."""
    choices = wordings(letter, style, family)
    return choices[sample_id(key) % len(choices)]
