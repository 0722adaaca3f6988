"""HunyuanVideo 1.5: the joint blocks of `dit.models.streams` with three conditions as the text stream."""

import torch
from torch import Tensor
from torch.nn.functional import pad

from dit.backends.init import normal
from dit.backends.provider import LayerProvider
from dit.batch import PackedBatch
from dit.condition_table import CONTEXT_2, FIRST_FRAMES, IMAGE_TOKENS
from dit.joint_layout import joint_layout
from dit.kernels.attention import Attention
from dit.layers.text import TextTokens, text_layout
from dit.layers.tokens import pad_tokens, shard_tokens, unshard_tokens
from dit.layout import SequenceLayout
from dit.models.base import Stage
from dit.models.hunyuan_video.config import HunyuanVideoConfig
from dit.models.hunyuan_video.layer import GlyphProjection, ImageProjection, TextRefiner
from dit.models.streams.layouts import StreamLayouts
from dit.models.streams.model import Streams


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
        self.refiner = TextRefiner(config, provider, attention)
        self.glyph_tokens = TextTokens(config.glyph_size, provider, condition=CONTEXT_2.name, optional=True)
        self.glyph = GlyphProjection(config, provider)
        self.image_tokens = TextTokens(config.image_context_size, provider, condition=IMAGE_TOKENS.name, optional=True)
        self.image = ImageProjection(config, provider)
        self.kinds = provider.parameter((3, config.hidden_size), normal(0.02))

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
