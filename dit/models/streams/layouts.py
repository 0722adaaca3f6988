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

from torch import Tensor
from torch.nn.functional import pad

from dit.backends.provider import LayerProvider
from dit.joint_layout import JointLayout, joint_layout
from dit.layers.tokens import pad_tokens
from dit.layout import SequenceLayout
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
        extended: joint layout of the texts in the batch and their learned tokens; None for none.
    """

    given: SequenceLayout
    texts: SequenceLayout
    image: SequenceLayout
    streams: JointLayout
    padding: Optional[SequenceLayout]
    single: JointLayout
    extended: Optional[JointLayout]

    @classmethod
    def of(
        cls, given: SequenceLayout, image: SequenceLayout, multiple: int, provider: LayerProvider
    ) -> "StreamLayouts":
        """Return the layouts of texts and images that are extended to multiples of `multiple`.

        Learned tokens have the noise level of the text (`with_text_level`).
        """
        extended = None if multiple == 1 else joint_layout(given, given.table(_missing, multiple))
        packed = given if extended is None else extended.table(_plain)  # attention splits the image of a joint layout
        texts = at_text_level(pad_tokens(packed, provider), image.levels)
        missing = None if multiple == 1 else image.table(_missing, multiple)
        if missing is None or not missing.total_tokens:
            joint = joint_layout(texts, image)
            return cls(given, texts, image, joint, None, joint, extended)
        padding = at_text_level(pad_tokens(missing, provider), image.levels)
        images = joint_layout(padding, image)
        single = joint_layout(joint_layout(texts, padding), image)
        return cls(given, texts, images, joint_layout(texts, images), padding, single, extended)

    def extend_texts(self, x_K: Tensor) -> Tensor:
        """Insert zeros for the learned tokens of texts, and for padding."""
        if self.extended is not None:
            x_K = self.extended.join(x_K, x_K.new_zeros(self.extended.image.total_tokens, *x_K.shape[1:]))
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


def _plain(joint: SequenceLayout) -> SequenceLayout:
    return joint.plain


def _missing(layout: SequenceLayout, multiple: int) -> SequenceLayout:
    """Return the layout of the learned tokens of texts or images; a sample may have none."""
    lengths, is_fixed = tuple(-length % multiple for length in layout.lengths), layout.is_fixed
    most = layout.num_samples * (multiple - 1)
    most += -(layout.total_tokens + most) % multiple
    return SequenceLayout(lengths, lengths, most if is_fixed else sum(lengths), layout.device, is_fixed=is_fixed)
