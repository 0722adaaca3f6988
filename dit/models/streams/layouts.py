"""Layouts of text and image, with the learned tokens that extend both to multiples of a number.

Two samples with a text of 3 and 4 tokens, an image of 6 and 8 tokens, extended to multiples of 4 (`+` is learned):

    texts    p p p + | q q q q                 image    + + a a a a a a | b b b b b b b b
    single   p p p + + + a a a a a a | q q q q b b b b b b b b

In two streams, the learned tokens of an image precede it. In one stream they follow the text. Under context parallelism
they are replicated, like the text.

Source: `transformer_z_image.py` of diffusers.
"""

from dataclasses import dataclass
from typing import Optional

import torch
from torch import Tensor
from torch.nn.functional import pad

from dit.backends.provider import LayerProvider
from dit.joint_layout import JointLayout, joint_layout
from dit.layers.tokens import pad_tokens
from dit.layout import SequenceLayout, to_device
from dit.levels import at_text_level


@dataclass(frozen=True)
class StreamLayouts:
    """Layouts of the tokens of all tensor-parallel ranks.

    Attributes:
        given: layout of the texts in the batch.
        texts: layout of the extended texts.
        image: layout of the extended image.
        streams: joint layout of these.
        padding: layout of the learned tokens of the image; None for none.
        single: layout in one stream.
        sources_K: index of each extended text token in the batch, -1 for learned tokens; None for none.
    """

    given: SequenceLayout
    texts: SequenceLayout
    image: SequenceLayout
    streams: JointLayout
    padding: Optional[SequenceLayout]
    single: JointLayout
    sources_K: Optional[Tensor]

    @classmethod
    def of(
        cls, given: SequenceLayout, image: SequenceLayout, multiple: int, provider: LayerProvider
    ) -> "StreamLayouts":
        """Return the layouts of texts and images that are extended to multiples of `multiple`.

        Learned tokens have the noise level of the text (`with_text_level`).
        """
        extended_texts = given if multiple == 1 else given.table(_extended, multiple)
        sources_K = None if multiple == 1 else extended_texts.table(_sources, given)
        texts = at_text_level(pad_tokens(extended_texts, provider), image.levels)
        missing = None if multiple == 1 else image.table(_missing, multiple)
        if missing is None or not missing.total_tokens:
            joint = joint_layout(texts, image)
            return cls(given, texts, image, joint, None, joint, sources_K)
        padding = at_text_level(pad_tokens(missing, provider), image.levels)
        extended = joint_layout(padding, image)
        single = joint_layout(joint_layout(texts, padding), image)
        return cls(given, texts, extended, joint_layout(texts, extended), padding, single, sources_K)

    def extend_texts(self, x_K: Tensor) -> Tensor:
        """Insert zeros for the learned tokens of texts, and for padding."""
        if self.sources_K is not None:
            x_K = x_K.index_select(0, self.sources_K.clamp(min=0)).masked_fill(self.sources_K[:, None] < 0, 0)
        return pad(x_K, (0, 0) * (x_K.dim() - 1) + (0, self.texts.total_tokens - len(x_K)))

    def extend_image(self, x_T: Tensor, learned: Tensor) -> Tensor:
        """Insert the learned token of the image, or its position, in all places."""
        if self.padding is None or not isinstance(self.image, JointLayout):
            return x_T
        return self.image.join(learned.expand(self.padding.total_tokens, -1), x_T)

    def to_single(self, text_K: Tensor, x_T: Tensor) -> Tensor:
        """Return the tokens of two streams, or their positions, as one stream."""
        if self.padding is not None and isinstance(self.image, JointLayout):
            learned, x_T = self.image.split(x_T)
            text_K = joint_layout(self.texts, self.padding).join(text_K, learned)
        return self.single.join(text_K, x_T)


def _extended(texts: SequenceLayout, multiple: int) -> SequenceLayout:
    """Return the layout of the extended texts."""
    lengths = tuple(length + -length % multiple for length in texts.lengths)
    most = texts.total_tokens + texts.num_samples * (multiple - 1)
    return _layout(texts, lengths, most - most % multiple)


def _missing(image: SequenceLayout, multiple: int) -> SequenceLayout:
    """Return the layout of the learned tokens of images; a sample may have none."""
    lengths = tuple(-length % multiple for length in image.lengths)
    most = image.num_samples * (multiple - 1)
    return _layout(image, lengths, most + -(image.total_tokens + most) % multiple)


def _layout(packed: SequenceLayout, lengths: tuple[int, ...], most: int) -> SequenceLayout:
    """Return the layout of samples next to those of a pack, with `most` tokens if the pack has a fixed size."""
    is_fixed = packed.is_fixed
    return SequenceLayout(lengths, lengths, most if is_fixed else sum(lengths), packed.device, is_fixed=is_fixed)


def _sources(texts: SequenceLayout, given: SequenceLayout) -> Tensor:
    """Return for each token of the extended texts its index in the given ones, int64 `[K]`; -1 for learned tokens."""
    sources = torch.full((texts.total_tokens,), -1)
    for start, first, length in zip(texts.starts, given.starts, given.lengths):
        sources[start : start + length] = torch.arange(first, first + length)
    return to_device(sources, texts.device)
