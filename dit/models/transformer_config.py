"""Settings that all transformer backbones share, and their checks."""

from abc import abstractmethod
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Literal, Optional, Self, get_type_hints

from dit.errors import ConfigError
from dit.models.base import ModelConfig, TransformerSizes
from dit.models.lora_config import LoRAConfig
from dit.ranges import (
    COUNT,
    EXPERTS,
    LAYERS,
    NOT_NEGATIVE,
    PATCHES,
    POSITIVE,
    SHARE,
    WIDTH,
    Range,
    check_choice,
    check_ranges,
    check_unused,
    whole,
)

if TYPE_CHECKING:
    from dit.layers.positions import RotaryPositions

CONDITION_FEATURES = 256
"""Width of the sinusoid of the time and of every other number a network is conditioned on."""


RANGES: dict[str, Range] = {
    **dict.fromkeys(("hidden_size", "num_attention_heads", "num_query_groups", "ffn_hidden_size"), WIDTH),
    **dict.fromkeys(("in_channels", "out_channels", "context_size", "pooled_size", "adaln_lora_rank"), WIDTH),
    **dict.fromkeys(("num_layers", "num_joint_layers", "num_single_layers"), LAYERS),
    **dict.fromkeys(("patch_spatial", "patch_temporal", "max_grid", "rope_axes"), PATCHES),
    **dict.fromkeys(("class_dropout", "context_dropout"), SHARE),
    **dict.fromkeys(("layernorm_epsilon", "time_scale", "position_span"), POSITIVE),
    **dict.fromkeys(("moe_ffn_hidden_size", "moe_top_k", "head_size"), WIDTH),
    **dict.fromkeys(("block_out_channels", "mid_out_channels", "norm_num_groups", "control_channels"), WIDTH),
    **dict.fromkeys(("transformer_layers", "mid_transformer_layers"), whole(0, 1000)),
    "layers_per_block": LAYERS,
    "rope_theta": Range(1, 10**12, open_low=True),
    "rope_factors": Range(0, 10**6, open_low=True),
    "num_classes": COUNT,
    "num_experts": EXPERTS,
    "moe_capacity_factor": POSITIVE,
    "moe_aux_loss_coeff": NOT_NEGATIVE,
    "time_frequency_shift": whole(0, 1),
    "guidance": NOT_NEGATIVE,
}
"""What the numbers of any backbone may be, by the names that backbones share."""

Positions = Literal["sincos_2d", "sincos_3d", "rope_3d"]
"""Positions of the backbones that take any that are computed from the indices."""
KnownPositions = Literal["sincos_2d", "sincos_3d", "rope_3d", "learned_3d"]
"""Those of any backbone; a subclass names its own."""


@dataclass(kw_only=True)
class RotarySettings:
    """Settings of `position_embedding="rope_3d"`.

    Attributes:
        rope_theta: ratio of the shortest to the longest wavelength.
        rope_scaling: how the axes are stretched beyond the training length: `ntk` raises theta, `linear` divides the
            index.
        rope_factors: stretch along t, h and w, such as `[2, 1, 1]` for clips of twice the length; None for none.
    """

    rope_theta: float = 10000.0
    rope_scaling: Literal["ntk", "linear"] = "ntk"
    rope_factors: Optional[list[float]] = None


@dataclass(kw_only=True)
class TransformerModelConfig(ModelConfig, RotarySettings):
    """Sizes that every transformer backbone has. A subclass adds `num_layers` and its own.

    Attributes:
        hidden_size: width of the tokens.
        num_attention_heads: heads of every attention.
        ffn_hidden_size: inner width of the MLP; 4 * hidden_size if None.
        out_channels: channels predicted per latent position; `in_channels` if None (twice that for a learned variance).
        layernorm_epsilon: of all norms.
        position_embedding: where the tokens are; a subclass annotates the kinds that it has.
        time_scale: factor on the objective's time before its sinusoid.
        lora: train low-rank adapters beside linear layers of a model that `checkpoint.start_from` names, and nothing
            else; None trains all parameters.
    """

    hidden_size: int = 384
    num_attention_heads: int = 6
    ffn_hidden_size: Optional[int] = None
    out_channels: Optional[int] = None
    layernorm_epsilon: float = 1e-6
    position_embedding: KnownPositions = "sincos_2d"
    time_scale: float = 1000.0
    lora: Optional[LoRAConfig] = None

    @property
    def adapters(self) -> Optional[LoRAConfig]:
        return self.lora

    def without_adapters(self) -> Self:
        return replace(self, lora=None)

    def with_adapters(self, lora: LoRAConfig) -> Self:
        return replace(self, lora=lora)

    @property
    @abstractmethod
    def num_layers(self) -> int:
        """Blocks, of all kinds together."""

    @property
    def ffn_size(self) -> int:
        """Inner width of the MLP."""
        return 4 * self.hidden_size if self.ffn_hidden_size is None else self.ffn_hidden_size

    @property
    def head_size(self) -> int:
        """Features of one head."""
        return self.hidden_size // self.num_attention_heads

    @property
    def output_features(self) -> int:
        """Width of the head: predicted channels of one patch."""
        return self.token_channels // self.in_channels * (self.out_channels or self.in_channels)

    def validate(self) -> None:
        self.check_sizes()
        self.check_positions()

    def check_sizes(self) -> None:
        """Check every number by itself, and the heads against the width.

        Raises:
            ConfigError: one lies outside its range, or they do not fit each other.
        """
        check_numbers(self)
        if self.lora is not None:
            self.lora.validate()
        if self.hidden_size % self.num_attention_heads:
            fits = [n for n in range(1, self.hidden_size + 1) if self.hidden_size % n == 0 and n <= 64]
            raise ConfigError(
                f"model.hidden_size={self.hidden_size} is not a multiple of "
                f"model.num_attention_heads={self.num_attention_heads}; use one of {fits} heads"
            )

    def check_positions(self, axes: Optional[list[int]] = None, *, turns_in_time: bool = False) -> None:
        """Check the kind of positions, the sizes that it needs, and that no rotary setting is given in vain.

        Args:
            axes: features of a head that turn with t, h and w; None for a third each.
            turns_in_time: attention through time is rotary, whatever the kind.

        Raises:
            ConfigError: the backbone has no such positions, its sizes do not fit them, or a setting has no effect.
        """
        from dit.layers.positions import check_scaling, check_size

        kind = self.position_embedding
        check_choice("model.position_embedding", kind, get_type_hints(type(self))["position_embedding"])
        check_scaling(self.rope_scaling)
        if kind != "rope_3d" and not turns_in_time:
            names = [field.name for field in fields(RotarySettings)]
            check_unused("model", self, names, f"with model.position_embedding={kind!r}", "use 'rope_3d'")
        elif set(self.rope_factors or [1.0]) == {1.0}:
            check_unused(
                "model", self, ["rope_scaling"], "where nothing is stretched", "say how far in model.rope_factors"
            )
        if kind == "rope_3d":
            self.rotary(axes)
        elif kind in ("sincos_2d", "sincos_3d"):
            check_size(self.hidden_size, kind)

    def rotary(self, axes: Optional[list[int]] = None, *, time_only: bool = False) -> "RotaryPositions":
        """Return the rotary embedding of these settings, checked.

        Args:
            axes: features of t, h and w; None for a third each.
            time_only: for attention through time, whose head turns with t alone.

        Raises:
            ConfigError: a setting is impossible, or the head has no pair of features for each axis.
        """
        from dit.layers.positions import RotaryPositions, check_rope

        factors = (1.0, 1.0, 1.0) if self.rope_factors is None else tuple(self.rope_factors)
        positions = RotaryPositions(self.head_size, self.rope_theta, self.rope_scaling, factors, time_only, axes)
        check_rope(positions)
        return positions

    def megatron_sizes(self) -> TransformerSizes:
        return TransformerSizes(
            num_layers=self.num_layers,
            hidden_size=self.hidden_size,
            num_attention_heads=self.num_attention_heads,
            ffn_hidden_size=self.ffn_size,
            layernorm_epsilon=self.layernorm_epsilon,
        )


def check_numbers(config: ModelConfig) -> None:
    """Check every number of a backbone's settings by itself.

    Raises:
        ConfigError: one lies outside its range.
    """
    named = {field.name for field in fields(config)}
    check_ranges("model", config, {name: allowed for name, allowed in RANGES.items() if name in named})
    if config.token_channels not in WIDTH:
        raise ConfigError(
            f"model.in_channels={config.in_channels} x patch_temporal={config.patch_temporal} x patch_spatial="
            f"{config.patch_spatial} squared are {config.token_channels:,} features of a token, which must be {WIDTH}"
        )
