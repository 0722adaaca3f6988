"""Data sets of older systems become ones of this project: tensors from pickles are read safely and stored plainly.

    sample of the archive             becomes
    .pth      latent [1?, C, T, H, W] latent.safetensors, dtype and bits as they were
    .pickle   text [1?, K, W]         text.safetensors, without the rows of zeros behind the text
    .json     framerate, image_height fps, height, ...
    .jpg      picture                 pixels.jpg, the file itself
    .txt      caption                 `caption` of the metadata

Archives of NeMo and DFM hold `.pth`, `.pickle` and `.json`; the pickle of a clip is a list whose first entry is the
text. Pre-encoded archives of NeMo's Imagen hold `.jpg`, `.txt` and a `.pickle` of a dictionary: encoder -> array, or
encoder -> {"encodings": array}. A wdinfo file lists tar files.
"""

import tarfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, Optional

import torch
from safetensors.torch import save
from torch import Tensor

from dit.errors import ConfigError, DataError
from dit.safe_files import open_binary, read_bytes
from energon_data.latent_scale import Moments
from energon_data.media_files import PICTURES, open_picture
from energon_data.prepare.archives import first_of_each_name, list_tars, name_within, tar_stamp
from energon_data.prepare.build import Job, Sample, UnitRecord
from energon_data.prepare.media import Options
from energon_data.prepare.preparation import Preparation
from energon_data.prepare.safe_pickle import as_tensor, read_pickle, read_torch_file
from energon_data.prepare.sources import (
    MAX_FILE_BYTES,
    Source,
    class_of,
    read_object,
    read_text,
    scalars_of,
)
from energon_data.prepare.walk import Skipped
from energon_data.samples import LATENT, PIXELS, SampleError
from energon_data.tar_index import read_tar

_PARTS = frozenset({"pth", "pt", "pickle", "pkl", "json", "txt", "cls"}) | PICTURES
_NAMES = {"framerate": "fps", "image_height": "height", "image_width": "width"}
TEXT = "text"


@dataclass(frozen=True)
class Archived:
    """The parts of one sample by extension, as they lie in an archive."""

    name: str
    parts: Mapping[str, bytes]


def list_archives(path: Path, *, follow_links: bool = False) -> tuple[list[Path], list[Skipped]]:
    """Return the tar files of a folder, or those that a wdinfo file lists, and links to folders that are not read.

    Raises:
        ConfigError: the path does not exist.
        DataError: there is none, or the list cannot be read.
    """
    if not (path.is_file() and path.suffix in (".pkl", ".pickle")):
        return list_tars(path, follow_links=follow_links)
    try:
        listed = read_pickle(read_bytes(path))
    except SampleError as error:
        raise DataError(f"{path}: {error.detail}; list the archives by naming their folder") from error
    names = listed.get("tar_files") if isinstance(listed, dict) else None
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        raise DataError(f"{path} has no list 'tar_files' of names; list the archives by naming their folder")
    found = [path.parent / name for name in names]  # an absolute name stays as it is
    missing = [str(archive) for archive in found if not archive.is_file()]
    if missing:
        raise DataError(f"{path} lists {missing[0]}, which does not exist, and {len(missing) - 1} other files")
    twice = [str(archive) for archive, count in Counter(found).items() if count > 1]
    if twice:
        raise DataError(f"{path} lists {twice[0]} twice, and {len(twice) - 1} other files; list each once")
    return found, []


def read_archive(root: Path, path: Path) -> Iterator[Archived | tuple[str, SampleError]]:
    """Read the samples of one tar file in its order; a damaged archive ends with a name and the reason.

    Args:
        root: folder within which the archive is named.
    """
    return first_of_each_name(_members_by_sample(path, name_within(path, root)))


def _members_by_sample(path: Path, where: str) -> Iterator[Archived | tuple[str, SampleError]]:
    name, parts = "", dict[str, bytes]()
    try:
        with open_binary(path) as archive:
            for member, read in read_tar(archive):
                place = PurePosixPath(member.name)
                stem, _, part = place.name.partition(".")
                if part.lower() not in _PARTS:
                    continue
                sample = f"{where}/{place.with_name(stem)}"
                if parts and (sample != name or part.lower() in parts):
                    yield Archived(name, parts)
                    parts = {}
                name = sample
                if member.size > MAX_FILE_BYTES:
                    yield f"{name}.{part}", SampleError("too_large", f"{member.size} bytes")
                    continue
                parts[part.lower()] = read()
    except (tarfile.TarError, OSError, EOFError, ValueError) as error:
        yield name or where, SampleError("bad_tar", f"the archive is cut short or damaged here: {error}")
        return
    if parts:
        yield Archived(name, parts)


@dataclass(frozen=True)
class Rewrite:
    """Turns archived samples into ours; a value, so that it can be sent to other processes.

    Attributes:
        text_key: of the texts that a pickle holds by encoder; None if it holds one.
    """

    text_key: Optional[str] = None

    def __call__(self, sources: Iterable[Archived | tuple[str, SampleError]], record: UnitRecord) -> Iterator[Sample]:
        """Yield the samples of one archive, and count what is skipped."""
        for source in sources:
            if isinstance(source, tuple):
                record.skip(*source)
                continue
            try:
                yield self.sample(source)
            except SampleError as error:
                record.skip(source.name, error)

    def sample(self, archived: Archived) -> Sample:
        """Rewrite one sample.

        Raises:
            SampleError: it has no latent or picture, or a part that cannot be read safely.
        """
        parts = archived.parts
        row = {_NAMES.get(k, k): v for k, v in (read_object(parts["json"], "json") if "json" in parts else {}).items()}
        if "txt" in parts:
            row["caption"] = read_text(parts["txt"], "txt")
        label = class_of(read_text(parts["cls"], "cls") if "cls" in parts else row.get("label"))
        made, shape, moments = self._media(parts)
        pickled = parts.get("pickle", parts.get("pkl"))
        if pickled is not None:
            made[f"{TEXT}.safetensors"] = save({TEXT: self._text(read_pickle(pickled))})
        caption = row.get("caption")
        metadata = {
            **scalars_of(row),
            "source": archived.name,
            **({"caption": caption} if isinstance(caption, str) else {}),
            **({"label": label} if label is not None else {}),
        }
        key = Source(name=archived.name, read=bytes).key
        return Sample(key, archived.name, metadata, made, shape, latent=moments)

    def _media(self, parts: Mapping[str, bytes]) -> tuple[dict[str, bytes], tuple[int, ...], Moments]:
        """Return the part of the latent or the picture, its shape, and the moments of the latent."""
        stored = parts.get("pth", parts.get("pt"))
        if stored is not None:
            latent = as_tensor(read_torch_file(stored))
            if latent is None:
                raise SampleError("wrong_part", "the .pth file holds no tensor of floating-point numbers")
            latent = _without_batch(latent, 4)
            if latent.dim() == 3:
                latent = latent[:, None]
            if latent.dim() != 4:
                raise SampleError("wrong_shape", f"the latent has shape {list(latent.shape)}, wanted [C, T, H, W]")
            moments = Moments.of(latent.double().numpy())
            return {f"{LATENT}.safetensors": save({LATENT: latent})}, tuple(latent.shape), moments
        pictures = [part for part in parts if part in PICTURES]
        if len(pictures) != 1:
            raise SampleError("missing_part", f"neither a latent (.pth) nor a picture among {sorted(parts)}")
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
            raise SampleError("wrong_part", "the .pickle file holds no text of floating-point numbers")
        text = _without_batch(text, 2)
        if text.dim() != 2:
            raise SampleError("wrong_shape", f"the text has shape {list(text.shape)}, wanted [K, width]")
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
    """Say what there is to do for a data set of archived tensors; `Preparation.run` does it.

    Args:
        source: a folder of tar files, one of them, or a wdinfo file.
        text_key: of the texts that a pickle holds by encoder.
        text_encoder, vae: what made the texts and latents, to be recorded; `launch.sample` looks there.
        follow_links: also read folders of archives outside of `source` to which links lead.
        validation: share of the samples that is held out.

    Raises:
        ConfigError: the source does not exist, or the share is none.
        DataError: there is no archive.
    """
    if not 0 <= validation < 1:
        raise ConfigError(f"--validation {validation:g} is the share held out: 0 for none, below 1")
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
