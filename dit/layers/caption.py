"""Text conditioning of pixel-space UNets: tokens for attention, and a vector added to the time embedding.

Shape suffixes: K text tokens of the pack, D width, S samples.
"""

from typing import Optional

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from dit.backends.provider import LayerProvider
from dit.batch import PackedBatch
from dit.condition_table import CONTEXT
from dit.layers.adaln import LayerNorm
from dit.layers.convolution import torch_init
from dit.layout import SequenceLayout


def normalise_texts(x_KD: Tensor, layout: SequenceLayout, groups: int, epsilon: float = 1e-5) -> Tensor:
    """Normalise texts over (the channels of a group) x (the tokens of a text), in float32."""
    x_KGC = x_KD.float().unflatten(1, (groups, -1))
    count_S1 = layout.lengths_S[:, None] * x_KGC.shape[-1]
    mean_SG = layout.sum_per_sample(x_KGC.sum(-1)) / count_S1
    x_KGC = x_KGC - layout.per_token(mean_SG)[..., None]
    squares_SG = layout.sum_per_sample(x_KGC.square().sum(-1))
    x_KGC = x_KGC * layout.per_token((squares_SG / count_S1 + epsilon).rsqrt())[..., None]
    return x_KGC.flatten(1)


class AttentionPooling(nn.Module):
    """The mean of each text's tokens, weighted by a learned softmax over the tokens, then normalised and projected."""

    def __init__(self, context_size: int, outputs: int, provider: LayerProvider) -> None:
        super().__init__()
        init = torch_init(context_size)
        # A linear layer to one score with the bias in the last column. As a separate parameter, the bias would have a
        # gradient of zero in exact arithmetic, because softmax is invariant to a constant added to all scores.
        self.to_score = provider.parameter((1, context_size + 1), init)
        self.norm = LayerNorm(context_size, provider, eps=1e-5)
        self.to_out = provider.replicated_linear(context_size, outputs, bias=True, init=init)

    def forward(self, context_KD: Tensor, layout: SequenceLayout) -> Tensor:
        """Return `[S, outputs]`."""
        weight_1D, bias_11 = self.to_score[:, :-1], self.to_score[:, -1:]
        score_K = (context_KD @ weight_1D.T + bias_11)[:, 0].float().masked_fill(~layout.valid_T, -torch.inf)
        max_S = score_K.new_full((layout.num_samples,), -torch.inf)
        max_S = max_S.scatter_reduce(0, layout.segment_ids_T, score_K.detach(), "amax")
        weight_K1 = (score_K - max_S[layout.segment_ids_T]).exp()[:, None]
        pooled_SD = layout.sum_per_sample(weight_K1 * context_KD.float()) / layout.sum_per_sample(weight_K1)
        return self.to_out(self.norm(pooled_SD.to(context_KD.dtype)))


class Caption(nn.Module):
    """Projects text embeddings to tokens for the attention of a UNet, and pools them to a conditioning vector.

    Args:
        groups: groups of the norm of the tokens; None for no norm.

    Source: Saharia et al. 2022 (Imagen), arXiv:2205.11487, section 2.4; NVIDIA NeMo's Imagen for the modules.
    """

    def __init__(
        self,
        context_size: int,
        condition_size: int,
        vector_size: int,
        provider: LayerProvider,
        *,
        groups: Optional[int],
    ) -> None:
        super().__init__()
        self.to_tokens = provider.replicated_linear(
            context_size, condition_size, bias=True, init=torch_init(context_size)
        )
        self.groups = groups
        self.pooling = AttentionPooling(context_size, condition_size, provider)
        self.norm = LayerNorm(condition_size, provider, eps=1e-5)
        self.linear_1 = provider.replicated_linear(
            condition_size, vector_size, bias=True, init=torch_init(condition_size)
        )
        self.linear_2 = provider.replicated_linear(vector_size, vector_size, bias=True, init=torch_init(vector_size))

    def forward(self, batch: PackedBatch) -> tuple[Tensor, SequenceLayout, Tensor]:
        """Return the tokens `[K, condition_size]`, their layout, and the vector of each sample."""
        text = batch.conditions[CONTEXT.name]
        layout = text.layout
        assert layout is not None
        context_KD = text.values.to(self.to_tokens.weight.dtype)
        if layout.has_padding:
            # The gradient of padding is 0, but a NaN in padding would reach the weights' gradients as 0 * NaN.
            context_KD = context_KD.masked_fill(~layout.valid_T[:, None], 0.0)
        tokens_KD = self.to_tokens(context_KD)
        vector_SE = self.linear_2(silu(self.linear_1(self.norm(self.pooling(context_KD, layout)))))
        if self.groups is not None:
            tokens_KD = normalise_texts(tokens_KD, layout, self.groups)
        return tokens_KD, layout, vector_SE
