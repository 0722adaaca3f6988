"""A model with a control picture starts from weights of the same model without one.

    embed.linear.weight    | stored: inputs of the latent | zeros: inputs of the control picture |

The first prediction is that of the stored weights.

Source: diffusers, `examples/flux-control/train_control_flux.py`.
"""

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

from torch import Tensor

from dit.boxes import Box
from dit.checkpoint.state_files import Weights
from dit.errors import ConfigError
from dit.models.base import ModelConfig
from dit.parallel.build import parameter_shapes

LINEAR, CONVOLUTION = "embed.linear", "conv_in"
"""The layer with the inputs of the control picture, in transformers and in UNets."""


class WithoutControl:
    """Weights whose first layer lacks the inputs of the control picture."""

    def __init__(self, weights: Weights, name: str, shape: tuple[int, ...]) -> None:
        self.weights, self._name = weights, name
        self.shapes = {**weights.shapes, name: shape}

    def read(self, name: str, shape: Sequence[int], views: Iterable[tuple[Box, Tensor]]) -> None:
        """Copy boxes of a parameter into memory, see `StateReader.read`."""
        if name == self._name:
            stored = Box.of(self.weights.shapes[name])
            shape, views = stored.sizes, _parts(stored, views)
        self.weights.read(name, shape, views)

    def __str__(self) -> str:
        return f"{self.weights}, zeros for the control picture in {self._name}"


def _parts(stored: Box, views: Iterable[tuple[Box, Tensor]]) -> list[tuple[Box, Tensor]]:
    """Fill targets with zeros, and return their parts in a box."""
    parts = []
    for box, target in views:
        target.zero_()
        if (part := box.overlap(stored)) is not None:
            parts.append((part, target[part.slices_in(box)]))
    return parts


def with_control(weights: Weights, model: ModelConfig) -> Weights:
    """Return weights for a model, with zeros for a control picture that it reads and that they lack.

    Raises:
        ConfigError: the model trains only adapters, and none of them changes these zeros.
    """
    if getattr(model, "control_channels", None) is None:
        return weights
    shapes = parameter_shapes(model.without_adapters())
    layer = LINEAR if f"{LINEAR}.weight" in shapes else CONVOLUTION
    name = f"{layer}.weight"
    if weights.shapes.get(name) == shapes[name]:
        return weights
    targets = [] if model.adapters is None or layer == CONVOLUTION else model.adapters.targets
    if model.adapters is not None and not any(fnmatchcase(layer, pattern) for pattern in targets):
        cure = (
            f"add {layer!r} to model.lora.targets={targets}" if targets else "train all weights (the recipe finetune)"
        )
        raise ConfigError(
            f"model.control_channels reads a picture that the model in checkpoint.start_from does not read, so its "
            f"weights in {layer} are zeros, which no adapter changes; {cure}"
        )
    return WithoutControl(weights, name, shapes[name])
