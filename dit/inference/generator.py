"""A trained model for sampling: from a checkpoint folder alone to pictures."""

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, Optional

import torch
from torch import Tensor

from dit.backends import process_groups
from dit.backends.device import local_device
from dit.backends.process_groups import ProcessGroups
from dit.batch import PackedBatch
from dit.checkpoint.base_model import load_run
from dit.checkpoint.reader_lock import being_read
from dit.checkpoint.reading import find_checkpoint, read_settings, slot_of
from dit.checkpoint.records import METADATA_FILE, usable
from dit.checkpoint.verify_together import on_first_rank
from dit.condition_table import DEFAULT_FPS, FPS, LABEL
from dit.conditions import Value
from dit.encoders.text import empty_texts, load_text_encoders
from dit.errors import CheckpointError, ConfigError
from dit.inference.sizes import check_size
from dit.parallel.build import build_model
from dit.parallel.dims import ParallelConfig
from dit.patchify import frames_to_patch, patchify
from dit.run_config import RunConfig
from dit.sampling.generate import ConditionalNetwork, empty_pack, generate_each
from dit.sampling.guidance import needs_unconditional
from dit.sampling.tiles import TiledNetwork
from dit.settings import SamplingConfig, TrainingConfig

TOKENS_AT_ONCE = 16384
"""Tokens of the samples that are drawn in one pack; guidance doubles them."""


class Generator:
    """A model with trained weights, on one rank.

    Attributes:
        config: the settings it was trained with.
        class_names: name of each class, or None.
        text_encoder: encoder of `dit.encoders.text` whose embeddings it was trained on, or None.
        autoencoder: of `dit.encoders.vae`, whose latents it was trained on, or None.
        attributions: lines that name the authors of its training data; show them with samples.
        fps: frames per second of its training data; `DEFAULT_FPS` where the run did not record it.
        step: optimizer step of its weights.
        metadata: of the checkpoint.
        guide: a weaker network that guidance leads away from (`guide_by`); None for this one without its conditions.
    """

    def __init__(self, config: RunConfig, metadata: dict[str, Any], network: torch.nn.Module, step: int) -> None:
        self.config, self.metadata, self.network, self.step = config, metadata, network, step
        self.guide: Optional[ConditionalNetwork] = None
        self.class_names: Optional[list[str]] = metadata["class_names"]
        self.text_encoder: Optional[str] = metadata.get("text_encoder")
        self.autoencoder: Optional[str] = metadata.get("autoencoder")
        self.attributions: list[str] = metadata.get("attributions", [])
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
        tile: Optional[int] = None,
        tile_overlap: Optional[int] = None,
        on_step: Callable[[int], None] = lambda step: None,
        **sampling: Any,
    ) -> Tensor:
        """Generate one sample per label (or condition, or `count` samples); settings left out are the run's own.

        The noise of a sample depends on its seed and its number, so that samples can be drawn in batches of any size.

        Args:
            labels: class of each sample.
            conditions: others by name, a value for each sample, such as text embeddings `[k, width]` as `context`.
            negative: conditions that guidance leads away from, by name; None for the null of all.
            fps: of all samples.
            frames: of each sample, 1 for a still; those of the longest clip that was trained on if None.
            size: height and width of each sample; those of the largest one that was trained on if None.
            seeds: own seed of each sample; None for `seed`.
            numbers: of the samples; 0, 1, ... if None.
            initial: a latent `[C, T, H, W]` of that size that all samples start from, for a still of one frame; None
                for noise alone.
            strength: share of the steps that follow it, see `generate_each`; None without `initial`.
            tile: side of square tiles in positions of a latent, for samples larger than those trained on: the network
                sees tiles of this size alone, see `dit.sampling.tiles`; None for the full sample at once.
            tile_overlap: of neighbouring tiles, at least; a quarter of a tile if None.
            on_step: called with the number of each solver step when it starts.
            sampling: fields of `SamplingConfig`; None for the run's own.

        Returns:
            Latents `[N, C, T, H, W]`, float32.

        Raises:
            ConfigError: a condition does not fit the model, the solver is unknown or has no such variance, or samples
                of such a size cannot be drawn.
        """
        chosen = self.sampling(**sampling)
        frames, height, width = check_size(self.spec, self.config.model, self.size_of(frames, size))
        # A still was trained on as a clip of one patch in which nothing moves: any frame of it is the picture.
        drawn = frames_to_patch(frames, self.spec.patch_temporal)
        given = dict(conditions or {}) if labels is None else {LABEL.name: labels, **(conditions or {})}
        count = len(next(iter(given.values()))) if given else count or 1
        given = {FPS.name: [self.fps if fps is None else fps] * count, **self._empty_texts(given, count), **given}
        batch = empty_pack(self.spec, (drawn, height, width), count, local_device(), given, numbers)
        if initial is not None:
            tokens_TC, _ = patchify(initial.repeat(1, drawn // initial.shape[1], 1, 1), *self.spec.patch)
            batch.latents_TC = batch.layout.insert_padding(tokens_TC.to(batch.layout.device).repeat(count, 1))
        every_seed = [chosen.seed if one is None else one for one in seeds or [None] * count]
        latents = self.generate_pack(
            batch,
            chosen,
            seeds=every_seed,
            negative=negative,
            strength=strength,
            tile=tile,
            tile_overlap=tile_overlap,
            on_step=on_step,
        )
        return torch.stack(latents)[:, :, :frames]

    def sampling(self, **given: Any) -> SamplingConfig:
        """Return the run's own settings of sampling with those that are given and not None.

        The run's own settings that the given ones leave without effect get their defaults.

        Raises:
            ConfigError: a setting is out of range, or a given one has no effect.
        """
        given = {name: value for name, value in given.items() if value is not None}
        sampling = replace(self.config.sampling, **given)
        for names, _, _ in sampling.without_effect():
            sampling = replace(sampling, **{n: getattr(SamplingConfig, n) for n in names if n not in given})
        if given.get("variance") is not None and sampling.solver != "ancestral":
            raise ConfigError(
                f"variance={sampling.variance!r} is of noise that solver={sampling.solver!r} does not draw; "
                "use solver='ancestral'"
            )
        sampling.validate()
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
        """Generate a sample for each of a pack, of its size and with its conditions.

        Args:
            batch: its latents are read only if `strength` is given.
            seeds: of each sample; None for that of `sampling`.
            negative, strength, tile, tile_overlap, on_step: as in `generate`.

        Returns:
            The latent of each sample `[C, T, H, W]`, float32.

        Raises:
            ConfigError: as `generate`, or the guide has no effect, or takes the place of a negative text.
        """
        count = batch.layout.num_samples
        seed = torch.tensor([sampling.seed] * count if seeds is None else seeds)
        negative = negative or {}
        if self.guide is not None and (negative or not needs_unconditional(sampling.guidance_scale)):
            what = "negative conditions" if negative else f"guidance_scale={sampling.guidance_scale:g}"
            raise ConfigError(f"guidance leads away from the guide, not with {what}; leave out one of the two")
        if needs_unconditional(sampling.guidance_scale) and self.guide is None:
            negative = {**self._empty_texts(negative, count), **negative}
        return generate_each(
            self._in_tiles(self.network, tile, tile_overlap),
            self.config.objective,
            batch,
            self.spec,
            sampling,
            seeds_S=seed.to(batch.layout.device),
            guide=None if self.guide is None else self._in_tiles(self.guide, tile, tile_overlap),
            negative=negative,
            strength=strength,
            on_step=on_step,
        )

    def _empty_texts(self, given: Collection[str], count: int) -> dict[str, list[Tensor]]:
        """Embed the empty text `count` times for the conditions whose null it is and that are not given."""
        missing = [condition for condition in self.spec.conditions if condition.name not in given]
        nulls = empty_texts(self.text_encoder, missing, local_device(), load_text_encoders)
        return {name: [null] * count for name, null in nulls.items()}

    def guide_by(self, weaker: "Generator") -> None:
        """Let guidance lead away from a smaller model, or from an earlier checkpoint of this one.

        Raises:
            ConfigError: it has another objective, other latents, or conditions that this model does not take.
        """
        own, other = self.config.objective, weaker.config.objective
        if own != other:
            raise ConfigError(
                f"the guide was trained by {other}, this model by {own}; guide by a model of one objective"
            )
        form = ("latent_channels", "patch_spatial", "patch_temporal")
        differ = [n for n in form if getattr(self.spec, n) != getattr(weaker.spec, n)]
        forms = {(c.name, c.shape, c.num_classes) for c in self.spec.conditions}
        wanted = [c for c in weaker.spec.conditions if c.default is None]
        lacking = [c.name for c in wanted if (c.name, c.shape, c.num_classes) not in forms]
        if differ or lacking or weaker.text_encoder != self.text_encoder:
            reasons = [f"{n}={getattr(weaker.spec, n)} (this model: {getattr(self.spec, n)})" for n in differ]
            reasons += [f"the condition {name!r} in another form" for name in lacking]
            reasons += [] if reasons else [f"texts of {weaker.text_encoder} (this model: {self.text_encoder})"]
            raise ConfigError(
                f"the guide takes {', '.join(reasons)}; guide by a model of the same latents and conditions"
            )
        self.guide = weaker.network

    def _in_tiles(self, network: ConditionalNetwork, tile: Optional[int], overlap: Optional[int]) -> ConditionalNetwork:
        """Return a network, in tiles if they are asked for."""
        if tile is None:
            if overlap is not None:
                raise ConfigError(f"tile_overlap={overlap} is of tiles, and there are none; give their side, tile")
            return network
        unit = self.spec.patch_spatial
        check_size(self.spec, self.config.model, (self.spec.patch_temporal, tile, tile))
        shared = tile // 4 // unit * unit if overlap is None else overlap
        if shared % unit or not 0 <= shared < tile:
            raise ConfigError(f"tile_overlap={shared} must be a multiple of {unit} from 0 to {tile - unit}")
        return TiledNetwork(network, (tile // unit,) * 2, (shared // unit,) * 2, 2 * TOKENS_AT_ONCE)

    def size_of(self, frames: Optional[int], size: Optional[tuple[int, int]]) -> tuple[int, int, int]:
        """Return (T, H, W) of a latent, what is None from the largest sample that was trained on."""
        trained_frames, *trained = self.latent_size
        height, width = trained if size is None else size
        return trained_frames if frames is None else frames, height, width

    def batch_size(self, frames: Optional[int], size: Optional[tuple[int, int]]) -> int:
        """Return how many samples of this size are drawn at once: those of `TOKENS_AT_ONCE`, at least one."""
        drawn, height, width = self.size_of(frames, size)
        positions = frames_to_patch(drawn, self.spec.patch_temporal) * height * width
        return max(1, TOKENS_AT_ONCE * self.spec.patch_volume // positions)


def load_generator(
    path: Path | str, *, weights: Literal["ema", "raw"] = "ema", groups: Optional[ProcessGroups] = None
) -> Generator:
    """Build the model of a checkpoint with its averaged or its raw weights; every rank calls this and gets all of it.

    Adapters (LoRA) run beside the weights of the base, which is read from its own checkpoint.

    Args:
        path: a run folder (its newest valid checkpoint is taken) or one checkpoint folder.
        groups: of `groups_to_sample`, to load several models; None makes them.

    Raises:
        CheckpointError: there is no valid checkpoint, it holds no average, or the base of its adapters is missing.
    """
    groups = groups or groups_to_sample()
    with ExitStack() as reading:
        # A run that goes on may save a newer one while the ranks look, and delete an old one.
        found = on_first_rank(lambda: _found(path, reading), groups)
        if isinstance(found, CheckpointError):
            raise found
        folder, step = found
        if groups.rank:
            reading.enter_context(being_read(folder))
        config, metadata = read_settings(folder)
        slot = slot_of(folder, config, weights)
        chunks = build_model(config.model, ParallelConfig(), TrainingConfig(precision="fp32"), groups)
        load_run(folder, config, chunks, groups, slot)
    network = chunks[0].eval()
    with usable(folder / METADATA_FILE):
        return Generator(config, metadata, network, step)


def groups_to_sample() -> ProcessGroups:
    """Make the groups of ranks that have the model each; every rank calls this."""
    return process_groups.initialize(ParallelConfig(data_parallel="ddp"))


def _found(path: Path | str, reading: ExitStack) -> tuple[Path, int] | CheckpointError:
    try:
        return find_checkpoint(path, reading)
    except CheckpointError as error:
        return error
