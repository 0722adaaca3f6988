"""Avatars with nine attributes: their drawings, their captions, and the combinations that training never sees."""

import random
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import Literal, Optional

import numpy as np
from PIL import Image

from dit.data_api import sample_id
from dit.encoders.vae import Geometry
from dit.errors import ConfigError
from energon_data.media_files import picture_bytes
from energon_data.prepare.media import Options
from energon_data.prepare.pictures import Fit
from energon_data.prepare.preparation import Preparation
from energon_data.prepare.sources import Source
from examples.avatars.design import ATTRIBUTION, RELEASE, SIZE, colour, parts

NAME = "avatars"
"""Name of the data set in `dataset.json`."""
ATTRIBUTES: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "skin": {"pale skin": "ffdbac", "tan skin": "e0b687", "brown skin": "b68655", "dark skin": "8d5524"},
        "hair": {
            "short {} hair": "short16",
            "parted {} hair": "short01",
            "spiky {} hair": "short13",
            "receding {} hair": "short18",
            "a {} tuft": "short05",
            "long {} hair": "long13",
            "curly {} hair": "long15",
            "a {} bob": "long21",
            "{} braids": "long18",
            "a {} bun": "long05",
        },
        "hair colour": {
            "blond": "e8c45c",
            "brown": "603a14",
            "black": "191919",
            "red": "bd1700",
            "green": "91cb15",
            "blue": "009bbd",
        },
        "eyes": {
            "eyes ahead": "variant06",
            "eyes to the left": "variant08",
            "eyes to the right": "variant07",
            "small eyes": "variant04",
        },
        "mouth": {
            "a smile": "happy09",
            "a frown": "sad01",
            "a straight mouth": "sad06",
            "a crooked mouth": "happy08",
            "an open mouth": "happy01",
            "a laugh": "happy12",
        },
        "beard": {"": "", "a full beard": "variant08", "a goatee": "variant02"},
        "glasses": {"": "", "square glasses": "light05", "large glasses": "light07", "sunglasses": "dark02"},
        "clothing": {
            "a {} shirt": "variant03",
            "a {} striped shirt": "variant13",
            "a {} checked shirt": "variant06",
            "a {} turtleneck": "variant12",
            "a {} jacket": "variant16",
            "a {} top": "variant10",
            "{} overalls": "variant09",
        },
        "clothing colour": {
            "blue": "428bca",
            "green": "00b159",
            "red": "d11141",
            "yellow": "ffc425",
            "purple": "614f8a",
        },
    }
)
"""Attributes of an avatar: the words of each value, and the name of its part or its colour."""
COLOURED_BY = {"head": "skin", "clothing": "clothing colour", "beard": "hair colour", "hair": "hair colour"}
COLOURS = {"eyes": "191919", "glasses": "323232", "mouth": "e0485a"}  # of the other parts
PAINTED = ("head", "clothing", "eyes", "glasses", "beard", "mouth", "hair")  # in this order
MAX_SIZE = 1024
MAX_COUNT = 1_000_000  # training may see 1.4 million avatars
OPENINGS = ("", "a portrait: ", "an avatar with ", "someone with ")

Avatar = tuple[int, ...]
"""The value of each attribute, as an index."""
Kind = Literal["trained", "new combination", "new pair"]


def draw(avatars: Sequence[Avatar] | np.ndarray) -> np.ndarray:
    """Draw avatars `[N, 9]` on white.

    Returns:
        uint8 `[N, 16, 16, 3]`.
    """
    value_of = dict(zip(ATTRIBUTES, np.asarray(avatars).T, strict=True))
    canvas_NPC = np.full((len(avatars), SIZE * SIZE, 3), 255, np.float32)
    for kind in PAINTED:
        if kind in COLOURED_BY:
            palette = np.array([colour(digits) for digits in ATTRIBUTES[COLOURED_BY[kind]].values()], np.float32)
            colours_NC = palette[value_of[COLOURED_BY[kind]]]
        else:
            colours_NC = np.tile(np.array(colour(COLOURS[kind]), np.float32), (len(avatars), 1))
        for value, part in enumerate(ATTRIBUTES.get(kind, {"": "head"}).values()):
            rows = np.flatnonzero(value_of.get(kind, np.zeros(len(avatars))) == value)
            for shape in parts()[kind][part] if part else ():
                where = np.ix_(rows, shape.pixels)
                paint = colours_NC[rows, None] if shape.colour is None else np.array(shape.colour, np.float32)
                canvas_NPC[where] += shape.opacity * (paint - canvas_NPC[where])
    return canvas_NPC.round().astype(np.uint8).reshape(-1, SIZE, SIZE, 3)


def enlarged(drawings: np.ndarray, size: int) -> np.ndarray:
    """Return drawings of a multiple of their size; each pixel becomes a square."""
    return drawings.repeat(size // SIZE, 1).repeat(size // SIZE, 2)


def caption(avatar: Avatar, wording: str = "") -> str:
    """Return the words of an avatar.

    Args:
        wording: any text, whose hash selects the opening and the order of the words; empty for the plain order.
    """
    words = dict(zip(ATTRIBUTES, (list(names)[value] for names, value in zip(ATTRIBUTES.values(), avatar))))
    for part in ("hair", "clothing"):
        words[part] = words[part].format(words.pop(f"{part} colour"))
    phrases, opening = [text for text in words.values() if text], ""
    if wording:
        chance = random.Random(sample_id(wording))
        chance.shuffle(phrases)
        opening = chance.choice(OPENINGS)
    return opening + ", ".join(phrases)


def kind_of(avatar: Avatar) -> Kind:
    """Return whether training may see an avatar; a fixed rule withholds two avatars in five.

    * `new pair`: training never sees its pair of hair and hair colour (one pair in six), or of clothing and clothing
      colour (one pair in five).
    * `new combination`: training sees each of its pairs, but not the complete combination (one in ten of the others).
    """
    value_of = dict(zip(ATTRIBUTES, avatar, strict=True))
    for part in ("hair", "clothing"):
        if (value_of[part] + value_of[f"{part} colour"]) % len(ATTRIBUTES[f"{part} colour"]) == 0:
            return "new pair"
    return "new combination" if sample_id(f"avatar {avatar}") % 10 == 0 else "trained"


def choose(kind: Kind, count: int) -> list[Avatar]:
    """Return the first different avatars of a kind in a fixed random order; training uses the first `trained` ones."""
    return list(islice(_random_avatars(kind), count))


def _random_avatars(kind: Kind) -> Iterator[Avatar]:
    chance, seen = random.Random(kind), set()
    while True:
        avatar = tuple(chance.randrange(len(values)) for values in ATTRIBUTES.values())
        if avatar not in seen and kind_of(avatar) == kind:
            seen.add(avatar)
            yield avatar


def prepare_avatars(
    out: Path,
    *,
    count: int,
    size: int = SIZE,
    vae: Optional[str] = None,
    text_encoder: Optional[str] = None,
    teacher: Optional[str] = None,
    teacher_patch: int = 4,
    samples_per_shard: int = 1000,
    validation: float = 0.0,
) -> Preparation:
    """Plan a data set of avatars, which `Preparation.run` writes.

    Args:
        out: folder to create.
        count: number of different avatars.
        size: side of the pictures; a multiple of 16, whose drawings are enlarged.
        vae, text_encoder, teacher, teacher_patch: see `Options`.
        validation: share of the samples that is held out, selected by name.

    Raises:
        ConfigError: a number is out of range, or an encoder or the design is not available.
    """
    if not 1 <= count <= MAX_COUNT:
        raise ConfigError(f"--count {count} must be 1 to {MAX_COUNT:,}")
    if not SIZE <= size <= MAX_SIZE or size % SIZE:
        raise ConfigError(f"--size {size} must be a multiple of {SIZE} from {SIZE} to {MAX_SIZE} pixels")
    parts()  # before worker processes need it
    return Preparation.generated(
        NAME,
        out,
        Options(
            fit=Fit(size=size, aspect="square", multiple_of=SIZE if vae is None else Geometry.read(vae).step),
            vae=vae,
            text_encoder=text_encoder,
            teacher=teacher,
            teacher_patch=teacher_patch,
        ),
        partial(_sources, size),
        choose("trained", count),
        plan={"count": count, "size": size},
        about={"name": NAME, "attribution": ATTRIBUTION, "drawn_from": RELEASE},
        samples_per_shard=samples_per_shard,
        validation=validation,
    )


def _sources(size: int, unit: Sequence[Avatar]) -> Iterator[Source]:
    """Yield the samples of one unit of work."""
    for avatar in unit:
        name = "-".join(map(str, avatar))
        yield Source(name=f"{name}.png", read=partial(_png, avatar, size), captions=(caption(avatar, name),))


def _png(avatar: Avatar, size: int) -> bytes:
    return picture_bytes(Image.fromarray(enlarged(draw([avatar]), size)[0]), "png")
