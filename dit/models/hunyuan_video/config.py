"""Sizes of HunyuanVideo 1.5."""

from dataclasses import dataclass, replace
from typing import Optional

import torch
from torch import Tensor

from dit.condition_table import CONTEXT_2, FIRST_FRAMES, IMAGE_TOKENS
from dit.conditions import Condition
from dit.models.streams.config import StreamsConfig
from dit.ranges import LAYERS_OR_ZERO, WIDTH, ranged


def first_frame_and_mask(latent: Tensor) -> Tensor:
    """Return a latent `[C, T, H, W]` with zeros after its first frame, and the mask of that frame: `[C + 1, T, H, W]`.

    Source: `prepare_cond_latents_and_mask` of diffusers' image-to-video pipeline.
    """
    clip = torch.nn.functional.pad(latent, (0, 0, 0, 0, 0, 0, 0, 1), value=1.0)
    return torch.cat([clip[:, :1], torch.zeros_like(clip[:, 1:])], 1)


@dataclass(kw_only=True)
class HunyuanVideoConfig(StreamsConfig):
    """HunyuanVideo 1.5: joint blocks; the text stream has three conditions. The defaults are the 8.3B model.

    Texts are hidden states of Qwen2.5-VL, which refiner blocks process first. Tokens of a text that the clip shows
    (`context_2`, of byT5) and of a picture (`image_tokens`, of SigLIP) are optional: a sample may have none. Guidance
    removes the shown text and keeps the picture, as the pipelines. The last block computes a text that nothing reads,
    as in the published model, so the weights for it have no gradient.

    Attributes:
        num_refiner_layers: blocks of the text before it joins the other two.
        glyph_size, glyph_hidden_size: width of the embeddings of the shown text, and inner width of their projection.
        image_context_size: width of the tokens of a picture.
        image_to_video: input of the clean first frame and its mask (`first_frames`), otherwise zeros.

    Source: HunyuanVideo 1.5 Team 2025, arXiv:2511.18870; diffusers 0.38, `transformer_hunyuan_video15.py`.
    """

    in_channels: int = 32
    patch_spatial: int = 1
    context_size: Optional[int] = 3584
    hidden_size: int = 2048
    num_attention_heads: int = 16
    num_joint_layers: int = 54
    num_single_layers: int = 0
    rope_theta: float = 256.0
    num_refiner_layers: int = ranged(2, LAYERS_OR_ZERO)
    glyph_size: int = ranged(1472, WIDTH)
    glyph_hidden_size: int = ranged(2048, WIDTH)
    image_context_size: int = ranged(1152, WIDTH)
    image_to_video: bool = False

    @property
    def input_features(self) -> int:
        """Input features per token: the noised latent, the clean first frame and its mask."""
        return self.token_channels // self.in_channels * (2 * self.in_channels + 1)

    def conditions(self) -> tuple[Condition, ...]:
        glyph = replace(CONTEXT_2, shape=(self.glyph_size,), description="shown text", default=0.0, dropout=0.0)
        image = replace(IMAGE_TOKENS, shape=(self.image_context_size,))
        conditions = (*super().conditions(), glyph, image)
        if not self.image_to_video:
            return conditions
        return (*conditions, replace(FIRST_FRAMES, shape=(self.in_channels + 1,), derive=first_frame_and_mask))
