"""Text tokens for cross-attention, or as a separate token stream.

Shape suffixes: K text tokens of the pack, D width.
"""

from collections import OrderedDict
from typing import Optional

import torch
from torch import Tensor, nn

from dit.backends.init import Init, normal, xavier_uniform
from dit.backends.provider import LayerProvider
from dit.backends.sharding import GradientCovers, replicate_on_all_stages
from dit.batch import PackedBatch
from dit.condition_table import CONTEXT
from dit.layers.adaln import RMSNorm
from dit.layout import SequenceLayout


def text_layout(batch: PackedBatch, condition: str = CONTEXT.name, *, missing: int = 1) -> SequenceLayout:
    """Return the layout of a text condition; without the condition, `missing` tokens per sample."""
    layout = batch.conditions.layout(condition)
    if layout is not None:
        return layout
    return SequenceLayout.from_lengths(
        [missing] * batch.layout.num_samples, device=batch.layout.device, may_be_empty=True
    )


class TextTokens(nn.Module):
    """Text embeddings, in which a learned null token replaces dropped or missing texts.

    The null token replaces every token of a dropped text. Attention over equal tokens returns the value of that token,
    so the result equals that of a one-token null text. Lengths and shapes do not depend on which texts are dropped,
    which avoids a host sync.

    Args:
        condition: name of the text condition, for a model with several.
        stream: whether the text passes through the layers like the image. Then its tokens are split under sequence
            parallelism, and only the first pipeline stage uses this module. Otherwise every layer reads these tokens.
        learned_null: whether to learn a null token. False for a condition that is always present and whose values
            already contain its null for dropped texts.
        optional: a missing text has no tokens instead of a null token.
    """

    def __init__(
        self,
        context_size: int,
        provider: LayerProvider,
        *,
        condition: str = CONTEXT.name,
        stream: bool = False,
        learned_null: bool = True,
        optional: bool = False,
    ) -> None:
        super().__init__()
        self.condition, self.dtype, self.missing = condition, provider.config.params_dtype, 0 if optional else 1
        self.context_size = context_size
        self.null: Optional[nn.Parameter] = None
        if not learned_null or optional:
            return
        # The text is replicated over tensor-parallel ranks, and the key and value projections sum its gradient.
        covers: GradientCovers = "sequence_shard" if stream else "all_tokens"
        self.null = provider.parameter((context_size,), normal(0.02), gradient_covers=covers)
        if not stream:
            replicate_on_all_stages([self.null])  # each stage reads it in its own layers

    def forward(self, batch: PackedBatch) -> tuple[Tensor, SequenceLayout]:
        """Return the text tokens `[K, context_size]` and their layout."""
        text, layout = batch.conditions.get(self.condition), text_layout(batch, self.condition, missing=self.missing)
        if text is None and self.missing == 0:
            return torch.zeros(0, self.context_size, dtype=self.dtype, device=batch.layout.device), layout
        if text is None:
            assert self.null is not None  # otherwise every pack has the text
            return self.null.expand(layout.num_samples, -1), layout
        context_KD = text.values.to(self.dtype)
        if layout.has_padding:
            # The gradient of padding is 0, but a NaN in padding would reach the weights' gradients as 0 * NaN.
            context_KD = context_KD.masked_fill(~layout.valid_T[:, None], 0.0)
        if text.dropped_S is not None and self.null is not None:
            context_KD = torch.where(layout.per_token(text.dropped_S), self.null, context_KD)
        return context_KD, layout


def text_projection(
    context_size: int, hidden_size: int, provider: LayerProvider, *, norm_eps: Optional[float] = None
) -> nn.Sequential:
    """Return Linear, tanh-GELU, Linear on every text token, once for all layers.

    Like the null token, it is replicated over tensor-parallel ranks and pipeline stages.

    Args:
        norm_eps: epsilon of an RMSNorm after them, whose weights start at 0.01; None for no norm.

    Source: the caption embedder of Chen et al. 2023 (PixArt-alpha), arXiv:2310.00426; the norm is that of SANA.
    """
    covers: GradientCovers = "all_tokens"
    linear_1, linear_2 = (
        provider.replicated_linear(
            size, hidden_size, bias=True, init=xavier_uniform(size, hidden_size), gradient_covers=covers
        )
        for size in (context_size, hidden_size)
    )
    layers: OrderedDict[str, nn.Module] = OrderedDict(
        linear_1=linear_1, gelu=nn.GELU(approximate="tanh"), linear_2=linear_2
    )
    if norm_eps is not None:
        start = Init("constant", 0.01)
        layers["norm"] = RMSNorm(hidden_size, provider, eps=norm_eps, gradient_covers=covers, init=start)
    projection = nn.Sequential(layers)
    replicate_on_all_stages(projection.parameters())
    return projection
