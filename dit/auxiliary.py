"""Networks that an objective adds to a model for training; samples and exports do not use them."""

from dataclasses import dataclass
from typing import Optional

from dit.ranges import COUNT_OR_ZERO, LAYERS, WIDTH, ranged

DISCRIMINATOR, ALIGNMENT = "discriminator.", "alignment."
PREFIXES = ("uncertainty.", DISCRIMINATOR, ALIGNMENT)
"""Name prefixes of the parameters of these networks."""
MAX_MULTIPLE = 8
PASSES = 7
"""Products per weight of a discriminator in a training step: D(x), D(y), dD(y)/dy, and two each for D(x) and D(y) in
backward."""


@dataclass(frozen=True, kw_only=True)
class PatchGAN:
    """Sizes of a discriminator of patches.

    Attributes:
        num_layers: convolutions that halve the sides of a picture.
        hidden_size: channels of the first one.
    """

    num_layers: int = ranged(3, LAYERS)
    hidden_size: int = ranged(64, WIDTH)

    def convolutions(self, channels: int) -> list[tuple[int, int, int]]:
        """Return input channels, output channels and stride of each 4 x 4 convolution."""
        widths = [self.hidden_size * min(2**i, MAX_MULTIPLE) for i in range(self.num_layers + 1)]
        strides = [2] * self.num_layers + [1, 1]
        return list(zip([channels, *widths], [*widths, 1], strides, strict=True))

    def training_flops(self, channels: int, height: int, width: int) -> int:
        """Count the operations of a training step for a picture, two per multiply-add."""
        total = 0
        for inputs, outputs, stride in self.convolutions(channels):
            height, width = (height - 2) // stride + 1, (width - 2) // stride + 1
            total += 2 * 16 * inputs * outputs * height * width
        return PASSES * total

    @property
    def smallest_side(self) -> int:
        """Smallest height and width of a picture in pixels."""
        return 3 * 2**self.num_layers


@dataclass(frozen=True, kw_only=True)
class Projection:
    """Sizes of the projection of hidden states to the features of a teacher, see `dit.layers.heads`.

    Args:
        layer: number of layers before the projection.
        features: width of the teacher's features.
        hidden_size: inner width of the projection.
        until_step: completed steps after which alignment ends.
    """

    layer: int = ranged(8, LAYERS)
    features: int = ranged(768, WIDTH)
    hidden_size: int = ranged(2048, WIDTH)
    until_step: Optional[int] = ranged(None, COUNT_OR_ZERO)


@dataclass(frozen=True)
class AuxiliaryNetworks:
    """The networks that an objective adds.

    Attributes:
        uncertainty: whether there is a head u(sigma), see `dit.layers.uncertainty`.
        projection: sizes of the projection of hidden states; None without one.
        discriminator: sizes of the discriminator of an autoencoder's reconstructions; None without one.
        start_step: completed steps before the discriminator has a gradient.
        lr_factor: learning rate of the discriminator, relative to that of the model.
        extra_passes: forward passes without gradients in a training step, in addition to that of the loss.
    """

    uncertainty: bool = False
    projection: Optional[Projection] = None
    discriminator: Optional[PatchGAN] = None
    start_step: int = 0
    lr_factor: float = 1.0
    extra_passes: int = 0

    @property
    def changes(self) -> tuple[Optional[int], ...]:
        """Completed steps after which terms of the loss start or end; None for never."""
        return self.start_step, None if self.projection is None else self.projection.until_step

    def idle(self, step: int) -> tuple[str, ...]:
        """Return the name prefixes of the parameters without a gradient after `step` completed steps."""
        _, until = self.changes
        ended = until is not None and step >= until
        return (*([DISCRIMINATOR] if step < self.start_step else []), *([ALIGNMENT] if ended else []))


NO_NETWORKS = AuxiliaryNetworks()
