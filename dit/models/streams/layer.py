"""Blocks of `block=adaln_zero`, with text and image as two streams or as one."""

from collections.abc import Sequence
from typing import Optional

import torch
from torch import Tensor, nn

from dit.backends.init import xavier_uniform
from dit.backends.provider import LayerProvider
from dit.backends.sharding import Matrices, set_matrices
from dit.joint_layout import JointLayout
from dit.kernels.attention import Attention
from dit.kernels.rope import Heads, Rotation
from dit.layers.adaln import Modulation, SublayerModulation
from dit.layers.attention import ONE_HEAD, SelfAttention, head_matrices, head_norm, qk_norms, split_heads
from dit.layers.mlp import MLPS
from dit.layout import SequenceLayout
from dit.models.streams.config import LayerKind, StreamsConfig

Condition = Tensor | Sequence[SublayerModulation]
"""Conditioning vector of each sample, or the modulations of the block's sub-layers (`StreamsConfig.sublayers`).

If samples have several noise levels, those of the text and of each level (`dit.levels.with_text_level`).
"""


def _modulation(config: StreamsConfig, provider: LayerProvider, count: int, *, gated: bool = True) -> nn.Module:
    """Build the modulation of `count` sub-layers; the identity if the block receives modulations."""
    if config.sublayers(0) is not None:
        return nn.Identity()
    size, width, eps = config.hidden_size, config.condition_width, config.layernorm_epsilon
    return Modulation(size, count, provider, condition_size=width, bias=config.add_bias, eps=eps, gated=gated)


def _head_norms(config: StreamsConfig, provider: LayerProvider) -> tuple[nn.Module, nn.Module]:
    """Build the norms of queries and keys."""
    heads, eps = config.num_attention_heads, config.layernorm_epsilon
    return qk_norms(heads, heads, config.head_size, provider, eps=eps, enabled=config.qk_layernorm)


class Stream(nn.Module):
    """The layers of one of the two streams, without the joint attention.

    The output features of the fused projection are ordered by head: query, key, value of head 0, of head 1, ...

    Args:
        dual_attention: second attention, of the stream over itself, or None.
        output: False for a stream without layers after joint attention, whose tokens do not change.

    Source of both options: Stable Diffusion 3.5, `attn2` and `context_pre_only` in `attention.py` of diffusers.
    """

    def __init__(
        self,
        config: StreamsConfig,
        provider: LayerProvider,
        *,
        dual_attention: Optional[SelfAttention] = None,
        output: bool = True,
    ) -> None:
        super().__init__()
        size, bias = config.hidden_size, config.add_bias
        self.local_heads = provider.split(config.num_attention_heads, "num_attention_heads")
        self.kernels, self.has_output = provider.kernels, output
        count = (2 if dual_attention is None else 3) if output else 1  # without output, only the norm before attention
        self.modulation = _modulation(config, provider, count, gated=output)
        self.linear_qkv = provider.heads_linear(size, 3 * size, bias=bias, init=xavier_uniform(size, 3 * size))
        set_matrices(self.linear_qkv, head_matrices(Heads(1), config.head_size))
        if output:
            init = xavier_uniform(size, size)
            self.linear_proj = provider.row_linear(size, size, bias=bias, init=init, returns_bias=True)
        self.q_layernorm, self.k_layernorm = _head_norms(config, provider)
        self.dual_attention = dual_attention
        if output:
            self.mlp = MLPS[config.activation](size, config.ffn_size, provider, bias=bias)

    def qkv(self, x_TD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries and keys, both normalised, and values, each `[T, N, H]`."""
        norms = self.q_layernorm, self.k_layernorm
        q, k, v = split_heads(self.kernels, self.linear_qkv(x_TD), self.local_heads, Heads(1), norms)
        return q, k, v

    def output(
        self, x_TD: Tensor, attended: Tensor, mods: Sequence[SublayerModulation], layout: SequenceLayout
    ) -> Tensor:
        """Return the tokens after the block."""
        if not self.has_output:
            return x_TD
        last, y_TD = mods[0], self.linear_proj(attended)
        if self.dual_attention is not None:
            second_TD = self.dual_attention(mods[2].norm_modulate(x_TD, layout)[1], layout)
            x_TD = last.gated_residual(x_TD, y_TD, layout)
            last, y_TD = mods[2], second_TD
        x_TD, y_TD = last.gated_residual_then_norm(mods[1], x_TD, y_TD, layout)
        return mods[1].gated_residual(x_TD, self.mlp(y_TD), layout)


class JointLayer(nn.Module):
    """Two streams, each with its modulation, projections and MLP, and one attention over both.

    Source: Esser et al. 2024, arXiv:2403.03206, figure 2b (MM-DiT); black-forest-labs/flux `DoubleStreamBlock`.
    """

    def __init__(self, config: StreamsConfig, provider: LayerProvider, attention: Attention, kind: LayerKind) -> None:
        super().__init__()
        self.attention, self.kernels = attention, provider.kernels
        self.text = Stream(config, provider, output=kind.text_output)
        dual: Optional[SelfAttention] = None
        if kind.dual:
            sizes, eps = (config.hidden_size, config.num_attention_heads), config.layernorm_epsilon
            dual = SelfAttention(
                *sizes, provider, attention, bias=config.add_bias, qk_layernorm=config.qk_layernorm, eps=eps
            )
        self.image = Stream(config, provider, dual_attention=dual)

    def forward(
        self,
        text_KD: Tensor,
        x_TD: Tensor,
        condition: Condition,
        text_layout: SequenceLayout,
        layout: SequenceLayout,
        joint: JointLayout,
        rotation_J: Optional[Rotation],
    ) -> tuple[Tensor, Tensor]:
        """Return text and image."""
        of_text = of_image = condition
        if not isinstance(condition, Tensor):  # modulations of the text's sub-layers, then of the image's
            of_text, of_image = condition[:2], condition[2:]
        text_mods, image_mods = self.text.modulation(of_text), self.image.modulation(of_image)
        text_KD, y_KD = text_mods[0].norm_modulate(text_KD, text_layout)
        x_TD, y_TD = image_mods[0].norm_modulate(x_TD, layout)
        q, k, v = (joint.join(*pair) for pair in zip(self.text.qkv(y_KD), self.image.qkv(y_TD)))
        out_JNH = self.attention(self._rotated(q, rotation_J), self._rotated(k, rotation_J), v, joint, joint)
        text_out, image_out = joint.split(out_JNH.flatten(1))
        text_KD = self.text.output(text_KD, text_out, text_mods, text_layout)
        return text_KD, self.image.output(x_TD, image_out, image_mods, layout)

    def _rotated(self, x_JNH: Tensor, rotation_J: Optional[Rotation]) -> Tensor:
        return self.kernels.split_heads(x_JNH, x_JNH.shape[1], ONE_HEAD, rotation=rotation_J)[0]


class SingleLayer(nn.Module):
    """One stream, with attention and MLP in parallel, which share norm, gate, input and output projection.

    Both fused projections are ordered by head, so that tensor parallelism splits attention and MLP in the same way, and
    one sum over ranks combines both. The outputs of `linear_in` are, for each head, query, key, value and a part of the
    MLP's inputs (SwiGLU: alternating gates and values); the inputs of `linear_out` are, for each head, the attention
    output and the activated part:

        linear_in:   | q k v mlp | q k v mlp | ...        linear_out:   | out mlp | out mlp | ...
                       head 0      head 1                                 head 0    head 1

    Source: Dehghani et al. 2023, arXiv:2302.05442, section 2 (parallel layers); black-forest-labs/flux
    `SingleStreamBlock`, whose fused projections are ordered by attention, then MLP.
    """

    def __init__(self, config: StreamsConfig, provider: LayerProvider, attention: Attention, kind: LayerKind) -> None:
        super().__init__()
        self.attention, self.kernels = attention, provider.kernels
        size, heads, bias = config.hidden_size, config.num_attention_heads, config.add_bias
        self.local_heads = provider.split(heads, "num_attention_heads")
        self.shares = [3 * config.head_size, config.mlp_inputs // heads]
        self.activation = getattr(provider.kernels, config.activation)
        wide, inner = 3 * size + config.mlp_inputs, size + config.ffn_size
        self.modulation = _modulation(config, provider, 1)
        self.linear_in = provider.column_linear(size, wide, bias=bias, init=xavier_uniform(size, wide))
        self.linear_out = provider.row_linear(
            inner, size, bias=bias, init=xavier_uniform(inner, size), returns_bias=True
        )
        qkv = head_matrices(Heads(1), config.head_size).runs
        set_matrices(self.linear_in, Matrices((*qkv, (self.shares[1], config.mlp_inputs // config.ffn_size))))
        set_matrices(self.linear_out, Matrices(((config.head_size, 1), (config.ffn_size // heads, 1)), dim=1))
        self.q_layernorm, self.k_layernorm = _head_norms(config, provider)

    def forward(
        self,
        x_JD: Tensor,
        condition: Condition,
        layout: SequenceLayout,
        joint: JointLayout,
        rotation_J: Optional[Rotation],
    ) -> Tensor:
        """Return the local joint tokens."""
        (mod,) = self.modulation(condition)
        x_JD, y_JD = mod.norm_modulate(x_JD, layout)
        qkv, mlp = self.linear_in(y_JD).unflatten(-1, (self.local_heads, -1)).split(self.shares, -1)
        norm = head_norm((self.q_layernorm, self.k_layernorm), Heads(1))
        q, k, v = self.kernels.split_heads(qkv, self.local_heads, Heads(1), norm, rotation_J)
        attended = self.attention(q, k, v, joint, joint)
        both = torch.cat([attended, self.activation(mlp, None)], -1)
        return mod.gated_residual(x_JD, self.linear_out(both.flatten(1)), layout)
