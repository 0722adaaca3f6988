"""Refiner of the text of HunyuanVideo 1.5, and projections of its other conditions."""

from torch import Tensor, nn

from dit.backends.init import ZEROS, xavier_uniform
from dit.backends.pending_bias import PendingBias
from dit.backends.provider import LayerProvider
from dit.kernels.attention import Attention
from dit.layers.adaln import LayerNorm
from dit.layers.attention import SelfAttention
from dit.layers.caption import mean_of_texts
from dit.layers.embeddings import TimestepEmbedder
from dit.layers.mlp import MLP
from dit.layout import SequenceLayout
from dit.models.hunyuan_video.config import HunyuanVideoConfig

MLP_RATIO = 4  # fixed in the published code
PROJECTION_EPSILON = 1e-5


def _linear(provider: LayerProvider, inputs: int, outputs: int) -> nn.Linear:
    return provider.replicated_linear(inputs, outputs, bias=True, init=xavier_uniform(inputs, outputs))


class SiLUMLP(MLP):
    """Linear, SiLU, Linear."""

    def forward(self, x_TD: Tensor, layout: SequenceLayout | None = None) -> PendingBias:
        return self.linear_fc2(nn.functional.silu(self.linear_fc1(x_TD).added()))


class TextRefinerBlock(nn.Module):
    """Attention and MLP, each after an affine layer norm and with a gate from Linear(SiLU(c)), zero-initialised."""

    def __init__(self, config: HunyuanVideoConfig, provider: LayerProvider, attention: Attention) -> None:
        super().__init__()
        size, heads, eps = config.hidden_size, config.num_attention_heads, config.layernorm_epsilon
        self.kernels = provider.kernels
        self.gates = provider.gathered_linear(size, 2 * size, bias=True, init=ZEROS)
        self.attention_norm, self.mlp_norm = (LayerNorm(size, provider, eps=eps) for _ in range(2))
        self.attention = SelfAttention(size, heads, provider, attention)
        self.mlp = SiLUMLP(size, MLP_RATIO * size, provider)

    def forward(self, x_KD: Tensor, cond_SD: Tensor, layout: SequenceLayout) -> Tensor:
        gate_attention_SD, gate_mlp_SD = self.gates(nn.functional.silu(cond_SD)).chunk(2, -1)
        y_KD, bias_D = self.attention(self.attention_norm(x_KD), layout)
        x_KD = self.kernels.residual(x_KD, y_KD, gate_attention_SD, bias_D, layout)
        y_KD, bias_D = self.mlp(self.mlp_norm(x_KD))
        return self.kernels.residual(x_KD, y_KD, gate_mlp_SD, bias_D, layout)


class TextRefiner(nn.Module):
    """Blocks in which a text attends to itself, gated by the time and the mean of the text's embeddings.

    Source: `HunyuanVideo15TokenRefiner` of diffusers.
    """

    def __init__(self, config: HunyuanVideoConfig, provider: LayerProvider, attention: Attention) -> None:
        super().__init__()
        size = config.hidden_size
        assert config.context_size is not None
        self.time = TimestepEmbedder(size, provider, time_scale=config.time_scale)
        self.linear_1 = _linear(provider, config.context_size, size)
        self.linear_2 = _linear(provider, size, size)
        self.layers = nn.ModuleList(
            TextRefinerBlock(config, provider, attention) for _ in range(config.num_refiner_layers)
        )

    def condition(self, time_S: Tensor, context_KC: Tensor, layout: SequenceLayout) -> Tensor:
        """Return the conditioning vector of each sample.

        Args:
            context_KC: embeddings of the texts, not split over ranks.
        """
        mean_SC = mean_of_texts(context_KC, layout)
        pooled_SD = self.linear_1(mean_SC.to(context_KC.dtype))
        return self.time(time_S) + self.linear_2(nn.functional.silu(pooled_SD))

    def forward(self, x_KD: Tensor, cond_SD: Tensor, layout: SequenceLayout) -> Tensor:
        """Return the local tokens of the texts."""
        for layer in self.layers:
            x_KD = layer(x_KD, cond_SD, layout)
        return x_KD


class GlyphProjection(nn.Module):
    """LayerNorm, then three linear layers with GELU between them.

    Source: `HunyuanVideo15ByT5TextProjection` of diffusers.
    """

    def __init__(self, config: HunyuanVideoConfig, provider: LayerProvider) -> None:
        super().__init__()
        inputs, inner = config.glyph_size, config.glyph_hidden_size
        self.norm = LayerNorm(inputs, provider, eps=PROJECTION_EPSILON)
        self.linear_1 = _linear(provider, inputs, inner)
        self.linear_2 = _linear(provider, inner, inner)
        self.linear_3 = _linear(provider, inner, config.hidden_size)

    def forward(self, x_KC: Tensor) -> Tensor:
        x_KC = nn.functional.gelu(self.linear_1(self.norm(x_KC)))
        return self.linear_3(nn.functional.gelu(self.linear_2(x_KC)))


class ImageProjection(nn.Module):
    """Two linear layers with GELU between them, after and before a LayerNorm.

    Source: `HunyuanVideo15ImageProjection` of diffusers.
    """

    def __init__(self, config: HunyuanVideoConfig, provider: LayerProvider) -> None:
        super().__init__()
        inputs, size = config.image_context_size, config.hidden_size
        self.norm_in = LayerNorm(inputs, provider, eps=PROJECTION_EPSILON)
        self.linear_1 = _linear(provider, inputs, inputs)
        self.linear_2 = _linear(provider, inputs, size)
        self.norm_out = LayerNorm(size, provider, eps=PROJECTION_EPSILON)

    def forward(self, x_KC: Tensor) -> Tensor:
        return self.norm_out(self.linear_2(nn.functional.gelu(self.linear_1(self.norm_in(x_KC)))))
