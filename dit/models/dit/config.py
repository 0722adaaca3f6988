"""Sizes of the original DiT."""

from dataclasses import dataclass
from typing import Optional, get_args

from dit.models.base import ModelConfig, TransformerSizes
from dit.models.cross_config import Positions, RotarySettings, check_heads, check_numbers
from dit.models.expert_options import ExpertOptions

TIME_FEATURES = 256
"""Width of the time's sinusoid."""


@dataclass(kw_only=True)
class DiTConfig(ExpertOptions, ModelConfig, RotarySettings):
    """DiT with adaLN-Zero, conditioned on class and/or pooled text; its MLPs may be mixtures of experts.

    Attributes:
        hidden_size: width of the tokens.
        num_layers: blocks.
        num_attention_heads: heads of self- and cross-attention.
        ffn_hidden_size: inner width of the MLP; 4 * hidden_size if None.
        out_channels: channels predicted per latent position; `in_channels` if None (twice that for a learned variance).
        qk_layernorm: RMSNorm on queries and keys per head.
        add_bias: biases in attention, MLP and modulation.
        layernorm_epsilon: of the layer norms.
        position_embedding: fixed sine-cosine over (h, w) as in the paper, or over (t, h, w); or rotary over (t, h, w).
        time_scale: factor on the objective's time before its sinusoid.
        time_frequency_shift: 1 lets the sinusoid's last frequency be 1 / 10000 (DDPM, diffusers); 0 as in DiT.
    """

    hidden_size: int = 384
    num_layers: int = 12
    num_attention_heads: int = 6
    ffn_hidden_size: Optional[int] = None
    out_channels: Optional[int] = None
    qk_layernorm: bool = False
    add_bias: bool = True
    layernorm_epsilon: float = 1e-6
    position_embedding: Positions = "sincos_2d"
    time_scale: float = 1000.0
    time_frequency_shift: int = 0

    @property
    def ffn_size(self) -> int:
        return 4 * self.hidden_size if self.ffn_hidden_size is None else self.ffn_hidden_size

    @property
    def head_size(self) -> int:
        return self.hidden_size // self.num_attention_heads

    @property
    def output_features(self) -> int:
        """Width of the head: predicted channels of one patch."""
        out = self.in_channels if self.out_channels is None else self.out_channels
        return self.token_channels // self.in_channels * out

    def validate(self) -> None:
        check_numbers(self)
        check_heads(self.hidden_size, self.num_attention_heads)
        self.check_positions(self.position_embedding, get_args(Positions), self.hidden_size, self.head_size)
        self.validate_experts()

    def megatron_sizes(self) -> TransformerSizes:
        sizes = TransformerSizes(
            num_layers=self.num_layers,
            hidden_size=self.hidden_size,
            num_attention_heads=self.num_attention_heads,
            ffn_hidden_size=self.ffn_size,
            add_bias_linear=self.add_bias,
            layernorm_epsilon=self.layernorm_epsilon,
            qk_layernorm=self.qk_layernorm,
        )
        return self.with_experts(sizes, self.ffn_size)
