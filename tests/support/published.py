"""Small diffusers networks with random weights, saved in the format of `save_pretrained`."""

from pathlib import Path

import torch
from diffusers.models.modeling_utils import ModelMixin
from diffusers.models.transformers.dit_transformer_2d import DiTTransformer2DModel
from diffusers.models.transformers.pixart_transformer_2d import PixArtTransformer2DModel
from diffusers.models.transformers.sana_transformer import SanaTransformer2DModel
from diffusers.models.transformers.transformer_chroma import ChromaTransformer2DModel
from diffusers.models.transformers.transformer_flux import FluxTransformer2DModel
from diffusers.models.transformers.transformer_flux2 import Flux2Transformer2DModel
from diffusers.models.transformers.transformer_hunyuan_video15 import HunyuanVideo15Transformer3DModel
from diffusers.models.transformers.transformer_lumina2 import Lumina2Transformer2DModel
from diffusers.models.transformers.transformer_prx import PRXTransformer2DModel
from diffusers.models.transformers.transformer_qwenimage import QwenImageTransformer2DModel
from diffusers.models.transformers.transformer_sd3 import SD3Transformer2DModel
from diffusers.models.transformers.transformer_wan import WanTransformer3DModel
from diffusers.models.transformers.transformer_z_image import ZImageTransformer2DModel
from diffusers.models.unets.unet_2d_condition import UNet2DConditionModel

from dit.convert.diffusers_unet import DiffusersUNet
from dit.models.ldm_unet.config import LDMUNetConfig
from tests.parity.convert_cases import random_weights

UNET = LDMUNetConfig(
    block_out_channels=[8, 16],
    transformer_layers=[0, 1],
    layers_per_block=1,
    num_attention_heads=2,
    norm_num_groups=4,
    context_size=10,
    null_text="empty",
)
FLUX = {"num_layers": 2, "num_single_layers": 2, "attention_head_dim": 16, "num_attention_heads": 4, "in_channels": 16}
PIXART = {"num_attention_heads": 4, "attention_head_dim": 12, "num_layers": 2, "cross_attention_dim": 48}
SD3 = {
    **{"num_layers": 2, "attention_head_dim": 12, "num_attention_heads": 4, "in_channels": 4, "out_channels": 4},
    **{"caption_projection_dim": 48, "pooled_projection_dim": 12, "sample_size": 16, "pos_embed_max_size": 24},
}
NETWORKS = {
    "flux": lambda: FluxTransformer2DModel(
        **FLUX, joint_attention_dim=20, pooled_projection_dim=12, axes_dims_rope=(4, 6, 6), guidance_embeds=True
    ),
    "chroma": lambda: ChromaTransformer2DModel(
        **FLUX,
        joint_attention_dim=20,
        axes_dims_rope=(4, 6, 6),
        approximator_num_channels=16,
        approximator_hidden_dim=24,
        approximator_layers=2,
    ),
    "flux2": lambda: Flux2Transformer2DModel(
        **FLUX, joint_attention_dim=20, axes_dims_rope=(4, 4, 4, 4), guidance_embeds=False
    ),
    "qwen_image": lambda: QwenImageTransformer2DModel(
        **{"num_layers": 2, "attention_head_dim": 16, "num_attention_heads": 4, "in_channels": 16, "out_channels": 4},
        **{"joint_attention_dim": 20, "axes_dims_rope": (4, 6, 6)},
    ),
    "z_image": lambda: ZImageTransformer2DModel(
        **{"dim": 64, "n_layers": 2, "n_refiner_layers": 2, "n_heads": 4, "n_kv_heads": 4, "in_channels": 4},
        **{"axes_dims": (4, 8, 4), "cap_feat_dim": 20},
    ),
    "lumina2": lambda: Lumina2Transformer2DModel(
        **{"hidden_size": 64, "num_layers": 2, "num_refiner_layers": 2, "num_attention_heads": 4, "num_kv_heads": 2},
        **{"in_channels": 4, "axes_dim_rope": (4, 8, 4), "cap_feat_dim": 20, "sample_size": 16},
    ),
    "sana": lambda: SanaTransformer2DModel(
        num_attention_heads=4,
        attention_head_dim=12,
        num_cross_attention_heads=2,
        cross_attention_head_dim=24,
        cross_attention_dim=48,
        in_channels=4,
        out_channels=4,
        caption_channels=20,
        num_layers=2,
        sample_size=8,
    ),
    "prx": lambda: PRXTransformer2DModel(
        in_channels=4, context_in_dim=20, hidden_size=48, num_heads=4, depth=2, axes_dim=[6, 6]
    ),
    "hunyuan_video": lambda: HunyuanVideo15Transformer3DModel(
        **{"in_channels": 9, "out_channels": 4, "num_attention_heads": 4, "attention_head_dim": 12, "num_layers": 2},
        **{"text_embed_dim": 20, "text_embed_2_dim": 10, "image_embed_dim": 6, "rope_axes_dim": [4, 4, 4]},
        task_type="t2v",
    ),
    "wan": lambda: WanTransformer3DModel(
        num_attention_heads=4,
        attention_head_dim=12,
        in_channels=4,
        out_channels=4,
        text_dim=20,
        ffn_dim=64,
        num_layers=2,
    ),
    "pixart": lambda: PixArtTransformer2DModel(**PIXART, out_channels=8, sample_size=8, caption_channels=20),
    "sd3": lambda: SD3Transformer2DModel(**SD3, joint_attention_dim=20, dual_attention_layers=(0,), qk_norm="rms_norm"),
    "dit": lambda: DiTTransformer2DModel(
        num_attention_heads=4, attention_head_dim=12, num_layers=2, sample_size=8, num_embeds_ada_norm=7
    ),
    "unet": lambda: UNet2DConditionModel.from_config(DiffusersUNet().write_settings(UNET, (1, 8, 8))[0]),
}


def save_network(
    name: str, folder: Path, dtype: torch.dtype = torch.float32, max_shard_size: str = "60KB"
) -> ModelMixin:
    """Save a network with random weights in shards, and return it."""
    network = NETWORKS[name]()
    stored = {key: x for key, x in network.state_dict().items() if key != "pos_embed.pos_embed"}
    weights = random_weights({key: tuple(x.shape) for key, x in stored.items()}, seed=len(name))
    if name == "dit":  # every block has the same embedders
        weights = {
            key: weights[key.replace(f"blocks.{key.split('.')[1]}.norm1.emb", "blocks.0.norm1.emb")] for key in weights
        }
    network.load_state_dict(weights, strict=False)
    network.to(dtype).save_pretrained(folder, max_shard_size=max_shard_size)
    return network
