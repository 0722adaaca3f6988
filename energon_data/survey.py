"""What a split of a data set holds, from its samples: sizes, durations, texts, captions, damage, how packs fill."""

import io
import tarfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Optional

from torch import Tensor

from dit.condition_table import CONTEXT, FPS
from dit.errors import DataError
from dit.patchify import frames_to_patch
from dit.sampling.grid import spread
from energon_data.decoder import decode_sample
from energon_data.false_colours import middle_frame
from energon_data.folder import SplitInfo
from energon_data.latent_scale import Moments
from energon_data.packing import greedy_knapsack, padded_length
from energon_data.samples import LATENT, META_PART, Clip, SampleError
from energon_data.tar_index import UnusualTarError, group_members, parse_members, read_offsets

CAPTIONS = ("caption", "text", "prompt")
"""Metadata that holds a caption, or else a part called `txt`."""


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What is noted of one sample.

    Attributes:
        key: its name.
        size: (C, T, H, W) of its latent or pixels.
        fps: frames per second; None where the metadata name none.
        text_tokens: rows of its text embedding; None where it has none.
        caption: None where it has none.
        names: of its parts without extension, and of its metadata.
    """

    key: str
    size: tuple[int, int, int, int]
    fps: Optional[float] = None
    text_tokens: Optional[int] = None
    caption: Optional[str] = None
    names: tuple[str, ...] = ()

    @property
    def duration_s(self) -> Optional[float]:
        """Seconds of a clip whose frame rate is known; None for an image."""
        frames = self.size[1]
        return frames / self.fps if frames > 1 and self.fps else None

    def tokens(self, patch: Sequence[int]) -> Optional[int]:
        """Return the tokens of the sample; None if its latent cannot be cut into such patches.

        Args:
            patch: sides in time, height and width.
        """
        frames = frames_to_patch(self.size[1], patch[0])
        sides = (frames, *self.size[2:])
        if any(side % part for side, part in zip(sides, patch, strict=True)):
            return None
        t, h, w = (side // part for side, part in zip(sides, patch, strict=True))
        return t * h * w


@dataclass(kw_only=True)
class Survey:
    """The samples of a split that were read.

    Attributes:
        info: the split, checked.
        shards: samples and bytes of each shard, by name.
        seen: those that training can read.
        lost: how many it cannot, by reason, and the first of each.
        shown: a frame `[C, H, W]` of some, for a contact sheet.
        latents: moments of the latents; of no values for pixels.
    """

    info: SplitInfo
    shards: dict[str, tuple[int, int]]
    seen: list[Seen] = field(default_factory=list)
    lost: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)
    shown: list[tuple[Seen, Tensor]] = field(default_factory=list)
    latents: Moments = field(default_factory=Moments)

    @property
    def num_read(self) -> int:
        """Samples that were looked at."""
        return len(self.seen) + self.lost.total()


def survey(
    info: SplitInfo,
    *,
    limit: Optional[int],
    pictures: int = 0,
    show: Callable[[Tensor], Tensor] = middle_frame,
    require_checksums: bool = True,
) -> Survey:
    """Read samples of a split as training reads them.

    Args:
        info: from `energon_data.folder.check_dataset`.
        limit: most samples to read, evenly distributed over the split; None for all.
        pictures: how many of these are returned to be shown, evenly distributed.
        show: returns what is shown of a latent or of pixels `[C, T, H, W]`, a frame `[C, H, W]`.
        require_checksums: samples without checksums count as damaged, as for `EnergonData`.

    Raises:
        DataError: no sample can be read.
    """
    from energon_data.cookers import cook_clip  # imports Energon

    sizes = {path.name: (len(read_offsets(path)) - 1, path.stat().st_size) for path in info.shards}
    found = Survey(info=info, shards=sizes)
    indices = spread(info.samples, limit or info.samples)
    shown = {indices[i] for i in spread(len(indices), pictures)}
    for index, (shard, data) in zip(indices, _read(info.shards, indices), strict=True):
        key = f"#{index}"
        try:
            key, parts = _parts(data)
            sample = decode_sample(key, parts, require_checksums=require_checksums)
            clip = cook_clip(sample | {"__key__": key, "__shard__": "", "__restore_key__": (), "__sources__": None})
        except SampleError as error:
            found.lost[error.reason] += 1
            found.examples.setdefault(error.reason, f"{shard.name}/{key}: {error.detail}")
            continue
        found.seen.append(_seen(clip, sample))
        if LATENT in found.seen[-1].names:
            found.latents = found.latents.plus(Moments.of(clip.latent.double().numpy()))
        if index in shown:
            found.shown.append((found.seen[-1], show(clip.latent)))  # the clip itself is freed
    if not found.seen:
        reasons = "; ".join(f"{reason}: {detail}" for reason, detail in found.examples.items())
        raise DataError(f"none of {found.num_read} samples of {info.path} can be read: {reasons}")
    return found


def _read(shards: Sequence[Path], indices: Sequence[int]) -> Iterator[tuple[Path, bytes]]:
    """Yield the shard and the bytes of samples of a split, by rising index."""
    wanted, first = iter(indices), 0
    index = next(wanted, None)
    for shard in shards:
        offsets = read_offsets(shard).tolist()
        with shard.open("rb") as file:
            while index is not None and index - first < len(offsets) - 1:
                start, end = offsets[index - first : index - first + 2]
                file.seek(start)
                yield shard, file.read(end - start)
                index = next(wanted, None)
        first += len(offsets) - 1


def _parts(data: bytes) -> tuple[str, dict[str, bytes]]:
    """Return the name and the parts of a sample from its part of a shard, also of one with tar extensions."""
    try:
        try:
            members = parse_members(data)
        except UnusualTarError:
            with tarfile.open(fileobj=io.BytesIO(data)) as tar:
                files = [(member.name, tar.extractfile(member)) for member in tar if member.isfile()]
                members = [(name, file.read()) for name, file in files if file is not None]
        return group_members(members)
    except (ValueError, tarfile.TarError) as error:
        raise SampleError("unreadable", str(error)) from error


def _seen(clip: Clip, sample: dict[str, Any]) -> Seen:
    """Note what is shown of a decoded sample."""
    channels, frames, height, width = clip.latent.shape
    rates = [clip.metadata[name] for name in FPS.stored_as if isinstance(clip.metadata.get(name), int | float)]
    text = next((part for name, part in clip.parts.items() if name.rpartition(".")[0] in CONTEXT.stored_as), None)
    rows = next(iter(text.values())) if isinstance(text, dict) else text  # a safetensors part has tensors by name
    stems = {name.rpartition(".")[0] or name for name in sample if name != META_PART}
    return Seen(
        key=clip.__key__,
        size=(channels, frames, height, width),
        fps=float(rates[0]) if rates else None,
        text_tokens=None if rows is None else len(rows),
        caption=_caption(sample),
        names=tuple(sorted(stems | set(clip.metadata) - {"crc32"})),
    )


def _caption(sample: dict[str, Any]) -> Optional[str]:
    metadata = sample[META_PART]
    stated = [metadata[name] for name in CAPTIONS if isinstance(metadata.get(name), str)]
    if "txt" in sample:
        stated.append(sample["txt"].decode(errors="replace"))
    return next((text.strip() for text in stated if text.strip()), None)


@dataclass(frozen=True)
class Packing:
    """How packs of a length fill.

    Attributes:
        packs: number of packs.
        samples: in them.
        real: share of their tokens that belong to samples, without padding.
        too_long: share of the samples that no pack holds.
    """

    packs: int
    samples: int
    real: float
    too_long: float


def expected_packing(lengths: Sequence[int], capacity: int, *, buffer: int, multiple_of: int = 1) -> Packing:
    """Pack samples as the loader does, buffer by buffer; a few samples are repeated until they fill one.

    Args:
        lengths: tokens of each sample, in the order of the data.
        capacity: `data.max_tokens_per_pack`.
        buffer: `data.packing_buffer_size`.
        multiple_of: `data.pack_multiple_of`.

    Raises:
        DataError: no sample fits.
    """
    fitting = [n for n in lengths if padded_length(n, multiple_of) <= capacity]
    if not fitting:
        raise DataError(
            f"none of {len(lengths)} samples fits into packs of {capacity} tokens; the shortest has {min(lengths)}"
        )
    used = [fitting[i % len(fitting)] for i in range(max(len(fitting) // buffer, 1) * buffer)]
    packs = 0
    for start in range(0, len(used), buffer):
        padded = [padded_length(n, multiple_of) for n in used[start : start + buffer]]
        packs += len(greedy_knapsack(padded, capacity))
    return Packing(packs, len(used), sum(used) / (packs * capacity), 1 - len(fitting) / len(lengths))
