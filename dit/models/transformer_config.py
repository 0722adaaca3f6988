"""Settings common to all transformer backbones, and their checks."""

import math
from abc import abstractmethod
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Literal, Optional, Self

from dit.errors import ConfigError
from dit.models.base import ModelConfig, TransformerSizes
from dit.models.lora_config import LoRAConfig
from dit.ranges import POSITIVE, WIDTH, Range, check_unused, divisors, ranged

if TYPE_CHECKING:
    from dit.layers.positions import RotaryPositions


WIDTHS = (
    *("hidden_size", "num_attention_heads", "num_query_groups", "num_cross_attention_heads"),
    *("ffn_hidden_size", "moe_ffn_hidden_size"),
)
"""Settings that grow with the width; `model.base_width` divides them by the same factor."""

Activation = Literal["gelu_tanh", "swiglu"]
"""Activations of MLPs, see `dit.layers.mlp.MLPS`."""
Positions = Literal["sincos_2d", "sincos_3d", "rope_3d"]
"""Position embeddings that are computed from the patch indices."""
KnownPositions = Literal["none", "sincos_2d", "sincos_3d", "rope_3d", "learned_3d"]
"""Position embeddings of all backbones; a subclass narrows the choice."""


@dataclass(kw_only=True)
class RotarySettings:
    """Settings of `position_embedding="rope_3d"`.

    Attributes:
        rope_theta: ratio of the shortest to the longest wavelength of `rope_3d`.
        rope_scaling: extend by increasing theta (`ntk`) or dividing the index (`linear`).
        rope_factors: extension along t, h and w; `[2,1,1]` for clips of twice the length.
    """

    rope_theta: float = ranged(10000.0, Range(1, 10**12, open_low=True))
    rope_scaling: Literal["ntk", "linear"] = "ntk"
    rope_factors: Optional[list[float]] = ranged(None, Range(0, 10**6, open_low=True))


@dataclass(kw_only=True)
class TransformerModelConfig(ModelConfig, RotarySettings):
    """Sizes of every transformer backbone.

    A subclass adds `num_layers` and its own sizes, and annotates the choices of `position_embedding`.

    Attributes:
        hidden_size: width of the tokens, first level (Imagen's UNets), or conditions (DDPM UNet).
        num_attention_heads: attention heads (of SANA, linear ones); of a UNet with `head_size`, if that is None.
        ffn_hidden_size: inner width of the MLP, after its gate; 4 * hidden_size if None.
        out_channels: predicted channels; `in_channels` if None, twice that for a learned variance.
        layernorm_epsilon: epsilon of all norms.
        position_embedding: sine-cosine, rotary (`rope_3d`), or learned vectors for t, h and w in every layer
            (`learned_3d`).
        time_scale: factor of the time before its sinusoid.
        lora: train only adapters of the model in `checkpoint.start_from`.
        base_width: `hidden_size` of a smaller model whose learning rate suits this one (mu-parametrisation).
    """

    hidden_size: int = ranged(384, WIDTH)
    num_attention_heads: int = ranged(6, WIDTH)
    ffn_hidden_size: Optional[int] = ranged(None, WIDTH)
    out_channels: Optional[int] = ranged(None, WIDTH)
    layernorm_epsilon: float = ranged(1e-6, POSITIVE)
    position_embedding: KnownPositions = "sincos_2d"
    time_scale: float = ranged(1000.0, POSITIVE)
    lora: Optional[LoRAConfig] = None
    base_width: Optional[int] = ranged(None, WIDTH)

    @property
    def orders_frames(self) -> bool:
        axes = getattr(self, "rope_axes", None) if self.position_embedding == "rope_3d" else None
        return self.position_embedding != "sincos_2d" and (axes is None or axes[0] > 0)

    def at_base_width(self) -> Optional[Self]:
        if self.base_width is None:
            return None
        sizes: dict[str, int] = {}
        for name in WIDTHS:
            size = getattr(self, name, None)
            if size is None:
                continue
            sizes[name], rest = divmod(size * self.base_width, self.hidden_size)
            if rest or not sizes[name]:
                raise ConfigError(
                    f"model.base_width={self.base_width} is {self.base_width / self.hidden_size:.4g} times "
                    f"model.hidden_size={self.hidden_size}, which gives no whole number for model.{name}={size}; use "
                    f"a multiple of {self.hidden_size // math.gcd(self.hidden_size, size)}"
                )
        return replace(self, base_width=None, **sizes)  # type: ignore[arg-type]

    @property
    @abstractmethod
    def num_layers(self) -> int:
        """Number of blocks of all kinds."""

    @property
    def ffn_size(self) -> int:
        """Inner width of the MLP."""
        return 4 * self.hidden_size if self.ffn_hidden_size is None else self.ffn_hidden_size

    @property
    def head_size(self) -> int:
        return self.hidden_size // self.num_attention_heads

    @property
    def has_temporal(self) -> bool:
        """Whether a layer has temporal attention, which is rotary for any kind of positions."""
        return False

    @property
    def position_axes(self) -> tuple[str, ...]:
        """Names of the axes of rotary positions."""
        return "t", "h", "w"

    @property
    def output_features(self) -> int:
        return self.token_channels // self.in_channels * (self.out_channels or self.in_channels)

    def validate(self) -> None:
        super().validate()
        if self.lora is not None and self.base_width is not None:
            raise ConfigError(
                f"model.base_width={self.base_width} scales the training of all weights, but model.lora trains only "
                "adapters; use model.base_width=null"
            )
        check_heads("num_attention_heads", self.num_attention_heads, self.hidden_size)
        base = self.at_base_width()
        if base is not None:
            base.validate()
        self._check_positions()

    def _check_positions(self) -> None:
        """Check the kind of positions, the sizes for it, and that every changed rotary setting has an effect."""
        from dit.layers.positions import check_size

        kind = self.position_embedding
        if kind != "rope_3d" and not self.has_temporal:
            names = [field.name for field in fields(RotarySettings)] + ["rope_axes"] * hasattr(self, "rope_axes")
            check_unused("model", self, names, f"with model.position_embedding={kind!r}", "use 'rope_3d'")
        elif set(self.rope_factors or [1.0]) == {1.0}:
            check_unused("model", self, ["rope_scaling"], "without model.rope_factors", "set model.rope_factors")
        self.rotary()
        if kind in ("sincos_2d", "sincos_3d"):
            check_size(self.hidden_size, kind)

    def rotary(self, *, time_only: bool = False) -> "Optional[RotaryPositions]":
        """Return the validated rotary embedding of these settings; None for other positions.

        Args:
            time_only: whether all features of a head rotate with t, for temporal attention.
        """
        from dit.layers.positions import RotaryPositions

        if self.position_embedding != "rope_3d" and not time_only:
            return None
        axes: Optional[list[int]] = getattr(self, "rope_axes", None)  # features of each of `position_axes`
        factors = (1.0, 1.0, 1.0) if self.rope_factors is None else tuple(self.rope_factors)
        return RotaryPositions(
            self.head_size, self.rope_theta, self.rope_scaling, factors, time_only, axes, self.position_axes
        )

    def megatron_sizes(self) -> TransformerSizes:
        return TransformerSizes(
            num_layers=self.num_layers,
            hidden_size=self.hidden_size,
            num_attention_heads=self.num_attention_heads,
            num_query_groups=getattr(self, "num_query_groups", None),
            ffn_hidden_size=self.ffn_size,
            add_bias_linear=getattr(self, "add_bias", True),
            layernorm_epsilon=self.layernorm_epsilon,
            qk_layernorm=getattr(self, "qk_layernorm", False),
        )


def check_heads(name: str, heads: int, hidden_size: int) -> None:
    """Check that a number of heads divides the width."""
    if hidden_size % heads:
        fits = [n for n in divisors(hidden_size) if n <= 64]
        raise ConfigError(
            f"model.hidden_size={hidden_size} is not a multiple of model.{name}={heads}; use one of {fits} heads"
        )


def check_query_groups(heads: int, groups: Optional[int]) -> None:
    """Check that key and value heads divide the query heads; None is one per query head."""
    if groups is not None and heads % groups:
        raise ConfigError(
            f"model.num_attention_heads={heads} is not a multiple of model.num_query_groups={groups}; use one of "
            f"{divisors(heads)} groups, or None for one per head"
        )
