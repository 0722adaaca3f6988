"""Settings of the original DiT."""

from dataclasses import dataclass, replace
from typing import ClassVar, Optional

from dit.models.base import TransformerSizes
from dit.models.conditioned import ClassConditioned, TextConditioned
from dit.models.expert_options import ExpertOptions
from dit.models.routing_config import TokenRouted
from dit.models.transformer_config import Positions


@dataclass(kw_only=True)
class DiTConfig(ExpertOptions, TokenRouted, TextConditioned, ClassConditioned):
    """DiT with adaLN-Zero, conditioned on class, pooled text or both; its MLPs may be mixtures of experts.

    Attributes:
        num_layers: number of blocks.
        qk_layernorm: RMSNorm on queries and keys per head.
        add_bias: use biases in the linear layers of the blocks.
        bottleneck_size: width of a linear layer between patch and embedding (JiT, arXiv:2511.13720); None for none.
        time_frequency_shift: 1 sets the last frequency of the time's sinusoid to 1 / 10000 (DDPM, diffusers).
    """

    aligns: ClassVar[bool] = True
    compiles: ClassVar[bool] = True

    num_layers: int = 12
    qk_layernorm: bool = False
    add_bias: bool = True
    bottleneck_size: Optional[int] = None
    position_embedding: Positions = "sincos_2d"
    time_frequency_shift: int = 0

    def validate(self) -> None:
        super().validate()
        self.validate_experts()

    def megatron_sizes(self) -> TransformerSizes:
        sizes = replace(super().megatron_sizes(), add_bias_linear=self.add_bias, qk_layernorm=self.qk_layernorm)
        return self.with_experts(sizes, self.ffn_size)
