"""Pictures that a text encoder reads next to a caption, in the form that Qwen2.5-VL takes.

    picture -- scale to an area --> pixels -- image processor --> patches
    caption -- prompt --> ids with one mark for each picture --> ids with one mark for each of its tokens

Source: diffusers 0.38, `pipeline_qwenimage_edit.py` and `pipeline_qwenimage_edit_plus.py`.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dit.encoders.pretrained import load_without_code
from dit.encoders.prompts import PICTURE_MARK
from dit.errors import ConfigError
from dit.terminal import counted

if TYPE_CHECKING:
    from PIL.Image import Image

SIDE = 32
"""Sides of a scaled picture are multiples of this number."""


def scaled(picture: "Image", area: int) -> "Image":
    """Return a picture with about `area` pixels, of nearly the same shape."""
    from PIL import Image

    ratio = picture.width / picture.height
    width = math.sqrt(area * ratio)
    sides = (round(length / SIDE) * SIDE for length in (width, width / ratio))
    across, down = (max(SIDE, side) for side in sides)
    return picture.resize((across, down), Image.Resampling.LANCZOS)


class PictureReader:
    """Converts pictures to inputs of Qwen2.5-VL.

    Args:
        source: arguments of `from_pretrained` that locate `preprocessor_config.json`.
        mark: id of the token that stands for a picture.
    """

    def __init__(self, what: str, source: dict[str, Any], mark: int) -> None:
        from transformers import Qwen2VLImageProcessorPil

        self.what, self.mark = what, mark
        self._processor = load_without_code(Qwen2VLImageProcessorPil, f"the image processor of {what}", **source)

    def __call__(self, ids: Sequence[int], pictures: Sequence["Image"], area: int) -> dict[str, Tensor]:
        """Return the inputs of the network for one text with a mark for each picture, and its pictures."""
        if list(ids).count(self.mark) != len(pictures):
            raise ConfigError(
                f"{self.what}: a text has {counted(list(ids).count(self.mark), 'token')} {PICTURE_MARK} for "
                f"{counted(len(pictures), 'picture')}; use the tokenizer of the published model, and captions without "
                "this word"
            )
        pixels = self._processor(images=[scaled(picture, area) for picture in pictures], return_tensors="pt")
        tokens = iter((pixels["image_grid_thw"].prod(1) // self._processor.merge_size**2).tolist())
        ids_1K = torch.tensor([[x for i in ids for x in ([i] * next(tokens) if i == self.mark else [i])]])
        # The rotary positions of a picture's tokens follow its rows and columns.
        types_1K = (ids_1K == self.mark).int()
        return {"input_ids": ids_1K, "mm_token_type_ids": types_1K, **pixels}

    def save(self, folder: Path, tokenizer: Any) -> str:
        """Write the processor of a pipeline, which has a tokenizer, too; return its class."""
        self._processor.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        return "Qwen2VLProcessor"
