"""The SANA backbone on Megatron-Core linears."""

from functools import partial

from torch import Tensor, nn
from torch.nn.functional import silu

from dit.backends.init import ZEROS, xavier_uniform
from dit.backends.pending_bias import PendingBias
from dit.backends.provider import LayerProvider
from dit.backends.sharding import set_matrices
from dit.batch import PackedBatch
from dit.context_parallel.pictures import Pictures
from dit.kernels.attention import Attention
from dit.kernels.linear_attention import linear_attention
from dit.kernels.recompute import recomputable
from dit.layers.adaln import TableModulation
from dit.layers.attention import CrossAttention, SelfAttention
from dit.layers.convolution import torch_init
from dit.layers.mlp import GATED
from dit.layout import SequenceLayout
from dit.models.base import Stage
from dit.models.cross_stack import SharedModulationStack, attention_options
from dit.models.sana.config import SanaConfig

NORM_EPSILON = 1e-5
"""Epsilon of the norms of texts, queries and keys."""


@recomputable
def _activate(x_TF: Tensor) -> Tensor:
    return silu(x_TF)


def _attend(
    provider: LayerProvider, q_TNH: Tensor, k_TNH: Tensor, v_TNH: Tensor, layout: SequenceLayout, _: SequenceLayout
) -> Tensor:
    """Compute linear attention of the tokens of all tensor-parallel ranks, with sums over context-parallel ranks."""
    gathered = layout.gathered
    return linear_attention(q_TNH, k_TNH, v_TNH, gathered.local or gathered, provider.sum_over_context_ranks)


class GatedConvolution(nn.Module):
    """Linear, SiLU, 3 x 3 convolution of each channel, SiLU gate, Linear (Mix-FFN with a gate).

    Gates and values alternate in the channels (gate 0, value 0, gate 1, value 1, ...), as in `SwiGLU`.

    Source: Xie et al. 2024, arXiv:2410.10629, section 2.2 and figure 5; GLUMBConv in its published code.
    """

    def __init__(self, hidden_size: int, ffn_hidden_size: int, provider: LayerProvider) -> None:
        super().__init__()
        channels, init = 2 * ffn_hidden_size, xavier_uniform(hidden_size, ffn_hidden_size)
        self.gate = provider.kernels.swiglu
        self.linear_fc1 = provider.column_linear(hidden_size, channels, bias=True, init=init)
        set_matrices(self.linear_fc1, GATED)
        self.weight = provider.split_parameter((channels, 1, 3, 3), torch_init(9))
        self.bias = provider.split_parameter((channels,), ZEROS)
        self.linear_fc2 = provider.row_linear(ffn_hidden_size, hidden_size, bias=False, init=init, returns_bias=True)

    def forward(self, x_TD: Tensor, pictures: Pictures) -> PendingBias:
        pairs = pictures.dispatch(_activate(self.linear_fc1(x_TD)).unflatten(-1, (-1, 2)))
        mixed = self.gate(pictures.convolve(pairs.flatten(1), self.weight, self.bias), None)
        return self.linear_fc2(pictures.combine(mixed[..., None]).squeeze(-1))


class SanaLayer(nn.Module):
    """Modulated linear attention, cross-attention to the text, modulated `GatedConvolution`; each is a residual.

    The cross-attention has no norm and no gate, and its output projection is zero-initialised.

    Source: Xie et al. 2024, arXiv:2410.10629, section 2.2; query and key norms: SANA 1.5, arXiv:2501.18427.
    """

    def __init__(self, config: SanaConfig, provider: LayerProvider, attention: Attention) -> None:
        super().__init__()
        size = config.hidden_size
        options = attention_options(config, eps=NORM_EPSILON)
        self.modulation = TableModulation(size, 2, provider, eps=config.layernorm_epsilon)
        self.attention = SelfAttention(
            size, config.num_attention_heads, provider, partial(_attend, provider), qkv_bias=False, **options
        )
        self.cross_attention = CrossAttention(
            size, size, config.num_cross_attention_heads, provider, attention, zero_output=True, **options
        )
        self.mlp = GatedConvolution(size, config.ffn_size, provider)

    def forward(
        self,
        x_TD: Tensor,
        shared_SD: Tensor,
        context_KD: Tensor,
        layout: SequenceLayout,
        context_layout: SequenceLayout,
        pictures: Pictures,
    ) -> Tensor:
        attention_mod, mlp_mod = self.modulation(shared_SD)
        x_TD, y_TD = attention_mod.norm_modulate(x_TD, layout)
        x_TD = attention_mod.gated_residual(x_TD, self.attention(y_TD, layout), layout)
        y_TD = self.cross_attention(x_TD, context_KD, layout, context_layout)
        x_TD, y_TD = mlp_mod.residual_then_norm(x_TD, y_TD, layout)
        return mlp_mod.gated_residual(x_TD, self.mlp(y_TD, pictures), layout)


class Sana(SharedModulationStack[SanaConfig]):
    """SANA: patch embedding without positions, blocks with linear attention and convolution, adaLN-single.

    Source: Xie et al. 2024, arXiv:2410.10629, section 2, and its published code. Deviations: packs of pictures of any
    sizes, and clips, whose frames the convolution treats as separate pictures; texts have their true lengths; a learned
    null token replaces dropped texts, unless `null_text=empty`; tables are zero-initialised; sine-cosine positions are
    an option.
    """

    fsdp_units = (SanaLayer,)

    def __init__(self, config: SanaConfig, provider: LayerProvider, attention: Attention, stage: Stage) -> None:
        super().__init__(
            config, provider, stage, lambda _: SanaLayer(config, provider, attention), text_norm_eps=NORM_EPSILON
        )
        self.attention = attention

    def attention_input(self, batch: PackedBatch) -> Pictures:
        return Pictures.of_pack(batch, self.attention)
