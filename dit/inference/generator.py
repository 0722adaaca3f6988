"""A trained model for sampling: from a checkpoint folder alone to pictures."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Optional

import torch
from torch import Tensor

from dit.backends import process_groups
from dit.backends.device import local_device
from dit.checkpoint.reading import find_checkpoint, read_settings, slot_of
from dit.checkpoint.sharded_state import load_weights
from dit.condition_table import DEFAULT_FPS, FPS, LABEL
from dit.conditions import Value
from dit.errors import ConfigError
from dit.parallel.build import build_model
from dit.parallel.dims import ParallelConfig
from dit.patchify import frames_to_patch
from dit.run_config import RunConfig
from dit.sampling.generate import empty_pack, generate
from dit.settings import TrainingConfig


class Generator:
    """A model with trained weights, on one rank.

    Attributes:
        config: the settings it was trained with.
        class_names: name of each class, or None.
        text_encoder: encoder of `dit.encoders.text` whose embeddings it was trained on, or None.
        fps: frames per second of its training data; `DEFAULT_FPS` where the run did not record it.
        step: optimizer step of its weights.
    """

    def __init__(self, config: RunConfig, metadata: dict[str, Any], network: torch.nn.Module, step: int) -> None:
        self.config, self.network, self.step = config, network, step
        self.class_names: Optional[list[str]] = metadata["class_names"]
        self.text_encoder: Optional[str] = metadata.get("text_encoder")
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
        solver: Optional[str] = None,
        num_steps: Optional[int] = None,
        variance: Optional[str] = None,
        guidance_scale: Optional[float] = None,
        guidance_channels: Optional[int] = None,
        seed: Optional[int] = None,
    ) -> Tensor:
        """Generate one sample per label (or condition, or `count` samples); settings left out are the run's own.

        Args:
            labels: class of each sample.
            conditions: others by name, a value for each sample, such as text embeddings `[k, width]` as `context`.
            negative: conditions that guidance leads away from, by name; None for the null of all.
            fps: of all samples.
            frames: of each sample, 1 for a still; those of the longest clip that was trained on if None.
            variance: of the solver `ancestral`, see `SamplingConfig`.

        Returns:
            Latents `[N, C, T, H, W]`, float32.

        Raises:
            ConfigError: a condition does not fit the model, the solver is unknown or has no such variance, or so many
                frames cannot be drawn.
        """
        own = self.config.sampling
        device = local_device()
        latent_frames, height, width = self.latent_size
        frames = latent_frames if frames is None else frames
        # A still was trained on as a clip of one patch in which nothing moves: any frame of it is the picture.
        drawn = frames_to_patch(frames, self.spec.patch_temporal)
        if frames < 1 or drawn % self.spec.patch_temporal:
            raise ConfigError(
                f"frames={frames} cannot be cut into patches of {self.spec.patch_temporal} frames; use a multiple, or "
                "1 for a still"
            )
        given = dict(conditions or {}) if labels is None else {LABEL.name: labels, **(conditions or {})}
        size = len(next(iter(given.values()))) if given else count or 1
        rate = {FPS.name: [self.fps if fps is None else fps] * size}
        batch = empty_pack(self.spec, (drawn, height, width), size, device, {**rate, **given})
        solver = own.solver if solver is None else solver
        if variance is not None and solver != "ancestral":
            raise ConfigError(
                f"variance={variance!r} is of noise that solver={solver!r} does not draw; use solver='ancestral'"
            )
        latents = generate(
            self.network,
            self.config.objective,
            batch,
            self.spec,
            solver=solver,
            num_steps=own.num_steps if num_steps is None else num_steps,
            variance=own.variance if variance is None else variance,
            guidance_scale=own.guidance_scale if guidance_scale is None else guidance_scale,
            guidance_channels=own.guidance_channels if guidance_channels is None else guidance_channels,
            seed=own.seed if seed is None else seed,
            negative=negative,
        )
        return latents[:, :, :frames]


def load_generator(path: Path | str, *, weights: Literal["ema", "raw"] = "ema") -> Generator:
    """Build the model of a checkpoint with its averaged or its raw weights.

    Args:
        path: a run folder (its newest valid checkpoint is taken) or one checkpoint folder.

    Raises:
        CheckpointError: there is no valid checkpoint, or it holds no average.
    """
    folder, step = find_checkpoint(path)
    config, metadata = read_settings(folder)
    slot = slot_of(folder, config, weights)
    groups = process_groups.initialize(ParallelConfig(data_parallel="ddp"))
    chunks = build_model(config.model, ParallelConfig(), TrainingConfig(precision="fp32"), groups)
    load_weights(folder, chunks, groups, slot=slot)
    network = chunks[0].eval()
    return Generator(config, metadata, network, step)
