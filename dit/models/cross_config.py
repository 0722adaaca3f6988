"""Settings common to the backbones with text cross-attention, and their checks."""

from dataclasses import dataclass, replace
from typing import Optional

from dit.errors import ConfigError
from dit.models.base import TransformerSizes
from dit.models.conditioned import ClassConditioned, NullTextConditioned
from dit.models.transformer_config import TransformerModelConfig, check_query_groups


@dataclass(kw_only=True)
class CrossAttentionModelConfig(TransformerModelConfig, NullTextConditioned, ClassConditioned):
    """Settings of a backbone with text cross-attention.

    Attributes:
        num_layers: number of blocks.
        num_query_groups: key and value heads; one per query head if None.
        qk_layernorm: RMSNorm on queries and keys, per head; of SANA 1.5, over the full width.
        fps_conditioning, size_conditioning: condition on the frame rate, and on height, width and duration.
    """

    in_channels: int = 16
    context_size: Optional[int] = 1024
    num_layers: int = 12
    num_query_groups: Optional[int] = None
    qk_layernorm: bool = True
    fps_conditioning: bool = True
    size_conditioning: bool = False

    def check_sizes(self) -> None:
        super().check_sizes()
        check_query_groups(self.num_attention_heads, self.num_query_groups)
        if self.context_size is None:
            raise ConfigError(
                "model.context_size=None, but every layer of this backbone attends to text; set it to the width of the "
                "text embeddings (1024 for T5-large), or use the DiT backbone, which needs no text"
            )

    def megatron_sizes(self) -> TransformerSizes:
        return replace(super().megatron_sizes(), num_query_groups=self.num_query_groups, qk_layernorm=self.qk_layernorm)
