"""One DiT block, and a head of wide blocks that also read the noised latent."""

from typing import Optional

from torch import Tensor, nn

from dit.backends.init import xavier_uniform
from dit.backends.provider import LayerProvider
from dit.kernels.attention import Attention
from dit.kernels.layer_kernels import PendingResidual
from dit.kernels.rope import Rotation
from dit.layers.adaln import Modulation, RMSNorm
from dit.layers.attention import SelfAttention
from dit.layers.heads import FinalLayer
from dit.layers.mlp import MLPS
from dit.layers.moe import MoE
from dit.layers.tokens import PatchEmbedding
from dit.layout import SequenceLayout
from dit.models.dit.config import DiTConfig


class DiTLayer(nn.Module):
    """Self-attention and MLP (or mixture of experts), each with a modulated norm and a gate.

    Source: Peebles and Xie 2023, arXiv:2212.09748, section 3.2, "DiT block with adaLN-Zero".
    """

    def __init__(
        self,
        config: DiTConfig,
        provider: LayerProvider,
        attention: Attention,
        *,
        returns_values: bool = False,
        per_token: bool = False,
    ) -> None:
        super().__init__()
        self.returns_values = returns_values
        size, heads = config.hidden_size, config.num_attention_heads
        bias, eps = config.add_bias, config.layernorm_epsilon
        self.modulation = Modulation(size, 2, provider, bias=bias, eps=eps, per_token=per_token)
        self.attention = SelfAttention(
            size, heads, provider, attention, bias=bias, qk_layernorm=config.qk_layernorm, eps=eps
        )
        self.attention_norm: Optional[RMSNorm] = None
        self.mlp_norm: Optional[RMSNorm] = None
        if config.rms_norm:
            self.attention_norm, self.mlp_norm = (RMSNorm(size, provider, eps=eps) for _ in range(2))
        if config.num_experts is None:
            self.mlp: nn.Module = MLPS[config.activation](size, config.ffn_size, provider, bias=bias)
        else:
            gated = config.activation == "swiglu"
            self.mlp = MoE(size, provider, bias=bias, gated=gated, **config.moe_arguments())

    def forward(
        self,
        x_TD: Tensor | PendingResidual,
        cond_SD: Tensor,
        layout: SequenceLayout,
        rotation: Optional[Rotation] = None,
        first: Optional[tuple[Tensor, Tensor]] = None,
        rows: Optional[SequenceLayout] = None,
    ) -> Tensor | PendingResidual | tuple[Tensor | PendingResidual, Tensor]:
        """Apply the block.

        Args:
            first: values of the first layer and their weight, see `SelfAttention`.
            rows: layout of the rows of `cond_SD`. Default: `layout`, with a row for each sample or noise level.

        Returns:
            The tokens; with fused kernels a `PendingResidual`, from which `PendingResidual.added` computes them.
        """
        rows = layout if rows is None else rows
        attention_mod, mlp_mod = self.modulation(cond_SD)
        if self.attention_norm is not None and self.mlp_norm is not None:
            attention_mod, mlp_mod = self.attention_norm.before(attention_mod), self.mlp_norm.before(mlp_mod)
        x_TD, y_TD = attention_mod.norm_modulate(x_TD, rows)
        y_TD = self.attention(y_TD, layout, rotation, first=first, returns_values=self.returns_values)
        if self.returns_values:
            y_TD, values_TGH = y_TD
        x_TD, y_TD = attention_mod.gated_residual_then_norm(mlp_mod, x_TD, y_TD, rows)
        out = mlp_mod.pending_residual(x_TD, self.mlp(y_TD, layout), rows)
        return (out, values_TGH) if self.returns_values else out


class WideHead(nn.Module):
    """A few wide DiT blocks and the output layer, with a separate conditioning vector for every token.

        noised latent ------------------------ linear --> block --> ... --> block --> norm, linear --> prediction
                                                            ^                 ^            ^
        tokens of the body + time -- SiLU, linear --> c ----+-----------------+------------+

    The last pipeline stage has the head; every stage receives the noised latent. Under sequence parallelism each rank
    modulates its local tokens, so the weights of the modulations are replicated.

    Source: Zheng et al. 2025 (RAE), arXiv:2510.11690, section 5, after Wang et al. 2025 (DDT), arXiv:2504.05741, and
    the published code. Deviation: the inner width of the MLPs is rounded up to a multiple of 64.
    """

    def __init__(self, config: DiTConfig, provider: LayerProvider, attention: Attention) -> None:
        super().__init__()
        wide, eps = config.head_layers(), config.layernorm_epsilon
        size, init = wide.hidden_size, xavier_uniform(config.hidden_size, wide.hidden_size)
        self.rotary = wide.rotary()
        self.condition = provider.replicated_linear(config.hidden_size, size, bias=True, init=init)
        self.embed = PatchEmbedding(config.token_channels, size, provider)
        self.layers = nn.ModuleDict(
            {str(i): DiTLayer(wide, provider, attention, per_token=True) for i in range(wide.num_layers)}
        )
        norm = RMSNorm(size, provider, eps=eps) if config.rms_norm else None
        self.final = FinalLayer(size, config.output_features, provider, eps=eps, norm=norm)

    def forward(self, x_TD: Tensor, inputs: tuple[Tensor, Tensor, Tensor], layout: SequenceLayout) -> Tensor:
        """Return the prediction of the local tokens, `[T, channels]`.

        Args:
            inputs: embedding of the time of each noise level; noised latents of the local tokens; (t, h, w) patch
                index of the tokens of all tensor-parallel ranks.
        """
        time_LD, inputs_TC, positions_T3 = inputs
        rotation: Optional[Rotation] = None if self.rotary is None else self.rotary(positions_T3)
        count = layout.num_local_tokens
        rows = SequenceLayout((1,) * count, (1,) * count, count, layout.device)  # every token has its own modulation
        cond_TD = self.condition(nn.functional.silu(x_TD + layout.level_layout.per_token(time_LD)))
        y_TD = self.embed(inputs_TC, layout)
        for layer in self.layers.values():
            y_TD = layer(y_TD, cond_TD, layout, rotation, None, rows)
        out_TC: Tensor = self.final(y_TD, cond_TD, rows)
        return out_TC
