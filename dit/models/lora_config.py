"""Settings of low-rank adapters (LoRA)."""

from dataclasses import dataclass, field
from typing import Optional

from dit.errors import ConfigError
from dit.ranges import POSITIVE, WIDTH, check_ranges, ranged

BLOCK_LINEARS = "layers.*.linear_*"
"""Linear layers of attention, MLP and experts in the blocks of all transformers, without modulations."""
UNET_LINEARS = "*.transformer_blocks.*"
"""Linear layers of attention and MLP in the transformers of a latent-diffusion UNet."""


@dataclass(kw_only=True)
class LoRAConfig:
    """Low-rank adapters: y = W x + (alpha / rank) B A x, where only A and B are trained.

    Attributes:
        rank, alpha: rank of the adapters, and numerator of the scale alpha / rank; None for a scale of 1.
        targets: name patterns of the linear layers with an adapter; `layers.*` also selects modulations.

    Source: Hu et al. 2021, arXiv:2106.09685, section 4.1.
    """

    rank: int = ranged(16, WIDTH)
    alpha: Optional[float] = ranged(None, POSITIVE)
    targets: list[str] = field(default_factory=lambda: [BLOCK_LINEARS, UNET_LINEARS])

    @property
    def scale(self) -> float:
        """Factor of the output of B A."""
        return 1.0 if self.alpha is None else self.alpha / self.rank

    def validate(self) -> None:
        check_ranges("model.lora", self)
        if not self.targets:
            raise ConfigError(f"model.lora.targets is empty; name linear layers, such as [{BLOCK_LINEARS}]")
