"""One PRX block."""

from typing import Optional

from torch import Tensor, nn

from dit.backends.init import xavier_uniform
from dit.backends.pending_bias import PendingBias
from dit.backends.provider import LayerProvider
from dit.backends.sharding import set_matrices
from dit.joint_layout import JointLayout
from dit.kernels.attention import Attention
from dit.kernels.rope import Heads, Rotation
from dit.layers.adaln import Modulation
from dit.layers.attention import HeadRMSNorm, SelfAttention, head_matrices, split_heads
from dit.layers.mlp import GeGLU
from dit.layout import SequenceLayout
from dit.models.prx.config import PRXConfig


class TextAttention(SelfAttention):
    """Self-attention whose keys and values are those of the text of the sample, then those of its image.

    The text has no queries. Its keys are normalised, and not rotated.
    """

    def __init__(self, config: PRXConfig, provider: LayerProvider, attention: Attention) -> None:
        size, heads, eps = config.hidden_size, config.num_attention_heads, config.layernorm_epsilon
        super().__init__(size, heads, provider, attention, bias=False, qk_layernorm=True, eps=eps)
        init = xavier_uniform(size, 2 * size)
        self.linear_kv = provider.heads_linear(size, 2 * size, bias=False, init=init, replicated_input=True)
        set_matrices(self.linear_kv, head_matrices(Heads(0), config.head_size))
        self.text_k_layernorm = HeadRMSNorm(config.head_size, provider, eps=eps)

    def forward(  # type: ignore[override]
        self, x_TD: Tensor, text_KD: Tensor, layout: SequenceLayout, joint: JointLayout, rotation: Optional[Rotation]
    ) -> PendingBias:
        groups = self.local_groups
        norms: tuple[nn.Module, nn.Module] = self.q_layernorm, self.k_layernorm
        q, k, v = split_heads(self.kernels, self.linear_qkv(x_TD), groups, self.heads, norms, rotation)
        norms = self.text_k_layernorm, self.text_k_layernorm
        text_k, text_v = split_heads(self.kernels, self.linear_kv(text_KD), groups, Heads(0), norms)
        k_JNH, v_JNH = joint.join(text_k, k), joint.join(text_v, v)
        return self.linear_proj(self.attention(q, k_JNH, v_JNH, layout, joint).flatten(1))


class PRXLayer(nn.Module):
    """Modulated attention to image and text, then a modulated `GeGLU`; both are gated residuals.

    Source: Photoroom 2025 (PRX), `transformer_prx.py` of diffusers.
    """

    def __init__(self, config: PRXConfig, provider: LayerProvider, attention: Attention) -> None:
        super().__init__()
        self.modulation = Modulation(config.hidden_size, 2, provider, eps=config.layernorm_epsilon)
        self.attention = TextAttention(config, provider, attention)
        self.mlp = GeGLU(config.hidden_size, config.ffn_size, provider)

    def forward(
        self,
        x_TD: Tensor,
        cond_SD: Tensor,
        text_KD: Tensor,
        layout: SequenceLayout,
        joint: JointLayout,
        rotation: Optional[Rotation],
    ) -> Tensor:
        """Return the local image tokens.

        Args:
            joint: layout of the keys.
        """
        attention_mod, mlp_mod = self.modulation(cond_SD)
        x_TD, y_TD = attention_mod.norm_modulate(x_TD, layout)
        y_TD = self.attention(y_TD, text_KD, layout, joint, rotation)
        x_TD, y_TD = attention_mod.gated_residual_then_norm(mlp_mod, x_TD, y_TD, layout)
        return mlp_mod.gated_residual(x_TD, self.mlp(y_TD), layout)
