"""HunyuanVideo 1.5: the joint blocks of `dit.models.streams` with three conditions as the text stream."""

from collections import OrderedDict
from collections.abc import Sequence
from itertools import pairwise
from typing import Optional

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from dit.backends.init import ZEROS, normal, xavier_uniform
from dit.backends.pending_bias import PendingBias
from dit.backends.provider import LayerProvider
from dit.batch import PackedBatch
from dit.condition_table import CONTEXT_2, FIRST_FRAMES, IMAGE_TOKENS
from dit.joint_layout import joint_layout
from dit.kernels.attention import Attention
from dit.layers.adaln import LayerNorm
from dit.layers.attention import SelfAttention
from dit.layers.embeddings import TimestepEmbedder, mean_of_texts
from dit.layers.mlp import MLP
from dit.layers.text import TextTokens, text_layout
from dit.layers.tokens import pad_tokens, shard_tokens, unshard_tokens
from dit.layout import SequenceLayout
from dit.models.base import Stage
from dit.models.hunyuan_video.config import HunyuanVideoConfig
from dit.models.streams.layouts import StreamLayouts
from dit.models.streams.model import Streams

MLP_RATIO = 4  # fixed in the published code
PROJECTION_EPSILON = 1e-5


def _linear(provider: LayerProvider, inputs: int, outputs: int) -> nn.Linear:
    return provider.replicated_linear(inputs, outputs, bias=True, init=xavier_uniform(inputs, outputs))


class SiLUMLP(MLP):
    """Linear, SiLU, Linear."""

    def forward(self, x_TD: Tensor, layout: Optional[SequenceLayout] = None) -> PendingBias:
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
        self.time = TimestepEmbedder(size, provider, time_scale=config.time_scale)
        self.linear_1 = _linear(provider, config.text_size(), size)
        self.linear_2 = _linear(provider, size, size)
        self.layers = nn.ModuleList(
            TextRefinerBlock(config, provider, attention) for _ in range(config.num_refiner_layers)
        )

    def condition(self, time_S: Tensor, context_KC: Tensor, layout: SequenceLayout) -> Tensor:
        """Return the conditioning vector of each sample, from texts that are not split over ranks."""
        mean_SC = mean_of_texts(context_KC, layout)
        pooled_SD = self.linear_1(mean_SC.to(context_KC.dtype))
        return self.time(time_S) + self.linear_2(nn.functional.silu(pooled_SD))

    def forward(self, x_KD: Tensor, cond_SD: Tensor, layout: SequenceLayout) -> Tensor:
        for layer in self.layers:
            x_KD = layer(x_KD, cond_SD, layout)
        return x_KD


def _projection(provider: LayerProvider, sizes: Sequence[int], norm_in: str, norm_out: Optional[str]) -> nn.Sequential:
    """Return LayerNorm, linear layers with GELU between them, and a second LayerNorm if it has a name.

    Source: `HunyuanVideo15ByT5TextProjection` and `HunyuanVideo15ImageProjection` of diffusers.
    """
    layers: dict[str, nn.Module] = {norm_in: LayerNorm(sizes[0], provider, eps=PROJECTION_EPSILON)}
    for i, (inputs, outputs) in enumerate(pairwise(sizes), 1):
        layers |= {f"gelu_{i}": nn.GELU()} if i > 1 else {}
        layers[f"linear_{i}"] = _linear(provider, inputs, outputs)
    if norm_out is not None:
        layers[norm_out] = LayerNorm(sizes[-1], provider, eps=PROJECTION_EPSILON)
    return nn.Sequential(OrderedDict(layers))


class HunyuanVideo(Streams):
    """Joint attention over a clip and, for each sample, tokens of a picture, a shown text and a refined text.

        picture p p | -        shown text g | h h        text t t t | u        stream p p g t t t | h h u

    diffusers pads each condition, and then moves valid tokens to the front in this order. Packs have no padding to
    mask: a sample without a picture or a shown text has no tokens of it. Each kind has a learned vector, which is
    added to its tokens.

    The first pipeline stage embeds the conditions. The refiner is split over tensor-parallel ranks; the projections of
    the other two are replicated, and each rank keeps its shard of the stream.

    Source: HunyuanVideo 1.5 Team 2025, arXiv:2511.18870; diffusers 0.38, `transformer_hunyuan_video15.py`.
    """

    def __init__(self, config: HunyuanVideoConfig, provider: LayerProvider, attention: Attention, stage: Stage) -> None:
        super().__init__(config, provider, attention, stage)
        if not stage.first:
            return
        size, inner, picture = config.hidden_size, config.glyph_hidden_size, config.image_context_size
        self.refiner = TextRefiner(config, provider, attention)
        self.glyph_tokens = TextTokens(config.glyph_size, provider, condition=CONTEXT_2.name, optional=True)
        self.glyph = _projection(provider, [config.glyph_size, inner, inner, size], "norm", None)
        self.image_tokens = TextTokens(picture, provider, condition=IMAGE_TOKENS.name, optional=True)
        self.image = _projection(provider, [picture, picture, size], "norm_in", "norm_out")
        self.kinds = provider.parameter((3, size), normal(0.02))

    def text_layout(self, batch: PackedBatch) -> SequenceLayout:
        image, glyph = (text_layout(batch, condition.name, missing=0) for condition in (IMAGE_TOKENS, CONTEXT_2))
        return joint_layout(joint_layout(image, glyph), text_layout(batch))

    def embed_texts(self, time_S: Tensor, batch: PackedBatch, layouts: StreamLayouts) -> Tensor:
        text_kind, glyph_kind, image_kind = self.kinds.unbind()
        context_KC, layout = self.text(batch)
        cond_SD = self.refiner.condition(time_S, context_KC, layout)
        padded = pad_tokens(layout, self.provider)
        rows_KC = pad(context_KC, (0, 0, 0, padded.total_tokens - len(context_KC)))
        local, (rows_KC,) = shard_tokens(padded, self.provider, rows_KC)
        text_KD = self.refiner(self.embed_text(self.text_norm(rows_KC)), cond_SD, local)
        text_KD = unshard_tokens(text_KD, self.provider)[: len(context_KC)] + text_kind
        (glyph_KC, glyphs), (image_KC, images) = self.glyph_tokens(batch), self.image_tokens(batch)
        others = joint_layout(images, glyphs)
        others_KD = others.join(self.image(image_KC) + image_kind, self.glyph(glyph_KC) + glyph_kind)
        stream_KD = layouts.extend_texts(joint_layout(others, layout).join(others_KD, text_KD))
        return shard_tokens(layouts.texts, self.provider, stream_KD)[1][0]

    def embed_image(
        self, inputs_TC: Tensor, positions_T3: Tensor, batch: PackedBatch, layouts: StreamLayouts
    ) -> Tensor:
        channels = self.model_config.in_channels
        first = batch.conditions.get(FIRST_FRAMES.name)
        x_TPC = inputs_TC.unflatten(1, (-1, channels))
        first_TPC = x_TPC.new_zeros(*x_TPC.shape[:2], channels + 1)
        if first is not None:
            first_TPC = first.values.to(x_TPC.dtype).view(first_TPC.shape)
        return super().embed_image(torch.cat([x_TPC, first_TPC], -1).flatten(1), positions_T3, batch, layouts)
