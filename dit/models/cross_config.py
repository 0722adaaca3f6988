"""Settings common to the backbones with text cross-attention, and their checks."""

from dataclasses import dataclass, replace
from typing import ClassVar, Optional

from dit.models.base import TransformerSizes
from dit.models.conditioned import ClassConditioned, NullTextConditioned
from dit.models.transformer_config import TransformerModelConfig, check_query_groups
from dit.ranges import LAYERS, WIDTH, ranged


@dataclass(kw_only=True)
class CrossAttentionModelConfig(TransformerModelConfig, NullTextConditioned, ClassConditioned):
    """Settings of a backbone with text cross-attention.

    Attributes:
        num_layers: number of blocks.
        num_query_groups: key and value heads; one per query head if None.
        qk_layernorm: RMSNorm on queries and keys, per head; of SANA 1.5, over the full width.
        fps_conditioning, size_conditioning: condition on frame rate; on height, width and duration.
    """

    norm_full_width: ClassVar[bool] = False
    """Norms of queries and keys span all heads, and their weights are split with the heads."""

    in_channels: int = 16
    context_size: Optional[int] = 1024
    num_layers: int = ranged(12, LAYERS)
    num_query_groups: Optional[int] = ranged(None, WIDTH)
    qk_layernorm: bool = True
    fps_conditioning: bool = True
    size_conditioning: bool = False

    def validate(self) -> None:
        super().validate()
        check_query_groups(self.num_attention_heads, self.num_query_groups)

    def megatron_sizes(self) -> TransformerSizes:
        # Norms over the full width are split with the heads; Megatron-Core would sum their gradients over ranks.
        qk_layernorm = self.qk_layernorm and not self.norm_full_width
        return replace(super().megatron_sizes(), qk_layernorm=qk_layernorm)
