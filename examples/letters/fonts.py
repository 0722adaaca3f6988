"""Find the text fonts of a machine: fonts with real capitals, each once, grouped into families and styles."""

import hashlib
import math
import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Optional

import numpy as np

from dit.errors import DataError

if TYPE_CHECKING:
    from matplotlib.ft2font import FT2Font

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
CANVAS = 64
"""Side of the square each glyph is drawn on before it is shrunk."""
MOST_FACES, HELD_OUT = 240, 0.2
"""Maximal number of faces, and the share of their families that is held out for validation."""

_CLASSES = ("serif", "sans", "mono")
_NOT_TEXT = re.compile(
    r"symbol|\bsym|sym\b|math|emoji|icon|dingbat|webding|wingding|ornament|braille|barcode|music|awesome|lastresort|"
    r"last resort|nonuni|stixsiz|^cm(mi|sy|ex)\d|^esint|^msam|^msbm|^wasy|chess|playing|mahjong",
    re.IGNORECASE,
)
# TeX's Computer Modern files name every style a separate family and have wrong style tables.
_COMPUTER_MODERN = {
    "cmr10": ("Computer Modern Roman", "serif", ()),
    "cmb10": ("Computer Modern Roman", "serif", ("bold",)),
    "cmti10": ("Computer Modern Roman", "serif", ("italic",)),
    "cmss10": ("Computer Modern Sans", "sans", ()),
    "cmtt10": ("Computer Modern Typewriter", "mono", ()),
}


@dataclass(frozen=True)
class Face:
    """One font file: a family in one style.

    Attributes:
        style_class: `serif`, `sans` or `mono`.
        styles: further style words such as `bold`, `italic`, `condensed`.
        glyphs: the 26 capitals, float32 `[26, CANVAS, CANVAS]` in [0, 1].
        kind: `serif`, `sans`, `monospace` or `script` if the font states it; unlike `style_class`, it is not
            inferred from the shape of its letters.
    """

    path: Path
    family: str
    style_class: str
    styles: tuple[str, ...]
    glyphs: np.ndarray = field(repr=False, compare=False)
    kind: Optional[str] = None

    @property
    def description(self) -> str:
        """Style words as a file name uses them, such as `bold italic serif`."""
        return " ".join((*self.styles, self.style_class))


@dataclass(frozen=True)
class FontReport:
    """Faces that may be used, and the dropped files with the reason."""

    faces: list[Face]
    dropped: dict[str, str]


def font_files(folders: Iterable[str | Path] | None) -> list[Path]:
    """List TrueType and OpenType files, in the given folders or in matplotlib's and the system's.

    Raises:
        DataError: there is none.
    """
    import matplotlib
    from matplotlib import font_manager

    if folders is not None:
        roots = [Path(f) for f in folders]
        for root in roots:
            if not root.is_dir():
                raise DataError(f"font folder {root} does not exist; pass a folder of .ttf files to --fonts")
        found = {p for root in roots for p in root.rglob("*") if p.suffix.lower() in (".ttf", ".otf")}
        where = ", ".join(str(root) for root in roots)
    else:
        bundled = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
        found = set(bundled.glob("*.ttf"))
        found |= {Path(p) for p in font_manager.findSystemFonts() if p.lower().endswith((".ttf", ".otf"))}
        where = f"{bundled} and the system's font folders"
    if not found:
        raise DataError(f"no TrueType font in {where}; install fonts (for example fonts-dejavu) or pass --fonts FOLDER")
    return sorted(found, key=lambda p: (p.name, str(p)))


def draw_capitals(path: Path) -> np.ndarray:
    """Draw A-Z in their natural proportions: one size for all letters, each centred on its own box.

    Returns:
        Grey glyphs, float32 `[26, CANVAS, CANVAS]`, ink 1, paper 0.
    """
    from PIL import Image, ImageDraw, ImageFont

    probe = ImageFont.truetype(str(path), 100)
    boxes = [probe.getbbox(c) for c in LETTERS]
    width, height = max(b[2] - b[0] for b in boxes), max(b[3] - b[1] for b in boxes)
    # Leaves room for shifts and turns: W may take 88 % of the width, Q 76 % of the height.
    size = 100 * CANVAS * min(0.88 / max(width, 1), 0.76 / max(height, 1))
    font = ImageFont.truetype(str(path), max(1, math.floor(size)))
    glyphs = np.zeros((len(LETTERS), CANVAS, CANVAS), np.float32)
    for i, letter in enumerate(LETTERS):
        left, top, right, bottom = font.getbbox(letter)
        image = Image.new("L", (CANVAS, CANVAS), 0)
        corner = ((CANVAS - (right - left)) / 2 - left, (CANVAS - (bottom - top)) / 2 - top)
        ImageDraw.Draw(image).text(corner, letter, fill=255, font=font)
        glyphs[i] = np.asarray(image, np.float32) / 255
    return glyphs


def _fingerprints(glyphs: np.ndarray) -> np.ndarray:
    """Return a small normalised picture of each glyph's own box, `[26, 256]`, for comparing shapes across fonts."""
    from PIL import Image

    rows = []
    for glyph in glyphs:
        ys, xs = np.nonzero(glyph > 0.3)
        box = (xs.min(), ys.min(), xs.max() + 1, ys.max() + 1) if len(xs) else (0, 0, CANVAS, CANVAS)
        small = Image.fromarray(np.uint8(glyph * 255)).resize((16, 16), Image.Resampling.BOX, box=box)
        row = np.asarray(small, np.float32).ravel() - 128
        rows.append(row / (np.linalg.norm(row) + 1e-6))
    return np.stack(rows)


def _reference() -> np.ndarray:
    """Return fingerprints of plain fonts that ship with matplotlib, upright and slanted, `[4, 26, 256]`."""
    import matplotlib

    folder = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
    names = ("DejaVuSans.ttf", "DejaVuSerif.ttf", "DejaVuSans-Oblique.ttf", "DejaVuSerif-Italic.ttf")
    return np.stack([_fingerprints(draw_capitals(folder / name)) for name in names])


def _table(font: "FT2Font", name: Literal["OS/2", "post", "head"]) -> dict[str, Any]:
    """Return a table of a font's file by the names of its fields; empty where the font has none."""
    return dict(font.get_sfnt_table(name) or {})


def _styles(words: str, font: "FT2Font") -> tuple[str, ...]:
    """Return style words from a font's names and, for weight and slant, from its tables OS/2, post and head."""
    os2, post, head = _table(font, "OS/2"), _table(font, "post"), _table(font, "head")
    weight = os2.get("usWeightClass", 400)
    styles = []
    if "condensed" in words or "narrow" in words:
        styles.append("condensed")
    if "light" in words or "thin" in words or 0 < weight <= 300:
        styles.append("light")
    elif re.search(r"bold|black|heavy", words) or weight >= 600:
        styles.append("bold")
    slanted = post.get("italicAngle", (0, 0))[0] != 0 or head.get("macStyle", 0) & 2 or os2.get("fsSelection", 0) & 1
    if re.search(r"italic|oblique|slanted", words) or slanted:
        styles.append("italic")
    return tuple(styles)


def _stated_kind(words: str, font: "FT2Font") -> Optional[str]:
    """Return `monospace`, `script`, `sans` or `serif` if a font's names or tables state it.

    Source: OpenType specification 1.9, OS/2 (panose, sFamilyClass) and post (isFixedPitch).
    """
    os2, post = _table(font, "OS/2"), _table(font, "post")
    panose, family_class = os2.get("panose") or bytes(10), os2.get("sFamilyClass", 0) >> 8
    latin_text = panose[0] == 2
    fixed_pitch = post.get("isFixedPitch") or (latin_text and panose[3] == 9)
    if re.search(r"\bmono|mono\b|typewriter|courier|\bcode\b|console", words) or fixed_pitch:
        return "monospace"
    if re.search(r"script|cursive|brush|handwrit", words) or panose[0] == 3 or family_class == 10:
        return "script"
    if re.search(r"sans|gothic|grotesk|arial|helvetica", words):
        return "sans"
    if re.search(r"serif|roman|times|garamond|georgia|antiqua", words):
        return "serif"
    if latin_text and panose[1] >= 2:
        return "sans" if panose[1] >= 11 else "serif"
    if family_class in (1, 2, 3, 4, 5, 7, 8):
        return "sans" if family_class == 8 else "serif"
    return None


def _has_serifs(glyphs: np.ndarray) -> bool:
    """Return whether the I is much wider at its foot than in the middle."""
    ink = glyphs[LETTERS.index("I")] > 0.5
    widths = ink.sum(1)[ink.any(1)]
    return bool(len(widths) and widths[-3:].max() > 1.5 * widths[len(widths) // 2])


def find_faces(folders: Iterable[str | Path] | None = None) -> FontReport:
    """Load every text font once.

    A font is dropped with a reason when it lacks a capital, is named or shaped like a symbol font, cannot be read, or
    draws the same capitals as an earlier one.

    Args:
        folders: where to look, instead of matplotlib's and the system's folders.

    Raises:
        DataError: no text font is left.
    """
    from matplotlib.ft2font import FT2Font

    faces: list[Face] = []
    dropped: dict[str, str] = {}
    seen: dict[bytes, str] = {}
    reference = _reference()
    files = font_files(folders)
    for path in files:
        if len(faces) == MOST_FACES:
            dropped[str(path)] = f"more than {MOST_FACES} faces"
            continue
        try:
            font = FT2Font(str(path))
            family = " ".join(font.family_name.split())
            # Symbol fonts such as cmsy10 claim to have capitals, so check the name first.
            if _NOT_TEXT.search(family) or _NOT_TEXT.search(path.stem):
                dropped[str(path)] = "symbol, math or emoji font"
                continue
            known = font.get_charmap()
            lacking = [c for c in LETTERS if ord(c) not in known]
            if lacking:
                dropped[str(path)] = f"lacks {len(lacking)} of 26 capitals"
                continue
            glyphs = draw_capitals(path)
        except Exception as error:
            dropped[str(path)] = f"unreadable: {error}"
            continue
        prints = _fingerprints(glyphs)
        nearest = (prints @ reference.transpose(0, 2, 1)).max(0).argmax(1)
        readable = int((nearest == np.arange(26)).sum())
        if readable < 18:
            dropped[str(path)] = f"only {readable} of 26 capitals look like letters"
            continue
        digest = hashlib.sha256(np.uint8(glyphs * 15).tobytes()).digest()
        if digest in seen:
            dropped[str(path)] = f"same capitals as {seen[digest]}"
            continue
        seen[digest] = path.name
        if family in _COMPUTER_MODERN:
            family, style_class, styles = _COMPUTER_MODERN[family]
            kind: Optional[str] = "monospace" if style_class == "mono" else style_class
        else:
            words = f"{family} {font.style_name}".lower()
            styles, kind = _styles(words, font), _stated_kind(words, font)
            drawn = "serif" if _has_serifs(glyphs) else "sans"
            style_class = {"monospace": "mono", "sans": "sans", "serif": "serif"}.get(kind or "", drawn)
        faces.append(Face(path, family, style_class, styles, glyphs, kind))
    if not faces:
        raise DataError(
            f"none of the {len(files)} font files is a text font with 26 capitals "
            f"({'; '.join(f'{Path(p).name}: {why}' for p, why in list(dropped.items())[:3])}); pass --fonts FOLDER"
        )
    return FontReport(faces, dropped)


def held_out_families(faces: list[Face]) -> set[str]:
    """Select the font families that are held out for validation.

    About `HELD_OUT` of the families (at least one) is selected, from one style class after the other, starting with the
    class with most families, so that both splits have several styles. The only family of a class is not selected.
    Within a class, the family with most faces is selected that has at most `HELD_OUT` of all faces. The selection is
    not random: the same fonts give the same split.

    Returns:
        Held-out families; empty if there is only one family.
    """
    by_class: dict[str, dict[str, int]] = {c: defaultdict(int) for c in _CLASSES}
    for face in faces:
        by_class[face.style_class][face.family] += 1
    total = len({face.family for face in faces})
    held_out: set[str] = set()
    if total < 2:
        return held_out
    order = sorted(_CLASSES, key=lambda c: (-len(by_class[c]), _CLASSES.index(c)))
    # The only family of a class is selected only if no class has two.
    spare = 1 if any(len(by_class[c]) > 1 for c in _CLASSES) else 0
    while len(held_out) < math.ceil(HELD_OUT * total):
        before = len(held_out)
        for name in order:
            left = {f: n for f, n in by_class[name].items() if f not in held_out}
            if len(left) <= spare or len(held_out) >= math.ceil(HELD_OUT * total) or total - len(held_out) < 2:
                continue
            small = {f: n for f, n in left.items() if n <= HELD_OUT * len(faces)}
            held_out.add(max(small, key=lambda f: (small[f], f)) if small else min(left, key=lambda f: (left[f], f)))
        if len(held_out) == before:
            break
    return held_out
