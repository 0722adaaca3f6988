"""Survey of a split of a data set: sizes, durations, texts, captions, damage, and filling of packs."""

import math
import tarfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Optional

from torch import Tensor

from dit.condition_table import CONTEXT, FPS
from dit.data_api import BatchSpec, sample_id
from dit.errors import DataError
from dit.patchify import frames_to_patch
from dit.sampling.grid import spread
from energon_data.decoder import decode_sample
from energon_data.filters import TOO_LONG
from energon_data.folder import SplitInfo, stored_names
from energon_data.latent_scale import Moments
from energon_data.packing import BUFFERED, buffer_limit, greedy_knapsack, padded_length
from energon_data.samples import CAPTIONS as SEVERAL_CAPTIONS
from energon_data.samples import LATENT, META_PART, REFERENCE, Clip, SampleError
from energon_data.skip_log import Skip, SkipCounter
from energon_data.tar_index import read_offsets, read_samples, sample_of

if TYPE_CHECKING:
    from energon_data.task_encoder import EncoderOptions

CAPTIONS = ("caption", "text", "prompt")
"""Metadata entries for a caption; a part called `txt` is used if there are none."""


@dataclass(frozen=True, kw_only=True)
class Seen:
    """Properties of one sample.

    Attributes:
        size: (C, T, H, W) of its latent or pixels.
        text_tokens: rows of its text embedding; None without one.
        names: names of its parts without extension, and of its metadata.
    """

    key: str
    size: tuple[int, int, int, int]
    fps: Optional[float] = None
    text_tokens: Optional[int] = None
    caption: Optional[str] = None
    names: tuple[str, ...] = ()

    @property
    def duration_s(self) -> Optional[float]:
        """Duration of a clip in seconds; None for an image or an unknown frame rate."""
        frames = self.size[1]
        return frames / self.fps if frames > 1 and self.fps else None

    def tokens(self, patch: Sequence[int]) -> Optional[int]:
        """Return the tokens of the sample; None if its latent cannot be cut into such patches."""
        sides = (frames_to_patch(self.size[1], patch[0]), *self.size[2:])
        counts = [divmod(side, part) for side, part in zip(sides, patch, strict=True)]
        return None if any(rest for _, rest in counts) else math.prod(count for count, _ in counts)


@dataclass(kw_only=True)
class Survey:
    """Results of reading samples of a split.

    Attributes:
        seen: samples that training can read.
        lost: number of unreadable samples by reason, and the first of each reason.
        shown: frames `[C, H, W]` of some samples, for a contact sheet.
        latents: moments of the latents; empty for pixels.
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
        """Number of samples read."""
        return len(self.seen) + self.lost.total()


def middle_frame(clip: Tensor) -> Tensor:
    """Return the middle frame `[C, H, W]` of a clip `[C, T, H, W]`, as a copy."""
    return clip[:, clip.shape[1] // 2].clone()


def survey(
    info: SplitInfo,
    *,
    limit: Optional[int],
    pictures: int = 0,
    show: Callable[[Tensor], Tensor] = middle_frame,
    require_checksums: bool = True,
) -> Survey:
    """Read samples of a split in the same way as training.

    Args:
        limit: largest number of samples to read, evenly distributed over the split; None for all.
        pictures: number of frames to return, evenly distributed.
        show: converts a latent or pixels `[C, T, H, W]` to a frame `[C, H, W]`.
        require_checksums: samples without checksums count as damaged, as in `EnergonData`.
    """
    from energon_data.cookers import cook_clip  # imports Energon

    sizes = {path.name: (len(read_offsets(path)) - 1, path.stat().st_size) for path in info.shards}
    result = Survey(info=info, shards=sizes)
    indices = spread(info.samples, limit or info.samples)
    shown = {indices[i] for i in spread(len(indices), pictures)}
    for index, (shard, data) in zip(indices, read_samples(info.shards, indices), strict=True):
        key = f"#{index}"
        try:
            key, parts = _parts(data)
            sample = decode_sample(key, parts, require_checksums=require_checksums)
            clip = cook_clip(sample | {"__key__": key})
        except SampleError as error:
            result.lost[error.reason] += 1
            result.examples.setdefault(error.reason, f"{shard.name}/{key}: {error.detail}")
            continue
        result.seen.append(_seen(clip, sample))
        if LATENT in result.seen[-1].names:
            result.latents = result.latents.plus(Moments.of(clip.latent.double().numpy()))
        if index in shown:
            result.shown.append((result.seen[-1], show(clip.latent)))  # the clip itself is freed
    if not result.seen:
        reasons = "; ".join(f"{reason}: {detail}" for reason, detail in result.examples.items())
        raise DataError(f"none of {result.num_read} samples of {info.path} can be read: {reasons}")
    return result


def _parts(data: bytes) -> tuple[str, dict[str, bytes]]:
    """Return the name and the parts of a sample from its bytes in a shard."""
    try:
        return sample_of(data)
    except (ValueError, tarfile.TarError) as error:
        raise SampleError("unreadable", str(error)) from error


def _seen(clip: Clip, sample: dict[str, Any]) -> Seen:
    """Collect the properties of a decoded sample."""
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
    captions = [metadata[name] for name in CAPTIONS if isinstance(metadata.get(name), str)]
    if "txt" in sample:
        captions.append(sample["txt"].decode(errors="replace"))
    return next((text.strip() for text in captions if text.strip()), None)


MOST_BEFORE_TRAINING, ROUNDS, SECONDS = 256, 8, 10.0
"""Samples read before step 1, in rounds distributed evenly over the data, and the time limit in seconds."""


def expected_drops(info: SplitInfo, spec: BatchSpec, options: "EncoderOptions") -> list[str]:
    """Describe the samples that settings will drop, one line per reason and kind; reads some samples."""
    most = options.filters.max_tokens
    if not options.filters.limits and not options.embedded and most is None:
        return []
    from energon_data.augment import Visit
    from energon_data.task_encoder import DiffusionTaskEncoder

    encoder = DiffusionTaskEncoder(spec, options, SkipCounter(MOST_BEFORE_TRAINING))
    indices, read = spread(info.samples, MOST_BEFORE_TRAINING), Counter[str]()
    began = time.monotonic()
    for first in range(ROUNDS):
        round_of = indices[first::ROUNDS]
        for index, (shard, data) in zip(round_of, read_samples(info.shards, round_of), strict=True):
            with suppress(SampleError):  # training reports damage when it reads the data
                key, parts = _parts(data)
                sample = {"__key__": key, "__shard__": shard.name, **parts}
                clip = encoder.clip_of(sample, Visit(0, 0, index, sample_id(key)))
                read[""] += 1
                if clip is not None:
                    read["clip" if clip.grid[0] > 1 else "image"] += 1
        if time.monotonic() - began > SECONDS:
            break
    skips = encoder.ledger.drain()
    read.update(skip.kind for skip in skips if skip.kind)
    groups: dict[tuple[str, str], list[Skip]] = {}
    for skip in skips:
        if not skip.lost:
            groups.setdefault((skip.reason, skip.kind), []).append(skip)
    sampled = "" if read[""] == info.samples else f", {read['']:,} of {info.samples:,} samples"
    multiple = 1 if options.max_tokens_per_pack is None else options.pack_multiple_of
    lines = []
    for (reason, kind), dropped in groups.items():
        which = f"{info.path}{sampled}: {len(dropped):,} of {read[kind]:,} {kind or 'sample'}s"
        if reason == TOO_LONG:
            longest = max(skip.tokens for skip in dropped)
            limit = options.filters.limited_by
            lines.append(
                f"{which} have more than {limit}={most} tokens (the longest {longest:,}) and are dropped; raise "
                f"{limit} to {padded_length(longest, multiple)}"
            )
        else:
            lines.append(f"{which} are dropped ({reason}), the first: {dropped[0].detail}")
    return lines


def unread_references(info: SplitInfo, spec: BatchSpec, options: "EncoderOptions") -> list[str]:
    """Return a line if a folder has pictures to edit that neither settings nor conditions read."""
    edited = info.description.get("most_references", info.description.get("edited"))
    if not edited or options.references or any(REFERENCE in condition.stored_as for condition in spec.conditions):
        return []
    return [f"{info.path} holds pictures to edit, which data.references=False leaves out; set data.references=True"]


def unused_choice_of_captions(infos: Sequence[SplitInfo]) -> list[str]:
    """Return a line if `data.vary_captions=False` has no effect because no sample has several captions."""
    stored = stored_names(infos)
    if stored is None or SEVERAL_CAPTIONS in stored:
        return []
    folders = ", ".join(str(info.path) for info in infos)
    return [f"data.vary_captions=False has no effect: none of the samples read from {folders} has several captions"]


class Packing(NamedTuple):
    """Filling of packs of a given length.

    Attributes:
        real: share of their tokens that belong to samples, without padding.
        too_long: share of the samples that do not fit into a pack.
    """

    packs: int
    samples: int
    real: float
    too_long: float


def expected_packing(lengths: Sequence[int], capacity: int, *, multiple_of: int = 1) -> Packing:
    """Pack the samples of a pass as one stream does: parts of a large pass, or several small passes together."""
    padded = [length for n in lengths if (length := padded_length(n, multiple_of)) <= capacity]
    if not padded:
        raise DataError(
            f"none of {len(lengths)} samples fits into packs of {capacity} tokens; the shortest has {min(lengths)}"
        )
    passes = max(1, min(capacity // sum(padded), BUFFERED // len(padded)))
    used, size = padded * passes, buffer_limit(len(padded))
    packs = sum(len(greedy_knapsack(used[i : i + size], capacity)) for i in range(0, len(used), size))
    real = passes * sum(n for n in lengths if padded_length(n, multiple_of) <= capacity)
    return Packing(packs, len(used), real / (packs * capacity), 1 - len(padded) / len(lengths))
