"""Description of a prepared folder, for recipes that take their sizes from the data."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional

from dit.errors import DataError
from dit.patchify import Grid, grid_of
from dit.safe_files import parse_json, read_bytes

Shape = tuple[int, int, int, int]


@dataclass(frozen=True, kw_only=True)
class Contents:
    """The sizes, conditions and counts of a data set, from its `dataset.json`.

    Attributes:
        shapes: distinct (C, T, H, W) of latents or pixels.
        is_latent: whether an autoencoder encoded the samples.
        context_size: width of the text embeddings; None without texts.
        text_encoder: encoder of the texts, as in `dit.encoders.text_config`; None if the file does not state it.
        num_classes: number of classes; 0 unless every sample has a class.
        most_references: most references of a sample, from which it is edited; 0 if none is edited.
        reference_shapes: distinct (C, T, H, W) of references; empty if the file does not state them.
        num_train, num_held_out: number of samples; None if the file does not state it.
    """

    shapes: tuple[Shape, ...]
    is_latent: bool
    context_size: Optional[int]
    text_encoder: Optional[str] = None
    num_classes: int = 0
    captions: tuple[str, ...] = ()
    most_references: int = 0
    reference_shapes: tuple[Shape, ...] = ()
    num_train: Optional[int] = None
    num_held_out: Optional[int] = None

    def largest_grids(self, patch_temporal: int, patch_spatial: int) -> list[Grid]:
        """Return (t, h, w) in patches of the largest sample, and of each reference that a sample may have."""
        shapes_of_pictures = self.shapes, *[self.reference_shapes or self.shapes] * self.most_references
        return [
            grid_of(*max(shapes, key=math.prod)[1:], patch_temporal, patch_spatial) for shapes in shapes_of_pictures
        ]

    @property
    def needs_text_encoder(self) -> bool:
        """True if captions are the only condition, and their embeddings are not stored."""
        return self.context_size is None and bool(self.captions) and not self.num_classes

    @classmethod
    def read(cls, folder: Path) -> Optional["Contents"]:
        if not folder.exists():
            return None
        file = folder / "dataset.json"
        cure = "make the folder with `python -m energon_data.prepare`, or give all sizes in your recipe"
        try:
            description: Any = parse_json(read_bytes(file))
            names = description.get("shapes") or ["x".join(map(str, description["latent_shape"]))]
            counts = description.get("samples", {})
            all_labelled = "labelled" not in description or description["labelled"] == sum(counts.values())
            return cls(
                shapes=_shapes(names),
                is_latent=description.get("vae") is not None,
                context_size=description.get("context_size"),
                text_encoder=description.get("text_encoder"),
                num_classes=(len(description.get("class_names") or ()) or description.get("num_classes", 0))
                if all_labelled
                else 0,
                captions=tuple(description.get("captions", ())),
                most_references=description.get("most_references", int(description.get("edited", 0) > 0)),
                reference_shapes=_shapes(description.get("reference_shapes", ())),
                num_train=counts.get("train"),
                num_held_out=counts.get("val", 0) if counts else None,
            )
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise DataError(f"{file} does not describe the data ({error!r}); {cure}") from error


def _shapes(names: Iterable[str]) -> tuple[Shape, ...]:
    """Return (C, T, H, W) of names such as `16x1x32x32`."""
    return tuple((c, t, h, w) for c, t, h, w in (map(int, name.split("x")) for name in names))
