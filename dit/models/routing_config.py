"""Settings of token routing."""

from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import Literal, Optional

from dit.errors import ConfigError
from dit.layers.routing import expert_capacity
from dit.models.base import Supports
from dit.models.transformer_config import TransformerModelConfig
from dit.ranges import LAYERS_OR_ZERO, SHARE, SHARE_BELOW_1, check_ranges, check_unused, ranged


@dataclass(kw_only=True)
class RoutingConfig:
    """Token routing: in training, a share of the tokens of every sample skips the middle layers.

    Validation and sampling use all tokens.

    Attributes:
        share: share of tokens that skip the middle; with 0, `path_dropout` still applies.
        first_layers, last_layers: layers before and after the middle, which see all tokens.
        rejoin: skipping tokens stay `unchanged`, or a linear layer fuses input and output of the middle (`fused`); the
            output of skipping tokens is a learned vector.
        path_dropout: probability that the learned vector replaces the output for all tokens of a sample.

    Source: `unchanged` is TREAD, Krause et al. 2025, arXiv:2501.04765; `fused` is SPRINT, Park et al. 2025,
    arXiv:2510.21986.
    """

    share: float = ranged(0.5, SHARE_BELOW_1)
    first_layers: int = ranged(2, LAYERS_OR_ZERO)
    last_layers: int = ranged(3, LAYERS_OR_ZERO)
    rejoin: Literal["unchanged", "fused"] = "unchanged"
    path_dropout: float = ranged(0.0, SHARE)

    def middle(self, num_layers: int) -> range:
        """Return the layers that see the remaining tokens."""
        return range(self.first_layers, num_layers - self.last_layers)

    def validate(self, num_layers: int) -> None:
        check_ranges("model.routing", self)
        if self.rejoin == "unchanged":
            check_unused("model.routing", self, ["path_dropout"], "with rejoin=unchanged", "use rejoin=fused")
        if not self.middle(num_layers):
            raise ConfigError(
                f"model.routing: first_layers={self.first_layers} and last_layers={self.last_layers} leave no middle "
                f"of num_layers={num_layers}; their sum must be below it"
            )


@dataclass(kw_only=True)
class TokenRouted(TransformerModelConfig):
    """A transformer whose middle layers may see only some of the tokens in training.

    Attributes:
        routing: which tokens skip which layers; None if all layers see all tokens.
    """

    routing: Optional[RoutingConfig] = None

    def validate(self) -> None:
        super().validate()
        if self.routing is not None:
            self.routing.validate(self.num_layers)

    @property
    def middle_layers(self) -> range:
        """Layers that see some of the tokens in training; empty without routing."""
        return range(0) if self.routing is None else self.routing.middle(self.num_layers)

    @property
    def draws_in_training(self) -> bool:
        return self.routing is not None

    @property
    def supports(self) -> Supports:
        return replace(super().supports, fixed_packs=self.routing is None)

    @property
    def uncut_layers(self) -> range:
        is_fused = self.routing is not None and self.routing.rejoin == "fused"
        return self.middle_layers if is_fused else range(0)

    def middle_tokens(self, length: int) -> int:
        return length if self.routing is None else expert_capacity(length, 1, 1 - self.routing.share)

    def layer_kind(self, layer: int) -> Hashable:
        return layer in self.middle_layers
