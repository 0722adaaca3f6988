"""Sample grids during training, of classes, prompts or held-out pictures, from the same noise in every grid."""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Optional

import torch
from torch import Tensor

from dit.backends.device import local_device
from dit.batch import PackedBatch
from dit.condition_table import CONTEXT, FPS, LABEL
from dit.conditions import Value
from dit.data_api import BatchSpec, DataConfig
from dit.errors import ConfigError
from dit.inference.decoding import Decoder, find_autoencoder
from dit.models.base import ModelConfig
from dit.objectives.base import Objective
from dit.patchify import frames_to_patch, num_frames
from dit.run_config import RunConfig
from dit.safe_files import make_folder
from dit.sampling.clips import MAX_GIF_FPS, clip_grid, save_gif
from dit.sampling.generate import empty_pack, generate_each
from dit.sampling.grid import save_png, spread
from dit.settings import SamplingConfig

if TYPE_CHECKING:
    from PIL.Image import Image

MOST_SAMPLES = 16
"""Most samples of a grid without classes and prompts."""
MAX_CLASSES_SHOWN = 32


def without_levels(data: DataConfig) -> DataConfig:
    """Return data whose samples have no clean frames or regions, so that samples like them are generated completely."""
    levels = [name for name in ("clean_first_frame", "frame_levels", "inpaint") if hasattr(data, name)]
    return replace(data, **dict.fromkeys(levels, 0.0))


def held_out_pictures(
    config: RunConfig, spec: BatchSpec, encode: Callable[[PackedBatch], PackedBatch]
) -> Optional[PackedBatch]:
    """Return the first held-out micro-batch for a model that reads pictures, such as a picture to edit.

    The micro-batch is one pack, or has up to `training.micro_batch_size` samples, in every layout. Returns
    None for other models, or if `training.validation_interval` is 0. `encode` encodes raw pixels and captions
    (collective).
    """
    if not config.draws_held_out:
        return None
    size = replace(spec, micro_batch_size=config.training.micro_batch_size)
    return spec.check(encode(next(without_levels(config.data).build_validation(size, dp_rank=0, dp_size=1))))


class PictureWriter:
    """Draws a grid of samples: of classes, of prompts, of held-out pictures that the model reads, or of none of them.

    Args:
        class_names: names of classes, from class 0; only these are drawn. None: all are drawn, with their numbers.
        text_encoder: text encoder of the training data, which also embeds `sampling.prompts`; see
            `dit.encoders.text_config`.
        autoencoder: of the training data; it decodes the samples unless `sampling.vae` names another one.
        nulls: embeddings of the empty text by condition, for a model that reads them in place of dropped texts.
        max_text_tokens: longer prompts are truncated, as the texts of the training data; None for no limit.

    Attributes:
        note: a line for the user if latents are drawn without their autoencoder; else None.
    """

    def __init__(
        self,
        model: ModelConfig,
        objective: Objective,
        spec: BatchSpec,
        sampling: SamplingConfig,
        class_names: Optional[list[str]],
        text_encoder: Optional[str] = None,
        autoencoder: Optional[str] = None,
        nulls: Optional[Mapping[str, Tensor]] = None,
        max_text_tokens: Optional[int] = None,
    ) -> None:
        self.model, self.objective, self.spec, self.sampling = model, objective, spec, sampling
        self.class_names, self.text_encoder = class_names, text_encoder
        self.nulls, self.max_text_tokens = nulls or {}, max_text_tokens
        self._texts: Optional[dict[str, list[Tensor]]] = None
        name, self.note = find_autoencoder(model.in_channels, sampling.vae, autoencoder, "sampling.vae=PATH")
        self._decoder = Decoder(name, local_device())
        if sampling.prompts:
            self._check_prompts()

    def _check_prompts(self) -> None:
        from dit.encoders.text_config import as_conditions, check_text_encoder

        takes_text = self.model.condition(CONTEXT.name) is not None
        if self.text_encoder is None or not takes_text:
            reason = "the data name no text encoder" if takes_text else "the model takes no text"
            raise ConfigError(f"sampling.prompts cannot be drawn because {reason}; set sampling.prompts=none")
        widths = as_conditions(check_text_encoder(self.text_encoder).widths, self.spec.conditions)
        for condition in self.spec.conditions:
            if CONTEXT.name not in (condition.name, condition.requires):
                continue
            width = widths.get(condition.name)
            if width is None:
                raise ConfigError(
                    f"sampling.prompts cannot be drawn because the model takes a {condition.description} "
                    f"{list(condition.shape or ())} that the data's text encoder {self.text_encoder!r} does not make; "
                    "set sampling.prompts=none"
                )
            if condition.shape not in (None, (width,)):
                raise ConfigError(
                    f"the data's text encoder {self.text_encoder!r} makes a {condition.description} of {width} "
                    f"features, but the model takes {list(condition.shape)}; {condition.cure_of_width(width)}"
                )

    def draw(
        self,
        network: Callable[..., Tensor],
        latent_size: tuple[int, int, int],
        fps: float,
        *,
        lay_out: bool = True,
    ) -> list["Image"]:
        """Generate the samples and return a grid per frame (collective over the tensor-parallel group).

        Ranks that write nothing do not decode and arrange the samples (`lay_out=False`), and return an empty list.
        """
        conditions: dict[str, Sequence[Value]] = {}
        captions: Optional[list[str]] = None
        count, columns = MOST_SAMPLES, None
        if self.sampling.prompts:
            captions = self.sampling.prompts * self.sampling.samples_per_class
            count = len(captions)
        elif (label := self.model.condition(LABEL.name)) and label.num_classes is not None:
            names = self.class_names or [str(index) for index in range(label.num_classes)]
            shown = spread(len(names), MAX_CLASSES_SHOWN)
            columns = len(shown)
            conditions[LABEL.name] = labels = shown * self.sampling.samples_per_class
            count = len(labels)
            captions = [names[index] for index in labels]
        empty: dict[str, Sequence[Value]] = {name: [null] * count for name, null in self.nulls.items()}
        conditions = {FPS.name: [fps] * count, **empty, **conditions, **self._encoded_prompts()}
        frames, height, width = latent_size
        padded = frames_to_patch(frames, self.spec.patch_temporal), height, width
        batch = empty_pack(self.spec, padded, count, local_device(), conditions)
        drawn = generate_each(network, self.objective, batch, self.spec, self.sampling, negative=empty)
        return clip_grid(self._decoder(torch.stack(drawn)[:, :, :frames]), captions, columns) if lay_out else []

    def redraw(self, network: Callable[..., Tensor], batch: PackedBatch, *, lay_out: bool = True) -> list["Image"]:
        """Generate samples with the conditions, references and sizes of the samples of a full pack; see `draw`.

        The samples of the pack are in the first row, the generated ones in the second; those with another size than the
        first sample are left out.
        """
        batch = batch.to(local_device())
        empty = {name: [null] * batch.layout.num_samples for name, null in self.nulls.items()}
        # The noise levels may depend on the size; those of the first sample are those of all that are shown.
        objective = self.objective.at_size(math.prod(batch.grids[0]), batch.latents_TC.shape[1])
        drawn = generate_each(network, objective, batch, self.spec, self.sampling, negative=empty)
        if not lay_out:
            return []
        held_out = batch.unpatchified(batch.latents_TC, *self.spec.patch)
        shown = [i for i, x in enumerate(held_out) if x.shape == held_out[0].shape][:MOST_SAMPLES]
        first = batch.latents_TC[: math.prod(batch.grids[0])]
        frames = num_frames(first, batch.grids[0], *self.spec.patch)
        rows = torch.stack([row[i][:, :frames].float() for row in (held_out, drawn) for i in shown])
        captions = ["held out"] * len(shown) + ["drawn"] * len(shown)
        return clip_grid(self._decoder(rows), captions, len(shown))

    def _encoded_prompts(self) -> dict[str, list[Tensor]]:
        """Return the embeddings of the prompts, repeated `samples_per_class` times; encoders are loaded only once."""
        if not self.sampling.prompts:
            return {}
        if self._texts is None:
            from dit.encoders.text import TextEncoders, texts_as_conditions

            assert self.text_encoder is not None
            embeddings = TextEncoders(self.text_encoder).encode(self.sampling.prompts)
            self._texts = texts_as_conditions(embeddings, self.spec.conditions, self.max_text_tokens)
        return {name: values * self.sampling.samples_per_class for name, values in self._texts.items()}

    def write(
        self,
        network: Callable[..., Tensor],
        latent_size: tuple[int, int, int],
        fps: float,
        folder: Optional[Path],
        averaged: Optional[Callable[[], AbstractContextManager[None]]] = None,
        held_out: Optional[PackedBatch] = None,
    ) -> dict[str, Path]:
        """Draw and write the grid of the averaged weights (`ema.png`), the raw weights (`raw.png`), or both.

        Returns the files by their names in the log. A grid of several frames is a GIF of at most `MAX_GIF_FPS` frames
        per second.

        Args:
            averaged: context in which the model has its averaged weights; None if there is no average.
            held_out: pack to redraw, see `redraw`, with its frames per second; None to draw classes or prompts.
        """
        if held_out is not None and (rates := held_out.conditions.get(FPS.name)) is not None:
            fps = float(rates.values[0])  # the first sample determines the size
        paths = {}
        names = {"raw": "samples"} if averaged is None else {"ema": "samples"}
        if self.sampling.raw_weights:
            names.setdefault("raw", "samples_raw")
        for weights, name in names.items():
            with averaged() if averaged is not None and weights == "ema" else nullcontext():
                lay_out = folder is not None
                if held_out is None:
                    frames = self.draw(network, latent_size, fps, lay_out=lay_out)
                else:
                    frames = self.redraw(network, held_out, lay_out=lay_out)
            if folder is not None:
                path = make_folder(folder) / f"{weights}.png"
                if len(frames) == 1:
                    paths[name] = save_png(frames[0], path)
                else:
                    paths[name] = save_gif(frames, path.with_suffix(".gif"), min(fps, MAX_GIF_FPS))
        return paths
