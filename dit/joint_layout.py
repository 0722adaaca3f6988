"""Text and image of a sample as one segment of attention: the layout of such a pack, and the way in and out of it.

Shape suffixes: K text rows, T image rows, J = K + T rows of the joint pack.
"""

from dataclasses import dataclass, field
from functools import lru_cache

import torch
from torch import Tensor

from dit.layout import SequenceLayout


@dataclass(frozen=True, kw_only=True)
class JointLayout(SequenceLayout):
    """A pack whose samples are a text, its image behind it, and then the padding of both.

    Under context parallelism every rank holds the texts whole and its own part of the images, and this describes the
    rows it holds.

    Attributes:
        text: the texts.
        image: the images of the whole pack.
        image_held: the image rows held here, as a pack of their own.
        order_J: where each joint row lies when all text rows come first and all image rows after them.
        inverse_J: the way back.
    """

    text: SequenceLayout
    image: SequenceLayout
    image_held: SequenceLayout
    order_J: Tensor = field(compare=False)
    inverse_J: Tensor = field(compare=False)

    @property
    def _dense(self) -> bool:
        return bool(self.text.uniform_length and self.image_held.uniform_length)

    def join(self, text_K: Tensor, image_T: Tensor) -> Tensor:
        """Bring text and image rows `[K, ...]`, `[T, ...]` into joint order `[J, ...]`."""
        if self._dense:
            parts = [x.unflatten(0, (self.num_samples, -1)) for x in (text_K, image_T)]
            return torch.cat(parts, 1).flatten(0, 1)
        return torch.cat([text_K, image_T])[self.order_J]

    def split(self, x_J: Tensor) -> tuple[Tensor, Tensor]:
        """Undo `join`."""
        if self._dense:
            x = x_J.unflatten(0, (self.num_samples, -1))
            length = self.text.lengths[0]
            return x[:, :length].flatten(0, 1), x[:, length:].flatten(0, 1)
        text, image = x_J[self.inverse_J].split([self.text.total_tokens, self.image_held.total_tokens])
        return text, image


def joint_layout(text: SequenceLayout, image: SequenceLayout) -> JointLayout:
    """Describe text and image of each sample as one segment; every layer of a step gets the same object.

    Args:
        text: all texts, whole.
        image: the images, or a context-parallel rank's part of them.
    """
    if image.rows is None:
        held = image
    else:
        assert image.held is not None, "image rows of a rank need a layout of their own"
        held = image.held
    whole = SequenceLayout(image.lengths, image.padded_lengths, image.total_tokens, image.device)
    return _joint_layout(text, whole, held)


@lru_cache(maxsize=16)
def _joint_layout(text: SequenceLayout, image: SequenceLayout, held: SequenceLayout) -> JointLayout:
    keys = []
    for part, layout in enumerate((text, held)):
        on_host = SequenceLayout(layout.lengths, layout.padded_lengths, layout.total_tokens)
        keys.append(3 * on_host.segment_ids_T + torch.where(on_host.valid_T, part, 2))
    order_J = torch.cat(keys).argsort(stable=True)
    return JointLayout(
        tuple(k + n for k, n in zip(text.lengths, held.lengths, strict=True)),
        tuple(k + n for k, n in zip(text.padded_lengths, held.padded_lengths)),
        text.total_tokens + held.total_tokens,
        held.device,
        text=text,
        image=image,
        image_held=held,
        order_J=order_J.to(held.device),
        inverse_J=order_J.argsort().to(held.device),
    )
