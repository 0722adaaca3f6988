"""Networks that an objective adds to a model for training; samples and exports do not use them."""

from dataclasses import dataclass
from typing import Optional

DISCRIMINATOR = "discriminator."
PREFIXES = ("uncertainty.", DISCRIMINATOR)
"""Name prefixes of the parameters of these networks."""


@dataclass(frozen=True)
class PatchGAN:
    """Sizes of a discriminator of patches.

    Attributes:
        num_layers: convolutions that halve the sides of a picture.
        hidden_size: channels of the first one.
    """

    num_layers: int
    hidden_size: int

    @property
    def smallest_side(self) -> int:
        """Smallest height and width of a picture in pixels."""
        return 3 * 2**self.num_layers


@dataclass(frozen=True)
class AuxiliaryNetworks:
    """The networks that an objective adds.

    Attributes:
        uncertainty: whether there is a head u(sigma), see `dit.layers.uncertainty`.
        discriminator: sizes of the discriminator of an autoencoder's reconstructions; None without one.
        start_step: completed steps before the discriminator has a gradient.
    """

    uncertainty: bool = False
    discriminator: Optional[PatchGAN] = None
    start_step: int = 0

    def idle(self, step: int) -> tuple[str, ...]:
        """Return the name prefixes of the parameters without a gradient after `step` completed steps."""
        return (DISCRIMINATOR,) if step < self.start_step else ()


NO_NETWORKS = AuxiliaryNetworks()
