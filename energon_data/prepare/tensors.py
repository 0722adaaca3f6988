"""Convert data sets of older systems: read tensors from pickles safely and store them as safetensors.

    part in the archive               part in the shard
    .pth      latent [1?, C, T, H, W] latent.safetensors, same dtype and bits
    .pickle   text [1?, K, W]         text.safetensors, without trailing rows of zeros
    .json     framerate, image_height fps, height, ...
    .jpg      picture                 pixels.jpg, the unchanged file
    .txt      caption                 `caption` of the metadata

Archives of NeMo and DFM have `.pth`, `.pickle` and `.json`; the pickle of a clip is a list whose first entry is the
text. Pre-encoded archives of NeMo's Imagen have `.jpg`, `.txt` and a `.pickle` of a dictionary: encoder -> array, or
encoder -> {"encodings": array}. A wdinfo file lists tar files.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Optional

import torch
from safetensors.torch import save
from torch import Tensor

from dit.errors import ConfigError, DataError
from dit.safe_files import read_bytes
from energon_data.latent_scale import Moments
from energon_data.media_files import PICTURES, open_picture
from energon_data.prepare.archives import first_of_each_name, list_tars, members_by_sample, name_within, tar_stamp
from energon_data.prepare.build import Job, Sample, UnitRecord
from energon_data.prepare.media import Options
from energon_data.prepare.preparation import Preparation
from energon_data.prepare.safe_pickle import as_tensor, read_pickle, read_torch_file
from energon_data.prepare.sources import (
    Source,
    class_of,
    leaves,
    read_object,
    read_text,
    scalars_of,
)
from energon_data.prepare.walk import FOLLOW, Skipped
from energon_data.samples import LATENT, PIXELS, SampleError

_PARTS = frozenset({"pth", "pt", "pickle", "pkl", "json", "txt", "cls"}) | PICTURES
_NAMES = {"framerate": "fps", "image_height": "height", "image_width": "width"}
TEXT = "text"


@dataclass(frozen=True)
class Archived:
    """The parts of one sample in an archive, by extension."""

    name: str
    parts: Mapping[str, bytes]


def list_archives(path: Path, *, follow_links: bool = False) -> tuple[list[Path], list[Skipped]]:
    """Return the tar files of a folder or a wdinfo file, and links out of the folder that are not read."""
    if not (path.is_file() and path.suffix in (".pkl", ".pickle")):
        return list_tars(path, follow_links=follow_links)
    try:
        listed = read_pickle(read_bytes(path))
    except SampleError as error:
        raise DataError(f"{path}: {error.detail}; name the folder of the archives instead") from error
    names = listed.get("tar_files") if isinstance(listed, dict) else None
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        raise DataError(f"{path} has no list 'tar_files' of names; name the folder of the archives instead")
    archives = [path.parent / name for name in names]  # absolute names are unchanged
    outside = [str(archive) for archive in archives if not follow_links and leaves(archive, path.parent)]
    if outside:
        raise DataError(
            f"{path} lists {outside[0]}, which is outside of its folder, and {len(outside) - 1} other files; {FOLLOW}"
        )
    absent = [str(archive) for archive in archives if not archive.is_file()]
    if absent:
        raise DataError(f"{path} lists {absent[0]}, which does not exist, and {len(absent) - 1} other files")
    repeated = [str(archive) for archive, count in Counter(archives).items() if count > 1]
    if repeated:
        raise DataError(f"{path} lists {repeated[0]} twice, and {len(repeated) - 1} other files; list each once")
    return archives, []


def read_archive(root: Path, path: Path) -> Iterator[Archived | tuple[str, SampleError]]:
    """Read the samples of one tar file in its order; a damaged archive ends with a name and the reason."""
    members = members_by_sample(path, name_within(path, root), _PARTS.__contains__)
    return first_of_each_name(
        (name, content) if isinstance(content, SampleError) else Archived(name, content) for name, content in members
    )


@dataclass(frozen=True)
class Rewrite:
    """Converts archived samples; picklable, for other processes.

    Attributes:
        text_key: encoder whose text is selected from a pickle with several; None for a pickle with one.
    """

    text_key: Optional[str] = None

    def __call__(self, sources: Iterable[Archived | tuple[str, SampleError]], record: UnitRecord) -> Iterator[Sample]:
        """Yield the samples of one archive, and count skipped ones."""
        for source in sources:
            if isinstance(source, tuple):
                record.skip(*source)
                continue
            try:
                yield self.sample(source)
            except SampleError as error:
                record.skip(source.name, error)

    def sample(self, archived: Archived) -> Sample:
        """Rewrite one sample."""
        parts = archived.parts
        row = {_NAMES.get(k, k): v for k, v in (read_object(parts["json"], "json") if "json" in parts else {}).items()}
        if "txt" in parts:
            row["caption"] = read_text(parts["txt"], "txt")
        label = class_of(read_text(parts["cls"], "cls") if "cls" in parts else row.get("label"))
        new_parts, shape, moments = self._media(parts)
        pickled = parts.get("pickle", parts.get("pkl"))
        if pickled is not None:
            new_parts[f"{TEXT}.safetensors"] = save({TEXT: self._text(read_pickle(pickled))})
        caption = row.get("caption")
        metadata = {
            **scalars_of(row),
            "source": archived.name,
            **({"caption": caption} if isinstance(caption, str) else {}),
            **({"label": label} if label is not None else {}),
        }
        key = Source(name=archived.name, read=bytes).key
        return Sample(key, archived.name, metadata, new_parts, shape, latent=moments)

    def _media(self, parts: Mapping[str, bytes]) -> tuple[dict[str, bytes], tuple[int, ...], Moments]:
        """Return the part of the latent or the picture, its shape, and the moments of the latent."""
        stored = parts.get("pth", parts.get("pt"))
        if stored is not None:
            latent = as_tensor(read_torch_file(stored))
            if latent is None:
                raise SampleError("wrong_part", "the .pth file has no tensor of floating-point numbers")
            latent = _without_batch(latent, 4)
            if latent.dim() == 3:
                latent = latent[:, None]
            if latent.dim() != 4:
                raise SampleError("wrong_shape", f"the latent has shape {list(latent.shape)}, expected [C, T, H, W]")
            moments = Moments.of(latent.double().numpy())
            return {f"{LATENT}.safetensors": save({LATENT: latent})}, tuple(latent.shape), moments
        pictures = [part for part in parts if part in PICTURES]
        if len(pictures) != 1:
            raise SampleError("missing_part", f"no latent (.pth) and no picture among {sorted(parts)}")
        width, height = open_picture(parts[pictures[0]]).size
        return {f"{PIXELS}.{pictures[0]}": parts[pictures[0]]}, (3, 1, height, width), Moments()

    def _text(self, value: Any) -> Tensor:
        """Return the text `[K, W]` of a pickle, without padding."""
        if isinstance(value, dict):
            if self.text_key is None and len(value) > 1:
                raise SampleError("wrong_part", f"texts of {sorted(value)}; choose one with --text-key")
            name = next(iter(value), None) if self.text_key is None else self.text_key
            if name not in value:
                raise SampleError("missing_part", f"no text {name!r}, only {sorted(value)}")
            value = value[name]
            value = value.get("encodings") if isinstance(value, dict) else value
        if isinstance(value, (list, tuple)) and value:
            value = value[0]
        text = as_tensor(value)
        if text is None:
            raise SampleError("wrong_part", "the .pickle file has no text of floating-point numbers")
        text = _without_batch(text, 2)
        if text.dim() != 2:
            raise SampleError("wrong_shape", f"the text has shape {list(text.shape)}, expected [K, width]")
        real = torch.nonzero((text != 0).any(1)).flatten()
        return text[: int(real[-1]) + 1 if len(real) else 1].contiguous()


def _without_batch(x: Tensor, rank: int) -> Tensor:
    return x[0] if x.dim() == rank + 1 and x.shape[0] == 1 else x


def prepare_tensors(
    source: Path,
    out: Path,
    *,
    text_key: Optional[str] = None,
    text_encoder: Optional[str] = None,
    vae: Optional[str] = None,
    follow_links: bool = False,
    validation: float = 0.02,
) -> Preparation:
    """Return the preparation of a data set of archived tensors."""
    if not 0 <= validation < 1:
        raise ConfigError(f"--validation {validation:g} must be a share: at least 0 and below 1")
    archives, skipped = list_archives(source, follow_links=follow_links)
    about = {"text_encoder": text_encoder, "vae": vae}
    plan = {
        "command": "tensors",
        "in": str(source.resolve()),
        "text_key": text_key,
        "follow_links": follow_links,
        "validation": validation,
        "files": [tar_stamp(path) for path in archives],
        **about,
    }
    return Preparation(
        Job(out, partial(read_archive, source if source.is_dir() else source.parent), Rewrite(text_key), validation),
        archives,
        len(archives),
        [],
        plan,
        Options(),
        {name: value for name, value in about.items() if value is not None},
        skipped=skipped,
    )
