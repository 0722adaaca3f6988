"""Energon data sets as a `DataConfig`, with checks before anything is built."""

import math
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Optional

from dit.batch import PackedBatch
from dit.condition_table import CONTEXT, LABEL
from dit.data_api import WITHOUT_HELD_OUT, BatchSpec, OnlineEncoding
from dit.encoders.text_config import ENTRIES, check_text_encoder
from dit.encoders.vae import Geometry
from dit.errors import ConfigError, DataError, first_few
from dit.patchify import Grid, frames_to_patch
from dit.ranges import ASPECTS, COUNT, COUNT_OR_ZERO, FINITE, NOT_NEGATIVE, SHARE, Range, divisors, ranged
from dit.terminal import counted
from energon_data.blend import Member, StagedSource, divide_limit, metadataset, read_blend
from energon_data.contents import Contents, Shape
from energon_data.folder import SplitInfo, check_dataset, identity, stored_names
from energon_data.packing import CostLimit
from energon_data.reader_settings import ReaderSettings
from energon_data.streams import Source, check_streams
from energon_data.values import (
    changes_pictures,
    check_changes,
    check_online_texts,
    check_vae,
    check_values,
    embedded_widths,
)

if TYPE_CHECKING:
    from energon_data.energon_source import EnergonSource
    from energon_data.task_encoder import EncoderOptions

PIXEL_CHANNELS = 3
TRAIN_SPLIT = "train"
_SHUFFLED = 1000  # samples of one pass that a stream shuffles in memory, divided over the members of a blend
_SEEDS_APART = 1_000_003  # offset between the seeds of a blend's stages


@dataclass(kw_only=True)
class EnergonData(ReaderSettings):
    """Samples from WebDataset shards, read by Megatron-Energon.

    Attributes:
        path: a data set folder with `.nv-meta`.
        blend: data sets with weights instead of `path`: `[{path: DIR, weight: 3}, ...]`.
        blend_steps: steps at which the weights, then lists, change, counting those that
            `training.on_bad_numbers=rewind` omits.
        shuffle_buffer: samples that a stream shuffles, also of several passes; None for up to 1000 of one pass.
        pack_cost_tokens: limit the work of a pack to that of a sample of this many tokens.
        pad_packs: pad packs to `max_tokens_per_pack`.
        bucket_by_shape: batch samples of one shape, for convolutional backbones.
        max_tokens_per_sample: drop longer samples; None for the length of a pack.
        min_aesthetic_score: drop samples with a lower score, or without one.
        min_side, max_side, max_aspect_ratio, min_seconds, max_seconds: drop samples beyond these limits of the sides
            (pixels), the ratio of longer to shorter side, or the duration (of an image 0).
        min_caption_length, max_caption_length: drop samples with a shorter or longer caption (characters).
        resize_side: resize the smaller side of stored pixels to this many.
        crop_size, random_crop: crop to this height and width after resizing, at a random position (held-out data:
            centre).
        flip: probability of mirroring training data.
        vary_captions: draw one of a sample's captions at each read.
        require_checksums: count samples without CRC32 as damaged.
        online_vae: autoencoder that encodes stored pixels in every step.
        online_text_encoder: encoders of captions in every step, such as
            `text=google/t5-v1_1-xl,pooled=openai/clip-vit-large-patch14`.
        online_precision: precision of these encoders.
        validation_split: split for held-out losses.
        validation_samples: held-out samples of one pass, divided over a blend by size; None for the full split.
    """

    path: str = ""
    blend: Optional[list[dict[str, Any]]] = None
    blend_steps: Optional[list[int]] = ranged(None, COUNT)
    shuffle_buffer: Optional[int] = ranged(None, COUNT_OR_ZERO)
    pack_cost_tokens: Optional[int] = ranged(None, COUNT)
    pad_packs: bool = False
    bucket_by_shape: bool = False
    max_text_tokens: Optional[int] = ranged(512, COUNT)
    max_tokens_per_sample: Optional[int] = ranged(None, COUNT)
    min_aesthetic_score: Optional[float] = ranged(None, FINITE)
    min_side: Optional[int] = ranged(None, COUNT)
    max_side: Optional[int] = ranged(None, COUNT)
    max_aspect_ratio: Optional[float] = ranged(None, Range(1, math.inf, open_high=True))
    min_seconds: Optional[float] = ranged(None, NOT_NEGATIVE)
    max_seconds: Optional[float] = ranged(None, NOT_NEGATIVE)
    min_caption_length: Optional[int] = ranged(None, COUNT_OR_ZERO)
    max_caption_length: Optional[int] = ranged(None, COUNT_OR_ZERO)
    resize_side: Optional[int] = ranged(None, COUNT)
    crop_size: Optional[list[int]] = ranged(None, COUNT)
    random_crop: bool = True
    flip: float = ranged(0.0, SHARE)
    vary_captions: bool = True
    require_checksums: bool = True
    online_vae: Optional[str] = None
    online_text_encoder: Optional[str] = None
    online_precision: Literal["fp32", "bf16"] = "fp32"
    validation_split: str = "val"
    validation_samples: Optional[int] = ranged(512, COUNT)

    def mixes_shapes(self, spec: BatchSpec) -> bool:
        return self.max_tokens_per_pack is not None or (spec.micro_batch_size > 1 and not self.bucket_by_shape)

    def validate(self, spec: BatchSpec, dp_size: int, micro_batches_per_step: int) -> None:
        """Check settings, streams, folder and every shard's size against its index."""
        self.check_settings(spec, dp_size, micro_batches_per_step)
        num_streams = check_streams(self.num_streams, micro_batches_per_step)
        infos = self.folders(TRAIN_SPLIT)
        stored_channels = spec.latent_channels
        if self.online_vae is not None:
            check_vae(self.online_vae, spec)
            stored_channels = PIXEL_CHANNELS
        check_changes(self, spec, self._pixel_multiple(spec))
        text, label = spec.condition(CONTEXT.name), spec.condition(LABEL.name)
        if self.online_text_encoder is not None:
            check_online_texts(self.online_text_encoder, spec)
            text = None  # stored texts are not read
        for info in infos:
            if info.samples < num_streams:
                raise ConfigError(
                    f"{info.path} has {info.samples} samples in split {info.split!r}, fewer than data.num_streams="
                    f"{num_streams}; set fewer streams, or use more data"
                )
            shape = info.description.get("latent_shape")
            if shape and shape[0] != stored_channels:
                cure = (
                    f"model.in_channels is {stored_channels}; set model.in_channels={shape[0]}, or, to start from "
                    "weights, prepare the data with their autoencoder (--vae) and name them (checkpoint.start_from)"
                )
                if self.online_vae is not None:
                    cure = "data.online_vae encodes pixels, which have 3; set data.online_vae=none"
                raise ConfigError(f"{info.path} has latents of {shape[0]} channels, {cure}")
            width = info.description.get("context_size")
            if width and text is not None and text.shape not in (None, (width,)):
                raise ConfigError(
                    f"{info.path} has text embeddings of width {width} (of {info.description.get('text_encoder')}), "
                    f"model.context_size is {text.shape[0]}; {text.cure_of_width(width)}"
                )
            if info.description.get("shapes") and (contents := Contents.read(info.path)):
                if not spec.orders_frames:
                    self._check_stills(contents, spec, info.path)
                self._check_frames(contents, spec, info.path)
                if self.resize_side is None and self.crop_size is None:
                    self._check_sides(contents, spec, info.path)
        if any(not set(ENTRIES).isdisjoint(condition.stored_as) for condition in spec.conditions):
            self.text_encoder()
        num_classes = None if label is None else label.num_classes
        if num_classes is not None and len(names := self.class_names() or ()) > num_classes:
            raise ConfigError(
                f"{self.origin} has {len(names)} classes, model.num_classes is {num_classes}; raise it to {len(names)}"
            )

    def _check_stills(self, contents: Contents, spec: BatchSpec, origin: Path) -> None:
        """Refuse clips, whose frames the model cannot order."""
        frames = max(t for _, t, _, _ in contents.shapes)
        if 1 + (frames - 1) // self._frames_per_latent > spec.patch_temporal:
            raise ConfigError(
                f"{origin} has clips of {frames} frames, which this model cannot order; leave the folder out. "
                "Imagen's UNets take only pictures. With model.position_embedding=sincos_2d, or model.rope_axes whose "
                "first number is 0, every frame has the same positions: set model.position_embedding=sincos_3d or "
                "rope_3d, with features for t (own_data reads its model from `data`: name a folder with clips there)"
            )

    def _check_frames(self, contents: Contents, spec: BatchSpec, origin: Path) -> None:
        """Refuse clips that cannot be cut into patches in time, unless settings may drop them."""
        time, stored = self._frames_per_latent, [t for _, t, _, _ in self._shapes(contents)]
        uneven = [str(t) for t in stored if (t - 1) % time]
        if uneven and (len(uneven) == len(stored) or not self._may_drop):
            raise ConfigError(
                f"{origin} has clips of {first_few(uneven, 3)} frames, and data.online_vae encodes 1 + a multiple of "
                f"{time}; prepare clips of such a length (--frames)"
            )
        frames = [1 + (t - 1) // time for t in stored if (t - 1) % time == 0]
        wrong = [n for n in frames if frames_to_patch(n, spec.patch_temporal) % spec.patch_temporal]
        if wrong and (len(wrong) == len(frames) or not self._may_drop):
            unit = "latent frames" if contents.is_latent or self.online_vae is not None else "frames"
            raise ConfigError(
                f"{origin} has clips of {first_few([str(n) for n in wrong], 3)} {unit}, which cannot be cut into "
                f"patches of model.patch_temporal={spec.patch_temporal}; set it to one of "
                f"{divisors(math.gcd(*[n for n in frames if n > 1]))}, or prepare clips of another length (--frames)"
            )

    def _check_sides(self, contents: Contents, spec: BatchSpec, origin: Path) -> None:
        """Refuse pictures that cannot be cut into patches, or halved by the network, unless settings may drop them."""
        multiple, shapes = self._pixel_multiple(spec), self._shapes(contents)
        wrong = [f"{h} x {w}" for _, _, h, w in shapes if h % multiple or w % multiple]
        if wrong and (len(wrong) == len(shapes) or not self._may_drop):
            space = 1 if self.online_vae is None else Geometry.read(self.online_vae).step
            common = math.gcd(*(side for _, _, *sides in shapes for side in sides))
            cure, factors = "", f"model.patch_spatial={spec.patch_spatial}"
            if spec.side_multiple > 1:
                factors += f", times {spec.side_multiple} for the levels of the network"
                if common % (space * spec.patch_spatial) == 0:
                    cure = ", or use fewer levels"
            elif common % space == 0:  # else no patch fits
                cure = f", or set model.patch_spatial to one of {divisors(common // space)}"
            if self.online_vae is not None:
                factors += ", times the compression of data.online_vae"
            compression = " times the compression of the autoencoder" if contents.is_latent else ""
            raise ConfigError(
                f"{origin} has samples of {first_few(wrong, 3)} (H x W), whose sides must be multiples of {multiple} "
                f"({factors}); prepare the data with --multiple-of {multiple}{compression}{cure}"
            )

    @property
    def _may_drop(self) -> bool:
        limits = self.min_side, self.max_side, self.max_aspect_ratio, self.min_seconds, self.max_seconds
        return bool(self.max_lost_samples) or any(limit is not None for limit in limits)

    @property
    def _frames_per_latent(self) -> int:
        return 1 if self.online_vae is None else Geometry.read(self.online_vae).time

    def _shapes(self, contents: Contents) -> tuple[Shape, ...]:
        """Return the distinct shapes of samples and of the references that are read."""
        return contents.shapes + (contents.reference_shapes if self.references else ())

    def online_encoding(self) -> Optional[OnlineEncoding]:
        if self.online_vae is None and self.online_text_encoder is None:
            return None
        return OnlineEncoding(
            vae=self.online_vae,
            text_encoder=self.online_text_encoder,
            precision=self.online_precision,
            max_text_tokens=self.max_text_tokens,
        )

    def check_settings(self, spec: BatchSpec, dp_size: int, micro_batches_per_step: int) -> None:
        check_values(self, micro_batches_per_step)
        self.check_references(spec)
        if self.references and self.online_vae is not None:
            raise ConfigError(
                "data.references=True reads stored latents, and data.online_vae encodes pixels; prepare the data with "
                "--vae, or set data.references=False"
            )
        check_changes(self, spec, spec.patch_spatial * spec.side_multiple)
        if self.blend is None and self.blend_steps:
            raise ConfigError("data.blend_steps changes the weights of data.blend, which is not set")
        self._members()
        if self.bucket_by_shape and self.max_tokens_per_pack is not None:
            raise ConfigError("data.bucket_by_shape and data.max_tokens_per_pack exclude each other; choose one")
        self.check_packs(spec)

    @property
    def origin(self) -> str:
        return ", ".join(self._paths())

    def _members(self) -> list[Member]:
        return [] if self.blend is None else read_blend(self.blend, self.blend_steps or [])

    def validate_held_out(self, otherwise: str = WITHOUT_HELD_OUT) -> None:
        self.folders(self.validation_split, otherwise)

    def folders(self, split: str, otherwise: str = WITHOUT_HELD_OUT) -> list[SplitInfo]:
        """Check all folders; arguments and errors as in `check_dataset`."""
        return [check_dataset(path, split, otherwise) for path in self._paths()]

    def _paths(self) -> list[str]:
        return [self.path] if self.blend is None else [member.path for member in self._members()]

    def identity(self) -> dict[str, dict[str, str]]:
        """Return the size and a digest of each data set, and of its held-out split if it has one."""
        held_out = {}
        for path in self._paths():
            with suppress(DataError):  # validation raises it, if the run has one
                held_out[f"{path} ({self.validation_split})"] = identity(path, self.validation_split)
        train = {f"{path} ({TRAIN_SPLIT})": identity(path, TRAIN_SPLIT) for path in self._paths()}
        return {"path" if self.blend is None else "blend": train, "validation_split": held_out}

    def largest_sample(self, patch_temporal: int, patch_spatial: int) -> list[Grid]:
        """Return (t, h, w) in patches of a crop, or of the largest sample in `dataset.json` and of its references.

        Returns:
            An empty list if the sizes are unknown.
        """
        if self.online_vae is not None:  # its sizes are read when the run starts
            return []
        if self.crop_size is not None:
            return [(1, self.crop_size[0] // patch_spatial, self.crop_size[1] // patch_spatial)]
        if self.resize_side is not None:
            return []
        grids = list[list[Grid]]()
        with suppress(DataError):  # a folder that `prepare` did not write
            described = [contents for path in self._paths() if (contents := Contents.read(Path(path)))]
            samples = [contents.largest_grids(patch_temporal, patch_spatial) for contents in described]
            grids = [sample if self.references else sample[:1] for sample in samples]
        return max(grids, key=lambda sample: sum(map(math.prod, sample)), default=[])

    def _pixel_multiple(self, spec: BatchSpec) -> int:
        """Return the number that sides of stored samples must be multiples of; reads the online autoencoder's sizes."""
        multiple = spec.patch_spatial * spec.side_multiple
        if self.online_vae is None:
            return multiple
        geometry = Geometry.read(self.online_vae)
        return math.lcm(multiple * geometry.space, geometry.step)

    def _options(self, spec: BatchSpec, *, held_out: bool = False) -> "EncoderOptions":
        from energon_data.augment import Augmentation
        from energon_data.filters import Filters, Limits
        from energon_data.task_encoder import EncoderOptions

        names = ("max_tokens_per_pack", "max_tokens_per_sample", "pack_cost_tokens")
        lengths = [(n, f"data.{name}") for name in names if (n := getattr(self, name)) is not None]
        max_tokens, limited_by = min(lengths, key=lambda length: length[0], default=(None, ""))
        limits = {
            "aesthetic_score": Limits(low=self.min_aesthetic_score),
            "smallest_side": Limits(low=self.min_side),
            "largest_side": Limits(high=self.max_side),
            "aspect_ratio": Limits(high=self.max_aspect_ratio),
            "seconds": Limits(self.min_seconds, self.max_seconds),
            "caption_length": Limits(self.min_caption_length, self.max_caption_length),
        }
        augmentation = None
        if changes_pictures(self):
            augmentation = Augmentation(
                smallest_side=self.resize_side,
                crop=None if self.crop_size is None else (self.crop_size[0], self.crop_size[1]),
                random_crop=self.random_crop and not held_out,
                flip=0.0 if held_out else self.flip,
                multiple_of=self._pixel_multiple(spec),
            )
        return EncoderOptions(
            filters=Filters(
                limits={name: limit for name, limit in limits.items() if limit != Limits()},
                max_tokens=max_tokens,
                limited_by=limited_by,
            ),
            augmentation=augmentation,
            vary_captions=self.vary_captions and not held_out,
            require_checksums=self.require_checksums,
            max_text_tokens=self.max_text_tokens,
            shuffled_in_pass=0 if held_out or self.shuffle_buffer is not None else _SHUFFLED // len(self._paths()),
            max_tokens_per_pack=self.max_tokens_per_pack,
            packing_buffer_size=self.packing_buffer_size,
            pack_multiple_of=self.pack_multiple_of,
            cost_limit=CostLimit(n, spec.attention_tokens) if (n := self.pack_cost_tokens) else None,
            pad_packs=self.pad_packs,
            bucket_by_shape=self.bucket_by_shape,
            vae=None if self.online_vae is None else Geometry.read(self.online_vae),
            references=self.references,
            embedded=frozenset(embedded_widths(self.online_text_encoder, spec) if self.online_text_encoder else ()),
        )

    def source_opener(self, spec: BatchSpec, seed: int, micro_batches_per_step: int) -> Callable[..., Source]:
        self.folders(TRAIN_SPLIT)
        return partial(self._open, spec, seed=seed, micro_batches_per_step=micro_batches_per_step)

    def _open(self, spec: BatchSpec, stream: int, num_streams: int, seed: int, micro_batches_per_step: int) -> Source:
        """Open one global stream, with a stage for each set of weights."""
        steps = self.blend_steps or []

        def open_stage(stage: int, spec: BatchSpec = spec, pack_multiple_of: Optional[int] = None) -> "EnergonSource":
            from energon_data.energon_source import EnergonSource

            options = self._options(spec)
            if pack_multiple_of is not None:
                options = replace(options, pack_multiple_of=pack_multiple_of)
            weights = {member.path: member.weights[stage] for member in self._members()}
            with metadataset(weights, TRAIN_SPLIT) if weights else nullcontext(self.path) as path:
                return EnergonSource(
                    path,
                    spec,
                    options,
                    reopen=partial(open_stage, stage),
                    split=TRAIN_SPLIT,
                    stream=stream,
                    num_streams=num_streams,
                    seed=seed + stage * _SEEDS_APART,
                    budget=self.max_lost_samples,
                    shuffle_buffer=self.shuffle_buffer,
                )

        # A step takes equally many micro-batches from each stream.
        ends = [step * micro_batches_per_step // num_streams for step in steps]
        stages = [partial(open_stage, stage) for stage in range(len(steps) + 1)]
        return StagedSource(stages, ends) if steps else open_stage(0)

    def build_validation(self, spec: BatchSpec, *, dp_rank: int, dp_size: int) -> Iterator[PackedBatch]:
        """Build a pass over the held-out split; for a blend, over the split of each member.

        The samples are the same on every layout. Every rank reads all of them, and discards those of other ranks; see
        `StreamSettings.share_validation`.
        """
        from energon_data.energon_source import validation_pass

        infos, options = self.folders(self.validation_split), self._options(spec, held_out=True)
        limits = divide_limit([info.samples for info in infos], self.validation_samples)
        passes = [
            validation_pass(
                str(info.path),
                spec,
                replace(options, max_samples=limit),
                split=self.validation_split,
                budget=self.max_lost_samples,
            )
            for info, limit in zip(infos, limits, strict=True)
            if limit != 0
        ]
        return self.share_validation(chain.from_iterable(passes), dp_rank, dp_size)

    def remarks(self, spec: BatchSpec) -> list[str]:
        """Describe data and settings without effect, and samples that will be dropped, a line each; reads some."""
        from energon_data.report.survey import expected_drops, unread_references, unused_choice_of_captions

        infos, options, checks = self.folders(TRAIN_SPLIT), self._options(spec), (unread_references, expected_drops)
        lines = [
            f"{info.path} has {counted(len(info.unlisted), 'tar file')} in no split, such as {info.unlisted[0]}, which "
            "training does not read; prepare the folder again with these samples"
            for info in infos
            if info.unlisted
        ]
        lines += [line for info in infos for check in checks for line in check(info, spec, options)]
        return lines if self.vary_captions else lines + unused_choice_of_captions(infos)

    def stored_conditions(self) -> Optional[set[str]]:
        """Return the names of parts and metadata in the first samples, and of conditions that are encoded online.

        Returns:
            None if no sample can be read.
        """
        stored = stored_names(self.folders(TRAIN_SPLIT))
        if stored is None or self.online_text_encoder is None:
            return stored
        if "caption" not in stored:
            raise ConfigError(
                f"data.online_text_encoder embeds captions, and none of the first samples of {self.origin} has one; "
                "prepare the data with captions, or set data.online_text_encoder=none"
            )
        return stored | set(check_text_encoder(self.online_text_encoder).widths)

    def class_names(self) -> Optional[list[str]]:
        return self._agreed("class_names", "a label must have one meaning")

    def text_encoder(self) -> Optional[str]:
        if self.online_text_encoder is not None:
            return check_text_encoder(self.online_text_encoder).recorded
        return self._agreed("text_encoder", "the model needs embeddings of one encoder")

    def attributions(self) -> list[str]:
        """Return the distinct `attribution` lines of the members' `dataset.json`."""
        attributions = (info.description.get("attribution") for info in self.folders(TRAIN_SPLIT))
        return list(dict.fromkeys(line for line in attributions if line))

    def reference_aspect(self) -> Optional[str]:
        """Return the `--aspect` that `dataset.json` records; None if members differ."""
        aspects = set[Optional[str]]()
        for info in self.folders(TRAIN_SPLIT) if self.references else ():
            entry: Any = info.description
            for name in ("prepared", "options", "fit", "aspect"):
                entry = entry.get(name) if isinstance(entry, dict) else None
            aspects.add(entry if entry in ASPECTS else None)
        return aspects.pop() if len(aspects) == 1 else None

    def autoencoder(self) -> Optional[str]:
        if self.online_vae is not None:
            return self.online_vae
        return self._agreed(
            "vae", "latents of two autoencoders do not match; if they are the same one, set sampling.vae"
        )

    def _agreed(self, name: str, why: str) -> Any:
        """Return an entry of `dataset.json` that must be equal in all members that have it."""
        infos = self.folders(TRAIN_SPLIT)
        entries = {str(i.path): i.description[name] for i in infos if i.description.get(name)}
        values = list(entries.values())
        if any(value != values[0] for value in values):
            raise DataError(f"the members of {self.origin} differ in {name}: {entries}; {why}")
        return values[0] if values else None
