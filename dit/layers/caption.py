"""Text conditioning of pixel-space UNets: tokens for attention, and a vector added to the time embedding.

Shape suffixes: K text tokens of the pack, D width, S samples.
"""

from typing import Literal, Optional

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from dit.backends.init import normal
from dit.backends.provider import LayerProvider
from dit.batch import PackedBatch
from dit.condition_table import CONTEXT
from dit.joint_layout import joint_layout
from dit.layers.adaln import LayerNorm
from dit.layers.convolution import torch_init
from dit.layout import SequenceLayout

TextPooling = Literal["attention", "mean"]


def missing_tokens(layout: SequenceLayout, padded: Optional[int]) -> Tensor:
    """Return the number of padding tokens that extend each text to `padded` tokens, `[S, 1]`; zeros for None."""
    return ((padded or 0) - layout.lengths_S).clamp(min=0)[:, None]


def mean_of_texts(x_KD: Tensor, layout: SequenceLayout, padding_D: Tensor, padded: Optional[int]) -> Tensor:
    """Return the mean over the tokens of each text `[S, D]`, float32; see `normalise_texts`."""
    missing_S1 = missing_tokens(layout, padded)
    count_S1 = (layout.lengths_S[:, None] + missing_S1).clamp(min=1)
    sums_SD = layout.sum_per_sample(x_KD.float())
    return (sums_SD if padded is None else sums_SD + missing_S1 * padding_D.float()) / count_S1


def normalise_texts(
    x_KD: Tensor, layout: SequenceLayout, groups: int, padding_D: Tensor, padded: Optional[int], epsilon: float = 1e-5
) -> Tensor:
    """Normalise texts over (the channels of a group) x (the tokens of a text), in float32.

    Args:
        padding_D: value of a padding token.
        padded: number of tokens per text, including padding, in the statistics; None for only real tokens.
    """
    x_KGC = x_KD.float().unflatten(1, (groups, -1))
    padding_GC, missing_S1 = padding_D.float().unflatten(0, (groups, -1)), missing_tokens(layout, padded)
    count_S1 = (layout.lengths_S[:, None] + missing_S1) * x_KGC.shape[-1]
    sum_SG = layout.sum_per_sample(x_KGC.sum(-1))
    if padded is not None:
        sum_SG = sum_SG + missing_S1 * padding_GC.sum(-1)
    mean_SG = sum_SG / count_S1
    x_KGC = x_KGC - layout.per_token(mean_SG)[..., None]
    squares_SG = layout.sum_per_sample(x_KGC.square().sum(-1))
    if padded is not None:
        squares_SG = squares_SG + missing_S1 * (padding_GC - mean_SG[..., None]).square().sum(-1)
    x_KGC = x_KGC * layout.per_token((squares_SG / count_S1 + epsilon).rsqrt())[..., None]
    return x_KGC.flatten(1)


class AttentionPooling(nn.Module):
    """The mean of each text's tokens, weighted by a learned softmax over the tokens, then normalised and projected.

    Args:
        padded: number of tokens per text, including zero padding, in the softmax; None for only real tokens.
    """

    def __init__(
        self, context_size: int, outputs: int, provider: LayerProvider, *, padded: Optional[int] = None
    ) -> None:
        super().__init__()
        self.padded = padded
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
        padding_score = None if self.padded is None else bias_11.float()
        max_S = score_K.new_full((layout.num_samples,), -torch.inf)
        if padding_score is not None:
            max_S = padding_score[0].detach().repeat(layout.num_samples)
        max_S = max_S.scatter_reduce(0, layout.segment_ids_T, score_K.detach(), "amax")
        weight_K1 = (score_K - max_S[layout.segment_ids_T]).exp()[:, None]
        total_S1 = layout.sum_per_sample(weight_K1)
        if padding_score is not None:
            total_S1 = total_S1 + missing_tokens(layout, self.padded) * (padding_score - max_S[:, None]).exp()
        pooled_SD = layout.sum_per_sample(weight_K1 * context_KD.float()) / total_S1
        return self.to_out(self.norm(pooled_SD.to(context_KD.dtype)))


class Caption(nn.Module):
    """Projects text embeddings to tokens for the attention of a UNet, and pools them to a conditioning vector.

    NeMo's Imagen pads texts with zeros and includes them in pooling and norm. `padded` accounts for this padding
    without computing it. Attention never reads padding.

    Args:
        pooling: `attention` pools the embeddings, `mean` averages the projected tokens.
        null_token: append a learned token to every text, so that attention can ignore the text.
        groups: groups of the norm of the tokens; None for no norm.
        padded: number of tokens per text, including padding, in pooling and norm; None for only real tokens.

    Source: Saharia et al. 2022 (Imagen), arXiv:2205.11487, section 2.4; NVIDIA NeMo's Imagen for the modules.
    """

    def __init__(
        self,
        context_size: int,
        condition_size: int,
        vector_size: int,
        provider: LayerProvider,
        *,
        pooling: TextPooling,
        null_token: bool,
        groups: Optional[int],
        padded: Optional[int],
    ) -> None:
        super().__init__()
        self.to_tokens = provider.replicated_linear(
            context_size, condition_size, bias=True, init=torch_init(context_size)
        )
        self.groups, self.padded, self.pooling = groups, padded, None
        if pooling == "attention":
            self.pooling = AttentionPooling(context_size, condition_size, provider, padded=padded)
        self.norm = LayerNorm(condition_size, provider, eps=1e-5)
        self.linear_1 = provider.replicated_linear(
            condition_size, vector_size, bias=True, init=torch_init(condition_size)
        )
        self.linear_2 = provider.replicated_linear(vector_size, vector_size, bias=True, init=torch_init(vector_size))
        self.null_token = provider.parameter((condition_size,), normal(1.0)) if null_token else None

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
        if self.pooling is not None:
            pooled_SD = self.pooling(context_KD, layout)
        else:
            pooled_SD = mean_of_texts(tokens_KD, layout, self.to_tokens.bias, self.padded).to(tokens_KD.dtype)
        vector_SE = self.linear_2(silu(self.linear_1(self.norm(pooled_SD))))
        padded = self.padded
        if self.null_token is not None:
            padded = None if padded is None else padded + 1
            ones = SequenceLayout.from_lengths([1] * layout.num_samples, device=layout.device)
            joint = joint_layout(layout, ones)
            tokens_KD, layout = joint.join(tokens_KD, self.null_token.expand(layout.num_samples, -1)), joint
        if self.groups is not None:
            tokens_KD = normalise_texts(tokens_KD, layout, self.groups, self.to_tokens.bias, padded)
        return tokens_KD, layout, vector_SE
