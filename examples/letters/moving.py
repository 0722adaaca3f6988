"""Render clips of moving letters, and optionally stills of them: video data without a download."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, Optional

import torch
from torch import Tensor
from torch.nn import functional

from dit.errors import ConfigError
from energon_data.prepare.shards import (
    ShardWriter,
    npy_bytes,
    published_folder,
    write_dataset_file,
    write_energon_metadata,
)
from energon_data.prepare.texts import text_record
from examples.letters.captions import Style
from examples.letters.fonts import CANVAS, LETTERS, Face, find_faces
from examples.letters.stills import SPLITS, assign_faces, encode_captions, face_record, face_slug

DIRECTIONS = {"left": (-1.0, 0.0), "right": (1.0, 0.0), "up": (0.0, -1.0), "down": (0.0, 1.0)}
"""Name and unit vector (x to the right, y downwards) of each direction."""
SPEEDS = {"slow": 0.4, "fast": 0.8}
"""Name and speed in pixels per frame of a picture 16 pixels wide; other sizes scale it."""
SCALE = 0.9
OFF_MIDDLE = 0.03
"""Maximal distance between the middle of a path and that of the picture on either axis, as a fraction of the side.

It is small, so that the position of a letter over time depends on the direction: with random positions, a small model
learns the letters long before the motion.
"""
REACH = 0.21
"""Maximal distance of the centre of a letter from the middle, as a fraction of the side."""
FPS = 8.0
CLASS_NAMES = [f"{letter} {direction}" for letter in LETTERS for direction in DIRECTIONS]


def caption(letter: str, direction: str, speed: str) -> str:
    """Return the caption of a clip."""
    return f"{still_caption(letter)} moving {direction} {'slowly' if speed == 'slow' else 'fast'}"


def still_caption(letter: str) -> str:
    """Return the caption of a still."""
    return f"the letter {letter}"


@dataclass(frozen=True)
class MovingLettersReport:
    """The data set: counts by split."""

    folder: Path
    clips: dict[str, int]
    stills: dict[str, int]
    shards: int
    total_bytes: int
    seconds: float

    def summary(self) -> str:
        """Describe the data set in a few lines."""
        lines = [f"{self.folder}: {self.shards} shards, {self.total_bytes} bytes, took {self.seconds:.1f} s"]
        return "\n".join(
            [*lines, *(f"  {split}: {self.clips[split]} clips and {self.stills[split]} stills" for split in SPLITS)]
        )


@dataclass(frozen=True)
class Motion:
    """How one letter moves.

    Attributes:
        direction: key of `DIRECTIONS`.
        speed: key of `SPEEDS`.
        path_F2: centre of the letter in each frame, (x, y) in pixels from the middle of the picture.
    """

    direction: str
    speed: str
    path_F2: Tensor

    @classmethod
    def draw(cls, direction: str, frames: int, size: int, generator: torch.Generator) -> "Motion":
        """Draw a speed and a position for a straight path near the middle."""
        names = list(SPEEDS)
        speed = names[int(torch.randint(len(names), (), generator=generator))]
        middle = (torch.rand(2, generator=generator) * 2 - 1) * OFF_MIDDLE * size
        step = torch.tensor(DIRECTIONS[direction]) * SPEEDS[speed] * size / 16
        return cls(direction, speed, middle + (torch.arange(frames) - (frames - 1) / 2)[:, None] * step)


def render(glyph: Tensor, motion: Motion, size: int) -> Tensor:
    """Render one letter along its path.

    Args:
        glyph: `[CANVAS, CANVAS]`, ink 1, paper 0.

    Returns:
        Float32 `[1, F, size, size]` in [-1, 1], ink 1, paper -1.
    """
    frames = len(motion.path_F2)
    # A point p of the picture, which spans [-1, 1], shows the glyph at (p - centre) / SCALE.
    theta = torch.zeros(frames, 2, 3)
    theta[:, 0, 0] = theta[:, 1, 1] = 1 / SCALE
    theta[:, :, 2] = -motion.path_F2 * 2 / size / SCALE
    grid = functional.affine_grid(theta, [frames, 1, CANVAS, CANVAS], align_corners=False)
    drawn = functional.grid_sample(glyph.expand(frames, 1, CANVAS, CANVAS), grid, align_corners=False)
    return functional.adaptive_avg_pool2d(drawn, size).clamp(0, 1).transpose(0, 1) * 2 - 1


def boldest(faces: Sequence[Face]) -> list[Face]:
    """Return the bold upright faces, or all if there are none. One style suffices, because the task is the motion."""
    styles = [(face, Style.of(face)) for face in faces]
    return [face for face, style in styles if (style.weight, style.slant) == ("bold", "upright")] or [*faces]


def _render_split(
    faces: Sequence[Face], variations: int, frames: int, stills: int, size: int, generator: torch.Generator
) -> Iterator[tuple[str, dict[str, Any], Tensor]]:
    """Yield name, metadata and `[1, T, size, size]` of every clip, and of its stills, clips shuffled."""
    count = len(faces) * len(CLASS_NAMES) * variations
    for number in torch.randperm(count, generator=generator).tolist():
        rest, variation = divmod(number, variations)
        index, label = divmod(rest, len(CLASS_NAMES))
        face, (letter, direction) = faces[index], CLASS_NAMES[label].split()
        motion = Motion.draw(direction, frames, size, generator)
        clip = render(torch.from_numpy(face.glyphs[LETTERS.index(letter)]), motion, size)
        key = f"{letter}_{direction}_{face_slug(face)}_f{index:03d}_v{variation:03d}"
        metadata = {
            "label": label,
            "letter": letter,
            "direction": direction,
            "speed": motion.speed,
            "pixels_per_frame": SPEEDS[motion.speed] * size / 16,
            "caption": caption(letter, direction, motion.speed),
            "font": face.path.name,
            "fps": FPS,
            "height": size,
            "width": size,
        }
        yield key, {**metadata, "frames": frames}, clip
        # An image is a clip of one frame.
        still = {**metadata, "caption": still_caption(letter), "frames": 1}
        for t in (i * frames // stills for i in range(stills)):
            yield f"{key}_t{t:02d}", still, clip[:, t : t + 1]


def prepare_moving_letters(
    out: str | Path,
    *,
    size: int = 16,
    frames: int = 8,
    fonts: Optional[Sequence[str | Path]] = None,
    samples_per_shard: int = 2000,
    stills: int = 0,
    variations: int = 16,
    text_encoder: Optional[str] = None,
    seed: int = 0,
    force: bool = False,
) -> MovingLettersReport:
    """Render clips of moving letters into Energon shards; `out` is created only when complete.

    The class of a clip is its letter and its direction; its speed is one of two. Bold upright faces are used if there
    are any.

    Args:
        out: folder to create.
        size: side of the pictures in pixels.
        frames: frames of each clip.
        stills: number of frames of each clip that are also samples.
        fonts: folders to look for fonts in, instead of matplotlib's and the system's.
        samples_per_shard: clips and stills per shard.
        variations: clips per glyph, font face and direction; held-out faces get half as many.
        text_encoder: also store the embeddings of each caption by these encoders, see `dit.encoders.text_config`.
        seed: of all paths and of the order.
        force: replace an older data set.

    Raises:
        ConfigError: a size is impossible, the encoder is not installed, or `out` exists.
        DataError: no text font was found.
    """
    started = time.monotonic()
    if not 8 <= size <= CANVAS or frames < 2:
        raise ConfigError(f"--size must be in 8..{CANVAS} and --frames be at least 2, got {size} and {frames}")
    fastest = max(SPEEDS.values()) / 16
    most = int((REACH - OFF_MIDDLE) * 2 / fastest) + 1
    if frames > most:
        raise ConfigError(f"in --frames {frames} the fast letters would leave the picture; use at most {most}")
    if not 0 <= stills <= frames:
        raise ConfigError(f"--stills {stills} must be between 0 and the {frames} frames of a clip")
    if samples_per_shard < 1 or variations < 1:
        raise ConfigError(
            f"--samples-per-shard and --variations must be at least 1, got {samples_per_shard} and {variations}"
        )
    text = text_record(text_encoder)
    captions = [*map(still_caption, LETTERS), *(caption(*words) for words in product(LETTERS, DIRECTIONS, SPEEDS))]
    texts = encode_captions(captions, text_encoder)
    out = Path(out).absolute()
    clips: dict[str, int] = dict.fromkeys(SPLITS, 0)
    pictures: dict[str, int] = dict.fromkeys(SPLITS, 0)
    with published_folder(out, force=force) as folder:
        faces, split_by = assign_faces(find_faces(fonts).faces)
        faces = {split: boldest(group) for split, group in faces.items()}
        generator = torch.Generator().manual_seed(seed)
        shards: dict[str, dict[str, Any]] = {}
        for split, count in (("train", variations), ("val", max(1, variations // 2))):
            writer = ShardWriter(folder, split, samples_per_shard)
            for key, metadata, latent in _render_split(faces[split], count, frames, stills, size, generator):
                parts = {"latent.npy": npy_bytes(latent.half().numpy()), **texts[metadata["caption"]]}
                writer.add(f"{split}_{key}", metadata, parts)
                (pictures if metadata["frames"] == 1 else clips)[split] += 1
            writer.close()
            shards |= writer.shards
        content = {
            "format": 1,
            "name": "moving_letters",
            "class_names": CLASS_NAMES,
            "latent_shape": [1, frames, size, size],
            "fps": FPS,
            **text,
            "splits": {
                split: {
                    "clips": clips[split],
                    "stills": pictures[split],
                    "families": sorted({face.family for face in faces[split]}),
                    "faces": [face_record(face) for face in faces[split]],
                }
                for split in SPLITS
            },
            "split_by": split_by,
            "seed": seed,
            "shards": shards,
        }
        write_dataset_file(folder, content)
        write_energon_metadata(folder, shards, SPLITS)
    total = sum(shard["bytes"] for shard in shards.values())
    return MovingLettersReport(out, clips, pictures, len(shards), total, time.monotonic() - started)
