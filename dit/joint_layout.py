"""Layout of joint attention: text and image of a sample form one attention segment.

Shape suffixes: K text tokens, T image tokens, J = K + T tokens of the joint pack.
"""

from dataclasses import dataclass, field, replace
from typing import Optional

import torch
from torch import Tensor

from dit.layout import Levels, SequenceLayout, to_device


@dataclass(unsafe_hash=True, kw_only=True)
class JointLayout(SequenceLayout):
    """A pack in which each sample consists of its text, its image, and the padding of both.

    Two samples with texts p, q and images a, b (`.` is padding):

        text   p0 p1 q0 .       image  a0 a1 a2 .  b0 b1 b2 b3
        joint  p0 p1 a0 a1 a2 . | q0 b0 b1 b2 b3 .
               '- sample 0 --'    '- sample 1 -'

    Under context parallelism the texts are replicated and the images are split; this layout describes the text tokens
    and the local image tokens of one rank.

    Attributes:
        image: layout of the images of the global pack.
        local_image: layout of the local image tokens.
        order_J: for each joint token, its index in the concatenation of all text tokens and all image tokens, int64.
    """

    text: SequenceLayout
    image: SequenceLayout
    local_image: SequenceLayout
    order_J: Tensor = field(compare=False)
    inverse_J: Tensor = field(compare=False)

    @property
    def _dense(self) -> bool:
        return bool(self.text.uniform_length and self.local_image.uniform_length)

    def join(self, text_K: Tensor, image_T: Tensor) -> Tensor:
        """Interleave text tokens `[K, ...]` and image tokens `[T, ...]` by sample: `[J, ...]`."""
        if self._dense:
            parts = [x.unflatten(0, (self.num_samples, -1)) for x in (text_K, image_T)]
            return torch.cat(parts, 1).flatten(0, 1)
        return torch.cat([text_K, image_T])[self.order_J]

    def split(self, x_J: Tensor) -> tuple[Tensor, Tensor]:
        """Undo `join`: `[J, ...]` becomes text `[K, ...]` and image `[T, ...]`."""
        if self._dense:
            x = x_J.unflatten(0, (self.num_samples, -1))
            length = self.text.lengths[0]
            return x[:, :length].flatten(0, 1), x[:, length:].flatten(0, 1)
        text, image = x_J[self.inverse_J].split([self.text.total_tokens, self.local_image.total_tokens])
        return text, image


def joint_layout(text: SequenceLayout, image: SequenceLayout) -> JointLayout:
    """Return the joint layout of texts and images; cached, so that all layers of a step share one object.

    Args:
        text: all texts of the pack; if its samples have several noise levels, they are those of the images, and
            segments of the two with equal indices have equal levels.
        image: all images, or the local part of a context-parallel rank.
    """
    return text.table(_joint_layout, image)


def _joint_layout(text: SequenceLayout, image: SequenceLayout) -> JointLayout:
    local = image if image.local_indices is None else image.local
    assert local is not None, "sharded image tokens need a local layout"
    keys = []
    for part, layout in enumerate((text, local)):
        on_host = SequenceLayout(layout.lengths, layout.padded_lengths, layout.total_tokens)
        keys.append(3 * on_host.segment_ids_T + torch.where(on_host.valid_T, part, 2))
    order_J = torch.cat(keys).argsort(stable=True)
    sums = _sums(text, local)
    return JointLayout(
        sums.lengths,
        sums.padded_lengths,
        sums.total_tokens,
        local.device,
        levels=_joint_levels(text.levels, image.levels),
        is_fixed=text.is_fixed,
        text=text.plain,  # copies, because the tables of the text have the result
        image=image.plain,
        local_image=local.plain,
        order_J=to_device(order_J, local.device),
        inverse_J=to_device(order_J.argsort(), local.device),
    )


def _joint_levels(text: Optional[Levels], image: Optional[Levels]) -> Optional[Levels]:
    """Return the noise levels of a joint layout; the padding of a text belongs to the last segment of its sample."""
    if text is None or image is None:
        return None
    local = image.layout if image.layout.local_indices is None else image.layout.local
    assert local is not None
    return replace(image, layout=_sums(text.layout, local))


def _sums(text: SequenceLayout, image: SequenceLayout) -> SequenceLayout:
    """Return a layout with the tokens of both for each sample, or for each segment."""
    return SequenceLayout(
        tuple(k + n for k, n in zip(text.lengths, image.lengths, strict=True)),
        tuple(k + n for k, n in zip(text.padded_lengths, image.padded_lengths)),
        text.total_tokens + image.total_tokens,
        image.device,
    )
