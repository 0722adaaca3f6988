"""Sample grids while training: one picture per class from the current weights, always from the same noise."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Optional

import torch
from torch import Tensor

from dit.data_api import BatchSpec
from dit.models.base import ModelConfig
from dit.objectives.base import Objective
from dit.sampling.generate import empty_pack, generate
from dit.sampling.grid import image_grid, save_png, to_pictures
from dit.training.settings import SamplingConfig

UNLABELLED_SAMPLES = 16
MAX_CLASSES_SHOWN = 32


class PictureWriter:
    """Draws the grid of a conditional or unconditional model.

    Args:
        class_names: name of each class for the captions; None numbers them.
    """

    def __init__(
        self,
        model: ModelConfig,
        objective: Objective,
        spec: BatchSpec,
        sampling: SamplingConfig,
        class_names: Optional[list[str]],
    ) -> None:
        self.model, self.objective, self.spec, self.sampling = model, objective, spec, sampling
        self.class_names = class_names

    def draw(self, network: Callable[..., Tensor], latent_size: tuple[int, int, int], device: torch.device) -> Any:
        """Generate the samples and lay them out; every rank of a tensor-parallel group must take part."""
        labels, captions = None, None
        count, columns = UNLABELLED_SAMPLES, None
        if self.model.num_classes is not None:
            columns = min(self.model.num_classes, MAX_CLASSES_SHOWN)
            labels = list(range(columns)) * self.sampling.samples_per_class
            count = len(labels)
            captions = [str(label) if self.class_names is None else self.class_names[label] for label in labels]
        batch = empty_pack(self.spec, latent_size, count, device, labels=labels)
        latents = generate(
            network,
            self.objective,
            batch,
            self.spec,
            solver=self.sampling.solver,
            num_steps=self.sampling.num_steps,
            guidance_scale=self.sampling.guidance_scale,
            seed=self.sampling.seed,
        )
        return image_grid(to_pictures(latents)[:, :, 0], captions, columns)

    def save(self, picture: Any, path: Path) -> Path:
        """Write the grid as PNG; a reader never sees half a file."""
        path.parent.mkdir(parents=True, exist_ok=True)
        save_png(picture, path)
        return path
