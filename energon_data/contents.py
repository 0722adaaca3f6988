"""What a prepared folder says of itself, for a recipe that takes its sizes from the data."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional

from dit.errors import DataError
from dit.safe_files import parse_json, read_bytes

Shape = tuple[int, int, int, int]


@dataclass(frozen=True, kw_only=True)
class Contents:
    """The sizes, conditions and counts of a data set, from its `dataset.json`.

    Attributes:
        shapes: (C, T, H, W) of latents or pixels, each different one once.
        is_latent: an autoencoder made them.
        context_size: width of the text embeddings; None without.
        text_encoder: what made them, as in `dit.encoders.text_config`; None where the file does not say.
        num_classes: 0 unless every sample has a class.
        captions: a few of them.
        num_train, num_held_out: samples; None where the file does not say.
    """

    shapes: tuple[Shape, ...]
    is_latent: bool
    context_size: Optional[int]
    text_encoder: Optional[str] = None
    num_classes: int
    captions: tuple[str, ...]
    num_train: Optional[int]
    num_held_out: Optional[int]

    @classmethod
    def read(cls, folder: Path) -> Optional["Contents"]:
        """Read the description of a folder.

        Returns:
            None if there is no such folder.

        Raises:
            DataError: it has no description, or not the sizes of its samples.
        """
        if not folder.exists():
            return None
        file = folder / "dataset.json"
        again = "make the folder with `python -m energon_data.prepare`, or name all sizes in a recipe of your own"
        try:
            found: Any = parse_json(read_bytes(file))
            named = [[int(side) for side in shape.split("x")] for shape in found.get("shapes", ())]
            shapes = [(c, t, h, w) for c, t, h, w in named or [found["latent_shape"]]]
            counts = found.get("samples", {})
            all_labelled = "labelled" not in found or found["labelled"] == sum(counts.values())
            return cls(
                shapes=tuple(shapes),
                is_latent=found.get("vae") is not None,
                context_size=found.get("context_size"),
                text_encoder=found.get("text_encoder"),
                num_classes=(len(found.get("class_names") or ()) or found.get("num_classes", 0)) if all_labelled else 0,
                captions=tuple(found.get("captions", ())),
                num_train=counts.get("train"),
                num_held_out=counts.get("val", 0) if counts else None,
            )
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise DataError(f"{file} does not say what the data hold ({error!r}); {again}") from error
