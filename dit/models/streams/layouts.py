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

from dit.backends.provider import LayerProvider
from dit.joint_layout import JointLayout, joint_layout
from dit.layers.tokens import pad_tokens
from dit.layout import SequenceLayout


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
    """

    given: SequenceLayout
    texts: SequenceLayout
    image: SequenceLayout
    streams: JointLayout
    padding: Optional[SequenceLayout]
    single: JointLayout

    @classmethod
    def of(
        cls, given: SequenceLayout, image: SequenceLayout, multiple: int, provider: LayerProvider
    ) -> "StreamLayouts":
        """Return the layouts of texts and images that are extended to multiples of `multiple`."""
        texts = pad_tokens(given if multiple == 1 else given.table(_extended, multiple), provider)
        missing = () if multiple == 1 else tuple(-length % multiple for length in image.lengths)
        if not any(missing):
            joint = joint_layout(texts, image)
            return cls(given, texts, image, joint, None, joint)
        # A sample may have none.
        padding = pad_tokens(SequenceLayout(missing, missing, sum(missing), image.device), provider)
        extended = joint_layout(padding, image)
        single = joint_layout(joint_layout(texts, padding), image)
        return cls(given, texts, extended, joint_layout(texts, extended), padding, single)

    def extend_texts(self, x_K: Tensor) -> Tensor:
        """Insert zeros for the learned tokens of texts, and for padding."""
        if self.texts.padded_lengths == self.given.padded_lengths:
            return torch.cat([x_K, x_K.new_zeros(self.texts.total_tokens - len(x_K), *x_K.shape[1:])])
        texts = SequenceLayout(self.given.lengths, self.texts.padded_lengths, self.texts.total_tokens, x_K.device)
        return texts.insert_padding(self.given.without_padding(x_K))

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
    lengths = [length + -length % multiple for length in texts.lengths]
    return SequenceLayout.from_lengths(lengths, device=texts.device)
