"""Settings of low-rank adapters (LoRA)."""

from dataclasses import dataclass, field
from typing import Optional

from dit.errors import ConfigError
from dit.ranges import POSITIVE, WIDTH, check_ranges

BLOCK_LINEARS = "layers.*.linear_*"
"""The linear layers of attention and MLP, experts included, in every block of every transformer, no modulations."""
UNET_LINEARS = "*.transformer_blocks.*"
"""The linear layers of attention and MLP in every transformer of a latent-diffusion UNet."""


@dataclass(kw_only=True)
class LoRAConfig:
    """Low-rank adapters: y = W x + (alpha / rank) B A x; only A and B are trained.

    Attributes:
        rank: rows of A and columns of B.
        alpha: sets the scale alpha / rank of the adapters' output; the rank if None, so that the scale is 1.
        targets: patterns of the names of the linear layers that get an adapter; `*` stands for any text. The default is
            attention and MLP of every block; `layers.*` adds the modulations, and in a UNet `*.attentions.*` the
            projections around its transformers.

    Source: Hu et al. 2021, arXiv:2106.09685, section 4.1.
    """

    rank: int = 16
    alpha: Optional[float] = None
    targets: list[str] = field(default_factory=lambda: [BLOCK_LINEARS, UNET_LINEARS])

    @property
    def scale(self) -> float:
        """Factor on the output of B A."""
        return 1.0 if self.alpha is None else self.alpha / self.rank

    def validate(self) -> None:
        """Check every field by itself."""
        check_ranges("model.lora", self, {"rank": WIDTH, "alpha": POSITIVE})
        if not self.targets:
            raise ConfigError(f"model.lora.targets is empty; name linear layers, such as [{BLOCK_LINEARS}]")
