"""Write generated samples: a file for each, the latents, and a grid of all, from any number of ranks."""

import contextlib
import importlib.util
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Optional

import torch
import torch.distributed as dist
from torch import Tensor

from dit.errors import ConfigError
from dit.sampling.clips import CLIP_WRITERS, clip_frames, clip_grid
from dit.sampling.grid import image_grid, save_png, to_image, write_complete

GRID_PIXELS = 2**24
"""Limit for the pixels of a grid, frames of clips included; pictures beyond it are not shown."""
RECORD_FILE = "samples.jsonl"


def default_clip_ending() -> str:
    """Return `.mp4` if PyAV is installed, else `.gif`."""
    return ".mp4" if importlib.util.find_spec("av") else ".gif"


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror or error}; choose another path") from error


class Gallery:
    """Collects the samples of a command on every rank, and writes them.

    Args:
        folder: for a file per sample and `samples.jsonl` with a line per sample; None writes neither.
        clip_ending: file name ending of clips, a key of `CLIP_WRITERS`.
    """

    def __init__(
        self,
        captions: Sequence[str],
        records: Sequence[Mapping[str, Any]],
        *,
        folder: Optional[Path] = None,
        keep_latents: bool = False,
        fps: float = 1.0,
        clip_ending: str,
    ) -> None:
        self.captions, self.records = captions, records
        self.folder, self.keep_latents = folder, keep_latents
        self.fps, self.clip_ending = fps, clip_ending
        self.shown = len(captions)
        self._pictures: dict[int, Tensor] = {}
        self._latents: dict[int, Tensor] = {}
        self._files: dict[int, str] = {}

    def add(self, indices: Sequence[int], latents: Tensor, pictures: Tensor) -> None:
        """Add latents `[N, C, t, h, w]` and pictures `[N, 1 or 3, T, H, W]` in [-1, 1], and write their files."""
        self.shown = min(len(self.captions), max(1, GRID_PIXELS // math.prod(pictures.shape[2:])))
        for index, latent, picture in zip(indices, latents, pictures, strict=True):
            if self.keep_latents:
                self._latents[index] = latent.cpu()
            if index < self.shown:
                self._pictures[index] = picture
            if self.folder is not None:
                self._files[index] = self._write(index, picture, self.folder)

    def _write(self, index: int, picture: Tensor, folder: Path) -> str:
        is_clip = picture.shape[1] > 1
        name = f"{index:06d}{self.clip_ending if is_clip else '.png'}"
        with _writing(folder / name):
            if is_clip:
                CLIP_WRITERS[self.clip_ending](clip_frames(picture), folder / name, self.fps)
            else:
                save_png(to_image(picture[:, 0]), folder / name)
        return name

    def gather(self) -> bool:
        """Gather the samples of all ranks on rank 0, which writes them; return whether this is rank 0 (collective)."""
        local = (self._pictures, self._latents, self._files, self.shown)
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return True
        parts: Optional[list[Any]] = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
        dist.gather_object(local, parts)
        for pictures, latents, files, num_shown in parts or []:
            self._pictures |= pictures
            self._latents |= latents
            self._files |= files
            self.shown = min(self.shown, num_shown)
        return dist.get_rank() == 0

    def save_record(self) -> None:
        """Write the request of each file, one JSON object per line, into the folder of the files."""
        if self.folder is not None:
            lines = [json.dumps({"file": self._files[i], **record}) for i, record in enumerate(self.records)]
            with _writing(self.folder / RECORD_FILE):
                write_complete(self.folder / RECORD_FILE, "".join(f"{line}\n" for line in lines).encode())

    def save_grid(self, path: Path, columns: Optional[int], group: Optional[int]) -> None:
        """Write the grid: an animation if `path` ends like one, else a picture with the frames of a clip in a row.

        A row has `columns`, else `group` stills or animated clips; by default, the grid is about twice as wide as high.
        """
        pictures = torch.stack([self._pictures[i] for i in range(self.shown)])
        captions, frames = self.captions[: self.shown], pictures.shape[2]
        with _writing(path):
            if writer := CLIP_WRITERS.get(path.suffix.lower()):
                writer(clip_grid(pictures, captions, columns or group), path, self.fps)
                return
            images = pictures.movedim(2, 1).flatten(0, 1)
            captions = [caption for caption in captions for _ in range(frames)]
            save_png(image_grid(images, captions, columns or (frames if frames > 1 else group)), path)

    def save_latents(self, path: Path, metadata: Mapping[str, str]) -> None:
        """Write the samples before decoding as safetensors: `latents` `[N, C, t, h, w]`, float32."""
        from safetensors.torch import save

        latents = torch.stack([self._latents[i] for i in range(len(self.captions))])
        with _writing(path):
            write_complete(path, save({"latents": latents.contiguous()}, metadata=dict(metadata)))


def check_ending(path: Path, endings: Sequence[str], flag: str) -> None:
    """Check the ending of a file's name."""
    if path.suffix.lower() not in endings:
        raise ConfigError(f"{flag} {path} must end in {' or '.join(endings)}")
