"""HunyuanVideo 1.5: flow matching on clips with a text, an optional shown text and an optional picture.

A sample needs a text. Tokens of a shown text (`text_2.npy`, byT5) and of a picture (`image_tokens.npy`, SigLIP) are
optional. `model.image_to_video=True` also gives the network the first frame of each clip.
"""

import nemo_run as run

from dit.models.base import ModelConfig
from dit.models.hunyuan_video.config import HunyuanVideoConfig
from energon_data.dataset import EnergonData
from recipes.base import part, registered
from recipes.dit import flow_conditional, in_seconds, on_tensor_parallel, with_fsdp

CLIP_TOKENS = 49_290
"""Of a latent of 31 x 30 x 53: 121 frames of 848 x 480 through an autoencoder of 4 x 16 x 16."""


hunyuan_video_8b = part(ModelConfig, "hunyuan_video_8b", HunyuanVideoConfig, num_joint_layers=54)
"""HunyuanVideo 1.5 (8.33 B): 54 joint blocks of width 2048, 16 heads; 32 latent channels, text of 3584."""


def _hunyuan(model: run.Config[ModelConfig]) -> run.Partial:
    """Return flow matching with times moved towards noise; one text in ten is dropped, this project's choice."""
    return flow_conditional(model, guidance_scale=6.0, time_shift=5.0)


@registered
def tiny_hunyuan_video() -> run.Partial:
    """2-layer HunyuanVideo of width 64, clips from a text and their first frame: any machine.

    Packs of 128 tokens, 20 steps; half of the samples have a shown text and a picture. The loss falls by a tenth or
    more.
    """
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_joint_layers": 2, "rope_axes": [4, 6, 6]}
    widths = {"context_size": 32, "glyph_size": 24, "glyph_hidden_size": 32, "image_context_size": 16}
    model = run.Config(HunyuanVideoConfig, in_channels=4, patch_spatial=2, image_to_video=True, **sizes, **widths)
    return in_seconds(_hunyuan(model))


@registered
def hunyuan_video_480p() -> run.Partial:
    """HunyuanVideo 1.5 (8.33 B) on clips of up to 121 frames of 848 x 480, TP 2 + SP, CP 4, FSDP: 16 x 80 GB.

    A clip has 49,290 tokens. `--dryrun` estimates 43 GiB on each GPU. The published 720p models have a time shift of 9.
    """
    recipe = with_fsdp(on_tensor_parallel(_hunyuan(hunyuan_video_8b()), 2))
    recipe.parallel.context_parallel_size = 4
    recipe.data = run.Config(
        EnergonData, path="data/latents_480p_hunyuan_video", max_tokens_per_sample=CLIP_TOKENS, bucket_by_shape=True
    )
    recipe.training.global_batch_size = 16
    return recipe
