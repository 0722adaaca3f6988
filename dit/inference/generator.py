"""A trained model for sampling, loaded from a checkpoint."""

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, Optional

import torch
from torch import Tensor

from dit.backends import process_groups
from dit.backends.device import local_device
from dit.backends.process_groups import ProcessGroups
from dit.batch import PackedBatch
from dit.checkpoint.base_model import download_base, load_run
from dit.checkpoint.reading import find_checkpoint, read_settings, slot_of
from dit.checkpoint.records import METADATA_FILE, usable
from dit.condition_table import DEFAULT_FPS, FIRST_FRAMES, FPS, LABEL
from dit.conditions import Value, pack_conditions
from dit.encoders.text import empty_texts, load_text_encoders
from dit.errors import ConfigError
from dit.inference.sizes import check_size
from dit.levels import first_frames_clean, unmasked_clean, with_levels
from dit.objectives.base import ConditionalNetwork
from dit.objectives.flow_matching import FlowMatching
from dit.parallel.build import build_model
from dit.parallel.dims import ParallelConfig
from dit.patchify import frames_to_patch, patchify
from dit.run_config import RunConfig, check_levels, check_references
from dit.sampling.generate import LowNoise, empty_pack, generate_each, of_pack, steps_of, token_features
from dit.sampling.references import add_references
from dit.sampling.tiles import TiledNetwork
from dit.settings import SamplingConfig, TrainingConfig

TOKENS_AT_ONCE = 16384
"""Tokens of the samples in one pack; guidance doubles them."""


class Generator:
    """A model with trained weights, on one rank.

    Attributes:
        text_encoder, autoencoder: of the training data, see `dit.encoders`; or None.
        attributions: lines that name the authors of the training data; show them with samples.
        reference_aspect: `--aspect` by which references of the training data were cropped; None if unknown.
        longest_text: tokens to which texts are truncated, as in training; None for no limit.
        fps: frames per second of the training data; `DEFAULT_FPS` if the run did not record it.
        guide: a weaker network in the place of the unconditional branch (`guide_by`); None for this network without
            its conditions.
        low_noise: the network of low noise levels (`switch_to`); None for this network at all levels.
    """

    def __init__(self, config: RunConfig, metadata: dict[str, Any], network: torch.nn.Module, step: int) -> None:
        self.config, self.metadata, self.network, self.step = config, metadata, network, step
        self.guide: Optional[ConditionalNetwork] = None
        self.low_noise: Optional[LowNoise] = None
        self.class_names: Optional[list[str]] = metadata["class_names"]
        self.text_encoder: Optional[str] = metadata.get("text_encoder")
        self.autoencoder: Optional[str] = metadata.get("autoencoder")
        self.attributions: list[str] = metadata.get("attributions", [])
        self.reference_aspect: Optional[str] = metadata.get("reference_aspect")
        self.longest_text: Optional[int] = config.data.longest_text or metadata.get("max_text_tokens")
        self.fps: float = metadata.get("fps", DEFAULT_FPS)
        self.spec = config.model.batch_spec()
        frames, height, width = metadata["latent_size"]
        self.latent_size = (frames, height, width)

    def generate(
        self,
        labels: Optional[Sequence[int]] = None,
        *,
        count: Optional[int] = None,
        conditions: Optional[Mapping[str, Sequence[Value]]] = None,
        negative: Optional[Mapping[str, Sequence[Value]]] = None,
        fps: Optional[float] = None,
        frames: Optional[int] = None,
        size: Optional[tuple[int, int]] = None,
        seeds: Optional[Sequence[Optional[int]]] = None,
        numbers: Optional[Sequence[int]] = None,
        initial: Optional[Tensor] = None,
        strength: Optional[float] = None,
        first_frame: Optional[Tensor] = None,
        references: Optional[Sequence[Sequence[Tensor]]] = None,
        known: Optional[Tensor] = None,
        mask: Optional[Tensor] = None,
        tile: Optional[int] = None,
        tile_overlap: Optional[int] = None,
        on_step: Callable[[int], None] = lambda step: None,
        **sampling: Any,
    ) -> Tensor:
        """Generate latents `[N, C, T, H, W]`, float32: one per label or per value of a condition, or `count`.

        Omitted settings are those of the run. The noise of a sample depends on its seed and its number, so samples can
        be drawn in batches of any size.

        Args:
            conditions: further conditions by name, a value for each sample, such as text embeddings `[k, width]` as
                `context`.
            negative: conditions of the unconditional branch, by name; absent ones are null.
            frames: of each sample, 1 for a still; as many as the longest training clip if None.
            size: height and width of each sample; those of the largest training sample if None.
            seeds: one per sample; None for `seed`.
            numbers: of the samples; 0, 1, ... if None.
            initial: a latent `[C, T, H, W]` of that size from which all samples start, for a still of one frame; None
                to start from noise.
            strength: share of the steps that follow `initial`, see `generate_each`; None without it.
            first_frame: a latent `[C, 1, H, W]` that is the first frame of all clips (image to video), for a model
                trained with clean first frames, or with the condition `first_frames`; None to generate all frames.
            references: for each sample, latents `[C, T, H, W]` from which it is edited (`data.references=True`);
                None for none.
            known: latent `[C, T, H, W]` of all samples outside `mask`, for a model trained with `data.inpaint`; None to
                generate all of them.
            mask: bool `[H, W]`, True for the patches to generate in every frame; given together with `known`.
            tile: side of square tiles in positions of a latent, for samples larger than the training samples, see
                `dit.sampling.tiles`; None passes the full sample to the network.
            tile_overlap: smallest overlap of neighbouring tiles; a quarter of a tile if None.
            on_step: called with the number of each solver step when it starts.
            sampling: fields of `SamplingConfig`.
        """
        for is_wrong, pair in (
            ((initial is None) != (strength is None), "initial and strength, which is the share of the steps after it"),
            ((known is None) != (mask is None), "known and mask, the latent and the patches to generate in it"),
        ):
            if is_wrong:
                raise ConfigError(f"one of {pair}, has no effect without the other; give both, or neither")
        if known is not None and (initial is not None or first_frame is not None):
            raise ConfigError("known keeps a part of a picture, initial and first_frame begin with one; give one")
        settings = self.sampling(**sampling)
        frames, height, width = check_size(self.spec, self.config.model, self.size_of(frames, size))
        # In training, a still is a clip of one patch with equal frames, so any frame is the picture.
        padded_frames = frames_to_patch(frames, self.spec.patch_temporal)
        values = dict(conditions or {}) if labels is None else {LABEL.name: labels, **(conditions or {})}
        count = len(next(iter(values.values()))) if values else count or 1
        values = {FPS.name: [self.fps if fps is None else fps] * count, **self._empty_texts(values, count), **values}
        batch = empty_pack(self.spec, (padded_frames, height, width), count, local_device(), values, numbers)
        if initial is not None:
            tokens_TC, _ = patchify(initial.repeat(1, padded_frames // initial.shape[1], 1, 1), *self.spec.patch)
            batch.latents_TC = batch.layout.insert_padding(tokens_TC.to(batch.layout.device).repeat(count, 1))
        if first_frame is not None:
            batch = self._starting_with(first_frame, batch)
        elif self.spec.condition(FIRST_FRAMES.name) is not None and FIRST_FRAMES.name not in values:
            raise ConfigError(
                "this model was trained to continue the first frame of a clip (model.image_to_video=True); give one as "
                "first_frame (--first-frame PICTURE)"
            )
        if known is not None and mask is not None:
            batch = self._around(known, mask, batch)
        if references is not None:
            check_references(self.config.model, self.config.objective, "a reference", "no reference")
            batch = add_references(batch, references, self.spec)
        latents = self.generate_pack(
            batch,
            settings,
            seeds=[settings.seed if seed is None else seed for seed in seeds or [None] * count],
            negative=negative,
            strength=strength,
            tile=tile,
            tile_overlap=tile_overlap,
            on_step=on_step,
        )
        return torch.stack(latents)[:, :, :frames]

    def _around(self, known: Tensor, mask_HW: Tensor, batch: PackedBatch) -> PackedBatch:
        """Return a pack of samples whose unmasked tokens are clean."""
        check_levels(self.config.model, self.config.objective, "a mask", "no mask")
        grid, temporal = batch.grids[0], self.spec.patch_temporal
        tokens_TC, known_grid = patchify(known.repeat(1, grid[0] * temporal // known.shape[1], 1, 1), *self.spec.patch)
        if known_grid != grid or mask_HW.shape != grid[1:] or not mask_HW.any():
            raise ConfigError(
                f"samples of {grid} patches (t, h, w) need a known latent and a mask of their size with at least one "
                f"patch to generate, got {known_grid} and {list(mask_HW.shape)} with {int(mask_HW.sum())}"
            )
        count = len(batch.grids)
        latents_TC = batch.layout.insert_padding(tokens_TC.to(batch.layout.device).repeat(count, 1))
        segments = unmasked_clean(mask_HW.expand(grid).flatten())
        return replace(batch, latents_TC=latents_TC, layout=with_levels(batch.layout, [segments] * count))

    def _starting_with(self, first_frame: Tensor, batch: PackedBatch) -> PackedBatch:
        """Return a pack of clips whose first frame of tokens is clean, or whose condition is the first frame."""
        condition = self.spec.condition(FIRST_FRAMES.name)
        if condition is None:
            check_levels(self.config.model, self.config.objective, "a first frame", "no first frame")
        (frames, *_), temporal = batch.grids[0], self.spec.patch_temporal
        if frames == 1:
            raise ConfigError(
                f"a first frame needs clips of at least {2 * temporal} latent frames, and these have {temporal}; "
                "raise frames (--frames)"
            )
        height, width = (n * self.spec.patch_spatial for n in batch.grids[0][1:])
        if first_frame.shape != (expected := (self.spec.latent_channels, 1, height, width)):
            raise ConfigError(f"the first frame is a latent {list(first_frame.shape)}, the clips need {list(expected)}")
        if condition is not None:
            assert condition.derive is not None
            clip = torch.nn.functional.pad(first_frame, (0, 0, 0, 0, 0, frames * temporal - 1))
            pictures = {condition.name: [condition.derive(clip)] * len(batch.grids)}
            packed = pack_conditions(self.spec.conditions, pictures, batch.layout, self.spec.patch)
            return replace(batch, conditions=batch.conditions | packed.to(batch.layout.device))
        tokens_TC, _ = patchify(first_frame.repeat(1, temporal, 1, 1), *self.spec.patch)
        latents_TC = batch.latents_TC.clone()
        for start in batch.layout.starts:
            latents_TC[start : start + len(tokens_TC)] = tokens_TC
        segments = first_frames_clean(batch.grids)
        return replace(batch, latents_TC=latents_TC, layout=with_levels(batch.layout, segments))

    def is_guided(self, scale: float) -> bool:
        """Return whether a model has guidance: this one by its scale, or the second one by its own."""
        return scale != 1 or (self.low_noise is not None and self.low_noise.guidance_scale not in (None, 1))

    def sampling(self, **overrides: Any) -> SamplingConfig:
        """Return the sampling settings of the run, with overrides that are not None.

        Settings of the run that have no effect together with the overrides get their defaults.
        """
        overrides = {name: value for name, value in overrides.items() if value is not None}
        sampling = replace(self.config.sampling, **overrides)
        guided = self.is_guided(sampling.guidance_scale)
        for names, _, _ in sampling.without_effect(guided=guided):
            sampling = replace(sampling, **{n: getattr(SamplingConfig, n) for n in names if n not in overrides})
        if "variance" in overrides and sampling.solver != "ancestral":
            raise ConfigError(
                f"variance={sampling.variance!r} has no effect with solver={sampling.solver!r}; use solver='ancestral'"
            )
        sampling.validate(guided=guided)
        return sampling

    def generate_pack(
        self,
        batch: PackedBatch,
        sampling: SamplingConfig,
        *,
        seeds: Optional[Sequence[int]] = None,
        negative: Optional[Mapping[str, Sequence[Value]]] = None,
        strength: Optional[float] = None,
        tile: Optional[int] = None,
        tile_overlap: Optional[int] = None,
        on_step: Callable[[int], None] = lambda step: None,
    ) -> list[Tensor]:
        """Generate latents `[C, T, H, W]`, float32, with the sizes and conditions of the samples of a pack.

        Further arguments are those of `generate`. The latents of the pack are read only if `strength` is given, and
        those of clean tokens.
        """
        if self.low_noise is None:
            self._check_times(batch, sampling.num_steps, strength)
        count = batch.layout.num_samples
        seed = torch.tensor([sampling.seed] * count if seeds is None else seeds)
        negative = negative or {}
        if self.guide is not None and (negative or sampling.guidance_scale == 1):
            other = "negative conditions" if negative else f"guidance_scale={sampling.guidance_scale:g}"
            raise ConfigError(f"a guide cannot be combined with {other}; leave out one of the two")
        if self.guide is None and self.is_guided(sampling.guidance_scale):
            negative = {**self._empty_texts(negative, count), **negative}
        tiled, low = partial(self._in_tiles, tile=tile, overlap=tile_overlap), self.low_noise
        return generate_each(
            tiled(self.network),
            self.config.objective,
            batch,
            self.spec,
            sampling,
            seeds_S=seed.to(batch.layout.device),
            guide=None if self.guide is None else tiled(self.guide),
            low_noise=None if low is None else replace(low, network=tiled(low.network)),
            negative=negative,
            strength=strength,
            on_step=on_step,
        )

    def _check_times(self, batch: PackedBatch, num_steps: int, strength: Optional[float]) -> None:
        """Check that one model was trained at all times of the solver."""
        objective = of_pack(self.config.objective, batch)
        low, high = objective.trained_times
        if low > 0 or (high < 1 and strength is None):
            raise ConfigError(
                f"a model trained at times from {low} to {high} (objective.min_time, max_time) draws no samples by "
                "itself; use a pair of models, with --low-noise"
            )
        if strength is None or high == 1:
            return
        grid = objective.sampling_grid(num_steps)
        start = float(grid[-1 - steps_of(strength, num_steps)])
        if start > high:
            most = int((grid <= high).sum()) - 1
            cure = f"strength={most / num_steps:.4g} or less" if most else "more steps"
            raise ConfigError(
                f"strength={strength:g} of {num_steps} steps starts at time {start:.3g}, and the model was trained at "
                f"times up to {high} (objective.max_time); use {cure}"
            )

    def _empty_texts(self, present: Collection[str], count: int) -> dict[str, list[Tensor]]:
        """Return `count` embeddings of the empty text for each absent condition that has it as null."""
        absent = [condition for condition in self.spec.conditions if condition.name not in present]
        nulls = empty_texts(self.text_encoder, absent, local_device(), load_text_encoders)
        return {name: [null] * count for name, null in nulls.items()}

    def guide_by(self, weaker: "Generator") -> None:
        """Use a smaller model, or an earlier checkpoint of this one, as the unconditional branch of guidance."""
        self._refuse_both(self.low_noise)
        objective, guide_objective = self.config.objective, weaker.config.objective
        if objective != guide_objective:
            raise ConfigError(
                f"the guide was trained with {guide_objective}, this model with {objective}; use a guide with the same "
                "objective"
            )
        self._check_form(weaker, "guide")
        self.guide = weaker.network

    def switch_to(
        self, other: "Generator", *, boundary: Optional[float] = None, guidance_scale: Optional[float] = None
    ) -> None:
        """Use another model below the time `boundary`; the two were trained on different times (Wan 2.2 A14B).

        By default, the boundary is `min_time` of this model's objective, and the guidance scale is that of this model.
        """
        self._refuse_both(self.guide)
        high, low = self.config.objective, other.config.objective
        if not (isinstance(high, FlowMatching) and isinstance(low, FlowMatching)):
            raise ConfigError(f"two models share the times of flow matching, got {high} and {low}; use one model")
        if replace(high, min_time=0.0, max_time=1.0) != replace(low, min_time=0.0, max_time=1.0):
            raise ConfigError(f"the models of high and low noise were trained with {high} and {low}; use a pair")
        boundary = high.min_time if boundary is None else boundary
        meet = 0 < boundary < 1 and high.min_time <= boundary <= low.max_time
        if not (meet and low.min_time == 0 and high.max_time == 1):
            raise ConfigError(
                f"the model of high noise was trained on times from {high.min_time} to {high.max_time}, that of low "
                f"noise on {low.min_time} to {low.max_time}, and the boundary is {boundary}; use a pair that covers "
                "all times, and a boundary between them (0.875 in Wan 2.2 A14B)"
            )
        self._check_form(other, "model of low noise")
        self.low_noise = LowNoise(other.network, boundary, guidance_scale)

    @staticmethod
    def _refuse_both(other: object) -> None:
        if other is not None:
            raise ConfigError("a guide belongs to one model, and here are two for high and low noise; leave out one")

    def _check_form(self, other: "Generator", name: str) -> None:
        """Check that another model has the same latents and takes no other conditions."""
        form = ("latent_channels", "patch_spatial", "patch_temporal")
        differ = [n for n in form if getattr(self.spec, n) != getattr(other.spec, n)]
        forms = {(c.name, c.shape, c.num_classes) for c in self.spec.conditions}
        required = [c for c in other.spec.conditions if c.default is None]
        unknown = [c.name for c in required if (c.name, c.shape, c.num_classes) not in forms]
        if differ or unknown or other.text_encoder != self.text_encoder:
            reasons = [f"{n}={getattr(other.spec, n)} (this model: {getattr(self.spec, n)})" for n in differ]
            reasons += [f"the condition {name!r} in another form" for name in unknown]
            reasons += [] if reasons else [f"texts of {other.text_encoder} (this model: {self.text_encoder})"]
            raise ConfigError(f"the {name} takes {', '.join(reasons)}; use one with the same latents and conditions")

    def _in_tiles(self, network: ConditionalNetwork, tile: Optional[int], overlap: Optional[int]) -> ConditionalNetwork:
        if tile is None:
            if overlap is not None:
                raise ConfigError(f"tile_overlap={overlap} has no effect without tiles; also set tile, their side")
            return network
        if token_features(self.spec):
            raise ConfigError(
                f"tile={tile}: a picture in tiles has one class token of a teacher, and the model was trained with "
                "that of a full picture; draw without tiles"
            )
        unit = self.spec.patch_spatial
        check_size(self.spec, self.config.model, (self.spec.patch_temporal, tile, tile))
        shared = tile // 4 // unit * unit if overlap is None else overlap
        if shared % unit or not 0 <= shared < tile:
            raise ConfigError(f"tile_overlap={shared} must be a multiple of {unit} from 0 to {tile - unit}")
        return TiledNetwork(network, (tile // unit,) * 2, (shared // unit,) * 2, 2 * TOKENS_AT_ONCE)

    def size_of(self, frames: Optional[int], size: Optional[tuple[int, int]]) -> tuple[int, int, int]:
        """Return (T, H, W) of a latent; None stands for the size of the largest training sample."""
        default_frames, *default_size = self.latent_size
        height, width = default_size if size is None else size
        return default_frames if frames is None else frames, height, width

    def batch_size(
        self,
        frames: Optional[int],
        size: Optional[tuple[int, int]],
        references: Optional[Sequence[Sequence[Tensor]]] = None,
    ) -> int:
        """Return the number of samples of this size with at most `TOKENS_AT_ONCE` tokens, at least one.

        All samples count as the one with the longest `references`.
        """

        def positions(frames: int, height: int, width: int) -> int:
            return frames_to_patch(frames, self.spec.patch_temporal) * height * width

        clean = max((sum(positions(*x.shape[1:]) for x in several) for several in references or ()), default=0)
        each = positions(*self.size_of(frames, size)) + clean
        return max(1, TOKENS_AT_ONCE * self.spec.patch_volume // each)


def load_generator(
    path: Path | str, *, weights: Literal["ema", "raw"] = "ema", groups: Optional[ProcessGroups] = None
) -> Generator:
    """Build the model of a checkpoint with its averaged or its raw weights, unsharded on every rank (collective).

    The base of adapters (LoRA) is read from its own checkpoint.

    Args:
        path: a run folder (with its newest valid checkpoint) or one checkpoint folder.
        groups: result of `groups_to_sample`, to load several models; None creates groups.

    Raises:
        CheckpointError: there is no valid checkpoint, it has no average, or the base of its adapters is missing.
    """
    groups = groups or groups_to_sample(path)
    with ExitStack() as reading:
        folder, step = find_checkpoint(path, reading, groups)
        config, metadata = read_settings(folder)
        slot = slot_of(folder, config, weights)
        chunks = build_model(config.model, ParallelConfig(), TrainingConfig(precision="fp32"), groups)
        load_run(folder, config, chunks, groups, slot)
    network = chunks[0].eval()
    with usable(folder / METADATA_FILE):
        return Generator(config, metadata, network, step)


def groups_to_sample(*paths: Path | str) -> ProcessGroups:
    """Create process groups for ranks that each have the unsharded models of these paths (collective).

    The bases of their adapters are downloaded before, because a download may take longer than a collective may.
    """
    for path in paths:
        download_base(path)
    return process_groups.initialize(ParallelConfig(data_parallel="ddp"))
