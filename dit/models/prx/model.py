"""The PRX backbone on Megatron-Core linears."""

from typing import Any, Optional

from torch import Tensor, nn

from dit.backends.init import xavier_uniform
from dit.backends.pending_bias import PendingBias
from dit.backends.provider import LayerProvider
from dit.backends.sharding import replicate_on_all_stages, set_matrices
from dit.batch import PackedBatch
from dit.joint_layout import JointLayout, joint_layout
from dit.kernels.attention import Attention
from dit.kernels.rope import Heads, Rotation
from dit.layers.adaln import Modulation
from dit.layers.attention import SelfAttention, head_matrices, per_head_norm, split_heads
from dit.layers.conditioner import Conditioner
from dit.layers.heads import FinalLayer
from dit.layers.mlp import GeGLU
from dit.layers.text import TextTokens
from dit.layers.tokens import PatchEmbedding
from dit.layout import SequenceLayout
from dit.models.base import Stage
from dit.models.prx.config import PRXConfig
from dit.models.token_stack import TokenStack


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
        self.text_k_layernorm = per_head_norm(config.head_size, provider, eps=eps)

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
        self.mlp = GeGLU(config.hidden_size, config.ffn_size, provider, bias=False)

    def forward(
        self,
        x_TD: Tensor,
        cond_SD: Tensor,
        text_KD: Tensor,
        layout: SequenceLayout,
        joint: JointLayout,
        rotation: Optional[Rotation],
    ) -> Tensor:
        """Return the local image tokens."""
        attention_mod, mlp_mod = self.modulation(cond_SD)
        x_TD, y_TD = attention_mod.norm_modulate(x_TD, layout)
        y_TD = self.attention(y_TD, text_KD, layout, joint, rotation)
        x_TD, y_TD = attention_mod.gated_residual_then_norm(mlp_mod, x_TD, y_TD, layout)
        return mlp_mod.gated_residual(x_TD, self.mlp(y_TD), layout)


class PRX(TokenStack[PRXConfig]):
    """PRX: patch embedding, blocks whose attention reads image and text, modulated head.

    The text is projected once and replicated over tensor-, context- and pipeline-parallel ranks. A dropped text keeps
    its length, as null tokens, all of which are attended to (see `Streams`).

    Source: Photoroom 2025 (PRX), `transformer_prx.py` of diffusers. Deviations: packs of any lengths instead of padded
    texts with a mask; clips, if t has a share of `rope_axes`; the head is zero-initialised; sine-cosine
    positions are an option.
    """

    fsdp_units = (PRXLayer,)

    def __init__(self, config: PRXConfig, provider: LayerProvider, attention: Attention, stage: Stage) -> None:
        super().__init__(config, provider, stage)
        size, context_size = config.hidden_size, config.text_size()
        self.conditioner = Conditioner(size, provider, time_scale=config.time_scale)
        self.text = TextTokens(context_size, provider, learned_null=config.null_text == "learned")
        # Like the null token, replicated over tensor-parallel ranks and pipeline stages.
        init = xavier_uniform(context_size, size)
        self.embed_text = provider.replicated_linear(
            context_size, size, bias=True, init=init, gradient_covers="all_tokens"
        )
        replicate_on_all_stages(self.embed_text.parameters())
        if stage.first:
            self.embed = PatchEmbedding(config.token_channels, size, provider)
        self.layers = nn.ModuleDict({str(i): PRXLayer(config, provider, attention) for i in stage.layers})
        if stage.last:
            self.head = FinalLayer(size, config.output_features, provider, eps=config.layernorm_epsilon)

    def layer_inputs(
        self, cond_SD: Tensor, positions_T3: Tensor, layout: SequenceLayout, batch: PackedBatch
    ) -> tuple[Any, ...]:
        context_KC, texts = self.text(batch)
        joint = joint_layout(texts, batch.layout)
        return cond_SD, self.embed_text(context_KC), layout, joint, self.rotation(batch)
