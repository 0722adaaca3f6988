"""Start a model that reads more than the model of the stored weights: a control picture, or time intervals (MeanFlow).

The weights of an added input are zeros, so the first prediction is that of the stored model:

    embed.linear.weight              | stored: inputs of the latent | zeros: inputs of the control picture |
    conditioner.interval.linear_1    weights of conditioner.time.linear_1
    conditioner.interval.linear_2    zeros

Source of the control picture: diffusers, `examples/flux-control/train_control_flux.py`.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any, Optional

from torch import Tensor

from dit.boxes import Box
from dit.checkpoint.state_files import Weights
from dit.errors import ConfigError
from dit.models.base import ModelConfig
from dit.parallel.build import parameter_shapes

LINEAR, CONVOLUTION = "embed.linear", "conv_in"
"""The layer with the inputs of the control picture, in transformers and in UNets."""
INTERVAL, TIME = "conditioner.interval.", "conditioner.time."
"""Name prefixes of the embeddings of time intervals and of times, which have the same sizes."""
INTERVAL_OUTPUT = f"{INTERVAL}linear_2"


class WithAddedInputs:
    """Stored weights, with values for parameters that are new or larger in the model that starts.

    Args:
        shapes: shape of each added or larger parameter.
        sources: for each of them, the stored parameter that its values are copied from, or None; the rest is zeros.
        note: description of the added inputs.
    """

    def __init__(
        self, stored: Weights, shapes: Mapping[str, tuple[int, ...]], sources: Mapping[str, Optional[str]], note: str
    ) -> None:
        self.stored, self._sources, self._note = stored, sources, note
        self.shapes = {**stored.shapes, **shapes}

    def read(self, name: str, shape: Sequence[int], views: Iterable[tuple[Box, Tensor]]) -> None:
        if name not in self._sources:
            self.stored.read(name, shape, views)
            return
        source, views = self._sources[name], list(views)
        for _, target in views:
            target.zero_()
        if source is not None:
            stored = Box.of(self.stored.shapes[source])
            overlaps = ((box.overlap(stored), box, target) for box, target in views)
            parts = [(part, target[part.slices_in(box)]) for part, box, target in overlaps if part is not None]
            self.stored.read(source, stored.sizes, parts)

    def __str__(self) -> str:
        return f"{self.stored}, {self._note}"


def with_added_inputs(weights: Weights, model: ModelConfig) -> Weights:
    """Return weights for a model, with values for inputs that it reads and that the weights lack.

    Adapters that cannot change the zeros of an added input are a `ConfigError`.
    """
    return _with_interval(_with_control(weights, model), model)


def _with_control(weights: Weights, model: ModelConfig) -> Weights:
    if getattr(model, "control_channels", None) is None:
        return weights
    full: Any = model.without_adapters()
    shapes = parameter_shapes(full)
    layer = LINEAR if f"{LINEAR}.weight" in shapes else CONVOLUTION
    name = f"{layer}.weight"
    if weights.shapes.get(name) != parameter_shapes(replace(full, control_channels=None))[name]:
        return weights  # they have a control picture; if it has other channels, the check of all shapes refuses them
    _check_adapters(model, "model.control_channels reads a picture", layer, layer)
    return WithAddedInputs(weights, {name: shapes[name]}, {name: name}, f"zeros for the control picture in {name}")


def _with_interval(weights: Weights, model: ModelConfig) -> Weights:
    is_stored = any(name.startswith(INTERVAL) for name in weights.shapes)
    if is_stored or not getattr(model, "interval_conditioning", False):
        return weights
    _check_adapters(model, "model.interval_conditioning reads time intervals", INTERVAL_OUTPUT, f"{INTERVAL}*")
    added = {name.replace(TIME, INTERVAL): name for name in weights.shapes if name.startswith(TIME)}
    shapes = {name: weights.shapes[source] for name, source in added.items()}
    sources = {name: None if name.startswith(INTERVAL_OUTPUT) else source for name, source in added.items()}
    return WithAddedInputs(weights, shapes, sources, "an embedding of time intervals that starts at zero")


def _check_adapters(model: ModelConfig, reads: str, layer: str, pattern: str) -> None:
    """Check that a model trains the layer whose weights are zeros; `pattern` is a target of adapters for it."""
    if model.adapters is None:
        return
    targets, cure = model.adapters.targets, "train all weights (the recipe finetune)"
    if layer != CONVOLUTION:  # which has no adapters
        if any(fnmatchcase(layer, target) for target in targets):
            return
        cure = f"add {pattern!r} to model.lora.targets={targets}, or {cure}"
    raise ConfigError(
        f"{reads} that the model in checkpoint.start_from does not read, so its weights in {layer} are zeros, which no "
        f"adapter changes; {cure}"
    )
