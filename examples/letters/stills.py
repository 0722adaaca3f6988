"""Render the capitals A-Z of every text font on this machine into a small data set."""

import re
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Optional

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from dit.encoders.teacher import load_teacher
from dit.errors import ConfigError
from energon_data.prepare.media import teacher_parts
from energon_data.prepare.shards import (
    ShardWriter,
    npy_bytes,
    published_folder,
    write_dataset_file,
    write_energon_metadata,
)
from energon_data.prepare.texts import text_parts, text_record
from examples.letters.captions import Style, choose_caption
from examples.letters.fonts import CANVAS, LETTERS, Face, FontReport, find_faces, held_out_families

SPLITS = ("train", "val")


@dataclass(frozen=True)
class LettersReport:
    """The data set: counts by split, and the fonts."""

    folder: Path
    images: dict[str, int]
    families: dict[str, list[str]]
    split_by: str
    shards: int
    total_bytes: int
    fonts: FontReport
    seconds: float

    def summary(self) -> str:
        """Describe the data set in a few lines."""
        lines = [f"{self.folder}: {sum(self.images.values())} images in {self.shards} shards, {self.total_bytes} bytes"]
        for split in SPLITS:
            names = ", ".join(self.families[split])
            lines.append(f"  {split}: {self.images[split]} images of {len(self.families[split])} families: {names}")
        if self.split_by != "family":
            lines.append(f"  only one font family was found, so train and val differ by {self.split_by}")
        reasons: dict[str, int] = {}
        for why in self.fonts.dropped.values():
            why = re.sub(r"^(same capitals|unreadable|lacks|only).*", r"\1", why)
            reasons[why] = reasons.get(why, 0) + 1
        left_out = ", ".join(f"{n} {why}" for why, n in sorted(reasons.items())) or "none"
        lines.append(f"  {len(self.fonts.faces)} faces used; font files left out: {left_out}")
        lines.append(f"  took {self.seconds:.1f} s")
        return "\n".join(lines)


def vary(glyphs: Tensor, count: int, size: int, generator: torch.Generator) -> Tensor:
    """Render each glyph `count` times, slightly shifted, scaled, rotated, slanted, thinned or thickened.

    The first variation of each glyph is the glyph itself.

    Args:
        glyphs: `[N, CANVAS, CANVAS]`, ink 1, paper 0.
        size: side of the pictures.

    Returns:
        Float32 `[N, count, size, size]` in [-1, 1], ink 1, paper -1.
    """
    n = len(glyphs)
    amount = torch.rand(6, n, count, generator=generator) * 2 - 1
    amount[:, :, 0] = 0
    turn, slant = amount[0] * 0.10, amount[1] * 0.06
    scale_x, scale_y = 1 + 0.10 * amount[2], 1 + 0.08 * amount[3]
    shift_x, shift_y = amount[4] * 0.10, amount[5] * 0.10
    cos, sin = turn.cos(), turn.sin()
    theta = torch.stack(
        [
            torch.stack([cos / scale_x, slant - sin, -shift_x], -1),
            torch.stack([sin, cos / scale_y, -shift_y], -1),
        ],
        -2,
    )
    grid = functional.affine_grid(theta.flatten(0, 1), [n * count, 1, CANVAS, CANVAS], align_corners=False)
    source = glyphs[:, None].repeat_interleave(count, 0)
    drawn = functional.grid_sample(source, grid, mode="bilinear", padding_mode="zeros", align_corners=False)
    small = functional.adaptive_avg_pool2d(drawn, size)
    # A gamma near 1 thins or thickens the grey edges, as ink and rasterisers do.
    gamma = torch.exp(0.35 * (torch.rand(n, count, generator=generator) * 2 - 1))
    gamma[:, 0] = 1
    small = small.clamp(0, 1).view(n, count, size, size) ** gamma[..., None, None]
    return small * 2 - 1


def encode_captions(captions: Iterable[str], encoder: Optional[str]) -> dict[str, dict[str, bytes]]:
    """Return the parts that each caption adds to its samples, as `text_parts` does; no parts without an encoder.

    Raises:
        ConfigError: the encoder is unknown or not installed.
    """
    unique = list(dict.fromkeys(captions))
    if encoder is None:
        return {caption: {} for caption in unique}
    from dit.encoders.text import TextEncoders

    return dict(zip(unique, text_parts(TextEncoders(encoder).encode(unique)), strict=True))


def features_of(latents: Sequence[np.ndarray], teacher: Optional[str], patch: int) -> list[dict[str, bytes]]:
    """Return the parts that a teacher adds to each grey picture `[1, 1, H, W]`; no parts without a teacher."""
    if teacher is None:
        return [{} for _ in latents]
    pictures = [torch.from_numpy(latent).float().expand(3, -1, -1, -1) for latent in latents]
    return teacher_parts(load_teacher(teacher, patch, "cpu", "fp32"), pictures)


def face_record(face: Face) -> dict[str, Any]:
    """Return the entry of a font face in `dataset.json`."""
    styles = [*face.styles, face.style_class]
    return {"family": face.family, "styles": styles, "file": face.path.name, **asdict(Style.of(face))}


def assign_faces(faces: list[Face]) -> tuple[dict[str, list[Face]], str]:
    """Split faces into train and val by family, or by face if there is one family, or not at all for one face."""
    held_out = held_out_families(faces)
    if held_out:
        by = {
            "train": [f for f in faces if f.family not in held_out],
            "val": [f for f in faces if f.family in held_out],
        }
        return by, "family"
    if len(faces) > 1:
        cut = max(1, round(0.2 * len(faces)))
        return {"train": faces[:-cut], "val": faces[-cut:]}, "face"
    return {"train": faces, "val": faces}, "variation"


def face_slug(face: Face) -> str:
    """Return a face's name in lower-case letters, digits and hyphens, for the names of its samples."""
    return re.sub(r"[^a-z0-9]+", "-", f"{face.family} {face.description}".lower()).strip("-")


def _render_split(
    faces: Sequence[Face], variations: int, size: int, generator: torch.Generator, skip: int
) -> Iterator[tuple[str, dict[str, Any], np.ndarray]]:
    """Yield name, metadata and `[1, 1, size, size]` float16 latent of every picture, in shuffled order."""
    pictures, owners = [], []
    for index, face in enumerate(faces):
        drawn = vary(torch.from_numpy(face.glyphs), variations + skip, size, generator)[:, skip:]
        pictures.append(drawn.half().numpy())
        owners += [(index, label, v) for label in range(26) for v in range(variations)]
    images = np.concatenate([p.reshape(-1, 1, 1, size, size) for p in pictures])
    for i in torch.randperm(len(images), generator=generator).tolist():
        index, label, variation = owners[i]
        face, letter = faces[index], LETTERS[label]
        key = f"{letter}_{face_slug(face)}_f{index:03d}_v{variation + skip:03d}"
        metadata = {
            "label": label,
            "letter": letter,
            "family": face.family,
            "font": face.path.name,
            "styles": [*face.styles, face.style_class],
            "caption": choose_caption(key, letter, Style.of(face), face.family),
            "height": size,
            "width": size,
            "frames": 1,
        }
        yield key, metadata, images[i]


def prepare_letters(
    out: str | Path,
    *,
    size: int = 16,
    fonts: Optional[Sequence[str | Path]] = None,
    samples_per_shard: int = 2000,
    variations: int = 16,
    text_encoder: Optional[str] = None,
    teacher: Optional[str] = None,
    teacher_patch: int = 4,
    seed: int = 0,
    force: bool = False,
) -> LettersReport:
    """Render A-Z into Energon shards; `out` is created only when complete.

    Args:
        out: folder to create.
        size: side of the pictures in pixels.
        fonts: folders to look for fonts in, instead of matplotlib's and the system's.
        samples_per_shard: pictures per shard.
        variations: pictures per glyph and font face; held-out faces get half as many.
        text_encoder: also store the embeddings of each caption by these encoders, see `dit.encoders.text_config`.
        teacher, teacher_patch: also store the tokens of a teacher, see `Options`.
        seed: of all variations and of the order.
        force: replace an older data set.

    Raises:
        ConfigError: a size is impossible, the encoder is not installed, or `out` exists.
        DataError: no text font was found.
    """
    started = time.monotonic()
    if not 4 <= size <= CANVAS:
        raise ConfigError(f"--size must be in 4..{CANVAS}, got {size}")
    if samples_per_shard < 1 or variations < 1:
        raise ConfigError(
            f"--samples-per-shard and --variations must be at least 1, got {samples_per_shard} and {variations}"
        )
    text = text_record(text_encoder)
    out = Path(out).absolute()
    with published_folder(out, force=force) as folder:
        report = find_faces(fonts)
        faces, split_by = assign_faces(report.faces)
        counts = {"train": variations, "val": max(1, variations // 2)}
        generator = torch.Generator().manual_seed(seed)
        shards: dict[str, dict[str, Any]] = {}
        images: dict[str, int] = {}
        for split in SPLITS:
            writer = ShardWriter(folder, split, samples_per_shard)
            skip = counts["train"] if split == "val" and split_by == "variation" else 0
            rendered = list(_render_split(faces[split], counts[split], size, generator, skip))
            images[split] = len(rendered)
            texts = encode_captions((metadata["caption"] for _, metadata, _ in rendered), text_encoder)
            features = features_of([latent for _, _, latent in rendered], teacher, teacher_patch)
            for (key, metadata, latent), tokens in zip(rendered, features, strict=True):
                parts = {"latent.npy": npy_bytes(latent), **texts[metadata["caption"]], **tokens}
                writer.add(f"{split}_{key}", metadata, parts)
            writer.close()
            shards |= writer.shards
        families = {split: sorted({f.family for f in faces[split]}) for split in SPLITS}
        write_dataset_file(
            folder,
            {
                "format": 1,
                "name": "letters",
                "class_names": list(LETTERS),
                "latent_shape": [1, 1, size, size],
                **text,
                "splits": {
                    split: {
                        "images": images[split],
                        "families": families[split],
                        "faces": [face_record(f) for f in faces[split]],
                    }
                    for split in SPLITS
                },
                "split_by": split_by,
                "seed": seed,
                "shards": shards,
            },
        )
        write_energon_metadata(folder, shards, SPLITS)
    total = sum(s["bytes"] for s in shards.values())
    return LettersReport(out, images, families, split_by, len(shards), total, report, time.monotonic() - started)
