"""Settings of the spatial-temporal DiT."""

from dataclasses import dataclass, field
from typing import Optional, get_args

from dit.context_parallel.segments import AttentionKind
from dit.errors import ConfigError
from dit.models.base import Supports
from dit.models.cross_config import CrossAttentionModelConfig
from dit.models.transformer_config import Positions
from dit.ranges import POSITIVE, check_unused, ranged


@dataclass(kw_only=True)
class STDiTConfig(CrossAttentionModelConfig):
    """DiT with adaLN-single and full, spatial (within a frame) or temporal (at one position of all frames) attention.

    Attributes:
        layer_pattern: self-attentions of the layers, repeated; `["spatial+full+temporal"]` for all in each layer,
            `["full"]` for PixArt-alpha.
        add_bias: use biases in the linear layers of the blocks.
        position_span: positions per side at any resolution; None for patch indices.
    """

    supports = Supports(aligned=True, fixed_packs=True)

    in_channels: int = 4
    layer_pattern: list[str] = field(default_factory=lambda: ["spatial", "temporal"])
    add_bias: bool = True
    position_embedding: Positions = "sincos_2d"
    position_span: Optional[float] = ranged(None, POSITIVE)

    def kinds(self, layer: int) -> tuple[AttentionKind, ...]:
        return tuple(self.layer_pattern[layer % len(self.layer_pattern)].split("+"))  # type: ignore[arg-type]

    @property
    def has_temporal(self) -> bool:
        return any("temporal" in pattern for pattern in self.layer_pattern)

    @property
    def orders_frames(self) -> bool:
        return self.has_temporal or super().orders_frames

    @property
    def has_segments(self) -> bool:
        """True if a layer has attention inside frames or columns."""
        return set(self.layer_pattern) != {"full"}

    @property
    def takes_references(self) -> bool:
        return not self.has_segments  # frames and positions of a grid have no place for other tokens

    def validate(self) -> None:
        super().validate()
        self._check_pattern()
        if self.has_temporal:
            self.rotary(time_only=True)
        if self.position_embedding != "rope_3d" and self.rope_factors and self.rope_factors[1:] != [1.0, 1.0]:
            raise ConfigError(
                f"model.rope_factors={self.rope_factors} has no effect along h and w with "
                f"model.position_embedding={self.position_embedding!r}, because temporal attention rotates only with "
                "t; use 'rope_3d', or 1 for h and w"
            )
        if self.position_embedding == "rope_3d":
            where, cure = "with model.position_embedding='rope_3d'", "use 'sincos_2d' or 'sincos_3d'"
            check_unused("model", self, ["position_span"], where, cure)

    def _check_pattern(self) -> None:
        choices = get_args(AttentionKind)
        if not self.layer_pattern or self.num_layers % len(self.layer_pattern):
            raise ConfigError(
                f"model.num_layers={self.num_layers} is not a multiple of the {len(self.layer_pattern)} layers of "
                f"model.layer_pattern={self.layer_pattern}; change one of them"
            )
        layers = [self.kinds(i) for i in range(len(self.layer_pattern))]
        for kinds in layers:
            if len(set(kinds)) != len(kinds) or not set(kinds) <= set(choices):
                raise ConfigError(
                    f"model.layer_pattern has the layer {'+'.join(kinds)!r}; join some of {', '.join(choices)} by '+', "
                    "each at most once"
                )
        if len({len(kinds) for kinds in layers}) > 1:
            raise ConfigError(
                f"model.layer_pattern={self.layer_pattern} has layers with {sorted({len(k) for k in layers})} "
                "self-attentions, but all layers share one modulation; use the same number in each layer"
            )

    def layer_kind(self, layer: int) -> tuple[AttentionKind, ...]:
        return self.kinds(layer)
