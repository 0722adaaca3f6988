"""Blocks of `block=sandwich`, with text and image as two streams that do not meet, or as one."""

from typing import Optional

from torch import Tensor, nn

from dit.backends.provider import LayerProvider
from dit.joint_layout import JointLayout
from dit.kernels.attention import Attention
from dit.kernels.rope import Rotation
from dit.layers.adaln import RMSNorm, ScaleGateModulation
from dit.layers.attention import SelfAttention
from dit.layers.mlp import MLPS
from dit.layout import SequenceLayout
from dit.models.streams.config import LayerKind, StreamsConfig


class SandwichBlock(nn.Module):
    """Attention, then an MLP, each between two RMSNorms.

        x --+------------------------------------------------ + --> x
            '- RMSNorm, scale - attention or MLP - RMSNorm, gate '

    Args:
        modulated: False for neither scale nor gate.

    Source: Qin et al. 2025 (Lumina-Image 2.0), arXiv:2503.21758; `transformer_lumina2.py` of diffusers.
    """

    def __init__(
        self, config: StreamsConfig, provider: LayerProvider, attention: Attention, *, modulated: bool = True
    ) -> None:
        super().__init__()
        size, bias, eps = config.hidden_size, config.add_bias, config.layernorm_epsilon
        width = config.condition_width if modulated else None
        self.modulation = ScaleGateModulation(size, 2, provider, condition_size=width, eps=eps)
        self.attention_norm, self.attention_output_norm, self.mlp_norm, self.mlp_output_norm = (
            RMSNorm(size, provider, eps=eps) for _ in range(4)
        )
        heads, groups, normed = config.num_attention_heads, config.num_query_groups, config.qk_layernorm
        self.attention = SelfAttention(
            size, heads, provider, attention, num_query_groups=groups, bias=bias, qk_layernorm=normed, eps=eps
        )
        self.mlp = MLPS[config.activation](size, config.ffn_size, provider, bias=bias)

    def forward(
        self, x_TD: Tensor, cond_SC: Tensor, layout: SequenceLayout, joint: SequenceLayout, rotation: Optional[Rotation]
    ) -> Tensor:
        attention_mod, mlp_mod = self.modulation(cond_SC)
        attention_mod, mlp_mod = self.attention_norm.before(attention_mod), self.mlp_norm.before(mlp_mod)
        x_TD, y_TD = attention_mod.norm_modulate(x_TD, layout)
        y_TD = self.attention_output_norm(self.attention(y_TD, joint, rotation).added())
        x_TD, y_TD = attention_mod.gated_residual_then_norm(mlp_mod, x_TD, y_TD, layout)
        return mlp_mod.gated_residual(x_TD, self.mlp_output_norm(self.mlp(y_TD).added()), layout)


class RefinerLayer(nn.Module):
    """A modulated block of the image, and a block of the text without modulation."""

    def __init__(self, config: StreamsConfig, provider: LayerProvider, attention: Attention, kind: LayerKind) -> None:
        super().__init__()
        self.text = SandwichBlock(config, provider, attention, modulated=False)
        self.image = SandwichBlock(config, provider, attention)

    def forward(
        self,
        text_KD: Tensor,
        x_TD: Tensor,
        cond_SC: Tensor,
        text_layout: SequenceLayout,
        layout: SequenceLayout,
        joint: JointLayout,
        rotation_J: Optional[Rotation],
    ) -> tuple[Tensor, Tensor]:
        of_text = of_image = None
        if rotation_J is not None:
            cosines, sines = joint.split(rotation_J.cos_T1H), joint.split(rotation_J.sin_T1H)
            of_text, of_image = (Rotation(*pair) for pair in zip(cosines, sines))
        text_KD = self.text(text_KD, cond_SC, text_layout, text_layout, of_text)
        return text_KD, self.image(x_TD, cond_SC, layout, layout, of_image)


class SandwichLayer(SandwichBlock):
    """A block of one stream as a layer."""

    def __init__(self, config: StreamsConfig, provider: LayerProvider, attention: Attention, kind: LayerKind) -> None:
        super().__init__(config, provider, attention)
