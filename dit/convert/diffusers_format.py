"""What is common to the model classes of diffusers: settings on both sides, the rules between the weights."""

import importlib
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Optional, TypeVar

from torch import Tensor

from dit.convert import DIFFUSERS
from dit.convert.rules import RuleBook, Shape
from dit.errors import ConfigError, UserError
from dit.models.base import ModelConfig
from dit.objectives.base import Objective
from dit.ranges import MOST_POSITIONS

VERSION = "0.38.0"
"""The release of diffusers that exports are compared with."""

LatentSize = tuple[int, int, int]
Model = TypeVar("Model", bound=ModelConfig)


@dataclass(frozen=True)
class TrainedModel:
    """A trained model in our words: another code base's, or a run's own.

    Attributes:
        model: its sizes.
        objective: what it was trained for; as published, where the files do not say.
        latent_size: (T, H, W) of the latents it was trained on.
        sampling: how its authors sample, by the names of `SamplingConfig`.
        class_names: name of each class; None where the files do not say.
        text_encoder: name of the encoder of its texts; None for no text, or where the files do not say.
        fps: frames per second of its training data; None where the files do not say.
        notes: what our network does otherwise, in a sentence each.
    """

    model: ModelConfig
    objective: Objective
    latent_size: LatentSize
    sampling: Mapping[str, Any]
    class_names: Optional[list[str]] = None
    text_encoder: Optional[str] = None
    fps: Optional[float] = None
    notes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        if math.prod(self.latent_size) > MOST_POSITIONS:
            raise ConfigError(
                f"latents of {' x '.join(map(str, self.latent_size))} (frames x height x width) have more than "
                f"{MOST_POSITIONS:,} positions; correct sample_size in config.json"
            )


NULLS = ("text.null", "conditioner.pooled.null")
"""Our learned parameters for a dropped text."""


def learned_nulls(shapes: Mapping[str, Shape]) -> dict[str, str]:
    """Return the parameters for a dropped text, which no class of diffusers has, and why they stay behind."""
    why = "their pipelines embed the empty text for no text; train with model.null_text=empty for the same samples"
    return {name: why for name in NULLS if name in shapes}


def square_side(class_name: str, latent_size: LatentSize, multiple: int) -> tuple[int, list[str]]:
    """Return the `sample_size` of a class that has one for both sides: that of a square of the same area; and a note.

    Args:
        multiple: of the side.

    Raises:
        ConfigError: the model was trained on clips.
    """
    frames, height, width = latent_size
    if frames != 1:
        raise ConfigError(f"latents of {frames} x {height} x {width}: {class_name} draws pictures and no clips")
    if height == width:
        return height, []
    side = max(1, math.isqrt(height * width) // multiple) * multiple
    return side, [f"sample_size={side} is the square of the area of {height} x {width}, the largest sample"]


class DiffusersFormat(ABC, Generic[Model]):
    """One model class of diffusers.

    Attributes:
        class_name: in `config.json`.
        aliases: older names, read where `norm_type` says that this class is meant.
        config_class: our backbone's.
        defaults: every argument of their constructor with its default.
        fixed: those whose other values our backbone cannot follow.
        samples_by_class: the model takes noise, time and class alone.
        comfyui: ComfyUI's names of the linear layers, those of the original code, by patterns of diffusers' names.
        part: the model in diffusers' pipelines, and the prefix of its adapters there.
    """

    class_name: str
    aliases: tuple[str, ...] = ()
    config_class: type[Model]
    defaults: Mapping[str, Any]
    fixed: Mapping[str, Any]
    samples_by_class: bool = False
    comfyui: Sequence[tuple[str, str]] = ()
    part: str = "transformer"

    @abstractmethod
    def read(self, published: Mapping[str, Any]) -> TrainedModel:
        """Turn their published settings, complete and checked, into ours; `ConfigError` for what ours cannot follow."""

    @abstractmethod
    def write(self, model: Model, latent_size: LatentSize) -> tuple[dict[str, Any], list[str]]:
        """Turn our settings into those of theirs that differ from `defaults`, and notes on what differs in effect."""

    @abstractmethod
    def rules(self, model: Model, shapes: Mapping[str, Shape], latent_size: LatentSize) -> RuleBook:
        """Return the rules between the weights.

        Args:
            shapes: of our parameters, by global name.
        """

    def for_pipeline(self, trained: TrainedModel, weights: dict[str, Tensor]) -> tuple[TrainedModel, dict[str, Tensor]]:
        """Return a model and its weights, our names, in the sizes that diffusers' pipeline of the class takes."""
        return trained, weights

    def lora_pipeline(self, model: Model) -> Optional[str]:
        """Return the pipeline whose `load_lora_weights` reads adapters of the model; None if only peft reads them."""
        return None

    def comfyui_name(self, layer: str) -> Optional[str]:
        """Return ComfyUI's name of a linear layer of diffusers; None if it is not known."""
        matches = ((re.fullmatch(pattern, layer), name) for pattern, name in self.comfyui)
        return next((f"diffusion_model.{match.expand(name)}" for match, name in matches if match), None)

    def other_names(self, layer: str, model: Model) -> list[str]:
        """Return further names that files of adapters have for a layer of diffusers."""
        return []

    def reads(self, settings: Mapping[str, Any]) -> bool:
        """Tell whether a `config.json` is of this class."""
        name = settings.get("_class_name")
        return name == self.class_name or (
            name in self.aliases and settings.get("norm_type") == self.fixed.get("norm_type")
        )

    def read_settings(self, settings: Mapping[str, Any]) -> TrainedModel:
        """Read a `config.json`.

        Raises:
            ConfigError: a setting is unknown here, or has a value that our backbone cannot follow.
        """
        given = {name: value for name, value in settings.items() if not name.startswith("_")}
        # Old files still name arguments that are gone; unset they mean nothing.
        unknown = [f"{n}={v!r}" for n, v in given.items() if n not in self.defaults and v not in (None, False)]
        complete = {**self.defaults, **{n: v for n, v in given.items() if n in self.defaults}}
        wrong = [f"{n}={complete[n]!r} (only {v!r})" for n, v in self.fixed.items() if complete[n] != v]
        if unknown or wrong:
            faults = "; ".join(
                f"{what}: {', '.join(names)}" for what, names in (("unknown", unknown), ("unsupported", wrong)) if names
            )
            raise ConfigError(
                f"{self.class_name} with settings that {self.config_class.__name__} cannot follow; {faults}"
            )
        try:
            return self.read(complete)
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            if isinstance(error, UserError):
                raise
            raise ConfigError(
                f"config.json of {self.class_name} has a setting that cannot be used: {error!r:.200}; fetch it again"
            ) from error

    def write_settings(self, model: Model, latent_size: LatentSize) -> tuple[dict[str, Any], list[str]]:
        """Return a complete `config.json` and the notes of `write`."""
        changed, notes = self.write(model, latent_size)
        header = {"_class_name": self.class_name, "_diffusers_version": VERSION}
        return {**header, **self.defaults, **self.fixed, **changed}, notes


NEAREST: Mapping[str, str] = {
    "DiTCrossConfig": "modulation and gate around self-attention, cross-attention and MLP, from one projection in each "
    "block: Kandinsky5Transformer3DModel has such blocks and normalises every text token before them, "
    "CosmosTransformer3DModel modulates by the sinusoids of time and one shift, scale and gate for all blocks, "
    "PixArtTransformer2DModel does not modulate cross-attention",
    "DDPMUNetConfig": "norms over all channels, GELU and max-pooling; UNet2DModel normalises groups of channels, with "
    "SiLU and strided convolutions",
}
"""Why the networks of diffusers that come nearest to one of ours cannot hold its weights."""


def formats() -> list[DiffusersFormat[ModelConfig]]:
    """Return every format of the registry."""
    found: list[DiffusersFormat[ModelConfig]] = []
    for path in DIFFUSERS.values():
        module, _, name = path.partition(":")
        found.append(getattr(importlib.import_module(module), name)())
    return found


def format_of_settings(settings: Mapping[str, Any]) -> DiffusersFormat[ModelConfig]:
    """Return the format of a `config.json`.

    Raises:
        ConfigError: there is none.
    """
    for found in formats():
        if found.reads(settings):
            return found
    known = ", ".join(DIFFUSERS)
    raise ConfigError(
        f"_class_name={settings.get('_class_name')!r} is not a model that is converted; those are {known}"
    )


def format_of_model(model: ModelConfig) -> DiffusersFormat[ModelConfig]:
    """Return the format that one of our models can be written in.

    Raises:
        ConfigError: diffusers has no such model.
    """
    for found in formats():
        if type(model) is found.config_class:
            return found
    known = ", ".join(found.config_class.__name__ for found in formats())
    name = type(model).__name__
    why = f" ({NEAREST[name]})" if name in NEAREST else ""
    raise ConfigError(f"diffusers {VERSION} has no model like {name}{why}; those with one are {known}")


def export_line(model: ModelConfig) -> tuple[bool, str]:
    """Return whether diffusers has a class for a model of square pictures, and a line that names it or says why not."""
    try:
        form = format_of_model(model)
        side = model.patch_spatial << 12  # a multiple of every halving
        form.write_settings(model.without_adapters(), (1, side, side))
    except ConfigError as error:
        return False, f"no export to diffusers: {re.split(r' [(]|; ', str(error))[0]}"
    return True, f"diffusers' {form.class_name}"
